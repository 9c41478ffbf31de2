"""`doctor()` and its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_metalk
from tests.conftest import WITH_DEVICE
from torch_metalk import __main__, _doctor, _extension, doctor

OPERATORS = {"rms_norm", "rope", "rope_positions", "softmax", "attention", "matmul", "matmul_rows_split"} | {
    name + form for name in ("swiglu", "geglu") for form in ("", "_packed")
}
OPERATORS |= {"lora_linear", "lora_qkv", "lora_mlp", "decode_attention", "paged_attention", "paged_cache_write"}


def test_keys_and_values():
    found = doctor()
    keys = {"torch_metalk", "python", "platform", "packages", "device", "extension", "row_split", "operators"}
    assert set(found) == keys
    assert found["torch_metalk"] == torch_metalk.__version__
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(found["packages"]) >= {"torch", "transformers", "peft"}
    mps = torch.backends.mps.is_available()
    assert found["device"]["name"] == ("mps" if mps else "cpu") and bool(found["device"]["reason"]) != mps
    assert isinstance(found["extension"]["loaded"], bool)
    assert bool(found["extension"]["reason"]) != found["extension"]["loaded"]
    assert {name.removesuffix("_backward") for name in found["operators"]} == OPERATORS
    for on in found["operators"].values():
        assert on["other"] == "eager twin" and on["mps"] in ("Metal", "eager twin")


def test_json_round_trip():
    found = doctor()
    assert json.loads(json.dumps(found)) == found


def test_table():
    found = doctor()
    lines = str(found).splitlines()
    assert lines[0] == f"torch_metalk {torch_metalk.__version__} on {found['platform']}, Python {found['python']}"
    rows = [line.split() for line in lines]
    assert ["torch", torch.__version__] in rows
    for name, on in found["operators"].items():
        assert [name, *on["mps"].split(), *on["other"].split()] in rows
    assert max(map(len, lines)) <= 120
    assert repr(found) == str(found)


def test_missing_packages_and_a_broken_extension_are_told(monkeypatch):
    monkeypatch.setattr(_doctor, "_PACKAGES", ("torch", "a-package-that-nobody-has"))
    monkeypatch.setattr(_extension, "status", _extension.Status(False, "built, but does not load: undefined symbol"))
    found = doctor()
    assert found["packages"]["a-package-that-nobody-has"] is None
    assert "not installed" in str(found)
    assert "not in use: built, but does not load: undefined symbol" in str(found)
    assert json.loads(json.dumps(found))["extension"] == {"loaded": False, "reason": _extension.status.reason}


def test_an_extension_that_does_not_load_is_a_reason_and_no_crash(monkeypatch):
    def broken(name):
        raise OSError("libtorch_metalk: symbol not found")

    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(_extension.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(_extension.importlib, "import_module", broken)
    status = _extension._load()
    assert not status.loaded
    assert torch.__version__ in status.reason and "symbol not found" in status.reason


def command_line(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch_metalk", *arguments],
        cwd=Path(__file__).parent.parent,
        env=os.environ | WITH_DEVICE,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_line_json():
    done = command_line("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == doctor()


def test_command_line_table():
    done = command_line("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{doctor()}\n"


def test_command_line_errors(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_metalk", "docter"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 2 and "usage: python -m torch_metalk" in capsys.readouterr().err
