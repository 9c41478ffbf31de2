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

struct GemmParams {
  uint64_t a_stride, b_stride;       // elements from one line of A and B to the next, as they lie in memory
  uint64_t addend_stride, d_stride;  // and from one row of the addend and the result
  uint64_t a_batch[3], b_batch[3];   // strides of the batch's dimensions, 0 where one broadcasts
  uint64_t addend_batch[3];
  uint64_t d_matrix;  // elements from one matrix of the result, or one chunk's sums, to the next
  uint32_t batch[2];  // sizes of the batch's last two dimensions
  uint32_t m, n, k;
  uint32_t chunks;  // into which K is split
  uint32_t span;    // of K, in each chunk: a multiple of the staged depth
  // Where this dispatch begins, of one product that takes several: matrix and chunk, and tile.
  uint32_t first_matrix, first_row_tile, first_column_tile;
  float scale;
  uint32_t has_addend, has_bias;
  uint32_t aligned_d;  // rows of the addend and the result start at multiples of 4 elements
};

struct GatedParams {
  uint64_t gate_stride;      // elements from one row of gate to the next
  uint64_t up_stride;        // the same of up
  uint64_t dy_stride;        // the same of dy, in the backward kernels
  uint64_t gradient_stride;  // the same of dgate and dup
  uint32_t columns;
  uint32_t unused;  // fills the struct to a multiple of 8 bytes, so that none are left uninitialised
};

// Where the heads of one tensor lie: elements from one batch element, head and position to the next.
struct RopeTensor {
  uint64_t x_batch, x_head, x_position;
  uint64_t y_batch, y_head, y_position;
};

struct RopeParams {
  RopeTensor tensors[2];
  uint64_t angle_batch;  // elements from one batch element of the cosines and sines, or of the positions, to the next
  uint64_t angle_position;  // and from one position
  uint32_t heads[2];
  uint32_t positions;
  uint32_t pairs;      // half of the rotary width
  uint32_t untouched;  // components behind the rotary width
  float sign;          // -1 turns back
};

struct SoftmaxParams {
  uint64_t x_stride;  // elements from one row of x to the next; in the backward kernel of dy
  uint64_t y_stride;  // the same of y, in the backward kernel
  uint64_t mask_batch, mask_head, mask_query, mask_key;  // strides of the mask, 0 where it broadcasts
  uint32_t heads;
  uint32_t queries;
  uint32_t keys;
  int32_t causal_shift;  // query i attends to keys up to i + causal_shift
  float scale;
  uint32_t unused;  // fills the struct to a multiple of 8 bytes, so that none are left uninitialised
};

// How attention makes a score of the product of a query and a key, and which keys a query sees. Scores are in units of
// which `natural` make one of the natural logarithm, and a weight is exp2(exponent * (score - shift)).
struct AttentionScoring {
  uint64_t mask_batch, mask_head, mask_query, mask_key;  // strides of the mask, 0 where it broadcasts
  // A query at position i sees the keys from i - before to i + after.
  int64_t before, after;
  uint32_t mask;  // one of the constants below
  float scale;    // of a product; with a softcap the argument of tanh
  float softcap;  // in units of scores; 0 where there is none
  float natural, exponent;
  float slope;  // of the score in natural units by the product, where the softcap leaves it alone
};
#define ATTENTION_MASK_NONE 0
#define ATTENTION_MASK_BOOL 1   // true: sees
#define ATTENTION_MASK_FLOAT 2  // added to the score, in natural units; -inf hides

// Where the rows of one tensor of attention lie: elements from one batch element, head and position to the next.
struct AttentionTensor {
  uint64_t batch, head, row;
};

struct AttentionParams {
  AttentionTensor q, k, v, o, d_o, dq, dk, dv;
  AttentionScoring scoring;
  int64_t shift;   // query i is at position i + shift
  uint32_t heads;  // of q
  uint32_t group;  // heads of q to one of k and v
  uint32_t queries, keys;
  uint32_t head_dim, value_dim;
  uint32_t blocks;    // of rows, in all dispatches
  uint32_t first[3];  // where this dispatch begins, of one call that takes several: block, head and batch element
  uint32_t spoils;    // whether the materialised way is told of values that are not finite
  uint32_t unused;    // fills the struct to a multiple of 8 bytes, so that none are left uninitialised
};

// The tiled kernels hold some rows in threadgroup memory, 8 a simdgroup, and pass blocks of others by them. Their
// numbers, by the bytes of a staged row of the widest head that the kernel takes, so that 32 KB are enough.
constexpr uint32_t attention_rows(uint32_t row_bytes) { return row_bytes <= 512 ? 32 : 16; }
constexpr uint32_t attention_keys(uint32_t row_bytes) { return row_bytes <= 256 ? 32 : row_bytes <= 512 ? 16 : 8; }
constexpr uint32_t attention_dq_rows(uint32_t row_bytes) { return row_bytes <= 256 ? 32 : row_bytes <= 512 ? 16 : 8; }
constexpr uint32_t attention_dq_keys(uint32_t row_bytes) { return row_bytes <= 128 ? 32 : row_bytes <= 512 ? 16 : 8; }
constexpr uint32_t attention_dkv_rows(uint32_t row_bytes) { return attention_dq_rows(row_bytes); }
constexpr uint32_t attention_dkv_queries(uint32_t row_bytes) {
  return row_bytes <= 128 ? 32 : row_bytes <= 256 ? 16 : 8;
}

// Attention of a few queries to the keys and values of a cache. A page holds 2^page_bits keys; where there are no pages
// the whole of a sequence is one, and its number that of the sequence.
struct DecodeParams {
  AttentionScoring scoring;
  int64_t position;         // of the first query, where the sequences have no lengths of their own
  AttentionTensor q, k, v;  // the batch of k and v being pages
  uint32_t kv_heads;
  uint32_t group;    // heads of q that share a head of k and v
  uint32_t queries;  // of a sequence
  uint32_t keys;     // that a sequence has room for
  uint32_t head_dim, value_dim;
  uint32_t pages, page_bits;
  uint32_t table_pages;  // of a sequence
  uint32_t row_blocks;   // into which the group's queries are cut
  uint32_t chunks;       // into which the keys of a sequence are cut
  uint32_t share;        // vectors of a value that one simdgroup works on
  uint32_t lanes;        // that work on one value: the share's next power of two, at most 32
  uint32_t has_lengths;
  uint32_t aligned_o;  // rows of the result start at multiples of 4 elements
  uint32_t unused;     // fills the struct to a multiple of 8 bytes, so that none are left uninitialised
};

struct CacheWriteParams {
  AttentionTensor k, v;              // without a batch, a row being a token
  AttentionTensor k_pages, v_pages;  // the batch being pages, a row a slot of one
  uint64_t slot_stride;              // elements from one number of a slot to the next
  int64_t slots;                     // in all pages
  uint32_t heads;
  uint32_t head_dim, value_dim;
  uint32_t page_size;
};
