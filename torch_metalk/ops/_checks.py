"""Argument checks shared by the eager twins and the shape rules. Each message names op, argument, what came and what
is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def refuse(op: str, argument: str, got: object, accepted: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"torch_metalk.{op}: argument '{argument}' is {got}; accepted: {accepted}")


def shape_of(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse anything but dense floating point tensors of a supported dtype."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATING:
            refuse(op, name, f"of dtype {tensor.dtype}", "float32, float16, bfloat16 (float64 on the CPU)", TypeError)
        if tensor.layout != torch.strided:
            refuse(op, name, f"of layout {tensor.layout}", "strided tensors", TypeError)


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *others = given
    for name in others:
        if given[name].device != given[first].device:
            refuse(op, name, f"on {given[name].device}", f"the device of '{first}', {given[first].device}")


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


def gradient(op: str, dy: torch.Tensor, like: torch.Tensor, name: str = "dy") -> None:
    """The incoming gradient must look like the output it belongs to."""
    if dy.shape != like.shape:
        refuse(op, name, shape_of(dy), f"the shape of the output, {tuple(like.shape)}")
    floating(op, **{name: dy})
    same_device(op, x=like, **{name: dy})
