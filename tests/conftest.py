"""Devices and the parametrisation of `OpTests`."""

from __future__ import annotations

import pytest
import torch

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


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
