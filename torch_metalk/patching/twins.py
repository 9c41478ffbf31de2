"""float32 twins of half precision tensors, for the CPU's rows of split products."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


def _state(t: Tensor) -> tuple[int, int]:
    """Changes where the values do, but for writes to `t.data`, which nothing counts."""
    return t.data_ptr(), 0 if t.is_inference() else t._version


class WeightTwins:
    """Twins of frozen weights on the CPU, made on first use and made anew when the weight has changed.

    They are kept here and not in the modules, so that no copy, pickle or state dict of a model has them, and a weight
    that several layers share has one.
    """

    def __init__(self):
        self._twins: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, weight: Tensor) -> Tensor | None:
        if weight.dtype is torch.float32:
            return None
        state = _state(weight)
        made_of, twin = self._twins.get(weight, (None, None))
        if made_of != state:
            # To the CPU first: the memory of the GPU's allocator stays as it is.
            twin = weight.detach().cpu().float()
            self._twins[weight] = state, twin
        return twin

    def forget(self, weight: Tensor) -> None:
        self._twins.pop(weight, None)

    def __len__(self) -> int:
        return len(self._twins)


class OutputTwin(threading.local):
    """The twin of the last norm's output, for the layers that are called with this very tensor next."""

    _output: weakref.ref | None = None
    _state: tuple[int, int] | None = None
    _twin: Tensor | None = None

    def put(self, output: Tensor, twin: Tensor) -> None:
        self._output, self._state, self._twin = weakref.ref(output), _state(output), twin

    def of(self, x: Tensor) -> Tensor | None:
        if self._twin is None or self._output() is not x or self._state != _state(x):
            return None
        return self._twin

    def drop(self) -> None:
        self._output = self._state = self._twin = None


weight_twins = WeightTwins()
output_twin = OutputTwin()
