#include "rope_positions.h"

#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "checks.h"
#include "layout.h"
#include "rope.h"

namespace torch_metalk {
namespace {

void check(const at::Tensor& x, const at::Tensor& positions, double base, int64_t dims, double scale) {
  const char* op = "rope_positions";
  check_tensor(op, "x", x, x);
  check_device(op, "positions", positions, x);
  CHECK_VALUE(x.dim() >= 2, op, "x", shape_of(x), "rank 2 or more, [B, ..., S, D]");
  CHECK_TYPE(positions.scalar_type() == at::kInt, op, "positions", dtype_of(positions), "int32");
  const int64_t batch = x.dim() > 2 ? x.size(0) : 1;
  const bool fits =
      (positions.dim() == 1 || (positions.dim() == 2 && positions.size(1) == x.size(-2))) && positions.size(0) == batch;
  CHECK_VALUE(fits, op, "positions", shape_of(positions), "one offset per batch row (", batch,
              ",) or one position per row (", batch, ", ", x.size(-2), ")");
  CHECK_VALUE(dims > 0 && dims % 2 == 0 && dims <= x.size(-1), op, "dims", dims,
              "an even number from 2 to the last dimension, ", x.size(-1));
  CHECK_VALUE(std::isfinite(base) && base > 0, op, "base", base, "a finite positive number");
  CHECK_VALUE(std::isfinite(scale), op, "scale", scale, "a finite number");
}

at::Tensor rope_positions(const at::Tensor& x,
                          const at::Tensor& positions,
                          double base,
                          int64_t dims,
                          bool traditional,
                          double scale,
                          bool inverse) {
  check(x, positions, base, dims, scale);
  const Heads heads = Heads::of(x, -2);
  if (x.numel() != 0) {
    const bool offsets = positions.dim() == 1;
    RopeParams params = rope_params(heads, nullptr, dims, inverse);
    params.angle_batch = positions.stride(0);
    params.angle_position = offsets ? 0 : positions.stride(1);
    const bool aligned = heads.aligned() && dims % 4 == 0 && (traditional || dims % 8 == 0);
    Launch launch{"rope_positions",
                  std::string("rope_positions_") + metal_type(x.scalar_type()),
                  {aligned, traditional, offsets},
                  {},
                  0};
    set_rope_geometry(launch, params, heads.sizes[0]);
    const std::vector<uint64_t> turns = turns_per_position(base, dims, scale);
    if (turns.size() * sizeof(uint64_t) <= kMaxBytes) {
      dispatch(launch, {heads.x, heads.y, positions, turns, params});
    } else {
      const at::Tensor on_cpu = at::from_blob(const_cast<uint64_t*>(turns.data()), {dims / 2}, at::kLong);
      dispatch(launch, {heads.x, heads.y, positions, on_cpu.to(x.device()), params});
    }
  }
  return heads.finish(-2);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_metalk, MPS, m) {
  m.impl("rope_positions", &rope_positions);
  m.impl("rope_positions_backward", &rope_positions);
}

}  // namespace torch_metalk
