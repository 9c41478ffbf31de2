"""Devices and the parametrisation of `OpTests`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator

import pytest
import torch

# What programs that tests start need in their environment for the device that tests have.
WITH_DEVICE: dict[str, str] = {}

# On Linux the stand-in for Apple's frameworks is the mps device, where it is installed. Programs get it only if they
# ask for it.
if os.environ.get("VIRTUAL_MPS", "1") != "0" and any(importlib.metadata.distributions(name="virtual_mps")):
    import virtual_mps
    from virtual_mps.metallib import path_with_tools

    virtual_mps.activate()
    #: A context in which kernels are counted; benchmarks use it outside of a test.
    count = virtual_mps.count
    os.environ.pop("VIRTUAL_MPS", None)
    WITH_DEVICE = {"VIRTUAL_MPS": "1", "PATH": path_with_tools(), "VIRTUAL_MPS_PYTHON": sys.executable}

# A Mac has the real device, and nothing of the stand-in: neither its tests nor its counters.
collect_ignore = [] if WITH_DEVICE else ["apple", "conformance", "test_budgets.py", "test_virtual_mps"]

DEVICES = ["cpu"] + (["mps"] if torch.backends.mps.is_available() else [])

# Tests are small, and workers of pytest-xdist share the cores: a second thread for each makes them slower by an order.
torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.cls, "cases", None)
    if cases is not None and "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def checked_device() -> Iterator[torch.device]:
    """The mps device in checked mode: kernels that access memory they must not, race or diverge raise an error. Lanes
    and threadgroups run in a random order, always the same."""
    if not WITH_DEVICE:
        pytest.skip("checked mode belongs to the stand-in for Apple's frameworks")
    with virtual_mps.mode(check=True, seed=1):
        yield torch.device("mps")


@pytest.fixture
def counted_device() -> Iterator[torch.device]:
    """The mps device with counters: kernels whose threads do each other's work again fail the test."""
    if not WITH_DEVICE:
        pytest.skip("counters belong to the stand-in for Apple's frameworks")
    with virtual_mps.count() as counted:
        yield torch.device("mps")
    for kernel in counted.kernels.values():
        for buffer in kernel.buffers:
            assert buffer.written == buffer.unique_written, f"{kernel.name} writes elements of {buffer.name} twice"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
