// Launch geometry: plain functions, so that tests can call them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

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

// How a product [m, k] x [k, n] is cut up: tiles of [side, side] of the result, and chunks of `span` along k.
struct GemmPlan {
  uint32_t side, chunks, span;
};

// When products take which tile, and when they are split along k, by the size of the chip. The measurements are
// others': this table is the place to change when there are own ones.
struct GemmTuning {
  // From so many tiles of 64x64 on: MLX takes them on all chips, but 64x32 for nt on small ones (steel_gemm_fused in
  // its matmul.cpp), where KRNL measured 32x32 by one simdgroup to be faster still than 64x64.
  int64_t large_tiles, large_tiles_nt;
  // Below so many tiles of 32x32, two for each core: KRNL's limit on 16 cores.
  int64_t split_below;
};
constexpr int64_t kNever = int64_t{1} << 62;
constexpr GemmTuning kSmallChip{64, kNever, 32};  // M1, M1 Pro and their successors: up to 20 cores
constexpr GemmTuning kLargeChip{128, 128, 64};    // Max and Ultra: 32 to 80 cores

inline GemmPlan plan_gemm(int64_t m, int64_t n, int64_t k, int64_t matrices, bool nt, bool large_chip) {
  const GemmTuning& tuning = large_chip ? kLargeChip : kSmallChip;
  const auto tiles = [=](int64_t side) { return matrices * ((m + side - 1) / side) * ((n + side - 1) / side); };
  const bool large = tiles(64) >= (nt ? tuning.large_tiles_nt : tuning.large_tiles);
  // KRNL splits into 8. Chunks of fewer than 256 would write and read more in partial sums than they read of A. Where k
  // is so long that one chunk of one tile nears the limit of a dispatch, more.
  constexpr int64_t most_chunks = 8, least_span = 256, most_span = int64_t{1} << 22, depth = 32;
  int64_t chunks = (k + most_span - 1) / most_span;
  if (tiles(32) < tuning.split_below) {
    chunks = std::max(chunks, std::min(most_chunks, k / least_span));
  }
  chunks = std::max<int64_t>(chunks, 1);
  const int64_t span = std::max<int64_t>((k + chunks * depth - 1) / (chunks * depth) * depth, depth);
  return {large ? 64u : 32u, static_cast<uint32_t>(std::max<int64_t>((k + span - 1) / span, 1)),
          static_cast<uint32_t>(span)};
}

// Threadgroups of one dispatch, from the first one on.
struct GridPart {
  uint64_t first[3], count[3];
};

// The longest dispatch: 50 to 100 ms of an M1. Longer ones can trip the watchdog of a Mac with a display. Tests lower
// it.
inline double most_flops_of_a_dispatch = 100e9;

// A grid of threadgroups, each of so many FLOPs, in as few dispatches as there can be. A dispatch is a range along one
// dimension: those before it fit as a whole, those behind it go one at a time.
inline std::vector<GridPart> cut_grid(const std::array<uint64_t, 3>& grid, double flops_of_a_group) {
  const uint64_t most = std::max<uint64_t>(1, static_cast<uint64_t>(most_flops_of_a_dispatch / flops_of_a_group));
  uint64_t step[3] = {1, 1, 1}, groups = 1;
  for (int i = 0; i < 3 && groups <= most; ++i) {
    step[i] = std::max<uint64_t>(1, std::min(grid[i], most / groups));
    if (step[i] < grid[i]) {
      break;
    }
    groups *= std::max<uint64_t>(1, grid[i]);
  }
  std::vector<GridPart> parts;
  for (uint64_t z = 0; z < grid[2]; z += step[2]) {
    for (uint64_t y = 0; y < grid[1]; y += step[1]) {
      for (uint64_t x = 0; x < grid[0]; x += step[0]) {
        parts.push_back(
            {{x, y, z},
             {std::min(step[0], grid[0] - x), std::min(step[1], grid[1] - y), std::min(step[2], grid[2] - z)}});
      }
    }
  }
  return parts;
}

