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

// Threads per threadgroup that take a row in one pass, with so many vectors of four columns each; 0 where the pipeline
// takes fewer, `max_threads`.
inline uint32_t row_threads(int64_t columns, int64_t vectors, uint32_t max_threads) {
  const int64_t needed = (columns + 4 * vectors - 1) / (4 * vectors);
  const uint32_t threads = whole_simdgroups(needed, max_threads, max_threads);
  return needed <= threads ? threads : 0;
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
