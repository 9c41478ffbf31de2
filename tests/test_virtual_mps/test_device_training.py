"""What a training script does: modules, optimizers, autocast, GradScaler, checkpointing, DataLoader, Trainer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("mps")

MODULES = {
    "linear": (nn.Linear(4, 3), (2, 4)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 5)),
    "conv1d": (nn.Conv1d(3, 4, 3), (2, 3, 7)),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 4, 2, 2), (1, 3, 4, 4)),
    "layer_norm": (nn.LayerNorm(4), (2, 4)),
    "rms_norm": (nn.RMSNorm(4), (2, 4)),
    "batch_norm": (nn.BatchNorm1d(4), (5, 4)),
    "group_norm": (nn.GroupNorm(2, 4), (2, 4, 3)),
    "gru": (nn.GRU(4, 5), (3, 2, 4)),
    "lstm": (nn.LSTM(4, 5), (3, 2, 4)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    "max_pool2d": (nn.MaxPool2d(2), (1, 2, 4, 4)),
    "gelu": (nn.GELU(), (3,)),
    "softmax": (nn.Softmax(-1), (2, 3)),
    "embedding_like": (nn.Sequential(nn.Linear(3, 2), nn.SiLU()), (2, 3)),
}


@pytest.mark.parametrize(("module", "shape"), MODULES.values(), ids=MODULES)
def test_modules_against_float64(module, shape):
    torch.manual_seed(0)
    reference, device = copy.deepcopy(module).double(), copy.deepcopy(module).to("mps")
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = x.detach().float().to("mps").requires_grad_()
    expected, result = reference(x), device(y)
    expected, result = (out[0] if isinstance(out, tuple) else out for out in (expected, result))
    assert result.is_mps
    expected.square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y.grad.cpu().double(), x.grad, atol=1e-4, rtol=1e-4)
    for p, q in zip(reference.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu().double(), p.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool_mask", "float_mask", "gqa"])
def test_attention_against_float64(kind, requires_grad):
    torch.manual_seed(0)
    heads = 1 if kind == "gqa" else 2
    q, k, v = (torch.randn(1, n, 5, 8, dtype=torch.float64) for n in (2, heads, heads))
    kwargs = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool_mask": {"attn_mask": torch.ones(5, 5).tril().bool()},
        "float_mask": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
        "gqa": {"enable_gqa": True},
    }[kind]
    on_device = {
        name: value.to("mps", torch.bool if value.dtype == torch.bool else torch.float32)
        if torch.is_tensor(value)
        else value
        for name, value in kwargs.items()
    }
    a = q.clone().requires_grad_(requires_grad)
    b = q.float().to("mps").requires_grad_(requires_grad)
    expected = F.scaled_dot_product_attention(a, k, v, **kwargs)
    result = F.scaled_dot_product_attention(b, k.float().to("mps"), v.float().to("mps"), **on_device)
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    if requires_grad:
        expected.square().sum().backward()
        result.square().sum().backward()
        torch.testing.assert_close(b.grad.cpu().double(), a.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kwargs", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers(optimizer, kwargs):
    torch.manual_seed(0)
    host = nn.Linear(4, 2)
    device = copy.deepcopy(host).to("mps")
    x = torch.randn(3, 4)
    steps = [optimizer(module.parameters(), lr=0.1, **kwargs) for module in (host, device)]
    for _ in range(3):
        for module, step, data in zip((host, device), steps, (x, x.to("mps")), strict=True):
            module(data).square().sum().backward()
            step.step()
            step.zero_grad()
    torch.testing.assert_close(device.weight.detach().cpu(), host.weight.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    x, w = torch.randn(2, 4, device="mps"), torch.randn(3, 4, device="mps", requires_grad=True)
    with torch.autocast("mps", dtype=dtype):
        y = F.linear(x, w)
        assert y.dtype == dtype
        assert F.layer_norm(y, (3,)).dtype == torch.float32
    y.float().sum().backward()
    assert w.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, w).dtype == torch.float32


def test_grad_scaler():
    module = nn.Linear(4, 1).to("mps")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler = torch.amp.GradScaler("mps", init_scale=8.0)
    before = module.weight.detach().clone()
    with torch.autocast("mps", dtype=torch.float16):
        loss = module(torch.randn(3, 4, device="mps")).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(module.weight, before) and scaler.get_scale() == 8.0
    optimizer.zero_grad()
    before = module.weight.detach().clone()
    scaler.scale(module(torch.full((3, 4), float("inf"), device="mps")).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and torch.equal(module.weight, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    w = torch.randn(4, 4, device="mps", requires_grad=True)
    x = torch.randn(2, 4, device="mps", requires_grad=True)

    def block(a):
        return (a @ w).relu().square()

    expected = torch.autograd.grad(block(x).sum(), (w, x))
    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(w.grad, expected[0]) and torch.equal(x.grad, expected[1])


def test_save_on_cpu():
    w = torch.randn(4, 4, device="mps", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = (w @ w).square().sum()
    loss.backward()
    assert w.grad.is_mps


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers):
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0))
    batches = [
        batch.to("mps", non_blocking=True) for (batch,) in DataLoader(data, 4, pin_memory=True, num_workers=workers)
    ]
    assert sum(batch.sum().item() for batch in batches) == 28


def test_function_transforms():
    from torch.func import grad, vmap

    assert grad(lambda t: (t**2).sum())(torch.ones(2, device="mps")).tolist() == [2, 2]
    assert vmap(lambda t: t * 2)(torch.ones(2, 3, device="mps")).sum().item() == 12
    with torch.inference_mode():
        assert (torch.ones(2, device="mps") * 2).tolist() == [2, 2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()

    def f(x, w):
        return F.gelu(F.linear(x, w)).softmax(-1).square().sum()

    x, w = torch.randn(2, 4, device="mps"), torch.randn(3, 4, device="mps", requires_grad=True)
    expected = f(x, w)
    (expected_grad,) = torch.autograd.grad(expected, w)
    result = torch.compile(f, backend=backend, fullgraph=True)(x, w)
    (grad,) = torch.autograd.grad(result, w)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(grad, expected_grad)


def _small_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "checkpointing"])
def test_trainer_with_lora(precision, tmp_path):
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    model = peft.get_peft_model(
        _small_model(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        learning_rate=1e-2,
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        gradient_checkpointing=precision == "checkpointing",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    result = trainer.train()
    assert trainer.args.device.type == "mps"
    assert {parameter.device.type for parameter in model.parameters()} == {"mps"}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(3 < loss < 6 for loss in losses), losses
    assert abs(result.training_loss - sum(losses) / 3) < 1e-2
    assert (tmp_path / "checkpoint-3/adapter_model.safetensors").exists()


def test_generation_equals_the_cpus():
    model = _small_model().eval()
    prompt = torch.tensor([[1, 5, 9, 2]])
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    result = model.to("mps").generate(prompt.to("mps"), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(result.cpu(), expected)
