"""How kernels run: as a loop or on fibres, on several threads, and when they do what they must not."""

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from virtual_mps import executor
from virtual_mps.compiler import build_runtime
from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
SOURCE = (
    HEADER
    + """
kernel void twice(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) { y[i] = x[i] * 2; }
kernel void sum(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                uint i [[thread_position_in_grid]], uint g [[threadgroup_position_in_grid]],
                uint t [[thread_index_in_threadgroup]], uint s [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[32];
  float v = simd_sum(x[i]);
  partial[s] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) { float total = 0; for (int n = 0; n < 8; n++) total += partial[n]; y[g] = total; }
}
kernel void divide(const device int* x [[buffer(0)]], device int* y [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) { y[i] = 100 / x[i]; }
[[kernel, max_total_threads_per_threadgroup(64)]] void small(device float* y [[buffer(0)]],
                                                            uint i [[thread_position_in_grid]]) { y[i] = 1; }
"""
)


@pytest.fixture(scope="module")
def library():
    return Library(SOURCE)


def check_sum(kernel, groups=64):
    x = np.random.default_rng(groups).integers(0, 100, (groups, 256)).astype(np.float32)
    y = np.zeros(groups, np.float32)
    kernel(x, y, threadgroups=(groups,), threads_per_threadgroup=(256,))
    np.testing.assert_array_equal(y, x.sum(1))


def test_a_kernel_that_never_waits_needs_no_fibres(library):
    assert not library.kernel("twice").waits
    assert library.kernel("sum").waits


@pytest.mark.parametrize("groups", [1, 2, 3, 64, 1000])
def test_grids_of_all_sizes(library, groups):
    check_sum(library.kernel("sum"), groups)


def test_a_grid_of_nothing(library):
    y = np.zeros(4, np.float32)
    library.kernel("twice")(y, y, threads=(0,))
    np.testing.assert_array_equal(y, 0)


def test_several_threads_may_launch_at_once(library):
    failures = []

    def work(seed):
        try:
            for groups in range(1, 60):
                check_sum(library.kernel("sum"), groups + seed)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(
    not Path("/usr/include/boost/context/detail/fcontext.hpp").exists(),
    reason="libboost-context-dev is not installed, which x86-64 does without",
)
def test_boost_context_switches_as_well():
    """What runs on machines other than x86-64. In a process of its own: kernels bind to the runtime loaded first."""
    code = (
        "import numpy as np, sys\n"
        "from virtual_mps import executor\n"
        "from virtual_mps.compiler import build_runtime\n"
        "api = executor.load(build_runtime(boost_fibres=True))\n"
        "kernel = executor.Library(sys.stdin.read(), api=api).kernel('sum')\n"
        "x = np.arange(16 * 256, dtype=np.float32).reshape(16, 256) % 97\n"
        "y = np.zeros(16, np.float32)\n"
        "kernel(x, y, threadgroups=(16,), threads_per_threadgroup=(256,))\n"
        "maps = open('/proc/self/maps').read()\n"
        "print((y == x.sum(1)).all(), 'boost_context' in maps, maps.count('/boost/libvmps') > 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], input=SOURCE, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["True", "True", "True"], result.stderr


def test_a_forked_child_runs_kernels_too(library):
    kernel = library.kernel("sum")
    check_sum(kernel, 200)
    process = multiprocessing.get_context("fork").Process(target=check_sum, args=(kernel, 200))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1025,), r"kernel 'twice': threads per threadgroup \(1025, 1, 1\): at most 1024 in all"),
        ((32, 33), "at most 1024"),
        ((65536, 65536), "at most 1024"),
        ((0, 1), "must not be 0"),
    ],
)
def test_impossible_threadgroups(library, shape, message):
    y = np.zeros(4, np.float32)
    with pytest.raises(MetalError, match=message):
        library.kernel("twice")(y, y, threadgroups=(1,), threads_per_threadgroup=shape)


def test_a_limit_that_the_kernel_states(library):
    kernel = library.kernel("small")
    y = np.zeros(65, np.float32)
    kernel(y, threads=(65,), threads_per_threadgroup=(64,))
    assert y.all()
    with pytest.raises(MetalError, match=r"kernel 'small'.*at most 64"):
        kernel(y, threads=(65,), threads_per_threadgroup=(65,))


@pytest.mark.usefixtures("plain_run")
def test_an_unbound_slot_that_is_read_is_an_error_not_a_crash(library):
    y = np.zeros(64, np.float32)
    with pytest.raises(MetalError, match=r"kernel 'twice', threadgroup \(0, 0, 0\): thread \(0, 0, 0\): access to"):
        library.kernel("twice")(None, y, threads=(64,))
    with pytest.raises(MetalError, match=r"kernel 'sum'.*access to address"):
        library.kernel("sum")(None, y, threadgroups=(2,), threads_per_threadgroup=(256,))
    check_sum(library.kernel("sum"))


def test_division_by_zero_is_an_error_not_a_crash(library):
    x = np.array([1, 2, 0, 4], np.int32)
    with pytest.raises(MetalError, match=r"thread \(2, 0, 0\): integer division by zero"):
        library.kernel("divide")(x, np.zeros(4, np.int32), threads=(4,))


def test_faults_outside_of_kernels_stay_fatal(library):
    code = (
        "import ctypes, numpy as np\n"
        "from virtual_mps.executor import Library\n"
        "y = np.zeros(4, np.float32)\n"
        f"Library({SOURCE!r}).kernel('twice')(y, y, threads=(4,))\n"
        "print('alive', flush=True)\n"
        "ctypes.string_at(8)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("alive\n", -11)


def test_faults_in_kernels_pass_by_a_fault_handler_installed_later(library):
    code = (
        "import faulthandler, numpy as np\n"
        "from virtual_mps.executor import Library, MetalError\n"
        "y = np.zeros(64, np.float32)\n"
        f"kernel = Library({SOURCE!r}).kernel('twice')\n"
        "kernel(y, y, threads=(64,))\n"
        "faulthandler.enable()\n"
        "try: kernel(None, y, threads=(64,))\n"
        "except MetalError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "kernel 'twice', threadgroup (0, 0, 0): access to address" in result.stdout, result.stderr


def test_a_stack_that_does_not_fit_is_refused():
    library = Library(
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      float a[20000];
      for (int n = 0; n < 20000; n++) a[n] = y[(n * i) % 7];
      y[i] = a[i * 777 % 20000];
    }"""
    )
    with pytest.raises(
        MetalError, match="program_source:4:5: error: the local variables of kernel 'k' take more than 49152"
    ):
        library.kernel("k")


def test_the_number_of_threads_is_a_setting():
    code = (
        "import numpy as np, os\n"
        "from virtual_mps.executor import Library\n"
        "x = np.zeros(1 << 22, np.float32)\n"
        f"Library({SOURCE!r}).kernel('twice')(x, x, threads=(1 << 22,), threads_per_threadgroup=(64,))\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    counts = [
        int(subprocess.run([sys.executable, "-c", code], env={**environment, "VIRTUAL_MPS_THREADS": n},
                           capture_output=True, text=True, check=True).stdout)
        for n in ("1", "4")
    ]  # fmt: skip
    assert counts[1] - counts[0] == 3


def test_the_c_interface_survives_bad_calls():
    api = executor.load(build_runtime())
    error = executor.ctypes.c_void_p()
    assert api.vmps_library_create(b"kernel void", 11, None, executor.ctypes.byref(error)) is None
    assert b"error" in executor.ctypes.string_at(error.value)
    api.vmps_free(error)
    api.vmps_kernel_destroy(None)
    api.vmps_library_destroy(None)
