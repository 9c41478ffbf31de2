// Arithmetic that compiled kernels call.
#include <cstdint>
#include <cstring>

#include "executor.h"
#include "kernel_abi.h"

extern "C" {

VMPS_API void vmps_multiply_accumulate_8x8(float* d, const float* a, const float* b, const float* c) {
  typedef float row8 __attribute__((ext_vector_type(8), aligned(4)));
  row8 right[8], sum[8];
  for (int r = 0; r < 8; r++) {
    right[r] = *reinterpret_cast<const row8*>(b + r * 8);
    sum[r] = *reinterpret_cast<const row8*>(c + r * 8);
  }
  for (int k = 0; k < 8; k++)
    for (int r = 0; r < 8; r++) sum[r] += a[r * 8 + k] * right[k];
  for (int r = 0; r < 8; r++) *reinterpret_cast<row8*>(d + r * 8) = sum[r];
}

// float -> bfloat, to nearest even. clang calls it; libgcc has it only since GCC 13. The parameter and result travel as
// __bf16 do: in a vector register.
VMPS_API __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const uint16_t rounded = nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  __bf16 result;
  std::memcpy(&result, &rounded, sizeof result);
  return result;
}
}
