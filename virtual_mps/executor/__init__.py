"""Compiles and runs Metal kernels on NumPy arrays, through the C interface in executor.h; no torch, no device."""

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from virtual_mps.compiler import build_runtime

MAX_BINDINGS = 31
_Words = ctypes.c_uint32 * 3


class MetalError(RuntimeError):
    """What the compiler or the executor reports."""


class _CompileOptions(ctypes.Structure):
    _fields_ = (
        ("defines", ctypes.POINTER(ctypes.c_char_p)),
        ("define_count", ctypes.c_size_t),
        ("fast_math", ctypes.c_int),
        ("language_version", ctypes.c_int),
        ("preprocessed", ctypes.c_int),
    )


class _Constant(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("index", ctypes.c_uint32),
        ("value", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    )


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("index", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("constant", ctypes.c_int),
    )


class _Binding(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("allocation", ctypes.c_void_p),
        ("allocation_size", ctypes.c_size_t),
        ("written", ctypes.c_void_p),
    )


class LaunchArgs(ctypes.Structure):
    """vmps_launch_args."""

    _fields_ = (
        ("buffers", _Binding * MAX_BINDINGS),
        ("threadgroup_memory", ctypes.c_uint32 * MAX_BINDINGS),
        ("threadgroups", _Words),
        ("threads", _Words),
        ("threads_per_threadgroup", _Words),
        ("group", ctypes.c_uint32),
    )


def load(runtime: Path | None = None) -> ctypes.CDLL:
    """The executor's C functions; of libvmps_executor.so for the present sources unless a path is given."""
    api = ctypes.CDLL(str(runtime or build_runtime()))
    error = ctypes.POINTER(ctypes.c_void_p)
    pointer = ctypes.c_void_p
    api.vmps_configure.argtypes = [ctypes.c_char_p] * 3
    api.vmps_configure.restype = None
    api.vmps_free.argtypes = [pointer]
    api.vmps_free.restype = None
    api.vmps_library_create.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(_CompileOptions), error]
    api.vmps_library_create.restype = pointer
    api.vmps_library_destroy.argtypes = [pointer]
    api.vmps_library_destroy.restype = None
    api.vmps_library_table.argtypes = [pointer]
    api.vmps_library_table.restype = ctypes.c_char_p
    api.vmps_kernel_create.argtypes = [pointer, ctypes.c_char_p, ctypes.POINTER(_Constant), ctypes.c_size_t, error]
    api.vmps_kernel_create.restype = pointer
    api.vmps_kernel_destroy.argtypes = [pointer]
    api.vmps_kernel_destroy.restype = None
    api.vmps_kernel_parameters.argtypes = [pointer, ctypes.POINTER(ctypes.POINTER(_Parameter))]
    api.vmps_kernel_parameters.restype = ctypes.c_size_t
    api.vmps_kernel_max_threads.argtypes = [pointer]
    api.vmps_kernel_max_threads.restype = ctypes.c_uint32
    api.vmps_kernel_static_threadgroup_memory.argtypes = [pointer]
    api.vmps_kernel_static_threadgroup_memory.restype = ctypes.c_uint32
    api.vmps_kernel_waits.argtypes = [pointer]
    api.vmps_kernel_waits.restype = ctypes.c_int
    api.vmps_set_check.argtypes = [ctypes.c_int]
    api.vmps_set_check.restype = ctypes.c_int
    api.vmps_set_seed.argtypes = [ctypes.c_uint64]
    api.vmps_set_seed.restype = ctypes.c_uint64
    api.vmps_launch.argtypes = [pointer, ctypes.POINTER(LaunchArgs), error]
    api.vmps_launch.restype = ctypes.c_int
    package_parent = Path(__file__).resolve().parents[2]
    api.vmps_configure(os.fsencode(sys.executable), os.fsencode(package_parent), None)
    return api


_api: ctypes.CDLL | None = None


def _shared_api() -> ctypes.CDLL:
    global _api
    if _api is None:
        _api = load()
    return _api


def _check(api: ctypes.CDLL, error: ctypes.c_void_p) -> None:
    if error.value is not None:
        message = ctypes.string_at(error.value).decode(errors="replace")
        api.vmps_free(error)
        raise MetalError(message)


