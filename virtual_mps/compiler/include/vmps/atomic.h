// <metal_atomic>.
#pragma once
#include "lane.h"

namespace vmps {
template <class T>
concept atomic_word = same<T, int> || same<T, uint>;
template <class T>
concept atomic_summand = atomic_word<T> || same<T, float>;
template <class T>  // what is loaded, stored and exchanged
concept atomic_value = atomic_summand<T> || same<T, bool>;
}  // namespace vmps

namespace metal {
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
VMPS_INLINE void atomic_thread_fence(mem_flags flags, memory_order, thread_scope scope = thread_scope_device) {
#ifdef VMPS_INSTRUMENTED
  if ((flags & mem_flags::mem_device) != mem_flags::mem_none && scope == thread_scope_device) vmps_device_fence();
#endif
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class T>
struct alignas(sizeof(T) < 4 ? 4 : sizeof(T)) atomic {
  static_assert(vmps::atomic_word<T> || vmps::same<T, bool> || vmps::same<T, float> || vmps::same<T, ulong>,
                "atomic types are int, uint, bool, float and ulong");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
}  // namespace metal

namespace metal {
// `value` has a deduced type of its own: Metal converts it to the atomic's.
#define VMPS_FETCH(space, kind, name)                                                                \
  template <vmps::kind T, class U>                                                                   \
  VMPS_INLINE T atomic_fetch_##name##_explicit(volatile space atomic<T>* p, U value, memory_order) { \
    return __atomic_fetch_##name((T*)&p->value, T(value), __ATOMIC_SEQ_CST);                         \
  }
#define VMPS_ATOMICS(space)                                                                                        \
  VMPS_FETCH(space, atomic_summand, add)                                                                           \
  VMPS_FETCH(space, atomic_summand, sub)                                                                           \
  VMPS_FETCH(space, atomic_word, min)                                                                              \
  VMPS_FETCH(space, atomic_word, max)                                                                              \
  VMPS_FETCH(space, atomic_word, and)                                                                              \
  VMPS_FETCH(space, atomic_word, or)                                                                               \
  VMPS_FETCH(space, atomic_word, xor)                                                                              \
  template <class U>                                                                                               \
  VMPS_INLINE void atomic_min_explicit(volatile space atomic<ulong>* p, U value, memory_order) {                   \
    __atomic_fetch_min((ulong*)&p->value, ulong(value), __ATOMIC_SEQ_CST);                                         \
  }                                                                                                                \
  template <class U>                                                                                               \
  VMPS_INLINE void atomic_max_explicit(volatile space atomic<ulong>* p, U value, memory_order) {                   \
    __atomic_fetch_max((ulong*)&p->value, ulong(value), __ATOMIC_SEQ_CST);                                         \
  }                                                                                                                \
  template <vmps::atomic_value T, class U>                                                                         \
  VMPS_INLINE void atomic_store_explicit(volatile space atomic<T>* p, U value, memory_order) {                     \
    T b = T(value);                                                                                                \
    __atomic_store((T*)&p->value, &b, __ATOMIC_SEQ_CST);                                                           \
  }                                                                                                                \
  template <vmps::atomic_value T>                                                                                  \
  VMPS_INLINE T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) {                            \
    T b;                                                                                                           \
    __atomic_load((const T*)&p->value, &b, __ATOMIC_SEQ_CST);                                                      \
    return b;                                                                                                      \
  }                                                                                                                \
  template <vmps::atomic_value T, class U>                                                                         \
  VMPS_INLINE T atomic_exchange_explicit(volatile space atomic<T>* p, U value, memory_order) {                     \
    T b = T(value), old;                                                                                           \
    __atomic_exchange((T*)&p->value, &b, &old, __ATOMIC_SEQ_CST);                                                  \
    return old;                                                                                                    \
  }                                                                                                                \
  template <vmps::atomic_value T, class U>                                                                         \
  VMPS_INLINE bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, thread T* expected, U value, \
                                                         memory_order, memory_order) {                             \
    T b = T(value);                                                                                                \
    return __atomic_compare_exchange((T*)&p->value, expected, &b, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
  }
VMPS_ATOMICS(device)
VMPS_ATOMICS(threadgroup)
#undef VMPS_ATOMICS
#undef VMPS_FETCH
}  // namespace metal
