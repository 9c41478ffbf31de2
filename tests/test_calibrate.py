"""Times for the split of rows: the table of chips, `calibrate()`, the file it writes, and what `doctor()` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_metalk
from tests.conftest import DEVICES, WITH_DEVICE
from torch_metalk import ops
from torch_metalk.ops import _cpu_share
from torch_metalk.ops._cpu_share import Shares, Times, automatic_shares

needs_mps = pytest.mark.skipif("mps" not in DEVICES, reason="only there is something to measure")
SMALL = {"rows": 64, "in_features": 16, "out_features": 24, "rounds": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of one's own, and no times in memory from another."""
    monkeypatch.setenv("TORCH_METALK_CACHE", str(tmp_path / "cache"))
    _cpu_share.stored.cache_clear()
    yield tmp_path / "cache" / "calibration.json"
    _cpu_share.stored.cache_clear()


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_the_measured_chip():
    """KRNL's times of an M1 Pro, with no other work of the GPU in the same time."""
    forward, backward, reason = automatic_shares("Apple M1 Pro", torch.float16)
    assert (round(forward, 2), round(backward, 2), reason) == (0.37, 0.27, "")


@pytest.mark.parametrize(("device", "dtype"), [("Apple M1 Pro", torch.bfloat16), ("Apple M9", torch.float16)], ids=str)
def test_a_chip_that_nobody_measured(device, dtype):
    shares = automatic_shares(device, dtype)
    assert shares[:2] == (0, 0) and "torch_metalk.calibrate()" in shares.reason
    assert automatic_shares(None, dtype) == Shares(0, 0, "the extension is not in use")


def test_stored_times_come_before_the_table(cache):
    _cpu_share.store("Apple M1 Pro", "float16", {"forward": Times(1, 1), "backward": Times(3, 1)})
    _cpu_share.store("Apple M9", "float32", {"forward": Times(1, 3), "backward": Times(4, 1)})
    assert automatic_shares("Apple M1 Pro", torch.float16) == (0.5, 0.25, "")
    assert automatic_shares("Apple M9", torch.float32) == (0.75, 0.2, "")
    assert automatic_shares("Apple M9", torch.float16)[:2] == (0, 0)
    assert [file.name for file in cache.parent.iterdir()] == [cache.name], "nothing is left of its writing"


def test_stored_times_are_read_once(cache):
    """Shares do not change while a program runs, whoever writes the file."""
    _cpu_share.store("Apple M9", "float32", {"forward": Times(1, 3), "backward": Times(4, 1)})
    before = automatic_shares("Apple M9", torch.float32)
    cache.unlink()
    assert automatic_shares("Apple M9", torch.float32) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        '"text"',
        "{}",
        '{"format": "another program 1"}',
        '{"format": "torch_metalk calibration 1"}',
        '{"format": "torch_metalk calibration 1", "milliseconds": []}',
        '{"format": "torch_metalk calibration 1", "milliseconds": {"M9": {"float32": {"forward": [1, 2]}}}}',
        '{"format": "torch_metalk calibration 1", "milliseconds": {"M9": {"float32": '
        '{"forward": [1, 2], "backward": [0, 1]}}}}',
        '{"format": "torch_metalk calibration 1", "milliseconds": {"M9": {"float32": '
        '{"forward": [1, 2, 3], "backward": [1, 1]}}}}',
        '{"format": "torch_metalk calibration 1", "milliseconds": {"M9": {"float32": '
        '{"forward": [1, "x"], "backward": [NaN, 1]}}}}',
    ],
)
def test_a_file_of_something_else_is_told(text, cache):
    write(cache, text)
    with pytest.warns(UserWarning, match="calibration.json"):
        assert automatic_shares("Apple M1 Pro", torch.float16)[2] == "", "the table is there all the same"
    found = torch_metalk.doctor()
    assert str(cache) in found["row_split"]["problem"] and found["row_split"]["problem"] in str(found)
    _cpu_share.store("Apple M9", "float32", {"forward": Times(1, 3), "backward": Times(4, 1)})
    assert automatic_shares("Apple M9", torch.float32).forward == 0.75, "it was replaced"


def test_a_file_that_cannot_be_read(cache):
    cache.mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert automatic_shares("Apple M9", torch.float32)[:2] == (0, 0)


def test_the_default_folder(monkeypatch):
    monkeypatch.delenv("TORCH_METALK_CACHE")
    assert _cpu_share.path() == Path.home() / ".cache" / "torch_metalk" / "calibration.json"


@needs_mps
def test_calibrate(cache):
    shares = torch_metalk.calibrate(**SMALL, dtypes=[torch.float32, torch.float16])
    assert set(shares) == {torch.float32, torch.float16}
    name = _cpu_share.device_name()
    for dtype, share in shares.items():
        assert 0 < share.forward < 1 and 0 < share.backward < 1 and not share.reason
        assert automatic_shares(name, dtype) == share
    stored = json.loads(cache.read_text())
    assert stored["format"] == "torch_metalk calibration 1" and set(stored["milliseconds"]) == {name}
    # What is not measured anew stays, and another process finds the same.
    torch_metalk.calibrate(**SMALL, dtypes=[torch.float32])
    assert automatic_shares(name, torch.float16) == shares[torch.float16]
    code = "import torch, torch_metalk as t; print(t.doctor()['row_split']['cpu_shares']['float16']['forward'])"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | WITH_DEVICE, capture_output=True, text=True)
    assert done.stdout.strip() == str(shares[torch.float16].forward), done.stderr


@needs_mps
def test_auto(cache):
    """Without times the GPU makes all rows; with times the CPU takes its share."""
    a, b = torch.randn(96, 16, device="mps"), torch.randn(16, 8, device="mps")
    zeros = torch.zeros(96, 16, device="mps")

    def rows_of_cpu() -> int:
        y = ops.matmul_rows_split(a, b, a_float32=zeros)
        return int((y == 0).all(-1).sum())

    assert rows_of_cpu() == 0
    times = {"forward": Times(2, 1), "backward": Times(1, 1)}
    _cpu_share.store(_cpu_share.device_name(), "float32", times)
    assert rows_of_cpu() == 32


def test_calibrate_needs_a_device(monkeypatch):
    monkeypatch.setattr(_cpu_share, "device_name", lambda: None)
    with pytest.raises(RuntimeError, match=r"torch_metalk.calibrate needs .*doctor\(\)"):
        torch_metalk.calibrate(**SMALL)


def test_doctor(cache):
    found = torch_metalk.doctor()
    split = found["row_split"]
    assert set(split["cpu_shares"]) == {"float32", "float16", "bfloat16"} and split["problem"] == ""
    for share in split["cpu_shares"].values():
        assert share["forward"] == share["backward"] == 0 and share["reason"]
    assert max(map(len, str(found).splitlines())) <= 120
    if split["device"] is not None:
        assert "run torch_metalk.calibrate() once" in str(found)
        _cpu_share.store(split["device"], "float16", {"forward": Times(1, 3), "backward": Times(4, 1)})
        assert "0.75 of the rows forward, 0.20 backward" in str(torch_metalk.doctor())
    else:
        assert "row split      not in use" in str(found)
