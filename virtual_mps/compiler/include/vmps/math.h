// <metal_math>, <metal_common>, <metal_geometric>, <metal_relational>, <metal_integer>.
#pragma once
#include "vector.h"

namespace vmps {
VMPS_INLINE float fract(float x) {
  float f = x - __builtin_floorf(x);
  return f < 1 ? f : 0x1.fffffep-1f;
}
// Reduced before multiplying with pi, so that whole and half turns are exact.
VMPS_INLINE float sinpi(float x) {
  float turn = x - 2 * __builtin_rintf(x * 0.5f);  // -1 .. 1
  if (turn > 0.5f) turn = 1 - turn;
  if (turn < -0.5f) turn = -1 - turn;
  return __builtin_sinf(3.14159265358979323846f * turn);
}
VMPS_INLINE float cospi(float x) { return sinpi(0.5f - __builtin_fabsf(x - 2 * __builtin_rintf(x * 0.5f))); }
}  // namespace vmps

namespace metal {
#include "math_functions.h"
namespace fast {
#include "math_functions.h"
}
namespace precise {
#include "math_functions.h"
}

// ---- relational -----------------------------------------------------------------------------------------------------
#define VMPS_PREDICATE(name, ...)                        \
  VMPS_INLINE bool name(float x) { return __VA_ARGS__; } \
  VMPS_INLINE bool name(half x) { return __VA_ARGS__; }  \
  template <vmps::same<bfloat> T>                        \
  VMPS_INLINE bool name(T x) {                           \
    return __VA_ARGS__;                                  \
  }                                                      \
  template <vmps::floating T, int N>                     \
  VMPS_INLINE vec<bool, N> name(vec<T, N> v) {           \
    vec<bool, N> r;                                      \
    for (int i = 0; i < N; i++) r[i] = name(v[i]);       \
    return r;                                            \
  }
VMPS_PREDICATE(isnan, __builtin_isnan(float(x)))
VMPS_PREDICATE(isinf, __builtin_isinf(float(x)))
VMPS_PREDICATE(isfinite, __builtin_isfinite(float(x)))
VMPS_PREDICATE(isnormal, __builtin_fabsf(float(x)) >= float(numeric_limits<decltype(x)>::min()) && isfinite(x))
VMPS_PREDICATE(signbit, __builtin_signbit(float(x)))
#undef VMPS_PREDICATE
VMPS_INLINE bool isunordered(float a, float b) { return isnan(a) || isnan(b); }
VMPS_INLINE bool isunordered(half a, half b) { return isnan(a) || isnan(b); }
template <vmps::same<bfloat> T>
VMPS_INLINE bool isunordered(T a, T b) {
  return isnan(a) || isnan(b);
}
template <vmps::floating T>
VMPS_INLINE bool isordered(T a, T b) {
  return !isunordered(a, b);
}
template <int N>
VMPS_INLINE bool all(vec<bool, N> v) {
  for (int i = 0; i < N; i++)
    if (!v[i]) return false;
  return true;
}
template <int N>
VMPS_INLINE bool any(vec<bool, N> v) {
  for (int i = 0; i < N; i++)
    if (v[i]) return true;
  return false;
}
VMPS_INLINE bool all(bool b) { return b; }
VMPS_INLINE bool any(bool b) { return b; }
template <class T>
VMPS_INLINE T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
VMPS_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  for (int i = 0; i < N; i++)
    if (c[i]) a[i] = b[i];
  return a;
}

// ---- common and geometric -------------------------------------------------------------------------------------------
template <class T, class U>
VMPS_INLINE T mix(T a, T b, U t) {
  return a + (b - a) * t;
}
template <vmps::floating T>
VMPS_INLINE T smoothstep(T low, T high, T x) {
  T t = saturate(T((x - low) / (high - low)));
  return t * t * (T(3) - T(2) * t);
}
template <class T, int N>
VMPS_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum = T(sum + a[i] * b[i]);
  return sum;
}
template <class T, int N>
VMPS_INLINE T length_squared(vec<T, N> v) {
  return dot(v, v);
}
template <class T, int N>
VMPS_INLINE T length(vec<T, N> v) {
  return sqrt(dot(v, v));
}
template <class T, int N>
VMPS_INLINE T distance(vec<T, N> a, vec<T, N> b) {
  return length(a - b);
}
template <class T, int N>
VMPS_INLINE T distance_squared(vec<T, N> a, vec<T, N> b) {
  return length_squared(a - b);
}
template <class T, int N>
VMPS_INLINE vec<T, N> normalize(vec<T, N> v) {
  return v * rsqrt(dot(v, v));
}
template <class T>
VMPS_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}

