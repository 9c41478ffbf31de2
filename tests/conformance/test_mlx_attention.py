"""MLX's attention kernels: for few queries (in one pass and in two), and the tiled one for many."""

import struct
from dataclasses import dataclass

import torch

from . import mlx

VECTOR = ("sdpa_vector.h",)
STEEL = ("steel/attn/kernels/steel_attention.h",)


@dataclass(frozen=True)
class Case:
    head_dim: int
    q_len: int
    k_len: int
    heads: tuple[int, int] = (2, 2)  # of queries, and of keys and values
    batch: int = 1
    v_dim: int = 0  # where it differs from head_dim
    mask: str = ""  # "causal", "bool", "float"
    sinks: bool = False
    blocks: int = 0  # of the two-pass kernel

    def __str__(self) -> str:
        parts = [f"d{self.head_dim}"] + [f"v{self.v_dim}"] * bool(self.v_dim)
        parts += [f"q{self.q_len}", f"k{self.k_len}", f"h{self.heads[0]}-{self.heads[1]}", f"b{self.batch}"]
        parts += [self.mask] * bool(self.mask) + ["sinks"] * self.sinks
        return "-".join(parts + [f"blocks{self.blocks}"] * bool(self.blocks))


class Inputs:
    def __init__(self, case: Case, dtype: torch.dtype):
        b, (h, h_kv), d, v_dim = case.batch, case.heads, case.head_dim, case.v_dim or case.head_dim
        self.case, self.dtype, self.scale = case, dtype, d**-0.5
        self.q = mlx.values(b, h, case.q_len, d, dtype=dtype)
        self.k = mlx.values(b, h_kv, case.k_len, d, dtype=dtype)
        self.v = mlx.values(b, h_kv, case.k_len, v_dim, dtype=dtype)
        self.mask = None
        if case.mask == "bool":
            self.mask = torch.rand(b, h, case.q_len, case.k_len) < 0.7
            self.mask[..., 0] = True  # MLX leaves open what a fully masked row gives
        elif case.mask == "float":
            self.mask = mlx.values(b, h, case.q_len, case.k_len, dtype=dtype)
        self.sinks = mlx.values(h, dtype=dtype) if case.sinks else None

    def scores(self) -> torch.Tensor:
        """Masked, in float64."""
        repeats = self.case.heads[0] // self.case.heads[1]
        scores = self.scale * (self.q.double() @ self.k.double().repeat_interleave(repeats, 1).mT)
        if self.case.mask == "causal":
            open_ = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(self.case.k_len - self.case.q_len)
            return scores.masked_fill(~open_, -torch.inf)
        if self.case.mask == "bool":
            return scores.masked_fill(~self.mask, -torch.inf)
        return scores if self.mask is None else scores + self.mask.double()

    def check(self, out: torch.Tensor, inner: float = 0) -> None:
        scores = self.scores()
        if self.sinks is not None:  # a key of its own for each head, without a value
            sinks = self.sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
            probabilities = torch.cat((sinks, scores), -1).softmax(-1)[..., 1:]
        else:
            probabilities = scores.softmax(-1)
        v = self.v.double().repeat_interleave(self.case.heads[0] // self.case.heads[1], 1)
        # A score's error becomes a relative error of its probability. Queries are scaled before they are multiplied.
        magnitude = 1 + scores.abs().nan_to_num(posinf=0).amax(-1, keepdim=True)
        mlx.check(out, probabilities @ v, magnitude * (probabilities @ v.abs()), inner)

    def check_mlx(self) -> None:
        """MLX on the CPU is composed of operators: scaled queries, scores and probabilities are rounded each."""
        import mlx.core as mx

        mask = {"causal": "causal", "": None}.get(self.case.mask, self.mask)
        theirs = mx.fast.scaled_dot_product_attention(
            *map(mlx.to_mlx, (self.q, self.k, self.v)),
            scale=self.scale,
            mask=mlx.to_mlx(mask) if torch.is_tensor(mask) else mask,
            sinks=None if self.sinks is None else mlx.to_mlx(self.sinks),
        )
        self.check(mlx.from_mlx(theirs), inner=8)

    def vector_constants(self) -> dict[int, bool]:
        mask = self.case.mask
        return {
            20: mask in ("bool", "float"),
            21: False,
            22: mask == "causal",
            23: mask == "bool",
            24: mask == "float",
            25: self.case.sinks,
        }

    def mask_arguments(self) -> list:
        """Both masks and their strides along keys, queries and heads, of which a kernel has those it asks for."""
        if self.mask is None:
            return [None] * 5
        masks = [self.mask, None] if self.case.mask == "bool" else [None, self.mask]
        return [*masks, *map(mlx.np.int32, (1, self.case.k_len, self.case.q_len * self.case.k_len))]


def _strides(x: torch.Tensor) -> list:
    return list(map(mlx.np.uint64, x.stride()[1:3]))


def one_pass(inputs: Inputs) -> torch.Tensor:
    case, (h, h_kv) = inputs.case, inputs.case.heads
    kernel = mlx.kernel(
        VECTOR,
        "sdpa_vector",
        *(inputs.dtype, case.head_dim, inputs.v.shape[-1]),
        constants=inputs.vector_constants() | {26: mlx.np.int32(0)},
    )
    out = mlx.unwritten(case.batch, h, case.q_len, inputs.v.shape[-1], dtype=inputs.dtype)
    mlx.launch(
        kernel,
        *(inputs.q, inputs.k, inputs.v, out, mlx.np.int32(h // h_kv), mlx.np.int32(case.k_len)),
        *(*_strides(inputs.k), *_strides(inputs.v), mlx.np.float32(inputs.scale)),
        *(*inputs.mask_arguments(), inputs.sinks, mlx.np.int32(h)),
        threadgroups=(case.batch * h, case.q_len),
        threads_per_threadgroup=(1024,),
    )
    return out


def two_passes(inputs: Inputs) -> torch.Tensor:
    case, (h, h_kv), v_dim = inputs.case, inputs.case.heads, inputs.v.shape[-1]
    first = mlx.kernel(
        VECTOR,
        "sdpa_vector_2pass_1",
        *(inputs.dtype, case.head_dim, v_dim),
        constants=inputs.vector_constants() | {26: mlx.np.int32(case.blocks)},
    )
    partials = mlx.unwritten(case.batch, h, case.q_len, case.blocks, v_dim, dtype=inputs.dtype)
    sums, maxs = (mlx.unwritten(case.batch, h, case.q_len, case.blocks, dtype=mlx.F32) for _ in range(2))
    mlx.launch(
        first,
        *(inputs.q, inputs.k, inputs.v, partials, sums, maxs, None, mlx.np.int32(case.k_len)),
        *(*_strides(inputs.k), *_strides(inputs.v), mlx.np.float32(inputs.scale)),
        *(*inputs.mask_arguments(), inputs.sinks),
        threadgroups=(h_kv, case.batch, case.blocks),
        threads_per_threadgroup=(32, h // h_kv, case.q_len),
    )
    second = mlx.kernel(VECTOR, "sdpa_vector_2pass_2", inputs.dtype, v_dim)
    out = mlx.unwritten(case.batch, h, case.q_len, v_dim, dtype=inputs.dtype)
    mlx.launch(
        second,
        *(partials, sums, maxs, out, mlx.np.int32(case.blocks)),
        threadgroups=(case.batch * h, case.q_len),
        threads_per_threadgroup=(1024,),
    )
    return out


ONE_PASS = [
    Case(64, 1, 1),
    Case(64, 1, 33, batch=2),
    Case(64, 5, 40, mask="causal"),
    Case(64, 2, 40, mask="bool"),
    Case(64, 2, 40, mask="float"),
    Case(64, 1, 70, heads=(4, 2), sinks=True),
    Case(96, 1, 31),
    Case(128, 3, 100, heads=(4, 1), mask="causal", batch=2),
    Case(256, 1, 65),
    Case(192, 1, 50, v_dim=128),
]


@mlx.cases(ONE_PASS, [Case(128, 2, 100, heads=(4, 2), batch=2)])
def test_sdpa_vector(case, dtype, mode):
    inputs = Inputs(case, dtype)
    inputs.check(one_pass(inputs))
    inputs.check_mlx()


TWO_PASSES = [
    Case(64, 1, 200, blocks=32),
    Case(64, 2, 500, heads=(4, 2), batch=2, mask="causal", blocks=64),
    Case(64, 1, 300, mask="bool", blocks=32),
    Case(64, 3, 300, mask="float", blocks=32),
    Case(96, 1, 257, heads=(4, 4), sinks=True, blocks=32),
    Case(256, 1, 129, heads=(2, 1), blocks=32),
]


@mlx.cases(TWO_PASSES, [Case(128, 1, 1000, heads=(8, 2), batch=2, blocks=32)])
def test_sdpa_vector_2pass(case, dtype, mode):
    inputs = Inputs(case, dtype)
    inputs.check(two_passes(inputs), inner=1)  # each block's output is rounded before the blocks are added


def steel(inputs: Inputs, tile: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the logarithms of the rows' sums of exponentials."""
    case, (h, h_kv), (bq, bk, wm, wn) = inputs.case, inputs.case.heads, tile
    masked = inputs.mask is not None
    kernel = mlx.kernel(
        STEEL,
        "attention",
        *(inputs.dtype, bq, bk, case.head_dim, case.head_dim, wm, wn),
        *("bool" if case.mask == "bool" else inputs.dtype, "float"),
        constants={
            200: case.q_len % bq == 0,
            201: case.k_len % bk == 0,
            300: masked,
            301: case.mask == "causal",
            302: case.sinks,
            303: True,
        },
    )
    out = mlx.unwritten(case.batch, h, case.q_len, case.head_dim, dtype=inputs.dtype)
    lse = mlx.unwritten(case.batch, h, case.q_len, dtype=mlx.F32)
    params = struct.pack(  # AttnParams
        "=6if7i12q",
        *(case.batch, h, case.head_dim, case.q_len, case.k_len, h // h_kv, inputs.scale),
        *(-(-case.q_len // bq), -(-case.k_len // bk), case.q_len // bq, case.k_len // bk),
        *(case.q_len % bq, case.k_len % bk, case.k_len - case.q_len),
        *(stride for x in (inputs.q, inputs.k, inputs.v, out) for stride in x.stride()[:3]),
    )
    mask_params = struct.pack("=3q", *inputs.mask.stride()[:3]) if masked else None
    packed = (None if p is None else mlx.np.frombuffer(p, mlx.np.uint8) for p in (params, mask_params))
    mlx.launch(
        kernel,
        *(inputs.q, inputs.k, inputs.v, out, *packed, inputs.mask, inputs.sinks, lse),
        threadgroups=(-(-case.q_len // bq), h, case.batch),
        threads_per_threadgroup=(32, wm, wn),
    )
    return out, lse


# BQ, BK, WM, WN by head dimension, as MLX has instances of them.
STEEL_TILES = {64: (32, 32, 4, 1), 80: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (32, 16, 4, 2)}
STEEL_CASES = [
    Case(64, 64, 64),
    Case(64, 40, 72, heads=(4, 2), batch=2, mask="causal"),
    Case(64, 33, 50, mask="bool"),
    Case(64, 32, 50, mask="float"),
    Case(64, 50, 64, sinks=True, mask="causal"),
    Case(80, 35, 37),
    Case(128, 32, 48, mask="causal"),
    Case(128, 17, 100, heads=(4, 1), mask="bool", batch=2),
    Case(256, 40, 40),
]


@mlx.cases(STEEL_CASES, [Case(128, 40, 50, heads=(2, 1))])
def test_steel_attention(case, dtype, mode):
    inputs = Inputs(case, dtype)
    out, lse = steel(inputs, STEEL_TILES[case.head_dim])
    inputs.check(out)
    if not case.sinks:
        exact = inputs.scores().logsumexp(-1)
        mlx.check(lse, exact, 1 + inputs.scores().abs().nan_to_num(posinf=0).amax(-1))
    inputs.check_mlx()
