"""PyTorch's headers for Metal, `c10/metal` in its wheel: each compiled by itself, functions compared with the CPU."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

HEADERS = sorted((Path(torch.__file__).parent / "include/c10/metal").glob("*.h"))


def test_there_are_headers():
    assert len(HEADERS) >= 10


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_each_header_compiles_by_itself(header, mode):
    source = f"#include <c10/metal/{header.name}>\nkernel void one(device int* x) {{ x[0] += 1; }}"
    x = torch.zeros(1, dtype=torch.int32, device="mps")
    torch.mps.compile_shader(source).one(x, threads=1)
    assert x.item() == 1


POINTS = np.concatenate((np.linspace(-30, 30, 401), np.linspace(-2, 2, 101), [1e-6, -1e-6, 1e-3]))


@dataclass(frozen=True)
class Function:
    """A function of c10::metal, as an expression of x (float) or of x and y, and what it is to give.

    reference: of float64 tensors. The error bound is `rtol` relative, and `atol` for what cancels: around zeros of the
    function, near the limits of float32's range.
    """

    name: str
    expression: str
    reference: object
    points: np.ndarray = field(default_factory=lambda: POINTS)
    second: tuple[float, ...] = ()
    rtol: float = 4e-6  # 32 units in the last place of float32
    atol: float = 1e-6

    def __str__(self) -> str:
        return self.name

    def arguments(self) -> list[torch.Tensor]:
        """The points as float32, each with each second argument, if there are any."""
        x = torch.from_numpy(np.float32(self.points))
        if not self.second:
            return [x]
        y = torch.tensor(self.second)
        return [x.repeat(len(y)), y.repeat_interleave(len(x))]


POSITIVE = np.concatenate((np.geomspace(1e-4, 60, 300), np.arange(1.0, 20)))
UNIT = np.concatenate((np.linspace(-0.999, 0.999, 201), [0.0]))
# Away from poles, where the error of the argument's own rounding grows without bound.
BETWEEN_POLES = np.concatenate((POSITIVE, -np.arange(0.0, 20)[:, None].repeat(3, 1).ravel() - [0.25, 0.5, 0.75] * 20))
SHAPES = (0.5, 1.0, 3.0, 30.0)  # of the gamma distribution
ORDERS = tuple(map(float, range(9)))
special = torch.special


def _polynomial(name: str, points: np.ndarray = UNIT) -> Function:
    """Orthogonal polynomials of order y. Recurrences lose a few bits with every step."""
    return Function(name, f"{name}_forward(x, long(y))", getattr(special, name), points, ORDERS, rtol=2e-5, atol=2e-5)


FUNCTIONS = [
    Function("erf", "erf(x)", special.erf),
    Function("erfc", "erfc(x)", special.erfc, np.linspace(-6, 6, 301), rtol=2e-4),
    Function("erfinv", "erfinv(x)", special.erfinv, UNIT, rtol=2e-5),
    Function("erfcx", "erfcx(x)", special.erfcx, np.linspace(-8, 30, 301), rtol=2e-5),
    Function("i0", "i0(x)", special.i0, rtol=2e-5),
    Function("i0e", "i0e(x)", special.i0e),
    Function("i1", "i1(x)", special.i1, rtol=2e-5),
    Function("i1e", "i1e(x)", special.i1e),
    Function("log_gamma", "log_gamma(x)", special.gammaln, BETWEEN_POLES, rtol=2e-5, atol=1e-4),
    Function("digamma", "digamma(x)", special.digamma, BETWEEN_POLES, rtol=2e-5, atol=1e-4),
    Function("trigamma", "trigamma(x)", lambda x: special.polygamma(1, x), POSITIVE, rtol=2e-5),
    Function(
        "polygamma",
        "polygamma(long(y), x)",
        lambda x, y: torch.stack([special.polygamma(int(n), t) for t, n in zip(x, y, strict=True)]),
        POSITIVE[POSITIVE > 0.1],
        (1.0, 2.0, 3.0),
        rtol=5e-5,
    ),
    Function("zeta", "zeta(x, y)", special.zeta, np.linspace(1.1, 12, 101), (0.5, 1.0, 2.5, 10.0), rtol=2e-5),
    Function("sinc", "sinc(x)", torch.sinc, atol=4e-6),
    Function("spherical_bessel_j0", "spherical_bessel_j0(x)", special.spherical_bessel_j0, atol=4e-6),
    Function("logaddexp", "logaddexp(x, y)", torch.logaddexp, second=(-3.0, 0.0, 7.5)),
    Function("logaddexp2", "logaddexp2(x, y)", torch.logaddexp2, second=(-3.0, 0.0, 7.5)),
    Function("xlogy", "xlogy(x, y)", special.xlogy, second=(0.5, 1.0, 3.0)),
    Function("xlog1py", "xlog1py(x, y)", special.xlog1py, second=(-0.5, 0.0, 3.0)),
    Function("entr", "entr(x)", special.entr),
    # The header reduces x by multiples of 0.693145752, which is 1.43e-6 less than ln 2: 43 of them at x = 30.
    Function("expm1f", "expm1f(x)", special.expm1, rtol=7e-5),
    Function("igamma", "igamma(y, x)", lambda x, y: special.gammainc(y, x), POSITIVE, SHAPES, rtol=1e-4),
    Function("igammac", "igammac(y, x)", lambda x, y: special.gammaincc(y, x), POSITIVE, SHAPES, rtol=1e-4),
    *(
        Function(name, f"{name}_forward(x)", getattr(special, name), points, rtol=rtol, atol=4e-6)
        for name, points, rtol in (
            ("bessel_j0", POINTS, 2e-5),
            ("bessel_j1", POINTS, 2e-5),
            ("bessel_y0", POSITIVE, 2e-5),
            ("bessel_y1", POSITIVE, 2e-5),
            ("modified_bessel_i0", POINTS, 2e-5),
            ("modified_bessel_i1", POINTS, 2e-5),
            ("modified_bessel_k0", POSITIVE, 2e-5),
            ("modified_bessel_k1", POSITIVE, 2e-5),
            ("scaled_modified_bessel_k0", POSITIVE, 2e-5),
            ("scaled_modified_bessel_k1", POSITIVE, 2e-5),
        )
    ),
    *(_polynomial(f"chebyshev_polynomial_{kind}") for kind in "tuvw"),
    *(_polynomial(f"shifted_chebyshev_polynomial_{kind}", np.linspace(0.001, 0.999, 101)) for kind in "tuvw"),
    *(_polynomial(f"hermite_polynomial_{kind}", np.linspace(-2, 2, 101)) for kind in ("h", "he")),
    Function("pow", "pow(x, y)", torch.pow, POSITIVE, (-1.5, 0.0, 2.0, 2.5), rtol=2e-5),
    Function("remainder", "remainder(x, y)", torch.remainder, second=(-3.0, 0.5, 7.0), atol=4e-6),
    Function("fmod", "fmod(x, y)", torch.fmod, second=(-3.0, 0.5, 7.0), atol=4e-6),
    Function("floor_divide", "floor_divide(x, y)", torch.floor_divide, second=(-3.0, 0.5, 7.0)),
]

INCLUDES = "".join(f"#include <c10/metal/{name}.h>\n" for name in ("special_math", "expm1f", "igamma", "utils"))


@functools.cache
def _functions(mode: str):
    """All functions in one library, which compiles a kernel when it is asked for."""
    kernels = "".join(
        f"""
