// Names inside Apple's own headers that published sources call all the same (those that overload the maths for a bfloat
// type of their own). The flag tells fast from precise maths, which here are one.
#pragma once
#include "simdgroup.h"

#define VMPS_BUILTIN1(name) \
  VMPS_INLINE float __metal_##name(float x, bool) { return metal::name(x); }
VMPS_BUILTIN1(acos)
VMPS_BUILTIN1(acosh)
VMPS_BUILTIN1(asin)
VMPS_BUILTIN1(asinh)
VMPS_BUILTIN1(atan)
VMPS_BUILTIN1(atanh)
VMPS_BUILTIN1(ceil)
VMPS_BUILTIN1(cos)
VMPS_BUILTIN1(cosh)
VMPS_BUILTIN1(cospi)
VMPS_BUILTIN1(exp)
VMPS_BUILTIN1(exp10)
VMPS_BUILTIN1(exp2)
VMPS_BUILTIN1(fabs)
VMPS_BUILTIN1(floor)
VMPS_BUILTIN1(fract)
VMPS_BUILTIN1(log)
VMPS_BUILTIN1(log10)
VMPS_BUILTIN1(log2)
VMPS_BUILTIN1(rint)
VMPS_BUILTIN1(round)
VMPS_BUILTIN1(rsqrt)
VMPS_BUILTIN1(sin)
VMPS_BUILTIN1(sinh)
VMPS_BUILTIN1(sinpi)
VMPS_BUILTIN1(sqrt)
VMPS_BUILTIN1(tan)
VMPS_BUILTIN1(tanh)
VMPS_BUILTIN1(tanpi)
VMPS_BUILTIN1(trunc)
#undef VMPS_BUILTIN1

#define VMPS_BUILTIN2(name) \
  VMPS_INLINE float __metal_##name(float x, float y, bool = false) { return metal::name(x, y); }
VMPS_BUILTIN2(atan2)
VMPS_BUILTIN2(divide)
VMPS_BUILTIN2(fmax)
VMPS_BUILTIN2(fmin)
VMPS_BUILTIN2(fmod)
VMPS_BUILTIN2(nextafter)
VMPS_BUILTIN2(pow)
VMPS_BUILTIN2(powr)
#undef VMPS_BUILTIN2

#define VMPS_BUILTIN3(name) \
  VMPS_INLINE float __metal_##name(float x, float y, float z, bool) { return metal::name(x, y, z); }
VMPS_BUILTIN3(fmax3)
VMPS_BUILTIN3(fmedian3)
VMPS_BUILTIN3(fmin3)
#undef VMPS_BUILTIN3

VMPS_INLINE float __metal_fma(float x, float y, float z) { return metal::fma(x, y, z); }
VMPS_INLINE float __metal_ldexp(float x, int exponent, bool) { return metal::ldexp(x, exponent); }
VMPS_INLINE float __metal_frexp(float x, thread int* exponent) { return metal::frexp(x, *exponent); }
VMPS_INLINE ushort __metal_get_simdgroup_size(ushort) { return 32; }
VMPS_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) { return ushort(vmps::lane_index()); }

#define VMPS_BUILTIN_SIMD1(name)      \
  template <class T>                  \
  VMPS_INLINE T __metal_##name(T v) { \
    return metal::name(v);            \
  }
VMPS_BUILTIN_SIMD1(simd_sum)
VMPS_BUILTIN_SIMD1(simd_product)
VMPS_BUILTIN_SIMD1(simd_max)
VMPS_BUILTIN_SIMD1(simd_min)
VMPS_BUILTIN_SIMD1(simd_prefix_inclusive_sum)
VMPS_BUILTIN_SIMD1(simd_prefix_exclusive_sum)
VMPS_BUILTIN_SIMD1(simd_prefix_inclusive_product)
VMPS_BUILTIN_SIMD1(simd_prefix_exclusive_product)
#undef VMPS_BUILTIN_SIMD1
VMPS_INLINE float __metal_simd_xor(float v) { return as_type<float>(metal::simd_xor(as_type<uint>(v))); }

#define VMPS_BUILTIN_SIMD2(name)                \
  template <class T>                            \
  VMPS_INLINE T __metal_##name(T v, ushort n) { \
    return metal::name(v, n);                   \
  }
VMPS_BUILTIN_SIMD2(simd_broadcast)
VMPS_BUILTIN_SIMD2(simd_shuffle)
VMPS_BUILTIN_SIMD2(simd_shuffle_up)
VMPS_BUILTIN_SIMD2(simd_shuffle_down)
VMPS_BUILTIN_SIMD2(simd_shuffle_xor)
VMPS_BUILTIN_SIMD2(simd_shuffle_rotate_up)
VMPS_BUILTIN_SIMD2(simd_shuffle_rotate_down)
#undef VMPS_BUILTIN_SIMD2
template <class T>
VMPS_INLINE T __metal_simd_shuffle_and_fill_up(T v, T fill, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(v, fill, delta, modulo);
}
template <class T>
VMPS_INLINE T __metal_simd_shuffle_and_fill_down(T v, T fill, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(v, fill, delta, modulo);
}
