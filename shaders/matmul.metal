// Matrix products D = scale * op(A) op(B) + addend + bias: nn, nt, tn and tt, batched, with exact tails; and the sums
// of products that were split along K. Sums are float32, in a fixed order, rounded once.
#include <metal_stdlib>

#include "gemm.h"
#include "load_store.h"
#include "params.h"

using namespace metal;

constant bool transpose_a [[function_constant(0)]];
constant bool transpose_b [[function_constant(1)]];
constant bool aligned [[function_constant(2)]];  // lines of A and B start at multiples of 4 elements

// One tile of [side, side] a threadgroup, [32, 32] a simdgroup, of one chunk of K of one matrix of the batch.
template <typename A, typename B, typename D, uint side>
[[kernel]] [[max_total_threads_per_threadgroup(side * side / 32)]] void gemm(
    device const A* a [[buffer(0)]],       // [batch, m, k], lines a_stride apart; transpose_a: [batch, k, m]
    device const B* b [[buffer(1)]],       // [batch, k, n], lines b_stride apart; transpose_b: [batch, n, k]
    device const D* addend [[buffer(2)]],  // [batch, m, n], rows addend_stride apart; unbound if not has_addend
    device const D* bias [[buffer(3)]],    // [n]; unbound if not has_bias
    device D* d [[buffer(4)]],             // [batch, chunks, m, n], rows d_stride apart
    constant GemmParams& p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename Staging<A, B, side>::type Stage;
  const uint depth = Staging<A, B, side>::depth;
  constexpr uint simdgroups = side / 32 * (side / 32);
  const uint a_stride = padded<Stage>(Staging<A, B, side>::depth), b_stride = padded<Stage>(side);
  // The staged tiles of A and B; afterwards 8 rows of the result for each simdgroup, which are fewer.
  threadgroup float4
      memory[(side * padded<Stage>(Staging<A, B, side>::depth) + Staging<A, B, side>::depth * padded<Stage>(side)) *
             sizeof(Stage) / sizeof(float4)];
  threadgroup Stage* a_tile = reinterpret_cast<threadgroup Stage*>(memory);
  threadgroup Stage* b_tile = a_tile + side * a_stride;

  const uint matrix = (p.first_matrix + group.z) / p.chunks, chunk = (p.first_matrix + group.z) % p.chunks;
  const uint row = side * (p.first_row_tile + group.y), column = side * (p.first_column_tile + group.x);
  // The simdgroup's part of the tile.
  const uint row_part = 32 * (simdgroup / (side / 32)), column_part = 32 * (simdgroup % (side / 32));
  a += batch_offset(matrix, p.batch, p.a_batch) + row * (transpose_a ? 1 : p.a_stride);
  b += batch_offset(matrix, p.batch, p.b_batch) + column * (transpose_b ? p.b_stride : 1);

  Accumulators parts;
  const uint last = min(p.k, (chunk + 1) * p.span);
  for (uint k = chunk * p.span; k < last; k += depth) {
    tile_barrier<simdgroups>();
    stage<side, Staging<A, B, side>::depth, 32 * simdgroups>(a_tile, a + k * (transpose_a ? p.a_stride : 1), p.a_stride,
                                                             p.m - row, p.k - k, transpose_a, aligned, thread_index);
    stage<Staging<A, B, side>::depth, side, 32 * simdgroups>(b_tile, b + k * (transpose_b ? 1 : p.b_stride), p.b_stride,
                                                             p.k - k, p.n - column, transpose_b, aligned, thread_index);
    tile_barrier<simdgroups>();
    parts.add_products(a_tile + row_part * a_stride, a_stride, b_tile + column_part, b_stride,
                       min(depth, (last - k + 7) / 8 * 8));
  }

  // The sums leave by threadgroup memory, since which lane holds which of them is the hardware's business.
  tile_barrier<simdgroups>();
  const uint stride = padded<float>(32);
  threadgroup float* rows = reinterpret_cast<threadgroup float*>(memory) + simdgroup * 8 * stride;
  const Epilogue<D> epilogue{addend + batch_offset(matrix, p.batch, p.addend_batch), bias,
                             d + ulong(p.first_matrix + group.z) * p.d_matrix, p};
  for (uint i = 0; i < 4; ++i) {
    for (uint j = 0; j < 4; ++j) {
      simdgroup_store(parts.sums[i][j], rows + 8 * j, stride);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint v = lane; v < 8 * 32 / 4; v += 32) {
      const uint r = row + row_part + 8 * i + v / 8, c = column + column_part + 4 * (v % 8);
      if (r < p.m) {
        epilogue.store(r, c, *reinterpret_cast<threadgroup float4*>(rows + v / 8 * stride + 4 * (v % 8)));
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Adds up the chunks of a product that was split along K, in their order.
template <typename D>
[[kernel]] void gemm_sum(device const float* partial [[buffer(0)]],  // [batch, chunks, m, n]
                         device const D* addend [[buffer(1)]],       // [batch, m, n]; unbound if not has_addend
                         device const D* bias [[buffer(2)]],         // [n]; unbound if not has_bias
                         device D* d [[buffer(3)]],                  // [batch, m, n], rows d_stride apart
                         constant GemmParams& p [[buffer(4)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint2 thread_index [[thread_position_in_threadgroup]],
                         uint2 threads [[threads_per_threadgroup]]) {
  const uint vectors = (p.n + 3) / 4;
  const uint index = group.x * threads.x + thread_index.x;
  const uint row = index / vectors, column = 4 * (index % vectors);
  if (row >= p.m) {
    return;
  }
  float4 sum = 0.0f;
  partial += ulong(group.y) * p.chunks * p.m * p.n + ulong(row) * p.n;
  for (uint chunk = 0; chunk < p.chunks; ++chunk) {
    sum += load4(partial + ulong(chunk) * p.m * p.n, column, p.n, p.n % 4 == 0);
  }
  const Epilogue<D> epilogue{addend + batch_offset(group.y, p.batch, p.addend_batch), bias,
                             d + ulong(group.y) * p.d_matrix, p};
  epilogue.store(row, column, sum);
}

#define INSTANTIATE_TILE(A, B, D, side)                                 \
  template [[host_name("gemm_" #A "_" #B "_" #D "_" #side)]] [[kernel]] \
  decltype(gemm<A, B, D, side>) gemm<A, B, D, side>;

#define INSTANTIATE(A, B, D)    \
  INSTANTIATE_TILE(A, B, D, 32) \
  INSTANTIATE_TILE(A, B, D, 64)

// Half precision operands and results may stand beside float32 ones, as adapters in float32 do over a base in half.
#define INSTANTIATE_HALF(T)    \
  INSTANTIATE(T, T, T)         \
  INSTANTIATE(T, T, float)     \
  INSTANTIATE(T, float, T)     \
  INSTANTIATE(T, float, float) \
  INSTANTIATE(float, T, T)     \
  INSTANTIATE(float, T, float) \
  INSTANTIATE(float, float, T)

INSTANTIATE(float, float, float)
INSTANTIATE_HALF(half)
INSTANTIATE_HALF(bfloat)

#define INSTANTIATE_SUM(D) template [[host_name("gemm_sum_" #D)]] [[kernel]] decltype(gemm_sum<D>) gemm_sum<D>;

INSTANTIATE_SUM(float)
INSTANTIATE_SUM(half)
INSTANTIATE_SUM(bfloat)
