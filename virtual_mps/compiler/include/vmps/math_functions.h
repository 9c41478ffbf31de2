// The elementwise functions that stand in metal, metal::fast and metal::precise alike. Included once in each, and no
// `using` instead: sources add overloads of their own to one of the three. Computed in fp32, as half and bfloat are on
// the GPU, and rounded once. All three are the precise ones: "fast" permits an error, it does not ask for one.
//
// As in Metal, float and half (and for some the integers) are overloads, not a template: a source's own template of the
// same name must lose against them, and mixed arguments must be as ambiguous. bfloat is a template, because sources
// bring overloads for it.

#define VMPS_UNARY(name, ...)                                    \
  VMPS_INLINE float name(float x) { return __VA_ARGS__; }        \
  VMPS_INLINE half name(half x) { return half(name(float(x))); } \
  template <vmps::same<bfloat> T>                                \
  VMPS_INLINE T name(T x) {                                      \
    return T(name(float(x)));                                    \
  }                                                              \
  template <vmps::floating T, int N>                             \
  VMPS_INLINE vec<T, N> name(vec<T, N> v) {                      \
    for (int i = 0; i < N; i++) v[i] = name(v[i]);               \
    return v;                                                    \
  }
#define VMPS_WITH_SCALARS(constraint, name)                        \
  template <constraint T, int N>                                   \
  VMPS_INLINE constexpr vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]);           \
    return a;                                                      \
  }                                                                \
  template <constraint T, int N, vmps::scalar S>                   \
  VMPS_INLINE constexpr vec<T, N> name(vec<T, N> a, S b) {         \
    return name(a, vec<T, N>(T(b)));                               \
  }                                                                \
  template <constraint T, int N, vmps::scalar S>                   \
  VMPS_INLINE constexpr vec<T, N> name(S a, vec<T, N> b) {         \
    return name(vec<T, N>(T(a)), b);                               \
  }
#define VMPS_BINARY(qualifier, name, ...)                                                    \
  VMPS_INLINE qualifier float name(float x, float y) { return __VA_ARGS__; }                 \
  VMPS_INLINE qualifier half name(half x, half y) { return half(name(float(x), float(y))); } \
  template <vmps::same<bfloat> T>                                                            \
  VMPS_INLINE qualifier T name(T x, T y) {                                                   \
    return T(name(float(x), float(y)));                                                      \
  }
#define VMPS_INTEGERS(define) \
  define(char) define(uchar) define(short) define(ushort) define(int) define(uint) define(long) define(ulong)

VMPS_UNARY(acos, __builtin_acosf(x))
VMPS_UNARY(acosh, __builtin_acoshf(x))
VMPS_UNARY(asin, __builtin_asinf(x))
VMPS_UNARY(asinh, __builtin_asinhf(x))
VMPS_UNARY(atan, __builtin_atanf(x))
VMPS_UNARY(atanh, __builtin_atanhf(x))
VMPS_UNARY(ceil, __builtin_ceilf(x))
VMPS_UNARY(cos, __builtin_cosf(x))
VMPS_UNARY(cosh, __builtin_coshf(x))
VMPS_UNARY(cospi, vmps::cospi(x))
VMPS_UNARY(exp, __builtin_expf(x))
VMPS_UNARY(exp2, __builtin_exp2f(x))
VMPS_UNARY(exp10, __builtin_exp10f(x))
VMPS_UNARY(fabs, __builtin_fabsf(x))
VMPS_UNARY(floor, __builtin_floorf(x))
VMPS_UNARY(fract, vmps::fract(x))
VMPS_UNARY(log, __builtin_logf(x))
VMPS_UNARY(log2, __builtin_log2f(x))
VMPS_UNARY(log10, __builtin_log10f(x))
VMPS_UNARY(rint, __builtin_rintf(x))
VMPS_UNARY(round, __builtin_roundf(x))
VMPS_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
VMPS_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
VMPS_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f)
VMPS_UNARY(sin, __builtin_sinf(x))
VMPS_UNARY(sinh, __builtin_sinhf(x))
VMPS_UNARY(sinpi, vmps::sinpi(x))
VMPS_UNARY(sqrt, __builtin_sqrtf(x))
VMPS_UNARY(tan, __builtin_tanf(x))
VMPS_UNARY(tanh, __builtin_tanhf(x))
VMPS_UNARY(tanpi, vmps::sinpi(x) / vmps::cospi(x))
VMPS_UNARY(trunc, __builtin_truncf(x))

#define VMPS_FLOATING_BINARY(name, ...) \
  VMPS_BINARY(, name, __VA_ARGS__)      \
  VMPS_WITH_SCALARS(vmps::floating, name)
VMPS_FLOATING_BINARY(atan2, __builtin_atan2f(x, y))
VMPS_FLOATING_BINARY(copysign, __builtin_copysignf(x, y))
VMPS_FLOATING_BINARY(divide, x / y)
VMPS_FLOATING_BINARY(fdim, __builtin_fdimf(x, y))
VMPS_FLOATING_BINARY(fmax, __builtin_fmaxf(x, y))
VMPS_FLOATING_BINARY(fmin, __builtin_fminf(x, y))
VMPS_FLOATING_BINARY(fmod, __builtin_fmodf(x, y))
VMPS_FLOATING_BINARY(nextafter, __builtin_nextafterf(x, y))
VMPS_FLOATING_BINARY(pow, __builtin_powf(x, y))
VMPS_FLOATING_BINARY(powr, x < 0 ? __builtin_nanf("") : __builtin_powf(x, y))
VMPS_FLOATING_BINARY(step, y < x ? 0.0f : 1.0f)
#undef VMPS_FLOATING_BINARY

