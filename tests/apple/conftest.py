"""What these tests share. They need tools of LLVM, which `make check-apple` installs, and a package index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import recording, stand_in, wheels


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, what takes long to make is made by one worker."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            shared = "recorded" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("recorded" if shared else item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """A test that needs a wheel which cannot be had is skipped, with what could not be reached."""
    try:
        return (yield)
    except wheels.Unreachable as problem:
        pytest.skip(str(problem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except wheels.Unreachable as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of Apple's frameworks, as the stand-in declares them."""
    return stand_in.copy_frameworks(tmp_path_factory.mktemp("frameworks"))


@pytest.fixture
def planted(frameworks: Path, tmp_path: Path) -> Path:
    """A copy of the headers, to plant a fault in."""
    return Path(shutil.copytree(frameworks, tmp_path / "frameworks"))


def replace(path: Path, old: str, new: str) -> None:
    """Plants a fault: what is replaced must be there once, so that a test notices when the file has changed."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[recording.Launch]:
    """Every launch that csrc was seen to ask for."""
    folder = tmp_path_factory.mktemp("recording")
    sources = sorted(recording.copy_sources(folder).glob("*.mm"))
    return recording.record(stand_in.build_library(sources, folder), folder / "launches")
