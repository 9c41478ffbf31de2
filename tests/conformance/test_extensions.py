"""Published MPS extensions, unchanged: each built as its users would, and its own tests run on the device.

A case is a file of an extension's tests. The tables say which of its tests fail and why, and what they skip.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from . import sources

REPOSITORY = Path(__file__).resolve().parents[2]


def _run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    ours = [name for name in os.environ if name.startswith(("PYTEST_", "VIRTUAL_MPS")) and name != "VIRTUAL_MPS_CACHE"]
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    # The processes of pytest-xdist share the cores.
    path = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=inherited | path | environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def _must(command: list[str], folder: Path, **environment: str) -> None:
    result = _run(command, folder, **environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def _build_in_place(folder: Path) -> str:
    """Its setup.py asks for C++17, in which PyTorch's header for MPS has not compiled since 2.13, on a Mac either:
    clang's own variable for such cases changes it."""
    options = {"CCC_OVERRIDE_OPTIONS": "# s/-std=c..17/-std=c++20/"}
    _must([sys.executable, "-m", "virtual_mps", "run", "setup.py", "build_ext", "--inplace"], folder, **options)
    return sys.executable


def _install_in_an_environment(folder: Path) -> str:
    """It has a .pth file, which only a site-packages folder brings to effect."""
    environment = folder.parent / "environment"
    _must([sys.executable, "-m", "venv", "--without-pip", environment], folder)
    python = environment / "bin/python"
    (packages,) = environment.glob("lib/python*/site-packages")
    outer = sysconfig.get_path("purelib")
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation"]
    _must([*install, "."], folder)
    return str(python)


def _as_it_is(folder: Path) -> str:
    return sys.executable


@dataclass(frozen=True)
class Extension:
    """prepare: makes an unpacked source distribution usable, and gives the Python to run its tests with.
    failures: by test, why it fails. skips: by what the reason of a skip says, why that is so here."""

    name: str
    prepare: Callable[[Path], str]
    files: tuple[str, ...]
    failures: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


METAL_4 = "virtual_mps has no Metal 4"
NOT_INSTALLED = "the other package is optional, and not installed"

EXTENSIONS = {
    extension.name: extension
    for extension in (
        Extension(
            "mps-bitsandbytes",
            _build_in_place,
            tuple(
                """
                advanced_linear edge_cases embeddings fp4_fp8_double fused_nf4 hf_compat int8 nf4 optimizers sparse
                """.split()
            ),
            failures={
                "test_fused_nf4.py::test_fused_nf4_matmul": (
                    "tolerance: it allows 0.1 between two float16 results of up to 350, of which neighbours are 0.25 "
                    "apart; test_nf4_product_is_exact_to_rounding below holds both against float64"
                ),
            },
        ),
        Extension(
            "mtlflashattn",
            _install_in_an_environment,
            tuple(
                """
                dispatch_cache flash_attn_func flash_attn_varlen_func packed_funcs sdpa_patch shim torch_fallback trace
                v1_kernel v2_dtype_modes v2_kernel
                """.split()
            ),
            skips={"TensorOps": METAL_4},
        ),
        Extension(
            "mps-pointops",
            _as_it_is,
            tuple(
                """
                ball_query_api ball_query_mps chamfer chamfer_nd compat feature_knn flat flat_graph flat_ragged_mps fps
                graclus grid_cluster knn m1_sparse_validation_runner nearest pointcept pointcept_probe pointnet2
                pointnet2_e2e pyg28 pyg28_avg_pool_graph pyg28_grid pyg28_voxel_avg_pool pytorch3d_adapter random_walk
                sparse_conv_cpu sparse_conv_mps sparse_rulebook spatial_benchmark spatial_bricks spatial_bvh
                spatial_bvh_radius spatial_grid_reference spatial_hierarchy_reference spatial_instruments_profile
                spatial_keys spatial_public spatial_radius spatial_radius_fallback_probe spconv_compat spconv_toy_probe
                subm_metal subm_rulebook_mps voxel voxel_fused
                """.split()
            ),
            skips={
                "torch-geometric": NOT_INSTALLED,
                "pytorch3d": NOT_INSTALLED,
                "torch_cluster": NOT_INSTALLED,
                "scipy": NOT_INSTALLED,
                "requires isolated MPS Fast Math": "these run in safe math",
                "k > n": "its own parameters rule it out",
            },
            # It checks that it runs on a Mac, and some of its tests that these variables are set.
            environment={
                "VIRTUAL_MPS_DARWIN": "mps_pointops",
                "PYTORCH_MPS_FAST_MATH": "0",
                "PYTORCH_ENABLE_MPS_FALLBACK": "0",
            },
        ),
    )
}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Gives an extension's folder and the Python to use, prepared once for all processes of pytest-xdist."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared

    def build(name: str) -> tuple[Path, str]:
        source = sources.unpacked(name)
        folder, done = shared / name / source.name, shared / name / "python"
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.copytree(source, folder, dirs_exist_ok=True)
                done.write_text(EXTENSIONS[name].prepare(folder))
        return folder, done.read_text()

    return build


CASES = [(extension.name, file) for extension in EXTENSIONS.values() for file in extension.files]


@pytest.mark.parametrize(("name", "file"), CASES)
def test_its_own_tests(name, file, built, tmp_path, record_property):
    extension = EXTENSIONS[name]
    folder, python = built(name)
    report = tmp_path / "report.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"tests/test_{file}.py"]
    result = _run(command, folder, VIRTUAL_MPS="1", **extension.environment)
    assert result.returncode in (0, 1), result.stdout[-4000:] + result.stderr[-2000:]
    failed, skips, passed = {}, [], 0
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None]
        skipped = case.find("skipped")
        if bad:
            failed[f"test_{file}.py::{case.get('name')}"] = bad[0].get("message")
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            skips.append(skipped.get("message") + (skipped.text or ""))
        else:
            passed += 1
    expected = {test for test in extension.failures if test.startswith(f"test_{file}.py::")}
    assert set(failed) == expected, failed
    assert [text for text in skips if not any(known in text for known in extension.skips)] == []
    assert passed or skips or failed
    for kind, n in (("passed", passed), ("failed with a reason", len(failed)), ("skipped", len(skips))):
        record_property(f"{name}: {kind}", n)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_no_file_is_left_out(name):
    files = {path.stem.removeprefix("test_") for path in (sources.unpacked(name) / "tests").glob("test_*.py")}
    assert files == set(EXTENSIONS[name].files)


AGAINST_FLOAT64 = """
import torch
from mps_bitsandbytes.functional import dequantize_4bit, matmul_4bit, quantize_4bit

x, w = (torch.randn(n, 4096, dtype=torch.float16, device="mps") for n in (128, 1024))
packed, state = quantize_4bit(w, blocksize=64, quant_type="nf4")
restored = dequantize_4bit(packed, state)
exact = x.cpu().double() @ restored.cpu().double().T
terms = x.cpu().double().abs() @ restored.cpu().double().abs().T
for found in (matmul_4bit(x, packed, state), torch.nn.functional.linear(x, restored)):
    # One rounding of the result to float16, and sums in float32 of 4,096 terms.
    bound = exact.abs() * 2**-11 + 64 * 2**-24 * terms + 2**-24
    assert ((found.cpu().double() - exact).abs() <= bound).all()
print("exact")
"""


def test_nf4_product_is_exact_to_rounding(built):
    folder, python = built("mps-bitsandbytes")
    result = _run([python, "-c", AGAINST_FLOAT64], folder, VIRTUAL_MPS="1")
    assert result.stdout == "exact\n", result.stderr[-2000:]
