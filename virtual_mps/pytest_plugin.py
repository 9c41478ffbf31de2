"""Fixtures for the tests of extensions; pytest finds them wherever virtual_mps is installed."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from . import activate
from .counters import Counts, count


@pytest.fixture
def count_kernels() -> Callable[[], AbstractContextManager[Counts]]:
    """`virtual_mps.count`, with the device active.

    def test_scale_touches_each_byte_once(count_kernels):
        x = torch.ones(1024, device="mps")
        with count_kernels() as c:
            y = my_extension.scale(x)
        assert c.total.dispatches == 1
        assert c.total.device_bytes == x.nbytes + y.nbytes
    """
    activate()
    return count
