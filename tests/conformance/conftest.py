"""Which cases of the suite run, and what was counted in them.

`--conformance=all` runs every case (`make conformance`); otherwise it is a twentieth of them, chosen by the hash of a
case's name, so that it is the same cases each time and on each machine. SHA-224 was picked among a dozen
hashes since it takes some of each file, and few of the kernels that take long to compile.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import virtual_mps

FOLDER = Path(__file__).parent
FRACTION = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", choices=("all", "sample"), default="sample", help="which conformance cases run")


def _is_sampled(name: str) -> bool:
    return int(hashlib.sha224(name.encode()).hexdigest(), 16) % FRACTION == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Where this folder is not named on the command line, pytest does not know its option.
    if config.getoption("--conformance", "sample") == "all":
        return
    left_out = [
        item for item in items if item.path.is_relative_to(FOLDER) and not _is_sampled(f"{item.path.name}::{item.name}")
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
def _device() -> None:
    virtual_mps.activate()


@pytest.fixture(params=["normal", "checked"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test in the plain mode and in the checked one."""
    with virtual_mps.mode(check=request.param == "checked"):
        yield request.param


def pytest_terminal_summary(terminalreporter) -> None:
    """What the tests counted with record_property, added up."""
    counted: Counter = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call" and "conformance" in report.nodeid:
                counted.update({name: n for name, n in report.user_properties if isinstance(n, int)})
    if counted:
        terminalreporter.section("conformance")
        for name, n in sorted(counted.items()):
            terminalreporter.write_line(f"{n:7,d}  {name}")
