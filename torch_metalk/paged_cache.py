"""Keys and values of several sequences in pages, to decode them together (Kwon et al., "PagedAttention",
arXiv:2309.06180)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_metalk import ops
from torch_metalk.ops.decode_attention import MOST_QUERIES
from torch_metalk.ops.paged_attention import PAGE_SIZES

#: The name under which transformers knows attention that takes a `PagedStep`: ``config._attn_implementation``.
IMPLEMENTATION = "torch_metalk"


class CacheFull(RuntimeError):
    """There are too few free pages in a `PagedCache`."""


class PagedCache:
    """The cache of a patched model's attention layers, for sequences that come and go and differ in length.

    A sequence takes a page when its last one is full, and gives all back at its end; none is copied or padded::

        cache = PagedCache.for_model(model, pages=64)
        sequence = cache.add()
        ids = prompt[None]
        with torch.no_grad():
            for _ in range(40):
                step = cache.extend([sequence], ids.shape[1])
                out = model(ids, position_ids=step.positions, paged_step=step, use_cache=False)
                ids = out.logits[:, -1:].argmax(-1)
        cache.free(sequence)

    `examples/generate.py` does so for several sequences at once. Nothing is padded, and masks of padding do not count.
    A step is for one forward pass; where that fails, free its sequences. A model that is not patched takes no notice
    of `paged_step`.

    Args:
        layers: number of attention layers.
        pages: number of pages that all sequences share; each holds its tokens of every layer.
        kv_heads, head_dim: of a layer, values being as wide as keys.
        page_size: tokens of a page, 8, 16 or 32.
        dtype, device: of keys and values.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if page_size not in PAGE_SIZES:
            raise ValueError(f"PagedCache: argument 'page_size' is {page_size}; accepted: {PAGE_SIZES}")
        if not dtype.is_floating_point:
            raise TypeError(f"PagedCache: argument 'dtype' is {dtype}; accepted: that of the model's keys and values")
        for name, value in (("layers", layers), ("pages", pages), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"PagedCache: argument '{name}' is {value}; accepted: at least 1")
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.k_pages, self.v_pages = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @classmethod
    def for_model(cls, model: nn.Module, pages: int, page_size: int = 16) -> PagedCache:
        """A cache as `model` needs it: its layers and heads, in its dtype and on its device.

        Raises:
            ValueError: the model's attention is not patched. It would take no notice of a cache that it does not know.
        """
        config = model.config
        if config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"PagedCache.for_model: the model's attention is {config._attn_implementation!r}; "
                "accepted: that of a model after torch_metalk.patch"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            pages,
            config.num_key_value_heads,
            head_dim,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def add(self) -> int:
        """A new sequence without tokens; returns its number."""
        sequence = self._next
        self._next += 1
        self._tables[sequence], self._lengths[sequence] = [], 0
        return sequence

    def free(self, sequence: int) -> None:
        """The sequence ends, its pages are free."""
        self._check([sequence], "free")
        self._free += reversed(self._tables.pop(sequence))
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        """Tokens that the sequence has."""
        self._check([sequence], "length")
        return self._lengths[sequence]

    def extend(self, sequences: Sequence[int], tokens: int) -> PagedStep:
        """Make room for so many new tokens in each of these sequences.

        Returns:
            What the model needs, as its argument `paged_step`, in the forward pass that gets these tokens: a batch
            in the order of `sequences`.

        Raises:
            ValueError: a sequence twice or unknown; more than 8 tokens at once where a sequence has some already.
            CacheFull: there are too few free pages. Nothing has changed then.
        """
        self._check(sequences, "extend")
        before = [self._lengths[s] for s in sequences]
        if tokens < 1 or (tokens > MOST_QUERIES and any(before)):
            raise ValueError(
                f"PagedCache.extend: {tokens} tokens for sequences of {before}; accepted: at least 1, and at most "
                f"{MOST_QUERIES} where a sequence has tokens already"
            )
        wanted = [
            -(-(n + tokens) // self.page_size) - len(self._tables[s]) for s, n in zip(sequences, before, strict=True)
        ]
        if sum(wanted) > len(self._free):
            raise CacheFull(
                f"PagedCache.extend: {sum(wanted)} pages are needed and {len(self._free)} are free; "
                "make the cache larger, or end a sequence with free"
            )
        for sequence, more in zip(sequences, wanted, strict=True):
            self._tables[sequence] += [self._free.pop() for _ in range(more)]
            self._lengths[sequence] += tokens
        tables = [self._tables[s] for s in sequences]
        positions = [range(n, n + tokens) for n in before]
        slots = [
            t[p // self.page_size] * self.page_size + p % self.page_size
            for t, ps in zip(tables, positions, strict=True)
            for p in ps
        ]
        widest = max(map(len, tables), default=0)

        def on_device(numbers: list, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(numbers, dtype=dtype).to(self.k_pages.device)

        return PagedStep(
            cache=self,
            positions=on_device([list(ps) for ps in positions], torch.int64),
            slots=on_device(slots),
            tables=on_device([t + [-1] * (widest - len(t)) for t in tables]),
            lengths=on_device([n + tokens for n in before]),
            first=not any(before),
            sequences={s: n + tokens for s, n in zip(sequences, before, strict=True)},
        )

    def holds(self, lengths: dict[int, int]) -> bool:
        """Whether all of these sequences are there, and so long."""
        return all(self._lengths.get(sequence) == length for sequence, length in lengths.items())

    def _check(self, sequences: Sequence[int], method: str) -> None:
        if any(s not in self._lengths for s in sequences) or len(set(sequences)) != len(sequences):
            raise ValueError(
                f"PagedCache.{method}: sequences {list(sequences)}; accepted: {list(self._lengths)}, each once"
            )


@dataclass(frozen=True)
class PagedStep:
    """New tokens of some sequences: where they go, and what they attend to.

    Attributes:
        positions: ``[B, tokens]``, in their sequences.
        slots: ``[B * tokens]``, of the cache.
        tables: ``[B, pages of the longest sequence]``.
        lengths: ``[B]``, with the new tokens.
        first: the sequences had no tokens before.
        sequences: their lengths with the new tokens, by their numbers.
    """

    cache: PagedCache
    positions: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    first: bool
    sequences: dict[int, int]

    def check(self, batch: int, tokens: int, positions: Tensor | None) -> None:
        """Raises unless this many tokens of so many sequences, at these positions, are those that the step is for."""
        if not self.cache.holds(self.sequences):
            raise ValueError(
                f"paged_step: sequences of lengths {self.sequences} were freed or went on since; a step is for one pass"
            )
        if (batch, tokens) != self.positions.shape:
            raise ValueError(
                f"paged_step: tokens of shape {(batch, tokens)}; accepted: {tuple(self.positions.shape)}, as extended"
            )
        # Another tensor is compared, which waits for the device.
        if positions is not self.positions and (positions is None or not torch.equal(positions, self.positions)):
            raise ValueError("paged_step: the model's position_ids are others; accepted: position_ids=step.positions")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """Store the new keys and values of a layer, ``[B, Hkv, tokens, D]``, and attend to all of their sequences.

        Prompts attend to themselves as they come; later tokens attend to the pages. `options` are those that
        `ops.attention` and `ops.paged_attention` share.

        Returns:
            ``[B, H, tokens, D]``, laid out in memory as ``[B, tokens, H, D]``.
        """
        k_pages, v_pages = self.cache.k_pages[layer], self.cache.v_pages[layer]
        ops.paged_cache_write(*(t.transpose(1, 2).flatten(0, 1) for t in (k, v)), k_pages, v_pages, self.slots)
        if self.first:
            return ops.attention(q, k, v, is_causal=True, **options)
        return ops.paged_attention(q, k_pages, v_pages, self.tables, self.lengths, **options)
