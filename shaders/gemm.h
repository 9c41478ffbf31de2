// Matrix products by 8x8 simdgroup matrices, sums in float32: what a threadgroup does for one tile of the result.
#pragma once

#include <metal_stdlib>

#include "load_store.h"
#include "params.h"

// What the numbers of A and B are staged as in threadgroup memory, and how many of a row of A and a column of B at a
// time. Two operands of half stay half. All others become float32: mixed types have to agree, and bfloat matrices are
// emulated by chips before the M3, where float32 ones run at full rate.
template <typename A, typename B, uint side>
struct Staging {
  typedef float type;
  static constexpr constant uint depth = 16;
};
template <uint side>
struct Staging<half, half, side> {
  typedef half type;
  static constexpr constant uint depth = side == 32 ? 32 : 16;
};

// Rows of a staged tile are 16 bytes longer than their contents, as MLX's are: a column spreads over the banks.
template <typename T>
constexpr uint padded(uint columns) {
  return columns + 16 / sizeof(T);
}

// The first `rows` x `columns` of [R, C] numbers, 0 for the others. `transposed`: they lie in memory as [columns,
// rows]. Rows of what lies in memory are `stride` elements apart; `aligned`: they start at multiples of 4 elements.
template <uint R, uint C, uint threads, typename Stage, typename T>
inline void stage(threadgroup Stage* tile,
                  device const T* source,
                  ulong stride,
                  uint rows,
                  uint columns,
                  bool transposed,
                  bool aligned,
                  uint thread_index) {
  const uint tile_stride = padded<Stage>(C);
  for (uint v = thread_index; v < R * C / 4; v += threads) {
    if (transposed) {
      // Neighbouring threads write neighbouring numbers: the transposition costs nothing but scalar stores.
      const uint r = 4 * (v / C), c = v % C;
      const float4 values = c < columns ? load4(source + c * stride, r, rows, aligned) : float4(0.0f);
      for (uint i = 0; i < 4; ++i) {
        tile[(r + i) * tile_stride + c] = Stage(values[i]);
      }
    } else {
      const uint r = v / (C / 4), c = 4 * (v % (C / 4));
      const float4 values = r < rows ? load4(source + r * stride, c, columns, aligned) : float4(0.0f);
      *reinterpret_cast<threadgroup metal::vec<Stage, 4>*>(tile + r * tile_stride + c) = metal::vec<Stage, 4>(values);
    }
  }
}

// A simdgroup alone in its threadgroup need not wait for others.
template <uint simdgroups>
inline void tile_barrier() {
  if (simdgroups == 1) {
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  } else {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

// A simdgroup's [32, 32] part of a tile.
struct Accumulators {
  metal::simdgroup_float8x8 sums[4][4];

  Accumulators() {
    for (uint i = 0; i < 4; ++i) {
      for (uint j = 0; j < 4; ++j) {
        sums[i][j] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
  }

  // Adds the products of 32 rows of a and 32 columns of b over their first `depth` numbers, a multiple of 8.
  template <typename Stage>
  void add_products(threadgroup const Stage* a, uint a_stride, threadgroup const Stage* b, uint b_stride, uint depth) {
    for (uint k = 0; k < depth; k += 8) {
      metal::simdgroup_matrix<Stage, 8, 8> rows[4], columns[4];
      for (uint i = 0; i < 4; ++i) {
        metal::simdgroup_load(rows[i], a + 8 * i * a_stride + k, a_stride);
        metal::simdgroup_load(columns[i], b + k * b_stride + 8 * i, b_stride);
      }
      for (uint i = 0; i < 4; ++i) {
        for (uint j = 0; j < 4; ++j) {
          metal::simdgroup_multiply_accumulate(sums[i][j], rows[i], columns[j], sums[i][j]);
        }
      }
    }
  }
};

// What happens to a sum on its way out: d = scale * sum + addend + bias, rounded once.
template <typename D>
struct Epilogue {
  device const D* addend;  // rows addend_stride apart
  device const D* bias;    // of a row
  device D* d;             // rows d_stride apart
  constant GemmParams& p;

  // Four neighbouring numbers of a row; nothing happens to those behind its end.
  void store(uint row, uint column, float4 sums) const {
    sums *= p.scale;
    if (p.has_addend) {
      sums += load4(addend + row * p.addend_stride, column, p.n, p.aligned_d);
    }
    if (p.has_bias) {
      sums += load4(bias, column, p.n, p.aligned_d);
    }
    store4(d + row * p.d_stride, column, p.n, p.aligned_d, sums);
  }
};

// Elements before the matrix with this index, for batches of up to three dimensions.
inline ulong batch_offset(uint index, constant uint* sizes, constant ulong* strides) {
  return index % sizes[1] * strides[2] + index / sizes[1] % sizes[0] * strides[1] +
         index / sizes[1] / sizes[0] * strides[0];
}
