"""Metal to C++: the edits that make clang accept a source.

Whatever macros and templates in include/vmps can express stays as it is; this is the rest.
"""

from collections.abc import Iterator, Mapping

from .kernels import Offer
from .source import Edits, Node, Source, captures, query

_CONSTRUCTS = query(
    """
    (number_literal) @number
    (user_defined_literal) @suffixed
    (conditional_expression) @ternary
    (call_expression function: (template_function name: (identifier) @called) @function)
    (call_expression function: (identifier) @called) @call
    (call_expression function: (qualified_identifier) @called) @call
    (attribute_declaration) @attribute
    [(string_literal) (concatenated_string)] @string
    ((identifier) @string (#eq? @string "__func__"))
    (compound_statement (declaration) @local)
    (parameter_declaration) @parameter
    [(function_declarator) (abstract_function_declarator)] @function_declarator
    """
)
_SUFFIXES = {b"h": b"half", b"H": b"half", b"bf": b"bfloat", b"BF": b"bfloat"}


def rewrite(source: Source, offer: Offer, constants: Mapping[str, str]) -> Edits:
    """constants: C++ expressions for the function constants that are set."""
    edits = Edits(source.text)
    found = captures(_CONSTRUCTS, source.root)
    _unroll_pragmas(source, edits)
    _function_constants(source, offer, constants, edits, found.get("call", []))
    for node in offer.instantiations:
        edits.delete(node)
    for node in found.get("attribute", []):
        edits.delete(node)
    for node in found.get("number", []):
        _float_literal(source, node, edits)
    for node in found.get("suffixed", []):
        _suffixed_literal(source, node, edits)
    for node in found.get("string", []):
        _string(node, edits)
    for node in found.get("ternary", []):
        _ternary(node, edits)
    for node in found.get("function", []):
        name = node.child_by_field_name("name")
        if source.of(name) == b"static_cast":
            edits.replace(name.start_byte, name.end_byte, b"vmps::cast")
    for number, (node, declarators) in enumerate(_threadgroup_variables(source, found.get("local", []))):
        _threadgroup_variable(source, node, declarators, number, edits)
    for node in found.get("parameter", []):
        _array_parameter(source, node, edits)
    _member_qualifiers(source, found.get("function_declarator", []), edits)
    return edits


def _unroll_pragmas(source: Source, edits: Edits) -> None:
    """The preprocessor leaves macros in pragmas alone, so the count of `#pragma unroll(N)` may be an unknown name."""
    for start, end in source.directives:
        head, found, rest = source.text[start:end].partition(b"unroll")
        if found and head.split() == [b"#pragma"] and rest.strip():
            edits.replace(start + len(head) + len(found), end, b"")


def _function_constants(
    source: Source, offer: Offer, constants: Mapping[str, str], edits: Edits, calls: list[Node]
) -> None:
    """Each becomes a constant expression, so that what it rules out is gone before code is generated."""
    for constant in offer.function_constants.values():
        value = constants.get(constant.name, f"{constant.type}(0)")
        text = f"static constexpr {constant.type} {constant.name} = {value};"
        edits.replace(constant.node.start_byte, constant.node.end_byte, text.encode())
    for call, name in _questions(source, calls):
        edits.replace(call.start_byte, call.end_byte, b"true" if name in constants else b"false")


def constants_asked_about(source: Source) -> set[str]:
    """Function constants of which the source asks is_function_constant_defined: they need not have a value."""
    return {name for _, name in _questions(source, captures(_CONSTRUCTS, source.root).get("call", []))}


def _questions(source: Source, calls: list[Node]) -> Iterator[tuple[Node, str]]:
    for call in calls:
        if source.of(call.child_by_field_name("function")).rpartition(b"::")[2] == b"is_function_constant_defined":
            yield call, source.of(call.child_by_field_name("arguments")).decode().strip("() \n")


def _float_literal(source: Source, node: Node, edits: Edits) -> None:
    """Metal has no double: 0.5 is a float."""
    text = source.of(node).lower()
    is_float = b"p" in text if text.startswith(b"0x") else b"." in text or b"e" in text
    if is_float and not text.endswith((b"f", b"l")) and node.parent.type != "user_defined_literal":
        edits.insert(node.end_byte, b"f")


def _suffixed_literal(source: Source, node: Node, edits: Edits) -> None:
    number, suffix = node.named_children
    if kind := _SUFFIXES.get(source.of(suffix)):
        digits = source.of(number)
        point = b"" if b"." in digits or b"e" in digits.lower() else b".0"
        edits.replace(node.start_byte, node.end_byte, b"%s(%s%sf)" % (kind, digits, point))


def _string(node: Node, edits: Edits) -> None:
    """Metal's strings lie in the constant address space; what initialises an array is no more than its content."""
    parent = node.parent
    declarator = parent.child_by_field_name("declarator") if parent.type == "init_declarator" else None
    is_pointer = declarator is not None and declarator.type == "pointer_declarator"
    if is_pointer or parent.type in ("argument_list", "return_statement", "assignment_expression"):
        edits.insert(node.start_byte, b"vmps::string(")
        edits.insert(node.end_byte, b")")


def _ternary(node: Node, edits: Edits) -> None:
    """See vmps::value. Calls give values already, or nothing at all."""
    for name in ("consequence", "alternative"):
        branch = node.child_by_field_name(name)
        if branch is not None and branch.type not in ("number_literal", "null", "call_expression"):
            edits.insert(branch.start_byte, b"vmps::value(")
            edits.insert(branch.end_byte, b")")


