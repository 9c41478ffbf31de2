"""Every state of a LoRA model that PEFT knows, crossed with dtypes, autocast and checkpointing, against stock PEFT.

`make test` runs a selection in which every pair of settings occurs; `make conformance` runs every combination.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from peft import PeftModel
from peft.tuners import lora

from tests import matrices
from tests.matrices import Case
from tests.models import (
    Run,
    add_noise,
    assert_as_accurate,
    assert_identical,
    exact_copy,
    lora_config,
    patched_copy,
    recorded_ops,
    run,
    tiny,
    with_lora,
)

# PEFT and transformers rename things, ask for the old names themselves, and warn of what merged biases mean.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FACTORS: dict[str, Sequence] = {
    "state": ("active", "disabled", "merged", "two active", "mixed batch"),
    "bias": ("none", "lora_only", "all", "lora_bias"),
    "scale": ("plain", "rslora", "scale_layer", "scale 0"),
    "r": (1, 7, 8, 64),
    "base": tuple(DTYPES),
    "adapter": tuple(DTYPES),
    "dropout": (0.0, 0.3),
    "checkpointing": (False, True),
    "autocast": ("none", "fp16", "bf16"),
}


def possible(case: Case) -> bool:
    """PEFT trains biases with one adapter only. A case may lack settings that are still to be chosen."""
    return case.get("state") not in ("two active", "mixed batch") or case.get("bias") not in ("lora_only", "all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the selection; for all cases, one for each of a state, a bias and a scale."""
    matrices.parametrize(metafunc, FACTORS, possible, ("state", "bias", "scale"))


def test_the_selection_has_every_pair():
    selected = matrices.check_selection(FACTORS, possible)
    assert len(selected) < 60


def stock_model(case: Case) -> PeftModel:
    settings = {
        "r": case["r"],
        "use_rslora": case["scale"] == "rslora",
        "lora_dropout": case["dropout"],
        "lora_bias": case["bias"] == "lora_bias",
        "bias": case["bias"] if case["bias"] in ("lora_only", "all") else "none",
    }
    model = with_lora(tiny("llama, biases", DTYPES[case["base"]], num_hidden_layers=1), **settings)
    if case["state"] in ("two active", "mixed batch"):
        model.add_adapter("other", lora_config(**settings | {"r": 5}))
        add_noise(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(DTYPES[case["adapter"]])
        elif "norm" in name:  # so that the gradients of the layers' inputs are compared
            parameter.requires_grad_()
    layers = [module for module in model.modules() if isinstance(module, lora.LoraLayer)]
    for layer in layers:
        if case["scale"] == "scale_layer":
            layer.scale_layer(3.0)
        elif case["scale"] == "scale 0":
            layer.set_scale("default", 0)
        if case["state"] == "disabled":
            layer.enable_adapters(False)
    if case["state"] == "merged":
        model.merge_adapter()
    elif case["state"] == "two active":
        model.base_model.set_adapter(["default", "other"])
    # PEFT takes mixed batches in inference only; it has gradients all the same.
    model.train(case["state"] != "mixed batch")
    if case["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def step(model: PeftModel, case: Case, autocast: bool = True) -> Run:
    options = {"adapter_names": ["default", "other", "__base__"]} if case["state"] == "mixed batch" else {}
    enabled = autocast and case["autocast"] != "none"
    with torch.autocast("cpu", DTYPES.get(case["autocast"]), enabled=enabled):
        return run(model, **options)


def check(case: Case, stock: PeftModel, ours: PeftModel, exact: Callable[[], Run]) -> None:
    with recorded_ops() as ops:
        actual = step(ours, case)
    expected = step(stock, case)
    if case["state"] != "active" or case["bias"] == "lora_bias":
        assert not ops
        assert_identical(actual, expected)
        return
    recomputed = 2 if case["checkpointing"] else 1
    assert ops.lora_layers == 7 * recomputed
    by_layer = case["dropout"] or case["bias"] in ("lora_only", "all")
    assert ops["lora_mlp"] == (0 if by_layer else recomputed)
    assert ops["lora_qkv"] == (0 if by_layer else 2 * recomputed)
    # The loss is one number, and which of two low precisions has it nearer is chance.
    # 3: among some 100,000 tensors of all cases, the ratio of two errors passes 2 by chance, where a gradient is nearly
    # zero (that of k's bias, which attention hardly feels) and rounding is all there is of it.
    assert_as_accurate(actual, expected, exact(), factor=3.0, but=("loss",))


def test_equals_stock(cases):
    # Autocast changes from case to case and is no part of a model, nor of the float64 reference: to make a model takes
    # as long as a step of it.
    for _, group in itertools.groupby(cases, key=lambda case: case | {"autocast": None}):
        group = list(group)
        case = group[0]
        try:
            stock = stock_model(case)
            ours = patched_copy(stock, ["lora_linear", "lora_qkv", "lora_mlp"])
            exact = functools.cache(functools.partial(step, exact_copy(stock), case, autocast=False))
            for case in group:
                check(case, stock, ours, exact)
        except Exception as error:
            error.add_note(f"in {case}")
            raise
