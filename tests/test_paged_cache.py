from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import models
from torch_metalk import CacheFull, PagedCache, patch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from generate import generate, main


def tiny(family: str, device: torch.device):
    settings = models._COMMON | {"model_type": family} | models.FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval().to(device)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
@torch.no_grad()
def test_together_they_say_what_each_says_alone(family, device):
    """Greedy tokens of prompts of different lengths, longer than a page and than a window, to different ends."""
    model = tiny(family, device)
    prompts = [torch.randint(2, 300, (n,), device=device) for n in (3, 17, 9, 1)]
    stock = copy.deepcopy(model)
    expected = [
        stock.generate(p[None], max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(p) :].tolist()
        for p in prompts
    ]
    end = expected[1][4]
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
    assert len({len(tokens) for tokens in expected}) > 1
    patch(model)
    cache = PagedCache.for_model(model, pages=8, page_size=8)
    assert generate(model, prompts, cache, max_new_tokens=8, end=end) == expected
    assert cache.free_pages == 8


@torch.no_grad()
def test_several_tokens_at_once(device):
    """As a draft's tokens are verified: 5 tokens behind what is there, in sequences of different lengths."""
    model = tiny("llama", device)
    texts = [torch.randint(2, 300, (n,), device=device) for n in (12, 25)]
    expected = torch.cat([model(t[None], use_cache=False).logits[:, -5:] for t in texts])
    patch(model)
    cache = PagedCache.for_model(model, pages=8, page_size=8)
    sequences = [cache.add(), cache.add()]
    for sequence, text in zip(sequences, texts, strict=True):
        step = cache.extend([sequence], len(text) - 5)
        model(text[None, :-5], position_ids=step.positions, paged_step=step, use_cache=False)
    step = cache.extend(sequences, 5)
    ids = torch.stack([t[-5:] for t in texts])
    logits = model(ids, position_ids=step.positions, paged_step=step, use_cache=False).logits
    # Two layers of products in float32, in another order; the logits are about 10.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_pages_come_and_go():
    cache = PagedCache(1, 4, 1, 8, page_size=8)
    a, b = cache.add(), cache.add()
    step = cache.extend([a, b], 8)
    assert (step.first, cache.free_pages) == (True, 2)
    assert step.positions.tolist() == [list(range(8))] * 2
    step = cache.extend([b], 1)
    assert (step.first, cache.free_pages, cache.length(b)) == (False, 1, 9)
    assert step.positions.tolist() == [[8]]
    assert step.lengths.tolist() == [9]
    pages = step.tables[0].tolist()
    assert step.slots.tolist() == [8 * pages[1]]
    assert cache.extend([a, b], 1).tables.shape == (2, 2)
    assert cache.free_pages == 0
    with pytest.raises(CacheFull, match="1 pages are needed and 0 are free"):
        cache.extend([cache.add()], 3)
    cache.extend([b], 6)  # there is room on its page
    cache.free(a)
    assert cache.free_pages == 2
    step = cache.extend([b, cache.add()], 8)
    assert len(set(step.tables.flatten().tolist()) - {-1}) == 4, "no page has two owners"


def test_what_it_refuses(device):
    with pytest.raises(ValueError, match="'page_size' is 12"):
        PagedCache(1, 4, 1, 8, page_size=12)
    cache = PagedCache(1, 4, 1, 8)
    a = cache.add()
    for sequences, tokens, message in (([a, a], 1, "each once"), ([7], 1, "each once"), ([a], 0, "at least 1")):
        with pytest.raises(ValueError, match=message):
            cache.extend(sequences, tokens)
    cache.extend([a], 9)
    with pytest.raises(ValueError, match=r"9 tokens for sequences of \[9\]; accepted: at least 1, and at most 8"):
        cache.extend([a], 9)
    model = tiny("llama", device)
    with pytest.raises(ValueError, match="the model's attention is 'sdpa'"):
        PagedCache.for_model(model, pages=4)
    patch(model)
    cache = PagedCache.for_model(model, pages=4)
    step = cache.extend([cache.add()], 3)
    ids = torch.ones(1, 3, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match=r"call it under torch.no_grad"):
        model(ids, position_ids=step.positions, paged_step=step, use_cache=False)
    for arguments, message in (
        ({"layers": 0}, "'layers' is 0"),
        ({"pages": -1}, "'pages' is -1"),
        ({"dtype": torch.int32}, "'dtype' is torch.int32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            PagedCache(**({"layers": 1, "pages": 4, "kv_heads": 1, "head_dim": 8} | arguments))
    with pytest.raises(ValueError, match=r"PagedCache.free: sequences \[99\]"):
        cache.free(99)
    with pytest.raises(ValueError, match=r"PagedCache.length: sequences \[99\]"):
        cache.length(99)


@torch.no_grad()
def test_a_step_is_for_one_pass_of_its_tokens(device):
    """A step that is too old, of other tokens or at other positions would write into what others own."""
    model = tiny("llama", device)
    patch(model)
    cache = PagedCache.for_model(model, pages=4)
    sequence = cache.add()
    ids = torch.ones(1, 3, dtype=torch.long, device=device)

    def run(ids, step, **arguments):
        return model(ids, paged_step=step, use_cache=False, **arguments).logits

    first = cache.extend([sequence], 3)
    with pytest.raises(ValueError, match=r"tokens of shape \(1, 2\); accepted: \(1, 3\)"):
        run(ids[:, :2], first, position_ids=first.positions[:, :2])
    assert torch.equal(run(ids, first, position_ids=first.positions.clone()), run(ids, first))
    second = cache.extend([sequence], 3)
    with pytest.raises(ValueError, match=r"position_ids=step\.positions"):
        run(ids, second)
    with pytest.raises(ValueError, match="a step is for one pass"):
        run(ids, first, position_ids=first.positions)
    run(ids, second, position_ids=second.positions)
    cache.free(sequence)
    with pytest.raises(ValueError, match="a step is for one pass"):
        run(ids, second, position_ids=second.positions)


@pytest.mark.parametrize("arguments", [("--max-new-tokens", "0"), ("--pages", "-3")])
def test_the_example_refuses_what_is_no_number(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "Hello"])
    assert caught.value.code == 2
    assert f"{arguments[1]} is not at least 1" in capsys.readouterr().err
