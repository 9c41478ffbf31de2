"""An `mps` device for PyTorch on Linux, which builds and runs unmodified Metal extensions.

    import virtual_mps
    virtual_mps.activate()

makes `torch.device("mps")` work: stock ops run on the CPU, on the tensors' own memory, and Metal kernels, from
Objective-C++ extensions or `torch.mps.compile_shader`, run through the shader compiler of this package. `VIRTUAL_MPS=1`
in the environment does the same when the package is installed: PyTorch then loads it at import.

It proves what code means, not how fast it is on Apple hardware.
"""

import contextlib
import os
from collections.abc import Iterator

from .counters import count

__version__ = "0.1.0"

__all__ = ["EnvironmentProblem", "activate", "count", "is_active", "mode", "modes"]

_MODES = {
    "strict": "refuse ops that have no kernel in PyTorch's MPS backend, as a Mac does",
    "poison": "fill fresh device memory with NaN, so that reads of it show",
    "deferred": "run encoded work at commit or synchronise, so that a missing one shows",
    "validation": "fail where Apple's API validation (MTL_DEBUG_LAYER=1) fails",
    "check": "fail kernels that access memory they must not, race, or diverge (docs/checked-mode.md)",
    "seed": "run lanes and threadgroups in a random order, made from this number; 0: in the usual order",
}

_native = None
_seed = 0


class EnvironmentProblem(RuntimeError):
    """Something that virtual_mps needs is missing; the message says what, and the command that installs it."""


def activate(**modes: bool | int) -> None:
    """Makes `torch.device("mps")` work in this process. Calling it again only sets modes.

    The native half is built on the first call on a machine (about half a minute) and cached.

    Args:
        strict, poison, deferred, validation, check: switches, described by `modes()`. What is not given is taken
            from the environment (`VIRTUAL_MPS_STRICT=1` and so on, or Apple's own `MTL_DEBUG_LAYER=1` for validation),
            and is off without it.
        seed: an integer from 0 to 2^64 - 1, or `VIRTUAL_MPS_SEED` in the environment.

    Raises:
        EnvironmentProblem: clang, GNUstep or a supported PyTorch is missing.
    """
    global _native
    if unknown := set(modes) - set(_MODES):
        raise TypeError(f"virtual_mps has no mode {', '.join(sorted(unknown))}; it has {', '.join(_MODES)}")
    if _native is None:
        from . import _load

        wanted = {name: _from_environment(name) for name in _MODES}
        wanted["validation"] |= _is_set("MTL_DEBUG_LAYER")
        _native = _load.load()
        modes = wanted | modes
    for name, value in modes.items():
        if name == "seed":
            _set_seed(value)
        else:
            _native.set_mode(name, value)


def is_active() -> bool:
    return _native is not None


def modes() -> dict[str, tuple[bool | int, str]]:
    """Each mode: whether it is on (of the seed: which), and what it does."""
    now = {name: is_active() and (_seed if name == "seed" else _native.get_mode(name)) for name in _MODES}
    return {name: (now[name], text) for name, text in _MODES.items()}


@contextlib.contextmanager
def mode(**wanted: bool | int) -> Iterator[None]:
    """`with virtual_mps.mode(poison=True):` sets modes for the block, activating the device if need be.

    Modes belong to the process, not to the thread.
    """
    activate()
    before = {name: modes()[name][0] for name in wanted if name in _MODES}
    activate(**wanted)
    try:
        yield
    finally:
        activate(**before)


def stock_op_calls() -> int:
    """How many calls of PyTorch's own ops on mps tensors this process has served on the CPU."""
    return _native.stock_op_calls() if is_active() else 0


def _autoload() -> None:
    """What PyTorch's `torch.backends` entry point calls at the end of `import torch`."""
    if _is_set("VIRTUAL_MPS"):
        if packages := os.environ.get("VIRTUAL_MPS_DARWIN"):
            from . import _mac

            _mac.tell(packages.split(","))
        activate()


def _set_seed(seed: int) -> None:
    global _seed
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"virtual_mps: seed is {seed}, a number from 0 to 2^64 - 1 is accepted")
    _native.set_seed(seed)
    _seed = seed


def _from_environment(mode: str) -> bool | int:
    variable = f"VIRTUAL_MPS_{mode.upper()}"
    if mode != "seed":
        return _is_set(variable)
    try:
        return int(os.environ.get(variable) or 0)
    except ValueError:
        raise EnvironmentProblem(f"virtual_mps: {variable} is not a number: {os.environ[variable]!r}") from None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")
