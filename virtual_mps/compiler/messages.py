"""What clang says, in Metal's words."""

import re

from . import toolchain

ENTRY = "end of source"  # the file name of what follows a source; an open bracket is noticed there
# How clang prints what Metal writes otherwise; a name comes before one that is part of it.
_PRINTED = {
    "__global_device ": "constant ",
    "__global ": "device ",
    "__local ": "threadgroup ",
    " (aka '__bf16')": "",
    " (aka '_Float16')": "",
    "__bf16": "bfloat",
    "_Float16": "half",
}
_ASSERTION = re.compile(r"static assertion failed due to requirement '.*': (?=\w)")
_REQUESTED = re.compile(r"^(?P<place>.+:\d+:\d+): note: in instantiation of .* requested here$")


def metal_words(text: str) -> str:
    for printed, written in _PRINTED.items():
        text = text.replace(printed, written)
    return text


def readable(message: str) -> str:
    """clang's messages, without the notes on how our headers came to them.

    What our headers assert is said of the place in the source that asked for it.
    """
    headers = f"{toolchain.HEADERS}/"
    told: list[str] = []
    for line in metal_words(message).splitlines():
        requested = _REQUESTED.match(line)
        if headers in line and (": note: " in line or line.startswith("In file included from")):
            continue
        if line.startswith("In file included from <stdin>") or line.endswith(
            (" error generated.", " errors generated.")
        ):
            continue
        if line.startswith(f"{ENTRY}:") and ": note: " in line:
            continue
        if requested and told and told[-1].startswith(headers):
            told[-1] = requested["place"] + told[-1][told[-1].index(": error: ") :]
            continue
        told.append(_ASSERTION.sub("", line))
    return "\n".join(line.removeprefix(headers) for line in told)
