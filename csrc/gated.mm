#include "gated.h"

#include <algorithm>

#include "../shaders/params.h"
#include "checks.h"
#include "geometry.h"
#include "layout.h"
#include "metal.h"

namespace torch_metalk {
namespace {

constexpr int64_t kElementsPerThread = 8;  // two vectors of four, as in shaders/gated.h

void check(const char* op, const at::Tensor& gate, const at::Tensor& up) {
  check_tensor(op, "gate", gate, gate);
  check_tensor(op, "up", up, gate);
  check_same_dtype(op, "up", up, "gate", gate);
  CHECK_VALUE(up.sizes() == gate.sizes(), op, "up", shape_of(up), "the shape of gate, ", tuple(gate.sizes()));
}

// Several tensors of one shape as rows; as a single row where all of them are contiguous, if that `may_join` them.
template <size_t N>
std::array<Rows, N> rows_of(const char* op, const std::array<at::Tensor, N>& tensors, bool may_join) {
  bool single = may_join && tensors[0].numel() <= kMaxCount;
  for (const at::Tensor& t : tensors) {
    single = single && t.is_contiguous();
  }
  std::array<Rows, N> rows;
  for (size_t k = 0; k < N; ++k) {
    const at::Tensor& t = tensors[k];
    rows[k] = single ? Rows{t, 1, t.numel(), t.numel()} : as_rows(t);
  }
  CHECK_VALUE(rows[0].columns <= kMaxCount && rows[0].count <= kMaxCount, op, "gate", shape_of(tensors[0]),
              "at most 2^31 - 1 rows and columns");
  return rows;
}

template <size_t N>
bool aligned(const std::array<Rows, N>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const Rows& r) { return r.aligned(); });
}

void launch_rows(Launch& launch, const Rows& rows, std::initializer_list<Argument> arguments) {
  const int64_t threads = (rows.columns + kElementsPerThread - 1) / kElementsPerThread;
  const ElementwiseGeometry geometry = elementwise_geometry(threads, max_threads(launch));
  launch.threadgroups = {geometry.groups, static_cast<uint64_t>(rows.count), 1};
  launch.threads = geometry.threads;
  dispatch(launch, arguments);
}

void check_packed(const char* op, const at::Tensor& gate_up) {
  check_tensor(op, "gate_up", gate_up, gate_up);
  CHECK_VALUE(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0, op, "gate_up", shape_of(gate_up),
              "[..., 2 F], gate and up side by side");
}

at::Tensor half(const at::Tensor& gate_up, int64_t which) {
  const int64_t width = gate_up.size(-1) / 2;
  return gate_up.narrow(-1, which * width, width);
}

// Writes the gradients that are defined: contiguous tensors, or, if `packed`, the halves of one.
void fill_gradients(const char* op,
                    const char* library,
                    const std::string& kernel,
                    const at::Tensor& dy,
                    const at::Tensor& gate,
                    const at::Tensor& up,
                    const at::Tensor& dgate,
                    const at::Tensor& dup,
                    bool packed) {
  check_tensor(op, "dy", dy, gate);
  check_gradient_shape(op, dy, gate);
  if (gate.numel() == 0 || !(dgate.defined() || dup.defined())) {
    return;
  }
  const auto rows = rows_of<3>(op, {dy.to(gate.scalar_type()), gate, up}, !packed);
  const uint32_t columns = static_cast<uint32_t>(rows[1].columns);
  const GatedParams params{static_cast<uint64_t>(rows[1].stride),
                           static_cast<uint64_t>(rows[2].stride),
                           static_cast<uint64_t>(rows[0].stride),
                           uint64_t{columns} * (packed ? 2 : 1),
                           columns,
                           0};
  // The second half of a packed gradient starts behind the first.
  const bool vectorized = aligned(rows) && (!packed || columns % 4 == 0);
  Launch launch{library,
                kernel + "_backward_" + metal_type(gate.scalar_type()),
                {vectorized, dgate.defined(), dup.defined()},
                {},
                0};
  launch_rows(launch, rows[1], {rows[0].tensor, rows[1].tensor, rows[2].tensor, dgate, dup, params});
}

}  // namespace

at::Tensor gated(
    const char* op, const char* library, const std::string& kernel, const at::Tensor& gate, const at::Tensor& up) {
  check(op, gate, up);
  at::Tensor y = empty_contiguous(gate);
  if (y.numel() == 0) {
    return y;
  }
  const auto rows = rows_of<2>(op, {gate, up}, true);
  const GatedParams params{static_cast<uint64_t>(rows[0].stride),
                           static_cast<uint64_t>(rows[1].stride),
                           0,
                           0,
                           static_cast<uint32_t>(rows[0].columns),
                           0};
  Launch launch{library, kernel + "_" + metal_type(gate.scalar_type()), {aligned(rows), false, false}, {}, 0};
  launch_rows(launch, rows[0], {rows[0].tensor, rows[1].tensor, y, params});
  return y;
}

std::tuple<at::Tensor, at::Tensor> gated_backward(const char* op,
                                                  const char* library,
                                                  const std::string& kernel,
                                                  const at::Tensor& dy,
                                                  const at::Tensor& gate,
                                                  const at::Tensor& up,
                                                  std::array<bool, 2> output_mask) {
  check(op, gate, up);
  const at::Tensor dgate = output_mask[0] ? empty_contiguous(gate) : at::Tensor();
  const at::Tensor dup = output_mask[1] ? empty_contiguous(up) : at::Tensor();
  fill_gradients(op, library, kernel, dy, gate, up, dgate, dup, false);
  return {dgate, dup};
}

at::Tensor gated_packed(const char* op, const char* library, const std::string& kernel, const at::Tensor& gate_up) {
  check_packed(op, gate_up);
  return gated(op, library, kernel, half(gate_up, 0), half(gate_up, 1));
}

at::Tensor gated_packed_backward(
    const char* op, const char* library, const std::string& kernel, const at::Tensor& dy, const at::Tensor& gate_up) {
  check_packed(op, gate_up);
  at::Tensor gradient = empty_contiguous(gate_up);
  fill_gradients(op, library, kernel, dy, half(gate_up, 0), half(gate_up, 1), half(gradient, 0), half(gradient, 1),
                 true);
  return gradient;
}

}  // namespace torch_metalk
