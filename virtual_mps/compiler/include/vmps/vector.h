// Vectors, packed vectors, matrices of columns, and metal::array.
#pragma once
#include "swizzle.h"
#include "type_traits.h"

namespace metal {
template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;
}  // namespace metal

namespace vmps {
template <class T>
inline constexpr int width = 1;
template <class T, int N>
inline constexpr int width<metal::vec<T, N>> = N;
template <class T, int N>
inline constexpr int width<metal::packed_vec<T, N>> = N;

template <class T>
inline constexpr bool is_vector = false;
template <class T, int N>
inline constexpr bool is_vector<metal::vec<T, N>> = true;
template <class T>
concept vector = is_vector<T>;
}  // namespace vmps

namespace metal {
#define VMPS_OPERATOR(op)                                  \
  friend constexpr vec operator op(vec a, vec b) {         \
    for (int i = 0; i < size; i++) a[i] = T(a[i] op b[i]); \
    return a;                                              \
  }                                                        \
  friend constexpr vec operator op(vec a, T b) {           \
    for (int i = 0; i < size; i++) a[i] = T(a[i] op b);    \
    return a;                                              \
  }                                                        \
  friend constexpr vec operator op(T a, vec b) {           \
    for (int i = 0; i < size; i++) b[i] = T(a op b[i]);    \
    return b;                                              \
  }                                                        \
  template <class U>                                       \
  constexpr vec& operator op## = (U b) {                   \
    return *this = *this op b;                             \
  }
#define VMPS_COMPARISON(op)                                                        \
  friend constexpr vec<bool, size> operator op(vec a, vec b) {                     \
    vec<bool, size> r;                                                             \
    for (int i = 0; i < size; i++) r[i] = a[i] op b[i];                            \
    return r;                                                                      \
  }                                                                                \
  friend constexpr vec<bool, size> operator op(vec a, T b) { return a op vec(b); } \
  friend constexpr vec<bool, size> operator op(T a, vec b) { return vec(a) op b; }

// Component access by number: a constant expression may not step over members, everything else should index memory.
#define VMPS_AT_2(i) (i == 0 ? x : y)
#define VMPS_AT_3(i) (i == 0 ? x : i == 1 ? y : z)
#define VMPS_AT_4(i) (i == 0 ? x : i == 1 ? y : i == 2 ? z : w)

#define VMPS_VECTOR(n, alignment, ...)                                            \
  template <class T>                                                              \
  struct alignas(alignment * sizeof(T)) vec<T, n> {                               \
    static constexpr int size = n;                                                \
    using value_type = T;                                                         \
    T __VA_ARGS__;                                                                \
    VMPS_SWIZZLES_##n constexpr vec() = default;                                  \
    constexpr vec(T s) {                                                          \
      for (int i = 0; i < n; i++) (*this)[i] = s;                                 \
    }                                                                             \
    template <class U>                                                            \
    explicit constexpr vec(vec<U, n> o) {                                         \
      for (int i = 0; i < n; i++) (*this)[i] = vmps::cast<T>(o[i]);               \
    }                                                                             \
    template <class A, class B, class... C>                                       \
      requires(vmps::width<A> + vmps::width<B> + (0 + ... + vmps::width<C>) == n) \
    constexpr vec(A a, B b, C... c) {                                             \
      int at = 0;                                                                 \
      put(at, a), put(at, b), (put(at, c), ...);                                  \
    }                                                                             \
    constexpr T& operator[](int i) {                                              \
      if (__builtin_is_constant_evaluated()) return VMPS_AT_##n(i);               \
      return (&x)[i];                                                             \
    }                                                                             \
    constexpr const T& operator[](int i) const {                                  \
      if (__builtin_is_constant_evaluated()) return VMPS_AT_##n(i);               \
      return (&x)[i];                                                             \
    }                                                                             \
    VMPS_OPERATOR(+)                                                              \
    VMPS_OPERATOR(-)                                                              \
    VMPS_OPERATOR(*)                                                              \
    VMPS_OPERATOR(/)                                                              \
    VMPS_OPERATOR(%)                                                              \
    VMPS_OPERATOR(&)                                                              \
    VMPS_OPERATOR(|)                                                              \
    VMPS_OPERATOR(^)                                                              \
    VMPS_OPERATOR(<<)                                                             \
    VMPS_OPERATOR(>>)                                                             \
    VMPS_COMPARISON(<)                                                            \
    VMPS_COMPARISON(>)                                                            \
    VMPS_COMPARISON(<=)                                                           \
    VMPS_COMPARISON(>=)                                                           \
    VMPS_COMPARISON(==)                                                           \
    VMPS_COMPARISON(!=)                                                           \
    VMPS_COMPARISON(&&)                                                           \
    VMPS_COMPARISON(||)                                                           \
    friend constexpr vec operator+(vec a) { return a; }                           \
    friend constexpr vec operator-(vec a) {                                       \
      for (int i = 0; i < n; i++) a[i] = T(-a[i]);                                \
      return a;                                                                   \
    }                                                                             \
    friend constexpr vec operator~(vec a) {                                       \
      for (int i = 0; i < n; i++) a[i] = T(~a[i]);                                \
      return a;                                                                   \
    }                                                                             \
    friend constexpr vec<bool, n> operator!(vec a) {                              \
      vec<bool, n> r;                                                             \
      for (int i = 0; i < n; i++) r[i] = !a[i];                                   \
      return r;                                                                   \
    }                                                                             \
    constexpr vec& operator++() { return *this += T(1); }                         \
    constexpr vec& operator--() { return *this -= T(1); }                         \
    constexpr vec operator++(int) {                                               \
      vec old = *this;                                                            \
      *this += T(1);                                                              \
      return old;                                                                 \
    }                                                                             \
    constexpr vec operator--(int) {                                               \
      vec old = *this;                                                            \
      *this -= T(1);                                                              \
      return old;                                                                 \
    }                                                                             \
                                                                                  \
   private:                                                                       \
    template <class A>                                                            \
    constexpr void put(int& at, A a) {                                            \
      if constexpr (vmps::width<A> == 1)                                          \
        (*this)[at++] = T(a);                                                     \
      else                                                                        \
        for (int i = 0; i < vmps::width<A>; i++) (*this)[at++] = T(a[i]);         \
    }                                                                             \
  };
