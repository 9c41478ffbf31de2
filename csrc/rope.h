// What the two forms of rotary position embedding share: where heads lie, and the launch.
#pragma once

#include <ATen/core/Tensor.h>

#include "../shaders/params.h"
#include "metal.h"

namespace torch_metalk {

// A tensor of any rank >= 2 as [batch, head, position, component], components being neighbours.
struct Heads {
  at::Tensor x;  // what kernels read, of rank 4: a view of the argument, or a copy where it cannot be one
  at::Tensor y;  // what they write, a view of `result` where memory allows
  at::Tensor result;

  static Heads of(const at::Tensor& x, int64_t seq_dim);

  // The result in its order in memory: what was written elsewhere is copied.
  at::Tensor finish(int64_t seq_dim) const;
  bool aligned() const;
  RopeTensor place() const;
};

// Fills in what all rotations pass to their kernels; `second` may be null.
RopeParams rope_params(const Heads& first, const Heads* second, int64_t width, bool inverse);

// Threads for every vector of every position and group of heads.
void set_rope_geometry(Launch& launch, const RopeParams& params, int64_t batch);

}  // namespace torch_metalk
