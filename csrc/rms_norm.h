// Launch geometry of RMSNorm: plain functions, so that tests can call them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_metalk {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kColumnsPerThread = 4;
// Rows whose weight gradient one threadgroup adds up: 4 bytes written a column for these many rows read is at most 4 %
// of the traffic in half precision, and 512 rows still make 32 threadgroups.
constexpr uint32_t kRowsPerGroup = 16;

struct RMSNormGeometry {
  bool looped;       // a thread has more than kColumnsPerThread columns of a row
  uint32_t threads;  // per threadgroup
};

// `max_threads` is what the pipeline of the single-row kernel takes.
inline RMSNormGeometry rms_norm_geometry(int64_t columns, uint32_t max_threads) {
  const int64_t needed = (columns + kColumnsPerThread - 1) / kColumnsPerThread;
  const int64_t whole_simdgroups = (needed + kSimdWidth - 1) / kSimdWidth * kSimdWidth;
  const uint32_t most = max_threads / kSimdWidth * kSimdWidth;
  return {whole_simdgroups > most, static_cast<uint32_t>(std::min<int64_t>(whole_simdgroups, most))};
}

inline uint32_t rms_norm_rows_per_group(bool wants_dweight) { return wants_dweight ? kRowsPerGroup : 1; }

}  // namespace torch_metalk
