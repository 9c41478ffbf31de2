"""The four ways in which third-party extensions reach the GPU, each through an extension written in that style."""

import threading

import pytest
import torch

WAYS = ["stream", "command_buffer", "set_args", "kernel_function"]


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize("way", WAYS)
def test_way(mps, axpy, validation, way, deferred):
    launch = getattr(axpy, way)
    with mps.mode(deferred=deferred):
        x = torch.arange(10.0, device="mps")
        y = torch.ones(20, device="mps")
        launch(x, y[5:15], 2.0)  # a view: offset in the storage
        y.mul_(2)  # a stock op behind it
        launch(x[:3] * 1, y[:3], 1.0)
        expected = torch.ones(20)
        expected[5:15] += 2 * torch.arange(10.0)
        expected *= 2
        expected[:3] += torch.arange(3.0)
        assert torch.equal(y.cpu(), expected)
        torch.mps.synchronize()
        assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
def test_compile_shader(mps, validation, deferred):
    library = torch.mps.compile_shader(
        "kernel void axpy(device float* y, device const float* x, constant float& a,"
        " uint i [[thread_position_in_grid]]) { y[i] += a * x[i]; }"
    )
    with mps.mode(deferred=deferred):
        x, y = torch.arange(10.0, device="mps"), torch.ones(20, device="mps")
        library.axpy(y[5:15], x, 2.0, threads=10)
        expected = torch.ones(20)
        expected[5:15] += 2 * torch.arange(10.0)
        assert torch.equal(y.cpu(), expected)


def test_errors_inside_a_block_are_rethrown(axpy):
    x = torch.ones(3, device="mps")
    with pytest.raises(RuntimeError, match="raised inside the block"):
        axpy.set_args(x, x.clone(), 666.0)
    y = torch.zeros(3, device="mps")
    axpy.set_args(x, y, 1.0)
    assert y.tolist() == [1, 1, 1]


def test_cpu_tensors_are_refused(axpy):
    with pytest.raises(RuntimeError, match="must be on mps"):
        axpy.stream(torch.ones(3), torch.ones(3), 1.0)


def test_ways_in_turn_leave_no_encoder_open(axpy, validation):
    x, y = torch.ones(4, device="mps"), torch.zeros(4, device="mps")
    for way in WAYS * 3:
        getattr(axpy, way)(x, y, 1.0)
    assert y.tolist() == [12] * 4


def test_stock_results_go_to_kernels_and_back_without_copies(axpy):
    a = torch.ones(7).to("mps") * 3
    b = torch.zeros(7, device="mps")
    before = torch.mps.current_allocated_memory()
    axpy.stream(a, b, 1.0)
    assert torch.mps.current_allocated_memory() == before
    assert b.add_(a).tolist() == [6] * 7


def test_missing_commit_shows_in_deferred_mode(mps, axpy):
    x, y = torch.ones(4, device="mps"), torch.ones(4, device="mps")
    assert axpy.first_through_own_queue(x, y, 1.0, True) == 2
    with mps.mode(deferred=True):
        assert axpy.first_through_own_queue(x, y, 1.0, True) == 3
        assert axpy.first_through_own_queue(x, y, 1.0, False) == 3, "uncommitted work must not have run"


def test_deferred_work_survives_its_tensors(mps, axpy):
    with mps.mode(deferred=True):
        y = torch.zeros(1000, device="mps")
        for _ in range(20):
            axpy.stream(torch.ones(1000, device="mps"), y, 1.0)  # x is freed before the work runs
        assert y.sum().item() == 20000


def test_threads_share_the_stream(axpy):
    outputs = [torch.zeros(64, device="mps") for _ in range(4)]
    x = torch.ones(64, device="mps")

    def work(y):
        for _ in range(200):
            axpy.stream(x, y, 1.0)

    threads = [threading.Thread(target=work, args=(y,)) for y in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [y[0].item() for y in outputs] == [200] * 4
    assert all(torch.equal(y.cpu(), torch.full((64,), 200.0)) for y in outputs)
