"""Command line of virtual_mps.

python -m virtual_mps build             builds the native half now instead of on first use
python -m virtual_mps run SCRIPT ...    runs a script that was written for a Mac: the device is active, the script finds
                                        itself on a Mac, setuptools builds .mm sources, and xcrun is on PATH
python -m virtual_mps mutants SHADER -- pytest TESTS
                                        which small fault in a shader does no test notice?
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from . import EnvironmentProblem, __version__, activate
from ._mac import builtins_on_a_mac
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
    runpy.run_path(script, {"__builtins__": builtins_on_a_mac()}, run_name="__main__")


def mutants(given: argparse.Namespace, tests: list[str]) -> int:
    from .mutants import Problem, mutants

    if tests[1:3] == ["-m", "pytest"]:
        tests = tests[2:]
    if not given.list and tests[:1] != ["pytest"]:
        raise EnvironmentProblem("virtual_mps mutants: the command of the tests follows: -- pytest tests/test_my_op.py")
    sys.path.insert(0, os.getcwd())  # as `python -m pytest` does
    try:
        return mutants(
            given.shaders,
            tests[1:],
            given.reasons,
            given.include_dirs,
            given.defines,
            given.jobs,
            given.seconds,
            given.list,
        )
    except Problem as problem:
        raise EnvironmentProblem(f"virtual_mps mutants: {problem}") from None


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
    changes = commands.add_parser("mutants", help="which small fault in a shader does no test notice?")
    changes.add_argument("shaders", nargs="+", type=Path, metavar="SHADER")
    changes.add_argument("--reasons", type=Path, help="a TOML file that says why a mutant may survive")
    changes.add_argument("-I", dest="include_dirs", action="append", default=[])
    changes.add_argument("-D", dest="defines", action="append", default=[])
    changes.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    changes.add_argument("--seconds", type=float, help="of processor time to look for a test that fails, per mutant")
    changes.add_argument("--list", action="store_true", help="only say which mutants there are")
    own, tests = sys.argv[1:], []
    if own[:1] == ["mutants"] and "--" in own:
        own, tests = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    try:
        if given.command == "build":
            build()
        elif given.command == "mutants":
            return mutants(given, tests)
        else:
            run(given.script, given.arguments)
    except (EnvironmentProblem, CompileError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
