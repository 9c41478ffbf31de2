#include "attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <tuple>

#include "checks.h"
#include "decode_attention.h"
#include "gemm.h"
#include "geometry.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {

AttentionMask attention_mask(const AttentionOptions& options, at::IntArrayRef scores_shape) {
  if (!options.mask) {
    return {};
  }
  const at::Tensor mask = options.mask->expand(scores_shape);
  if (mask.scalar_type() == at::kBool) {
    return {mask, std::nullopt};
  }
  // Before broadcasting: a copy holds each number once.
  return {std::nullopt, options.mask->to(at::kFloat).expand(scores_shape)};
}

AttentionScoring attention_scoring(const AttentionOptions& options, const AttentionMask& mask) {
  // Wider than any sequence, and no sum of a few of them overflows.
  constexpr int64_t unrestricted = int64_t{1} << 40;
  const double log2e = 1 / std::log(2.0);
  AttentionScoring scoring{};
  const int64_t window = std::min(options.sliding_window.value_or(unrestricted), unrestricted) - 1;
  scoring.before = window;
  scoring.after = options.is_causal ? 0 : window;
  if (const auto& strided = mask.seen ? mask.seen : mask.bias) {
    scoring.mask = mask.seen ? ATTENTION_MASK_BOOL : ATTENTION_MASK_FLOAT;
    scoring.mask_batch = strided->stride(0);
    scoring.mask_head = strided->stride(1);
    scoring.mask_query = strided->stride(2);
    scoring.mask_key = strided->stride(3);
  }
  const double units = mask.bias ? 1 : log2e;
  scoring.natural = static_cast<float>(1 / units);
  scoring.exponent = static_cast<float>(log2e / units);
  scoring.scale = static_cast<float>(options.softcap ? options.scale / *options.softcap : options.scale * units);
  scoring.softcap = static_cast<float>(options.softcap ? *options.softcap * units : 0);
  scoring.slope = static_cast<float>(options.scale);
  return scoring;
}

void check_scoring(const char* op, const AttentionOptions& options) {
  // Kernels have both in float32, and in other units.
  constexpr double smallest = 1e-30, largest = 1e30;
  CHECK_VALUE(std::abs(options.scale) <= largest, op, "scale", options.scale, "a finite number, at most 1e+30");
  CHECK_VALUE(!options.sliding_window || *options.sliding_window >= 1, op, "sliding_window", *options.sliding_window,
              "None or at least 1");
  CHECK_VALUE(!options.softcap || (*options.softcap >= smallest && *options.softcap <= largest), op, "softcap",
              *options.softcap, "None or a positive number, 1e-30 to 1e+30");
}

void check_attention(
    const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options) {
  check_tensor(op, "q", q, q);
  check_tensor(op, "k", k, q);
  check_tensor(op, "v", v, q);
  check_same_dtype(op, "k", k, "q", q);
  check_same_dtype(op, "v", v, "q", q);
  CHECK_VALUE(q.dim() == 4, op, "q", shape_of(q), "[B, H, Q, D]");
  CHECK_VALUE(k.dim() == 4 && k.size(0) == q.size(0) && k.size(3) == q.size(3), op, "k", shape_of(k), "[", q.size(0),
              ", Hkv, K, ", q.size(3), "], from q");
  CHECK_VALUE(v.dim() == 4 && v.sizes().slice(0, 3) == k.sizes().slice(0, 3), op, "v", shape_of(v), "[", k.size(0),
              ", ", k.size(1), ", ", k.size(2), ", Dv], from k");
  CHECK_VALUE(q.size(1) == 0 || (k.size(1) != 0 && q.size(1) % k.size(1) == 0), op, "k",
              c10::str("of ", k.size(1), " heads"), "a number that divides the ", q.size(1), " heads of q");
  for (int64_t size : {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), v.size(3)}) {
    CHECK_VALUE(size <= kMaxCount, op, "q", shape_of(q), "at most 2^31 - 1 of each dimension of q, k and v");
  }
  if (const auto& mask = options.mask) {
    check_device(op, "mask", *mask, q);
    CHECK_TYPE(mask->scalar_type() == at::kBool || at::isFloatingType(mask->scalar_type()), op, "mask", dtype_of(*mask),
               "bool, or a floating dtype to be added");
    const int64_t full[4] = {q.size(0), q.size(1), q.size(2), k.size(2)};
    bool fits = mask->dim() == 2 || mask->dim() == 4;
    for (int64_t d = 1; fits && d <= mask->dim(); ++d) {
      fits = mask->size(-d) == 1 || mask->size(-d) == full[4 - d];
    }
    CHECK_VALUE(fits, op, "mask", shape_of(*mask), "[Q, K], [B, 1, Q, K] or [B, H, Q, K] for ", tuple(full),
                ", or 1 for a size");
    check_constant(op, "mask", *mask);
  }
  check_scoring(op, options);
}

