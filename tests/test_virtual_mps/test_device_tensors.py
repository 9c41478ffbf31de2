"""Tensors on the device behave as the CPU's do, alias as they do, and refuse what a Mac refuses."""

import copy
import gc
import io
import pickle

import pytest
import torch

pytestmark = pytest.mark.usefixtures("mps")

FACTORIES = {
    "empty": lambda d: torch.empty(3, device=d).fill_(1),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones_int": lambda d: torch.ones(2, device=d, dtype=torch.int32),
    "full": lambda d: torch.full((2,), 3.5, device=d),
    "arange": lambda d: torch.arange(0, 1, 0.25, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "new_ones": lambda d: torch.zeros(2, device=d).new_ones(3),
    "full_like": lambda d: torch.full_like(torch.zeros(2, device=d), 3),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).zero_(),
    "scalar_tensor": lambda d: torch.scalar_tensor(2, device=d),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factories(make):
    device, host = make("mps"), make("cpu")
    assert device.device == torch.device("mps:0")
    assert device.dtype == host.dtype and device.stride() == host.stride()
    assert torch.equal(device.cpu(), host)


def test_pytorch_sees_the_device():
    assert torch.backends.mps.is_available() and torch.backends.mps.is_built()
    assert torch.mps.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.backends.mps.is_macos_or_newer(14, 0) and not torch.backends.mps.is_macos_or_newer(99, 0)
    assert torch.backends.mps.get_name() == "Virtual MPS"
    with torch.device("mps"):
        assert torch.nn.Linear(2, 2).weight.is_mps
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device="mps").weight.is_mps


