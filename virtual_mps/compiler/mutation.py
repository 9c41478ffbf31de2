"""Mutants of a shader: one small fault each, to see whether any test notices.

A mutant is named by what it changes, not by where: the function, the kind of fault, the words it changes, and which of
several such places in the function it is. So it is found again in every text that holds the function (a file, a string
in an extension, a metallib, with whatever headers joined to it) and however that is laid out.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .kernels import function_declarator, is_kernel
from .source import Edits, Node, Source, captures, query

VARIABLE = "VIRTUAL_MPS_MUTANT"  # in the environment: the mutant that the libraries of the process are to be


@dataclass(frozen=True)
class Mutant:
    function: str
    fault: str
    text: str  # what is changed, with single spaces
    occurrence: int = 1  # among those in the function that agree in all the rest

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def environment(self) -> str:
        """The value of the variable: the executor takes the first word, for it keeps the results apart."""
        return f"{self.digest} {json.dumps(asdict(self))}"

    def __str__(self) -> str:
        which = f" (occurrence {self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.function}: {self.fault}: {self.text}{which}"


@dataclass(frozen=True)
class Site:
    mutant: Mutant
    start: int
    end: int
    replacement: bytes


def active() -> Mutant | None:
    """The mutant that the environment asks for."""
    text = os.environ.get(VARIABLE)
    return Mutant(**json.loads(text.partition(" ")[2])) if text else None


def sites(source: Source) -> Iterator[Site]:
    """Where a source can be changed, function by function."""
    for function in captures(_FUNCTIONS, source.root).get("function", []):
        seen: dict[Mutant, int] = {}
        name = _name(source, function)
        for fault, node, replacement in _faults(source, function):
            first = Mutant(name, fault, _words(source, node))
            seen[first] = seen.get(first, 0) + 1
            mutant = Mutant(first.function, first.fault, first.text, seen[first])
            start, end = (node.start_byte, node.end_byte) if isinstance(node, Node) else node
            yield Site(mutant, start, end, replacement)


def apply(text: str, mutant: Mutant) -> str | None:
    """The text with the fault; None if it has no such place."""
    source = Source(text)
    edits = Edits(source.text)
    found = [site for site in sites(source) if site.mutant == mutant]
    for site in found:
        edits.replace(site.start, site.end, site.replacement)
    return edits.apply().decode() if found else None


def kernels_that_reach(source: Source, function: str) -> set[str]:
    """Names, without scopes, of the kernel functions that a function is or is called by.

    Calls go by name, so there may be too many. What a structure has is reached where the structure is named.
    """
    uses: dict[str, set[str]] = {}
    kernels, owners = set(), set()
    for node in captures(_FUNCTIONS, source.root).get("function", []):
        name = _plain(_name(source, node))
        uses.setdefault(name, set()).update(source.of(n).decode() for n in captures(_NAMES, node).get("name", []))
        if is_kernel(source, node):
            kernels.add(name)
        if _name(source, node) == function:
            owners |= {_plain(source.of(name).decode()) for name in _structures_around(node)}
    reached, pending = set(), {_plain(function)}
    while pending:
        current = pending.pop()
        reached.add(current)
        pending |= {name for name, words in uses.items() if current in words} - reached
    # Operators and constructors are called without their names.
    kernels = kernels if not function.rpartition("::")[2].isidentifier() else reached & kernels
    everywhere = _names_outside_of_functions(source)
    return {kernel for kernel in kernels if owners <= everywhere | _names_below(kernel, uses)}


def _names_below(function: str, uses: dict[str, set[str]]) -> set[str]:
    """All that a function names, and what it calls."""
    found, pending = set(), {function}
    while pending:
        names = uses.get(pending.pop(), set())
        pending |= names - found
        found |= names
    return found


def _names_outside_of_functions(source: Source) -> set[str]:
    """Instantiations may name a structure, and its own definition does not count."""
    names = set()
    for node in captures(_NAMES, source.root).get("name", []):
        parent = node.parent
        if parent.type in _STRUCTURES and parent.child_by_field_name("name") == node:
            continue
        while parent is not None and parent.type != "function_definition":
            parent = parent.parent
        if parent is None:
            names.add(source.of(node).decode())
    return names


def _structures_around(node: Node) -> Iterator[Node]:
    """Their names."""
    while (node := node.parent) is not None:
        if node.type in _STRUCTURES and (name := node.child_by_field_name("name")) is not None:
            yield name


_FUNCTIONS = query("(function_definition body: (compound_statement)) @function")
_NAMES = query("[(identifier) (field_identifier) (type_identifier)] @name")
_PLACES = query(
    """
    (call_expression) @call
    (binary_expression) @binary
    """
)
_SWAPPED = {b"<": b"<=", b"<=": b"<", b">": b">=", b">=": b">"}
_EXTREMES = {b"min": b"max", b"max": b"min", b"fmin": b"fmax", b"fmax": b"fmin"}
_REDUCTION = re.compile(rb"(simd|quad)_(sum|product|max|min|and|or|xor|prefix_(in|ex)clusive_(sum|product))$")
_BARRIERS = (b"threadgroup_barrier", b"simdgroup_barrier")
_STRUCTURES = ("struct_specifier", "class_specifier")
_EXITS = ("return_statement", "continue_statement", "break_statement")


def _faults(source: Source, function: Node) -> Iterator[tuple[str, Node, bytes]]:
    """Each fault with the node that it changes, in the order of the source."""
    found = captures(_PLACES, function.child_by_field_name("body"))
    nodes = [*found.get("call", []), *found.get("binary", [])]
    for node in sorted(nodes, key=lambda n: (n.start_byte, -n.end_byte)):
        yield from (_of_call if node.type == "call_expression" else _of_comparison)(source, node)


def _of_call(source: Source, call: Node) -> Iterator[tuple[str, Node, bytes]]:
    name = source.of(call.child_by_field_name("function")).rpartition(b"::")[2]
    arguments = call.child_by_field_name("arguments").named_children
    if name in _BARRIERS and call.parent.type == "expression_statement":
        yield "barrier removed", call, b"(void)0"
    elif _REDUCTION.match(name) and len(arguments) == 1:
        yield f"{name.decode()} dropped", call, b"(" + source.of(arguments[0]) + b")"
    elif name in _EXTREMES and len(arguments) == 2:
        other = _EXTREMES[name]
        swapped = source.of(call.child_by_field_name("function"))[: -len(name)] + other
        rest = source.of(call.child_by_field_name("arguments"))
        yield f"{name.decode()} -> {other.decode()}", call, swapped + rest


def _of_comparison(source: Source, node: Node) -> Iterator[tuple[str, Node, bytes]]:
    operator = node.child_by_field_name("operator")
    word = source.of(operator)
    if word not in _SWAPPED:
        return
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    other = _SWAPPED[word]
    between = source.text[left.start_byte : operator.start_byte] + other
    yield f"{word.decode()} -> {other.decode()}", node, between + source.text[operator.end_byte : right.end_byte]
    if (passing := _unchecked(node)) is not None:
        yield "bound check removed", node, passing


def _unchecked(comparison: Node) -> bytes | None:
    """What a comparison would be if nothing were out of bounds.

    None where it is no condition, and where it is a loop's only one, which would then have no end.
    """
    node, negated, conjunct = comparison, False, False
    while (parent := node.parent) is not None:
        operator = parent.child_by_field_name("operator")
        if parent.type == "unary_expression" and operator.text == b"!":
            negated = not negated
        elif parent.type == "binary_expression" and operator.text in (b"&&", b"||"):
            conjunct |= operator.text == b"&&"
        elif parent.type != "parenthesized_expression":
            break
        node = parent
    if parent is None:
        return None
    if parent.type == "condition_clause":
        statement = parent.parent
        if statement.type == "while_statement":
            return b"true" if conjunct else None
        is_upper_bound = (comparison.child_by_field_name("operator").text[:1] == b"<") != negated
        leaves = _leaves(statement.child_by_field_name("consequence"), is_upper_bound)
        return b"false" if negated != leaves else b"true"
    if parent.type in ("for_statement", "do_statement"):
        return b"true" if conjunct and parent.child_by_field_name("condition") == node else None
    if parent.type == "conditional_expression" and parent.child_by_field_name("condition") != node:
        return None
    if parent.type in ("conditional_expression", "init_declarator", "return_statement", "assignment_expression"):
        return b"false" if negated else b"true"
    return None


def _leaves(statement: Node, is_upper_bound: bool) -> bool:
    """`if (i >= n) return;`: the check is of what is to be left out, unlike in `if (i < n) return x[i];`."""
    if statement.type == "compound_statement" and statement.named_child_count == 1:
        statement = statement.named_children[0]
    if statement.type == "return_statement" and statement.named_child_count:
        return not is_upper_bound
    return statement.type in _EXITS


def _words(source: Source, node: Node) -> str:
    return " ".join(source.of(node).decode().split())


def _plain(name: str) -> str:
    return name.rpartition("::")[2].partition("<")[0]


def _name(source: Source, function: Node) -> str:
    """With its scopes, as far as they have names."""
    declarator = function_declarator(function)
    named = declarator.child_by_field_name("declarator") if declarator is not None else None
    scopes = [_words(source, named) if named is not None else "operator"]
    parent = function.parent
    while parent is not None:
        if parent.type in ("namespace_definition", *_STRUCTURES):
            name = parent.child_by_field_name("name")
            scopes.insert(0, _words(source, name) if name is not None else "(anonymous)")
        parent = parent.parent
    return "::".join(scopes)
