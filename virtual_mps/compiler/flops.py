"""Writes counts of floating-point operations into a kernel's LLVM IR, before anything is optimised.

What is counted is what the source says and a thread executes, whatever an optimiser would share, drop, or carry out on
another path too. An addition, subtraction, multiplication or division is 1, a fused multiply-add 2; each element of a
vector counts, and a function of the Metal library is worth what COSTS says, however it is computed here. Comparisons,
minima, negations, roundings and conversions are free. At this stage arithmetic in half and bfloat is one instruction,
as in float; its rounding comes later.

The IR comes from clang with `-Xclang -disable-llvm-passes`: functions are apart, so their names tell the library's own
from the source's, and a block is executed as a whole or not at all.
"""

import re
from collections.abc import Iterator

# The worth of a call, where it is not that of the arithmetic in the function's body (dot, mix, length and their like).
COSTS = dict.fromkeys(
    "acos acosh asin asinh atan atan2 atanh cos cosh cospi divide exp exp10 exp2 fdim fmod fract log log10 log2 pow "
    "powr rsqrt sin sinh sinpi sqrt tan tanh tanpi".split(),
    1,
)

_DEFINE = re.compile(r"define .*?@(?:\"([^\"]+)\"|([\w.$]+))\(")
_LABEL = re.compile(r"(?:\"[^\"]+\"|[\w.$-]+):")
_ARITHMETIC = re.compile(
    r" = f(?:add|sub|mul|div|rem) (?:(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc) )*"
    r"(?:<(\d+) x )?(?:half|bfloat|float)\b"
)
_FUSED = re.compile(r"@llvm\.(?:fma|fmuladd)\.(?:v(\d+))?b?f\d+\(")
_ELEMENTWISE = re.compile(r"_ZN5metal(?:4fast|7precise)?(\d+)(\w+)Ef+$")
_ATOMIC_SUM = re.compile(r"_ZN5metal25atomic_fetch_(?:add|sub)_explicitI(?:Tk\w+E)?f")
_UNCOUNTED = re.compile(r"_ZN4vmps(?:5fract|5sinpi|5cospi)Ef$")

# It touches no memory that the kernel can see, so the kernel's own accesses are optimised as they are without it. The
# calls are not to be merged: each keeps its constant.
_DECLARATION = "declare void @vmps_flops(i64) nounwind willreturn memory(inaccessiblemem: readwrite)"
_MARK = re.compile(r"\s+(?:tail )?call void @vmps_flops\(i64 (\d+)\)")


def mark(ir: str) -> str:
    """The module with a mark in each block that has floating-point operations."""
    return "\n".join((*_with_marks(ir.splitlines()), _DECLARATION, ""))


def marked(line: str) -> int | None:
    """The operations that a mark stands for; None for any other instruction."""
    found = _MARK.match(line)
    return found and int(found[1])


def _with_marks(lines: list[str]) -> Iterator[str]:
    function, block = None, []
    for line in lines:
        if function is None:
            yield line
            if define := _DEFINE.match(line):
                function, entry = define[1] or define[2], True
        elif line == "}" or _LABEL.match(line):
            yield from _counted(block, function, entry)
            yield line
            entry, block = entry and not block, []
            if line == "}":
                function = None
        else:
            block.append(line)


def _counted(block: list[str], function: str, entry: bool) -> Iterator[str]:
    if flops := _flops(block, function, entry):
        phis = 0
        while " = phi " in block[phis]:
            phis += 1
        yield from block[:phis]
        yield f"  call void @vmps_flops(i64 {flops}) nomerge"
        block = block[phis:]
    yield from block


def _flops(block: list[str], function: str, entry: bool) -> int:
    named = _ELEMENTWISE.match(function)
    if named and (cost := COSTS.get(named[2][: int(named[1])])) is not None:
        return cost if entry else 0
    if _ATOMIC_SUM.match(function):
        return int(entry)
    if _UNCOUNTED.match(function):
        return 0
    flops = 0
    for line in block:
        if found := _ARITHMETIC.search(line):
            flops += int(found[1] or 1)
        elif found := _FUSED.search(line):
            flops += 2 * int(found[1] or 1)
    return flops
