"""``python -m torch_metalk doctor [--json]``."""

import argparse
import json

from torch_metalk import doctor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_metalk")
    commands = parser.add_subparsers(dest="command", required=True)
    diagnose = commands.add_parser("doctor", help="what is in use, what is not, and why")
    diagnose.add_argument("--json", action="store_true", help="as JSON instead of a table")
    args = parser.parse_args()
    diagnosis = doctor()
    print(json.dumps(diagnosis, indent=2) if args.json else diagnosis)


if __name__ == "__main__":
    main()
