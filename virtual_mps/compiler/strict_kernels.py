"""What Metal asks of a kernel's declaration."""

from collections.abc import Iterator

from .kernels import BUILTINS, function_declarator, is_kernel
from .source import Node, Source, captures, query
from .strict_syntax import Finding

_FUNCTIONS = query("(function_definition) @function")

_INDICES = {name for name in BUILTINS if "_index_in_" in name or name.endswith(("_per_simdgroup", "execution_width"))}
_INDICES |= {name for name in BUILTINS if name.rpartition("_per_")[0].endswith(("simdgroups", "quadgroups"))}
_WORDS = {
    b"uint",
    b"ushort",
    b"uint16_t",
    b"uint32_t",
    b"unsigned",
    b"unsigned int",
    b"unsigned short",
    b"short unsigned",
}
_OTHER_SCALARS = (
    b"bool char uchar short int long ulong half bfloat float int8_t uint8_t int16_t int32_t int64_t uint64_t size_t"
)


def findings(source: Source) -> Iterator[Finding]:
    for function in captures(_FUNCTIONS, source.root).get("function", []):
        if is_kernel(source, function):
            yield from _kernel(source, function)


def _kernel(source: Source, function: Node) -> Iterator[Finding]:
    declarator = function_declarator(function)
    if declarator is None:
        return  # kernels.read says so
    name = declarator.child_by_field_name("declarator")
    kind = function.child_by_field_name("type")
    if kind is not None and (source.of(kind) != b"void" or function.child_by_field_name("declarator") != declarator):
        yield Finding(
            name.start_byte,
            f"invalid return type '{source.of(kind).decode()}' for kernel function",
            "a kernel returns void, and results through its buffers",
        )
    if name.type == "field_identifier":
        yield Finding(name.start_byte, "kernel function cannot be a member function")
    taken: dict[tuple[str, bytes], Node] = {}
    for parameter in declarator.child_by_field_name("parameters").named_children:
        if parameter.type in ("parameter_declaration", "optional_parameter_declaration"):
            yield from _parameter(source, parameter, taken)


def _parameter(source: Source, parameter: Node, taken: dict[tuple[str, bytes], Node]) -> Iterator[Finding]:
    attributes = dict(source.attributes(parameter))
    space = source.address_space(parameter)
    kind = parameter.child_by_field_name("type")
    declarator = parameter.child_by_field_name("declarator")
    spelled = source.of(kind).decode() if kind else ""
    while declarator is not None and declarator.type == "attributed_declarator":
        declarator = declarator.named_children[0]
    is_indirect = declarator is not None and not declarator.type.endswith("identifier")
    for attribute, accepted in (("buffer", (b"device", b"constant")), ("threadgroup", (b"threadgroup",))):
        if attribute not in attributes:
            continue
        words = " and ".join(word.decode() for word in accepted)
        if not is_indirect:
            error = f"type '{spelled}' is not valid for attribute '{attribute}'"
            yield Finding(parameter.start_byte, error, f"it is for pointers and references to {words} memory")
        elif space is not None and space not in accepted:
            error = f"invalid address space qualification for {attribute} pointee type '{space.decode()} {spelled}'"
            yield Finding(parameter.start_byte, error, f"valid address space qualifications are {words}")
        if "function_constant" in attributes:
            continue  # two that exclude each other may share a place
        place = (attribute, b"".join(source.of(attributes[attribute]).split()))
        if place in taken:
            index = place[1].strip(b"()").decode()
            error = f"cannot reserve '{attribute}' resource location at index {index}"
            yield Finding(parameter.start_byte, error, "another parameter is there")
        taken[place] = parameter
    for attribute in attributes:
        if attribute in BUILTINS and kind is not None and not _is_valid_for(attribute, source.of(kind), is_indirect):
            accepted = "ushort and uint" + ("" if attribute in _INDICES else ", alone and as vectors of 2 and 3")
            error = f"type '{spelled}' is not valid for attribute '{attribute}'"
            yield Finding(parameter.start_byte, error, f"valid types are {accepted}")


def _is_valid_for(attribute: str, kind: bytes, is_indirect: bool) -> bool:
    """Types of other names than the language's own may be aliases, and pass."""
    kind = kind.removeprefix(b"metal::")
    if is_indirect:
        return False
    scalar, count = (kind[:-1], kind[-1:]) if kind[-1:] in b"234" and kind[:-1].isalpha() else (kind, b"")
    if scalar in _OTHER_SCALARS.split():
        return False
    return not (scalar in _WORDS and (count == b"4" or (count and attribute in _INDICES)))
