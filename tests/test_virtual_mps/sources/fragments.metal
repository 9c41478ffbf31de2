// A GEMM in the style of MLX's steel: loader and tile structs, fragments kept as two elements a lane.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

#define STEEL_CONST static constant constexpr const
#define STEEL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

struct GEMMParams {
  const int M;
  const int N;
  const int K;
  const int lda;
  const int ldb;
  const int ldd;
};

template <typename T, short BROWS, short BCOLS, short dst_ld, short tgp_size, short alignment = 1>
struct BlockLoader {
  STEEL_CONST short n_reads = (BCOLS * BROWS) / tgp_size;
  STEEL_CONST short TCOLS = BCOLS / n_reads;
  STEEL_CONST short TROWS = tgp_size / TCOLS;

  const int src_ld;
  const short thread_idx;
  const short bi;
  const short bj;
  threadgroup T* dst;
  const device T* src;

  struct alignas(alignment * sizeof(T)) ReadVector {
    uint8_t v[sizeof(T) * n_reads];
  };

  METAL_FUNC BlockLoader(
      const device T* src_,
      const int src_ld_,
      threadgroup T* dst_,
      ushort simd_group_id [[simdgroup_index_in_threadgroup]],
      ushort simd_lane_id [[thread_index_in_simdgroup]])
      : src_ld(src_ld_),
        thread_idx(simd_group_id * 32 + simd_lane_id),
        bi(thread_idx / TCOLS),
        bj(n_reads * (thread_idx % TCOLS)),
        dst(dst_ + bi * dst_ld + bj),
        src(src_ + bi * src_ld + bj) {}

  METAL_FUNC void load_unsafe() const {
    STEEL_PRAGMA_UNROLL
    for (short i = 0; i < BROWS; i += TROWS) {
      *((threadgroup ReadVector*)(&dst[i * dst_ld])) = *((const device ReadVector*)(&src[i * src_ld]));
    }
  }

  METAL_FUNC void load_safe(short2 src_tile_dim) const {
    src_tile_dim = src_tile_dim - short2(bj, bi);
    if (src_tile_dim.x <= 0 || src_tile_dim.y <= 0) {
      STEEL_PRAGMA_UNROLL
      for (short i = 0; i < BROWS; i += TROWS) {
        for (short j = 0; j < n_reads; j++) {
          dst[i * dst_ld + j] = T(0);
        }
      }
      return;
    }
    STEEL_PRAGMA_UNROLL
    for (short i = 0; i < BROWS; i += TROWS) {
      for (short j = 0; j < n_reads; j++) {
        const bool ok = i < src_tile_dim.y && j < src_tile_dim.x;
        dst[i * dst_ld + j] = ok ? src[i * src_ld + j] : T(0);
      }
    }
  }

  METAL_FUNC void next(int step) { src += step; }
};

template <typename T>
struct BaseMMAFrag {
  STEEL_CONST int kFragRows = 8;
  STEEL_CONST int kElemsPerFrag = 2;
  typedef metal::simdgroup_matrix<T, 8, 8> mat_type;
  typedef metal::vec<T, kElemsPerFrag> frag_type;

  METAL_FUNC static constexpr short2 get_coord(ushort simd_lane_id [[thread_index_in_simdgroup]]) {
    const short qid = simd_lane_id / 4;
    const short fm = (qid & 4) + ((simd_lane_id / 2) % 4);
    const short fn = (qid & 2) * 2 + (simd_lane_id % 2) * 2;
    return short2{fn, fm};
  }

  template <typename SrcPtrType>
  METAL_FUNC static constexpr void load(thread frag_type& dst, SrcPtrType src, int str_x) {
    STEEL_PRAGMA_UNROLL
    for (short j = 0; j < kElemsPerFrag; j++) {
      dst[j] = static_cast<T>(src[j]);
    }
    (void)str_x;
  }

  template <typename A, typename B>
  METAL_FUNC static void mma(thread frag_type& D, thread metal::vec<A, 2>& a, thread metal::vec<B, 2>& b) {
    mat_type D_mat;
    metal::simdgroup_matrix<A, 8, 8> A_mat;
    metal::simdgroup_matrix<B, 8, 8> B_mat;
    reinterpret_cast<thread metal::vec<A, 2>&>(A_mat.thread_elements()) = a;
    reinterpret_cast<thread metal::vec<B, 2>&>(B_mat.thread_elements()) = b;
    reinterpret_cast<thread frag_type&>(D_mat.thread_elements()) = D;
    simdgroup_multiply_accumulate(D_mat, A_mat, B_mat, D_mat);
    D = reinterpret_cast<thread frag_type&>(D_mat.thread_elements());
  }
};

