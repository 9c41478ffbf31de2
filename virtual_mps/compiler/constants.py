"""Values of function constants: from the host's bytes to C++."""

import math
import struct

from .kernels import FunctionConstant
from .toolchain import CompileError

_FORMATS = {
    "bool": "?",
    "char": "b",
    "int8_t": "b",
    "uchar": "B",
    "uint8_t": "B",
    "short": "h",
    "int16_t": "h",
    "ushort": "H",
    "uint16_t": "H",
    "int": "i",
    "int32_t": "i",
    "uint": "I",
    "uint32_t": "I",
    "long": "q",
    "int64_t": "q",
    "ulong": "Q",
    "uint64_t": "Q",
    "size_t": "Q",
    "half": "e",
    "float": "f",
}


def literal(constant: FunctionConstant, value: bytes) -> str:
    """A C++ expression of the constant's type."""
    name = constant.type.removeprefix("metal::")
    scalar, count = (name[:-1], int(name[-1])) if name[-1] in "234" and name[:-1] in _scalars() else (name, 1)
    if scalar not in _scalars():
        raise CompileError(f"virtual_mps: function constant '{constant.name}' has the unknown type '{constant.type}'")
    width = 2 if scalar == "bfloat" else struct.calcsize(_FORMATS[scalar])
    if len(value) < width * count:
        raise CompileError(
            f"virtual_mps: function constant '{constant.name}' is a {constant.type} of {width * count} bytes,"
            f" {len(value)} were given"
        )
    parts = [_scalar(scalar, value[i * width : (i + 1) * width]) for i in range(count)]
    return f"{name}({', '.join(parts)})"


def _scalars() -> set[str]:
    return {*_FORMATS, "bfloat"}


def _scalar(name: str, value: bytes) -> str:
    if name == "bfloat":
        number = struct.unpack("<f", b"\0\0" + value)[0]
    else:
        number = struct.unpack("<" + _FORMATS[name], value)[0]
    if isinstance(number, bool):
        return "true" if number else "false"
    if isinstance(number, int):
        # The most negative value has no literal of its own type.
        return f"({number + 1} - 1)" if number < 0 else f"{number}u" if number > 0x7FFFFFFF else str(number)
    if math.isnan(number):
        return f'{name}(__builtin_nanf(""))'
    if math.isinf(number):
        return f"{name}({'-' if number < 0 else ''}__builtin_inff())"
    return f"{name}({number.hex()}f)"
