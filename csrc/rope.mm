#include "rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"
#include "geometry.h"
#include "layout.h"

namespace torch_metalk {
namespace {

// Which dimensions of a tensor of rank 2 to 4 are batch, head and position; -1 where there is none.
std::array<int64_t, 3> roles(int64_t rank, int64_t position) {
  switch (rank) {
    case 2:
      return {-1, -1, position};
    case 3:
      // Dimension 0 is the batch unless it counts positions; what is left then are heads.
      return position == 0 ? std::array<int64_t, 3>{-1, 1, 0} : std::array<int64_t, 3>{0, -1, 1};
    default:
      return {position == 0 ? 1 : 0, position == 2 ? 1 : 2, position};
  }
}

bool neighbours(const at::Tensor& t) { return t.size(-1) == 1 || t.stride(-1) == 1; }

bool multiple_of_4(std::initializer_list<uint64_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](uint64_t n) { return n % 4 == 0; });
}

}  // namespace

Heads Heads::of(const at::Tensor& x, int64_t seq_dim) {
  int64_t position = seq_dim < 0 ? seq_dim + x.dim() : seq_dim;
  Heads heads;
  heads.result = at::empty_like(x);
  heads.x = neighbours(x) ? x : x.contiguous();
  // Where the last dimension is not the fastest in x, it is not in the result either.
  heads.y = neighbours(heads.result) ? heads.result : empty_contiguous(x);
  if (x.dim() > 4) {
    // All between batch and position are heads.
    heads.x = heads.x.movedim(position, -2).flatten(1, -3);
    heads.y = empty_contiguous(heads.x);
    position = 2;
  }
  const auto dims = roles(heads.x.dim(), position);
  const auto stride = [](const at::Tensor& t, int64_t dim) {
    return dim < 0 ? 0 : static_cast<uint64_t>(t.stride(dim));
  };
  const at::Tensor &from = heads.x, &to = heads.y;
  heads.place = {stride(from, dims[0]), stride(from, dims[1]), stride(from, dims[2]),
                 stride(to, dims[0]),   stride(to, dims[1]),   stride(to, dims[2])};
  for (size_t i = 0; i < dims.size(); ++i) {
    heads.sizes[i] = dims[i] < 0 ? 1 : from.size(dims[i]);
  }
  heads.sizes[3] = from.size(-1);
  return heads;
}

at::Tensor Heads::finish(int64_t seq_dim) const {
  if (!y.is_same(result)) {
    const at::Tensor target = y.sizes() == result.sizes() ? result : result.movedim(seq_dim, -2);
    target.copy_(y.view(target.sizes()));
  }
  return result;
}

bool Heads::aligned() const {
  return multiple_of_4({place.x_batch, place.x_head, place.x_position, place.y_batch, place.y_head, place.y_position,
                        static_cast<uint64_t>(x.storage_offset()), static_cast<uint64_t>(y.storage_offset())});
}

RopeParams rope_params(const Heads& first, const Heads* second, int64_t width, bool inverse) {
  RopeParams params{};
  params.tensors[0] = first.place;
  params.heads[0] = static_cast<uint32_t>(first.sizes[1]);
  if (second) {
    params.tensors[1] = second->place;
    params.heads[1] = static_cast<uint32_t>(second->sizes[1]);
  }
  params.positions = static_cast<uint32_t>(first.sizes[2]);
  params.pairs = static_cast<uint32_t>(width / 2);
  params.untouched = static_cast<uint32_t>(first.sizes[3] - width);
  params.sign = inverse ? -1 : 1;
  return params;
}

void set_rope_geometry(Launch& launch, const RopeParams& params, int64_t batch) {
  constexpr uint64_t heads_per_thread = 4;  // as in shaders/rope.h
  const uint64_t vectors = (params.pairs + 3) / 4 + (params.untouched + 3) / 4;
  const uint64_t chunks = (uint64_t{params.heads[0]} + params.heads[1] + heads_per_thread - 1) / heads_per_thread;
  const uint64_t needed = vectors * chunks * params.positions;
  CHECK_VALUE(needed <= kMaxCount, launch.library, "x", c10::str(needed, " vectors of four in a batch element"),
              "at most 2^31 - 1");
  const ElementwiseGeometry geometry = elementwise_geometry(static_cast<int64_t>(needed), max_threads(launch));
  launch.threads = geometry.threads;
  launch.threadgroups = {geometry.groups, static_cast<uint64_t>(batch), 1};
}

