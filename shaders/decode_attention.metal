// Attention of a few queries to the keys and values of a cache that is contiguous or in pages, in one pass over the
// keys or in two. The rows of a threadgroup are the queries of all heads that share a head of k and v, so that keys and
// values are read once for up to 32 rows. Four simdgroups work through the keys, 32 each at a time.
#include <metal_stdlib>

#include "attention.h"
#include "load_store.h"
#include "params.h"

using namespace metal;

constant bool aligned [[function_constant(0)]];  // rows of q, k and v start at multiples of 4 elements
constant bool paged [[function_constant(1)]];

constant constexpr uint simdgroups = 4, threads = 128;
constant constexpr uint simd_keys = 32;  // of a simdgroup at a time
constant constexpr uint most_columns = 256;
// The weight of a key that is hidden. Added like any other it changes nothing, but where a value is not finite it tells
// the key from one that is seen and has lost all weight.
constant constexpr float hidden = -0.0f;
inline bool is_hidden(float weight) { return weight == 0.0f && signbit(weight); }

// How the rows of a threadgroup are shared out. Weights times values of 8 rows fit into a simdgroup's registers, and
// each simdgroup has keys and a softmax of its own; of 32 rows each simdgroup has a quarter of the columns, and the
// simdgroups share one softmax.
template <uint rows>
struct Split;
template <>
struct Split<8> {
  typedef float4 Columns;
  static constexpr constant uint vectors = 2, column_groups = 1;
};
template <>
struct Split<32> {
  typedef float2 Columns;
  static constexpr constant uint vectors = 1, column_groups = 4;
};