// ---- integer --------------------------------------------------------------------------------------------------------
template <vmps::integer T>
VMPS_INLINE T popcount(T x) {
  return T(__builtin_popcountll((ulong)make_unsigned_t<T>(x)));
}
template <vmps::integer T>
VMPS_INLINE T clz(T x) {
  return x ? T(__builtin_clzll((ulong)make_unsigned_t<T>(x)) - (64 - 8 * sizeof(T))) : T(8 * sizeof(T));
}
template <vmps::integer T>
VMPS_INLINE T ctz(T x) {
  return x ? T(__builtin_ctzll((ulong)x)) : T(8 * sizeof(T));
}
template <vmps::integer T>
VMPS_INLINE T reverse_bits(T x) {
  return T(__builtin_bitreverse64((ulong)make_unsigned_t<T>(x)) >> (64 - 8 * sizeof(T)));
}
template <vmps::integer T>
VMPS_INLINE T rotate(T x, T count) {
  constexpr uint bits = sizeof(T) * 8;
  uint n = uint(count) % bits;
  return n ? T(make_unsigned_t<T>(x) << n | make_unsigned_t<T>(x) >> (bits - n)) : x;
}
template <vmps::integer T>
VMPS_INLINE T extract_bits(T x, uint offset, uint bits) {
  constexpr uint width = sizeof(T) * 8;
  if (!bits) return T(0);
  return T(T(make_unsigned_t<T>(x) << (width - bits - offset)) >> (width - bits));
}
template <vmps::integer T>
VMPS_INLINE T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = make_unsigned_t<T>;
  U mask = bits >= sizeof(T) * 8 ? U(~U(0)) : U(((U(1) << bits) - 1) << offset);
  return T((U(base) & ~mask) | (U(insert) << offset & mask));
}
template <vmps::integer T>
VMPS_INLINE T mulhi(T a, T b) {
  if constexpr (sizeof(T) == 8)
    return T((conditional_t<is_signed_v<T>, __int128, unsigned __int128>(a) * b) >> 64);
  else
    return T((conditional_t<is_signed_v<T>, long, ulong>(a) * b) >> (sizeof(T) * 8));
}
template <vmps::integer T>
VMPS_INLINE T madhi(T a, T b, T c) {
  return T(mulhi(a, b) + c);
}
template <vmps::integer T>
VMPS_INLINE make_unsigned_t<T> absdiff(T a, T b) {
  using U = make_unsigned_t<T>;
  return a > b ? U(U(a) - U(b)) : U(U(b) - U(a));
}
template <vmps::integer T>
VMPS_INLINE T addsat(T a, T b) {
  T r;
  if (!__builtin_add_overflow(a, b, &r)) return r;
  return a < 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <vmps::integer T>
VMPS_INLINE T subsat(T a, T b) {
  T r;
  if (!__builtin_sub_overflow(a, b, &r)) return r;
  return b > 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <vmps::integer T>
VMPS_INLINE T hadd(T a, T b) {
  return T((a & b) + ((a ^ b) >> 1));
}
template <vmps::integer T>
VMPS_INLINE T rhadd(T a, T b) {
  return T((a | b) - ((a ^ b) >> 1));
}
// 24 bits are what the operands must fit in; a wider product is as good.
template <vmps::integer T>
VMPS_INLINE T mul24(T a, T b) {
  return T(a * b);
}
template <vmps::integer T>
VMPS_INLINE T mad24(T a, T b, T c) {
  return T(a * b + c);
}
#define VMPS_LIFT(name)                            \
  template <vmps::integer T, int N>                \
  VMPS_INLINE vec<T, N> name(vec<T, N> v) {        \
    for (int i = 0; i < N; i++) v[i] = name(v[i]); \
    return v;                                      \
  }
VMPS_LIFT(popcount)
VMPS_LIFT(clz)
VMPS_LIFT(ctz)
VMPS_LIFT(reverse_bits)
#undef VMPS_LIFT
}  // namespace metal
