"""`ops.attention` as an attention implementation of transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torch_metalk import ops
from torch_metalk.paged_cache import IMPLEMENTATION, PagedStep
from torch_metalk.patching import families

#: Arguments that change the meaning of a call and that the operator does not do, and what they are.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "relative_position_bias": "a position bias",
    "head_mask": "a mask of heads",
}


def register() -> None:
    """Make the implementation known to transformers, with the boolean masks that torch's own attention gets."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    # Without an entry here the mask would be None, and padding would be ignored without a word.
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_step: PagedStep | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it.

    Args:
        module: the attention module; its `is_causal` counts where the argument is None.
        query: ``[B, H, Q, D]``; key and value: ``[B, Hkv, K, D]``.
        attention_mask: None, or broadcastable to ``[B, H, Q, K]``, and then it holds causality and windows already.
            Without one, query 0 is at key 0 where there are several, as in torch's attention: what follows the last
            query are empty places of a static cache. A single query sees all keys.
        dropout: attention dropout; above 0 the call goes to the stock implementation. So do calls with attention sinks,
            a position bias, a mask of heads or a mask that requires a gradient, calls that ask an eager model for
            attention weights, and calls from a model that `patch` has not seen.
        paged_step: what the caller of the model passes on where keys and values are in a `PagedCache`. Lengths and
            positions are in it: masks do not count then.

    Returns:
        ``[B, Q, H, D]``, contiguous, and None for the attention weights.

    Raises:
        ValueError, TypeError: as `ops.attention`; a mask that is narrower or wider than the keys among them.
    """
    if paged_step is not None:
        if not getattr(module, "is_causal", True) or dropout > 0 or _wants_more(module, kwargs):
            raise ValueError(
                "paged_step: this attention is not causal, has dropout (call model.eval()), or asks for more than a "
                "PagedCache does"
            )
        paged_step.check(query.shape[0], query.shape[2], kwargs.get("position_ids"))
        output = paged_step.attend(
            module.layer_idx, query, key, value, scale=scaling, sliding_window=sliding_window, softcap=softcap
        )
        return output.transpose(1, 2), None
    causal = query.shape[2] > 1 and attention_mask is None
    causal = causal and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    learned_mask = attention_mask is not None and attention_mask.requires_grad
    if not families.has_own_config(module) or dropout > 0 or learned_mask or _wants_more(module, kwargs):
        return _stock_attention(
            module, query, key, value, attention_mask, dropout, scaling, causal, softcap, sliding_window, kwargs
        )
    output = ops.attention(
        query,
        key,
        value,
        mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        # A mask holds the window. Without one transformers has found the window to be wider than the keys, unless a
        # caller left the mask out on purpose.
        sliding_window=sliding_window if causal else None,
        softcap=softcap,
    )
    return output.transpose(1, 2), None


def why_stock(cls: type[nn.Module]) -> str | None:
    """What attention of this class asks for that the operator does not do, by its forward's code; None for nothing."""
    constants = set(_names(inspect.unwrap(cls.forward).__code__.co_consts))
    asked = [f"{what} ({name})" for name, what in _UNSUPPORTED.items() if name in constants]
    return f"uses {' and '.join(asked)}, which the operator does not do" if asked else None


def _names(constants: tuple) -> Iterator[str]:
    """Strings of a code object: names of keyword arguments stand alone there or in a tuple, by Python's version."""
    for value in constants:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _names(value)


def _was_eager(module: nn.Module) -> bool:
    stock_configs = module.__dict__.get(families.CONFIGS_ATTRIBUTE, {})
    return "config" in stock_configs and stock_configs["config"]._attn_implementation == "eager"


def _wants_more(module: nn.Module, kwargs: dict) -> bool:
    """Whether a call needs what the operator does not do."""
    if kwargs.get("output_attentions") and _was_eager(module):
        return True
    return any(kwargs.get(name) is not None for name in _UNSUPPORTED)


def _stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    kwargs: dict,
) -> tuple[Tensor, Tensor | None]:
    """What transformers would have run: torch's attention, or the eager one by choice or where scores are capped."""
    if softcap is None and not _was_eager(module):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    eager = sys.modules[families.stock_class(module).__module__].eager_attention_forward
    if mask is None and causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(query.dtype).min
        )
    return eager(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=scaling,
        softcap=softcap,
        sliding_window=sliding_window,
        **kwargs,
    )
