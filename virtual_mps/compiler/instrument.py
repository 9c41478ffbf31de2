"""Adds calls to the executor around what a compiled kernel does to memory; see "instrumented kernels" in kernel_abi.h.

The input is clang's optimised intermediate representation as text, one instruction a line, of the one version of
clang that this package uses. Every load, store, atomic operation and memory intrinsic gets its address from the
executor, told by the `vmps_site` of the access: its size, its alignment, and its place in the Metal source. Pointers
to a kernel's arguments carry a tag in their top 16 bits, so addresses of any origin are told apart, and only those
with a tag are asked for.

clang's own -fsanitize=thread is not enough: it passes over sizes other than 1, 2, 4, 8 and 16 bytes (float3, rows of a
matrix), and cannot send an access elsewhere.
"""

import re
from collections.abc import Iterator

from . import flops
from .index_arithmetic import IndexArithmetic
from .messages import ENTRY

# Loads stay where the source has them (the optimiser may otherwise do one that a condition guards), and nothing else.
FLAGS = [
    "-fsanitize=thread",
    *(
        flag
        for what in ("memory-accesses", "func-entry-exit", "atomics", "memintrinsics")
        for flag in ("-mllvm", f"-tsan-instrument-{what}=0")
    ),
    "-fwrapv",  # signed overflow wraps, as on the GPU, so that it is there to be found
    "-fno-vectorize",  # loops over elements: each would have a copy with other accesses
    "-fdebug-info-for-profiling",  # with the qualified names of functions
    "-DVMPS_INSTRUMENTED",
]


READ, WRITE, ATOMIC, COPY, C10 = 1, 2, 4, 8, 16  # vmps_site.kind
_C10 = "_ZN3c105metal"  # how the names in namespace c10::metal begin
MOST_CELL = 16

_SITE_SIZE = 16
_RUNTIME = """
%vmps_site = type { ptr, i32, i16, i16 }
declare ptr @vmps_access(ptr, ptr)
declare ptr @vmps_access_range(ptr, ptr, i64)
declare void @vmps_at(ptr)
@vmps_scalar_flops = external global i64
define internal ptr @vmps.access(ptr %p, ptr %site) alwaysinline nounwind {
  %a = ptrtoint ptr %p to i64
  %t = icmp ugt i64 %a, 281474976710655
  br i1 %t, label %tagged, label %plain
tagged:
  %r = call ptr @vmps_access(ptr %p, ptr %site)
  ret ptr %r
plain:
  ret ptr %p
}
define internal ptr @vmps.access_range(ptr %p, ptr %site, i64 %n) alwaysinline nounwind {
  %a = ptrtoint ptr %p to i64
  %t = icmp ugt i64 %a, 281474976710655
  br i1 %t, label %tagged, label %plain
tagged:
  %r = call ptr @vmps_access_range(ptr %p, ptr %site, i64 %n)
  ret ptr %r
plain:
  ret ptr %p
}
declare void @vmps_index_wrapped(ptr)
define internal void @vmps.index(i1 %wrapped, ptr %site) alwaysinline nounwind {
  br i1 %wrapped, label %yes, label %no
yes:
  call void @vmps_index_wrapped(ptr %site)
  ret void
no:
  ret void
}
define internal ptr @vmps.untagged(ptr %p) alwaysinline nounwind {
  %a = ptrtoint ptr %p to i64
  %b = and i64 %a, 281474976710655
  %r = inttoptr i64 %b to ptr
  ret ptr %r
}
"""

_SCALARS = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8, "x86_fp80": 16, "fp128": 16}
_DEFINITION = re.compile(r"\s+(%[\w.$-]+) = (\w+) ?(.*)")
_NAME = re.compile(r"%[\w.$-]+")
_DBG = re.compile(r"!dbg (!\d+)")
_ALIGN = re.compile(r", align (\d+)")
_LOAD = re.compile(r"(\s+%[\w.$-]+ = load (?:atomic |volatile )*)(.*)")
_STORE = re.compile(r"(\s+store (?:atomic |volatile )*)(.*)")
_UPDATE = re.compile(r"(\s+%[\w.$-]+ = (?:atomicrmw|cmpxchg) .*?ptr )(%[\w.$-]+)(, .*)")
_MEMORY = re.compile(r"(.*call void @llvm\.(memcpy|memmove|memset)(?:\.inline)?\.[\w.]+\()(.*)(\).*)")
_CALL = re.compile(r".*?call .*?(@[\w.$]+)\((.*)\)")
_TERMINATORS = ("br ", "ret ", "switch ", "unreachable", "indirectbr ")


