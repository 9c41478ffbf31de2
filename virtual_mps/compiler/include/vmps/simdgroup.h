// <metal_simdgroup> and <metal_quadgroup>.
//
// Each lane publishes its operand and waits; the last one to arrive carries the function out for all of them. In
// diverged control flow it is carried out for the lanes that meet at the same call, as on the GPU. A lane that reads
// from one that does not take part gets all bits set: a NaN in every floating type.
#pragma once
#include "lane.h"

namespace vmps {
template <class Operand, class Serve>
VMPS_INLINE void together(Operand& operand, Serve serve, int width = 32) {
  if (width == 4) announce(VMPS_QUAD_FUNCTION);
  vmps_lane* lane = self();
  vmps_simdgroup* simdgroup = lane->simdgroup;
  simdgroup->operand[lane->in_simdgroup] = (void*)&operand;
  if (unsigned lanes = vmps_wait_simdgroup(lane)) serve((Operand**)simdgroup->operand, lanes);
}

template <class F>
VMPS_INLINE void for_each_lane(unsigned lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}

// What simd and quad functions take: no bool, nothing of 64 bits.
template <class T>
inline constexpr bool is_exchangeable = scalar<T> && !same<T, bool> && sizeof(T) <= 4;
template <class T, int N>
inline constexpr bool is_exchangeable<metal::vec<T, N>> = is_exchangeable<T>;
template <class T>
concept exchangeable = is_exchangeable<T>;

template <class T>
struct exchange {
  T value, fill, result;
  uint argument;
};

// Source(lane, argument): the lane to read from, -1 for the lane's own value, 32 + n for the filling of lane n.
template <class T, class Source>
__attribute__((noinline)) void serve_shuffle(exchange<T>** operand, unsigned lanes) {
  for_each_lane(lanes, [&](int lane) {
    int from = Source()(lane, operand[lane]->argument);
    if (from < 0)
      operand[lane]->result = operand[lane]->value;
    else if (!(lanes >> (from & 31) & 1))
      __builtin_memset((void*)&operand[lane]->result, 0xFF, sizeof(T));
    else
      operand[lane]->result = from >= 32 ? operand[from - 32]->fill : operand[from]->value;
  });
}
template <int Width, class T, class Source>
VMPS_INLINE T shuffle(T value, uint argument, Source, T fill = T()) {
  exchange<T> e;
  e.value = value, e.fill = fill, e.argument = argument;
  together(e, serve_shuffle<T, Source>, Width);
  return e.result;
}

// A tree over the lanes, rounding to T at each step; over the first n lanes of each group of Width when all take part.
template <class T, class Operation, int Width>
__attribute__((noinline)) void serve_reduce(exchange<T>** operand, unsigned lanes) {
  for (int first = 0; first < 32; first += Width) {
    unsigned group = lanes >> first & (Width == 32 ? ~0u : (1u << Width) - 1);
    if (!group) continue;
    T partial[Width];
    int count = 0;
    for_each_lane(group, [&](int lane) { partial[count++] = operand[first + lane]->value; });
    while (count > 1) {
      int half_count = (count + 1) / 2;
      for (int i = 0; i + half_count < count; i++) partial[i] = Operation()(partial[i], partial[i + half_count]);
      count = half_count;
    }
    for_each_lane(group, [&](int lane) { operand[first + lane]->result = partial[0]; });
  }
}
template <int Width, class T, class Operation>
VMPS_INLINE T reduce(T value, Operation) {
  exchange<T> e;
  e.value = value;
  together(e, serve_reduce<T, Operation, Width>, Width);
  return e.result;
}

template <class T, class Operation, int Width, bool Inclusive>
__attribute__((noinline)) void serve_scan(exchange<T>** operand, unsigned lanes) {
  T sum = Operation::template identity<T>();
  for_each_lane(lanes, [&](int lane) {
    if (lane % Width == 0) sum = Operation::template identity<T>();
    T next = Operation()(sum, operand[lane]->value);
    operand[lane]->result = Inclusive ? next : sum;
    sum = next;
  });
}
template <int Width, bool Inclusive, class T, class Operation>
VMPS_INLINE T scan(T value, Operation) {
  exchange<T> e;
  e.value = value;
  together(e, serve_scan<T, Operation, Width, Inclusive>, Width);
  return e.result;
}

#define VMPS_OPERATION(name, expression) \
  struct name {                          \
    template <class T>                   \
    VMPS_INLINE T operator()(T a, T b) { \
      return T(expression);              \
    }                                    \
  };
VMPS_OPERATION(op_max, metal::max(a, b))
VMPS_OPERATION(op_min, metal::min(a, b))
VMPS_OPERATION(op_and, a& b)
VMPS_OPERATION(op_or, a | b)
VMPS_OPERATION(op_xor, a ^ b)
#undef VMPS_OPERATION
struct op_sum {
  template <class T>
  VMPS_INLINE T operator()(T a, T b) {
    return T(a + b);
  }
  template <class T>
  static VMPS_INLINE T identity() {
    return T(0);
  }
};
struct op_product {
  template <class T>
  VMPS_INLINE T operator()(T a, T b) {
    return T(a * b);
  }
  template <class T>
  static VMPS_INLINE T identity() {
    return T(1);
  }
};

struct ballot {
  bool vote;
  uint result;
};
inline __attribute__((noinline)) void serve_ballot(ballot** operand, unsigned lanes) {
  uint votes = 0;
  for_each_lane(lanes, [&](int lane) { votes |= uint(operand[lane]->vote) << lane; });
  for_each_lane(lanes, [&](int lane) { operand[lane]->result = votes; });
}
VMPS_INLINE uint vote(bool b) {
  ballot operand{b, 0};
  announce(VMPS_SIMD_VOTE);
  together(operand, serve_ballot);
  return operand.result;
}
VMPS_INLINE uint lane_index() { return self()->in_simdgroup; }
}  // namespace vmps