// One product: along tiles of a row, rows of tiles, and matrices and chunks.
inline std::vector<GridPart> gemm_dispatches(const GemmPlan& plan, int64_t m, int64_t n, int64_t matrices) {
  const uint64_t side = plan.side;
  return cut_grid({(n + side - 1) / side, (m + side - 1) / side, static_cast<uint64_t>(matrices) * plan.chunks},
                  2.0 * plan.side * plan.side * plan.span);
}

// Queries of a sequence that decode's kernels take.
constexpr int64_t kMostDecodeQueries = 8;

// How attention is calculated.
enum class AttentionWay { kDecode, kTiled, kMaterialised };

// The widest heads that the tiled kernels exist for, and of them the narrowest that takes this one; 0: none.
inline int64_t tiled_head_dim(int64_t head_dim, int64_t value_dim) {
  for (int64_t widest : {64, 128, 256}) {
    if (std::max(head_dim, value_dim) <= widest) {
      return widest;
    }
  }
  return 0;
}

// Which way is taken where the caller leaves it open, by the numbers of queries and keys, the bytes of a staged row of
// the kernel that the tiled way would take (0: there is none), and whether decode's kernel serves such heads.
//
// Tiled is the rule: it stores no scores, and skips what is hidden. Its kernels hold fewer rows the longer a row is,
// and read all others once for each 32, 16 or 8 of them. At 1,024 bytes (float32, or bfloat16 staged as that, beyond
// 128 numbers a head) backward holds 8 rows and reads 2 * 1,024 / 8 = 256 bytes for each score, where products of whole
// matrices read and write about 60 in all. So there the scores are materialised as long as those of one head, and their
// gradients, take no more than a few heads of q and k: memory decides. These are counts of bytes; no Mac has timed
// them.
inline AttentionWay choose_attention(int64_t queries, int64_t keys, int64_t row_bytes, bool decode_serves) {
  constexpr int64_t wide_row = 1024, most_scores = int64_t{1} << 23;  // 64 MiB with their gradients
  if (decode_serves && queries <= kMostDecodeQueries) {
    return AttentionWay::kDecode;
  }
  if (row_bytes == 0 || (row_bytes >= wide_row && queries * keys <= most_scores)) {
    return AttentionWay::kMaterialised;
  }
  return AttentionWay::kTiled;
}

constexpr uint32_t kDecodeThreads = 4 * kSimdWidth;

// How attention of a few queries to a cache is cut up: `rows` rows of one head of k and v to a threadgroup,
// `row_blocks` times, and the keys of a sequence in `chunks`. Of a value of `value_dim` numbers each simdgroup has a
// `share`, in vectors, on which `lanes` of its lanes work.
struct DecodePlan {
  uint32_t rows, row_blocks, chunks, share, lanes;
};

inline DecodePlan plan_decode(
    int64_t sequences, int64_t kv_heads, int64_t rows, int64_t keys, int64_t value_dim, bool large_chip) {
  const auto quotient = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  DecodePlan plan{};
  plan.rows = rows <= 8 ? 8 : 32;
  plan.row_blocks = static_cast<uint32_t>(quotient(rows, plan.rows));
  // Enough threadgroups for three or four to a core (up to 20 cores, and up to 80). A chunk of 512 keys of 128 numbers
  // in half precision reads 256 KB and writes 4 KB of sums for 8 rows. Each row's sums are added by one threadgroup,
  // chunk after chunk, which 64 of them keep short. No Mac has timed these numbers.
  constexpr int64_t least_span = 512, most_chunks = 64;
  const int64_t wanted = large_chip ? 256 : 64, groups = sequences * kv_heads * plan.row_blocks;
  plan.chunks =
      static_cast<uint32_t>(std::max<int64_t>(1, std::min({quotient(wanted, groups), keys / least_span, most_chunks})));
  // Of 8 rows a simdgroup has all columns, four to a vector; of 32 a quarter, two to a vector.
  plan.share = static_cast<uint32_t>(plan.rows == 8 ? quotient(value_dim, 4) : quotient(quotient(value_dim, 2), 4));
  plan.lanes = 1;
  while (plan.lanes < plan.share && plan.lanes < kSimdWidth) {
    plan.lanes *= 2;
  }
  return plan;
}

}  // namespace torch_metalk