VMPS_VECTOR(2, 2, x, y)
VMPS_VECTOR(3, 4, x, y, z)
VMPS_VECTOR(4, 4, x, y, z, w)
#undef VMPS_VECTOR
#undef VMPS_OPERATOR
#undef VMPS_COMPARISON
#undef VMPS_AT_2
#undef VMPS_AT_3
#undef VMPS_AT_4

template <class T, size_t N>
struct array {
  T elements[N];
  constexpr thread T& operator[](size_t i) { return elements[i]; }
  constexpr const thread T& operator[](size_t i) const { return elements[i]; }
  constexpr size_t size() const { return N; }
  constexpr bool empty() const { return N == 0; }
};

template <class T, int N>
struct packed_vec {  // no padding, the alignment of its scalar
  T elements[N];
  packed_vec() = default;
  constexpr packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; i++) elements[i] = v[i];
  }
  template <class... A>
    requires(sizeof...(A) > 1)
  constexpr packed_vec(A... a) : packed_vec(vec<T, N>(a...)) {}
  constexpr explicit packed_vec(T s) : packed_vec(vec<T, N>(s)) {}
  constexpr operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v[i] = elements[i];
    return v;
  }
  template <class U>
  explicit constexpr operator vec<U, N>() const {
    return vec<U, N>(vec<T, N>(*this));
  }
  constexpr T& operator[](int i) { return elements[i]; }
  constexpr const T& operator[](int i) const { return elements[i]; }
#define VMPS_PACKED_COMPONENT(name, i) \
  constexpr T vmps_get_##name() const  \
    requires(i < N)                    \
  {                                    \
    return elements[i];                \
  }                                    \
  constexpr void vmps_put_##name(T v)  \
    requires(i < N)                    \
  {                                    \
    elements[i] = v;                   \
  }                                    \
  __declspec(property(get = vmps_get_##name, put = vmps_put_##name)) T name;
  VMPS_PACKED_COMPONENT(x, 0)
  VMPS_PACKED_COMPONENT(y, 1)
  VMPS_PACKED_COMPONENT(z, 2)
  VMPS_PACKED_COMPONENT(w, 3)
#undef VMPS_PACKED_COMPONENT
#define VMPS_PACKED_OPERATOR(op)                                                                              \
  friend constexpr vec<T, N> operator op(packed_vec a, packed_vec b) { return vec<T, N>(a) op vec<T, N>(b); } \
  friend constexpr vec<T, N> operator op(packed_vec a, vec<T, N> b) { return vec<T, N>(a) op b; }             \
  friend constexpr vec<T, N> operator op(vec<T, N> a, packed_vec b) { return a op vec<T, N>(b); }             \
  friend constexpr vec<T, N> operator op(packed_vec a, T b) { return vec<T, N>(a) op b; }                     \
  friend constexpr vec<T, N> operator op(T a, packed_vec b) { return a op vec<T, N>(b); }                     \
  template <class U>                                                                                          \
  constexpr packed_vec& operator op## = (U b) {                                                               \
    return *this = packed_vec(*this op b);                                                                    \
  }
  VMPS_PACKED_OPERATOR(+)
  VMPS_PACKED_OPERATOR(-)
  VMPS_PACKED_OPERATOR(*)
  VMPS_PACKED_OPERATOR(/)
#undef VMPS_PACKED_OPERATOR
};

