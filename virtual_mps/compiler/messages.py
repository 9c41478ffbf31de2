"""What clang says, in Metal's words."""

from . import toolchain

ENTRY = "end of source"  # the file name of what follows a source; an open bracket is noticed there
# How clang prints the address spaces, and how Metal writes them. The first one's name ends as the second's.
_PRINTED_SPACES = {"__global_device ": "constant ", "__global ": "device ", "__local ": "threadgroup "}


def metal_words(text: str) -> str:
    for printed, written in _PRINTED_SPACES.items():
        text = text.replace(printed, written)
    return text


def readable(message: str) -> str:
    """clang's messages without the notes on how our headers came to it."""
    headers = f"{toolchain.HEADERS}/"
    told = [
        line.removeprefix(headers)
        for line in metal_words(message).splitlines()
        if not (headers in line and (": note: " in line or line.startswith("In file included from")))
        and not line.startswith("In file included from <stdin>")
        and not (line.startswith(f"{ENTRY}:") and ": note: " in line)
        and not line.endswith((" error generated.", " errors generated."))
    ]
    return "\n".join(told)