template <typename T, int BM, int BN, int BK, typename AccumType = float>
[[kernel, max_total_threads_per_threadgroup(64)]] void fragment_gemm(
    const device T* A [[buffer(0)]],
    const device T* B [[buffer(1)]],
    device T* D [[buffer(3)]],
    const constant GEMMParams* params [[buffer(4)]],
    uint simd_lane_id [[thread_index_in_simdgroup]],
    uint simd_group_id [[simdgroup_index_in_threadgroup]],
    uint3 tid [[threadgroup_position_in_grid]]) {
  STEEL_CONST short pad = 16 / sizeof(T);
  threadgroup T As[BM * (BK + pad)];
  threadgroup T Bs[BK * (BN + pad)];
  const int c_row = tid.y * BM;
  const int c_col = tid.x * BN;
  A += c_row * size_t(params->lda);
  B += c_col;
  BlockLoader<T, BM, BK, BK + pad, 64> loader_a(A, params->lda, As, simd_group_id, simd_lane_id);
  BlockLoader<T, BK, BN, BN + pad, 64> loader_b(B, params->ldb, Bs, simd_group_id, simd_lane_id);
  const short rows = min(BM, params->M - c_row);
  const short columns = min(BN, params->N - c_col);

  using frag = BaseMMAFrag<AccumType>;
  typename frag::frag_type acc[BM / 16][BN / 8];
  STEEL_PRAGMA_UNROLL
  for (short i = 0; i < BM / 16; i++) {
    for (short j = 0; j < BN / 8; j++) {
      acc[i][j] = typename frag::frag_type(0);
    }
  }
  const short2 at = frag::get_coord(simd_lane_id);
  for (int k = 0; k < params->K; k += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const short depth = min(BK, params->K - k);
    if (rows == BM && columns == BN && depth == BK) {
      loader_a.load_unsafe();
      loader_b.load_unsafe();
    } else {
      loader_a.load_safe(short2(depth, rows));
      loader_b.load_safe(short2(columns, depth));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (short kk = 0; kk < BK; kk += 8) {
      simdgroup_barrier(mem_flags::mem_none);
      metal::vec<T, 2> a[BM / 16], b[BN / 8];
      for (short i = 0; i < BM / 16; i++) {
        BaseMMAFrag<T>::load(a[i], &As[(i * 16 + simd_group_id * 8 + at.y) * (BK + pad) + kk + at.x], 1);
      }
      for (short j = 0; j < BN / 8; j++) {
        BaseMMAFrag<T>::load(b[j], &Bs[(kk + at.y) * (BN + pad) + j * 8 + at.x], 1);
      }
      STEEL_PRAGMA_UNROLL
      for (short i = 0; i < BM / 16; i++) {
        STEEL_PRAGMA_UNROLL
        for (short j = 0; j < BN / 8; j++) {
          const short serpentine = (i % 2) ? (BN / 8 - 1 - j) : j;
          frag::mma(acc[i][serpentine], a[i], b[serpentine]);
        }
      }
    }
    loader_a.next(BK);
    loader_b.next(BK * params->ldb);
  }
  for (short i = 0; i < BM / 16; i++) {
    for (short j = 0; j < BN / 8; j++) {
      const int row = c_row + i * 16 + simd_group_id * 8 + at.y;
      for (short e = 0; e < 2; e++) {
        const int column = c_col + j * 8 + at.x + e;
        if (row < params->M && column < params->N) {
          D[row * size_t(params->ldd) + column] = static_cast<T>(acc[i][j][e]);
        }
      }
    }
  }
}

#define instantiate_gemm(tname, type, bm, bn, bk)                                \
  template [[host_name("fragment_gemm_" #tname "_bm" #bm "_bn" #bn "_bk" #bk)]] \
  [[kernel]] void fragment_gemm<type, bm, bn, bk>(                               \
      const device type* A [[buffer(0)]],                                        \
      const device type* B [[buffer(1)]],                                        \
      device type* D [[buffer(3)]],                                              \
      const constant GEMMParams* params [[buffer(4)]],                           \
      uint simd_lane_id [[thread_index_in_simdgroup]],                           \
      uint simd_group_id [[simdgroup_index_in_threadgroup]],                     \
      uint3 tid [[threadgroup_position_in_grid]]);

instantiate_gemm(float16, half, 32, 32, 16)
instantiate_gemm(bfloat16, bfloat, 32, 32, 16)
instantiate_gemm(float32, float, 32, 32, 16)