VIEWS = {
    "index": lambda t: t[1],
    "slice": lambda t: t[:, 1:, ::2],
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "expand": lambda t: t[..., None].expand(2, 3, 4, 2),
    "unfold": lambda t: t.unfold(2, 2, 1),
    "reshape": lambda t: t.reshape(6, 4),
    "as_strided": lambda t: t.as_strided((2, 2), (3, 1), 5),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "chunk": lambda t: t.chunk(2, -1)[1],
    "view_dtype": lambda t: t.view(torch.int32),
    "unbind": lambda t: t.unbind(1)[2],
    "detach": lambda t: t.detach(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_share_storage(view):
    host = torch.arange(24.0).view(2, 3, 4)
    device = host.to("mps")
    a, b = view(device), view(host)
    assert torch.equal(a.cpu(), b)
    assert (a.stride(), a.storage_offset(), a._is_view()) == (b.stride(), b.storage_offset(), b._is_view())
    assert a.untyped_storage().data_ptr() == device.untyped_storage().data_ptr()


def test_writes_through_views():
    host = torch.arange(24.0).view(2, 3, 4)
    device = host.to("mps")
    for x in (host, device):
        x[0, 1].mul_(2).add_(1)
        x[1].t()[0] = 5
        x[:, 0, 0] = torch.tensor([8.0, 9.0], device=x.device)
    assert torch.equal(device.cpu(), host)


def test_stock_ops_copy_nothing(mps):
    x = torch.zeros(1 << 22, device="mps")
    before, calls = torch.mps.current_allocated_memory(), mps.stock_op_calls()
    x.view(2, -1)[1][:1].add_(1)
    assert mps.stock_op_calls() == calls + 1
    assert torch.mps.current_allocated_memory() == before
    assert x[1 << 21].item() == 1


def test_out_arguments_and_in_place_metadata():
    a = torch.ones(3, device="mps")
    grown = torch.empty(0, device="mps")
    torch.add(a, a, out=grown)
    assert grown.tolist() == [2, 2, 2]
    same = torch.empty(3, device="mps")
    address = same.untyped_storage().data_ptr()
    assert torch.mul(a, 4, out=same) is same
    assert same.untyped_storage().data_ptr() == address and same.tolist() == [4] * 3
    values, indices = torch.empty(0, device="mps"), torch.empty(0, device="mps", dtype=torch.long)
    torch.topk(torch.tensor([1.0, 5, 3], device="mps"), 2, out=(values, indices))
    assert values.tolist() == [5, 3] and indices.tolist() == [1, 2]
    x = torch.zeros(2, device="mps")
    assert x.resize_(5).zero_().tolist() == [0] * 5
    y = torch.zeros(2, 3, device="mps")
    assert y.transpose_(0, 1).unsqueeze_(0).shape == (1, 3, 2)
    x.set_(y)
    assert x.shape == y.shape and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    x.data = torch.ones(2, device="mps")
    assert x.tolist() == [1, 1]


def test_aliased_arguments():
    x = torch.arange(4.0, device="mps")
    assert x.add_(x).tolist() == [0, 2, 4, 6]
    a, b = torch.ones(2, device="mps"), torch.ones(2, device="mps")
    torch._foreach_add_([a, b, a], 1.0)
    assert a.tolist() == [3, 3] and b.tolist() == [2, 2]


def test_many_tensors_in_one_call():
    tensors = [torch.full((2,), float(i), device="mps") for i in range(100)]
    result = torch._foreach_add(tensors, tensors)
    assert all(t.is_mps for t in result)
    assert [t[0].item() for t in result] == [2.0 * i for i in range(100)]


def test_indexing():
    z = torch.zeros(3, device="mps")
    z[torch.tensor([True, False, True])] = 1  # an index on the CPU, as a Mac allows
    z[torch.tensor([1], device="mps")] = 2
    z.index_add_(0, torch.tensor([0, 0], device="mps"), torch.ones(2, device="mps"))
    assert z.tolist() == [3, 2, 1]
    assert z[z > 1].tolist() == [3, 2]


def test_version_counters():
    w = torch.ones(3, device="mps", requires_grad=True)
    y = w * 2
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


FLOAT64 = {
    "to": lambda x: x.to(torch.float64),
    "double": lambda x: x.double(),
    "zeros": lambda x: torch.zeros(2, dtype=torch.float64, device="mps"),
    "from_cpu": lambda x: torch.ones(2, dtype=torch.float64).to("mps"),
    "arange": lambda x: torch.arange(3.0, dtype=torch.float64, device="mps"),
    "sum": lambda x: x.sum(dtype=torch.float64),
    "new_zeros": lambda x: x.new_zeros(2, dtype=torch.float64),
}


@pytest.mark.parametrize("make", FLOAT64.values(), ids=FLOAT64)
def test_float64_is_refused_in_the_macs_words(make):
    words = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
    with pytest.raises(TypeError, match=words):
        make(torch.ones(2, device="mps"))


def test_float64_scalars_are_fine():
    x = torch.ones(2, device="mps")
    assert (x * 2.5).dtype == torch.float32
    assert (x + torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="mps") + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 2) @ torch.ones(2, 2, device="mps")
    with pytest.raises(TypeError, match="can't convert mps:0 device type tensor to numpy"):
        torch.ones(2, device="mps").numpy()
    assert (torch.ones(2, device="mps") * torch.tensor(3.0)).tolist() == [3, 3]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_copies(dtype):
    host = (torch.randn(3, 4) * 3).to(dtype)
    device = host.to("mps", non_blocking=True)
    assert torch.equal(device.cpu(), host)
    assert torch.equal(device.T.contiguous().cpu(), host.T)
    assert torch.equal(device.clone().cpu(), host)
    assert device.to("mps") is device and device.to("mps:0") is device
    back = torch.empty_like(host)
    back.copy_(device)
    assert torch.equal(back, host)
    device.zero_()
    assert not torch.equal(device.cpu(), back), "the copy to the host must not alias the device"
    assert "mps" in repr(device)


def test_conjugate_views():
    host = torch.randn(3, dtype=torch.complex64)
    device = host.to("mps")
    assert torch.equal(device.conj().cpu(), host.conj())
    assert torch.allclose((device.conj() * device).cpu(), (host.conj() * host))


def test_save_load_pickle_deepcopy():
    module = torch.nn.Linear(3, 2).to("mps")
    file = io.BytesIO()
    torch.save({"state": module.state_dict(), "view": torch.arange(9.0, device="mps")[2:5]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["state"]["weight"].is_mps and torch.equal(
        loaded["state"]["weight"].cpu(), module.weight.detach().cpu()
    )
    assert loaded["view"].tolist() == [2, 3, 4] and loaded["view"].storage_offset() == 2
    file.seek(0)
    assert torch.load(file, map_location="cpu")["view"].device.type == "cpu"
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    file.seek(0)
    assert torch.load(file, map_location="mps").is_mps
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight.detach().cpu(), module.weight.detach().cpu())
    duplicate = copy.deepcopy(module)
    duplicate.weight.data.zero_()
    assert duplicate.weight.is_mps and module.weight.abs().sum() > 0
    with pytest.raises((TypeError, RuntimeError)):
        torch.UntypedStorage("nonsense", device="mps")


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weight = torch.randn(3, 2, device="mps")
    safetensors.save_file({"weight": weight}, tmp_path / "t.safetensors")
    loaded = safetensors.load_file(tmp_path / "t.safetensors", device="mps")["weight"]
    assert loaded.is_mps and torch.equal(loaded.cpu(), weight.cpu())


def test_memory_figures():
    gc.collect()
    torch.mps.empty_cache()
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1000, device="mps")
    assert torch.mps.current_allocated_memory() - before == 4000
    view = x[10:]
    del x
    assert torch.mps.current_allocated_memory() - before == 4000
    result = view + 1
    del view
    assert torch.mps.current_allocated_memory() - before == 3960
    del result
    assert torch.mps.current_allocated_memory() == before
    assert torch.mps.driver_allocated_memory() == before + 4000 + 3960, "the driver keeps the most there was at a time"
    torch.mps.empty_cache()
    assert torch.mps.driver_allocated_memory() == before
    assert torch.mps.recommended_max_memory() > 0


def test_too_much_memory():
    with pytest.raises(RuntimeError, match="Invalid buffer size"):
        torch.empty(1 << 50, device="mps")
    gc.collect()
    try:
        torch.mps.set_per_process_memory_fraction(1e-9)
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            torch.empty(1 << 20, device="mps")
    finally:
        torch.mps.set_per_process_memory_fraction(0.0)
    torch.empty(1 << 20, device="mps")


def test_no_leak_in_training():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to("mps")

    def step():
        module(torch.randn(32, 64, device="mps")).sum().backward()
        module.zero_grad()

    step()
    gc.collect()
    before = torch.mps.current_allocated_memory()
    for _ in range(50):
        step()
    gc.collect()
    assert torch.mps.current_allocated_memory() == before


def test_events():
    a, b = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    a.record()
    x = torch.randn(200, 200, device="mps")
    (x @ x).sum().item()
    b.record()
    b.synchronize()
    assert b.query() and 0 < a.elapsed_time(b) < 10_000
    untimed = torch.mps.Event()
    untimed.record()
    with pytest.raises(RuntimeError, match="enable_timing"):
        a.elapsed_time(untimed)
    event = torch.Event("mps")
    event.record()
    event.synchronize()
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().device == torch.device("mps:0")


def test_pinned_memory():
    pinned = torch.zeros(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.zeros(3).is_pinned()
    assert torch.equal(pinned.to("mps", non_blocking=True).cpu(), pinned)


def test_host_alias_of_a_storage():
    x = torch.arange(4.0, device="mps")
    if not hasattr(torch.mps, "_host_alias_storage"):
        pytest.skip("this PyTorch has no torch.mps._host_alias_storage")
    alias = torch.mps._host_alias_storage(x.untyped_storage())
    host = torch.empty(0).set_(alias)
    host[1] = 9
    assert x.tolist() == [0, 9, 2, 3]


def test_poisoned_memory(mps):
    with mps.mode(poison=True):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch.empty(5, dtype=dtype, device="mps").isnan().all()
        assert torch.zeros(5, device="mps").sum().item() == 0


def test_strict_mode_refuses_what_a_mac_refuses(mps):
    x = torch.eye(3, device="mps")
    assert torch.linalg.eigvals(x).is_mps  # has no MPS kernel; served by the CPU otherwise
    with mps.mode(strict=True):
        with pytest.raises(
            NotImplementedError, match="The operator 'aten::_linalg_eigvals' is not currently implemented for the MPS"
        ):
            torch.linalg.eigvals(x)
        w = torch.randn(3, 3, device="mps", requires_grad=True)
        torch.nn.functional.layer_norm(torch.nn.functional.linear(x, w), (3,)).softmax(-1).sum().backward()
        assert w.grad.is_mps
    assert torch.linalg.eigvals(x).is_mps


def test_threads():
    import threading

    failures = []

    def work(i):
        try:
            for _ in range(30):
                x = torch.full((16, 16), float(i), device="mps", requires_grad=True)
                (x @ x).sum().backward()
                assert x.grad[0, 0].item() == 2 * 16 * i
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