def instrument(module: str) -> str:
    return _Module(module).text()


class _Module:
    def __init__(self, module: str):
        lines = [line for line in module.splitlines() if not line.startswith(("@llvm.global_ctors", "@llvm.used"))]
        self._lines = lines
        self._structs = {m[1]: m[2] for line in lines if (m := re.match(r"(%\S+|%\".*?\") = type (.*)", line))}
        self._locations = _Locations(lines)
        self._declared = {m[1] for line in lines if (m := re.match(r"declare .*?(@[\w.$]+)\(", line))}
        self._sites: dict[tuple[str, int, int, int], int] = {}
        self._texts: dict[str, int] = {}
        self._count = 0

    def text(self) -> str:
        result, body = [], None
        for line in self._lines:
            if body is None:
                result.append(line)
                if line.startswith("define "):
                    body = []
            elif line == "}":
                result += [*_count_flops(_Function(self, body).lines()), line]
                body = None
            else:
                body.append(line)
        return "\n".join([*result, _RUNTIME, *self._tables(), ""])

    def _tables(self) -> Iterator[str]:
        for text, number in self._texts.items():
            data = "".join(f"\\{byte:02X}" for byte in text.encode() + b"\0")
            yield f'@vmps.text.{number} = private unnamed_addr constant [{len(text.encode()) + 1} x i8] c"{data}"'
        entries = ", ".join(
            f"%vmps_site {{ ptr @vmps.text.{self._texts[location]}, i32 {size}, i16 {align}, i16 {kind} }}"
            for location, size, align, kind in self._sites
        )
        yield f"@vmps.sites = internal constant [{len(self._sites)} x %vmps_site] [{entries}]"
        yield f"@vmps_kernel_cell = constant i32 {self._cell()}"

    def _cell(self) -> int:
        """The largest power of two such that each access covers whole pieces of memory of that many bytes."""
        cell = MOST_CELL
        for _, size, align, kind in self._sites:
            while kind & (READ | WRITE) and (not size or size % cell or align % cell) and cell > 1:
                cell //= 2
        return cell

    def site(self, line: str, size: int = 0, align: int = 1, kind: int = 0) -> str:
        """The address of the description of what happens in this line."""
        location = self._locations.of(line)
        self._texts.setdefault(location, len(self._texts))
        number = self._sites.setdefault((location, size, min(align, 128), kind), len(self._sites))
        return f"ptr getelementptr inbounds (i8, ptr @vmps.sites, i64 {_SITE_SIZE * number})"

    def is_inside(self, line: str, prefix: str) -> bool:
        """Does this belong to a function with such a mangled name, be it inlined or not?"""
        return any(name.startswith(prefix) for name in self._locations.functions(line))

    def fresh(self) -> str:
        self._count += 1
        return f"%vmps.{self._count}"

    def is_foreign(self, function: str) -> bool:
        """Code outside of this module that is neither the executor's nor clang's."""
        return function in self._declared and not function.startswith(("@llvm.", "@vmps_"))

    def size_and_end(self, text: str, at: int = 0) -> tuple[int, int, int]:
        """(size, alignment, end) of the type that is written at an offset."""
        if text[at] == "<" and text[at + 1] != "{":
            count, inner = re.compile(r"<(\d+) x ").match(text, at), 0
            bits, end = self._bits(text, count.end())
            inner = int(count[1]) * bits
            size = (inner + 7) // 8
            return size, 1 << (size - 1).bit_length(), end + 1
        if text[at] == "[":
            count = re.compile(r"\[(\d+) x ").match(text, at)
            size, align, end = self.size_and_end(text, count.end())
            return int(count[1]) * _up(size, align), align, end + 1
        if text.startswith("<{", at) or text[at] == "{":
            packed = text[at] == "<"
            return self._struct(text, at + 1 + packed, packed)
        if text[at] == "%":
            name = re.compile(r'%"[^"]*"|%[\w.$]+').match(text, at)
            size, align, _ = self.size_and_end(self._structs[name[0]])
            return size, align, name.end()
        bits, end = self._bits(text, at)
        size = (bits + 7) // 8
        return size, 1 << (size - 1).bit_length(), end

    def _struct(self, text: str, at: int, packed: bool) -> tuple[int, int, int]:
        size, most = 0, 1
        while text[at] != "}":
            if text[at] in " ,":
                at += 1
                continue
            part, align, at = self.size_and_end(text, at)
            align = 1 if packed else align
            size, most = _up(size, align) + part, max(most, align)
        return _up(size, most), most, at + 1 + packed

    def _bits(self, text: str, at: int) -> tuple[int, int]:
        word = re.compile(r"\w+").match(text, at)
        name = word[0]
        return (8 * _SCALARS[name] if name in _SCALARS else int(name[1:])), word.end()


