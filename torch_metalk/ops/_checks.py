"""Argument checks shared by the eager twins and the shape rules. Each message names op, argument, what came and what
is accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch

FLOATING = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def refuse(op: str, argument: str, got: object, accepted: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"torch_metalk.{op}: argument '{argument}' is {got}; accepted: {accepted}")


def shape_of(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def alike(*tensors: torch.Tensor) -> bool:
    """Whether nothing can be wrong with these tensors' dtypes, layouts and devices. Cheaper than finding what is."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor):
        return False
    dtype, device = first.dtype, first.device
    return dtype in FLOATING and all(
        isinstance(t, torch.Tensor) and t.dtype is dtype and t.layout is torch.strided and t.device == device
        for t in tensors
    )


def number(op: str, name: str, value: object, kinds: tuple[type, ...] = (int, float)) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        refuse(op, name, repr(value), " or ".join(kind.__name__ for kind in kinds), TypeError)


def floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse anything but dense floating point tensors of a supported dtype, all on one device."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            refuse(op, name, f"a {type(tensor).__name__}", "a tensor", TypeError)
        if tensor.dtype not in FLOATING:
            refuse(op, name, f"of dtype {tensor.dtype}", "float32, float16, bfloat16 (float64 on the CPU)", TypeError)
        if tensor.layout is not torch.strided:
            refuse(op, name, f"of layout {tensor.layout}", "strided tensors", TypeError)
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            refuse(op, name, f"on {tensor.device}", f"the device of the other tensors, {device}")


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            refuse(op, name, f"on {tensor.device}", f"the device of the other tensors, {device}")


def same_dtype(op: str, **tensors: torch.Tensor | None) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *others = given
    for name in others:
        if given[name].dtype != given[first].dtype:
            refuse(
                op, name, f"of dtype {given[name].dtype}", f"the dtype of '{first}', {given[first].dtype}", TypeError
            )


def rank(op: str, name: str, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
    if tensor.dim() not in ranks:
        refuse(op, name, shape_of(tensor), "rank " + " or ".join(map(str, ranks)))


def one_of(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        refuse(op, name, repr(value), ", ".join(map(repr, choices)))


def index(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Integers of this shape, on the device of another argument."""
    if tensor.dtype not in (torch.int32, torch.int64):
        refuse(op, name, f"of dtype {tensor.dtype}", "int32, int64", TypeError)
    if tensor.device != like.device:
        refuse(op, name, f"on {tensor.device}", f"the device of the other tensors, {like.device}")
    if tuple(tensor.shape) != tuple(shape):
        refuse(op, name, shape_of(tensor), f"a tensor of shape {tuple(shape)}")


def index_range(op: str, name: str, tensor: torch.Tensor, least: int | None, most: int, what: str) -> None:
    """Waits for the device: all values are from `least` (if any) to `most`, which is called so."""
    if tensor.numel() == 0:
        return
    smallest, largest = (int(value) for value in tensor.aminmax())
    if largest > most:
        refuse(op, name, f"up to {largest}", f"at most {most}, {what}")
    if least is not None and smallest < least:
        refuse(op, name, f"down to {smallest}", f"at least {least}")


def gradient(op: str, dy: torch.Tensor, like: torch.Tensor, name: str = "dy") -> None:
    """The incoming gradient must look like the output it belongs to."""
    if dy.shape != like.shape:
        refuse(op, name, shape_of(dy), f"the shape of the output, {tuple(like.shape)}")
    if not alike(like, dy):
        floating(op, x=like, **{name: dy})


def adapter(
    op: str,
    in_features: int,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scaling: float,
    names: Sequence[str] = ("lora_a", "lora_b", "scaling"),
) -> None:
    """A low-rank adapter of a layer with so many input features."""
    name_a, name_b, name_scaling = names
    if lora_a.dim() != 2 or lora_a.shape[1] != in_features:
        refuse(op, name_a, shape_of(lora_a), f"[R, {in_features}], the features of the layer's input")
    if lora_a.shape[0] == 0:
        refuse(op, name_a, "of rank 0", "a rank of at least 1")
    if lora_b.dim() != 2 or lora_b.shape[1] != lora_a.shape[0]:
        refuse(op, name_b, shape_of(lora_b), f"[N, {lora_a.shape[0]}], the rank of {name_a}")
    if not math.isfinite(scaling):
        refuse(op, name_scaling, scaling, "a finite number")
