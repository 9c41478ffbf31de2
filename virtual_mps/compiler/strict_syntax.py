"""What Metal's grammar lacks of C++, and what clang's SYCL mode does not look at: the rules that a syntax tree decides.

The words are those of Apple's compiler where they are known. Each rule is a function from a source to its findings.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .kernels import function_declarator, is_kernel
from .source import Node, Source, captures, query

FIRST_WITH_LAMBDAS = 320
FIRST_WITH_CPLUSPLUS_17 = 400


@dataclass(frozen=True)
class Finding:
    offset: int  # in the source
    error: str
    note: str = ""  # what Metal accepts instead


def findings(source: Source, language: int) -> Iterator[Finding]:
    """language: 310 for Metal 3.1, and so on."""
    found = captures(_CONSTRUCTS, source.root)
    for rule in RULES:
        yield from rule(source, found)
    if language < FIRST_WITH_LAMBDAS:
        yield from _lambdas(source, found)
    if language < FIRST_WITH_CPLUSPLUS_17:
        yield from _cplusplus_17(source, found)


_CONSTRUCTS = query(
    """
    (lambda_expression) @lambda
    (concept_definition) @concept
    (requires_clause) @concept
    (requires_expression) @concept
    (goto_statement) @goto
    (labeled_statement) @label
    (try_statement) @try
    (throw_statement) @throw
    (new_expression) @new
    (delete_expression) @delete
    (gnu_asm_expression) @asm
    "virtual" @virtual
    (primitive_type) @type
    (sized_type_specifier) @type
    (type_identifier) @name
    (number_literal) @number
    (storage_class_specifier) @storage
    (call_expression function: (template_function name: (identifier) @called))
    (call_expression function: (identifier) @called)
    (function_definition) @function
    (declaration) @declaration
    (field_declaration) @field
    (parameter_declaration) @parameter
    (optional_parameter_declaration) @parameter
    [(pointer_declarator) (abstract_pointer_declarator)
     (reference_declarator) (abstract_reference_declarator)] @indirection
    (type_definition) @alias
    (alias_declaration) @alias
    """
)

Captures = dict[str, list[Node]]

# Capture -> what to say of it.
_NEVER = {
    "goto": ("'goto' is not supported in Metal", ""),
    "label": ("labeled statements are not supported in Metal", ""),
    "try": ("'try' is not supported in Metal", "Metal has no exceptions"),
    "throw": ("'throw' is not supported in Metal", "Metal has no exceptions"),
    "new": ("'new' is not supported in Metal", "memory comes with the kernel's arguments"),
    "delete": ("'delete' is not supported in Metal", "memory comes with the kernel's arguments"),
    "asm": ("illegal asm statement", ""),
    "virtual": ("virtual functions are not supported in Metal", "templates choose a function when compiled"),
}
_CALLED = {
    b"typeid": "'typeid' is not supported in Metal",
    b"dynamic_cast": "'dynamic_cast' is not supported in Metal",
}
_STORAGE = {
    b"register": "Metal does not support the 'register' storage class specifier",
    b"thread_local": "'thread_local' is not supported in Metal",
}


def _unsupported(source: Source, found: Captures) -> Iterator[Finding]:
    for name, (error, note) in _NEVER.items():
        for node in found.get(name, []):
            yield Finding(node.start_byte, error, note)
    for name, words in (("called", _CALLED), ("storage", _STORAGE)):
        for node in found.get(name, []):
            if error := words.get(source.of(node)):
                yield Finding(node.start_byte, error)


_DOUBLE_VECTOR = re.compile(rb"(packed_)?double[234](x[234])?")


def _types(source: Source, found: Captures) -> Iterator[Finding]:
    for node in found.get("type", []):
        words = source.of(node).split()
        if node.parent.type == "sized_type_specifier":
            continue  # its parent is a capture too
        if b"double" in words or words.count(b"long") > 1:
            name = b" ".join(words).decode()
            wide = "'float' is the widest" if b"double" in words else "'long' has 64 bits"
            yield Finding(node.start_byte, f"'{name}' is not supported in Metal", wide)
    for node in found.get("name", []):
        if _DOUBLE_VECTOR.fullmatch(source.of(node)):
            yield Finding(
                node.start_byte, f"'{source.of(node).decode()}' is not supported in Metal", "'float' is the widest"
            )
    for node in found.get("number", []):
        text = source.of(node).lower()
        if text.endswith(b"l") and not text.startswith(b"0x") and (b"." in text or b"e" in text):
            yield Finding(node.start_byte, "'long double' is not supported in Metal", "drop the suffix of the literal")


def _lambdas(source: Source, found: Captures) -> Iterator[Finding]:
    for node in found.get("lambda", []):
        yield Finding(
            node.start_byte, "lambda expressions are not supported in Metal", "they are from Metal 3.2 on, on macOS 15"
        )


def _cplusplus_17(source: Source, found: Captures) -> Iterator[Finding]:
    """What clang refuses in C++14, of which it says nothing in C++20."""
    for node in found.get("concept", []):
        yield Finding(
            node.start_byte, "concepts are C++20, Metal 3 is C++14", "metal::enable_if_t restricts a template"
        )
    for node in found.get("parameter", []):
        kind = node.child_by_field_name("type")
        if kind and kind.type == "placeholder_type_specifier" and not _within(node, "lambda_expression"):
            is_template = node.parent.type == "template_parameter_list"
            where = "template parameter" if is_template else "function prototype"
            yield Finding(kind.start_byte, f"'auto' not allowed in {where}", "name a type, or a template parameter")


# ---- address spaces -------------------------------------------------------------------------------------------------
_SPACES = "device, constant, threadgroup and thread are the address spaces"


def _address_spaces(source: Source, found: Captures) -> Iterator[Finding]:
    """A pointer or reference names the address space of what it points to; one to a pointer need not."""
    aliases = _qualified_aliases(source, found.get("alias", []))
    for node in found.get("indirection", []):
        kind = "reference" if "reference" in node.type else "pointer"
        if kind == "reference" and source.text.startswith(b"&&", node.start_byte):
            continue
        owner = _owner(node)
        if owner is None or source.names_address_space(owner.start_byte, node.start_byte):
            continue
        if not _may_have_space(source, owner, aliases):
            yield Finding(node.start_byte, f"{kind} type must have explicit address space qualifier", _SPACES)


_OWNERS = {
    "parameter_declaration",
    "optional_parameter_declaration",
    "declaration",
    "field_declaration",
    "function_definition",
    "type_definition",
    "type_descriptor",
}


def _owner(node: Node) -> Node | None:
    """The declaration, or type, that a pointer or reference is the first in; None if it is not a first one."""
    child, parent = node, node.parent
    while parent is not None:
        if parent.type in ("pointer_declarator", "abstract_pointer_declarator"):
            return None
        if parent.type.endswith("function_declarator") and parent.child_by_field_name("declarator") == child:
            return None  # a pointer to a function
        if parent.type == "type_descriptor":
            return parent if _is_of_cast_or_alias(parent) else None
        if parent.type in _OWNERS:
            return None if _is_expression(parent) else parent
        if not parent.type.endswith("declarator"):
            return None
        child, parent = parent, parent.parent
    return None


def _is_expression(owner: Node) -> bool:
    """`if (a * b < c)` and `short2 v(a * b, c)` are products, which the parser takes for declarations."""
    if owner.type == "declaration":
        return owner.parent.type in ("condition_clause", "init_statement")
    if owner.type == "parameter_declaration":
        function = owner.parent.parent
        while function is not None and function.type.endswith("declarator"):
            function = function.parent
        return function is not None and function.type == "declaration" and _scope(function) is not None
    return False


_CASTS = (b"static_cast", b"reinterpret_cast", b"const_cast")


def _is_of_cast_or_alias(descriptor: Node) -> bool:
    parent = descriptor.parent
    if parent.type == "template_argument_list":
        name = parent.parent.child_by_field_name("name")
        return name is not None and name.text in _CASTS
    return parent.type in ("cast_expression", "alias_declaration")


def _may_have_space(source: Source, owner: Node, aliases: set[bytes]) -> bool:
    """Whether the type may bring its own address space: deduced, dependent, or an alias of one that has it."""
    kind = owner.child_by_field_name("type")
    if kind is None:
        return True  # a conversion operator, a constructor
    if kind.type in ("placeholder_type_specifier", "decltype", "dependent_type"):
        return True
    if kind.type == "qualified_identifier" and source.of(kind).split(b"::")[0] not in (b"metal", b""):
        return True  # a member of another type, perhaps
    return source.of(kind) in aliases


def _qualified_aliases(source: Source, nodes: list[Node]) -> set[bytes]:
    """Names of types whose definition names an address space."""
    names = set()
    for node in nodes:
        described = node.child_by_field_name("type") if node.type == "alias_declaration" else node
        if source.address_space(described) is not None:
            names.update(source.of(n) for n in _declared_types(node))
    return names


def _declared_types(node: Node) -> Iterator[Node]:
    if node.type == "alias_declaration":
        yield node.child_by_field_name("name")
        return
    for declarator in node.children_by_field_name("declarator"):
        if declarator.type == "type_identifier":
            yield declarator


# ---- variables ------------------------------------------------------------------------------------------------------
_CONSTANTS = "constants are declared 'constant', and threadgroup memory in the kernel"


def _variables(source: Source, found: Captures) -> Iterator[Finding]:
    for node in found.get("declaration", []):
        names = list(_variable_names(node))
        if not names:
            continue
        scope = _scope(node)
        words = {source.of(c) for c in node.children if c.type == "storage_class_specifier"}
        space = source.address_space(node)
        if scope is None:
            if space != b"constant":
                kind = "extern" if b"extern" in words else "program scope"
                error = f"{kind} variable must reside in constant address space"
                yield Finding(names[0].start_byte, error, _CONSTANTS)
            continue
        if b"static" in words and space != b"constant":
            yield Finding(names[0].start_byte, "variables in function scope cannot be declared static")
        elif space == b"device" or (space == b"threadgroup" and not is_kernel(source, scope)):
            yield Finding(
                names[0].start_byte,
                f"automatic variable qualified with the {space.decode()} address space",
                "threadgroup memory is declared in the kernel, which passes a pointer to it",
            )
    for node in found.get("field", []):
        space = source.address_space(node)
        if space != b"constant" and any(source.of(c) == b"static" for c in node.children):
            for name in _variable_names(node):
                yield Finding(
                    name.start_byte, "program scope variable must reside in constant address space", _CONSTANTS
                )
        if space in (b"device", b"threadgroup", b"thread"):
            for name in _variable_names(node):
                yield Finding(name.start_byte, f"field may not be qualified with the {space.decode()} address space")


def _variable_names(declaration: Node) -> Iterator[Node]:
    """The names of the variables it declares that are no pointers, references or functions."""
    for declarator in declaration.children_by_field_name("declarator"):
        while declarator is not None and declarator.type in ("init_declarator", "array_declarator"):
            declarator = declarator.child_by_field_name("declarator")
        if declarator is not None and declarator.type in ("identifier", "field_identifier"):
            yield declarator


def _scope(node: Node) -> Node | None:
    """The function, or lambda, that a declaration stands in."""
    parent = node.parent
    while parent is not None and parent.type not in ("function_definition", "lambda_expression"):
        parent = parent.parent
    return parent


def kernel_names(source: Source) -> frozenset[int]:
    """Offsets of the names of kernel functions."""
    names = set()
    for node in captures(_CONSTRUCTS, source.root).get("function", []):
        if is_kernel(source, node) and (declarator := function_declarator(node)):
            names.add(declarator.child_by_field_name("declarator").start_byte)
    return frozenset(names)


def _within(node: Node, kind: str) -> bool:
    parent = node.parent
    while parent is not None and parent.type != kind:
        parent = parent.parent
    return parent is not None


RULES: tuple[Callable[[Source, Captures], Iterator[Finding]], ...] = (
    _unsupported,
    _types,
    _address_spaces,
    _variables,
)
