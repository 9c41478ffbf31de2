// Structs that csrc passes to kernels. Both sides include this file, so only types of the same size on both appear.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

struct RMSNormParams {
  uint64_t x_stride;   // elements from one row of x to the next
  uint64_t dy_stride;  // the same of dy, in the backward kernels
  uint32_t rows;
  uint32_t columns;
  uint32_t rows_per_group;  // rows that one threadgroup of the backward kernels works through
  float eps;
  float weight_offset;
  uint32_t unused;  // fills the struct to a multiple of 8 bytes, so that none are left uninitialised
};
