import pytest


@pytest.fixture(scope="session")
def mps():
    """The package, with the device active."""
    import virtual_mps

    virtual_mps.activate()
    return virtual_mps


@pytest.fixture
def validation(mps):
    with mps.mode(validation=True):
        yield
