"""Loads the native half into this process, and gives PyTorch's Python layer what only a Mac build has."""

import atexit
import ctypes
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import virtual_mps

from . import EnvironmentProblem, _build, _environment
from ._real_kernels import KEYS
from .compiler import CompileError, build_runtime


def load() -> ModuleType:
    _environment.check_platform()
    _environment.check_torch()
    import torch

    if virtual_mps._native is not None:  # VIRTUAL_MPS=1, and this was the process's first import of torch
        return virtual_mps._native
    if torch._C._has_mps:
        raise EnvironmentProblem("virtual_mps: this PyTorch has an mps device of its own")
    built = _build.native()
    try:
        executor = build_runtime()
    except CompileError as error:
        raise EnvironmentProblem(str(error)) from None
    # Extensions are linked to neither library, as on a Mac they name none of ours: they find both in the global scope.
    ctypes.CDLL(str(executor), mode=ctypes.RTLD_GLOBAL)
    native = _import_globally("_virtual_mps", built / "_virtual_mps.so")
    native.configure_executor(sys.executable, str(_build.PACKAGE.parent), "")
    native.register_stock_ops(*((built / f"real_kernels.{key}").read_text().split() for key in KEYS))
    _complete_torch(torch, native)
    atexit.register(_finish_autograd, torch, os.getpid())
    return native


def _finish_autograd(torch: ModuleType, process: int) -> None:
    """Waits until autograd's thread of the device has let go of the last results that it handed out.

    It may do so after the caller goes on, and needs Python for it. Once Python is about to end, that aborts the process
    on Linux (`pthread_exit` unwinds through C++ there, not on a Mac). The thread takes one task after another, so a
    backward pass that returns nothing to Python tells when it is through with those before.
    """
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if os.getpid() != process or "pt_autograd_0" not in names:  # autograd was not used, or cannot be in a fork
        return
    last = torch.zeros((), device="mps", requires_grad=True) * 1
    last.backward()
    time.sleep(0.01)  # for the rest of this one


def _import_globally(name: str, path: os.PathLike) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise EnvironmentProblem(
            f"virtual_mps: the native half does not load: {error}. "
            "If a library is missing: apt install libgnustep-base-dev gobjc"
        ) from None
    finally:
        sys.setdlopenflags(flags)
    spec.loader.exec_module(module)
    return module


def _complete_torch(torch: ModuleType, native: ModuleType) -> None:
    torch._C._has_mps = True
    for name in dir(native):
        if name.startswith("_mps_"):
            setattr(torch._C, name, getattr(native, name))
    for name in ("_mps_isCaptureEnabled", "_mps_isCapturing"):
        setattr(torch._C, name, lambda: False)
    for function in vars(torch.backends.mps).values():  # answers that were given before the device came
        if hasattr(function, "cache_clear"):
            function.cache_clear()

    plain_new = torch.UntypedStorage.__new__

    # The storage's constructor knows the device only in a Mac build; loading and deep copies go through it.
    def new(cls, *args, device=None, **kwargs):
        if device is None:
            return plain_new(cls, *args, **kwargs)
        if torch.device(device).type != "mps":
            return plain_new(cls, *args, device=device, **kwargs)
        if args and not isinstance(args[0], int):
            return plain_new(cls, *args, **kwargs).to(device="mps")
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device="mps").untyped_storage()

    torch.UntypedStorage.__new__ = staticmethod(new)
