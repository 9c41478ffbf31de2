"""What Metal kernels do, counted exactly: `with virtual_mps.count() as c:`. docs/counters.md defines each number."""

import contextlib
import ctypes
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True)
class Buffer:
    """Traffic through one buffer slot of a kernel, in bytes, summed over its dispatches.

    Attributes:
        slot, name: the n of [[buffer(n)]], and what the kernel calls it.
        space: "device" or "constant".
        read, written: all bytes that threads read and wrote.
        unique_read, unique_written: each byte once a dispatch, however often it was read or written.
    """

    slot: int
    name: str
    space: str
    read: int
    written: int
    unique_read: int
    unique_written: int


@dataclass(frozen=True)
class Counters:
    """Counts of one kernel, or of all.

    Attributes:
        dispatches, threadgroups, threads: how many were run.
        device_read, device_written: bytes that threads read from and wrote to `device` memory.
        device_unique_read, device_unique_written: the same with each byte once a dispatch, through whichever slots.
        constant_read, constant_unique_read: bytes read from `constant` parameters, among them those of setBytes.
        threadgroup_memory: bytes that a threadgroup has, declared or set by the host; the most of any dispatch.
        threadgroup_read, threadgroup_written: bytes that threads read from and wrote to it.
        threadgroup_barriers: once a threadgroup that meets at one.
        simdgroup_barriers: once a simdgroup that meets at one.
        matrix_flops: 2 x 8 x 8 x 8 a multiplication of simdgroup matrices.
        scalar_flops: all other floating-point operations of the source.
    """

    dispatches: int = 0
    threadgroups: int = 0
    threads: int = 0
    device_read: int = 0
    device_written: int = 0
    device_unique_read: int = 0
    device_unique_written: int = 0
    constant_read: int = 0
    constant_unique_read: int = 0
    threadgroup_memory: int = 0
    threadgroup_read: int = 0
    threadgroup_written: int = 0
    threadgroup_barriers: int = 0
    simdgroup_barriers: int = 0
    matrix_flops: int = 0
    scalar_flops: int = 0

    @property
    def device_bytes(self) -> int:
        return self.device_read + self.device_written

    @property
    def device_unique_bytes(self) -> int:
        return self.device_unique_read + self.device_unique_written


@dataclass(frozen=True)
class KernelCounters(Counters):
    """Counts of one kernel, and the traffic of each of its buffers."""

    name: str = ""
    buffers: tuple[Buffer, ...] = ()

    def buffer(self, which: int | str) -> Buffer:
        """The buffer of a slot, or of the kernel's parameter of that name.

        Raises:
            KeyError: no such buffer was bound; the message names those that were.
        """
        for buffer in self.buffers:
            if which in (buffer.slot, buffer.name):
                return buffer
        bound = ", ".join(f"{b.slot} ({b.name})" for b in self.buffers) or "none"
        raise KeyError(f"kernel '{self.name}' had no buffer {which!r} bound; it had {bound}")


_NUMBERS = tuple(f.name for f in fields(Counters))


@dataclass
class Counts:
    """What `count()` gives: empty until its block ends.

    Attributes:
        kernels: by name, in the order of their first dispatches. A kernel's variants by function constants share its
            name and are counted together.
    """

    kernels: dict[str, KernelCounters] = field(default_factory=dict)

    @property
    def total(self) -> Counters:
        """Sums over the kernels; of `threadgroup_memory` the maximum."""
        columns = {name: [getattr(kernel, name) for kernel in self.kernels.values()] for name in _NUMBERS}
        sums = {name: sum(column) for name, column in columns.items()}
        return Counters(**(sums | {"threadgroup_memory": max(columns["threadgroup_memory"], default=0)}))

    def __getitem__(self, kernel: str) -> KernelCounters:
        return self.kernels[kernel]

    def to_dict(self) -> dict:
        """{"kernels": {NAME: {COUNTER: int, ..., "buffers": [{...}]}}, "total": {COUNTER: int, ...}}"""
        kernels = {}
        for name, kernel in self.kernels.items():
            kernels[name] = asdict(kernel) | {"buffers": [asdict(buffer) for buffer in kernel.buffers]}
            del kernels[name]["name"]
        return {"kernels": kernels, "total": asdict(self.total)}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return f"{self._counters_table()}\n\n{self._buffers_table()}"

    def _counters_table(self) -> str:
        """A line a counter and a column a kernel: there are more counters than kernels."""
        columns: list[tuple[str, Counters]] = [*self.kernels.items(), ("total", self.total)]
        head = ("", *(name for name, _ in columns))
        return _table([head, *((name, *(getattr(c, name) for _, c in columns)) for name in _NUMBERS)])

    def _buffers_table(self) -> str:
        head = ("kernel", "slot", "buffer", "space", "read", "unique", "written", "unique")
        rows = [
            (name, str(b.slot), b.name, b.space, b.read, b.unique_read, b.written, b.unique_written)
            for name, kernel in self.kernels.items()
            for b in kernel.buffers
        ]
        return _table([head, *rows])


def _table(rows: list[tuple[str | int, ...]]) -> str:
    texts = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [any(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(t.rjust(w) if n else t.ljust(w) for t, w, n in zip(row, widths, numeric, strict=True))
        for row in texts
    )
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def count() -> Iterator[Counts]:
    """Counts what Metal kernels do while its block runs.

        with virtual_mps.count() as c:
            y = my_extension.scale(x)
        print(c)
        assert c.total.device_unique_bytes == x.nbytes + y.nbytes

    What is encoded within is what is counted: the device is synchronised at entry and exit. All threads of the process
    are counted, since autograd runs backward passes on one of its own. Blocks may nest and overlap; each counts
    everything. Stock operators run on the CPU, are no kernels and count nothing; nor does a dispatch that failed.

    The first dispatch of a kernel in a block compiles it again, with what counts in it. That is cached on disk.
    """
    api = _executor()
    counts = Counts()
    _synchronize()
    session = ctypes.c_void_p(api.vmps_count_begin())
    try:
        yield counts
    finally:
        try:
            _synchronize()
        finally:
            text = ctypes.c_void_p(api.vmps_count_end(session))
            try:
                counts.kernels.update(_parse(ctypes.string_at(text).decode()))
            finally:
                api.vmps_free(text)


def _parse(text: str) -> dict[str, KernelCounters]:
    kernels = [k | {"buffers": tuple(Buffer(**buffer) for buffer in k["buffers"])} for k in json.loads(text)]
    return {kernel["name"]: KernelCounters(**kernel) for kernel in kernels}


_api: ctypes.CDLL | None = None


def _executor() -> ctypes.CDLL:
    """The executor's library: that of the active device, if there is one, for both come from the same path."""
    global _api
    if _api is None:
        from .compiler import build_runtime

        api = ctypes.CDLL(str(build_runtime()))
        api.vmps_count_begin.argtypes = []
        api.vmps_count_begin.restype = ctypes.c_void_p
        api.vmps_count_end.argtypes = [ctypes.c_void_p]
        api.vmps_count_end.restype = ctypes.c_void_p
        api.vmps_free.argtypes = [ctypes.c_void_p]
        api.vmps_free.restype = None
        _api = api
    return _api


def _synchronize() -> None:
    from . import is_active

    if is_active():
        import torch

        torch.mps.synchronize()
