// Attention, forward and backward, that never holds all scores (Dao et al., "FlashAttention", arXiv:2205.14135). A
// threadgroup holds some rows and passes blocks of the others by them; each simdgroup works on 8 of the rows. What no
// row of a threadgroup sees of a block by position or mask is skipped. Sums are float32 and in a fixed order.
//
// Backward makes the weights again from the logarithm of the sum of exponentials (lse), and needs no atomics: one
// kernel holds queries and makes dq, one holds keys and makes dk and dv of all heads that share them.
//
// T is the type of all tensors but mask and lse. D is the widest head that a kernel takes.
#include <metal_stdlib>

#include "attention.h"
#include "gemm.h"
#include "load_store.h"
#include "params.h"
#include "softmax.h"

using namespace metal;

constant bool aligned [[function_constant(0)]];  // rows of all tensors start at multiples of 4 elements

// Of the 8 rows of a simdgroup a lane looks after one, with three others, and of its columns after every fourth.
struct LaneRole {
  uint row, column;

  LaneRole(uint lane) : row(lane / 4), column(lane % 4) {}
};
inline float row_sum(float value) {
  value += simd_shuffle_xor(value, 1);
  return value + simd_shuffle_xor(value, 2);
}
inline float row_max(float value) {
  value = max(value, simd_shuffle_xor(value, 1));
  return max(value, simd_shuffle_xor(value, 2));
}

// A simdgroup's sums: 8 rows of 8 N columns. Loops over them are unrolled, for they have to stay in registers.
template <uint N>
struct Strip {
  simdgroup_float8x8 sums[N];

