// The swizzle members of metal::vec: `v.xy`, `v.bgr`, `v.wzyx = ...`. They are properties, which take no storage, so
// that vec stays a plain structure of its components. VMPS_SWIZZLES_<n> is used inside vec<T, n>.
#pragma once

namespace vmps {
template <int... I>
struct components {
  static constexpr bool distinct() {
    unsigned seen = 0;
    return ((!(seen >> I & 1) && (seen |= 1u << I)) && ...);
  }
};
}  // namespace vmps

// Component letter -> its member and its number.
#define VMPS_M_x x
#define VMPS_M_y y
#define VMPS_M_z z
#define VMPS_M_w w
#define VMPS_M_r x
#define VMPS_M_g y
#define VMPS_M_b z
#define VMPS_M_a w
#define VMPS_N_x 0
#define VMPS_N_y 1
#define VMPS_N_z 2
#define VMPS_N_w 3
#define VMPS_N_r 0
#define VMPS_N_g 1
#define VMPS_N_b 2
#define VMPS_N_a 3

#define VMPS_PROPERTY(name, k, read, numbers, write)                     \
  constexpr vec<T, k> vmps_get_##name() const { return vec<T, k> read; } \
  constexpr void vmps_put_##name(vec<T, k> v)                            \
    requires(vmps::components<VMPS_STRIP numbers>::distinct())           \
  {                                                                      \
    write                                                                \
  }                                                                      \
  __declspec(property(get = vmps_get_##name, put = vmps_put_##name)) vec<T, k> name;
#define VMPS_STRIP(...) __VA_ARGS__

#define VMPS_SWIZZLE2(a, b) \
  VMPS_PROPERTY(a##b, 2, (VMPS_M_##a, VMPS_M_##b), (VMPS_N_##a, VMPS_N_##b), VMPS_M_##a = v.x; VMPS_M_##b = v.y;)
#define VMPS_SWIZZLE3(a, b, c)                                                                          \
  VMPS_PROPERTY(a##b##c, 3, (VMPS_M_##a, VMPS_M_##b, VMPS_M_##c), (VMPS_N_##a, VMPS_N_##b, VMPS_N_##c), \
                VMPS_M_##a = v.x;                                                                       \
                VMPS_M_##b = v.y; VMPS_M_##c = v.z;)
#define VMPS_SWIZZLE4(a, b, c, d)                                                   \
  VMPS_PROPERTY(a##b##c##d, 4, (VMPS_M_##a, VMPS_M_##b, VMPS_M_##c, VMPS_M_##d),    \
                (VMPS_N_##a, VMPS_N_##b, VMPS_N_##c, VMPS_N_##d), VMPS_M_##a = v.x; \
                VMPS_M_##b = v.y; VMPS_M_##c = v.z; VMPS_M_##d = v.w;)
#define VMPS_ALIAS(name, member)                         \
  constexpr T vmps_get_##name() const { return member; } \
  constexpr void vmps_put_##name(T v) { member = v; }    \
  __declspec(property(get = vmps_get_##name, put = vmps_put_##name)) T name;

// f for each letter of a set, with the arguments so far in front. One copy for each depth: a macro does not nest in
// itself.
#define VMPS_EACH1_2(f, p, q, ...) f(__VA_ARGS__, p) f(__VA_ARGS__, q)
#define VMPS_EACH1_3(f, p, q, r, ...) VMPS_EACH1_2(f, p, q, __VA_ARGS__) f(__VA_ARGS__, r)
#define VMPS_EACH1_4(f, p, q, r, s, ...) VMPS_EACH1_3(f, p, q, r, __VA_ARGS__) f(__VA_ARGS__, s)
#define VMPS_PAIRS(n, a, ...) VMPS_EACH1_##n(VMPS_SWIZZLE2, __VA_ARGS__, a)
#define VMPS_TRIPLES(n, a, b, ...) VMPS_EACH1_##n(VMPS_SWIZZLE3, __VA_ARGS__, a, b)
#define VMPS_QUADS(n, a, b, c, ...) VMPS_EACH1_##n(VMPS_SWIZZLE4, __VA_ARGS__, a, b, c)

#define VMPS_QUADS_2(a, b, p, q) VMPS_QUADS(2, a, b, p, p, q) VMPS_QUADS(2, a, b, q, p, q)
#define VMPS_QUADS_3(a, b, p, q, r) \
  VMPS_QUADS(3, a, b, p, p, q, r) VMPS_QUADS(3, a, b, q, p, q, r) VMPS_QUADS(3, a, b, r, p, q, r)
#define VMPS_QUADS_4(a, b, p, q, r, s) \
  VMPS_QUADS(4, a, b, p, p, q, r, s)   \
  VMPS_QUADS(4, a, b, q, p, q, r, s) VMPS_QUADS(4, a, b, r, p, q, r, s) VMPS_QUADS(4, a, b, s, p, q, r, s)
#define VMPS_LONG_2(a, b, p, q) VMPS_TRIPLES(2, a, b, p, q) VMPS_QUADS_2(a, b, p, q)
#define VMPS_LONG_3(a, b, p, q, r) VMPS_TRIPLES(3, a, b, p, q, r) VMPS_QUADS_3(a, b, p, q, r)
#define VMPS_LONG_4(a, b, p, q, r, s) VMPS_TRIPLES(4, a, b, p, q, r, s) VMPS_QUADS_4(a, b, p, q, r, s)
#define VMPS_FROM_2(a, p, q) VMPS_PAIRS(2, a, p, q) VMPS_LONG_2(a, p, p, q) VMPS_LONG_2(a, q, p, q)
#define VMPS_FROM_3(a, p, q, r) \
  VMPS_PAIRS(3, a, p, q, r) VMPS_LONG_3(a, p, p, q, r) VMPS_LONG_3(a, q, p, q, r) VMPS_LONG_3(a, r, p, q, r)
#define VMPS_FROM_4(a, p, q, r, s) \
  VMPS_PAIRS(4, a, p, q, r, s)     \
  VMPS_LONG_4(a, p, p, q, r, s)    \
  VMPS_LONG_4(a, q, p, q, r, s) VMPS_LONG_4(a, r, p, q, r, s) VMPS_LONG_4(a, s, p, q, r, s)
#define VMPS_ALL_2(p, q) VMPS_FROM_2(p, p, q) VMPS_FROM_2(q, p, q)
#define VMPS_ALL_3(p, q, r) VMPS_FROM_3(p, p, q, r) VMPS_FROM_3(q, p, q, r) VMPS_FROM_3(r, p, q, r)
#define VMPS_ALL_4(p, q, r, s) \
  VMPS_FROM_4(p, p, q, r, s) VMPS_FROM_4(q, p, q, r, s) VMPS_FROM_4(r, p, q, r, s) VMPS_FROM_4(s, p, q, r, s)

#define VMPS_SWIZZLES_2 VMPS_ALL_2(x, y) VMPS_ALL_2(r, g) VMPS_ALIAS(r, x) VMPS_ALIAS(g, y)
#define VMPS_SWIZZLES_3 VMPS_ALL_3(x, y, z) VMPS_ALL_3(r, g, b) VMPS_ALIAS(r, x) VMPS_ALIAS(g, y) VMPS_ALIAS(b, z)
#define VMPS_SWIZZLES_4 \
  VMPS_ALL_4(x, y, z, w) VMPS_ALL_4(r, g, b, a) VMPS_ALIAS(r, x) VMPS_ALIAS(g, y) VMPS_ALIAS(b, z) VMPS_ALIAS(a, w)
