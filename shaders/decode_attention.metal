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
constant constexpr uint step_keys = simdgroups * simd_keys;
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

// What a threadgroup works on: `count` rows from `first` on, which are the queries of all heads that share a head of k
// and v, and the keys of their sequence.
struct Block {
  uint sequence, kv_head, first, count;
  uint keys;      // that the sequence has
  long position;  // of its first query
  constant DecodeParams& p;

  uint query(uint row) const { return (first + row) % p.queries; }
  uint head(uint row) const { return kv_head * p.group + (first + row) / p.queries; }
  uint heads() const { return p.kv_heads * p.group; }
  // Of a row among those of [batch, heads, queries].
  ulong index(uint row) const { return (ulong(sequence) * heads() + head(row)) * p.queries + query(row); }

  // The part of the keys which any query sees that a chunk has: whole steps of all simdgroups, but for the end.
  Span chunk(uint chunk) const {
    const uint start = keys_of(position, keys, p.scoring).first;
    const uint end = keys_of(position + p.queries - 1, keys, p.scoring).end;
    const uint steps = p.chunks * step_keys;
    const uint length = (end - start + steps - 1) / steps * step_keys;
    const uint from = min(start + chunk * length, end);
    const Span span = {from, min(from + length, end)};
    return span;
  }
};

// Where the numbers of a key or a value lie, from those of its head on; `page` is the sequence's number where there are
// no pages.
template <typename T>
inline device const T* row_of(
    device const T* numbers, uint key, uint page, constant AttentionTensor& t, constant DecodeParams& p) {
  return numbers + page * t.batch + (paged ? key & ((1u << p.page_bits) - 1) : key) * t.row;
}

// Numbers d to d + depth - 1 of the rows' queries, zeros behind their ends.
template <uint depth, typename T>
inline void stage_queries(threadgroup float4* to, device const T* q, uint d, Block block, uint thread_index) {
  constant DecodeParams& p = block.p;
  const uint vectors = (min(depth, p.head_dim - d) + 31) / 32 * 8;
  for (uint i = thread_index; i < block.count * vectors; i += threads) {
    const uint row = i / vectors, column = 4 * (i % vectors);
    device const T* query = q + block.sequence * p.q.batch + block.head(row) * p.q.head + block.query(row) * p.q.row;
    to[(row * depth + column) / 4] = load4(query, d + column, p.head_dim, aligned);
  }
}

// Adds to the scores of a simdgroup's keys with all rows what these numbers of queries and keys give. Eight lanes work
// on a key.
template <uint rows, uint depth, typename T>
inline void add_products(threadgroup float* scores,
                         threadgroup const float4* queries,
                         device const T* k,
                         threadgroup const uint* pages,
                         Span own,
                         uint d,
                         Block block,
                         uint lane) {
  constant DecodeParams& p = block.p;
  const uint part = lane % 8;
  for (uint j = lane / 8; own.first + j / 4 * 4 < own.end; j += 4) {
    const uint key = own.first + j, page = paged ? pages[j] : block.sequence;
    const bool there = key < own.end && page < p.pages;
    device const T* key_row = row_of(k, key, page, p.k, p);
    float4 numbers[depth / 32];
    for (uint i = 0; i < depth / 32; ++i) {
      numbers[i] = 0.0f;
      if (there && d + 32 * i < p.head_dim) {
        numbers[i] = load4(key_row, d + 32 * i + 4 * part, p.head_dim, aligned);
      }
    }
    for (uint first = 0; first < rows; first += 8) {
      if (first < block.count) {
        float products[8];
        for (uint r = 0; r < 8; ++r) {
          products[r] = 0.0f;
          for (uint i = 0; i < depth / 32; ++i) {
            if (first + r < block.count && d + 32 * i < p.head_dim) {
              products[r] += dot(numbers[i], queries[((first + r) * depth + 32 * i + 4 * part) / 4]);
            }
          }
        }
        const float product = sum_of_lane(products, lane);
        threadgroup float& score = scores[j * rows + first + part];
        score = d == 0 ? product : score + product;
      }
    }
  }
}

// The softmax of one row, of which a lane has every stride-th key.
template <uint rows>
struct Softmax {
  uint row;
  float maximum, sum;

