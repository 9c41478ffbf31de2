// What the two forms of rotary position embedding share: where heads lie, and the launch.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "../shaders/params.h"
#include "metal.h"

namespace torch_metalk {

// A tensor of any rank >= 2 as [batch, head, position, component], components being neighbours.
struct Heads {
  at::Tensor x;  // what kernels read: the argument, or a copy of it
  at::Tensor y;  // what they write: `result`, or a tensor to be copied there
  at::Tensor result;
  std::array<int64_t, 4> sizes;
  RopeTensor place;

  static Heads of(const at::Tensor& x, int64_t seq_dim);

  // The result in its order in memory: what was written elsewhere is copied.
  at::Tensor finish(int64_t seq_dim) const;
  bool aligned() const;
};

// Fills in what all rotations pass to their kernels; `second` may be null.
RopeParams rope_params(const Heads& first, const Heads* second, int64_t width, bool inverse);

// Threads for every vector of every position and group of heads.
void set_rope_geometry(Launch& launch, const RopeParams& params, int64_t batch);

}  // namespace torch_metalk