template <uint rows>
inline void split_barrier() {
  if (Split<rows>::column_groups == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <typename T>
inline void load(device const T* row, uint i, uint count, thread float4& to) {
  to = load4(row, i, count, aligned);
}
template <typename T>
inline void load(device const T* row, uint i, uint count, thread float2& to) {
  to = load2(row, i, count, aligned);
}

inline float log_sum(float maximum, float sum, constant AttentionScoring& s) {
  return sum == 0.0f ? 0.0f : (maximum + log2(sum) / s.exponent) * s.natural;
}

// Weighted sums of values: a lane's columns of every row.
template <uint rows>
struct Sums {
  typedef typename Split<rows>::Columns Columns;
  static constexpr constant uint vectors = Split<rows>::vectors;
  static constexpr constant uint width = sizeof(Columns) / sizeof(float);

  Columns o[rows][vectors];

  Sums() {
    for (uint r = 0; r < rows; ++r) {
      for (uint v = 0; v < vectors; ++v) {
        o[r][v] = Columns(0.0f);
      }
    }
  }

  void scale(threadgroup const float* factors, uint count) {
#pragma unroll
    for (uint r = 0; r < rows; ++r) {
      for (uint v = 0; r < count && v < vectors; ++v) {
        o[r][v] *= factors[r];
      }
    }
  }

  // Adds one value, with a weight for each of `count` rows.
  void add(threadgroup const float* weights, thread const Columns* value, uint count) {
    bool finite = true;
    for (uint v = 0; v < vectors; ++v) {
      finite = finite && all(isfinite(value[v]));
    }
#pragma unroll
    for (uint block = 0; block < rows; block += 4) {
      if (block < count) {
        const float4 w = *reinterpret_cast<threadgroup const float4*>(weights + block);
        for (uint r = 0; r < 4; ++r) {
          if (finite || !is_hidden(w[r])) {
            for (uint v = 0; v < vectors; ++v) {
              o[block + r][v] += w[r] * value[v];
            }
          }
        }
      }
    }
  }

  // Adds up what the lanes that differ in this bit have.
  void join_lanes(uint bit) {
#pragma unroll
    for (uint r = 0; r < rows; ++r) {
      for (uint v = 0; v < vectors; ++v) {
        for (uint i = 0; i < width; ++i) {
          o[r][v][i] += simd_shuffle_xor(o[r][v][i], ushort(bit));
        }
      }
    }
  }
};

// Of eight numbers in each of eight neighbouring lanes, the sum of those that have the lane's place among the eight.
inline float sum_of_lane(thread const float* values, uint lane) {
  float four[4], two[2];
  for (uint i = 0; i < 4; ++i) {
    const bool upper = lane & 4;
    four[i] = (upper ? values[i + 4] : values[i]) + simd_shuffle_xor(upper ? values[i] : values[i + 4], ushort(4));
  }
  for (uint i = 0; i < 2; ++i) {
    const bool upper = lane & 2;
    two[i] = (upper ? four[i + 2] : four[i]) + simd_shuffle_xor(upper ? four[i] : four[i + 2], ushort(2));
  }
  const bool upper = lane & 1;
  return (upper ? two[1] : two[0]) + simd_shuffle_xor(upper ? two[0] : two[1], ushort(1));
}

// One chunk of the keys of one sequence, for up to `rows` rows of one head of k and v.
template <typename T, uint rows>
[[kernel]] [[max_total_threads_per_threadgroup(threads)]] void decode_attention(
    device const T* q [[buffer(0)]],        // [batch, heads, queries, head_dim] by strides
    device const T* k [[buffer(1)]],        // [page or sequence, key, kv_heads, head_dim] by strides
    device const T* v [[buffer(2)]],        // [page or sequence, key, kv_heads, value_dim] by strides
    device const bool* seen [[buffer(3)]],  // the mask, by strides; this, the next, or both are unbound
    device const float* bias [[buffer(4)]],
    device const int* lengths [[buffer(5)]],  // [batch]; unbound if not has_lengths
    device const int* table [[buffer(6)]],    // [batch, pages of a sequence]; unbound if not paged
    device T* o [[buffer(7)]],                // [batch, queries, heads, value_dim]; of one chunk
    device float* lse [[buffer(8)]],          // [batch, heads, queries]; of one chunk
    device float* partial_o [[buffer(9)]],    // [chunks, batch, heads, queries, value_dim]; of several, else unbound
    device float* statistics [[buffer(10)]],  // [chunks, batch, heads, queries, 2]: maximum, sum; as the one before
    constant DecodeParams& p [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],  // chunk; head of k and v, block of rows; sequence
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef typename Split<rows>::Columns Columns;
  constexpr uint vectors = Split<rows>::vectors, width = sizeof(Columns) / sizeof(float);
  constexpr uint column_groups = Split<rows>::column_groups, key_groups = simdgroups / column_groups;
  constexpr uint depth = 8 * most_columns / rows;  // of the queries, at a time
  // Rows of queries; in the end 8 rows of sums.
  threadgroup float4 memory[8 * most_columns / 4];
  threadgroup float* queries = reinterpret_cast<threadgroup float*>(memory);
  // Scores of a key with all rows, then their weights.
  threadgroup float4 weight_memory[simdgroups * simd_keys * rows / 4];
  threadgroup float* weights = reinterpret_cast<threadgroup float*>(weight_memory);
  threadgroup float factors[simdgroups * rows], maxima[simdgroups * rows], sums[simdgroups * rows];
  threadgroup uint pages[simdgroups * simd_keys];  // of each key; p.pages where it has none

  const uint sequence = group.z, kv_head = group.y / p.row_blocks;
  const uint first_row = rows * (group.y % p.row_blocks), count = min(rows, p.group * p.queries - first_row);
  k += kv_head * p.k.head;
  v += kv_head * p.v.head;

  long position = p.position;
  uint keys = p.keys;
  if (p.has_lengths) {
    keys = uint(clamp(lengths[sequence], 0, int(p.keys)));
    position = long(keys) - long(p.queries);
  }
  // The chunk's part of the keys that any query sees.
  constexpr uint step = simdgroups * simd_keys;
  uint first = keys_of(position, keys, p.scoring).first, end = keys_of(position + p.queries - 1, keys, p.scoring).end;
  const uint span = end > first ? (end - first + p.chunks * step - 1) / (p.chunks * step) * step : 0;
  first = min(first + group.x * span, end);
  end = min(first + span, end);

  // This lane's row in the softmax, of which it has every key_stride-th key.
  const uint row = lane % rows, key_stride = 32 / rows, row_query = (first_row + row) % p.queries;
  const uint row_head = kv_head * p.group + (first_row + row) / p.queries;
  const Span row_keys = keys_of(position + row_query, keys, p.scoring);
  const ulong mask_row =
      sequence * p.scoring.mask_batch + row_head * p.scoring.mask_head + row_query * p.scoring.mask_query;
  float maximum = -INFINITY, sum = 0.0f;

  // This lane's part of the values.
  const uint column_group = simdgroup % column_groups, lane_vector = lane % p.lanes;
  Sums<rows> total;

  threadgroup float* own_weights = weights + simdgroup * simd_keys * rows;
  for (uint start = first; start < end; start += step) {
    const uint own_start = start + simdgroup * simd_keys, own_end = max(own_start, min(own_start + simd_keys, end));
    split_barrier<rows>();
    if (paged) {
      const uint key = own_start + lane;
      int page = -1;
      if (key < own_end) {
        page = table[ulong(sequence) * p.table_pages + (key >> p.page_bits)];
      }
      pages[simdgroup * simd_keys + lane] = page < 0 ? p.pages : min(uint(page), p.pages);
      split_barrier<rows>();
    }

    // Scores: eight lanes to a key.
    for (uint d = 0; d == 0 || d < p.head_dim; d += depth) {
      if (start == first || p.head_dim > depth) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint row_vectors = (min(depth, p.head_dim - d) + 31) / 32 * 8;
        for (uint i = thread_index; i < count * row_vectors; i += threads) {
          const uint r = first_row + i / row_vectors, column = 4 * (i % row_vectors);
          const ulong offset =
              sequence * p.q.batch + (kv_head * p.group + r / p.queries) * p.q.head + r % p.queries * p.q.row;
          memory[(i / row_vectors * depth + column) / 4] = load4(q + offset, d + column, p.head_dim, aligned);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      for (uint j = lane / 8; own_start + j / 4 * 4 < own_end; j += 4) {
        const uint key = own_start + j, part = lane % 8;
        const uint page = paged ? pages[simdgroup * simd_keys + j] : sequence;
        const uint slot = paged ? key & ((1u << p.page_bits) - 1) : key;
        const bool there = key < own_end && page < p.pages;
        device const T* key_row = k + page * p.k.batch + slot * p.k.row;
        float4 numbers[depth / 32];
        for (uint i = 0; i < depth / 32; ++i) {
          numbers[i] = 0.0f;
          if (there && d + 32 * i < p.head_dim) {
            numbers[i] = load4(key_row, d + 32 * i + 4 * part, p.head_dim, aligned);
          }
        }
        for (uint block = 0; block < rows; block += 8) {
          if (block < count) {
            float products[8];
            for (uint r = 0; r < 8; ++r) {
              products[r] = 0.0f;
              for (uint i = 0; i < depth / 32; ++i) {
                if (block + r < count && d + 32 * i < p.head_dim) {
                  products[r] += dot(numbers[i], memory[((block + r) * depth + 32 * i + 4 * part) / 4]);
                }
              }
            }
            const float product = sum_of_lane(products, lane);
            threadgroup float& score = own_weights[j * rows + block + part];
            score = d == 0 ? product : score + product;
          }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax: a row to a lane.
    float larger = -INFINITY;
    for (uint j = lane / rows; j < simd_keys; j += key_stride) {
      const uint key = own_start + j;
      float score = -INFINITY;
      if (row < count && key < own_end && row_keys.has(key) && (!paged || pages[simdgroup * simd_keys + j] < p.pages)) {
        const float b = mask_bias(seen, bias, mask_row + key * p.scoring.mask_key, p.scoring);
        score = Score(own_weights[j * rows + row], p.scoring).masked(b);
      }
      own_weights[j * rows + row] = score;
      larger = max(larger, score);
    }
    for (uint bit = rows; bit < 32; bit *= 2) {
      larger = max(larger, simd_shuffle_xor(larger, ushort(bit)));
    }
    if (column_groups > 1) {
      maxima[simdgroup * rows + row] = larger;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint s = 0; s < simdgroups; ++s) {
        larger = max(larger, maxima[s * rows + row]);
      }
    }
    larger = max(larger, maximum);
    const float shift = shift_of(larger), factor = weight(maximum, shift, p.scoring);
    float added = 0.0f;
    for (uint j = lane / rows; j < simd_keys; j += key_stride) {
      const float score = own_weights[j * rows + row];
      const float w = score == -INFINITY ? hidden : weight(score, shift, p.scoring);
      own_weights[j * rows + row] = w;
      added += w;
    }
    for (uint bit = rows; bit < 32; bit *= 2) {
      added += simd_shuffle_xor(added, ushort(bit));
    }
    sum = sum * factor + added;
    maximum = larger;
    if (lane < rows) {
      factors[simdgroup * rows + row] = factor;
    }
    split_barrier<rows>();

    // Values: neighbouring lanes have neighbouring columns.
    total.scale(factors + simdgroup * rows, count);
    const uint values_start = key_groups == 1 ? start : own_start,
               values_end = key_groups == 1 ? min(start + step, end) : own_end;
    for (uint key = values_start + lane / p.lanes; key < values_end; key += 32 / p.lanes) {
      const uint page = paged ? pages[key - start] : sequence;
      if (paged && page == p.pages) {
        continue;
      }
      device const T* value_row = v + page * p.v.batch + (paged ? key & ((1u << p.page_bits) - 1) : key) * p.v.row;
      Columns value[vectors];
      for (uint i = 0; i < vectors; ++i) {
        const uint vector = lane_vector + 32 * i;
        value[i] = Columns(0.0f);
        if (vector < p.share) {
          load(value_row, width * (column_group * p.share + vector), p.value_dim, value[i]);
        }
      }
      total.add(weights + (key - start) * rows, value, count);
    }
  }

  // What the simdgroups have is brought to one maximum, and added in their order.
  for (uint bit = p.lanes; bit < 32; bit *= 2) {
    total.join_lanes(bit);
  }
  if (lane < rows) {
    maxima[simdgroup * rows + row] = maximum;
    sums[simdgroup * rows + row] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float all_sum = 0.0f;
  for (uint s = 0; s < simdgroups; ++s) {
    maximum = max(maximum, maxima[s * rows + row]);
  }
  for (uint s = 0; s < simdgroups; ++s) {
    const float factor = weight(maxima[s * rows + row], shift_of(maximum), p.scoring);
    all_sum += sums[s * rows + row] * factor;
    if (s == simdgroup && lane < rows) {
      factors[s * rows + row] = factor;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong all_rows = ulong(groups.z) * p.kv_heads * p.group * p.queries;
  if (simdgroup == 0 && lane < count) {
    const ulong index = (ulong(sequence) * p.kv_heads * p.group + row_head) * p.queries + row_query;
    sums[row] = all_sum;
    if (p.chunks == 1) {
      lse[index] = log_sum(maximum, all_sum, p.scoring);
    } else {
      statistics[2 * (group.x * all_rows + index)] = maximum;
      statistics[2 * (group.x * all_rows + index) + 1] = all_sum;
    }
  }
  if (p.chunks > 1 && first == end) {
    return;
  }
  total.scale(factors + simdgroup * rows, count);
#pragma unroll
  for (uint block = 0; block < rows; block += 8) {
    if (block < count) {
      for (uint turn = 0; turn < key_groups; ++turn) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < vectors; ++i) {
          const uint vector = lane_vector + 32 * i;
          if (simdgroup / column_groups == turn && lane < p.lanes && vector < p.share) {
            for (uint r = 0; r < 8; ++r) {
              threadgroup Columns& to = *reinterpret_cast<threadgroup Columns*>(
                  queries + r * most_columns + width * (column_group * p.share + vector));
              to = turn == 0 ? total.o[block + r][i] : to + total.o[block + r][i];
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint row_vectors = (p.value_dim + 3) / 4;
      for (uint i = thread_index; i < min(8u, count - block) * row_vectors; i += threads) {
        const uint r = block + i / row_vectors, column = 4 * (i % row_vectors);
        const uint head = kv_head * p.group + (first_row + r) / p.queries, query = (first_row + r) % p.queries;
        const float4 values = memory[(i / row_vectors * most_columns + column) / 4];
        if (p.chunks == 1) {
          const ulong index = (ulong(sequence) * p.queries + query) * p.kv_heads * p.group + head;
          store4(o + index * p.value_dim, column, p.value_dim, p.aligned_o, quotient(values, sums[r]));
        } else {
          const ulong index = (ulong(sequence) * p.kv_heads * p.group + head) * p.queries + query;
          store4(partial_o + (group.x * all_rows + index) * p.value_dim, column, p.value_dim, p.aligned_o, values);
        }
      }
    }
  }
}

// The chunks of each row, in their order.
template <typename T>
[[kernel]] void decode_attention_join(device const float* partial_o [[buffer(0)]],   // [chunks, rows, value_dim]
                                      device const float* statistics [[buffer(1)]],  // [chunks, rows, 2]: maximum, sum
                                      device T* o [[buffer(2)]],        // [batch, queries, heads, value_dim]
                                      device float* lse [[buffer(3)]],  // [rows], which is [batch, heads, queries]
                                      constant DecodeParams& p [[buffer(4)]],
                                      uint row [[threadgroup_position_in_grid]],
                                      uint rows [[threadgroups_per_grid]],
                                      uint thread_index [[thread_position_in_threadgroup]],
                                      uint row_threads [[threads_per_threadgroup]]) {
  float maximum = -INFINITY, sum = 0.0f;
  for (uint chunk = 0; chunk < p.chunks; ++chunk) {
    maximum = max(maximum, statistics[2 * (ulong(chunk) * rows + row)]);
  }
  const uint column = 4 * thread_index;
  float4 sums = 0.0f;
  for (uint chunk = 0; chunk < p.chunks; ++chunk) {
    const ulong index = ulong(chunk) * rows + row;
    const float chunk_sum = statistics[2 * index + 1];
    // Of a chunk that sees nothing there may be no sums.
    if (chunk_sum != 0.0f) {
      const float factor = weight(statistics[2 * index], shift_of(maximum), p.scoring);
      sum += factor * chunk_sum;
      sums += factor * load4(partial_o + index * p.value_dim, column, p.value_dim, p.aligned_o);
    }
  }
  if (thread_index == 0) {
    lse[row] = log_sum(maximum, sum, p.scoring);
  }
  const uint heads = p.kv_heads * p.group, query = row % p.queries, head = row / p.queries % heads;
  const ulong index = (ulong(row / p.queries / heads) * p.queries + query) * heads + head;
  store4(o + index * p.value_dim, column, p.value_dim, p.aligned_o, quotient(sums, sum));
}

#define INSTANTIATE_ROWS(T, rows)                                     \
  template [[host_name("decode_attention_" #T "_" #rows)]] [[kernel]] \
  decltype(decode_attention<T, rows>) decode_attention<T, rows>;

#define INSTANTIATE(T)    \
  INSTANTIATE_ROWS(T, 8)  \
  INSTANTIATE_ROWS(T, 32) \
  template [[host_name(   \
      "decode_attention_join_" #T)]] [[kernel]] decltype(decode_attention_join<T>) decode_attention_join<T>;

INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)
