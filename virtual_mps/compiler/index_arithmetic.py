"""Finds index arithmetic that wraps: the slice of integer operations that an address comes from is computed a second
time, in 64 bits and without wrapping, and compared where the address is used.

Only arithmetic in 32 bits counts: C++ promotes what is narrower, so that it comes from a conversion, and 64 bits do
not wrap on the way to an address. What comes out of a division, a remainder, a shift to the right, a mask or a
conversion to fewer bits is taken as it is, for that is how hashes and random numbers are made into indices.
"""

import re
from collections.abc import Callable, Iterator, Mapping

Definitions = Mapping[str, tuple[str, str]]  # by name: the operation, and the rest of the line

_RING = ("add", "sub", "mul", "shl")
_BINARY = re.compile(r"((?:\w+ )*)(i32|i64) (\S+), ([^\s,]+)")
_PHI = re.compile(r"(i32|i64|ptr) (.*)")
_INCOMING = re.compile(r"\[ (.*?), (%[\w.$-]+) \]")
_SELECT = re.compile(r"i1 (\S+), (i32|i64|ptr) ([^\s,]+), (?:i32|i64|ptr) ([^\s,]+)")
_WIDEN = re.compile(r"(?:nneg )?i32 (\S+) to i64")
_EXTREMUM = re.compile(r"(?:\w+ )*(i32|i64) @llvm\.[us](min|max)\.\w+\(\w+ (\S+), \w+ ([^\s,)]+)\)")
_STEP = re.compile(r"(?:inbounds |nuw |nusw )*(.*?), ptr (%[\w.$-]+)(.*)")
_INDEX = re.compile(r", i64 (%[\w.$-]+)")


class IndexArithmetic:
    """Of one function. `fresh` gives a new name at each call."""

    def __init__(self, definitions: Definitions, fresh: Callable[[], str]):
        self._definitions = definitions
        self._fresh = fresh
        self._exact: dict[str, str] = {}
        self._flags: dict[str, str] = {}
        self._wraps: dict[str, str | None] = {}
        self.at_entry: list[str] = []
        self.behind: dict[str, list[str]] = {}  # the lines to add behind the definition of a name

    def flag(self, pointer: str) -> tuple[str, str] | None:
        """The name of an i1 that says whether the pointer's index arithmetic wrapped, and of an operation that may."""
        culprit = self._culprit(pointer)
        return (self._flag(pointer), culprit) if culprit else None

    def _culprit(self, name: str) -> str | None:
        """A 32-bit operation that may wrap on the way to a value."""
        if name in self._wraps:
            return self._wraps[name]
        seen, pending, found = {name}, [name], None
        while pending and found is None:
            at = pending.pop()
            if self._may_wrap(at):
                found = at
            for source in self._sources(at):
                if source.startswith("%") and source not in seen:
                    seen.add(source)
                    pending.append(source)
        self._wraps[name] = found
        return found

    def _may_wrap(self, name: str) -> bool:
        operation, rest = self._definitions.get(name, ("", ""))
        match = _BINARY.match(rest) if operation in _RING else None
        return bool(match) and match[2] == "i32" and not ("nuw" in match[1] and "nsw" in match[1])

    def _sources(self, name: str) -> Iterator[str]:
        """The values that a value is computed from, if this is an operation that index arithmetic is made of."""
        operation, rest = self._definitions.get(name, ("", ""))
        if operation == "getelementptr" and (match := _STEP.match(rest)):
            yield from (match[2], *_INDEX.findall(match[3]))
        elif operation == "phi" and (match := _PHI.match(rest)):
            yield from (value for value, _ in _INCOMING.findall(match[2]))
        elif operation == "select" and (match := _SELECT.match(rest)):
            yield from (match[3], match[4])
        elif operation in ("zext", "sext") and (match := _WIDEN.match(rest)):
            yield match[1]
        elif match := self._arithmetic(operation, rest):
            yield from (match[3], match[4])

    def _arithmetic(self, operation: str, rest: str) -> re.Match | None:
        if operation in ("call", "tail"):
            return _EXTREMUM.search(rest)
        match = _BINARY.match(rest)
        is_sum = operation == "or" and match and "disjoint" in match[1]
        is_complement = operation == "xor" and match and match[4] == "-1"
        return match if operation in _RING or is_sum or is_complement else None

    def _flag(self, pointer: str) -> str:
        if self._culprit(pointer) is None:
            return "false"
        if pointer in self._flags:
            return self._flags[pointer]
        operation, rest = self._definitions[pointer]
        self._flags[pointer] = name = self._fresh()
        if operation == "phi":
            incoming = [f"[ {self._flag(p)}, {block} ]" for p, block in _INCOMING.findall(rest)]
            self._add(pointer, f"{name} = phi i1 {', '.join(incoming)}")
        elif operation == "select":
            match = _SELECT.match(rest)
            self._add(pointer, f"{name} = select i1 {match[1]}, i1 {self._flag(match[3])}, i1 {self._flag(match[4])}")
        else:
            match = _STEP.match(rest)
            sofar = self._flag(match[2])
            for index in _INDEX.findall(match[3]):
                if self._culprit(index):
                    differs, both = self._fresh(), self._fresh()
                    self._add(pointer, f"{differs} = icmp ne i64 {self._value(index, 'i64')}, {index}")
                    self._add(pointer, f"{both} = or i1 {sofar}, {differs}")
                    sofar = both
            self._add(pointer, f"{name} = or i1 {sofar}, false")
        return name

    def _value(self, name: str, kind: str) -> str:
        """The i64 that a value of type i32 or i64 would be if nothing wrapped."""
        if not name.startswith("%"):
            return name
        if name in self._exact:
            return self._exact[name]
        operation, rest = self._definitions.get(name, ("", ""))
        if operation != "phi" and self._culprit(name) is None:
            return self._as_it_is(name, kind)
        if operation in ("zext", "sext"):
            return self._value(_WIDEN.match(rest)[1], "i32")
        self._exact[name] = exact = self._fresh()
        if operation == "phi":
            incoming = [f"[ {self._value(v, kind)}, {block} ]" for v, block in _INCOMING.findall(rest)]
            self._add(name, f"{exact} = phi i64 {', '.join(incoming)}")
        elif operation == "select":
            match = _SELECT.match(rest)
            left, right = self._value(match[3], kind), self._value(match[4], kind)
            self._add(name, f"{exact} = select i1 {match[1]}, i64 {left}, i64 {right}")
        else:
            match = self._arithmetic(operation, rest)
            left, right = self._value(match[3], kind), self._value(match[4], kind)
            if operation in ("call", "tail"):
                is_left = self._fresh()
                self._add(name, f"{is_left} = icmp s{'lt' if match[2] == 'min' else 'gt'} i64 {left}, {right}")
                self._add(name, f"{exact} = select i1 {is_left}, i64 {left}, i64 {right}")
            elif operation == "xor":
                self._add(name, f"{exact} = sub i64 -1, {left}")
            else:
                self._add(name, f"{exact} = {'add' if operation == 'or' else operation} i64 {left}, {right}")
        return exact

    def _as_it_is(self, name: str, kind: str) -> str:
        """Unknown 32-bit numbers are read as signed: an offset may be negative, and no index is as large as 2^31."""
        if kind == "i64":
            return name
        self._exact[name] = exact = self._fresh()
        line = f"{exact} = sext i32 {name} to i64"
        if name in self._definitions:
            self._add(name, line)
        else:
            self.at_entry.append(f"  {line}")
        return exact

    def _add(self, name: str, line: str) -> None:
        self.behind.setdefault(name, []).append(f"  {line}")
