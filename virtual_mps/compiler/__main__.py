"""python -m virtual_mps.compiler VERB: what the executor calls, and what a stand-in for `metal` may call."""

import argparse
import sys
from pathlib import Path

from .compile import Options, check, compile_kernel, compile_library
from .preprocess import preprocess
from .toolchain import CompileError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m virtual_mps.compiler", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    verb = verbs.add_parser("preprocess", help="expand a file with its local includes")
    verb.add_argument("source", type=Path)
    verb.add_argument("-o", "--output", type=Path, required=True)
    verb.add_argument("-I", dest="include_dirs", action="append", default=[])
    verb.add_argument("-D", dest="defines", action="append", default=[])
    verb.add_argument("--language", type=int, default=0)
    verb.add_argument("--fast-math", action="store_true")

    verb = verbs.add_parser("check", help="say what Apple's compiler would refuse of a file, in all its kernels")
    verb.add_argument("source", type=Path)
    verb.add_argument("-I", dest="include_dirs", action="append", default=[])
    verb.add_argument("-D", dest="defines", action="append", default=[])
    verb.add_argument("--language", type=int, default=0, help="310 for Metal 3.1, and so on; the newest if not given")
    verb.add_argument("--werror", action="store_true", help="take warnings for errors")

    verb = verbs.add_parser("library", help="read a source text into a library folder")
    verb.add_argument("--source", type=Path, required=True)
    verb.add_argument("--output", type=Path, required=True)
    verb.add_argument("--define", dest="defines", action="append", default=[])
    verb.add_argument("--language", type=int, default=0)
    verb.add_argument("--fast-math", action="store_true")
    verb.add_argument("--preprocessed", action="store_true")

    verb = verbs.add_parser("kernel", help="compile one kernel of a library folder")
    verb.add_argument("--library", type=Path, required=True)
    verb.add_argument("--name", required=True)
    verb.add_argument("--constant", dest="constants", action="append", default=[], metavar="NAME_OR_INDEX=HEX")
    verb.add_argument("--output", type=Path, required=True)
    verb.add_argument("--instrumented", action="store_true", help="for checked mode and counters")

    arguments = parser.parse_args()
    try:
        run(arguments)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    if arguments.verb == "preprocess":
        text = preprocess(
            arguments.source, arguments.defines, arguments.include_dirs, arguments.language, arguments.fast_math
        )
        arguments.output.write_text(text)
    elif arguments.verb == "check":
        text = preprocess(arguments.source, arguments.defines, arguments.include_dirs, arguments.language)
        for warning in check(text, arguments.language, instantiate=True, werror=arguments.werror):
            print(warning, file=sys.stderr)
    elif arguments.verb == "library":
        options = Options(tuple(arguments.defines), arguments.fast_math, arguments.language)
        compile_library(arguments.source.read_text(), arguments.output, options, arguments.preprocessed)
    else:
        values: dict[str, bytes] = {}
        for constant in arguments.constants:
            name, _, value = constant.partition("=")
            values.setdefault(name, bytes.fromhex(value))
        compile_kernel(arguments.library, arguments.name, values, arguments.output, arguments.instrumented)


if __name__ == "__main__":
    sys.exit(main())
