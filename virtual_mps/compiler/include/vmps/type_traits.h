// <metal_type_traits> and <metal_limits>.
#pragma once
#include "address_spaces.h"

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
T&& declval();

#define VMPS_TRANSFORM(name, ...) \
  template <class T>              \
  struct name {                   \
    using type = __VA_ARGS__;     \
  };                              \
  template <class T>              \
  using name##_t = typename name<T>::type;
VMPS_TRANSFORM(remove_cv, __remove_cv(T))
VMPS_TRANSFORM(remove_const, __remove_const(T))
VMPS_TRANSFORM(remove_volatile, __remove_volatile(T))
VMPS_TRANSFORM(remove_reference, __remove_reference_t(T))
VMPS_TRANSFORM(remove_pointer, __remove_pointer(T))
VMPS_TRANSFORM(remove_extent, __remove_extent(T))
VMPS_TRANSFORM(add_const, const T)
VMPS_TRANSFORM(decay, __decay(T))
VMPS_TRANSFORM(make_unsigned, __make_unsigned(T))
VMPS_TRANSFORM(make_signed, __make_signed(T))
VMPS_TRANSFORM(underlying_type, __underlying_type(T))
#undef VMPS_TRANSFORM

template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
struct remove_addrspace<device T> {
  using type = T;
};
template <class T>
struct remove_addrspace<threadgroup T> {
  using type = T;
};
template <class T>
struct remove_addrspace<constant T> {
  using type = const T;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

#define VMPS_TRAIT(name, ...)                   \
  template <class T>                            \
  inline constexpr bool name##_v = __VA_ARGS__; \
  template <class T>                            \
  struct name : bool_constant<name##_v<T>> {};
VMPS_TRAIT(is_floating_point, vmps::floating<T>)
VMPS_TRAIT(is_integral, vmps::integer<T>)
VMPS_TRAIT(is_arithmetic, vmps::scalar<T>)
VMPS_TRAIT(is_scalar, vmps::scalar<T> || __is_enum(T) || __is_pointer(T))
VMPS_TRAIT(is_signed, vmps::floating<T> || __is_signed(T))
VMPS_TRAIT(is_unsigned, __is_unsigned(T))
VMPS_TRAIT(is_pointer, __is_pointer(T))
VMPS_TRAIT(is_reference, __is_reference(T))
VMPS_TRAIT(is_const, __is_const(T))
VMPS_TRAIT(is_array, __is_array(T))
VMPS_TRAIT(is_enum, __is_enum(T))
VMPS_TRAIT(is_class, __is_class(T))
VMPS_TRAIT(is_union, __is_union(T))
VMPS_TRAIT(is_void, __is_void(T))
VMPS_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
VMPS_TRAIT(is_default_constructible, __is_constructible(T))
#undef VMPS_TRAIT

#define VMPS_TRAIT2(name, ...)                  \
  template <class A, class B>                   \
  inline constexpr bool name##_v = __VA_ARGS__; \
  template <class A, class B>                   \
  struct name : bool_constant<name##_v<A, B>> {};
VMPS_TRAIT2(is_same, __is_same(A, B))
VMPS_TRAIT2(is_convertible, __is_convertible_to(A, B))
VMPS_TRAIT2(is_base_of, __is_base_of(A, B))
VMPS_TRAIT2(is_assignable, __is_assignable(A, B))
#undef VMPS_TRAIT2

template <class T, class... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A>
inline constexpr bool is_constructible_v = __is_constructible(T, A...);
template <class... B>
struct disjunction : bool_constant<(bool(B::value) || ...)> {};
// Internal to Apple's headers, yet known to sources.
template <class... B>
using _disjunction = disjunction<B...>;
template <class... B>
struct conjunction : bool_constant<(bool(B::value) && ...)> {};
template <class B>
struct negation : bool_constant<!bool(B::value)> {};
template <class... B>
inline constexpr bool disjunction_v = disjunction<B...>::value;
template <class... B>
inline constexpr bool conjunction_v = conjunction<B...>::value;
template <class B>
inline constexpr bool negation_v = negation<B>::value;

template <class T>
struct numeric_limits {
  static constexpr bool is_specialized = vmps::integer<T>, is_signed = T(-1) < T(0), is_integer = true, is_exact = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false;
  static constexpr int digits = __is_same(T, bool) ? 1 : sizeof(T) * 8 - is_signed, radix = 2;
  static constexpr T max() { return is_signed ? T(((1ull << (digits - 1)) - 1) * 2 + 1) : T(~T(0)); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
  static constexpr T epsilon() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};
template <>
constexpr bool numeric_limits<bool>::max() {
  return true;
}
#define VMPS_FLOATING_LIMITS(T, largest, smallest, eps, mantissa, exp_min, exp_max)                      \
  template <>                                                                                            \
  struct numeric_limits<T> {                                                                             \
    static constexpr bool is_specialized = true, is_signed = true, is_integer = false, is_exact = false; \
    static constexpr bool has_infinity = true, has_quiet_NaN = true;                                     \
    static constexpr int digits = mantissa, radix = 2, min_exponent = exp_min, max_exponent = exp_max;   \
    static constexpr T max() { return T(largest); }                                                      \
    static constexpr T lowest() { return T(-largest); }                                                  \
    static constexpr T min() { return T(smallest); }                                                     \
    static constexpr T epsilon() { return T(eps); }                                                      \
    static constexpr T infinity() { return T(__builtin_inff()); }                                        \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }                                     \
  };
VMPS_FLOATING_LIMITS(float, 0x1.fffffep127f, 0x1p-126f, 0x1p-23f, 24, -125, 128)
VMPS_FLOATING_LIMITS(half, 65504.f, 0x1p-14f, 0x1p-10f, 11, -13, 16)
VMPS_FLOATING_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 8, -125, 128)
#undef VMPS_FLOATING_LIMITS
}  // namespace metal