at::Tensor dense_rows(const at::Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); }

AttentionTensor strides_of(const at::Tensor& t) {
  return {static_cast<uint64_t>(t.stride(0)), static_cast<uint64_t>(t.stride(1)), static_cast<uint64_t>(t.stride(2))};
}

bool is_aligned(const at::Tensor& t) {
  for (int64_t dim = 0; dim < t.dim() - 1; ++dim) {
    if (t.stride(dim) % 4 != 0 && t.size(dim) > 1) {
      return false;
    }
  }
  return t.storage_offset() % 4 == 0;
}

namespace {

// Gradients are laid out in memory as the tensor they belong to, as far as that has no gaps. Where kernels cannot write
// them so, they are copied to where they belong.
at::Tensor writable(const at::Tensor& gradient) {
  return dense_rows(gradient).is_same(gradient) ? gradient : empty_contiguous(gradient);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One call of attention: tensors as the kernels read them, and what they are told of them.
struct Call {
  at::Tensor q, k, v;
  AttentionMask mask;
  AttentionParams params{};

  Call(const at::Tensor& q_, const at::Tensor& k_, const at::Tensor& v_, const AttentionOptions& options)
      : q(dense_rows(q_)),
        k(dense_rows(k_)),
        v(dense_rows(v_)),
        mask(attention_mask(options, {q.size(0), q.size(1), q.size(2), k.size(2)})) {
    params.q = strides_of(q);
    params.k = strides_of(k);
    params.v = strides_of(v);
    params.scoring = attention_scoring(options, mask);
    params.shift = options.lower_right ? k.size(2) - q.size(2) : 0;
    params.heads = static_cast<uint32_t>(q.size(1));
    params.group = static_cast<uint32_t>(q.size(1) / k.size(1));
    params.queries = static_cast<uint32_t>(q.size(2));
    params.keys = static_cast<uint32_t>(k.size(2));
    params.head_dim = static_cast<uint32_t>(q.size(3));
    params.value_dim = static_cast<uint32_t>(v.size(3));
  }

  int64_t batch() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t queries() const { return q.size(2); }
  int64_t keys() const { return k.size(2); }
  int64_t kv_heads() const { return k.size(1); }
  std::string type() const { return metal_type(q.scalar_type()); }

  int64_t tile_dim() const { return tiled_head_dim(q.size(3), v.size(3)); }
  // float16 is staged as it is, all others as float32.
  uint32_t row_bytes() const { return static_cast<uint32_t>(tile_dim() * (q.scalar_type() == at::kHalf ? 2 : 4)); }

  // Encodes a tiled kernel, which holds `held` of `rows` rows in a threadgroup, in as many dispatches as its products
  // of `depth` numbers in all take.
  void encode_tiled(const std::string& stem,
                    bool aligned,
                    uint32_t held,
                    int64_t rows,
                    int64_t passing,
                    int64_t heads_,
                    double depth,
                    bool after_previous,
                    const std::function<void(const Launch&, const AttentionParams&)>& dispatch_part) {
    const int64_t blocks = ceil_div(rows, held);
    AttentionParams part_params = params;
    part_params.blocks = static_cast<uint32_t>(blocks);
    Launch launch{"attention", stem + "_" + type() + "_" + std::to_string(tile_dim()), {aligned}, {0, 0, 0}, 4 * held};
    launch.after_previous = after_previous;
    const auto parts =
        cut_grid({static_cast<uint64_t>(blocks), static_cast<uint64_t>(heads_), static_cast<uint64_t>(batch())},
                 2.0 * held * passing * depth);
    for (const GridPart& part : parts) {
      for (int i = 0; i < 3; ++i) {
        part_params.first[i] = static_cast<uint32_t>(part.first[i]);
        launch.threadgroups[i] = part.count[i];
      }
      dispatch_part(launch, part_params);
    }
  }
};

AttentionWay choose(const char* op, const Call& call, c10::string_view algorithm, bool decode_serves) {
  const bool with_backward = algorithm == "auto_with_backward";
  if (algorithm == "auto" || with_backward) {
    decode_serves = decode_serves && !with_backward;
    return choose_attention(call.queries(), call.keys(), call.row_bytes(), decode_serves);
  }
  if (algorithm == "materialised") {
    return AttentionWay::kMaterialised;
  }
  CHECK_VALUE(algorithm == "tiled", op, "algorithm", c10::str("'", algorithm, "'"), "'auto', 'tiled', 'materialised'");
  CHECK_VALUE(call.tile_dim(), op, "algorithm", "'tiled'",
              "'auto' or 'materialised' for heads of more than 256 numbers");
  return AttentionWay::kTiled;
}

void encode_tiled_forward(Call& call, const at::Tensor& o, const at::Tensor& lse) {
  const uint32_t bytes = call.row_bytes(), held = attention_rows(bytes);
  const bool aligned = is_aligned(call.q) && is_aligned(call.k) && is_aligned(call.v) && is_aligned(o);
  call.encode_tiled("attention", aligned, held, call.queries(), call.keys(), call.heads(),
                    call.q.size(3) + call.v.size(3), false, [&](const Launch& launch, const AttentionParams& params) {
                      dispatch(launch, {call.q, call.k, call.v, call.mask.seen, call.mask.bias, o, lse, params});
                    });
}

// Whether [Q, K] products of one head start their rows at multiples of four elements.
bool aligned_products(const Call& call) { return call.keys() % 4 == 0; }

// A tensor with 0 for what is not finite where queries may not see everything: in products, a weight of 0 stands for
// what is hidden.
at::Tensor finite(const at::Tensor& t, bool restricts) { return restricts ? at::nan_to_num(t, 0.0, 0.0, 0.0) : t; }

void encode_materialised_forward(Call& call, const at::Tensor& o, const at::Tensor& lse, bool restricts) {
  const at::Tensor values = finite(call.v, restricts);
  std::optional<at::Tensor> spoilt;
  if (restricts) {
    spoilt = at::sum(at::mul(call.v, 0.0), {-1}, /*keepdim=*/false, at::kFloat);
    call.params.spoils = 1;
  }
  const at::Tensor products = at::empty({call.queries(), call.keys()}, lse.options());
  Launch launch{"attention", "", {aligned_products(call)}, {static_cast<uint64_t>(call.queries()), 1, 1}, 0};
  choose_row_kernel(launch, "attention_weights", "", call.keys());
  launch.after_previous = true;
  for (int64_t b = 0; b < call.batch(); ++b) {
    for (int64_t h = 0; h < call.heads(); ++h) {
      const int64_t kv_head = h / call.params.group;
      call.params.first[1] = static_cast<uint32_t>(h);
      call.params.first[2] = static_cast<uint32_t>(b);
      std::optional<at::Tensor> spoilt_keys;
      if (spoilt) {
        spoilt_keys = (*spoilt)[b][kv_head];
      }
      gemm(call.q[b][h], call.k[b][kv_head].mT(), products, {}, b + h > 0);
      dispatch(launch, {products, call.mask.seen, call.mask.bias, spoilt_keys, lse[b][h], call.params});
      gemm(products, values[b][kv_head], o[b][h], {}, true);
    }
  }
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q,
                                             const at::Tensor& k,
                                             const at::Tensor& v,
                                             const std::optional<at::Tensor>& mask,
                                             bool is_causal,
                                             bool lower_right,
                                             double scale,
                                             std::optional<int64_t> sliding_window,
                                             std::optional<double> softcap,
                                             c10::string_view algorithm) {
  const char* op = "attention";
  const AttentionOptions options{mask, is_causal, lower_right, scale, sliding_window, softcap};
  check_attention(op, q, k, v, options);
  at::Tensor o = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  at::Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  if (k.size(2) == 0 || v.size(3) == 0) {
    o.zero_();
    lse.zero_();
    return {o, lse};
  }
  if (lse.numel() == 0) {
    return {o, lse};
  }
  Call call(q, k, v, options);
  call.params.o = strides_of(o);
  switch (choose(op, call, algorithm, decode_serves(q, v))) {
    case AttentionWay::kDecode:
      attend_to_cache(call.q, {call.k, call.v}, options, o, lse);
      break;
    case AttentionWay::kTiled:
      encode_tiled_forward(call, o, lse);
      break;
    case AttentionWay::kMaterialised:
      encode_materialised_forward(call, o, lse, options.restricts());
      break;
  }
  return {o, lse};
}

void encode_tiled_backward(Call& call,
                           const at::Tensor& d_o,
                           const at::Tensor& statistics,
                           const at::Tensor& dq,
                           const at::Tensor& dk,
                           const at::Tensor& dv) {
  const uint32_t bytes = call.row_bytes();
  const double head_dim = call.q.size(3), value_dim = call.v.size(3);
  const bool aligned = is_aligned(call.q) && is_aligned(call.k) && is_aligned(call.v) && is_aligned(d_o);
  call.encode_tiled(
      "attention_dq", aligned && is_aligned(dq), attention_dq_rows(bytes), call.queries(), call.keys(), call.heads(),
      2 * head_dim + value_dim, true, [&](const Launch& launch, const AttentionParams& params) {
        dispatch(launch, {call.q, call.k, call.v, call.mask.seen, call.mask.bias, d_o, statistics, dq, params});
      });
  call.encode_tiled(
      "attention_dkv", aligned && is_aligned(dk) && is_aligned(dv), attention_dkv_rows(bytes), call.keys(),
      call.queries(), call.kv_heads(), call.params.group * 2 * (head_dim + value_dim), false,
      [&](const Launch& launch, const AttentionParams& params) {
        dispatch(launch, {call.q, call.k, call.v, call.mask.seen, call.mask.bias, d_o, statistics, dk, dv, params});
      });
}

void encode_materialised_backward(Call& call,
                                  const at::Tensor& d_o,
                                  const at::Tensor& statistics,
                                  const at::Tensor& dq,
                                  const at::Tensor& dk,
                                  const at::Tensor& dv,
                                  bool restricts) {
  const at::Tensor queries = finite(call.q, restricts), keys = finite(call.k, restricts),
                   incoming = finite(d_o, restricts);
  const at::Tensor products = at::empty({call.queries(), call.keys()}, statistics.options());
  const at::Tensor d_weights = at::empty_like(products);
  // The heads of a group add up in float32.
  const bool shared = call.params.group > 1;
  const auto sums = [&](const at::Tensor& t) {
    return shared ? at::empty({t.size(0), t.size(1), t.size(2), t.size(3)}, statistics.options()) : t;
  };
  const at::Tensor dk_sums = sums(dk), dv_sums = sums(dv);
  Launch launch{"attention", "attention_gradients", {aligned_products(call)}, {0, 0, 0}, 0};
  const auto geometry = elementwise_geometry(ceil_div(call.keys(), 4), max_threads(launch));
  launch.threads = geometry.threads;
  launch.threadgroups = {geometry.groups, static_cast<uint64_t>(call.queries()), 1};
  launch.after_previous = true;
  for (int64_t b = 0; b < call.batch(); ++b) {
    for (int64_t h = 0; h < call.heads(); ++h) {
      const int64_t kv_head = h / call.params.group;
      const auto added = [&](const at::Tensor& sum) {
        return h % call.params.group ? GemmEpilogue{1, sum} : GemmEpilogue{};
      };
      call.params.first[1] = static_cast<uint32_t>(h);
      call.params.first[2] = static_cast<uint32_t>(b);
      gemm(call.q[b][h], call.k[b][kv_head].mT(), products, {}, true);
      gemm(d_o[b][h], call.v[b][kv_head].mT(), d_weights, {}, true);
      dispatch(launch, {products, d_weights, call.mask.seen, call.mask.bias, statistics[b][h], call.params});
      const at::Tensor dk_head = dk_sums[b][kv_head], dv_head = dv_sums[b][kv_head];
      gemm(products.mT(), incoming[b][h], dv_head, added(dv_head), true);
      gemm(d_weights, keys[b][kv_head], dq[b][h], {}, true);
      gemm(d_weights.mT(), queries[b][h], dk_head, added(dk_head), true);
    }
  }
  if (shared) {
    dk.copy_(dk_sums);
    dv.copy_(dv_sums);
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& d_o,
                                                                  const at::Tensor& q,
                                                                  const at::Tensor& k,
                                                                  const at::Tensor& v,
                                                                  const at::Tensor& o,
                                                                  const at::Tensor& lse,
                                                                  const std::optional<at::Tensor>& mask,
                                                                  bool is_causal,
                                                                  bool lower_right,
                                                                  double scale,
                                                                  std::optional<int64_t> sliding_window,
                                                                  std::optional<double> softcap,
                                                                  c10::string_view algorithm) {
  const char* op = "attention_backward";
  const AttentionOptions options{mask, is_causal, lower_right, scale, sliding_window, softcap};
  check_attention(op, q, k, v, options);
  check_tensor(op, "do", d_o, q);
  check_tensor(op, "o", o, q);
  check_tensor(op, "lse", lse, q);
  const std::vector<int64_t> shape{q.size(0), q.size(1), q.size(2), v.size(3)};
  CHECK_VALUE(o.sizes() == at::IntArrayRef(shape), op, "o", shape_of(o), tuple(shape), ", from q and v");
  CHECK_VALUE(d_o.sizes() == o.sizes(), op, "do", shape_of(d_o), "the shape of the output, ", tuple(o.sizes()));
  CHECK_VALUE(lse.sizes() == q.sizes().slice(0, 3), op, "lse", shape_of(lse), "one per query row, ",
              tuple(q.sizes().slice(0, 3)));
  at::Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  if (o.numel() == 0 || k.size(2) == 0) {
    dq.zero_();
    dk.zero_();
    dv.zero_();
    return {dq, dk, dv};
  }
  Call call(q, k, v, options);
  const at::Tensor incoming = dense_rows(d_o.to(q.scalar_type())), output = dense_rows(o.to(q.scalar_type()));
  const at::Tensor row_lse = lse.to(at::kFloat).contiguous();
  call.params.o = strides_of(output);
  call.params.d_o = strides_of(incoming);
  const at::Tensor dq_rows = writable(dq), dk_rows = writable(dk), dv_rows = writable(dv);
  call.params.dq = strides_of(dq_rows);
  call.params.dk = strides_of(dk_rows);
  call.params.dv = strides_of(dv_rows);
  const bool tiled = choose(op, call, algorithm, false) == AttentionWay::kTiled;

  const at::Tensor statistics =
      at::empty({q.size(0), q.size(1), q.size(2), 4}, q.options().dtype(at::kFloat).memory_format(std::nullopt));
  constexpr uint32_t simdgroups = 8;
  const bool aligned = is_aligned(call.q) && is_aligned(call.k) && is_aligned(output) && is_aligned(incoming);
  const Launch launch{"attention",
                      "attention_statistics_" + call.type(),
                      {aligned},
                      {static_cast<uint64_t>(ceil_div(call.queries(), simdgroups)), static_cast<uint64_t>(call.heads()),
                       static_cast<uint64_t>(call.batch())},
                      kSimdWidth * simdgroups};
  dispatch(launch,
           {call.q, call.k, call.mask.seen, call.mask.bias, output, incoming, row_lse, statistics, call.params});
  if (tiled) {
    encode_tiled_backward(call, incoming, statistics, dq_rows, dk_rows, dv_rows);
  } else {
    encode_materialised_backward(call, incoming, statistics, dq_rows, dk_rows, dv_rows, options.restricts());
  }
  const std::pair<at::Tensor, at::Tensor> results[] = {{dq, dq_rows}, {dk, dk_rows}, {dv, dv_rows}};
  for (const auto& [gradient, rows] : results) {
    if (!rows.is_same(gradient)) {
      gradient.copy_(rows);
    }
  }
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("attention", &attention);
  m.impl("attention_backward", &attention_backward);
}

}  // namespace torch_metalk