@contextlib.contextmanager
def checked(seed: int = 0) -> Iterator[None]:
    """Launches in the block run in checked mode, with a seed in a random order of lanes and threadgroups."""
    api = _shared_api()
    check_before, seed_before = api.vmps_set_check(1), api.vmps_set_seed(seed)
    try:
        yield
    finally:
        api.vmps_set_check(check_before)
        api.vmps_set_seed(seed_before)


class Library:
    """A Metal source. Kernels are compiled when they are first asked for."""

    def __init__(
        self,
        source: str,
        defines: Sequence[str] = (),
        fast_math: bool = False,
        language_version: int = 0,
        preprocessed: bool = False,
        api: ctypes.CDLL | None = None,
    ):
        self._api = api or _shared_api()
        names = (ctypes.c_char_p * len(defines))(*(d.encode() for d in defines))
        options = _CompileOptions(names, len(defines), fast_math, language_version, preprocessed)
        text, error = source.encode(), ctypes.c_void_p()
        self._handle = self._api.vmps_library_create(text, len(text), ctypes.byref(options), ctypes.byref(error))
        _check(self._api, error)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._api.vmps_library_destroy(self._handle)

    @property
    def table(self) -> dict:
        return json.loads(self._api.vmps_library_table(self._handle))

    def kernel(self, name: str, constants: Mapping[str | int, np.generic | bool] | None = None) -> "Kernel":
        """constants: values of function constants by name or index, as NumPy scalars of the right type."""
        return Kernel(self, name, constants or {})


class Kernel:
    def __init__(self, library: Library, name: str, constants: Mapping[str | int, np.generic | bool]):
        self._api = library._api
        values = [np.ascontiguousarray(v) for v in constants.values()]
        array = (_Constant * len(values))()
        for slot, key, value in zip(array, constants, values, strict=True):
            slot.name = key.encode() if isinstance(key, str) else None
            slot.index = 0 if isinstance(key, str) else key
            slot.value, slot.size = value.ctypes.data, value.nbytes
        error = ctypes.c_void_p()
        self._handle = self._api.vmps_kernel_create(
            library._handle, name.encode(), array, len(values), ctypes.byref(error)
        )
        _check(self._api, error)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._api.vmps_kernel_destroy(self._handle)

    @property
    def waits(self) -> bool:
        return bool(self._api.vmps_kernel_waits(self._handle))

    @property
    def max_threads(self) -> int:
        return self._api.vmps_kernel_max_threads(self._handle)

    @property
    def static_threadgroup_memory(self) -> int:
        return self._api.vmps_kernel_static_threadgroup_memory(self._handle)

    @property
    def parameters(self) -> list[tuple[str, int, str]]:
        """(kind, index, name) of each slot."""
        found = ctypes.POINTER(_Parameter)()
        count = self._api.vmps_kernel_parameters(self._handle, ctypes.byref(found))
        return [(("buffer", "threadgroup")[p.kind], p.index, p.name.decode()) for p in found[:count]]

    def __call__(
        self,
        *buffers: np.ndarray | np.generic | None,
        threadgroups: Sequence[int] = (),
        threads: Sequence[int] = (),
        threads_per_threadgroup: Sequence[int] = (32,),
        threadgroup_memory: Mapping[int, int] | None = None,
    ) -> None:
        """Binds the arrays to slots 0, 1, ... and runs a grid of threadgroups, or of threads with cut edges."""
        args = LaunchArgs()
        # Scalars become arrays, which must live until the kernel has run.
        arrays = [None if b is None else b if isinstance(b, np.ndarray) else np.atleast_1d(b) for b in buffers]
        for slot, array in zip(args.buffers, arrays, strict=False):
            if array is not None:
                slot.data, slot.size = array.ctypes.data, array.nbytes
        for index, length in (threadgroup_memory or {}).items():
            args.threadgroup_memory[index] = length
        for field, given in (
            (args.threadgroups, threadgroups),
            (args.threads, threads),
            (args.threads_per_threadgroup, threads_per_threadgroup),
        ):
            if given:
                field[:] = (*given, 1, 1)[:3]
        self.launch(args)

    def launch(self, args: LaunchArgs) -> None:
        """Runs a grid whose arguments are all filled in."""
        error = ctypes.c_void_p()
        self._api.vmps_launch(self._handle, ctypes.byref(args), ctypes.byref(error))
        _check(self._api, error)
