// <metal_simdgroup_matrix>.
//
// A matrix is held whole by lane 0, or spread over the lanes as the hardware does it (two elements a lane), or both.
// Loading, multiplying and storing whole matrices is lane 0's work alone and needs no waiting: what orders its accesses
// is the order of the program and the kernel's own barriers. thread_elements() spreads a whole matrix, which waits for
// all lanes once.
#pragma once
#include "simdgroup.h"

namespace vmps {
typedef float row8 __attribute__((ext_vector_type(8)));
enum held : uint { held_whole = 1, held_spread = 2 };

// Row and first column of a lane's two elements: Apple's lane map.
struct elements_of {
  int row, column;
  VMPS_INLINE explicit elements_of(uint lane)
      : row(int(lane >> 4 & 1) * 4 + int(lane >> 1 & 3)), column(int(lane >> 3 & 1) * 4 + int(lane & 1) * 2) {}
};

VMPS_INLINE row8 widen(const half* p) {
  typedef half packed __attribute__((ext_vector_type(8), aligned(2)));
  return __builtin_convertvector(*(const packed*)p, row8);
}
VMPS_INLINE row8 widen(const bfloat* p) {
  typedef ushort packed __attribute__((ext_vector_type(8), aligned(2)));
  typedef uint wide __attribute__((ext_vector_type(8)));
  wide bits = __builtin_convertvector(*(const packed*)p, wide) << 16;
  return __builtin_bit_cast(row8, bits);
}
VMPS_INLINE row8 widen(const float* p) {
  typedef float packed __attribute__((ext_vector_type(8), aligned(4)));
  return *(const packed*)p;
}

template <class T>
VMPS_INLINE void round_to(row8* rows) {
  if constexpr (!same<T, float>)
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < 8; c++) rows[r][c] = float(T(rows[r][c]));
}
}  // namespace vmps

namespace metal {
template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8x8");
  static_assert(vmps::floating<T>, "simdgroup matrices hold float, half or bfloat");

  VMPS_INLINE simdgroup_matrix() : held(vmps::held_spread) {}
  VMPS_INLINE explicit simdgroup_matrix(T diagonal) {
    fill([=](int r, int c) { return r == c ? diagonal : T(0); });
  }
  VMPS_INLINE simdgroup_matrix(const simdgroup_matrix& o) { copy(o); }
  VMPS_INLINE simdgroup_matrix& operator=(const simdgroup_matrix& o) {
    copy(o);
    return *this;
  }

  VMPS_INLINE thread vec<T, 2>& thread_elements() {
    spread();
    held = vmps::held_spread;
    return elements;
  }
  VMPS_INLINE const thread vec<T, 2>& thread_elements() const {
    const_cast<simdgroup_matrix*>(this)->spread();
    return elements;
  }

  template <class F>
  VMPS_INLINE void fill(F f) {
    vmps::elements_of mine(vmps::lane_index());
    elements = vec<T, 2>(f(mine.row, mine.column), f(mine.row, mine.column + 1));
    held = vmps::held_whole | vmps::held_spread;
    if (vmps::lane_index() != 0) return;
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < 8; c++) rows[r][c] = float(f(r, c));
  }
  // Makes the lane's elements current, which the whole matrix alone may be.
  VMPS_INLINE void spread() {
    if (!(held & vmps::held_spread)) vmps::together(*this, serve_spread);
  }

  vmps::row8 rows[8];  // in lane 0: the whole matrix, widened without loss
  vec<T, 2> elements;
  uint held;

 private:
  VMPS_INLINE void copy(const simdgroup_matrix& o) {
    elements = o.elements;
    held = o.held;
    if (held & vmps::held_whole && vmps::lane_index() == 0)
      for (int r = 0; r < 8; r++) rows[r] = o.rows[r];
  }
  static __attribute__((noinline)) void serve_spread(simdgroup_matrix** operand, unsigned lanes) {
    vmps::for_each_lane(lanes, [&](int lane) {
      vmps::elements_of its(lane);
      operand[lane]->elements =
          vec<T, 2>(T(operand[0]->rows[its.row][its.column]), T(operand[0]->rows[its.row][its.column + 1]));
      operand[lane]->held |= vmps::held_spread;
    });
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows = Columns>
VMPS_INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.fill([=](int, int) { return value; });
  return m;
}
template <class T, int Columns, int Rows = Columns>
VMPS_INLINE simdgroup_matrix<T, Columns, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Columns, Rows>(value);
}
}  // namespace metal

