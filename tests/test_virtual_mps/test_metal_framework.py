"""The Metal framework: what extensions call, and what Metal refuses."""

import subprocess
import sys

import pytest

from virtual_mps.metallib import BIN

RIGHT = {
    "scale": [2, 4, 6, 8],
    "nonuniform_edge": [2, 2, 2, 2, 2, 1],
    "threadgroups": [1, 2, 3, 4, 8, 7, 6, 5],
    "grid_2d": [x + 100 * y + 10000 * (x // 4) for y in range(3) for x in range(5)],
    "function_constants": [13.5, 26.5],
    "absent_by_function_constant": [3, 6],
    "blit": [2, 3, 0, 0],
    "several_encoders_in_turn": [8, 8, 8, 8],
    "serial_dispatches": [4, 8, 12, 16],
    "concurrent_dispatches": [4, 8, 12, 16],
    "times_status_and_handlers": [0, 4, 1, 1, 1],
    "events": [7],
    "pipeline_limits": [1024, 32, 0, 64, 128],
    "device_facts": [1, 1, 1, 0, 32768, 1024, 1],
    "allocated_size": [4096, 0],
    "no_copy": [1, 1, 1],
    "global_queue": [1],
    "private_memory_has_no_contents": [1, 16, 1],
    "missing_function": [1, 5, 4],
    "compile_error": [1, 1],
    "preprocessor_macros": [42],
}

WRONG_ALWAYS = {
    "second_encoder": "A command encoder is already encoding to this command buffer",
    "encoder_after_commit": "_status < MTLCommandBufferStatusCommitted",
    "encode_after_end": "used after endEncoding",
    "commit_with_open_encoder": "commit command buffer with uncommitted encoder",
    "commit_twice": "commit an already committed command buffer",
    "wait_before_commit": "was not committed",
    "handler_after_commit": "Completed handler provided after commit call",
    "encoder_dropped": "Command encoder released without endEncoding",
    "no_pipeline": "no compute pipeline state is set",
    "too_many_threads": r"scale: threadsPerThreadgroup 2048x1x1 = 2048 must be 1..1024",
    "more_threads_than_the_kernel_allows": r"128 must be 1..64",
    "no_threads": r"threadsPerThreadgroup 0x1x1 = 0 must be 1..1024",
    "too_much_threadgroup_memory": "32784 bytes, must be <= 32768",
    "index_31": r"index\(31\) must be < 31",
    "offset_past_the_end": r"offset\(8\) must be <= \[buffer length\]\(4\)",
    "host_pointer_as_buffer": "not an MTLBuffer; is it the data of a CPU tensor",
    "blit_out_of_range": r"bytes 0\+8 are not within the buffer",
    "exception_in_dispatch_sync": "a C\\+\\+ exception left the block: thrown inside",
    "exception_in_dispatch_async": "an exception left an earlier block: thrown inside",
    "dispatch_sync_on_the_same_queue": "deadlock",
}

WRONG_UNDER_VALIDATION = {
    "unbound_buffer": r"Compute Function\(small\): missing Buffer binding at index 0 for x",
    "set_bytes_of_5000": r"length\(5000\) must be <= 4096",
    "threadgroup_length_of_20": r"length\(20\) must be a multiple of 16",
}


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize(("name", "expected"), RIGHT.items(), ids=RIGHT)
def test_right_uses(mps, framework, validation, name, expected, deferred):
    with mps.mode(deferred=deferred):
        assert framework.use(name) == expected


@pytest.mark.parametrize("validation_on", [False, True], ids=["plain", "validation"])
@pytest.mark.parametrize(("name", "message"), WRONG_ALWAYS.items(), ids=WRONG_ALWAYS)
def test_wrong_uses(mps, framework, name, message, validation_on):
    with mps.mode(validation=validation_on), pytest.raises(RuntimeError, match=message):
        framework.misuse(name)
    assert framework.use("scale") == RIGHT["scale"], "a misuse must leave the framework usable"


@pytest.mark.parametrize(("name", "message"), WRONG_UNDER_VALIDATION.items(), ids=WRONG_UNDER_VALIDATION)
def test_api_validation(mps, framework, name, message):
    framework.misuse(name)  # a plain run lets it pass
    with mps.mode(validation=True), pytest.raises(RuntimeError, match=message):
        framework.misuse(name)


def test_dispatch_queues(framework):
    assert framework.queue_order(20) == [*range(20), -1, -2, 1, 1]


def test_deferred_work_runs_at_commit(mps, framework):
    assert framework.read_before_and_after_commit() == [2, 2]
    with mps.mode(deferred=True):
        assert framework.read_before_and_after_commit() == [1, 2]


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
def test_arguments_are_taken_when_encoded(mps, framework, deferred):
    with mps.mode(deferred=deferred):
        assert framework.arguments_outlive_the_caller() == [6, 6, 6, 6]


def _xcrun(*arguments, check=True):
    return subprocess.run(
        [BIN / "xcrun", *map(str, arguments)],
        env={"VIRTUAL_MPS_PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=check,
    )


def test_metallib(framework, tmp_path):
    (tmp_path / "factor.h").write_text("#define FACTOR 5\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.metal").write_text(
            '#include <metal_stdlib>\n#include "factor.h"\nusing namespace metal;\n'
            f"kernel void {name}(device float* x, uint i [[thread_position_in_grid]])"
            " { x[i] = x[i] * FACTOR + EXTRA; }\n"
        )
        air = tmp_path / f"{name}.air"
        _xcrun(
            "-sdk",
            "macosx",
            "metal",
            "-std=metal3.1",
            f"-DEXTRA={len(name)}",
            "-c",
            tmp_path / f"{name}.metal",
            "-o",
            air,
        )
    library = tmp_path / "both.metallib"
    _xcrun("--sdk", "macosx", "metallib", tmp_path / "a.air", tmp_path / "b.air", "-o", library)
    assert framework.load_metallib(str(library), "a") == [6, 11]
    assert framework.load_metallib(str(library), "b") == [6, 11]
    direct = tmp_path / "direct.metallib"
    _xcrun("metal", "-DEXTRA=0", tmp_path / "a.metal", "-o", direct)
    assert framework.load_metallib(str(direct), "a") == [5, 10]


def test_metallib_errors(framework, tmp_path):
    with pytest.raises(RuntimeError, match="library not found"):
        framework.load_metallib(str(tmp_path / "none.metallib"), "a")
    foreign = tmp_path / "apple.metallib"
    foreign.write_bytes(b"MTLB\0\0\0\0")
    with pytest.raises(RuntimeError, match="no metallib of virtual_mps"):
        framework.load_metallib(str(foreign), "a")
    bad_standard = _xcrun("metal", "-std=metal9.9", "-c", "x.metal", check=False)
    assert bad_standard.returncode == 1 and "invalid value 'metal9.9'" in bad_standard.stderr
    missing_tool = _xcrun("swiftc", check=False)
    assert missing_tool.returncode == 72 and "unable to find utility" in missing_tool.stderr
    assert "Apple metal version" in _xcrun("metal", "--version").stdout
