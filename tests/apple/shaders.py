"""What a shader offers: kernels with the types of their slots, function constants, and how structs lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clang.cindex import Cursor, CursorKind, Index, Type, TypeKind

from . import stand_in

# (name of the member, its offset in bytes, its type), for every scalar of a struct.
Layout = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Slot:
    """A buffer of a kernel: `space T* name` or `space T& name`."""

    name: str
    space: str
    reference: bool
    type: str  # as C++ calls it
    size: int  # bytes of one element


@dataclass(frozen=True)
class Kernel:
    name: str
    slots: dict[int, Slot]
    threadgroup_slots: tuple[int, ...]
    max_threads: int


@dataclass(frozen=True)
class Library:
    name: str
    kernels: dict[str, Kernel]
    constants: dict[str, tuple[int, str]]  # name -> index and type
    structs: dict[str, tuple[int, int, Layout]]  # name -> size, alignment and layout of what slots hold


def read(path: Path) -> Library:
    """What the shader offers, as the stand-in's compiler reads it."""
    source = stand_in.read_shader(path)
    names = [f"metalk_kernel_{i}" for i in range(len(source.kernels))]
    entry = "\n".join(
        f"using {name} = decltype({kernel.expression});" for name, kernel in zip(names, source.kernels, strict=True)
    )
    text = f'#include "{stand_in.METAL_LIBRARY}"\n{source.translation_unit(entry)}'
    unit = parse(text, stand_in.READ_FLAGS)
    types = {n.spelling: n.underlying_typedef_type for n in unit.get_children() if n.kind == CursorKind.TYPE_ALIAS_DECL}
    kernels, structs = {}, {}
    for name, kernel in zip(names, source.kernels, strict=True):
        arguments = list(types[name].get_canonical().get_pointee().get_canonical().argument_types())
        slots = {}
        for parameter, kind in zip(kernel.parameters, arguments, strict=True):
            if parameter.kind != "buffer":
                continue
            kind = kind.get_canonical()
            element = kind.get_pointee().get_canonical()
            if plain_name(element) not in SCALARS.values() and element.kind == TypeKind.RECORD:
                structs[plain_name(element)] = layout_of(element)
            slots[parameter.index] = Slot(
                parameter.name,
                parameter.address_space,
                kind.kind == TypeKind.LVALUEREFERENCE,
                plain_name(element),
                element.get_size(),
            )
        kernels[kernel.name] = Kernel(
            kernel.name,
            slots,
            tuple(p.index for p in kernel.parameters if p.kind == "threadgroup"),
            kernel.max_threads,
        )
    constants = {c.name: (c.index, c.type) for c in source.constants}
    return Library(path.stem, kernels, constants, structs)


def parse(text: str, flags: list[str]) -> Cursor:
    unit = Index.create().parse("shader.cpp", ["-Wno-everything", *flags], unsaved_files=[("shader.cpp", text)])
    errors = [f"{d.location.file}:{d.location.line}: {d.spelling}" for d in unit.diagnostics if d.severity >= d.Error]
    assert not errors, "\n".join(errors)
    return unit.cursor


SCALARS = {
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "long": "int64",
    "unsigned long": "uint64",
    "long long": "int64",
    "unsigned long long": "uint64",
    "float": "float32",
    "_Float16": "float16",
    "__bf16": "bfloat16",
}
_QUALIFIERS = {"const", "volatile", "__global", "__global_device", "__local"}


def plain_name(kind: Type) -> str:
    """A scalar by width, so that `uint` of Metal and `uint32_t` of C++ are one; else the name without qualifiers."""
    name = " ".join(word for word in kind.get_canonical().spelling.split() if word not in _QUALIFIERS)
    return SCALARS.get(name, name)


def layout_of(record: Type) -> tuple[int, int, Layout]:
    return record.get_size(), record.get_align(), tuple(_members(record.get_canonical(), "", 0))


def _members(kind: Type, name: str, offset: int) -> Iterator[tuple[str, int, str]]:
    kind = kind.get_canonical()
    if plain_name(kind) in SCALARS.values():  # libclang's Python names no kind for some of them
        yield name, offset, plain_name(kind)
    elif kind.kind == TypeKind.RECORD:
        for member in kind.get_fields():
            inner = f"{name}.{member.spelling}" if name else member.spelling
            yield from _members(member.type, inner, offset + member.get_field_offsetof() // 8)
    elif kind.kind == TypeKind.CONSTANTARRAY:
        element = kind.element_type
        for i in range(kind.element_count):
            yield from _members(element, f"{name}[{i}]", offset + i * element.get_size())
    else:
        yield name, offset, plain_name(kind)