namespace vmps {
// On the GPU all lanes of a simdgroup take part in what lane 0 does here for them.
VMPS_INLINE void meet(vmps_operation operation) {
#ifdef VMPS_INSTRUMENTED
  announce(operation);
  vmps_wait_simdgroup(self());
#endif
}

template <class T>
VMPS_INLINE void load(
    metal::simdgroup_matrix<T, 8, 8>& m, const T* source, ulong stride, ulong2 origin, bool transpose) {
  meet(VMPS_MATRIX_LOAD);
  m.held = held_whole;
  if (lane_index() != 0) return;
  source += origin.y * stride + origin.x;
  if (transpose) {
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < 8; c++) m.rows[r][c] = float(source[c * stride + r]);
  } else {
    for (int r = 0; r < 8; r++) m.rows[r] = widen(source + r * stride);
  }
}
template <class T>
VMPS_INLINE void store(
    const metal::simdgroup_matrix<T, 8, 8>& m, T* target, ulong stride, ulong2 origin, bool transpose) {
  bool spread = m.held & held_spread;  // before the wait, as in a multiplication
  meet(VMPS_MATRIX_STORE);
  target += origin.y * stride + origin.x;
  ulong row_step = transpose ? 1 : stride, column_step = transpose ? stride : 1;
  if (spread) {
    elements_of mine(lane_index());
    for (int i = 0; i < 2; i++) target[mine.row * row_step + (mine.column + i) * column_step] = m.elements[i];
  } else if (lane_index() == 0) {
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < 8; c++) target[r * row_step + c * column_step] = T(m.rows[r][c]);
  }
}

// The lane's part of a matrix into an operand of the simdgroup.
template <class T>
VMPS_INLINE void publish(float* operand, const metal::simdgroup_matrix<T, 8, 8>& m) {
  if (m.held & held_spread) {
    elements_of mine(lane_index());
    for (int i = 0; i < 2; i++) operand[mine.row * 8 + mine.column + i] = float(m.elements[i]);
  } else if (lane_index() == 0) {
    typedef float packed __attribute__((ext_vector_type(8), aligned(4)));
    for (int r = 0; r < 8; r++) *(packed*)(operand + r * 8) = m.rows[r];
  }
}
}  // namespace vmps

namespace metal {
#define VMPS_MATRIX_ACCESS(space)                                                                                \
  template <class T>                                                                                             \
  VMPS_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* source, ulong stride = 8,  \
                                  ulong2 origin = ulong2(0), bool transpose = false) {                           \
    vmps::load(m, (const T*)source, stride, origin, transpose);                                                  \
  }                                                                                                              \
  template <class T>                                                                                             \
  VMPS_INLINE void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& m, space T* target, ulong stride = 8, \
                                   ulong2 origin = ulong2(0), bool transpose = false) {                          \
    vmps::store(m, (T*)target, stride, origin, transpose);                                                       \
  }
VMPS_MATRIX_ACCESS(device)
VMPS_MATRIX_ACCESS(threadgroup)
#undef VMPS_MATRIX_ACCESS

// Products and sums in fp32, rounded to D once.
template <class D, class A, class B, class C>
VMPS_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                               const thread simdgroup_matrix<A, 8, 8>& a,
                                               const thread simdgroup_matrix<B, 8, 8>& b,
                                               const thread simdgroup_matrix<C, 8, 8>& c) {
  // Asked before the wait, while the optimiser still knows: one of the two ways below is then not compiled at all.
  bool whole = a.held & b.held & c.held & vmps::held_whole;
  vmps::meet(VMPS_MATRIX_MULTIPLY);
  if (whole) {
    d.held = vmps::held_whole;
    if (vmps::lane_index() == 0) {
      vmps_multiply_accumulate_8x8((float*)d.rows, (const float*)a.rows, (const float*)b.rows, (const float*)c.rows);
      vmps::round_to<D>(d.rows);
    }
    return;
  }
  vmps_lane* lane = vmps::self();
  float (*operand)[64] = lane->simdgroup->matrix;
  vmps::publish(operand[0], a);
  vmps::publish(operand[1], b);
  vmps::publish(operand[2], c);
  if (vmps_wait_simdgroup(lane)) vmps_multiply_accumulate_8x8(operand[3], operand[0], operand[1], operand[2]);
  vmps::elements_of mine(lane->in_simdgroup);
  const float* result = operand[3] + mine.row * 8 + mine.column;
  d.elements = vec<D, 2>(D(result[0]), D(result[1]));
  d.held = vmps::held_spread;
}
template <class D, class A, class B>
VMPS_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                    const thread simdgroup_matrix<A, 8, 8>& a,
                                    const thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}
template <class T>
VMPS_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                                const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
}  // namespace metal
