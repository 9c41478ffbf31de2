"""A preprocessed Metal source as a syntax tree, and edits to it.

Metal's grammar is C++ with five more words. The parser gets a view of the text, equal in length, in which they are C++
words of the same kind: the address spaces are qualifiers, `kernel` is a function specifier. Directives (line markers,
and pragmas, which may stand anywhere) are blank in it. Offsets in the tree are offsets in the text, where edits apply.
"""

import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import tree_sitter
import tree_sitter_cpp

LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())
PARSER = tree_sitter.Parser(LANGUAGE)

_IN_VIEW = {
    b"device": b"const ",
    b"thread": b"const ",
    b"constant": b"volatile",
    b"threadgroup": b"const      ",
    b"kernel": b"inline",
}
# The lexemes that decide whether such a word is one: it is not in a string, and in an attribute it names the attribute.
_LEXEME = re.compile(
    rb'"(?:[^"\\\n]|\\.)*"'
    rb"|'(?:[^'\\\n]|\\.)+'"
    rb"|\[\[.*?\]\]"
    rb"|^[ \t]*#[^\n]*"
    rb"|[A-Za-z_]\w*",
    re.DOTALL | re.MULTILINE,
)

Node = tree_sitter.Node


class Source:
    def __init__(self, text: str):
        self.text = text.encode()
        self.directives: list[tuple[int, int]] = []
        self._words: dict[int, bytes] = {}  # Metal's own, by offset: their stand-ins in the view may be shorter
        self.root = PARSER.parse(self._view()).root_node
        self._spaces = [offset for offset, word in self._words.items() if word != b"kernel"]
        self._lines = [0, *(m.end() for m in re.finditer(b"\n", self.text))]
        self._markers = self._read_markers()

    def _view(self) -> bytes:
        view = bytearray(self.text)
        for match in _LEXEME.finditer(self.text):
            start, end = match.span()
            lexeme = match.group()
            if lexeme.lstrip().startswith(b"#"):
                self.directives.append((start, end))
                view[start:end] = b" " * (end - start)
            elif lexeme in _IN_VIEW:
                self._words[start] = lexeme
                view[start:end] = _IN_VIEW[lexeme]
        return bytes(view)

    def _read_markers(self) -> list[tuple[int, int, str]]:
        """(offset of the line after it, number of that line, file) of each line marker."""
        markers = []
        for start, end in self.directives:
            words = self.text[start:end].decode(errors="replace").split(maxsplit=2)
            if len(words) == 3 and words[0] == "#" and words[1].isdigit():
                markers.append((end + 1, int(words[1]), words[2].split('"')[1]))
        return markers

    def of(self, node: Node) -> bytes:
        """The source text of a node; node.text is that of the view."""
        return self.text[node.start_byte : node.end_byte]

    def location(self, offset: int) -> str:
        """FILE:LINE:COLUMN, as in the compiler's messages."""
        row = bisect_right(self._lines, offset) - 1
        column = offset - self._lines[row] + 1
        at = bisect_right(self._markers, (offset, 1 << 62, "")) - 1
        if at < 0:
            return f"program_source:{row + 1}:{column}"
        begin, number, file = self._markers[at]
        return f"{file}:{number + row - (bisect_right(self._lines, begin) - 1)}:{column}"

    def address_space(self, node: Node) -> bytes | None:
        """The address space among a declaration's qualifiers."""
        return next((self._words[c.start_byte] for c in self.address_space_qualifiers(node)), None)

    def address_space_qualifiers(self, node: Node) -> list[Node]:
        return [c for c in node.children if c.type == "type_qualifier" and c.start_byte in self._words]

    def names_address_space(self, start: int, end: int) -> bool:
        """Whether one of the four words stands in a stretch of the source."""
        at = bisect_left(self._spaces, start)
        return at < len(self._spaces) and self._spaces[at] < end

    def end_of_word(self, qualifier: Node) -> int:
        return qualifier.start_byte + len(self._words[qualifier.start_byte])

    def attributes(self, node: Node) -> Iterator[tuple[str, Node | None]]:
        """(name, argument list) of each attribute of a declaration: in front of it or behind its declarator."""
        pending = list(node.children)
        while pending:
            child = pending.pop(0)
            if child.type == "attribute":
                name = child.child_by_field_name("name") or child.children[0]
                arguments = next((c for c in child.children if c.type == "argument_list"), None)
                yield self.of(name).decode(), arguments
            elif child.type == "attribute_declaration" or child.type.endswith("declarator"):
                pending = [c for c in child.children if c.type != "parameter_list"] + pending


def captures(query: tree_sitter.Query, node: Node) -> dict[str, list[Node]]:
    """Captured nodes by name, in the order of the source."""
    found = tree_sitter.QueryCursor(query).captures(node)
    return {name: sorted(nodes, key=lambda n: (n.start_byte, -n.end_byte)) for name, nodes in found.items()}


@functools.cache
def query(text: str) -> tree_sitter.Query:
    return tree_sitter.Query(LANGUAGE, text)


class Edits:
    """Replacements in a text. Line breaks in what is replaced are kept, so that lines keep their numbers."""

    def __init__(self, text: bytes):
        self._text = text
        self._edits: list[tuple[int, int, bytes]] = []

    def replace(self, start: int, end: int, by: bytes) -> None:
        breaks = self._text.count(b"\n", start, end) - by.count(b"\n")
        self._edits.append((start, end, by + b"\n" * breaks))

    def insert(self, at: int, text: bytes) -> None:
        self.replace(at, at, text)

    def delete(self, node: Node) -> None:
        """Leaves blanks, so that what follows in the line keeps its column."""
        lines = self._text[node.start_byte : node.end_byte].split(b"\n")
        blank = b"\n".join(b" " * len(line) for line in lines)
        self._edits.append((node.start_byte, node.end_byte, blank))

    def apply(self) -> bytes:
        """The edited text. Edits inside of a replaced stretch vanish with it."""
        return b"".join(by for _, by in self._stretches())

    def origins(self) -> "Origins":
        return Origins(list(self._stretches()), self._text)

    def _stretches(self) -> Iterator[tuple[int, bytes]]:
        """The edited text in pieces, each with the offset of what it stands for."""
        at = 0
        for first, last, by in sorted(self._edits, key=lambda e: e[:2]):
            if first >= at:
                yield at, self._text[at:first]
                yield first, by
                at = last
        yield at, self._text[at:]


class Origins:
    """From offsets in an edited text to offsets in the text that was edited."""

    def __init__(self, stretches: list[tuple[int, bytes]], text: bytes):
        self._stretches, self._text = stretches, text
        self._starts = [0, *itertools.accumulate(len(by) for _, by in stretches)]

    def __call__(self, offset: int) -> int:
        at = bisect_right(self._starts, offset) - 1
        if at >= len(self._stretches):
            return len(self._text)
        origin, by = self._stretches[at]
        copied = self._text.startswith(by, origin)
        return origin + offset - self._starts[at] if copied else origin
