"""Which functions of Metal's standard library Apple's compiler is known to have, by name and type.

Apple's compiler turns a call such as simd_sum(float) into one of an intrinsic, air.simd_sum.f32. Those in the shaders
that MLX and PyTorch ship compiled are listed in air_intrinsics.txt; `python -m tests.apple.air` writes it anew.
"""

from __future__ import annotations

import mmap
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from . import cross, wheels

LISTED = Path(__file__).parent / "air_intrinsics.txt"
SPECIFIED = Path(__file__).parent / "metal_functions.tsv"

# LLVM's wrapper around bitcode: magic, version, offset, size, processor.
_WRAPPER = struct.Struct("<5I")
_MAGIC = b"\xde\xc0\x17\x0b"


def libraries() -> list[Path]:
    """Files that hold shaders compiled by Apple's compiler."""
    mlx = wheels.unpacked("mlx-metal==0.32.4") / "mlx/lib/mlx.metallib"
    return [mlx, cross.torch_root(wheels.TESTED_TORCH) / "lib/libtorch_cpu.dylib"]


def intrinsics(library: Path) -> set[str]:
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, module in enumerate(_modules(library)):
            files.append(f"{folder}/{i}.bc")
            Path(files[-1]).write_bytes(module)
        for i in range(0, len(files), 500):
            command = [f"llvm-nm-{cross.LLVM}", "-u", "-j", *files[i : i + 500]]
            names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.update(re.findall(r"^air\.\S+$", names, re.MULTILINE))
    return found


def _modules(library: Path) -> Iterator[bytes]:
    """The bitcode of every shader in a file."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        seen, at = set(), data.find(_MAGIC)
        while at >= 0:
            _, _, offset, size, _ = _WRAPPER.unpack_from(data, at)
            module = data[at + offset : at + offset + size]
            if offset == _WRAPPER.size and module[:4] == b"BC\xc0\xde" and hash(module) not in seen:
                seen.add(hash(module))
                yield module
            at = data.find(_MAGIC, at + 4)


# --- the proof that a function exists

_SUFFIXES = {
    "float": ("f32",),
    "half": ("f16",),
    "bfloat": ("bf16",),
    "char": ("s.i8", "i8"),
    "uchar": ("u.i8", "i8"),
    "short": ("s.i16", "i16"),
    "ushort": ("u.i16", "i16"),
    "int": ("s.i32", "i32"),
    "uint": ("u.i32", "i32"),
    "long": ("s.i64", "i64"),
    "ulong": ("u.i64", "i64"),
}
# Where the intrinsic is not called as the function is.
_INTRINSICS = {
    "threadgroup_barrier": "wg.barrier",
    "simdgroup_barrier": "simdgroup.barrier",
    "simdgroup_load": "simdgroup_matrix_8x8_load",
    "simdgroup_store": "simdgroup_matrix_8x8_store",
    "simdgroup_multiply_accumulate": "simdgroup_matrix_8x8_multiply_accumulate",
    "make_filled_simdgroup_matrix": "simdgroup_matrix_8x8_init_filled",
}
_WITH_FLOAT = {"max": "fmax", "min": "fmin", "abs": "fabs"}
# How clang spells what Metal calls otherwise.
_METAL_NAMES = {
    "_Float16": "half",
    "__bf16": "bfloat",
    "unsigned char": "uchar",
    "unsigned short": "ushort",
    "unsigned int": "uint",
    "unsigned long": "ulong",
}


@cache
def listed() -> frozenset[str]:
    return frozenset(LISTED.read_text().split("\n\n")[1].split())


@cache
def specified() -> dict[tuple[str, str], str]:
    """(function, element type) -> title of the section of the specification that declares it."""
    found = {}
    for line in SPECIFIED.read_text().splitlines():
        if line and not line.startswith("#"):
            functions, types, section = line.split("\t")
            found.update({(f, t): section for f in functions.split() for t in types.split()})
    return found


def element_type(spelled: str) -> str:
    """`float` of `vec<float, 4>`, `half` of `const simdgroup_matrix<_Float16, 8, 8> &`: vectors are like scalars."""
    name = re.sub(r"^(?:const )?(?:vec|simdgroup_matrix)<([^,]*),.*$", r"\1", spelled.replace("metal::", ""))
    return _METAL_NAMES.get(name, name)


def proof(function: str, element: str) -> str | None:
    """What proves that Metal has `function` for a first argument of this element type.

    An intrinsic, or the title of the section of the specification; None if nothing does.
    """
    name = _WITH_FLOAT.get(function, function) if element in ("float", "half") else function
    name = _INTRINSICS.get(name, name)
    for prefix in ("air.", "air.fast_"):
        for intrinsic in sorted(listed()):
            if intrinsic != prefix + name and not intrinsic.startswith(f"{prefix}{name}."):
                continue
            # Of s.i32, v4f32 or v64bf16.p3bf16 the first, without its width.
            kind = re.sub(r"^(\.[su])?\.v\d+|^\.", r"\1.", intrinsic.removeprefix(prefix + name)).lstrip(".")
            if kind == "" or kind.partition(".p")[0] in _SUFFIXES.get(element, ()):
                return intrinsic
    return specified().get((function, element))


if __name__ == "__main__":
    names = sorted(set().union(*map(intrinsics, libraries())))
    print(f"# Made by `python -m {__spec__.name}` from mlx-metal 0.32.4 and torch {wheels.TESTED_TORCH}.\n")
    print("\n".join(names))
