"""What clang converts without a word and Metal does not: the rules that need types, decided on clang's syntax tree.

clang writes the tree as JSON. A file is named only where it differs from the one before, so the tree is walked in the
order in which it is written.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from .messages import metal_words
from .strict_syntax import Finding

MAIN_FILE = "<stdin>"
# Implicit conversions between these lose precision or range that Metal wants to see written.
_BFLOAT, _OTHER_FLOATS = "bfloat", ("float", "half")


@dataclass
class Symbol:
    """A function, or a variable at namespace scope, of the source; or our own text behind it."""

    name: str
    offset: int
    uses: dict[str, int] = field(default_factory=dict)  # id of another -> offset of its use
    constants: set[str] = field(default_factory=set)  # function constants that it reads


@dataclass
class Tree:
    """What the rules ask of the tree. Offsets are those of the text that clang read."""

    findings: list[Finding] = field(default_factory=list)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    methods: set[str] = field(default_factory=set)  # ids of member functions
    entry: Symbol = field(default_factory=lambda: Symbol("", 0))

    def used_by_entry(self) -> Iterator[Symbol]:
        pending, seen = [self.entry], set()
        while pending:
            symbol = pending.pop()
            if id(symbol) not in seen:
                seen.add(id(symbol))
                yield symbol
                pending += (self.symbols[used] for used in symbol.uses if used in self.symbols)


def read(
    root: dict,
    end: int,
    spaces_of_method: Callable[[int], frozenset[bytes]],
    is_kernel: Callable[[int], bool],
    constants: Collection[str],
) -> Tree:
    """Applies the rules.

    end: where our own text follows the source's. spaces_of_method: the address spaces of the objects that the member
    function with its name at an offset is for. is_kernel: of the function with its name at an offset. constants: names
    of the function constants.
    """
    reader = _Reader(end, constants)
    reader.visit(root, {}, None)
    reader.member_calls(spaces_of_method)
    reader.arguments()
    reader.kernel_calls(is_kernel)
    return reader.tree


class _Reader:
    def __init__(self, end: int, constants: Collection[str]):
        self.tree = Tree()
        self._end = end
        self._constants = constants
        self._file = None
        self._member_calls: list[tuple[str, str, int]] = []  # member function, space of its object, place
        self._arguments: list[tuple[str, Finding]] = []  # callee, what is wrong if the source declares it

    # ---- places -----------------------------------------------------------------------------------------------------
    def _place(self, location: dict | None) -> int | None:
        """Offset in the source, of what is written there itself."""
        if not location:
            return None
        if "expansionLoc" in location:
            self._place(location.get("spellingLoc"))
            return self._place(location["expansionLoc"])
        self._file = location.get("file", self._file)
        offset = location.get("offset")
        inside = offset is not None and self._file == MAIN_FILE and offset < self._end
        return offset if inside else None

    # ---- the walk ---------------------------------------------------------------------------------------------------
    def visit(self, node: dict, parent: dict, symbol: Symbol | None) -> None:
        """Leaves in each node its parent."""
        own = self._place(node.get("loc"))
        extent = node.get("range", {})
        begin = self._place(extent.get("begin"))
        self._place(extent.get("end"))
        place = begin if own is None else own
        kind = node.get("kind", "")
        node["parent"] = parent
        if kind in _FUNCTIONS or (kind == "VarDecl" and symbol is None):
            symbol = self._declare(node, place)
        elif kind == "DeclRefExpr":
            self._reference(node["referencedDecl"], place, symbol or self.tree.entry)
        elif kind == "MemberExpr":
            (symbol or self.tree.entry).uses.setdefault(node.get("referencedMemberDecl", ""), place or 0)
        elif place is not None and kind == "ImplicitCastExpr":
            self._cast(node, parent, place)
        elif place is not None and kind == "CompoundAssignOperator":
            self._compound_assignment(node, place)
        elif place is not None and kind == "CXXParenListInitExpr":
            error = f"no matching constructor for initialization of '{_spelled(node)}'"
            self._find(place, error, "braces initialise a struct without constructors; parentheses are C++20")
        for child in node.get("inner", ()):
            if child:
                self.visit(child, node, symbol)

    def _declare(self, node: dict, place: int | None) -> Symbol | None:
        if place is None or node.get("isImplicit") or node.get("explicitlyDefaulted"):
            return None
        if node["kind"] not in ("FunctionDecl", "VarDecl"):
            self.tree.methods.add(node["id"])
        symbol = self.tree.symbols.setdefault(node["id"], Symbol(node.get("name", ""), place))
        if previous := node.get("previousDecl"):
            self.tree.symbols[previous] = symbol
        return symbol

    def _reference(self, declared: dict, place: int | None, symbol: Symbol) -> None:
        if declared["kind"] in _FUNCTIONS or declared["kind"] == "VarDecl":
            symbol.uses.setdefault(declared["id"], place or 0)
            if declared.get("name") in self._constants:
                symbol.constants.add(declared["name"])

    # ---- conversions ------------------------------------------------------------------------------------------------
    def _cast(self, node: dict, parent: dict, place: int) -> None:
        operand = next(c for c in node["inner"] if c)
        if node["castKind"] == "AddressSpaceConversion":
            self._address_space_conversion(node, operand, parent, place)
        elif node["castKind"] == "FloatingCast" and not node.get("isPartOfExplicitCast"):
            self._narrowing(_type(operand), _type(node), _spelled(operand), _spelled(node), place)

    def _narrowing(self, source: str, target: str, spelled_source: str, spelled_target: str, place: int) -> None:
        if (target == _BFLOAT and source in _OTHER_FLOATS) or (target == "half" and source == _BFLOAT):
            self._find(
                place,
                f"no implicit conversion from '{spelled_source}' to '{spelled_target}'",
                f"write the conversion: {spelled_target}(...)",
            )

    def _compound_assignment(self, node: dict, place: int) -> None:
        computed = node.get("computeResultType", {})
        self._narrowing(
            _plain(computed.get("desugaredQualType", computed.get("qualType", ""))),
            _type(node),
            computed.get("qualType", ""),
            _spelled(node),
            place,
        )

    def _address_space_conversion(self, node: dict, operand: dict, parent: dict, place: int) -> None:
        space = _space(_qualified(operand))
        if node.get("isPartOfExplicitCast") or not space:
            return
        text = f"'{_qualified_spelling(operand)}' to 'thread {_qualified_spelling(node)}'"
        finding = Finding(place, f"no implicit conversion from {text}", "an address space is not left implicitly")
        outer = _outer(parent)
        kind = outer.get("kind")
        if kind == "MemberExpr":
            self._member_calls.append((outer.get("referencedMemberDecl", ""), space, place))
        elif kind in ("CXXConstructExpr", "CXXTemporaryObjectExpr"):
            return  # copies of structs and vectors
        elif kind == "CXXOperatorCallExpr":
            callee = _callee(outer)
            if callee.get("kind") == "CXXMethodDecl" and outer["inner"][1] is node:
                self._member_calls.append((callee["id"], space, place))
            else:
                self._arguments.append((callee.get("id", ""), finding))
        elif kind == "CallExpr":
            self._arguments.append((_callee(outer).get("id", ""), finding))
        elif kind != "PseudoObjectExpr":
            self.tree.findings.append(finding)

    def _find(self, place: int, error: str, note: str) -> None:
        self.tree.findings.append(Finding(place, error, note))

    # ---- what needs all declarations --------------------------------------------------------------------------------
    def arguments(self) -> None:
        self.tree.findings += (finding for callee, finding in self._arguments if callee in self.tree.symbols)

    def member_calls(self, spaces_of_method: Callable[[int], frozenset[bytes]]) -> None:
        for method, space, place in self._member_calls:
            if method not in self.tree.methods:
                continue  # of our headers, or written by the compiler
            symbol = self.tree.symbols[method]
            if space.encode() not in spaces_of_method(symbol.offset):
                self._find(
                    place,
                    f"member function '{symbol.name}' is not viable: its object is in address space '{space}'",
                    f"a member function is for 'thread' objects unless it says more: {symbol.name}(...) {space}",
                )

    def kernel_calls(self, is_kernel: Callable[[int], bool]) -> None:
        for symbol in self.tree.symbols.values():
            for used, place in symbol.uses.items():
                called = self.tree.symbols.get(used)
                if called and is_kernel(called.offset):
                    self._find(place, f"kernel function '{called.name}' cannot be called", "share a helper function")


_SPACES = ("device", "constant", "threadgroup")
_FUNCTIONS = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl", "CXXDestructorDecl"}
_TRANSPARENT = {"ImplicitCastExpr", "ParenExpr", "MaterializeTemporaryExpr", "ExprWithCleanups", "OpaqueValueExpr"}


def _outer(node: dict) -> dict:
    while node.get("kind") in _TRANSPARENT:
        node = node["parent"]
    return node


def _callee(call: dict) -> dict:
    node = call["inner"][0]
    while "referencedDecl" not in node and node.get("inner"):
        node = node["inner"][0]
    return node.get("referencedDecl", {})


def _qualified(node: dict) -> str:
    kind = node["type"]
    return kind.get("desugaredQualType", kind["qualType"])


def _qualified_spelling(node: dict) -> str:
    return node["type"]["qualType"]


def _plain(name: str) -> str:
    return " ".join(word for word in metal_words(name).split() if word not in ("const", "volatile", *_SPACES))


def _type(node: dict) -> str:
    return _plain(_qualified(node))


def _spelled(node: dict) -> str:
    return _plain(_qualified_spelling(node))


def _space(name: str) -> str:
    """The address space of a type, or of what it points to."""
    return next((word for word in metal_words(name).split() if word in _SPACES), "")
