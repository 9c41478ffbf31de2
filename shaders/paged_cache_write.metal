// Puts the keys and values of new tokens into the slots of a paged cache: each number is read once and written once.
#include <metal_stdlib>

#include "load_store.h"
#include "params.h"

using namespace metal;

constant bool vectorized [[function_constant(0)]];  // rows of all four tensors start at multiples of 4 elements

// Four numbers of one head of one token.
template <typename T>
inline void copy4(device const T* from, device T* to, uint i, uint count) {
  store4(to, i, count, vectorized, load4(from, i, count, vectorized));
}

// A thread takes one vector of one token: the keys' come first, then those of the values.
template <typename T, typename I>
[[kernel]] void paged_cache_write(device const T* k [[buffer(0)]],  // [tokens, heads, head_dim] by strides
                                  device const T* v [[buffer(1)]],  // [tokens, heads, value_dim] by strides
                                  device T* k_pages [[buffer(2)]],  // [pages, page_size, heads, head_dim] by strides
                                  device T* v_pages [[buffer(3)]],  // [pages, page_size, heads, value_dim]
                                  device const I* slots [[buffer(4)]],  // [tokens]
                                  constant CacheWriteParams& p [[buffer(5)]],
                                  uint2 group [[threadgroup_position_in_grid]],  // chunk of a token, token
                                  uint2 threads [[threads_per_threadgroup]],
                                  uint thread_index [[thread_index_in_threadgroup]]) {
  const uint token = group.y;
  const long slot = slots[token * p.slot_stride];
  if (slot < 0 || slot >= p.slots) {
    return;
  }
  const ulong page = ulong(slot) / p.page_size, place = ulong(slot) % p.page_size;
  const uint k_vectors = (p.head_dim + 3) / 4, v_vectors = (p.value_dim + 3) / 4;
  const uint index = group.x * threads.x + thread_index;
  if (index < k_vectors * p.heads) {
    const uint head = index / k_vectors;
    copy4(k + token * p.k.row + head * p.k.head,
          k_pages + page * p.k_pages.batch + place * p.k_pages.row + head * p.k_pages.head, 4 * (index % k_vectors),
          p.head_dim);
  } else if (index < (k_vectors + v_vectors) * p.heads) {
    const uint rest = index - k_vectors * p.heads, head = rest / v_vectors;
    copy4(v + token * p.v.row + head * p.v.head,
          v_pages + page * p.v_pages.batch + place * p.v_pages.row + head * p.v_pages.head, 4 * (rest % v_vectors),
          p.value_dim);
  }
}

#define INSTANTIATE(T, I)                                           \
  template [[host_name("paged_cache_write_" #T "_" #I)]] [[kernel]] \
  decltype(paged_cache_write<T, I>) paged_cache_write<T, I>;

//          cache   slots
INSTANTIATE(float, int)
INSTANTIATE(float, long)
INSTANTIATE(half, int)
INSTANTIATE(half, long)
INSTANTIATE(bfloat, int)
INSTANTIATE(bfloat, long)