class _Function:
    def __init__(self, module: _Module, body: list[str]):
        self._module = module
        self._body = body
        self._definitions = {m[1]: (m[2], m[3]) for line in body if (m := _DEFINITION.match(line))}
        self._indices = IndexArithmetic(self._definitions, module.fresh)
        self._users: dict[str, list[str]] = {}
        for line in body:
            for name in _NAME.findall(line.partition(" = ")[2] or line):
                self._users.setdefault(name, []).append(line)

    def lines(self) -> Iterator[str]:
        lines = [new for line in self._body for new in self._instruction(line)]
        yield from self._indices.at_entry
        for line in lines:
            yield line
            if (match := _DEFINITION.match(line)) and match[1] in self._indices.behind:
                yield from self._indices.behind[match[1]]

    def _instruction(self, line: str) -> Iterator[str]:
        if match := _LOAD.match(line):
            yield from self._access(line, match, READ)
        elif match := _STORE.match(line):
            yield from self._access(line, match, WRITE)
        elif match := _UPDATE.match(line):
            size = self._module.size_and_end(match[3], 2)[0]
            address = yield from self._asked(line, match[2], size, _alignment(line, size), READ | WRITE | ATOMIC)
            yield match[1] + address + match[3]
        elif match := _MEMORY.match(line):
            yield from self._memory(line, match)
        elif match := _CALL.match(line):
            if match[1] in ("@vmps_wait_simdgroup", "@vmps_wait_threadgroup"):
                kind = C10 if self._module.is_inside(line, _C10) else 0
                yield f"  call void @vmps_at({self._module.site(line, kind=kind)})"
            yield from self._foreign(line, match) if self._module.is_foreign(match[1]) else [line]
        else:
            yield line

    def _access(self, line: str, match: re.Match, kind: int) -> Iterator[str]:
        head, rest = match[1], match[2]
        size, natural, end = self._module.size_and_end(rest)
        at = rest.rindex(", ptr ") + len(", ptr ") if kind == WRITE else end + len(", ptr ")
        operand = re.compile(r"%[\w.$-]+").match(rest, at)
        if operand is None:  # a variable of the module
            yield line
            return
        kind |= ATOMIC if " atomic " in head else 0
        if kind == READ and rest.startswith("i"):
            name = _NAME.search(head)[0]
            kind |= COPY if all(f" {name}, ptr " in user for user in self._users.get(name, ())) else 0
        address = yield from self._asked(line, operand[0], size, _alignment(line, natural), kind)
        yield head + rest[:at] + address + rest[operand.end() :]

    def _asked(self, line: str, operand: str, size: int, align: int, kind: int) -> Iterator[str]:
        """Gives the operand that replaces the address; yields the line that computes it."""
        if self._is_private(operand):
            return operand
        yield from self._index(operand)
        address = self._module.fresh()
        yield f"  {address} = call ptr @vmps.access(ptr {operand}, {self._module.site(line, size, align, kind)})"
        return address

    def _index(self, operand: str) -> Iterator[str]:
        if flag := self._indices.flag(operand):
            name, culprit = flag
            yield f"  call void @vmps.index(i1 {name}, {self._module.site(self._definitions[culprit][1])})"

    def _is_private(self, operand: str) -> bool:
        """Is this an address in a variable on the lane's own stack?"""
        for _ in range(len(self._definitions)):
            operation, rest = self._definitions.get(operand, ("", ""))
            if operation == "alloca":
                return True
            base = re.search(r", ptr (%[\w.$-]+)", rest) if operation == "getelementptr" else None
            if base is None:
                return False
            operand = base[1]
        return False

    def _memory(self, line: str, match: re.Match) -> Iterator[str]:
        arguments = _split(match[3])
        length = arguments[2]
        size = int(length.split()[1]) if length.split()[1].isdigit() else 0
        for i, kind in enumerate((WRITE, READ | COPY)[: 1 if match[2] == "memset" else 2]):
            operand = arguments[i].split()[-1]
            if not operand.startswith("%") or self._is_private(operand):
                continue
            align = re.search(r"align (\d+)", arguments[i])
            site = self._module.site(line, size, int(align[1]) if align else 1, kind)
            yield from self._index(operand)
            address = self._module.fresh()
            yield f"  {address} = call ptr @vmps.access_range(ptr {operand}, {site}, {length})"
            arguments[i] = arguments[i][: -len(operand)] + address
        yield match[1] + ", ".join(arguments) + match[4]

    def _foreign(self, line: str, match: re.Match) -> Iterator[str]:
        """The C library gets addresses without tags, of the lane's own variables as a rule."""
        arguments = _split(match[2])
        for i, argument in enumerate(arguments):
            operand = argument.split()[-1] if argument.startswith("ptr ") else ""
            if operand.startswith("%") and not self._is_private(operand):
                address = self._module.fresh()
                yield f"  {address} = call ptr @vmps.untagged(ptr {operand})"
                arguments[i] = argument[: -len(operand)] + address
        yield line[: match.start(2)] + ", ".join(arguments) + line[match.end(2) :]


