// The elementwise functions that stand in metal, metal::fast and metal::precise alike. Included once in each, and no
// `using` instead: sources add overloads of their own to one of the three. Computed in fp32, as half and bfloat are on
// the GPU, and rounded once. All three are the precise ones: "fast" permits an error, it does not ask for one.

#define VMPS_UNARY(name, ...)                      \
  template <vmps::floating T>                      \
  VMPS_INLINE T name(T value) {                    \
    float x = float(value);                        \
    return T(__VA_ARGS__);                         \
  }                                                \
  template <vmps::integer T>                       \
  VMPS_INLINE float name(T value) {                \
    return name(float(value));                     \
  }                                                \
  template <vmps::floating T, int N>               \
  VMPS_INLINE vec<T, N> name(vec<T, N> v) {        \
    for (int i = 0; i < N; i++) v[i] = name(v[i]); \
    return v;                                      \
  }
#define VMPS_BINARY(name, ...)                           \
  template <vmps::scalar A, vmps::scalar B>              \
  VMPS_INLINE vmps::common<A, B> name(A left, B right) { \
    float x = float(left), y = float(right);             \
    return vmps::common<A, B>(__VA_ARGS__);              \
  }                                                      \
  template <vmps::floating T, int N>                     \
  VMPS_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]); \
    return a;                                            \
  }                                                      \
  template <vmps::floating T, int N, vmps::scalar S>     \
  VMPS_INLINE vec<T, N> name(vec<T, N> a, S b) {         \
    return name(a, vec<T, N>(T(b)));                     \
  }                                                      \
  template <vmps::floating T, int N, vmps::scalar S>     \
  VMPS_INLINE vec<T, N> name(S a, vec<T, N> b) {         \
    return name(vec<T, N>(T(a)), b);                     \
  }

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

VMPS_BINARY(atan2, __builtin_atan2f(x, y))
VMPS_BINARY(copysign, __builtin_copysignf(x, y))
VMPS_BINARY(divide, x / y)
VMPS_BINARY(fdim, __builtin_fdimf(x, y))
VMPS_BINARY(fmax, __builtin_fmaxf(x, y))
VMPS_BINARY(fmin, __builtin_fminf(x, y))
VMPS_BINARY(fmod, __builtin_fmodf(x, y))
VMPS_BINARY(nextafter, __builtin_nextafterf(x, y))
VMPS_BINARY(pow, __builtin_powf(x, y))
VMPS_BINARY(powr, x < 0 ? __builtin_nanf("") : __builtin_powf(x, y))
VMPS_BINARY(step, y < x ? 0.0f : 1.0f)
#undef VMPS_UNARY
#undef VMPS_BINARY

// Integers too.
#define VMPS_EXTREME(name, builtin, order)                         \
  template <vmps::scalar A, vmps::scalar B>                        \
  VMPS_INLINE constexpr vmps::common<A, B> name(A left, B right) { \
    using T = vmps::common<A, B>;                                  \
    if constexpr (vmps::floating<T>)                               \
      return T(builtin(float(left), float(right)));                \
    else                                                           \
      return T(right) order T(left) ? T(right) : T(left);          \
  }                                                                \
  template <class T, int N>                                        \
  VMPS_INLINE constexpr vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]);           \
    return a;                                                      \
  }                                                                \
  template <class T, int N, vmps::scalar S>                        \
  VMPS_INLINE constexpr vec<T, N> name(vec<T, N> a, S b) {         \
    return name(a, vec<T, N>(T(b)));                               \
  }                                                                \
  template <class T, int N, vmps::scalar S>                        \
  VMPS_INLINE constexpr vec<T, N> name(S a, vec<T, N> b) {         \
    return name(vec<T, N>(T(a)), b);                               \
  }
VMPS_EXTREME(max, __builtin_fmaxf, >)
VMPS_EXTREME(min, __builtin_fminf, <)
#undef VMPS_EXTREME

template <class T, class A, class B>
VMPS_INLINE constexpr auto clamp(T x, A low, B high) {
  return min(max(x, low), high);
}
#define VMPS_OF_THREE(prefix)                              \
  template <class T>                                       \
  VMPS_INLINE constexpr T prefix##max3(T a, T b, T c) {    \
    return max(a, max(b, c));                              \
  }                                                        \
  template <class T>                                       \
  VMPS_INLINE constexpr T prefix##min3(T a, T b, T c) {    \
    return min(a, min(b, c));                              \
  }                                                        \
  template <class T>                                       \
  VMPS_INLINE constexpr T prefix##median3(T a, T b, T c) { \
    return max(min(a, b), min(max(a, b), c));              \
  }
VMPS_OF_THREE()
VMPS_OF_THREE(f)
#undef VMPS_OF_THREE

template <vmps::scalar T>
VMPS_INLINE constexpr T abs(T x) {
  if constexpr (vmps::floating<T>)
    return T(__builtin_fabsf(float(x)));
  else
    return x < T(0) ? T(-x) : x;
}
template <class T, int N>
VMPS_INLINE constexpr vec<T, N> abs(vec<T, N> v) {
  for (int i = 0; i < N; i++) v[i] = abs(v[i]);
  return v;
}

template <vmps::scalar A, vmps::scalar B, vmps::scalar C>
VMPS_INLINE auto fma(A a, B b, C c) {
  return vmps::common<vmps::common<A, B>, C>(__builtin_fmaf(float(a), float(b), float(c)));
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
template <vmps::floating T>
VMPS_INLINE T sincos(T x, thread T& cosine) {
  cosine = cos(x);
  return sin(x);
}
template <vmps::floating T, int N>
VMPS_INLINE vec<T, N> sincos(vec<T, N> v, thread vec<T, N>& cosines) {
  cosines = cos(v);
  return sin(v);
}
