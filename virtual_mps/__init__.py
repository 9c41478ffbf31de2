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

__version__ = "0.1.0"

__all__ = ["EnvironmentProblem", "activate", "is_active", "mode", "modes"]

_MODES = {
    "strict": "refuse ops that have no kernel in PyTorch's MPS backend, as a Mac does",
    "poison": "fill fresh device memory with NaN, so that reads of it show",
    "deferred": "run encoded work at commit or synchronise, so that a missing one shows",
    "validation": "fail where Apple's API validation (MTL_DEBUG_LAYER=1) fails",
}

_native = None


class EnvironmentProblem(RuntimeError):
    """Something that virtual_mps needs is missing; the message says what, and the command that installs it."""


def activate(**modes: bool) -> None:
    """Makes `torch.device("mps")` work in this process. Calling it again only sets modes.

    The native half is built on the first call on a machine (about half a minute) and cached.

    Args:
        strict, poison, deferred, validation: switches, described by `modes()`. What is not given is taken from
            the environment (`VIRTUAL_MPS_STRICT=1` and so on, or Apple's own `MTL_DEBUG_LAYER=1` for validation), and
            is off without it.

    Raises:
        EnvironmentProblem: clang, GNUstep or a supported PyTorch is missing.
    """
    global _native
    if unknown := set(modes) - set(_MODES):
        raise TypeError(f"virtual_mps has no mode {', '.join(sorted(unknown))}; it has {', '.join(_MODES)}")
    if _native is None:
        from . import _load

        wanted = {name: _is_set(f"VIRTUAL_MPS_{name.upper()}") for name in _MODES}
        wanted["validation"] |= _is_set("MTL_DEBUG_LAYER")
        _native = _load.load()
        modes = wanted | modes
    for name, on in modes.items():
        _native.set_mode(name, on)


def is_active() -> bool:
    return _native is not None


def modes() -> dict[str, tuple[bool, str]]:
    """Each mode: whether it is on, and what it does."""
    return {name: (is_active() and _native.get_mode(name), text) for name, text in _MODES.items()}


@contextlib.contextmanager
def mode(**wanted: bool) -> Iterator[None]:
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
        activate()


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")
