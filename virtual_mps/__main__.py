"""`python -m virtual_mps build` builds the native half now instead of on first use."""

import argparse
import sys

from . import EnvironmentProblem, __version__


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m virtual_mps", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=["build"])
    parser.parse_args()
    from . import _build
    from .compiler import CompileError, build_runtime

    try:
        print(_build.native())
        print(build_runtime())
    except (EnvironmentProblem, CompileError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
