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
DEEPEST = 20_000  # levels of a syntax tree: clang allows 256 brackets, but a sum of many terms is deep as well

# clang compiles as C++20 and warns of what is newer than C++14. Some of that it refuses in C++14; of the rest it warns
# there and goes on, and so does Apple's compiler, which MLX's kernels count on.
_REFUSED_IN_CPLUSPLUS_14 = (
    "class template argument deduction",
    "non-type template parameter of type",
)
_WARNING = re.compile(
    r"^(?P<place>.*): warning: (?P<what>.*) (?:is|are) incompatible with C\+\+ standards before (?P<since>C\+\+\d\d)"
)


def check_source(
    source: Source, offer: kernels.Offer, language: int = 0, instantiate: bool = False, werror: bool = False
) -> list[str]:
    """Reads a source as Apple's compiler does, and gives its warnings.

    language: 310 for Metal 3.1, 0 for the newest. instantiate: read each kernel that a template becomes as well.
    werror: warnings are errors, as under -Werror.

    Raises:
        CompileError: what is wrong, as the compiler's messages.
    """
    language = language or NEWEST_LANGUAGE
    told = [_message(source, finding) for finding in _of_syntax(source, language)]
    entry = "".join(f"static auto vmps_{i} = {k.expression};\n" for i, k in enumerate(offer.kernels.values()))
    try:
        findings, warnings, _ = _read(source, offer, {}, entry if instantiate else "", language)
    except CompileError as error:
        raise CompileError("\n".join([*told[:SHOWN], str(error)])) from None
    told += findings
    if werror:
        told += (line.replace(": warning: ", ": error: ", 1) for line in warnings)
    _raise(told)
    return warnings


def check_kernel(
    source: Source, offer: kernels.Offer, literals: Mapping[str, str], entry: str, language: int = 0
) -> None:
    """Reads what a kernel instantiates, and that the function constants it reads have values.

    literals: the function constants that are set. entry: code that refers to the kernel.

    Raises:
        CompileError: as check_source.
    """
    findings, _, tree = _read(source, offer, literals, entry, language or NEWEST_LANGUAGE)
    _raise([*findings, *_missing_constants(source, offer, literals, tree)])


def _read(
    source: Source, offer: kernels.Offer, literals: Mapping[str, str], entry: str, language: int
) -> tuple[list[str], list[str], strict_ast.Tree]:
    """Errors, warnings, and the tree."""
    edits = rewrite(source, offer, literals)
    text = edits.apply()
    errors, lines, root = _clang(text.decode() + f'\n# 1 "{ENTRY}"\n{entry}\n')
    told, warnings = _newer_cplusplus(lines) if language < FIRST_WITH_CPLUSPLUS_17 else ([], [])
    if errors:
        raise CompileError("\n".join([*told[:SHOWN], errors]))
    spaces, kernel_names = member_spaces(source), strict_syntax.kernel_names(source)
    origin = edits.origins()
    tree = strict_ast.read(
        root,
        len(text),
        lambda offset: spaces.get(origin(offset), frozenset()),
        lambda offset: origin(offset) in kernel_names,
        offer.function_constants,
    )
    return [*told, *(_message(source, f, origin(f.offset)) for f in tree.findings)], warnings, tree


def _raise(told: list[str]) -> None:
    """An instantiation repeats what its template has."""
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


def _newer_cplusplus(lines: list[str]) -> tuple[list[str], list[str]]:
    """Errors and warnings about what is newer than C++14."""
    errors, warnings = [], []
    for line in lines:
        warning = _WARNING.match(line)
        if not warning or warning["place"].startswith(str(toolchain.HEADERS)) or "vmps::" in warning["what"]:
            continue  # of our headers, or of what rewrite.py wrote
        what, since = warning["what"], warning["since"]
        if any(refused in what for refused in _REFUSED_IN_CPLUSPLUS_14):
            errors.append(f"{warning['place']}: error: {what}: {since}, and Metal 3 is C++14")
        else:
            flag = f"-W{since.lower()}-extensions"
            warnings.append(f"{warning['place']}: warning: {what}: a {since} extension, and Metal 3 is C++14 [{flag}]")
    return errors, list(dict.fromkeys(warnings))


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
