"""SwiGLU (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_metalk.ops._gated import Activation, define_gated


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, calculated in float32 and rounded once.

    Args:
        gate: any shape and strides, float32, float16 or bfloat16 (float64 on the CPU).
        up: shape, dtype and device of gate. None where gate is a fused projection ``[..., 2 F]`` with gate in the first
            half and up in the second; its gradient is then one tensor too.

    Returns:
        A contiguous tensor of gate's dtype and shape, or of the shape of its first half where up is None. Backward
        keeps gate and up, not the activation.

    Raises:
        ValueError: shapes or devices differ, an odd last dimension where up is None.
        TypeError: dtypes differ, or an integer tensor.
    """
    return _swiglu(gate, up)


_swiglu = define_gated("swiglu", "", Activation(torch.nn.functional.silu, torch.ops.aten.silu_backward.default))