namespace metal {
VMPS_INLINE void simdgroup_barrier(mem_flags flags) {
  vmps::announce(VMPS_SIMDGROUP_BARRIER, uint(flags));
  vmps_wait_simdgroup(vmps::self());
}

// simd_* on groups of 32 and quad_* on groups of 4, alike.
#define VMPS_SHUFFLE(name, Width, source)                                                         \
  template <vmps::exchangeable T>                                                                 \
  VMPS_INLINE T name(T value, ushort argument) {                                                  \
    return vmps::shuffle<Width>(value, argument, [](int lane, uint n) -> int { return source; }); \
  }
#define VMPS_GROUP_FUNCTIONS(group, Width)                                                                \
  VMPS_SHUFFLE(group##_shuffle, Width, (lane & ~(Width - 1)) + int(n & (Width - 1)))                      \
  VMPS_SHUFFLE(group##_broadcast, Width, (lane & ~(Width - 1)) + int(n & (Width - 1)))                    \
  VMPS_SHUFFLE(group##_shuffle_xor, Width, lane ^ int(n & (Width - 1)))                                   \
  VMPS_SHUFFLE(group##_shuffle_up, Width, lane % Width >= int(n) ? lane - int(n) : -1)                    \
  VMPS_SHUFFLE(group##_shuffle_down, Width, lane % Width + int(n) < Width ? lane + int(n) : -1)           \
  VMPS_SHUFFLE(group##_shuffle_rotate_up, Width, (lane & ~(Width - 1)) + int((lane - n) & (Width - 1)))   \
  VMPS_SHUFFLE(group##_shuffle_rotate_down, Width, (lane & ~(Width - 1)) + int((lane + n) & (Width - 1))) \
  template <vmps::exchangeable T>                                                                         \
  VMPS_INLINE T group##_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo = Width) {       \
    return vmps::shuffle<Width>(value, uint(modulo) << 16 | delta, vmps::fill_up(), fill);                \
  }                                                                                                       \
  template <vmps::exchangeable T>                                                                         \
  VMPS_INLINE T group##_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo = Width) {     \
    return vmps::shuffle<Width>(value, uint(modulo) << 16 | delta, vmps::fill_down(), fill);              \
  }                                                                                                       \
  VMPS_REDUCTION(group, Width, sum)                                                                       \
  VMPS_REDUCTION(group, Width, product)                                                                   \
  VMPS_REDUCTION(group, Width, max)                                                                       \
  VMPS_REDUCTION(group, Width, min)                                                                       \
  VMPS_REDUCTION(group, Width, and)                                                                       \
  VMPS_REDUCTION(group, Width, or)                                                                        \
  VMPS_REDUCTION(group, Width, xor)                                                                       \
  VMPS_SCAN(group, Width, inclusive, true, sum)                                                           \
  VMPS_SCAN(group, Width, exclusive, false, sum)                                                          \
  VMPS_SCAN(group, Width, inclusive, true, product)                                                       \
  VMPS_SCAN(group, Width, exclusive, false, product)
#define VMPS_REDUCTION(group, Width, name)                \
  template <vmps::exchangeable T>                         \
  VMPS_INLINE T group##_##name(T value) {                 \
    return vmps::reduce<Width>(value, vmps::op_##name()); \
  }
#define VMPS_SCAN(group, Width, kind, inclusive, name)             \
  template <vmps::exchangeable T>                                  \
  VMPS_INLINE T group##_prefix_##kind##_##name(T value) {          \
    return vmps::scan<Width, inclusive>(value, vmps::op_##name()); \
  }
}  // namespace metal

namespace vmps {
// The argument holds the width of the groups, 2 .. 32, over the distance.
struct fill_up {
  VMPS_INLINE int operator()(int lane, uint n) {
    int width = n >> 16, first = lane / width * width, from = lane - first - int(n & 0xFFFF);
    return from >= 0 ? first + from : 32 + first + from + width;
  }
};
struct fill_down {
  VMPS_INLINE int operator()(int lane, uint n) {
    int width = n >> 16, first = lane / width * width, from = lane - first + int(n & 0xFFFF);
    return from < width ? first + from : 32 + first + from - width;
  }
};
}  // namespace vmps

namespace metal {
VMPS_GROUP_FUNCTIONS(simd, 32)
VMPS_GROUP_FUNCTIONS(quad, 4)
#undef VMPS_SHUFFLE
#undef VMPS_REDUCTION
#undef VMPS_SCAN
#undef VMPS_GROUP_FUNCTIONS

struct simd_vote {
  using vote_t = ulong;
  vote_t lanes;
  constexpr explicit simd_vote(vote_t v = 0) : lanes(v) {}
  constexpr explicit operator vote_t() const { return lanes; }
  constexpr bool all() const { return lanes == 0xFFFFFFFFul; }
  constexpr bool any() const { return lanes != 0; }
};
struct quad_vote {
  using vote_t = ushort;
  vote_t lanes;
  constexpr explicit quad_vote(vote_t v = 0) : lanes(v) {}
  constexpr explicit operator vote_t() const { return lanes; }
  constexpr bool all() const { return lanes == 0xF; }
  constexpr bool any() const { return lanes != 0; }
};
VMPS_INLINE simd_vote simd_ballot(bool b) { return simd_vote(vmps::vote(b)); }
VMPS_INLINE simd_vote simd_active_threads_mask() { return simd_ballot(true); }
VMPS_INLINE bool simd_any(bool b) { return vmps::vote(b) != 0; }
VMPS_INLINE bool simd_all(bool b) { return vmps::vote(!b) == 0; }
VMPS_INLINE bool simd_is_first() { return uint(__builtin_ctz(vmps::vote(true))) == vmps::lane_index(); }
VMPS_INLINE quad_vote quad_ballot(bool b) { return quad_vote(vmps::vote(b) >> (vmps::lane_index() & ~3u) & 0xF); }
VMPS_INLINE quad_vote quad_active_threads_mask() { return quad_ballot(true); }
VMPS_INLINE bool quad_any(bool b) { return ushort(quad_ballot(b)) != 0; }
VMPS_INLINE bool quad_all(bool b) { return ushort(quad_ballot(!b)) == 0; }
VMPS_INLINE bool quad_is_first() {
  return uint(__builtin_ctz(uint(ushort(quad_ballot(true))))) == (vmps::lane_index() & 3u);
}
template <class T>
VMPS_INLINE T simd_broadcast_first(T value) {
  return simd_broadcast(value, ushort(__builtin_ctz(vmps::vote(true))));
}
template <class T>
VMPS_INLINE T quad_broadcast_first(T value) {
  return quad_broadcast(value, ushort(__builtin_ctz(uint(ushort(quad_ballot(true))))));
}
}  // namespace metal