  // Makes weights of the scores of a simdgroup's keys; returns the factor for what was weighted before.
  float weigh(threadgroup float* scores,
              device const bool* seen,
              device const float* bias,
              threadgroup const uint* pages,
              threadgroup float* maxima,
              Span own,
              Block block,
              uint lane,
              uint simdgroup) {
    constant AttentionScoring& scoring = block.p.scoring;
    const uint stride = 32 / rows;
    const Span visible = keys_of(block.position + block.query(row), block.keys, scoring);
    const ulong mask_row = block.sequence * scoring.mask_batch + block.head(row) * scoring.mask_head +
                           block.query(row) * scoring.mask_query;
    float larger = -INFINITY;
    for (uint j = lane / rows; j < simd_keys; j += stride) {
      const uint key = own.first + j;
      float score = -INFINITY;
      if (row < block.count && visible.has(key) && (!paged || pages[j] < block.p.pages)) {
        score = Score(scores[j * rows + row], scoring)
                    .masked(mask_bias(seen, bias, mask_row + key * scoring.mask_key, scoring));
      }
      scores[j * rows + row] = score;
      larger = max(larger, score);
    }
    for (uint bit = rows; bit < 32; bit *= 2) {
      larger = max(larger, simd_shuffle_xor(larger, ushort(bit)));
    }
    if (Split<rows>::column_groups > 1) {
      maxima[simdgroup * rows + row] = larger;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint s = 0; s < simdgroups; ++s) {
        larger = max(larger, maxima[s * rows + row]);
      }
    }
    larger = max(larger, maximum);
    const float shift = shift_of(larger), factor = weight(maximum, shift, scoring);
    float added = 0.0f;
    for (uint j = lane / rows; j < simd_keys; j += stride) {
      const float score = scores[j * rows + row];
      const float w = score == -INFINITY ? hidden : weight(score, shift, scoring);
      scores[j * rows + row] = w;
      added += w;
    }
    for (uint bit = rows; bit < 32; bit *= 2) {
      added += simd_shuffle_xor(added, ushort(bit));
    }
    sum = sum * factor + added;
    maximum = larger;
    return factor;
  }

  // Brings what the simdgroups have to one maximum and one sum; returns the factor for this simdgroup's.
  float join(threadgroup float* maxima, threadgroup float* sums, Block block, uint lane, uint simdgroup) {
    if (lane < rows) {
      maxima[simdgroup * rows + row] = maximum;
      sums[simdgroup * rows + row] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < simdgroups; ++s) {
      maximum = max(maximum, maxima[s * rows + row]);
    }
    sum = 0.0f;
    float own = 0.0f;
    for (uint s = 0; s < simdgroups; ++s) {
      const float factor = weight(maxima[s * rows + row], shift_of(maximum), block.p.scoring);
      sum += sums[s * rows + row] * factor;
      own = s == simdgroup ? factor : own;
    }
    return own;
  }
};

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
  // Scores of a key with all rows, then their weights.
  threadgroup float4 weight_memory[step_keys * rows / 4];
  threadgroup float* weights = reinterpret_cast<threadgroup float*>(weight_memory);
  threadgroup float factors[simdgroups * rows], maxima[simdgroups * rows], sums[simdgroups * rows];
  threadgroup uint pages[step_keys];  // of each key; p.pages where it has none

  const uint sequence = group.z, kv_head = group.y / p.row_blocks, first_row = rows * (group.y % p.row_blocks);
  const uint keys = p.has_lengths ? uint(clamp(lengths[sequence], 0, int(p.keys))) : p.keys;
  const Block block = {sequence,  kv_head,
                       first_row, min(rows, p.group * p.queries - first_row),
                       keys,      p.has_lengths ? long(keys) - long(p.queries) : long(p.position),
                       p};
  const Span chunk = block.chunk(group.x);
  k += kv_head * p.k.head;
  v += kv_head * p.v.head;

  // What is a simdgroup's own, and a lane's: a row of the softmax, columns of the values.
  threadgroup float* own_weights = weights + simdgroup * simd_keys * rows;
  threadgroup uint* own_pages = pages + simdgroup * simd_keys;
  threadgroup float* own_factors = factors + simdgroup * rows;
  const uint row = lane % rows, column_group = simdgroup % column_groups, lane_vector = lane % p.lanes;
  Softmax<rows> softmax = {row, -INFINITY, 0.0f};
  Sums<rows> total;
  for (uint start = chunk.first; start < chunk.end; start += step_keys) {
    const uint own_start = start + simdgroup * simd_keys;
    const Span own = {own_start, max(own_start, min(own_start + simd_keys, chunk.end))};
    split_barrier<rows>();
    if (paged) {
      const uint key = own.first + lane;
      const int page = key < own.end ? table[ulong(sequence) * p.table_pages + (key >> p.page_bits)] : -1;
      own_pages[lane] = page < 0 ? p.pages : min(uint(page), p.pages);
      split_barrier<rows>();
    }
    for (uint d = 0; d == 0 || d < p.head_dim; d += depth) {
      if (start == chunk.first || p.head_dim > depth) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_queries<depth>(memory, q, d, block, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      add_products<rows, depth>(own_weights, memory, k, own_pages, own, d, block, lane);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float factor = softmax.weigh(own_weights, seen, bias, own_pages, maxima, own, block, lane, simdgroup);
    if (lane < rows) {
      own_factors[row] = factor;
    }
    split_barrier<rows>();

    // Values: neighbouring lanes have neighbouring columns.
    total.scale(own_factors, block.count);
    const Span valued = {key_groups == 1 ? start : own.first,
                         key_groups == 1 ? min(start + step_keys, chunk.end) : own.end};
    for (uint key = valued.first + lane / p.lanes; key < valued.end; key += 32 / p.lanes) {
      const uint page = paged ? pages[key - start] : sequence;
      if (page < p.pages) {
        device const T* value_row = row_of(v, key, page, p.v, p);
        Columns value[vectors];
        for (uint i = 0; i < vectors; ++i) {
          const uint vector = lane_vector + 32 * i;
          value[i] = Columns(0.0f);
          if (vector < p.share) {
            load(value_row, width * (column_group * p.share + vector), p.value_dim, value[i]);
          }
        }
        total.add(weights + (key - start) * rows, value, block.count);
      }
    }
  }

  for (uint bit = p.lanes; bit < 32; bit *= 2) {
    total.join_lanes(bit);
  }
  const float factor = softmax.join(maxima, sums, block, lane, simdgroup);
  if (lane < rows) {
    own_factors[row] = factor;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Of the rows of all sequences, those of this chunk come after those of the chunks before it.
  const ulong chunk_rows = ulong(groups.z) * block.heads() * p.queries * group.x;
  if (simdgroup == 0 && lane < block.count) {
    sums[row] = softmax.sum;
    if (p.chunks == 1) {
      lse[block.index(row)] = log_sum(softmax.maximum, softmax.sum, p.scoring);
    } else {
      statistics[2 * (chunk_rows + block.index(row))] = softmax.maximum;
      statistics[2 * (chunk_rows + block.index(row)) + 1] = softmax.sum;
    }
  }
  if (p.chunks > 1 && chunk.first == chunk.end) {
    return;
  }
  total.scale(own_factors, block.count);
#pragma unroll
  for (uint first = 0; first < rows; first += 8) {
    if (first < block.count) {
      // What the simdgroups have of these rows, added in their order.
      for (uint turn = 0; turn < key_groups; ++turn) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < vectors; ++i) {
          const uint vector = lane_vector + 32 * i;
          if (simdgroup / column_groups == turn && lane < p.lanes && vector < p.share) {
            for (uint r = 0; r < 8; ++r) {
              threadgroup Columns& to =
                  *reinterpret_cast<threadgroup Columns*>(reinterpret_cast<threadgroup float*>(memory) +
                                                          r * most_columns + width * (column_group * p.share + vector));
              to = turn == 0 ? total.o[first + r][i] : to + total.o[first + r][i];
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint row_vectors = (p.value_dim + 3) / 4;
      for (uint i = thread_index; i < min(8u, block.count - first) * row_vectors; i += threads) {
        const uint r = first + i / row_vectors, column = 4 * (i % row_vectors);
        const float4 values = memory[(i / row_vectors * most_columns + column) / 4];
        if (p.chunks == 1) {
          const ulong index = (ulong(sequence) * p.queries + block.query(r)) * block.heads() + block.head(r);
          store4(o + index * p.value_dim, column, p.value_dim, p.aligned_o, quotient(values, sums[r]));
        } else {
          store4(partial_o + (chunk_rows + block.index(r)) * p.value_dim, column, p.value_dim, p.aligned_o, values);
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