namespace {

void check(at::TensorList xs, const at::Tensor& cos, const at::Tensor& sin, int64_t seq_dim) {
  const char* op = "rope";
  CHECK_VALUE(!xs.empty(), op, "xs", "an empty list", "at least one tensor");
  check_tensor(op, "cos", cos, cos);
  check_tensor(op, "sin", sin, cos);
  check_same_dtype(op, "sin", sin, "cos", cos);
  check_constant(op, "cos", cos);
  check_constant(op, "sin", sin);
  CHECK_VALUE(cos.dim() == 2 || cos.dim() == 3, op, "cos", shape_of(cos), "rank 2 or 3");
  CHECK_VALUE(sin.sizes() == cos.sizes(), op, "sin", shape_of(sin), "the shape of cos, ", tuple(cos.sizes()));
  const int64_t width = cos.size(-1);
  CHECK_VALUE(width % 2 == 0, op, "cos", c10::str("of odd rotary width ", width), "an even last dimension");
  for (const at::Tensor& x : xs) {
    check_tensor(op, "x", x, cos);
    check_same_dtype(op, "other_x", x, "x", xs[0]);
    CHECK_VALUE(x.dim() >= 2 && -x.dim() <= seq_dim && seq_dim < x.dim() - 1 && seq_dim != -1, op, "seq_dim",
                c10::str(seq_dim, " for ", shape_of(x)), "a dimension before the last");
    CHECK_TYPE(cos.scalar_type() == x.scalar_type() || cos.scalar_type() == at::kFloat, op, "cos",
               dtype_of(cos) + " for x of " + dtype_name(x.scalar_type()), "float32 or x's dtype");
    CHECK_VALUE(width <= x.size(-1), op, "cos", c10::str(width, " wide"), "at most the last dimension of x, ",
                x.size(-1));
    CHECK_VALUE(cos.size(-2) == x.size(seq_dim), op, "cos", c10::str("for ", cos.size(-2), " positions"),
                "as many as x has at seq_dim, ", x.size(seq_dim));
    const bool batch_fits =
        cos.dim() == 2 || (seq_dim != 0 && seq_dim != -x.dim() && (cos.size(0) == 1 || cos.size(0) == x.size(0)));
    CHECK_VALUE(batch_fits, op, "cos", shape_of(cos) + " for x of shape " + tuple(x.sizes()),
                "[S, R], or [1 | B, S, R] where dimension 0 of x is the batch");
  }
}

// One dispatch turns `first` and, if there is one of the same batch, `second`.
void rotate(const Heads& first,
            const Heads* second,
            const at::Tensor& cos,
            const at::Tensor& sin,
            bool interleaved,
            bool inverse) {
  const int64_t width = cos.size(-1);
  RopeParams params = rope_params(first, second, width, inverse);
  params.angle_batch = cos.dim() == 3 && cos.size(0) > 1 ? cos.stride(0) : 0;
  params.angle_position = cos.stride(-2);
  const bool aligned =
      first.aligned() && (!second || second->aligned()) && width % 4 == 0 && (interleaved || width % 8 == 0) &&
      multiple_of_4({params.angle_batch, params.angle_position, static_cast<uint64_t>(cos.storage_offset()),
                     static_cast<uint64_t>(sin.storage_offset())});
  Launch launch{"rope",
                std::string("rope_") + metal_type(first.x.scalar_type()) + "_" + metal_type(cos.scalar_type()),
                {aligned, interleaved},
                {},
                0};
  set_rope_geometry(launch, params, first.sizes[0]);
  const at::Tensor none;
  dispatch(launch, {first.x, first.y, second ? second->x : none, second ? second->y : none, cos, sin, params});
}

std::vector<at::Tensor> rope(
    at::TensorList xs, const at::Tensor& cos, const at::Tensor& sin, int64_t seq_dim, bool interleaved, bool inverse) {
  check(xs, cos, sin, seq_dim);
  // Tables of one layout, so that one stride serves both.
  const bool as_they_are = cos.strides() == sin.strides() && (cos.size(-1) <= 1 || cos.stride(-1) == 1);
  const at::Tensor c = as_they_are ? cos : cos.contiguous(), s = as_they_are ? sin : sin.contiguous();
  std::vector<Heads> heads;
  for (const at::Tensor& x : xs) {
    heads.push_back(Heads::of(x, seq_dim));
  }
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < heads.size(); ++i) {
    if (heads[i].x.numel() == 0) {
      continue;
    }
    const bool pair = i + 1 < heads.size() && heads[i + 1].x.numel() != 0 &&
                      heads[i + 1].sizes[0] == heads[i].sizes[0] && heads[i + 1].sizes[3] == heads[i].sizes[3];
    rotate(heads[i], pair ? &heads[i + 1] : nullptr, c, s, interleaved, inverse);
    i += pair;
  }
  for (const Heads& h : heads) {
    results.push_back(h.finish(seq_dim));
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("rope", &rope);
  m.impl("rope_backward", &rope);
}

}  // namespace torch_metalk