template <class T, int Columns, int Rows>
struct matrix {
  vec<T, Rows> columns[Columns];
  matrix() = default;
  explicit matrix(T diagonal) {
    for (int c = 0; c < Columns; c++) {
      columns[c] = vec<T, Rows>(T(0));
      if (c < Rows) columns[c][c] = diagonal;
    }
  }
  template <class... V>
    requires(sizeof...(V) == Columns && (vmps::width<V> + ...) == Columns * Rows)
  matrix(V... v) {
    int c = 0;
    ((columns[c++] = v), ...);
  }
  template <class... S>
    requires(sizeof...(S) == Columns * Rows && (vmps::scalar<S> && ...))
  matrix(S... s) {
    int i = 0;
    ((columns[i / Rows][i % Rows] = T(s), i++), ...);
  }
  template <class U>
  explicit matrix(matrix<U, Columns, Rows> o) {
    for (int c = 0; c < Columns; c++) columns[c] = vec<T, Rows>(o.columns[c]);
  }
  constexpr vec<T, Rows>& operator[](int c) { return columns[c]; }
  constexpr const vec<T, Rows>& operator[](int c) const { return columns[c]; }
  friend matrix operator+(matrix a, matrix b) {
    for (int c = 0; c < Columns; c++) a.columns[c] += b.columns[c];
    return a;
  }
  friend matrix operator-(matrix a, matrix b) {
    for (int c = 0; c < Columns; c++) a.columns[c] -= b.columns[c];
    return a;
  }
  friend matrix operator*(matrix m, T s) {
    for (int c = 0; c < Columns; c++) m.columns[c] *= s;
    return m;
  }
  friend matrix operator*(T s, matrix m) { return m * s; }
  friend vec<T, Rows> operator*(matrix m, vec<T, Columns> v) {
    vec<T, Rows> r = m.columns[0] * v[0];
    for (int c = 1; c < Columns; c++) r += m.columns[c] * v[c];
    return r;
  }
  friend vec<T, Columns> operator*(vec<T, Rows> v, matrix m) {
    vec<T, Columns> r;
    for (int c = 0; c < Columns; c++) {
      T sum = v[0] * m.columns[c][0];
      for (int i = 1; i < Rows; i++) sum += v[i] * m.columns[c][i];
      r[c] = sum;
    }
    return r;
  }
  template <int C2>
  friend matrix<T, C2, Rows> operator*(matrix a, matrix<T, C2, Columns> b) {
    matrix<T, C2, Rows> r;
    for (int c = 0; c < C2; c++) r.columns[c] = a * b.columns[c];
    return r;
  }
};
template <class T, int C, int R>
matrix<T, R, C> transpose(matrix<T, C, R> m) {
  matrix<T, R, C> t;
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) t.columns[r][c] = m.columns[c][r];
  return t;
}
}  // namespace metal

using metal::vec;

// Named without a namespace in Metal: float4, packed_half2, float4x4, ... (metal::float4 is accepted too.)
#define VMPS_NAMES(T)                                      \
  typedef metal::vec<T, 2> T##2;                           \
  typedef metal::vec<T, 3> T##3;                           \
  typedef metal::vec<T, 4> T##4;                           \
  typedef metal::packed_vec<T, 2> packed_##T##2;           \
  typedef metal::packed_vec<T, 3> packed_##T##3;           \
  typedef metal::packed_vec<T, 4> packed_##T##4;           \
  namespace metal {                                        \
  using ::T##2, ::T##3, ::T##4;                            \
  using ::packed_##T##2, ::packed_##T##3, ::packed_##T##4; \
  }
VMPS_NAMES(bool)
VMPS_NAMES(char)
VMPS_NAMES(uchar)
VMPS_NAMES(short)
VMPS_NAMES(ushort)
VMPS_NAMES(int)
VMPS_NAMES(uint)
VMPS_NAMES(long)
VMPS_NAMES(ulong)
VMPS_NAMES(half)
VMPS_NAMES(bfloat)
VMPS_NAMES(float)
#undef VMPS_NAMES

#define VMPS_MATRIX_NAMES(T)                                                                      \
  typedef metal::matrix<T, 2, 2> T##2x2;                                                          \
  typedef metal::matrix<T, 2, 3> T##2x3;                                                          \
  typedef metal::matrix<T, 2, 4> T##2x4;                                                          \
  typedef metal::matrix<T, 3, 2> T##3x2;                                                          \
  typedef metal::matrix<T, 3, 3> T##3x3;                                                          \
  typedef metal::matrix<T, 3, 4> T##3x4;                                                          \
  typedef metal::matrix<T, 4, 2> T##4x2;                                                          \
  typedef metal::matrix<T, 4, 3> T##4x3;                                                          \
  typedef metal::matrix<T, 4, 4> T##4x4;                                                          \
  namespace metal {                                                                               \
  using ::T##2x2, ::T##2x3, ::T##2x4, ::T##3x2, ::T##3x3, ::T##3x4, ::T##4x2, ::T##4x3, ::T##4x4; \
  }
VMPS_MATRIX_NAMES(half)
VMPS_MATRIX_NAMES(bfloat)
VMPS_MATRIX_NAMES(float)
#undef VMPS_MATRIX_NAMES
