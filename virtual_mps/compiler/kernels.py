"""What a source offers: its kernels with their parameters, and its function constants."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .source import Node, Source, captures, query
from .toolchain import CompileError

MAX_THREADS = 1024
SLOTS = 31

BUILTINS = frozenset(
    (
        "thread_position_in_grid",
        "threadgroup_position_in_grid",
        "thread_position_in_threadgroup",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "thread_index_in_quadgroup",
        "quadgroup_index_in_threadgroup",
        "threads_per_grid",
        "threadgroups_per_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_simdgroup",
        "thread_execution_width",
        "simdgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "quadgroups_per_threadgroup",
        "dispatch_quadgroups_per_threadgroup",
        "grid_origin",
    )
)

_CANDIDATES = query(
    """
    (function_definition) @function
    (template_instantiation) @instantiation
    (translation_unit (declaration) @declaration)
    (declaration_list (declaration) @declaration)
    """
)


@dataclass
class Parameter:
    kind: str  # "buffer", "threadgroup" or "builtin"
    name: str
    index: int = 0
    attribute: str | None = None
    address_space: str | None = None
    function_constant: str | None = None

    def as_json(self) -> dict:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class Kernel:
    name: str  # what the host asks for
    expression: str  # C++ for the address of the function
    parameters: list[Parameter]
    max_threads: int
    location: str  # of its definition, or instantiation
    function: str  # its name without scopes
    is_instance: bool  # of a template: types and calls in it are known only now


@dataclass
class FunctionConstant:
    name: str
    index: int
    type: str
    node: Node


@dataclass
class _Definition:
    """A kernel function, of which a template may become several kernels."""

    qualified_name: str
    host_name: str | None
    template_parameters: list[Node]
    parameters: list[Parameter]
    max_threads: Node | None  # an expression, perhaps of the template parameters
    location: str


@dataclass
class Offer:
    kernels: dict[str, Kernel] = field(default_factory=dict)
    function_constants: dict[str, FunctionConstant] = field(default_factory=dict)
    instantiations: list[Node] = field(default_factory=list)  # of kernels: not C++, so not for the compiler

    def table(self) -> dict:
        """The JSON of vmps_library_table."""
        return {
            "kernels": {
                kernel.name: {
                    "parameters": [p.as_json() for p in kernel.parameters],
                    "max_total_threads_per_threadgroup": kernel.max_threads,
                }
                for kernel in self.kernels.values()
            },
            "function_constants": {
                c.name: {"index": c.index, "type": c.type} for c in self.function_constants.values()
            },
        }


def read(source: Source) -> Offer:
    found = captures(_CANDIDATES, source.root)
    offer = Offer()
    for node in found.get("declaration", []):
        _read_function_constant(source, node, offer)
    definitions: dict[str, list[_Definition]] = {}
    for node in found.get("function", []):
        if is_kernel(source, node):
            definition = _read_definition(source, node)
            definitions.setdefault(definition.qualified_name.rpartition("::")[2], []).append(definition)
    for node in found.get("instantiation", []):
        _read_instantiation(source, node, definitions, offer)
    for definition in (d for same_name in definitions.values() for d in same_name if not d.template_parameters):
        plain = definition.qualified_name.rpartition("::")[2]
        name = definition.host_name or plain
        threads = _max_threads(source, definition.max_threads, {})
        _add(
            offer,
            Kernel(
                name,
                f"&::{definition.qualified_name}",
                definition.parameters,
                threads,
                definition.location,
                plain,
                False,
            ),
        )
    return offer


def _max_threads(source: Source, expression: Node | None, names: Mapping[str, int]) -> int:
    value = _evaluate(source, expression, names) if expression else None
    return min(value or MAX_THREADS, MAX_THREADS)


def is_kernel(source: Source, node: Node) -> bool:
    return any(c.type == "storage_class_specifier" and source.of(c) == b"kernel" for c in node.children) or any(
        name == "kernel" for name, _ in source.attributes(node)
    )


def _read_function_constant(source: Source, node: Node, offer: Offer) -> None:
    for attribute, arguments in source.attributes(node):
        if attribute == "function_constant":
            name = source.of(_declared(node)).decode()
            kind = source.of(node.child_by_field_name("type")).decode()
            offer.function_constants[name] = FunctionConstant(name, _integer(source, arguments), kind, node)


def _read_definition(source: Source, node: Node) -> _Definition:
    function = function_declarator(node)
    if function is None:
        raise CompileError(f"{source.location(node.start_byte)}: error: cannot read this kernel's declaration")
    name = source.of(function.child_by_field_name("declarator")).decode()
    scopes, host_name, max_threads, template_parameters = [name], None, None, []
    parent = node.parent
    while parent is not None:
        if parent.type == "namespace_definition" and (scope := parent.child_by_field_name("name")):
            scopes.insert(0, source.of(scope).decode())
        if parent.type == "template_declaration":
            template_parameters = parent.child_by_field_name("parameters").named_children
        parent = parent.parent
    for attribute, arguments in source.attributes(node):
        if attribute == "host_name":
            host_name = _string(source, arguments)
        elif attribute == "max_total_threads_per_threadgroup":
            max_threads = arguments.named_children[0]
    return _Definition(
        "::".join(scopes),
        host_name,
        template_parameters,
        _read_parameters(source, function, name),
        max_threads,
        source.location(node.start_byte),
    )


def _read_parameters(source: Source, function: Node, kernel: str) -> list[Parameter]:
    parameters, unnumbered = [], []
    for node in function.child_by_field_name("parameters").named_children:
        if node.type not in ("parameter_declaration", "optional_parameter_declaration"):
            continue
        parameter = _read_parameter(source, node, kernel)
        if parameter.index < 0:
            unnumbered.append(parameter)
        parameters.append(parameter)
    for parameter in unnumbered:
        taken = {p.index for p in parameters if p.kind == parameter.kind}
        parameter.index = next(i for i in range(SLOTS + 1) if i not in taken)
    for parameter in parameters:
        if parameter.index >= SLOTS:
            raise CompileError(
                f"{source.location(function.start_byte)}: error: '{parameter.kind}' attribute parameter is out of"
                f" bounds: must be between 0 and {SLOTS - 1}; parameter '{parameter.name}' of kernel '{kernel}' is at"
                f" {parameter.index}"
            )
    return parameters


def _read_parameter(source: Source, node: Node, kernel: str) -> Parameter:
    declared = _declared(node)
    name = source.of(declared).decode() if declared else ""
    space = source.address_space(node)
    function_constant, parameter = None, None
    for attribute, arguments in source.attributes(node):
        if attribute in ("buffer", "threadgroup"):
            parameter = Parameter(attribute, name, _integer(source, arguments))
        elif attribute in BUILTINS:
            parameter = Parameter("builtin", name, attribute=attribute)
        elif attribute == "function_constant":
            function_constant = source.of(arguments).decode().strip("() \n")
    if parameter is None and space in (b"device", b"constant"):
        parameter = Parameter("buffer", name, -1)
    elif parameter is None and space == b"threadgroup":
        parameter = Parameter("threadgroup", name, -1)
    elif parameter is None:
        raise CompileError(
            f"{source.location(node.start_byte)}: error: parameter '{name}' of kernel '{kernel}' has no attribute that"
            " says what it is bound to, or one that virtual_mps does not know"
        )
    if parameter.kind == "buffer":
        parameter.address_space = (space or b"device").decode()
    parameter.function_constant = function_constant
    return parameter


def _read_instantiation(source: Source, node: Node, definitions: dict[str, list[_Definition]], offer: Offer) -> None:
    host_name, max_threads, names_kernel = None, None, is_kernel(source, node)
    for attribute, arguments in source.attributes(node):
        if attribute == "host_name":
            host_name, names_kernel = _string(source, arguments), True
        elif attribute == "max_total_threads_per_threadgroup":
            max_threads = arguments.named_children[0]
    if not names_kernel:
        return
    offer.instantiations.append(node)
    if host_name is None:
        return

    function = function_declarator(node)
    named = function.child_by_field_name("declarator") if function else node.named_children[-1]
    plain, template_arguments = _template_name(source, named)
    candidates = definitions.get(plain, [])
    if function is not None:
        given = function.child_by_field_name("parameters").named_children
        candidates = [d for d in candidates if len(d.parameters) == len(given)] or candidates
    if not candidates:
        raise CompileError(f"{source.location(node.start_byte)}: error: '{plain}' is not a kernel function")
    definition = candidates[-1]
    # Qualified: the standard library may have functions of the same name.
    expression = f"&::{definition.qualified_name}"
    names = {}
    if template_arguments is not None:
        expression += source.of(template_arguments).decode()
        names = _integer_arguments(source, definition.template_parameters, template_arguments.named_children)
    else:
        types = source.of(function.child_by_field_name("parameters")).decode()
        expression = f"static_cast<void (*){types}>({expression})"
    threads = _max_threads(source, max_threads or definition.max_threads, names)
    location = source.location(node.start_byte)
    _add(offer, Kernel(host_name, expression, definition.parameters, threads, location, plain, True))


def _add(offer: Offer, kernel: Kernel) -> None:
    if kernel.name in offer.kernels:
        first = offer.kernels[kernel.name].location
        raise CompileError(f"{kernel.location}: error: a kernel with the name '{kernel.name}' is at {first} already")
    offer.kernels[kernel.name] = kernel


def _template_name(source: Source, node: Node) -> tuple[str, Node | None]:
    """Name without scopes, and the list of template arguments if there is one."""
    arguments = None
    while (inner := node.child_by_field_name("name")) is not None:
        if node.type == "template_function":
            arguments = node.child_by_field_name("arguments")
        node = inner
    return source.of(node).decode(), arguments


def _integer_arguments(source: Source, parameters: list[Node], arguments: list[Node]) -> dict[str, int]:
    """Values of those template parameters that are integers and given, or have a default, as such."""
    names: dict[str, int] = {}
    for i, parameter in enumerate(parameters):
        value = arguments[i] if i < len(arguments) else parameter.child_by_field_name("default_value")
        declared = _declared(parameter)
        number = _evaluate(source, value, names) if value and declared else None
        if number is not None:
            names[source.of(declared).decode()] = number
    return names


def function_declarator(node: Node) -> Node | None:
    while node is not None and node.type != "function_declarator":
        node = node.child_by_field_name("declarator") or next(
            (c for c in node.named_children if c.type.endswith("declarator")), None
        )
    return node


def _declared(node: Node) -> Node | None:
    """The identifier that a declaration declares."""
    while node is not None and node.type not in ("identifier", "field_identifier"):
        node = node.child_by_field_name("declarator") or next(
            (
                c
                for c in node.named_children
                if c.type.endswith(("declarator", "identifier")) and c.type != "type_identifier"
            ),
            None,
        )
    return node


def _string(source: Source, arguments: Node) -> str:
    content = captures(query("(string_content) @text"), arguments).get("text", [])
    return "".join(source.of(c).decode() for c in content)


def _integer(source: Source, arguments: Node | None) -> int:
    """Value of (n), where n may be a sum or product of literals."""
    given = arguments.named_children if arguments else []
    value = _evaluate(source, given[0], {}) if len(given) == 1 else None
    if value is None:
        place = source.location((arguments or source.root).start_byte)
        raise CompileError(f"{place}: error: expected an integer constant")
    return value


_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__, "<<": int.__lshift__}


def _evaluate(source: Source, node: Node, names: Mapping[str, int]) -> int | None:
    if node.type in ("identifier", "type_descriptor", "type_identifier"):
        return names.get(source.of(node).decode())
    if node.type == "number_literal":
        try:
            digits = source.of(node).decode().rstrip("uUlL").lower()
            return int(digits, 0 if digits.startswith(("0x", "0b")) or not digits.startswith("0") else 8)
        except ValueError:
            return None
    if node.type == "parenthesized_expression":
        return _evaluate(source, node.named_children[0], names)
    if node.type == "binary_expression":
        left = _evaluate(source, node.child_by_field_name("left"), names)
        right = _evaluate(source, node.child_by_field_name("right"), names)
        operation = _OPERATIONS.get(node.child_by_field_name("operator").type)
        if operation and left is not None and right is not None:
            return operation(left, right)
    return None
