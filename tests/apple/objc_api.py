"""Objective-C interfaces as data: what headers declare, and what Apple's frameworks have by Apple's own account.

Apple's account is metal-cpp, whose calls name a selector and C++ types for it; the protocols that Apple's clang put
into PyObjC's libraries, with their type encodings; PyObjC's tables of enum values and constants, generated from the
SDK; and the names of the selectors that code built against the SDK sends.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from clang.cindex import Config, Cursor, CursorKind, Diagnostic, Index, Type, TypeKind

from . import cross, macho, wheels

Config.set_library_file(f"libclang-{cross.LLVM}.so.1")  # of the Debian package, found like any library

# Selectors that no artefact names, from Apple's documentation of the class.
DOCUMENTED = {
    "commandBufferWithCommandBuffer:",  # MPSCommandBuffer
    "rootCommandBuffer",  # MPSCommandBuffer
}

Method = tuple[str, str]  # "-" for an instance's, "+" for a class's; the selector


@dataclass
class Api:
    methods: dict[str, dict[Method, set[str]]] = field(default_factory=dict)  # of each class and protocol: encodings
    bases: dict[str, set[str]] = field(default_factory=dict)
    enums: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # functions and constants
    selectors: set[str] = field(default_factory=set)  # known by name alone

    def add(self, owner: str, method: Method, encoding: str) -> None:
        self.methods.setdefault(owner, {}).setdefault(method, set()).add(encoding)

    def encodings(self, owner: str, method: Method) -> set[str]:
        """Those of a method of a class or protocol or of what it inherits from."""
        found, pending, seen = set(), [owner], set()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                found |= self.methods.get(name, {}).get(method, set())
                pending += self.bases.get(name, ())
        return found


def differences(declared: Api, apple: Api) -> list[str]:
    """What `declared` has and `apple` has not, or has otherwise; one line each."""
    found = []
    for owner, methods in declared.methods.items():
        for method, encodings in methods.items():
            name = f"{method[0]}[{owner} {method[1]}]"
            known = apple.encodings(owner, method)
            # Metal is known whole, with types. Of other frameworks some methods are known by selector alone.
            if not known and method[1] in apple.selectors and not owner.startswith("MTL"):
                continue
            if not known:
                elsewhere = sorted(o for o, ms in apple.methods.items() if method in ms)
                place = f", which {', '.join(elsewhere[:3])} has" if elsewhere else ""
                found.append(f"{name}: Apple declares no such method{place}")
            elif not encodings <= known:
                found.append(f"{name}: encoding {', '.join(encodings)}; Apple's is {', '.join(sorted(known))}")
    for name, value in declared.enums.items():
        if name not in apple.enums:
            found.append(f"{name}: Apple declares no such enum constant")
        elif apple.enums[name] != value:
            found.append(f"{name} = {value}; Apple's is {apple.enums[name]}")
    found += [f"{name}: Apple declares no such function or constant" for name in declared.names - apple.names]
    return sorted(found)


# --- encodings


def normalized(encoding: str) -> str:
    """An encoding without what differs between compilers: frame offsets, names of structs and classes, qualifiers."""
    parts, rest = [], encoding
    while rest:
        part, rest = _one_type(rest)
        parts.append(part)
    return "".join(parts)


def _one_type(text: str) -> tuple[str, str]:
    text = text.lstrip("rnNoORVA0123456789")
    if not text:
        return "", ""
    head, rest = text[0], text[1:]
    if head == "^":
        part, rest = _one_type(rest)
        return f"^{part}", rest
    if head == "@":
        block = re.match(r"\?(<[^>]*>)?", rest)
        if block:
            return "@?", rest[block.end() :]
        return "@", re.sub(r'^"[^"]*"', "", rest)
    if head in "{(":
        named = re.match(r"[\w?]*=?", rest)
        rest, parts = rest[named.end() :], []
        while rest[0] not in "})":
            part, rest = _one_type(rest)
            parts.append(part)
        return f"{head}{''.join(parts)}{rest[0]}", rest[1:]
    if head == "[":
        count = re.match(r"\d*", rest)[0]
        part, rest = _one_type(rest[len(count) :])
        return f"[{count}{part}]", rest[1:]
    return head, rest


# --- reading headers

_FRAMEWORK_STUBS = {
    # Of what metal-cpp includes beyond Metal: only the names matter.
    "CoreFoundation/CoreFoundation.h": "#pragma once\ntypedef double CFTimeInterval; typedef const void* CFTypeRef;"
    "typedef const struct __CFString* CFStringRef;\n",
    "CoreGraphics/CGGeometry.h": "#pragma once\ntypedef double CGFloat; struct CGSize { CGFloat width, height; };\n",
    "CoreGraphics/CGColorSpace.h": "#pragma once\ntypedef struct CGColorSpace* CGColorSpaceRef;\n",
    "IOSurface/IOSurfaceRef.h": "#pragma once\ntypedef struct __IOSurface* IOSurfaceRef;\n",
}


def parse(text: str, language: str, flags: Sequence[str]) -> Cursor:
    arguments = ["-x", language, "-target", cross.TARGET, "-std=c++20", "-fblocks", *cross.DEFINES, *flags]
    unit = Index.create().parse("input.mm", arguments, unsaved_files=[("input.mm", text)])
    errors = [
        f"{d.location.file}:{d.location.line}: {d.spelling}" for d in unit.diagnostics if d.severity >= Diagnostic.Error
    ]
    assert not errors, "headers do not compile for a Mac:\n" + "\n".join(errors)
    return unit.cursor


def declared(frameworks: Path, headers: Sequence[str], prefixes: tuple[str, ...]) -> Api:
    """What the headers declare, as far as they lie in `frameworks` and the names start with one of the prefixes."""
    text = "".join(f"#import <{header}>\n" for header in headers)
    api, root = Api(), str(frameworks)
    interfaces = (CursorKind.OBJC_INTERFACE_DECL, CursorKind.OBJC_PROTOCOL_DECL, CursorKind.OBJC_CATEGORY_DECL)
    for node in _declarations(parse(text, "objective-c++", cross.system_flags(frameworks))):
        if node.location.file is None or not node.location.file.name.startswith(root):
            continue
        if node.kind in interfaces:
            for child in node.get_children():
                if child.kind in (CursorKind.OBJC_INSTANCE_METHOD_DECL, CursorKind.OBJC_CLASS_METHOD_DECL):
                    sign = "-" if child.kind == CursorKind.OBJC_INSTANCE_METHOD_DECL else "+"
                    api.add(node.spelling, (sign, child.spelling), normalized(child.objc_type_encoding))
        elif node.kind == CursorKind.ENUM_DECL:
            api.enums.update({c.spelling: _value(c) for c in node.get_children() if c.spelling.startswith(prefixes)})
        elif node.kind in (CursorKind.FUNCTION_DECL, CursorKind.VAR_DECL) and not node.is_definition():
            # What is defined, inline, is the header's own.
            api.names.update({node.spelling} if node.spelling.startswith(prefixes) else ())
    return api


def _value(constant: Cursor) -> int:
    unsigned = constant.semantic_parent.enum_type.get_canonical().kind in (
        TypeKind.UINT,
        TypeKind.UCHAR,
        TypeKind.USHORT,
    )
    return constant.enum_value & 0xFFFFFFFF if unsigned else constant.enum_value


def _declarations(root: Cursor) -> Iterator[Cursor]:
    """Those of a file and of its `extern "C"` blocks and namespaces."""
    inner = (CursorKind.LINKAGE_SPEC, CursorKind.UNEXPOSED_DECL, CursorKind.NAMESPACE)
    for node in root.get_children():
        if node.kind in inner:
            yield from _declarations(node)
        else:
            yield node


# --- Apple's account


@cache
def apple() -> Api:
    api = Api(selectors=set(DOCUMENTED))
    _read_metal_cpp(api)
    for requirement, library in (
        ("pyobjc-framework-Metal==12.2.2", "Metal/_Metal.*.so"),
        ("pyobjc-framework-Cocoa==13.0", "Foundation/_Foundation.*.so"),
    ):
        for protocol in macho.protocols(next(wheels.unpacked(requirement).glob(library))).values():
            api.bases.setdefault(protocol.name, set()).update(protocol.adopts)
            for method, encoding in protocol.methods.items():
                api.add(protocol.name, method, normalized(encoding))
    for requirement, module in (
        ("pyobjc-framework-Metal==12.2.2", "Metal"),
        ("pyobjc-framework-Cocoa==13.0", "Foundation"),
        ("pyobjc-framework-MetalPerformanceShaders==12.2.2", "MetalPerformanceShaders"),
    ):
        text = (wheels.unpacked(requirement) / module / "_metadata.py").read_text()
        for block in re.findall(r'^(?:enums|constants) = """(.*?)"""', text, re.MULTILINE | re.DOTALL):
            api.enums.update({name: int(value) for name, value in re.findall(r"\$(\w+)@(-?\d+)", block)})
            api.names.update(re.findall(r"\$(\w+)", block))
        # Methods whose Python signature needs a word are named by class and selector.
        api.selectors.update(re.findall(r'b?"\w+",\s*b"([^"]+)"', text))
    for symbols in cross.exported(wheels.TESTED_TORCH).values():
        api.names.update(symbol.removeprefix("_") for symbol in symbols)
    for library in (
        cross.torch_root(wheels.TESTED_TORCH) / "lib/libtorch_cpu.dylib",
        *(file for name, pattern in cross.LINKED_BY_APPLE.items() for file in wheels.unpacked(name).glob(pattern)),
    ):
        api.selectors |= macho.selector_names(library)
    return api


_SELECTOR = re.compile(r'_(?:MTL|NS)_PRIVATE_DEF_SEL\((\w+),\s*"([^"]+)"\)')
_SENT = re.compile(r"_(?:MTL|NS)_PRIVATE_SEL\((\w+)\)")


def _read_metal_cpp(api: Api) -> None:
    include = wheels.unpacked("mlx-metal==0.32.4") / "mlx/include/metal_cpp"
    texts = {str(file): file.read_bytes() for file in include.glob("*/*.hpp")}
    selectors = dict(pair for text in texts.values() for pair in _SELECTOR.findall(text.decode()))
    with tempfile.TemporaryDirectory() as stubs:
        for name, text in _FRAMEWORK_STUBS.items():
            (Path(stubs) / name).parent.mkdir(exist_ok=True)
            (Path(stubs) / name).write_text(text)
        text = "#include <Foundation/Foundation.hpp>\n#include <Metal/Metal.hpp>\n"
        root = parse(text, "c++", ["-I", str(include), *cross.system_flags(Path(stubs))])
        for node in _declarations(root):
            if node.location.file is None or node.location.file.name not in texts:
                continue
            if node.kind == CursorKind.CXX_METHOD and node.is_definition():
                extent = node.extent
                body = texts[node.location.file.name][extent.start.offset : extent.end.offset].decode()
                # One call each; the few that make several calls are helpers of metal-cpp's own.
                sent = _SENT.findall(body)
                if len(sent) == 1 and sent[0] in selectors:
                    owner = node.semantic_parent
                    sign = "+" if node.is_static_method() else "-"
                    types = [node.result_type, *(a.type for a in node.get_arguments())]
                    result, *rest = (_encoded(t) for t in types)
                    api.add(_objc_name(owner), (sign, selectors[sent[0]]), f"{result}@:{''.join(rest)}")
            elif node.kind == CursorKind.ENUM_DECL:
                prefix = node.semantic_parent.spelling
                api.enums.update({prefix + c.spelling: c.enum_value for c in node.get_children()})
            elif node.kind == CursorKind.CLASS_DECL and node.is_definition():
                # class Buffer : public NS::Referencing<Buffer, Resource>
                for base in node.get_children():
                    if base.kind == CursorKind.CXX_BASE_SPECIFIER and base.type.get_num_template_arguments() > 1:
                        parent = base.type.get_template_argument_type(1).get_declaration()
                        api.bases.setdefault(_objc_name(node), set()).add(_objc_name(parent))


def _objc_name(node: Cursor) -> str:
    return node.semantic_parent.spelling + node.spelling


_SCALARS = {
    TypeKind.VOID: "v",
    TypeKind.BOOL: "B",
    TypeKind.CHAR_S: "c",
    TypeKind.SCHAR: "c",
    TypeKind.UCHAR: "C",
    TypeKind.SHORT: "s",
    TypeKind.USHORT: "S",
    TypeKind.INT: "i",
    TypeKind.UINT: "I",
    TypeKind.LONG: "q",
    TypeKind.ULONG: "Q",
    TypeKind.LONGLONG: "q",
    TypeKind.ULONGLONG: "Q",
    TypeKind.FLOAT: "f",
    TypeKind.DOUBLE: "d",
}


def _encoded(kind: Type) -> str:
    """The encoding of the Objective-C type that metal-cpp's C++ type stands for: an object is a pointer to a class."""
    kind = kind.get_canonical()
    if kind.kind in _SCALARS:
        return _SCALARS[kind.kind]
    if kind.kind == TypeKind.ENUM:
        return _encoded(kind.get_declaration().enum_type)
    if kind.kind == TypeKind.BLOCKPOINTER:
        return "@?"
    if kind.kind == TypeKind.INCOMPLETEARRAY:
        return "^" + _encoded(kind.element_type)
    if kind.kind in (TypeKind.POINTER, TypeKind.LVALUEREFERENCE):
        target = kind.get_pointee().get_canonical()
        if target.kind == TypeKind.CHAR_S:
            return "*"
        name = target.get_declaration()
        # A class of metal-cpp, or one of libdispatch's objects, which are Objective-C's where there is Objective-C.
        if target.kind == TypeKind.RECORD and (
            name.kind == CursorKind.CLASS_DECL or name.spelling.startswith("dispatch_")
        ):
            return "@"
        return "^" + _encoded(target)
    if kind.kind == TypeKind.RECORD:
        return "{" + "".join(_encoded(f.type) for f in kind.get_fields()) + "}"
    return "?"
