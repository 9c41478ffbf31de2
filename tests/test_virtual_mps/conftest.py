from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mps():
    """The package, with the device active."""
    import virtual_mps

    virtual_mps.activate()
    return virtual_mps


@pytest.fixture
def plain_run(mps):
    """For tests of what only the plain run lets pass, or tells in words of its own. All others pass with
    VIRTUAL_MPS_CHECK=1 in the environment too."""
    with mps.mode(check=False):
        yield


@pytest.fixture
def validation(mps):
    with mps.mode(validation=True):
        yield


@pytest.fixture(scope="session")
def build_extension(mps, tmp_path_factory):
    """Builds extensions/NAME.mm as a third party would, and gives its operators."""

    def build(name: str, **kwargs):
        import torch

        from virtual_mps.cpp_extension import load

        source = Path(__file__).parent / "extensions" / f"{name}.mm"
        folder = tmp_path_factory.mktemp(name)
        load(name, [str(source)], build_directory=str(folder), is_python_module=False, **kwargs)
        return getattr(torch.ops, name)

    return build


@pytest.fixture(scope="session")
def framework(build_extension):
    return build_extension("framework")


@pytest.fixture(scope="session")
def axpy(build_extension):
    return build_extension("axpy", extra_cflags=["-O1"], extra_ldflags=["-framework", "Metal"])
