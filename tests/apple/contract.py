"""Whether what csrc asks Metal for is what the shaders offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from clang.cindex import CursorKind

from . import cross, objc_api, shaders
from .recording import Argument, Launch
from .shaders import Kernel, Layout, Library, Slot

# c10's name of a dtype, and Metal's type of such an element.
DTYPES = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}
MAX_BYTES = 4096  # of setBytes (Metal feature set tables)


def breaches(launches: Iterable[Launch], libraries: Mapping[str, Library]) -> list[str]:
    """What csrc asks for and is not there, or is there otherwise; and kernels that it never asks for."""
    found, asked = set(), set()
    for launch in launches:
        library = libraries.get(launch.library)
        if library is None:
            found.add(f"{launch.kernel}: there is no shader {launch.library}.metal")
        elif launch.kernel not in library.kernels:
            found.add(f"{launch.kernel}: {launch.library}.metal has no such kernel")
        else:
            asked.add((launch.library, launch.kernel))
            found.update(f"{launch.kernel}: {b}" for b in _launch(launch, library.kernels[launch.kernel], library))
    for library in libraries.values():
        unused = (name for name in library.kernels if (library.name, name) not in asked)
        found.update(f"{name}: no launch of csrc was seen that asks for it" for name in unused)
    return sorted(found)


def _launch(launch: Launch, kernel: Kernel, library: Library) -> Iterable[str]:
    if sorted(kernel.slots) != list(range(len(launch.arguments))):
        slots = ", ".join(f"{i}" for i in sorted(kernel.slots))
        yield f"{len(launch.arguments)} arguments, its buffers are {slots}"
        return
    for i, argument in enumerate(launch.arguments):
        if wrong := _argument(argument, kernel.slots[i]):
            yield f"buffer({i}), {kernel.slots[i].name}: {wrong}"
    by_index = {index: (name, kind) for name, (index, kind) in library.constants.items()}
    for i in range(len(launch.constants)):
        if i not in by_index:
            yield f"function constant {i} is set, and the shader has none of that index"
        elif by_index[i][1] != "bool":
            yield f"function constant {i} is set to a bool, {by_index[i][0]} is a {by_index[i][1]}"
    if launch.threads > kernel.max_threads:
        yield f"{launch.threads} threads, it takes {kernel.max_threads}"
    if bool(launch.threadgroup_bytes) != bool(kernel.threadgroup_slots):
        yield f"{launch.threadgroup_bytes} bytes of threadgroup memory for {len(kernel.threadgroup_slots)} parameters"


def _argument(argument: Argument, slot: Slot) -> str | None:
    declared = f"{slot.space} {slot.type}{'&' if slot.reference else '*'}"
    if argument.type is None:
        if slot.reference:
            return f"a tensor or nothing, declared {declared}"
        if argument.dtype is not None and DTYPES.get(argument.dtype) != slot.type:
            return f"a tensor of {argument.dtype}, declared {declared}"
        return None
    given = shaders.SCALARS.get(argument.type, argument.type)
    if slot.space != "constant":
        return f"bytes of a {given}, declared {declared}"
    if given != slot.type:
        return f"a {given}, declared {declared}"
    if argument.bytes > MAX_BYTES:
        return f"{argument.bytes} bytes, setBytes takes {MAX_BYTES}"
    if argument.bytes % slot.size or (slot.reference and argument.bytes != slot.size):
        return f"{argument.bytes} bytes, declared {declared} of {slot.size}"
    return None


def host_structs(header: Path, frameworks: Path) -> dict[str, tuple[int, int, Layout]]:
    """Size, alignment and layout of each struct of a header, as clang lays it out for a Mac."""
    unit = objc_api.parse(f'#include "{header}"\n', "c++", cross.system_flags(frameworks))
    return {
        node.spelling: shaders.layout_of(node.type)
        for node in unit.get_children()
        if node.kind == CursorKind.STRUCT_DECL and node.location.file and node.location.file.name == str(header)
    }


def layout_differences(
    host: Mapping[str, tuple[int, int, Layout]], shader: Mapping[str, tuple[int, int, Layout]]
) -> list[str]:
    """Where a struct that a kernel takes lies otherwise on the host; and structs that the host does not know."""
    found = []
    for name, (size, alignment, members) in shader.items():
        if name not in host:
            found.append(f"{name}: the host has no such struct")
            continue
        host_size, host_alignment, host_members = host[name]
        if (host_size, host_alignment) != (size, alignment):
            found.append(
                f"{name}: {size} bytes aligned to {alignment}, on the host {host_size} aligned to {host_alignment}"
            )
        for ours, theirs in zip(members, host_members, strict=False):
            if ours != theirs:
                found.append(f"{name}: {_member(ours)}, on the host {_member(theirs)}")
        if len(members) != len(host_members):
            found.append(f"{name}: {len(members)} members, on the host {len(host_members)}")
    return found


def _member(member: tuple[str, int, str]) -> str:
    return f"{member[2]} {member[0]} at {member[1]}"
