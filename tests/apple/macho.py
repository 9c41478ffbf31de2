"""Objective-C protocols in a library that Apple's tools made, with the type encodings that Apple's clang gave them.

The layout is that of the Objective-C runtime's `protocol_t` and `method_list_t` (objc4, objc-runtime-new.h).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

_FAT, _ARM64 = 0xCAFEBABE, 0x0100000C
_SEGMENT_64 = 0x19
# A pointer in a file is a fixup for the loader; its low bits are the address. Apple's chained fixups leave it 36.
_ADDRESS = (1 << 36) - 1
_RELATIVE_METHODS = 1 << 31


@dataclass
class Protocol:
    name: str
    adopts: list[str] = field(default_factory=list)
    methods: dict[tuple[str, str], str] = field(default_factory=dict)  # ("-" or "+", selector) -> encoding


def protocols(library: Path) -> dict[str, Protocol]:
    return _Image(library.read_bytes()).protocols()


def selector_names(library: Path) -> set[str]:
    """Every selector that the code of a library sends or defines."""
    return _Image(library.read_bytes()).strings("__objc_methname")


class _Image:
    def __init__(self, data: bytes):
        if struct.unpack_from(">I", data)[0] == _FAT:
            data = _slice(data)
        self.data = data
        self.segments: list[tuple[int, int, int]] = []  # address, size, offset in the file
        self.sections: dict[str, tuple[int, int]] = {}  # name -> address, size
        (commands,) = struct.unpack_from("<I", data, 16)
        at = 32
        for _ in range(commands):
            command, size = struct.unpack_from("<II", data, at)
            if command == _SEGMENT_64:
                address, length, offset = struct.unpack_from("<QQQ", data, at + 24)
                self.segments.append((address, length, offset))
                (count,) = struct.unpack_from("<I", data, at + 64)
                for section in range(at + 72, at + 72 + 80 * count, 80):
                    name, _, address, length = struct.unpack_from("<16s16sQQ", data, section)
                    self.sections[name.rstrip(b"\0").decode()] = (address, length)
            at += size

    def offset(self, address: int) -> int:
        for start, length, offset in self.segments:
            if start <= address < start + length:
                return address - start + offset
        raise ValueError(f"no segment holds the address {address:#x}")

    def pointer(self, address: int) -> int:
        return struct.unpack_from("<Q", self.data, self.offset(address))[0] & _ADDRESS

    def string(self, address: int) -> str:
        start = self.offset(address)
        return self.data[start : self.data.index(b"\0", start)].decode()

    def strings(self, section: str) -> set[str]:
        if section not in self.sections:
            return set()
        address, length = self.sections[section]
        start = self.offset(address)
        return {text.decode() for text in self.data[start : start + length].split(b"\0") if text}

    def protocols(self) -> dict[str, Protocol]:
        address, length = self.sections["__objc_protolist"]
        found = (self.protocol(self.pointer(at)) for at in range(address, address + length, 8))
        return {protocol.name: protocol for protocol in found}

    def protocol(self, at: int) -> Protocol:
        protocol = Protocol(self.string(self.pointer(at + 8)))
        if adopted := self.pointer(at + 16):
            count = self.pointer(adopted)
            protocol.adopts = [
                self.string(self.pointer(self.pointer(adopted + 8 * i) + 8)) for i in range(1, count + 1)
            ]
        # Required and optional ones, of instances and of the class.
        for place, kind in ((24, "-"), (32, "+"), (40, "-"), (48, "+")):
            for selector, encoding in self.methods(self.pointer(at + place)):
                protocol.methods[kind, selector] = encoding
        return protocol

    def methods(self, at: int) -> list[tuple[str, str]]:
        if not at:
            return []
        size, count = struct.unpack_from("<II", self.data, self.offset(at))
        found = []
        for i in range(count):
            if size & _RELATIVE_METHODS:
                entry = at + 8 + 12 * i
                name, types = struct.unpack_from("<ii", self.data, self.offset(entry))
                found.append((self.string(self.pointer(entry + name)), self.string(entry + 4 + types)))
            else:
                entry = at + 8 + 24 * i
                found.append((self.string(self.pointer(entry)), self.string(self.pointer(entry + 8))))
        return found


def _slice(data: bytes) -> bytes:
    """The part of a universal file that is for Apple's processors."""
    (count,) = struct.unpack_from(">I", data, 4)
    for i in range(count):
        processor, _, offset, size, _ = struct.unpack_from(">5I", data, 8 + 20 * i)
        if processor == _ARM64:
            return data[offset : offset + size]
    raise ValueError("a universal file without a part for arm64")
