"""Devices and the parametrisation of `OpTests`."""

from __future__ import annotations

import os

import pytest
import torch

DEVICES = ["cpu"] + (["mps"] if torch.backends.mps.is_available() else [])

# The workers of pytest-xdist share the cores; more threads than cores make small tensors slower by an order.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.cls, "cases", None)
    if cases is not None and "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