def _threadgroup_variables(source: Source, declarations: list[Node]) -> list[tuple[Node, list[Node]]]:
    """Declarations of variables in threadgroup memory (as opposed to pointers into it), with their declarators."""
    variables = []
    for node in declarations:
        if source.address_space(node) != b"threadgroup":
            continue
        declarators = node.children_by_field_name("declarator")
        if all(_is_variable(d) for d in declarators):
            variables.append((node, declarators))
    return variables


def _is_variable(declarator: Node) -> bool:
    while declarator.type == "array_declarator":
        declarator = declarator.child_by_field_name("declarator")
    return declarator.type == "identifier"


def _threadgroup_variable(source: Source, node: Node, declarators: list[Node], number: int, edits: Edits) -> None:
    """`threadgroup float a[32], b;` becomes references: see vmps::threadgroup_variable."""
    kind, alignment, text = b"", b"", b""
    dropped = source.address_space_qualifiers(node)
    for part in node.children[: node.children.index(declarators[0])]:
        if (wanted := _alignment(source, part)) is not None:
            alignment = b", " + wanted
        elif part not in dropped and part.type != "attribute_declaration":
            kind += source.of(part) + b" "
    for i, declarator in enumerate(declarators):
        name = declarator
        while name.type == "array_declarator":
            name = name.child_by_field_name("declarator")
        extents = source.text[name.end_byte : declarator.end_byte]
        alias, identity = b"vmps_type_%d_%d" % (number, i), number << 8 | i
        place = b'vmps::threadgroup_variable<%d, "%s", %s%s>' % (identity, source.of(name), alias, alignment)
        text += b"using %s = %s%s; threadgroup %s& %s = %s::get(); " % (
            alias, kind, extents, alias, source.of(name), place
        )  # fmt: skip
    edits.replace(node.start_byte, node.end_byte, text)


def _alignment(source: Source, qualifier: Node) -> bytes | None:
    """The number of bytes that alignas(...) asks for, as an expression."""
    if qualifier.named_child_count == 0 or qualifier.named_children[0].type != "alignas_qualifier":
        return None
    argument = qualifier.named_children[0].named_children[0]
    return (b"alignof(%s)" if argument.type == "type_descriptor" else b"%s") % source.of(argument)


def _array_parameter(source: Source, node: Node, edits: Edits) -> None:
    """`threadgroup T a[8]` becomes the pointer it is: clang wants no address space on an array parameter."""
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "array_declarator" or source.address_space(node) in (None, b"thread"):
        return
    outer = declarator
    inner = outer.child_by_field_name("declarator")
    while inner.type == "array_declarator":
        outer, inner = inner, inner.child_by_field_name("declarator")
    nested = outer is not declarator
    edits.insert(inner.start_byte, b"(*" if nested else b"* ")
    edits.replace(inner.end_byte, outer.end_byte, b")" if nested else b"")


def _member_qualifiers(source: Source, declarators: list[Node], edits: Edits) -> None:
    """An unqualified member serves objects in any space, so the address space after its parameters goes, and of members
    that differ only in it one stays."""
    seen: set[tuple[int, bytes]] = set()
    for declarator in declarators:
        member = _member(declarator)
        if member is None:
            continue
        for space in source.address_space_qualifiers(declarator):
            edits.replace(space.start_byte, source.end_of_word(space), b"")
        key = _signature(source, member, declarator)
        if key in seen:
            edits.delete(member)
        seen.add(key)


def member_spaces(source: Source) -> dict[int, frozenset[bytes]]:
    """Offset of a member function's name -> the address spaces of the objects that it, or another of its class with its
    name, is written for."""
    spaces: dict[tuple[int, bytes], set[bytes]] = {}
    names: dict[int, tuple[int, bytes]] = {}
    for declarator in captures(_CONSTRUCTS, source.root).get("function_declarator", []):
        member = _member(declarator)
        if member is None:
            continue
        start, end = _name_extent(source, declarator)
        key = names[start] = (member.parent.id, source.text[start:end].strip())
        spaces.setdefault(key, set()).add(source.address_space(declarator) or b"thread")
    return {offset: frozenset(spaces[key]) for offset, key in names.items()}


def _name_extent(source: Source, declarator: Node) -> tuple[int, int]:
    """Conversion operators have the name of their type, and behind attributes the parser takes `operator` for one."""
    name = declarator.child_by_field_name("declarator")
    if name is None:
        return declarator.parent.start_byte, declarator.start_byte
    kind = declarator.parent.child_by_field_name("type")
    is_operator = kind is not None and source.of(kind) == b"operator"
    return (kind if is_operator else name).start_byte, name.end_byte


def _signature(source: Source, member: Node, declarator: Node) -> tuple[int, bytes]:
    """What tells a member function from others of its class, but for the address space of its object."""
    text, at = b"", member.start_byte
    for space in source.address_space_qualifiers(declarator):
        text += source.text[at : space.start_byte]
        at = source.end_of_word(space)
    return member.parent.id, b"".join((text + source.text[at : declarator.end_byte]).split())


def _member(declarator: Node) -> Node | None:
    """The declaration, with its template header, of the member function that this declares, if it does."""
    node = declarator
    while node.parent is not None and node.parent.type not in ("compound_statement", "parameter_list"):
        if node.parent.type == "field_declaration_list":
            return node
        node = node.parent
    return None
