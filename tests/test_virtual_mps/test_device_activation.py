"""How the device comes into a process, and what a machine hears that cannot have it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"VIRTUAL_MPS": "0", "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *path)))}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def installed(tmp_path):
    """What an installation adds to the path: the entry point."""
    info = tmp_path / "virtual_mps-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: virtual_mps\nVersion: 0\n")
    pyproject = (REPOSITORY / "virtual_mps/pyproject.toml").read_text()
    assert 'entry-points."torch.backends"]\nvirtual_mps = "virtual_mps:_autoload"' in pyproject
    (info / "entry_points.txt").write_text("[torch.backends]\nvirtual_mps = virtual_mps:_autoload\n")
    return tmp_path


ASK = "import torch; print(torch.backends.mps.is_available())"


def test_importing_the_package_is_cheap():
    code = "import sys, virtual_mps; print('torch' in sys.modules, virtual_mps.is_active())"
    assert run(code).stdout == "False False\n"


def test_the_entry_point_acts_only_when_asked(mps, installed):
    assert run(ASK, installed).stdout == "False\n"
    assert run(ASK, installed, VIRTUAL_MPS="0").stdout == "False\n"
    result = run(ASK, installed, VIRTUAL_MPS="1")
    assert result.stdout == "True\n", result.stderr


def test_activation_after_pytorch_was_asked_for_the_device(mps):
    code = (
        "import torch, virtual_mps\n"
        "assert not torch.backends.mps.is_available() and torch.accelerator.current_accelerator() is None\n"
        "virtual_mps.activate()\n"
        "assert torch.backends.mps.is_available()\n"
        "print(torch.accelerator.current_accelerator(), (torch.ones(2, device='mps') + 1).tolist())"
    )
    result = run(code)
    assert result.stdout == "mps [2.0, 2.0]\n", result.stderr


def test_modes(mps):
    code = (
        "import virtual_mps as v\n"
        "on = lambda: [name for name, (state, _) in v.modes().items() if state]\n"
        "assert on() == []\n"
        "v.activate(deferred=True)\n"
        "assert on() == ['poison', 'deferred'], on()\n"
        "with v.mode(poison=False, strict=True):\n"
        "    assert on() == ['strict', 'deferred']\n"
        "v.activate(deferred=False)\n"
        "print(on())"
    )
    off = {"VIRTUAL_MPS_CHECK": "0", "VIRTUAL_MPS_SEED": "0"}
    result = run(code, VIRTUAL_MPS_POISON="1", VIRTUAL_MPS_STRICT="0", **off)
    assert result.stdout == "['poison']\n", result.stderr
    ask = "import virtual_mps as v; v.activate(); print([name for name, (state, _) in v.modes().items() if state])"
    assert run(ask, MTL_DEBUG_LAYER="1", **off).stdout == "['validation']\n"
    with pytest.raises(TypeError, match="no mode nonsense"):
        mps.activate(nonsense=True)


def test_a_process_ends_quietly_with_work_pending(mps):
    code = (
        "import torch, virtual_mps\n"
        "virtual_mps.activate(deferred=True)\n"
        "lib = torch.mps.compile_shader('kernel void f(device float* x) { x[0] = 1; }')\n"
        "x = torch.zeros(1, device='mps'); lib.f(x); print('end')"
    )
    result = run(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("end", ["g = torch.autograd.grad(y.sum(), x)", "y.sum().backward()"])
def test_a_process_ends_quietly_after_a_backward_pass(mps, end):
    code = (
        "import torch, virtual_mps\n"
        "virtual_mps.activate()\n"
        "x = torch.ones(1000, device='mps', requires_grad=True); y = x * 2\n"
        f"{end}"
    )
    for _ in range(3):
        result = run(code)
        assert (result.returncode, result.stderr) == (0, "")


def test_the_command_line_builds(mps):
    result = subprocess.run(
        [sys.executable, "-m", "virtual_mps", "build"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    native, executor = map(Path, result.stdout.split())
    assert (native / "_virtual_mps.so").exists() and (native / "module.o").exists() and executor.exists()


ACTIVATE = "import virtual_mps\ntry: virtual_mps.activate()\nexcept virtual_mps.EnvironmentProblem as e: print(e)"


def test_no_clang(tmp_path):
    result = run(ACTIVATE, VIRTUAL_MPS_CLANG="clang++-none", VIRTUAL_MPS_CACHE=str(tmp_path))
    assert "clang++-none was not found" in result.stdout and "apt install clang-19" in result.stdout, result.stderr


def test_no_clang_through_the_entry_point(installed):
    result = run(ASK, installed, VIRTUAL_MPS="1", VIRTUAL_MPS_CLANG="clang++-none", VIRTUAL_MPS_CACHE=str(installed))
    assert result.returncode == 1 and "apt install clang-19" in result.stderr


def test_no_gnustep(monkeypatch, tmp_path):
    from virtual_mps import EnvironmentProblem, _environment

    monkeypatch.setattr(_environment, "GNUSTEP_HEADERS", tmp_path)
    with pytest.raises(EnvironmentProblem, match="apt install libgnustep-base-dev"):
        _environment.gnustep_headers()


@pytest.mark.parametrize("version", ["2.11.0", "2.16.0", "3.0.0+cu130", "1.13.1"])
def test_unsupported_pytorch(monkeypatch, version):
    from virtual_mps import EnvironmentProblem, _environment

    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(
        EnvironmentProblem, match=r"supports PyTorch 2\.12 to 2\.15, and .* pip install 'torch>=2\.12,<2\.16'"
    ):
        _environment.check_torch()


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0+cpu", "2.15.0a0+git123"])
def test_supported_pytorch(monkeypatch, version):
    from virtual_mps import _environment

    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert _environment.check_torch() == version


def test_no_pytorch(monkeypatch):
    from virtual_mps import EnvironmentProblem, _environment

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(EnvironmentProblem, match="not installed: pip install 'torch"):
        _environment.check_torch()


def test_another_system(monkeypatch):
    from virtual_mps import EnvironmentProblem, _environment

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EnvironmentProblem, match="this is darwin"):
        _environment.check_platform()


def test_a_failing_build_names_the_package_to_install(tmp_path):
    from virtual_mps import EnvironmentProblem, _build

    source = tmp_path / "a.cpp"
    source.write_text("int main() {}\n")
    with pytest.raises(EnvironmentProblem, match="apt install libgnustep-base-dev") as error:
        _build._run(
            [
                _build._environment.clang(),
                str(source),
                "-o",
                str(tmp_path / "a"),
                "-L/nonexistent",
                "-lgnustep-baseless",
            ]
        )
    assert "-lgnustep-baseless" in str(error.value)


BUILD_AT_ONCE = """
import sys, time
from pathlib import Path
from virtual_mps import _build

