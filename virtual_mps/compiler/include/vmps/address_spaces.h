// Address spaces and the other words of Metal that C++ lacks.
//
// clang in SYCL device mode accepts address-space attributes on a CPU target, keeps overloads and partial
// specialisations on them apart, and refuses device <-> threadgroup mixes, while an unqualified reference (copy
// constructors, `this`) binds to any space. Code generation sees one space.
#pragma once

#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define constant const __attribute__((opencl_global_device))
#define thread
#define kernel

#define VMPS_INLINE inline __attribute__((always_inline))

typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned char uchar, uint8_t;
typedef signed char int8_t;
typedef unsigned short ushort, uint16_t;
typedef short int16_t;
typedef unsigned uint, uint32_t;
typedef int int32_t;
typedef unsigned long ulong, uint64_t, size_t, uintptr_t;
typedef long int64_t, ptrdiff_t, intptr_t;

namespace vmps {
template <class T, class U>
concept same = __is_same(__remove_cv(T), U);
template <class T>
concept floating = same<T, float> || same<T, half> || same<T, bfloat>;
template <class T>
concept integer = __is_integral(T);
template <class T>
concept scalar = floating<T> || integer<T>;

// The compiler writes `c ? a : b` as `c ? vmps::value(a) : vmps::value(b)`: C++ does not find the common type of class
// operands (vectors, structs) that lie in different address spaces.
template <class T>
constexpr VMPS_INLINE T value(T v) {
  return v;
}

// ... a string as vmps::string, which puts it into the constant address space.
template <size_t N>
using text = char[N];
template <size_t N>
VMPS_INLINE constant text<N>& string(const text<N>& literal) {
  return (constant text<N>&)literal;
}

// ... and static_cast as vmps::cast: clang refuses half <-> bfloat, Metal does not.
template <class T, class U>
constexpr VMPS_INLINE T cast(U&& u) {
  if constexpr (same<T, half> || same<T, bfloat>) {
    if constexpr (floating<decltype(value(u))>)
      return static_cast<T>(static_cast<float>(u));
    else
      return static_cast<T>(static_cast<U&&>(u));
  } else {
    return static_cast<T>(static_cast<U&&>(u));
  }
}
}  // namespace vmps

template <class T, class U>
VMPS_INLINE T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type: the two types differ in size");
  T t;
  __builtin_memcpy((void*)&t, (const void*)&u, sizeof t);
  return t;
}
