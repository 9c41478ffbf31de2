// Launch geometry: plain functions, so that tests can call them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_metalk {

constexpr uint32_t kSimdWidth = 32;

// As many whole simdgroups as `needed` threads fill, at most `most` threads and what a pipeline takes.
inline uint32_t whole_simdgroups(int64_t needed, int64_t most, uint32_t max_threads) {
  const int64_t limit = std::min<int64_t>(most, max_threads) / kSimdWidth * kSimdWidth;
  return static_cast<uint32_t>(std::min((needed + kSimdWidth - 1) / kSimdWidth * kSimdWidth, limit));
}

// One row to a threadgroup.
struct RowGeometry {
  bool looped;       // a thread has more columns than the single-row kernel keeps in registers
  uint32_t threads;  // per threadgroup
};

// `max_threads` is what the pipeline of the single-row kernel takes.
inline RowGeometry row_geometry(int64_t columns, int64_t columns_per_thread, uint32_t max_threads) {
  const int64_t needed = (columns + columns_per_thread - 1) / columns_per_thread;
  const uint32_t threads = whole_simdgroups(needed, max_threads, max_threads);
  return {needed > threads, threads};
}

// One thread to each of `needed` pieces of work that know nothing of each other.
struct ElementwiseGeometry {
  uint64_t groups;
  uint32_t threads;  // per threadgroup
};

inline ElementwiseGeometry elementwise_geometry(int64_t needed, uint32_t max_threads) {
  constexpr int64_t most = 256;
  const uint32_t threads = whole_simdgroups(needed, most, max_threads);
  return {static_cast<uint64_t>((needed + threads - 1) / threads), threads};
}

}  // namespace torch_metalk