  Strip() {
#pragma unroll
    for (uint i = 0; i < N; ++i) {
      sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  // Adds the products of 8 rows of a and 8 N rows of b, over their first `depth` numbers.
  template <typename Stage>
  void add_nt(threadgroup const Stage* a, threadgroup const Stage* b, uint stride, uint depth) {
    for (uint d = 0; d < depth; d += 8) {
      simdgroup_matrix<Stage, 8, 8> rows, columns;
      simdgroup_load(rows, a + d, stride);
#pragma unroll
      for (uint i = 0; i < N; ++i) {
        simdgroup_load(columns, b + 8 * i * stride + d, stride, ulong2(0), true);
        simdgroup_multiply_accumulate(sums[i], rows, columns, sums[i]);
      }
    }
  }

  // Adds the products of 8 rows of a, of `depth` numbers, and the first `columns` columns of as many rows of b.
  template <typename Stage>
  void add_nn(
      threadgroup const Stage* a, uint a_stride, threadgroup const Stage* b, uint b_stride, uint depth, uint columns) {
    for (uint d = 0; d < depth; d += 8) {
      simdgroup_matrix<Stage, 8, 8> rows, part;
      simdgroup_load(rows, a + d, a_stride);
#pragma unroll
      for (uint i = 0; i < N; ++i) {
        if (8 * i < columns) {
          simdgroup_load(part, b + d * b_stride + 8 * i, b_stride);
          simdgroup_multiply_accumulate(sums[i], rows, part, sums[i]);
        }
      }
    }
  }

  // The sums in threadgroup memory, since which lane holds which of them is the hardware's business.
  void store(threadgroup float* scratch, uint stride) const {
#pragma unroll
    for (uint i = 0; i < N; ++i) {
      simdgroup_store(sums[i], scratch + 8 * i, stride);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Multiplies the lane's row by `factor`.
  void scale(threadgroup float* scratch, uint stride, float factor, LaneRole role) {
#pragma unroll
    for (uint i = 0; i < N; ++i) {
      simdgroup_store(sums[i], scratch, stride);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      *reinterpret_cast<threadgroup float2*>(scratch + role.row * stride + 2 * role.column) *= factor;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_load(sums[i], scratch, stride);
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // Multiplies the lane's row by `factor`, and leaves the result in device memory where `inside`. `scratch` has room
  // for 8 rows of W columns.
  template <uint W, typename T>
  void write(threadgroup float* scratch, device T* row, uint columns, bool inside, float factor, LaneRole role) const {
#pragma unroll
    for (uint i = 0; i < N; i += W / 8) {
      if (8 * i >= columns) {
        break;
      }
      for (uint j = 0; j < W / 8; ++j) {
        simdgroup_store(sums[i + j], scratch + 8 * j, padded<float>(W));
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint c = 4 * role.column; c < W && inside; c += 16) {
        store4(row, 8 * i + c, columns, aligned,
               factor * *reinterpret_cast<threadgroup float4*>(scratch + role.row * padded<float>(W) + c));
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
};

// What the mask and position add to every fourth of 4 N scores from `first` on, with offsets `step` apart; -inf hides.
// Whether any is seen.
template <uint N>
inline bool read_biases(thread float* biases,
                        Span span,
                        uint first,
                        device const bool* seen,
                        device const float* bias,
                        ulong offset,
                        ulong step,
                        constant AttentionScoring& s) {
  bool any = false;
  for (uint i = 0; i < N; ++i) {
    const uint at = first + 4 * i;
    biases[i] = span.has(at) ? mask_bias(seen, bias, offset + at * step, s) : -INFINITY;
    any |= biases[i] != -INFINITY;
  }
  return any;
}

// Whether it holds for any thread of the threadgroup. `flags` has one for each simdgroup; its next use needs a barrier
// before it.
inline bool any_thread(bool value, threadgroup bool* flags, uint lane, uint simdgroup, uint simdgroups) {
  const bool any = simd_any(value);
  if (lane == 0) {
    flags[simdgroup] = any;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool result = false;
  for (uint i = 0; i < simdgroups; ++i) {
    result |= flags[i];
  }
  return result;
}

// The first `rows` of [R, C] numbers, 0 for the others and behind the last column, up to a whole 8x8 matrix. Whether
// all are finite, as far as the thread has seen.
template <uint R, uint C, uint threads, typename Stage, typename T>
inline bool stage_rows(
    threadgroup Stage* tile, device const T* source, ulong stride, uint rows, uint columns, uint thread_index) {
  bool finite = true;
  for (uint i = thread_index; i < R * C / 4; i += threads) {
    const uint r = i / (C / 4), c = 4 * (i % (C / 4));
    if (c < (columns + 7) / 8 * 8) {
      const float4 values = r < rows ? load4(source + r * stride, c, columns, aligned) : float4(0.0f);
      finite &= all(isfinite(values));
      *reinterpret_cast<threadgroup vec<Stage, 4>*>(tile + r * padded<Stage>(C) + c) = vec<Stage, 4>(values);
    }
  }
  return finite;
}

// Puts 0 where a staged number is not finite: the weight 0 of what a row does not see would make NaN of it.
template <uint R, uint C, uint threads, typename Stage>
inline void make_finite(threadgroup Stage* tile, uint columns, uint thread_index) {
  for (uint i = thread_index; i < R * C; i += threads) {
    const uint r = i / C, c = i % C;
    if (c < columns && !isfinite(float(tile[r * padded<Stage>(C) + c]))) {
      tile[r * padded<Stage>(C) + c] = Stage(0.0f);
    }
  }
}

// How a threadgroup uses its memory: `held` rows in some tiles, `passing` rows of a block in some others, and for each
// simdgroup 8 rows of as many numbers: sums of products on their way out, weights on their way in.
template <typename T, uint D, uint held, uint held_tiles, uint passing, uint passing_tiles>
struct Memory {
  typedef typename Staging<T, T, 32>::type Stage;
  static constexpr constant uint simdgroups = held / 8;
  static constexpr constant uint threads = 4 * held;
  static constexpr constant uint stride = padded<Stage>(D);  // of rows of a tile
  static constexpr constant uint sum_stride = padded<float>(passing);
  static constexpr constant uint weight_stride = sum_stride * sizeof(float) / sizeof(Stage);
  static constexpr constant uint bytes =
      (held * held_tiles + passing * passing_tiles) * padded<Stage>(D) * sizeof(Stage) +
      held * padded<float>(passing) * sizeof(float);
};

// What the kernels that hold queries know of theirs.
template <uint R>
struct Queries {
  uint first, head, batch;     // the first of the threadgroup's
  uint own;                    // the lane's
  Span span;                   // of keys that the lane's query sees
  Span first_span, last_span;  // that the first and the last query of the threadgroup see
  ulong mask;                  // offset of the lane's row

  // The last rows go first: where attention is causal they take longest.
  Queries(uint3 group, uint simdgroup, LaneRole role, constant AttentionParams& p) {
    first = R * (p.blocks - 1 - p.first[0] - group.x);
    head = p.first[1] + group.y;
    batch = p.first[2] + group.z;
    own = first + 8 * simdgroup + role.row;
    span = own < p.queries ? keys_of(own + p.shift, p.keys, p.scoring) : clamped(0, 0, 0);
    first_span = keys_of(first + p.shift, p.keys, p.scoring);
    last_span = keys_of(min(first + R, p.queries) - 1 + p.shift, p.keys, p.scoring);
    mask = batch * p.scoring.mask_batch + head * p.scoring.mask_head + own * p.scoring.mask_query;
  }

  // Whether any query of the threadgroup may not see a key of this block.
  template <uint C>
  bool partly(uint block, constant AttentionParams& p) const {
    return p.scoring.mask != ATTENTION_MASK_NONE || block < last_span.first || block + C > first_span.end;
  }
};

inline ulong offset_of(uint batch, uint head, uint row, constant AttentionTensor& t) {
  return batch * t.batch + head * t.head + row * t.row;
}

// Sums are kept relative to a maximum that may be too small by this many binary orders of magnitude, so that few blocks
// rescale what is there.
constant constexpr float slack = 8.0f;

template <typename T, uint D, uint R, uint C>
[[kernel]] [[max_total_threads_per_threadgroup(4 * R)]] void attention(
    device const T* q [[buffer(0)]],        // [B, H, Q, D] by strides, as all that follow
    device const T* k [[buffer(1)]],        // [B, Hkv, K, D]
    device const T* v [[buffer(2)]],        // [B, Hkv, K, Dv]
    device const bool* seen [[buffer(3)]],  // [B, H, Q, K], or unbound
    device const float* bias [[buffer(4)]],
    device T* o [[buffer(5)]],        // [B, H, Q, Dv]
    device float* lse [[buffer(6)]],  // [B, H, Q], contiguous
    constant AttentionParams& p [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Memory<T, D, R, 1, C, 1> M;
  typedef typename M::Stage Stage;
  threadgroup float4 memory[M::bytes / sizeof(float4)];
  threadgroup bool seen_flags[2 * M::simdgroups], finite_flags[M::simdgroups];
  threadgroup Stage* q_tile = reinterpret_cast<threadgroup Stage*>(memory);
  threadgroup Stage* kv_tile = q_tile + R * M::stride;
  threadgroup float* sums =
      reinterpret_cast<threadgroup float*>(kv_tile + C * M::stride) + simdgroup * 8 * M::sum_stride;
  threadgroup Stage* weights = reinterpret_cast<threadgroup Stage*>(sums);

  const LaneRole role(lane);
  const Queries<R> queries(group, simdgroup, role, p);
  k += offset_of(queries.batch, queries.head / p.group, 0, p.k);
  v += offset_of(queries.batch, queries.head / p.group, 0, p.v);
  stage_rows<R, D, M::threads>(q_tile, q + offset_of(queries.batch, queries.head, queries.first, p.q), p.q.row,
                               p.queries - queries.first, p.head_dim, thread_index);

  Strip<D / 8> output;
  float maximum = -INFINITY, total = 0.0f;
  uint turn = 0;
  for (uint block = queries.first_span.first / C * C; block < queries.last_span.end; block += C) {
    const bool partly = queries.template partly<C>(block, p);
    float biases[C / 4] = {};
    bool sees = true;
    if (partly) {
      sees = read_biases<C / 4>(biases, queries.span, block + role.column, seen, bias, queries.mask, p.scoring.mask_key,
                                p.scoring);
    }
    if (p.scoring.mask != ATTENTION_MASK_NONE) {
      turn ^= 1;
      if (!any_thread(sees, seen_flags + turn * M::simdgroups, lane, simdgroup, M::simdgroups)) {
        continue;
      }
    }
    sees = simd_any(sees);

    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<C, D, M::threads>(kv_tile, k + block * p.k.row, p.k.row, p.keys - block, p.head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float scores[C / 4];
    float largest = -INFINITY;
    if (sees) {
      Strip<C / 8> products;
      products.add_nt(q_tile + 8 * simdgroup * M::stride, kv_tile, M::stride, p.head_dim);
      products.store(sums, M::sum_stride);
      for (uint i = 0; i < C / 4; ++i) {
        scores[i] = Score(sums[role.row * M::sum_stride + role.column + 4 * i], p.scoring).masked(biases[i]);
        largest = max(largest, scores[i]);
      }
      largest = row_max(largest);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool finite =
        stage_rows<C, D, M::threads>(kv_tile, v + block * p.v.row, p.v.row, p.keys - block, p.value_dim, thread_index);
    bool bad = false;
    if (partly) {
      bad = any_thread(!finite, finite_flags, lane, simdgroup, M::simdgroups);
      if (bad) {
        make_finite<C, D, M::threads>(kv_tile, p.value_dim, thread_index);
      }
    }
    if (!partly || bad) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (!sees) {
      continue;
    }

    float factor = 1.0f;
    if ((largest - maximum) * p.scoring.exponent > slack) {
      factor = maximum == -INFINITY ? 1.0f : weight(maximum, largest, p.scoring);  // of nothing yet
      maximum = largest;
    }
    total *= factor;
    if (simd_any(factor != 1.0f)) {
      output.scale(sums, M::sum_stride, factor, role);
    }
    // A value that is not finite, and 0 in the tile, still spoils the rows that see it.
    for (uint i = 0; bad && i < C / 4; ++i) {
      for (uint c = 0; biases[i] != -INFINITY && c < p.value_dim; ++c) {
        if (!isfinite(float(v[(block + role.column + 4 * i) * p.v.row + c]))) {
          scores[i] = NAN;
        }
      }
    }
    const float shift = shift_of(maximum);
    for (uint i = 0; i < C / 4; ++i) {
      const float term = weight(scores[i], shift, p.scoring);
      total += term;
      weights[role.row * M::weight_stride + role.column + 4 * i] = Stage(term);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    output.add_nn(weights, M::weight_stride, kv_tile, M::stride, C, p.value_dim);
  }

  total = row_sum(total);
  const bool inside = queries.own < p.queries;
  // The last weights have been read.
  simdgroup_barrier(mem_flags::mem_threadgroup);
  output.template write<C>(sums, o + offset_of(queries.batch, queries.head, queries.own, p.o), p.value_dim, inside,
                           total == 0.0f ? 0.0f : 1.0f / total, role);
  if (inside && role.column == 0) {
    lse[(ulong(queries.batch) * p.heads + queries.head) * p.queries + queries.own] =
        total == 0.0f ? 0.0f : shift_of(maximum) * p.scoring.natural + log(total);
  }
}

// From here on |lse| is too coarse to hold the logarithm of a sum beside a maximum: half a unit in the last place is
// 2^-12. A row of the least number of float is the extreme.
constant constexpr float coarse = 4096.0f;

// What backward has to know of each row: the weights are w exp2(exponent * (score - shift)), and sum(do * o), which is
// sum(dweights * weights). One simdgroup takes a row.
template <typename T>
[[kernel]] void attention_statistics(device const T* q [[buffer(0)]],  // as in the forward kernel
                                     device const T* k [[buffer(1)]],
                                     device const bool* seen [[buffer(2)]],
                                     device const float* bias [[buffer(3)]],
                                     device const T* o [[buffer(4)]],
                                     device const T* d_o [[buffer(5)]],       // [B, H, Q, Dv] by strides
                                     device const float* lse [[buffer(6)]],   // [B, H, Q]
                                     device float* statistics [[buffer(7)]],  // [B, H, Q, 4]: shift, w, sum, nothing
                                     constant AttentionParams& p [[buffer(8)]],
                                     uint3 group [[threadgroup_position_in_grid]],
                                     uint lane [[thread_index_in_simdgroup]],
                                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint query = simdgroups * group.x + simdgroup, head = group.y, batch = group.z;
  if (query >= p.queries) {
    return;
  }
  o += offset_of(batch, head, query, p.o);
  d_o += offset_of(batch, head, query, p.d_o);
  float delta = 0.0f;
  for (uint i = 4 * lane; i < p.value_dim; i += 4 * 32) {
    delta += dot(load4(o, i, p.value_dim, aligned), load4(d_o, i, p.value_dim, aligned));
  }
  delta = simd_sum(delta);
  const ulong row = (ulong(batch) * p.heads + head) * p.queries + query;
  float shift = lse[row] / p.scoring.natural, w = 1.0f;
  if (abs(lse[row]) > coarse) {
    // The maximum and the sum once more, apart from each other: first one, then the other.
    q += offset_of(batch, head, query, p.q);
    k += offset_of(batch, head / p.group, 0, p.k);
    const ulong mask = batch * p.scoring.mask_batch + head * p.scoring.mask_head + query * p.scoring.mask_query;
    const Span span = keys_of(query + p.shift, p.keys, p.scoring);
    float maximum = -INFINITY, sum = 0.0f;
    for (uint pass = 0; pass < 2; ++pass) {
      for (uint key = span.first + lane; key < span.end; key += 32) {
        const float hidden = mask_bias(seen, bias, mask + key * p.scoring.mask_key, p.scoring);
        float product = 0.0f;
        for (uint i = 0; i < p.head_dim; i += 4) {
          product += dot(load4(q, i, p.head_dim, aligned), load4(k + key * p.k.row, i, p.head_dim, aligned));
        }
        const float score = Score(product, p.scoring).masked(hidden);
        if (pass == 0) {
          maximum = max(maximum, score);
        } else {
          sum += weight(score, shift, p.scoring);
        }
      }
      if (pass == 0) {
        shift = shift_of(simd_max(maximum));
      }
    }
    w = 1.0f / simd_sum(sum);
  }
  if (lane == 0) {
    *reinterpret_cast<device float4*>(statistics + 4 * row) = float4(shift, w, delta, 0.0f);
  }
}

inline float4 row_statistics(device const float* statistics, ulong row) {
  return *reinterpret_cast<device const float4*>(statistics + 4 * row);
}

// The gradient of a product, from that of its weight. What is hidden has none, whatever its numbers are.
struct Gradient {
  float weight, product;

  Gradient(float product_, float d_weight, float bias, float4 row, constant AttentionScoring& s) {
    const Score score(product_, s);
    const bool hidden = bias == -INFINITY;
    const float own = hidden ? 0.0f : row.y * ::weight(score.value + bias, row.x, s);
    product = hidden ? 0.0f : own * (d_weight - row.z) * score.slope;
    // Where an incoming gradient is not finite, products take 0 for it, for the sake of the keys that its query does
    // not see. It still spoils the others.
    weight = hidden || isfinite(row.z) ? own : NAN;
  }
};

// Holds queries and makes dq.
template <typename T, uint D, uint R, uint C>
[[kernel]] [[max_total_threads_per_threadgroup(4 * R)]] void attention_dq(
    device const T* q [[buffer(0)]],  // as in the forward kernel
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const bool* seen [[buffer(3)]],
    device const float* bias [[buffer(4)]],
    device const T* d_o [[buffer(5)]],             // [B, H, Q, Dv] by strides
    device const float* statistics [[buffer(6)]],  // [B, H, Q, 4], of attention_statistics
    device T* dq [[buffer(7)]],                    // [B, H, Q, D] by strides
    constant AttentionParams& p [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Memory<T, D, R, 2, C, 1> M;
  typedef typename M::Stage Stage;
  threadgroup float4 memory[M::bytes / sizeof(float4)];
  threadgroup bool seen_flags[2 * M::simdgroups], finite_flags[M::simdgroups];
  threadgroup Stage* q_tile = reinterpret_cast<threadgroup Stage*>(memory);
  threadgroup Stage* do_tile = q_tile + R * M::stride;
  threadgroup Stage* kv_tile = do_tile + R * M::stride;
  threadgroup float* sums =
      reinterpret_cast<threadgroup float*>(kv_tile + C * M::stride) + simdgroup * 8 * M::sum_stride;
  threadgroup Stage* weights = reinterpret_cast<threadgroup Stage*>(sums);

  const LaneRole role(lane);
  const Queries<R> queries(group, simdgroup, role, p);
  const bool inside = queries.own < p.queries;
  k += offset_of(queries.batch, queries.head / p.group, 0, p.k);
  v += offset_of(queries.batch, queries.head / p.group, 0, p.v);
  stage_rows<R, D, M::threads>(q_tile, q + offset_of(queries.batch, queries.head, queries.first, p.q), p.q.row,
                               p.queries - queries.first, p.head_dim, thread_index);
  stage_rows<R, D, M::threads>(do_tile, d_o + offset_of(queries.batch, queries.head, queries.first, p.d_o), p.d_o.row,
                               p.queries - queries.first, p.value_dim, thread_index);
  const float4 row =
      inside ? row_statistics(statistics, (ulong(queries.batch) * p.heads + queries.head) * p.queries + queries.own)
             : float4(0.0f);

  Strip<D / 8> output;
  uint turn = 0;
  for (uint block = queries.first_span.first / C * C; block < queries.last_span.end; block += C) {
    const bool partly = queries.template partly<C>(block, p);
    float biases[C / 4] = {};
    bool sees = true;
    if (partly) {
      sees = read_biases<C / 4>(biases, queries.span, block + role.column, seen, bias, queries.mask, p.scoring.mask_key,
                                p.scoring);
    }
    if (p.scoring.mask != ATTENTION_MASK_NONE) {
      turn ^= 1;
      if (!any_thread(sees, seen_flags + turn * M::simdgroups, lane, simdgroup, M::simdgroups)) {
        continue;
      }
    }
    sees = simd_any(sees);

    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<C, D, M::threads>(kv_tile, v + block * p.v.row, p.v.row, p.keys - block, p.value_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float d_weights[C / 4];
    if (sees) {
      Strip<C / 8> products;
      products.add_nt(do_tile + 8 * simdgroup * M::stride, kv_tile, M::stride, p.value_dim);
      products.store(sums, M::sum_stride);
      for (uint i = 0; i < C / 4; ++i) {
        d_weights[i] = sums[role.row * M::sum_stride + role.column + 4 * i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool finite =
        stage_rows<C, D, M::threads>(kv_tile, k + block * p.k.row, p.k.row, p.keys - block, p.head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float gradients[C / 4];
    if (sees) {
      Strip<C / 8> products;
      products.add_nt(q_tile + 8 * simdgroup * M::stride, kv_tile, M::stride, p.head_dim);
      products.store(sums, M::sum_stride);
      for (uint i = 0; i < C / 4; ++i) {
        gradients[i] =
            Gradient(sums[role.row * M::sum_stride + role.column + 4 * i], d_weights[i], biases[i], row, p.scoring)
                .product;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = 0; i < C / 4; ++i) {
        weights[role.row * M::weight_stride + role.column + 4 * i] = Stage(gradients[i]);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (partly && any_thread(!finite, finite_flags, lane, simdgroup, M::simdgroups)) {
      make_finite<C, D, M::threads>(kv_tile, p.head_dim, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (sees) {
      output.add_nn(weights, M::weight_stride, kv_tile, M::stride, C, p.head_dim);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  output.template write<C>(sums, dq + offset_of(queries.batch, queries.head, queries.own, p.dq), p.head_dim, inside,
                           1.0f, role);
}

// Holds keys and values, and makes dk and dv of all heads that share them. Where `apart`, threadgroup memory is too
// small for a block of q and of do at once.
template <typename T, uint D, uint R, uint C, bool apart>
[[kernel]] [[max_total_threads_per_threadgroup(4 * R)]] void attention_dkv(
    device const T* q [[buffer(0)]],  // as in the forward kernel
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const bool* seen [[buffer(3)]],
    device const float* bias [[buffer(4)]],
    device const T* d_o [[buffer(5)]],             // [B, H, Q, Dv] by strides
    device const float* statistics [[buffer(6)]],  // [B, H, Q, 4], of attention_statistics
    device T* dk [[buffer(7)]],                    // [B, Hkv, K, D] by strides
    device T* dv [[buffer(8)]],                    // [B, Hkv, K, Dv] by strides
    constant AttentionParams& p [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Memory<T, D, R, 2, C, apart ? 1 : 2> M;
  typedef typename M::Stage Stage;
  threadgroup float4 memory[M::bytes / sizeof(float4)];
  threadgroup bool seen_flags[2 * M::simdgroups], finite_flags[2 * M::simdgroups];
  threadgroup Stage* k_tile = reinterpret_cast<threadgroup Stage*>(memory);
  threadgroup Stage* v_tile = k_tile + R * M::stride;
  threadgroup Stage* q_tile = v_tile + R * M::stride;
  threadgroup Stage* do_tile = apart ? q_tile : q_tile + C * M::stride;
  threadgroup float* sums =
      reinterpret_cast<threadgroup float*>(do_tile + C * M::stride) + simdgroup * 8 * M::sum_stride;
  threadgroup Stage* weights = reinterpret_cast<threadgroup Stage*>(sums);

  const LaneRole role(lane);
  const uint first = R * (p.first[0] + group.x), kv_head = p.first[1] + group.y, batch = p.first[2] + group.z;
  const uint own = first + 8 * simdgroup + role.row;
  const bool inside = own < p.keys;
  const Span span = inside ? queries_of(own - p.shift, p.queries, p.scoring) : clamped(0, 0, 0);
  const Span first_span = queries_of(first - p.shift, p.queries, p.scoring);
  const Span last_span = queries_of(min(first + R, p.keys) - 1 - p.shift, p.queries, p.scoring);
  stage_rows<R, D, M::threads>(k_tile, k + offset_of(batch, kv_head, first, p.k), p.k.row, p.keys - first, p.head_dim,
                               thread_index);
  stage_rows<R, D, M::threads>(v_tile, v + offset_of(batch, kv_head, first, p.v), p.v.row, p.keys - first, p.value_dim,
                               thread_index);

  Strip<D / 8> k_output, v_output;
  uint turn = 0;
  for (uint head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
    device const T* q_head = q + offset_of(batch, head, 0, p.q);
    device const T* do_head = d_o + offset_of(batch, head, 0, p.d_o);
    const ulong first_statistics = (ulong(batch) * p.heads + head) * p.queries;
    const ulong mask = batch * p.scoring.mask_batch + head * p.scoring.mask_head + own * p.scoring.mask_key;
    for (uint block = first_span.first / C * C; block < last_span.end; block += C) {
      const bool partly =
          p.scoring.mask != ATTENTION_MASK_NONE || block < last_span.first || block + C > first_span.end;
      float biases[C / 4] = {};
      bool sees = true;
      if (partly) {
        sees = read_biases<C / 4>(biases, span, block + role.column, seen, bias, mask, p.scoring.mask_query, p.scoring);
      }
      if (p.scoring.mask != ATTENTION_MASK_NONE) {
        turn ^= 1;
        if (!any_thread(sees, seen_flags + turn * M::simdgroups, lane, simdgroup, M::simdgroups)) {
          continue;
        }
      }
      sees = simd_any(sees);

      threadgroup_barrier(mem_flags::mem_threadgroup);
      bool q_finite = stage_rows<C, D, M::threads>(q_tile, q_head + block * p.q.row, p.q.row, p.queries - block,
                                                   p.head_dim, thread_index);
      bool do_finite = true;
      if (!apart) {
        do_finite = stage_rows<C, D, M::threads>(do_tile, do_head + block * p.d_o.row, p.d_o.row, p.queries - block,
                                                 p.value_dim, thread_index);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float products[C / 4];
      if (sees) {
        Strip<C / 8> strip;
        strip.add_nt(k_tile + 8 * simdgroup * M::stride, q_tile, M::stride, p.head_dim);
        strip.store(sums, M::sum_stride);
        for (uint i = 0; i < C / 4; ++i) {
          products[i] = sums[role.row * M::sum_stride + role.column + 4 * i];
        }
      }
      if (apart) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        do_finite = stage_rows<C, D, M::threads>(do_tile, do_head + block * p.d_o.row, p.d_o.row, p.queries - block,
                                                 p.value_dim, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      float gradients[C / 4];
      if (sees) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        Strip<C / 8> strip;
        strip.add_nt(v_tile + 8 * simdgroup * M::stride, do_tile, M::stride, p.value_dim);
        strip.store(sums, M::sum_stride);
        for (uint i = 0; i < C / 4; ++i) {
          gradients[i] = sums[role.row * M::sum_stride + role.column + 4 * i];
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < C / 4; ++i) {
          const uint query = block + role.column + 4 * i;
          const float4 row = query < p.queries ? row_statistics(statistics, first_statistics + query) : float4(0.0f);
          const Gradient gradient(products[i], gradients[i], biases[i], row, p.scoring);
          gradients[i] = gradient.product;
          weights[role.row * M::weight_stride + role.column + 4 * i] = Stage(gradient.weight);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (partly && any_thread(!do_finite, finite_flags, lane, simdgroup, M::simdgroups)) {
        make_finite<C, D, M::threads>(do_tile, p.value_dim, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (sees) {
        v_output.add_nn(weights, M::weight_stride, do_tile, M::stride, C, p.value_dim);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < C / 4; ++i) {
          weights[role.row * M::weight_stride + role.column + 4 * i] = Stage(gradients[i]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (apart) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        q_finite = stage_rows<C, D, M::threads>(q_tile, q_head + block * p.q.row, p.q.row, p.queries - block,
                                                p.head_dim, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (partly && any_thread(!q_finite, finite_flags + M::simdgroups, lane, simdgroup, M::simdgroups)) {
        make_finite<C, D, M::threads>(q_tile, p.head_dim, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (sees) {
        k_output.add_nn(weights, M::weight_stride, q_tile, M::stride, C, p.head_dim);
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  k_output.template write<C>(sums, dk + offset_of(batch, kv_head, own, p.dk), p.head_dim, inside, 1.0f, role);
  v_output.template write<C>(sums, dv + offset_of(batch, kv_head, own, p.dv), p.value_dim, inside, 1.0f, role);
}

// The materialised way, which holds the products of one head, [Q, K], and works on them in place. Its products take 0
// for what is not finite, as weights of 0 stand in them for what is hidden; `spoilt` is 0, and NaN for a key whose
// values are not finite, which so spoils the rows that see it.
//
// A row of products as softmax wants it.
struct HeadScores {
  device const float* products;
  device const bool* seen;
  device const float* bias;
  device const float* spoilt;
  ulong mask;  // offset of the row
  Span span;
  uint end;
  bool spoils;
  constant AttentionScoring& s;

  float4 at(uint i) const {
    float4 scores = load4(products, i, end, aligned);
    if (spoils) {
      scores += load4(spoilt, i, end, aligned);
    }
    for (uint k = 0; k < 4; ++k) {
      scores[k] = span.has(i + k) ? Score(scores[k], s).masked(mask_bias(seen, bias, mask + (i + k) * s.mask_key, s))
                                  : -INFINITY;
    }
    return scores;
  }
  float4 weights(float4 scores, float shift) const { return exp2((scores - shift) * s.exponent); }
};

constant bool two_vectors [[function_constant(1)]];  // of a row in one pass: 8 columns a thread instead of 4

// Products become weights.
template <bool looped>
[[kernel]] void attention_weights(device float* products [[buffer(0)]],   // [Q, K]
                                  device const bool* seen [[buffer(1)]],  // [B, H, Q, K] by strides, or unbound
                                  device const float* bias [[buffer(2)]],
                                  device const float* spoilt [[buffer(3)]],  // [K]; unbound if not p.spoils
                                  device float* lse [[buffer(4)]],           // [Q]
                                  constant AttentionParams& p [[buffer(5)]],
                                  uint query [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_position_in_threadgroup]],
                                  uint threads [[threads_per_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial_max[max_simdgroups], partial_sum[max_simdgroups];
  const RowThread row_thread = {thread_index, threads, lane, simdgroup, simdgroups};
  products += ulong(query) * p.keys;
  const ulong mask =
      p.first[2] * p.scoring.mask_batch + p.first[1] * p.scoring.mask_head + query * p.scoring.mask_query;
  const Span span = keys_of(query + p.shift, p.keys, p.scoring);
  const HeadScores scores = {products, seen, bias, spoilt, mask, span, span.end, p.spoils != 0, p.scoring};
  SoftmaxStatistics statistics;
  if (looped) {
    statistics = softmax_of_long_row(scores, products, p.keys, aligned, row_thread, partial_max, partial_sum);
  } else {
    statistics =
        softmax_of_row(scores, products, p.keys, aligned, two_vectors ? 2u : 1u, row_thread, partial_max, partial_sum);
  }
  if (thread_index == 0) {
    lse[query] = statistics.sum == 0.0f ? 0.0f : statistics.shift * p.scoring.natural + log(statistics.sum);
  }
}

// Products become weights, and gradients of weights those of products.
[[kernel]] void attention_gradients(device float* products [[buffer(0)]],   // [Q, K]
                                    device float* d_weights [[buffer(1)]],  // [Q, K]
                                    device const bool* seen [[buffer(2)]],  // [B, H, Q, K] by strides, or unbound
                                    device const float* bias [[buffer(3)]],
                                    device const float* statistics [[buffer(4)]],  // [Q, 4], of attention_statistics
                                    constant AttentionParams& p [[buffer(5)]],
                                    uint2 group [[threadgroup_position_in_grid]],
                                    uint2 thread_index [[thread_position_in_threadgroup]],
                                    uint2 threads [[threads_per_threadgroup]]) {
  const uint query = group.y, key = 4 * (group.x * threads.x + thread_index.x);
  products += ulong(query) * p.keys;
  d_weights += ulong(query) * p.keys;
  const Span span = keys_of(query + p.shift, p.keys, p.scoring);
  const ulong mask =
      p.first[2] * p.scoring.mask_batch + p.first[1] * p.scoring.mask_head + query * p.scoring.mask_query;
  float4 weights = load4(products, key, p.keys, aligned), gradients = load4(d_weights, key, p.keys, aligned);
  for (uint i = 0; i < 4; ++i) {
    const float hidden =
        span.has(key + i) ? mask_bias(seen, bias, mask + (key + i) * p.scoring.mask_key, p.scoring) : -INFINITY;
    const Gradient gradient(weights[i], gradients[i], hidden, row_statistics(statistics, query), p.scoring);
    weights[i] = gradient.weight;
    gradients[i] = gradient.product;
  }
  store4(products, key, p.keys, aligned, weights);
  store4(d_weights, key, p.keys, aligned, gradients);
}

#define INSTANTIATE_TILED(T, D, bytes)                                                                  \
  template [[host_name("attention_" #T "_" #D)]] [[kernel]]                                             \
  decltype(attention<T, D, attention_rows(bytes), attention_keys(bytes)>)                               \
      attention<T, D, attention_rows(bytes), attention_keys(bytes)>;                                    \
  template [[host_name("attention_dq_" #T "_" #D)]] [[kernel]]                                          \
  decltype(attention_dq<T, D, attention_dq_rows(bytes), attention_dq_keys(bytes)>)                      \
      attention_dq<T, D, attention_dq_rows(bytes), attention_dq_keys(bytes)>;                           \
  template [[host_name("attention_dkv_" #T "_" #D)]] [[kernel]]                                         \
  decltype(attention_dkv<T, D, attention_dkv_rows(bytes), attention_dkv_queries(bytes), (bytes > 512)>) \
      attention_dkv<T, D, attention_dkv_rows(bytes), attention_dkv_queries(bytes), (bytes > 512)>;

#define INSTANTIATE(T, bytes)              \
  INSTANTIATE_TILED(T, 64, 64 * (bytes))   \
  INSTANTIATE_TILED(T, 128, 128 * (bytes)) \
  INSTANTIATE_TILED(T, 256, 256 * (bytes)) \
  template                                 \
      [[host_name("attention_statistics_" #T)]] [[kernel]] decltype(attention_statistics<T>) attention_statistics<T>;

//          bytes of a staged number
INSTANTIATE(float, 4)
INSTANTIATE(half, 2)
INSTANTIATE(bfloat, 4)

template [[host_name(
    "attention_weights_single_row")]] [[kernel]] decltype(attention_weights<false>) attention_weights<false>;
template [[host_name("attention_weights_looped")]] [[kernel]] decltype(attention_weights<true>) attention_weights<true>;
