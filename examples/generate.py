"""Answers several prompts together, with their keys and values in one paged cache.

Each prompt is read by itself; then all sequences get their next tokens at once, and one that ends makes room.
``python examples/generate.py "Why is the sky blue?" "Name three rivers."``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

import torch_metalk


@torch.no_grad()
def generate(
    model: nn.Module, prompts: list[Tensor], cache: torch_metalk.PagedCache, *, max_new_tokens: int, end: int | None
) -> list[list[int]]:
    """The likeliest next tokens of each prompt, up to `end` or so many.

    Args:
        model: patched, on the device of prompts and cache.
        prompts: token ids, ``[length]`` each.
    """

    def next_tokens(sequences: list[int], ids: Tensor) -> list[int]:
        step = cache.extend(sequences, ids.shape[1])
        out = model(ids, position_ids=step.positions, paged_step=step, use_cache=False, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1).tolist()

    sequences = [cache.add() for _ in prompts]
    answers = {s: next_tokens([s], prompt[None]) for s, prompt in zip(sequences, prompts, strict=True)}
    active = list(sequences)
    while True:
        for s in list(active):
            if answers[s][-1] == end or len(answers[s]) == max_new_tokens:
                active.remove(s)
                cache.free(s)
        if not active:
            return list(answers.values())
        ids = torch.tensor([[answers[s][-1]] for s in active], device=prompts[0].device)
        for s, token in zip(active, next_tokens(active, ids), strict=True):
            answers[s].append(token)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main(argv: list[str] | None = None) -> int:
    from finetune import UserError
    from finetune.model import find_device, find_model, load_model, load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="what the user says, one argument a conversation")
    parser.add_argument("--model", help="folder, .gguf file or hub name; default: SmolLM2-135M-Instruct")
    parser.add_argument("--max-new-tokens", type=positive, default=40)
    parser.add_argument("--pages", type=positive, default=64, help="pages that all conversations share")
    parser.add_argument("--page-size", type=int, default=16, choices=(8, 16, 32), help="tokens of a page")
    parser.add_argument("--device", help="default: mps if there is one, else cpu")
    options = parser.parse_args(argv)
    try:
        device, source = find_device(options.device), find_model(options.model)
        tokenizer, model = load_tokenizer(source), load_model(source, "fp32", device).eval()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch_metalk.patch(model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"][0].to(device)
        for text in options.prompts
    ]
    cache = torch_metalk.PagedCache.for_model(model, options.pages, options.page_size)
    try:
        answers = generate(model, prompts, cache, max_new_tokens=options.max_new_tokens, end=tokenizer.eos_token_id)
    except torch_metalk.CacheFull as error:
        print(f"error: {error}; see --pages", file=sys.stderr)
        return 2
    for text, answer in zip(options.prompts, answers, strict=True):
        print(f"> {text}\n{tokenizer.decode(answer, skip_special_tokens=True)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
