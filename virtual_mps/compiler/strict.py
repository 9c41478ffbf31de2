"""A second reading of a source, for what Apple's compiler refuses and clang's SYCL mode lets pass.

strict_syntax  what the grammar decides: words and constructs that Metal lacks, address spaces that are not named
strict_kernels what a kernel may look like: its result, the types and places of its parameters
strict_ast     what types decide: implicit conversions, calls of member functions, recursion
here           one run of clang that gives its own errors, its warnings about newer C++, and its syntax tree
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping

from . import kernels, runtime, strict_ast, strict_kernels, strict_syntax, toolchain
from .messages import ENTRY, metal_words, readable
from .preprocess import NEWEST_LANGUAGE
from .rewrite import constants_asked_about, member_spaces, rewrite
from .source import Source
from .strict_syntax import FIRST_WITH_CPLUSPLUS_17, Finding
from .toolchain import CompileError

SHOWN = 8  # findings, as many as clang's errors
DEEPEST = 20_000  # levels of a syntax tree: clang's own limit is 256 brackets, but a sum of many terms is deep as well

# Of clang's warnings about what came after C++14: what it refuses in C++14. The rest it warns of there, as Apple's does.
_REFUSED_IN_CPLUSPLUS_14 = (
    "class template argument deduction",
    "from a parenthesized list of values",
    "non-type template parameter of type",
)
_WARNING = re.compile(
    r"^(?P<place>.*): warning: (?P<what>.*) (?:is|are) incompatible with C\+\+ standards before (?P<since>C\+\+\d\d)"
)


def check(
    source: Source,
    offer: kernels.Offer,
    literals: Mapping[str, str],
    entry: str = "",
    language: int = 0,
    extensions: bool = True,
) -> None:
    """Reads a source as Apple's compiler does, with the instantiations that an entry asks for.

    literals: the function constants that are set. language: 310 for Metal 3.1, 0 for the newest. extensions: accept
    what is newer than C++14 where Apple's compiler warns of it and goes on.

    Raises:
        CompileError: the findings, as the compiler's messages.
    """
    language = language or NEWEST_LANGUAGE
    told = [] if entry else [_message(source, f) for f in _of_syntax(source, language)]
    edits = rewrite(source, offer, literals)
    text = edits.apply()
    errors, warnings, tree = _clang(text.decode() + f'\n# 1 "{ENTRY}"\n{entry}\n')
    if language < FIRST_WITH_CPLUSPLUS_17:
        told += _newer_cplusplus(warnings, extensions)
    if errors:
        raise CompileError("\n".join([*told[:SHOWN], errors]))
    spaces, kernel_names = member_spaces(source), strict_syntax.kernel_names(source)
    origin = edits.origins()
    tree = strict_ast.read(
        tree,
        len(text),
        lambda offset: spaces.get(origin(offset), frozenset()),
        lambda offset: origin(offset) in kernel_names,
        offer.function_constants,
    )
    told += (_message(source, f, origin(f.offset)) for f in tree.findings)
    if entry:
        told += _missing_constants(source, offer, literals, tree)
    if told:
        raise CompileError("\n".join(list(dict.fromkeys(told))[:SHOWN]))


def _of_syntax(source: Source, language: int) -> Iterator[Finding]:
    yield from strict_syntax.findings(source, language)
    yield from strict_kernels.findings(source)


def _message(source: Source, finding: Finding, offset: int | None = None) -> str:
    place = source.location(finding.offset if offset is None else offset)
    note = f"\n{place}: note: {finding.note}" if finding.note else ""
    return f"{place}: error: {metal_words(finding.error)}{note}"


def _clang(code: str) -> tuple[str, list[str], dict]:
    """Errors, warnings, and the syntax tree if there are no errors."""
    command = [
        *(toolchain.clang(), *toolchain.read_flags(), "-include-pch", str(runtime.build_headers())),
        *("-Wno-everything", "-Wpre-c++17-compat", "-Wpre-c++20-compat", "-ferror-limit=8", "-fno-caret-diagnostics"),
        *("-fsyntax-only", "-Xclang", "-ast-dump=json", "-"),
    ]
    result = toolchain.run(command, input=code)
    lines = result.stderr.splitlines()
    warnings = [line for line in lines if ": warning: " in line]
    if result.returncode:
        return readable("\n".join(line for line in lines if ": warning: " not in line)), warnings, {}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST))
    try:
        return "", warnings, json.loads(result.stdout)
    finally:
        sys.setrecursionlimit(limit)


def _newer_cplusplus(warnings: list[str], extensions: bool) -> Iterator[str]:
    for line in warnings:
        warning = _WARNING.match(line)
        if not warning or warning["place"].startswith(str(toolchain.HEADERS)):
            continue
        if not extensions or any(what in warning["what"] for what in _REFUSED_IN_CPLUSPLUS_14):
            yield f"{warning['place']}: error: {warning['what']}: {warning['since']}, and Metal 3 is C++14"


def _missing_constants(
    source: Source, offer: kernels.Offer, literals: Mapping[str, str], tree: strict_ast.Tree
) -> Iterator[str]:
    """Function constants that the kernel reads, though they have no value and it does not ask whether they have."""
    read = {name for symbol in tree.used_by_entry() for name in symbol.constants}
    for constant in offer.function_constants.values():
        if constant.name in read - literals.keys() - constants_asked_about(source):
            yield (
                f"{source.location(constant.node.start_byte)}: error: function constant '{constant.name}' at index"
                f" {constant.index} has no value\n{source.location(constant.node.start_byte)}: note: the host gives it"
                " one with MTLFunctionConstantValues, or the source asks is_function_constant_defined first"
            )
