"""What the suite does where the package index cannot be reached."""

import os

import pytest

from . import sources


@pytest.mark.parametrize("name", ["mlx-metal", "mtlflashattn"])
def test_what_is_missing_is_skipped_by_name(name, tmp_path, monkeypatch):
    for variable in [v for v in os.environ if v.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the port of a service that nobody runs
    monkeypatch.setenv("PIP_RETRIES", "0")
    wanted = f"pip cannot fetch {name}=={sources.version(name)} from the package index"
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=wanted):
            sources.unpacked(name)
    assert not [path for path in (tmp_path / "conformance").iterdir() if path.is_dir()]


def test_what_comes_with_another_hash_is_a_failure(tmp_path, monkeypatch):
    requirement = "mtlflashattn==0.2.0 --hash=sha256:" + "0" * 64
    monkeypatch.setattr(sources, "_requirements", lambda: {"mtlflashattn": requirement})
    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(tmp_path))
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
        sources.unpacked("mtlflashattn")
    if caught.type is pytest.skip.Exception:
        pytest.skip("the package index cannot be reached")
    assert "Expected sha256 0000" in str(caught.value)
