"""Checkpoints: a folder that PeftModel.from_pretrained loads, plus everything that continues the run exactly."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from . import UserError
from .folders import RUN_FILE, checkpoint_folder

STATE_FILE = "training_state.pt"
ADAPTER_FILE = "adapter_model.safetensors"


def save(adapter_path: Path, iteration: int, model: PeftModel, training_state: dict, run: dict) -> Path:
    """Writes a checkpoint that is either complete or absent, whenever the process or the machine stops.

    Args:
        training_state: what `weights_only` unpickling accepts.
        run: goes to ``run.json``.
    """
    target = checkpoint_folder(adapter_path, iteration)
    if target.exists():  # Ctrl-C directly after a periodic save
        return target
    adapter_path.mkdir(parents=True, exist_ok=True)
    temporary = adapter_path / f".{target.name}.tmp"
    if temporary.exists():  # left by a run that was killed while it saved
        shutil.rmtree(temporary)
    temporary.mkdir()
    # Not "auto", which looks the base model up on the hub to see whether its vocabulary has changed.
    model.save_pretrained(temporary, save_embedding_layers=False)
    torch.save(training_state, temporary / STATE_FILE)
    (temporary / RUN_FILE).write_text(json.dumps(run, indent=2), encoding="utf-8")
    for path in [*temporary.iterdir(), temporary]:
        _to_disk(path)
    temporary.rename(target)
    _to_disk(adapter_path)
    return target


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_training_state(checkpoint: Path) -> dict:
    return torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)


def load_adapter(model: PeftModel, path: Path) -> None:
    """Loads adapter weights, from a safetensors file or a folder with one, into the adapter that `model` has."""
    file = path / ADAPTER_FILE if path.is_dir() else path
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"adapter {file}: {error}") from error
    have = {
        name: tuple(tensor.shape)
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    came = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if came != have:
        name = min(name for name in have.keys() | came.keys() if have.get(name) != came.get(name))
        raise UserError(
            f"adapter {file}: {name} is {came.get(name, 'absent')}, but --rank, --num-layers and --target-modules make "
            f"it {have.get(name, 'absent')}"
        )
    set_peft_model_state_dict(model, weights)


def random_state(device: torch.device) -> dict:
    """The state of every generator that training may draw from."""

    name, keys, *rest = numpy.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def restore_random_state(state: dict, device: torch.device) -> None:

    random.setstate(state["python"])
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"])