class _Locations:
    """Places in the Metal source, from the debug information."""

    def __init__(self, lines: list[str]):
        self._nodes = {m[1]: m[2] for line in lines if (m := re.match(r"(!\d+) = (?:distinct )?(!DI.*)", line))}

    def of(self, line: str) -> str:
        """FILE:LINE of an instruction, and where the function was called that it stands in. Empty if unknown.

        Lines of this package's headers are left out: what they do, they do for the line that calls them.
        """
        found = _DBG.search(line)
        node, places = found and found[1], []
        while node:
            place = self._place(node)
            if "/vmps/" not in place and place not in places and not place.startswith(f"{ENTRY}:"):
                places.append(place)
            node = self._field(node, "inlinedAt")
        return ", called at ".join(places[:3] if len(places) <= 3 else [*places[:2], places[-1]])

    def functions(self, line: str) -> Iterator[str]:
        """Mangled names of the functions that an instruction was written in, from the innermost on."""
        found = _DBG.search(line)
        node = found and found[1]
        while node:
            scope = self._field(node, "scope")
            while scope and "DISubprogram" not in self._nodes[scope]:
                scope = self._field(scope, "scope")
            if scope and (name := re.search(r'linkageName: "([^"]*)"', self._nodes[scope])):
                yield name[1]
            node = self._field(node, "inlinedAt")

    def _place(self, node: str) -> str:
        number = re.search(r"line: (\d+)", self._nodes[node])
        scope = self._field(node, "scope")
        while scope and not self._field(scope, "file"):
            scope = self._field(scope, "scope")
        file = re.search(r'filename: "([^"]*)"', self._nodes[self._field(scope, "file")])
        return f"{file[1]}:{number[1] if number else 0}"

    def _field(self, node: str, name: str) -> str | None:
        match = re.search(rf"\b{name}: (!\d+)", self._nodes.get(node, ""))
        return match and match[1]


def _count_flops(lines: Iterator[str]) -> Iterator[str]:
    """Adds up each block's marks (flops.py) at its end."""
    sum_, block = 0, 0
    for line in lines:
        if (marked := flops.marked(line)) is not None:
            sum_ += marked
            continue
        if line.startswith(tuple(f"  {word}" for word in _TERMINATORS)):
            if sum_:
                a, b = f"%vmps.flops.{block}", f"%vmps.sum.{block}"
                yield f"  {a} = load i64, ptr @vmps_scalar_flops"
                yield f"  {b} = add i64 {a}, {sum_}"
                yield f"  store i64 {b}, ptr @vmps_scalar_flops"
            sum_, block = 0, block + 1
        yield line


def _alignment(line: str, natural: int) -> int:
    match = _ALIGN.search(line)
    return int(match[1]) if match else natural


def _split(arguments: str) -> list[str]:
    """At the commas outside of all brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(arguments):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(arguments[start:i].strip())
            start = i + 1
    return [*parts, arguments[start:].strip()] if arguments.strip() else []


def _up(size: int, align: int) -> int:
    return (size + align - 1) // align * align
