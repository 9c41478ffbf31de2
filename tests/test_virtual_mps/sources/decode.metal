// Decoding in the style of MLX and of bit-packed extensions: attention for one query, and a matrix-vector product with
// affine quantised weights, read as wide vectors.
#include <metal_stdlib>

using namespace metal;

constant bool has_mask [[function_constant(20)]];
constant bool do_causal [[function_constant(22)]];
constant bool bool_mask [[function_constant(23)]];
constant bool float_mask = has_mask && !bool_mask;

template <typename T, int D>
[[kernel]] void sdpa_vector(
    const device T* queries [[buffer(0)]],
    const device T* keys [[buffer(1)]],
    const device T* values [[buffer(2)]],
    device T* out [[buffer(3)]],
    const constant int& gqa_factor [[buffer(4)]],
    const constant int& N [[buffer(5)]],
    const constant size_t& k_head_stride [[buffer(6)]],
    const constant float& scale [[buffer(7)]],
    const device bool* bmask [[buffer(8), function_constant(bool_mask)]],
    const device T* fmask [[buffer(9), function_constant(float_mask)]],
    uint3 tid [[threadgroup_position_in_grid]],
    uint3 tpg [[threadgroups_per_grid]],
    uint simd_gid [[simdgroup_index_in_threadgroup]],
    uint simd_lid [[thread_index_in_simdgroup]]) {
  constexpr int BN = 32;
  constexpr int BD = 32;
  constexpr int per_thread = D / BD;
  typedef float U;
  thread U q[per_thread];
  thread U o[per_thread];
  threadgroup U outputs[BN * BD];
  threadgroup U max_scores[BN];
  threadgroup U sum_exp_scores[BN];

  const int head = tid.x;
  const int kv_head = head / gqa_factor;
  queries += head * D + simd_lid * per_thread;
  keys += kv_head * k_head_stride + simd_gid * D + simd_lid * per_thread;
  values += kv_head * k_head_stride + simd_gid * D + simd_lid * per_thread;
  out += head * D + simd_gid * per_thread;
  for (int i = 0; i < per_thread; i++) {
    q[i] = static_cast<U>(scale) * queries[i];
    o[i] = 0;
  }
  U max_score = -INFINITY;
  U sum_exp_score = 0;
  for (int i = simd_gid; i < N; i += BN) {
    bool use_key = true;
    if (do_causal) {
      use_key = i <= N - 1;
    }
    if (bool_mask) {
      use_key = bmask[i];
    }
    if (use_key) {
      U score = 0;
      for (int j = 0; j < per_thread; j++) {
        score += q[j] * keys[j];
      }
      score = simd_sum(score);
      if (float_mask) {
        score += static_cast<U>(fmask[i]);
      }
      U new_max = max(max_score, score);
      U factor = fast::exp(max_score - new_max);
      U exp_score = fast::exp(score - new_max);
      max_score = new_max;
      sum_exp_score = sum_exp_score * factor + exp_score;
      for (int j = 0; j < per_thread; j++) {
        o[j] = o[j] * factor + exp_score * values[j];
      }
    }
    keys += BN * D;
    values += BN * D;
  }
  if (simd_lid == 0) {
    max_scores[simd_gid] = max_score;
    sum_exp_scores[simd_gid] = sum_exp_score;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  max_score = max_scores[simd_lid];
  U new_max = simd_max(max_score);
  U factor = max_score == -INFINITY ? 0 : fast::exp(max_score - new_max);
  sum_exp_score = simd_sum(sum_exp_scores[simd_lid] * factor);
  for (int i = 0; i < per_thread; i++) {
    outputs[simd_lid * BD + simd_gid] = o[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = simd_sum(outputs[simd_gid * BD + simd_lid] * factor) / sum_exp_score;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (simd_lid == 0) {
    for (int i = 0; i < per_thread; i++) {
      out[i] = static_cast<T>(o[i]);
    }
  }
}

template <typename T, int group_size>
kernel void qmv4(
    const device uint32_t* w [[buffer(0)]],
    const device T* scales [[buffer(1)]],
    const device T* biases [[buffer(2)]],
    const device T* x [[buffer(3)]],
    device T* y [[buffer(4)]],
    constant uint& columns [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]]) {
  using T4 = vec<T, 4>;
  float sum = 0;
  for (uint pack = lane; pack < columns / 8; pack += 32) {
    uint32_t bits = w[row * (columns / 8) + pack];
    const uint group = row * (columns / group_size) + pack * 8 / group_size;
    float scale = scales[group], bias = biases[group];
    float4 low = float4(as_type<uchar4>(bits) & uchar(0xF));
    float4 high = float4(as_type<uchar4>(bits) >> 4);
    float4 x_even, x_odd;
    const device T4* v = reinterpret_cast<const device T4*>(x + pack * 8);
    float4 first = float4(v[0]), second = float4(v[1]);
    x_even.xy = first.xz; x_even.zw = second.xz;
    x_odd = float4(first.yw, second.yw);
    float total = dot(x_even, float4(1)) + dot(x_odd, float4(1.0));
    sum += scale * (dot(low, x_even) + dot(high, x_odd)) + bias * total;
  }
  sum = simd_sum(sum);
  if (lane == 0) y[row] = static_cast<T>(sum);
}

template [[host_name("sdpa_vector_half_64")]] [[kernel]] decltype(sdpa_vector<half, 64>) sdpa_vector<half, 64>;
template [[host_name("sdpa_vector_float_96")]] [[kernel]] decltype(sdpa_vector<float, 96>) sdpa_vector<float, 96>;
typedef decltype(qmv4<half, 32>) qmv_t;
template [[host_name("qmv4_half_32")]] kernel qmv_t qmv4<half, 32>;
