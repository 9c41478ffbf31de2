"""Command line of virtual_mps.

python -m virtual_mps build             builds the native half now instead of on first use
python -m virtual_mps run SCRIPT ...    runs a script that was written for a Mac: the device is active, PyTorch's
                                        cpp_extension takes .mm sources, and xcrun is on PATH
"""

import argparse
import os
import runpy
import sys

from . import EnvironmentProblem, __version__, activate
from .compiler import CompileError


def build() -> None:
    from . import _build
    from .compiler import build_runtime

    print(_build.native())
    print(build_runtime())


def run(script: str, arguments: list[str]) -> None:
    from . import cpp_extension
    from .metallib import path_with_tools

    os.environ["PATH"] = path_with_tools()
    os.environ.setdefault("VIRTUAL_MPS_PYTHON", sys.executable)
    activate()
    cpp_extension.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m virtual_mps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build")
    script = commands.add_parser("run")
    script.add_argument("script")
    script.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        if given.command == "build":
            build()
        else:
            run(given.script, given.arguments)
    except (EnvironmentProblem, CompileError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