kernel void run_{f.name}(device float* out, constant float* xs, constant float* ys,
                         uint i [[thread_position_in_grid]]) {{
  float x = xs[i], y = ys[i];
  (void)y;
  out[i] = ::c10::metal::{f.expression};
}}"""
        for f in FUNCTIONS
    )
    return torch.mps.compile_shader(INCLUDES + kernels)


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_function(function, mode):
    arguments = function.arguments()
    on_device = [a.to("mps") for a in arguments]
    out = torch.full_like(on_device[0], torch.nan)
    getattr(_functions(mode), f"run_{function.name}")(out, on_device[0], on_device[-1])
    expected = function.reference(*(a.double() for a in arguments)).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=function.rtol, atol=function.atol, equal_nan=True)


# Philox 4x32-10, from the paper that the header names.
def _philox(counter: list[int], key: list[int], rounds: int) -> list[int]:
    for i in range(rounds):
        if i:
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            *(high >> 32 ^ counter[1] ^ key[0], high % 2**32),
            *(low >> 32 ^ counter[3] ^ key[1], low % 2**32),
        ]
    return counter


@functools.cache
def _random(mode: str):
    return torch.mps.compile_shader("""
#include <c10/metal/random.h>
using namespace c10::metal;
kernel void rounds(device uint4* out, constant uint4* counters, constant uint2* keys, constant uint& n,
                   uint i [[thread_position_in_grid]]) {
  out[i] = philox4::multiple_rounds(counters[i], keys[i], n);
}
kernel void draw(device float* uniform, device float* normal, device long* integers, constant long& seed,
                 uint i [[thread_position_in_grid]]) {
  uniform[i] = c10::metal::rand(seed, i);
  normal[i] = c10::metal::randn(seed, i);
  integers[i] = randint64(seed, i, -5, 5);
}
kernel void box_muller(device float2* out, constant uint2* raw, uint i [[thread_position_in_grid]]) {
  out[i] = box_muller_from_philox(raw[i]);
}
""")


# The header's loop makes a round less than it is asked for. Published test vectors of philox4x32 with 10 rounds
# (Random123, kat_vectors).
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def _words(values) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32)).to("mps")


def test_philox_gives_its_test_vectors(mode: str):
    counters, keys, expected = zip(*VECTORS, strict=True)
    out = torch.zeros(3, 4, dtype=torch.int32, device="mps")
    _random(mode).rounds(out, _words(counters), _words(keys), _words([11]), threads=3)
    assert out.cpu().numpy().view(np.uint32).tolist() == [list(v) for v in expected]
    assert [_philox(c, k, 10) for c, k in zip(counters, keys, strict=True)] == [list(v) for v in expected]


@pytest.mark.parametrize("seed", [0, 1234567890123, -3])
def test_draws(seed, mode):
    n = 1000
    uniform, normal = (torch.zeros(n, device="mps") for _ in range(2))
    integers = torch.zeros(n, dtype=torch.int64, device="mps")
    _random(mode).draw(uniform, normal, integers, torch.tensor([seed], device="mps"))
    raw = [_philox([0, 0, 0, i], [(seed >> 32) % 2**32, seed % 2**32], 9) for i in range(n)]
    u = torch.tensor(
        [[(word & 0x7FFFFFFF) * 4.6566127342e-10 for word in draw[:2]] for draw in raw], dtype=torch.float64
    )
    torch.testing.assert_close(uniform.cpu().double(), u[:, 0], atol=1e-7, rtol=0)
    exact = torch.sqrt(-2 * torch.log1p(-u[:, 0])) * torch.cos(2 * torch.pi * (1 - u[:, 1]))
    # The cosine's argument, up to 2 pi, is rounded to float32; its derivative is at most the radius, below 6.
    torch.testing.assert_close(normal.cpu().double(), exact, atol=2e-6, rtol=1e-4)
    assert integers.tolist() == [int(np.float32(x) * np.float32(10)) - 5 for x in u[:, 0].tolist()]


def test_box_muller_is_normal(mode: str):
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 2**32, (20000, 2), dtype=np.uint32)
    out = torch.zeros(len(raw), 2, device="mps")
    _random(mode).box_muller(out, _words(raw), threads=len(raw))
    out = out.cpu().double()
    # Standard errors of mean, variance and correlation over 20,000 draws are 0.007, 0.01 and 0.007.
    assert out.mean(0).abs().max() < 0.03 and (out.var(0) - 1).abs().max() < 0.05
    assert abs(torch.corrcoef(out.T)[0, 1].item()) < 0.03