def pretend(folder):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    (folder / "part").write_text("1")
    time.sleep(1)
    (folder / "whole").write_text("1")

_build._build_into = pretend
folder = _build.native()
assert (folder / "whole").exists()
print(folder)
"""


def test_several_processes_build_once(tmp_path):
    log = tmp_path / "log"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_AT_ONCE, str(log)],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "VIRTUAL_MPS_CACHE": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1 and log.read_text() == "built\n"


def test_a_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    from virtual_mps import EnvironmentProblem, _build

    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(tmp_path))

    def fail(folder):
        (folder / "part").write_text("1")
        raise EnvironmentProblem("on purpose")

    monkeypatch.setattr(_build, "_build_into", fail)
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="on purpose"):
            _build.native()
    assert not [path for path in (tmp_path / "native").rglob("*") if path.suffix != ".lock"]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    from virtual_mps import EnvironmentProblem, _build

    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentProblem, match="set VIRTUAL_MPS_CACHE to a folder"):
        _build.native()


def test_a_native_half_that_does_not_load(tmp_path):
    from virtual_mps import EnvironmentProblem, _load

    (tmp_path / "broken.so").write_bytes(b"\x7fELF")
    with pytest.raises(EnvironmentProblem, match=r"does not load.*apt install libgnustep-base-dev"):
        _load._import_globally("broken", tmp_path / "broken.so")


def test_real_kernels_are_read_from_pytorch():
    from virtual_mps._real_kernels import real_kernels

    names = set(real_kernels("MPS"))
    assert {"add.Tensor", "add.out", "mm", "mm.out", "linear", "_softmax", "_softmax.out", "linalg_svd"} <= names
    assert not {"_linalg_eigvals", "linalg_eig", "segment_reduce", "copy_"} & names
    assert 500 < len(names) < 2000