VMPS_BINARY(constexpr, max, __builtin_fmaxf(x, y))
VMPS_BINARY(constexpr, min, __builtin_fminf(x, y))
#define VMPS_EXTREMES(T)                                          \
  VMPS_INLINE constexpr T max(T x, T y) { return x < y ? y : x; } \
  VMPS_INLINE constexpr T min(T x, T y) { return y < x ? y : x; }
VMPS_INTEGERS(VMPS_EXTREMES)
#undef VMPS_EXTREMES
VMPS_WITH_SCALARS(vmps::scalar, max)
VMPS_WITH_SCALARS(vmps::scalar, min)

#define VMPS_ABSOLUTE(T) \
  VMPS_INLINE constexpr T abs(T x) { return x < T(0) ? T(-x) : x; }
VMPS_INTEGERS(VMPS_ABSOLUTE)
#undef VMPS_ABSOLUTE
VMPS_INLINE constexpr float abs(float x) { return __builtin_fabsf(x); }
VMPS_INLINE constexpr half abs(half x) { return half(__builtin_fabsf(float(x))); }
template <vmps::same<bfloat> T>
VMPS_INLINE constexpr T abs(T x) {
  return T(__builtin_fabsf(float(x)));
}
template <vmps::scalar T, int N>
VMPS_INLINE constexpr vec<T, N> abs(vec<T, N> v) {
  for (int i = 0; i < N; i++) v[i] = abs(v[i]);
  return v;
}

#define VMPS_OF_THREE(parameters, T)                                                              \
  parameters VMPS_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  parameters VMPS_INLINE constexpr T max3(T x, T y, T z) { return max(x, max(y, z)); }            \
  parameters VMPS_INLINE constexpr T min3(T x, T y, T z) { return min(x, min(y, z)); }            \
  parameters VMPS_INLINE constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }
#define VMPS_FLOATING_OF_THREE(parameters, T)                                       \
  VMPS_OF_THREE(parameters, T)                                                      \
  parameters VMPS_INLINE constexpr T fmax3(T x, T y, T z) { return max3(x, y, z); } \
  parameters VMPS_INLINE constexpr T fmin3(T x, T y, T z) { return min3(x, y, z); } \
  parameters VMPS_INLINE constexpr T fmedian3(T x, T y, T z) { return median3(x, y, z); }
#define VMPS_INTEGER_OF_THREE(T) VMPS_OF_THREE(, T)
VMPS_INTEGERS(VMPS_INTEGER_OF_THREE)
VMPS_FLOATING_OF_THREE(, float)
VMPS_FLOATING_OF_THREE(, half)
VMPS_FLOATING_OF_THREE(template <vmps::same<bfloat> T>, T)
VMPS_FLOATING_OF_THREE(template <vmps::vector T>, T)
template <vmps::scalar T, int N>
VMPS_INLINE constexpr vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, low), high);
}
#undef VMPS_INTEGER_OF_THREE
#undef VMPS_FLOATING_OF_THREE
#undef VMPS_OF_THREE

VMPS_INLINE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
VMPS_INLINE half fma(half x, half y, half z) { return half(__builtin_fmaf(float(x), float(y), float(z))); }
template <vmps::same<bfloat> T>
VMPS_INLINE T fma(T x, T y, T z) {
  return T(__builtin_fmaf(float(x), float(y), float(z)));
}
template <vmps::floating T, int N, class B, class C>
VMPS_INLINE vec<T, N> fma(vec<T, N> a, B b, C c) {
  vec<T, N> right(b), sum(c);
  for (int i = 0; i < N; i++) a[i] = fma(a[i], right[i], sum[i]);
  return a;
}
template <vmps::floating T, int N, vmps::scalar S, class C>
VMPS_INLINE vec<T, N> fma(S a, vec<T, N> b, C c) {
  return fma(vec<T, N>(T(a)), b, c);
}

template <vmps::floating T>
VMPS_INLINE T ldexp(T x, int exponent) {
  return T(__builtin_ldexpf(float(x), exponent));
}
template <vmps::floating T>
VMPS_INLINE T frexp(T x, thread int& exponent) {
  return T(__builtin_frexpf(float(x), &exponent));
}
template <vmps::floating T>
VMPS_INLINE int ilogb(T x) {
  return __builtin_ilogbf(float(x));
}
template <vmps::floating T>
VMPS_INLINE T modf(T x, thread T& whole) {
  whole = trunc(x);
  return __builtin_isinf(float(x)) ? copysign(T(0), x) : copysign(T(x - whole), x);
}
template <class T>
VMPS_INLINE T sincos(T x, thread T& cosine) {
  cosine = cos(x);
  return sin(x);
}

#undef VMPS_UNARY
#undef VMPS_BINARY
#undef VMPS_WITH_SCALARS
#undef VMPS_INTEGERS
