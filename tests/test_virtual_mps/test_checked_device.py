"""Checked mode of the device: what is written, who may write, and how it is switched."""

import os
import subprocess
import sys

import pytest
import torch

SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void twice(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = 2 * x[i]; }
kernel void add(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] += x[i]; }
kernel void shift(device const float* x, device float* y, constant uint& by, uint i [[thread_position_in_grid]]) {
  y[i] = x[i + by];
}
"""


@pytest.fixture
def check(mps):
    with mps.mode(check=True):
        yield


@pytest.fixture(scope="module")
def library(mps):
    return torch.mps.compile_shader(SOURCE)


def unwritten(*shape):
    return torch.empty(*shape, device="mps")


def test_memory_that_nobody_wrote(check, library):
    with pytest.raises(
        RuntimeError, match=r"kernel 'twice', .*uninitialised read of 4 bytes at program_source:4: byte 0"
    ):
        library.twice(unwritten(8), unwritten(8))


def test_what_a_kernel_wrote_is_written(check, library):
    x, y = torch.ones(8, device="mps"), unwritten(8)
    library.twice(x, y)
    library.twice(y, unwritten(8))


def test_memory_that_a_kernel_wrote_in_part(check, library):
    y = unwritten(8)
    library.twice(torch.ones(8, device="mps"), y, threads=6)
    with pytest.raises(RuntimeError, match=r"uninitialised read.*byte 24 of buffer\(0\) 'x'.*\(2 times\)"):
        library.twice(y, unwritten(8))


WRITES = {
    "fill_": lambda t: t.fill_(1),
    "slices": lambda t: (t[:5].zero_(), t[5:].copy_(torch.ones(3))),
    "copy from the cpu": lambda t: t.copy_(torch.arange(8.0)),
    "out=": lambda t: torch.add(torch.ones(8, device="mps"), 1, out=t),
    "random": lambda t: t.normal_(),
    "foreach": lambda t: torch._foreach_zero_([t]),
    "index_put_": lambda t: t.index_put_((torch.arange(8, device="mps"),), torch.ones(8, device="mps")),
    "set by a view": lambda t: t.view(2, 4).t().copy_(torch.ones(4, 2)),
    "data of the storage": lambda t: t.untyped_storage().copy_(torch.zeros(8).untyped_storage()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_what_stock_ops_wrote_is_written(check, library, write):
    x = unwritten(8)
    write(x)
    library.twice(x, unwritten(8))


RESULTS = {
    "zeros": lambda: torch.zeros(8, device="mps"),
    "to": lambda: torch.arange(8.0).to("mps"),
    "clone": lambda: torch.arange(8.0, device="mps").clone(),
    "matmul": lambda: torch.ones(8, 2, device="mps") @ torch.ones(2, device="mps"),
    "index": lambda: torch.arange(16.0, device="mps")[torch.arange(8, device="mps")],
    "cat": lambda: torch.cat([torch.ones(4, device="mps"), torch.rand(4, device="mps")]),
    "deep copy": lambda: __import__("copy").deepcopy(torch.ones(8, device="mps")),
    "grad": lambda: torch.autograd.grad((x := torch.ones(8, device="mps").requires_grad_()).sin().sum(), x)[0],
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=list(RESULTS))
def test_results_of_stock_ops_are_written(check, library, make):
    library.twice(make().contiguous(), unwritten(8))


def test_a_stock_op_that_writes_a_part(check, library):
    x = unwritten(8)
    x[2:4] = 1
    with pytest.raises(RuntimeError, match=r"uninitialised read.*byte 0 of.*\(6 times\)"):
        library.twice(x, unwritten(8))


def test_a_stock_op_that_only_reads_writes_nothing(check, library):
    x = unwritten(8)
    x.sum().item()
    with pytest.raises(RuntimeError, match="uninitialised"):
        library.twice(x, unwritten(8))


def test_memory_from_before_the_mode_is_taken_as_written(mps, library):
    x = unwritten(8)
    with mps.mode(check=True):
        library.twice(x, unwritten(8))


def test_kernels_outside_of_the_mode_write_too(mps, library):
    with mps.mode(check=True):
        y = unwritten(8)
    library.twice(torch.ones(8, device="mps"), y)
    with mps.mode(check=True):
        library.twice(y, unwritten(8))


def test_a_view_ends_with_its_storage(check, library):
    base = torch.zeros(16, device="mps")
    library.shift(base[4:8], unwritten(4), 8, threads=4)  # outside of the view, and legal Metal
    message = r"out-of-bounds read.*byte 48 of buffer\(0\) 'x', which has 48 bytes from its offset of 16 on"
    with pytest.raises(RuntimeError, match=message):
        library.shift(base[4:8], unwritten(4), 9, threads=4)


def test_one_storage_at_two_slots(check, library):
    base = torch.zeros(65, device="mps")
    library.add(base[:32], base[32:64], threads=32)
    with pytest.raises(RuntimeError, match=r"unordered (read|write)"):
        library.add(base[1:], base, threads=64)


def test_the_device_goes_on_after_a_report(check, library):
    x = torch.ones(8, device="mps")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out-of-bounds"):
            library.shift(x, unwritten(8), 1)
        y = unwritten(8)
        library.shift(x, y, 0)
        assert torch.equal(y.cpu(), torch.ones(8))


def test_deferred_work_is_checked_when_it_runs(mps, library):
    x = torch.ones(8, device="mps")
    with mps.mode(check=True, deferred=True):
        library.shift(x, unwritten(8), 1)
        with pytest.raises(RuntimeError, match=r"kernel 'shift', .*out-of-bounds"):
            torch.mps.synchronize()


def test_concurrent_dispatches_need_a_barrier(mps, framework):
    right = framework.use("scale")
    for deferred in (False, True):
        with mps.mode(check=True, deferred=deferred):
            framework.use("serial_dispatches")
            framework.use("concurrent_dispatches")
            message = (
                r"unordered read of 4 bytes.*'x'.*after a write by a thread of an earlier dispatch, with no memoryBar"
            )
            with pytest.raises(RuntimeError, match=message):
                framework.use("concurrent_dispatches_without_barrier")
            assert framework.use("scale") == right


def test_plain_launches_are_not_checked(mps, library):
    library.twice(torch.ones(8, device="mps"), unwritten(8))
    assert mps.modes()["check"][0] is False


def test_a_report_names_the_seed(mps, library):
    with (
        mps.mode(check=True, seed=77),
        pytest.raises(RuntimeError, match=r"out-of-bounds.*\(in the order of seed 77\)"),
    ):
        library.shift(torch.ones(8, device="mps"), unwritten(8), 1)
    assert mps.modes()["seed"][0] == 0
    with pytest.raises(ValueError, match="seed is -1"):
        mps.activate(seed=-1)


ORDER = """
#include <metal_stdlib>
using namespace metal;
kernel void order(device atomic_uint* next, device uint* y, uint i [[thread_position_in_grid]]) {
  y[i] = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
}
kernel void order_of_fibres(device atomic_uint* next, device uint* y, uint i [[thread_position_in_grid]]) {
  y[i] = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_none);
}
"""


@pytest.mark.parametrize("name", ["order", "order_of_fibres"])
@pytest.mark.parametrize("check", [False, True])
def test_a_seed_gives_an_order(mps, name, check):
    kernel = getattr(torch.mps.compile_shader(ORDER), name)

    def order(seed):
        next, y = torch.zeros(1, dtype=torch.int32, device="mps"), torch.zeros(640, dtype=torch.int32, device="mps")
        with mps.mode(seed=seed, check=check):
            kernel(next, y, threads=640, group_size=64)
        return y.tolist()

    orders = [order(seed) for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1] and len(set(map(tuple, orders))) == 3
    assert sorted(orders[2]) == list(range(640))
    first_of_group = [group.index(min(group)) for group in (orders[0][k : k + 64] for k in range(0, 640, 64))]
    assert len(set(first_of_group)) > 1, "lanes"
    assert [o // 64 for o in orders[0][::64]] != sorted(o // 64 for o in orders[0][::64]), "threadgroups"


def test_the_environment_switches_it_on(mps):
    code = (
        "import torch, virtual_mps\n"
        "virtual_mps.activate()\n"
        "print(virtual_mps.modes()['check'][0], virtual_mps.modes()['seed'][0])\n"
    )
    environment = {**os.environ, "VIRTUAL_MPS_CHECK": "1", "VIRTUAL_MPS_SEED": "5"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["True", "5"], result.stderr
