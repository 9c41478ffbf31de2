"""Text and JSONL into token rows, and token rows into batches."""

import difflib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch

from . import UserError

IGNORE = -100  # the target that torch.nn.functional.cross_entropy skips
SPLITS = ("train", "valid", "test")


class Row(NamedTuple):
    where: str  # file and row number, for messages
    kind: str  # "text", "completion" or "chat"
    value: dict[str, Any]


class Sample(NamedTuple):
    input_ids: list[int]
    targets: list[int]  # the token that follows each of input_ids, or IGNORE


@dataclass(frozen=True)
class Source:
    """What was read, before there is a tokenizer: rows of JSONL, or documents of running text."""

    splits: dict[str, list[Row]] | None
    documents: list[str] | None = None


@dataclass(frozen=True)
class Dataset:
    train: list[Sample]
    valid: list[Sample]
    test: list[Sample]
    notes: list[str]  # what was cut, dropped or held out

    @cached_property
    def sha256(self) -> str:
        """Of what is trained on."""
        return hashlib.sha256(json.dumps(self.train).encode()).hexdigest()

    def sample_prompt(self) -> list[int]:
        """What a model can show its progress on: the prompt of a row, or the beginning of running text."""
        sample = (self.valid or self.train)[0]
        prompt_length = sum(1 for _ in takewhile(lambda target: target == IGNORE, sample.targets)) + 1
        return sample.input_ids[: prompt_length if prompt_length > 1 else 24]


def read(data: str | None, *, mask_prompt: bool, test: bool) -> Source:
    """Reads and checks the data; nothing is tokenized yet.

    Raises:
        UserError: naming file, row and key.
    """
    if data is None:
        return _documents(_language_reference(), "the language reference", mask_prompt)
    path = Path(data)
    if path.is_dir():
        files = {name: path / f"{name}.jsonl" for name in SPLITS if (path / f"{name}.jsonl").is_file()}
        if "train" not in files:
            found = ", ".join(sorted(child.name for child in path.iterdir())[:10]) or "nothing"
            raise UserError(f"--data {path}: no train.jsonl; the folder has {found}")
        if test and "test" not in files:
            raise UserError(f"--test: no test.jsonl in {path}")
    elif not path.is_file():
        raise UserError(f"--data {path}: no such file or folder; expected text, .jsonl, or a folder with train.jsonl")
    elif path.suffix == ".jsonl":
        files = {"train": path}
        if test:
            raise UserError(f"--test: {path} is one file; put test.jsonl beside train.jsonl and give the folder")
    elif path.suffix == ".json":
        raise UserError(f"--data {path}: expected text, or .jsonl with one object per line, not .json")
    else:
        return _documents([_read_text(path)], str(path), mask_prompt)
    splits = {name: list(_read_rows(file)) for name, file in files.items()}
    if mask_prompt:
        for row in (row for rows in splits.values() for row in rows if row.kind == "text"):
            raise UserError(f"{row.where}: --mask-prompt needs a prompt, and 'text' has none")
    return Source(splits)


def _documents(documents: list[str], where: str, mask_prompt: bool) -> Source:
    if mask_prompt:
        raise UserError(f"--mask-prompt needs rows with prompts, and {where} is running text")
    if not any(document.strip() for document in documents):
        raise UserError(f"--data {where}: no text in it")
    return Source(None, documents)


def _language_reference() -> list[str]:
    from pydoc_data.topics import topics

    return list(topics.values())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path}: not UTF-8 text: {error}") from error


def _read_rows(path: Path) -> Iterator[Row]:
    # Only \n ends a row: str.splitlines would also split at the U+2028 or U+0085 inside a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path} row {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON: {error}") from error
            yield _check_row(where, value)


def _check_row(where: str, value) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: got a JSON {type(value).__name__}, expected an object")
    kinds = {"text": ["text"], "completion": ["prompt", "completion"], "chat": ["messages"]}
    complete = [kind for kind, keys in kinds.items() if all(value.get(key) is not None for key in keys)]
    if len(complete) > 1:
        raise UserError(f"{where}: has both {' and '.join(repr(kinds[kind][-1]) for kind in complete)}; keep one")
    if not complete:
        known = [key for keys in kinds.values() for key in keys]
        unknown = [key for key in value if key not in known]
        hints = [
            f"{key!r} looks like {close[0]!r}" for key in unknown if (close := difflib.get_close_matches(key, known))
        ]
        raise UserError(
            f"{where}: keys are {', '.join(map(repr, value)) or 'none'}; expected 'text', 'prompt' and 'completion', "
            "or 'messages'" + (f" ({'; '.join(hints)})" if hints else "")
        )
    for key in kinds[complete[0]]:
        if key != "messages" and not isinstance(value[key], str):
            raise UserError(f"{where}: {key!r} is a {type(value[key]).__name__}, expected a string")
    if complete[0] == "chat":
        messages = value["messages"]
        if not isinstance(messages, list) or not messages:
            raise UserError(f"{where}: 'messages' is {messages!r:.60}, expected a list with a message or more")
        value = {**value, "messages": [_check_message(f"{where}: messages[{i}]", m) for i, m in enumerate(messages)]}
    return Row(where, complete[0], value)


def _check_message(where: str, message) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: {message!r:.60} has no 'role'")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not calls:
        raise UserError(f"{where}: keys are {', '.join(map(repr, message))}; expected 'content', or 'tool_calls'")
    if not isinstance(content, str | None):
        raise UserError(f"{where}: 'content' is a {type(content).__name__}, expected a string")
    # Templates concatenate content, and know the developer role by its older name.
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content or ""}


def encode(source: Source, tokenizer, max_seq_length: int, mask_prompt: bool) -> Dataset:
    """Token rows of at most `max_seq_length`.

    Running text is joined and cut into blocks, 80 % for training and 10 % each for validation and test. Rows without
    validation rows beside them give their last 10 %.
    """
    notes: list[str] = []
    if source.documents is not None:
        splits = _encode_documents(source.documents, tokenizer, max_seq_length)
    else:
        splits = {
            name: list(_encode_rows(name, rows, tokenizer, max_seq_length, mask_prompt, notes))
            for name, rows in source.splits.items()
        }
        held_out = _tenth(splits["train"], least_left=1)
        if "valid" not in splits and held_out:
            splits["train"], splits["valid"] = splits["train"][:-held_out], splits["train"][-held_out:]
            notes.append(f"no valid.jsonl: the last {held_out} usable rows are held out for validation")
    if not splits["train"]:
        raise UserError("--data: no usable row: " + ("; ".join(notes) or "the files hold no rows"))
    return Dataset(*(splits.get(name, []) for name in SPLITS), notes)


def _encode_documents(documents: list[str], tokenizer, max_seq_length: int) -> dict[str, list[Sample]]:
    stream = [token for document in documents for token in _with_eos(_tokens(tokenizer, document), tokenizer)]
    # The last token of a block is only a target: the next block starts with it.
    blocks = [stream[i : i + max_seq_length + 1] for i in range(0, len(stream) - 1, max_seq_length)]
    samples = [Sample(block[:-1], block[1:]) for block in blocks]
    held_out = _tenth(samples, least_left=2)
    first, second = len(samples) - 2 * held_out, len(samples) - held_out
    return {"train": samples[:first], "valid": samples[first:second], "test": samples[second:]}


def _tenth(samples: list[Sample], least_left: int) -> int:
    return max(len(samples) // 10, 1) if len(samples) > least_left else 0


def _encode_rows(
    split: str, rows: list[Row], tokenizer, max_seq_length: int, mask_prompt: bool, notes: list[str]
) -> Iterator[Sample]:
    cut = dropped = 0
    for row in rows:
        ids, prompt_length = _row_tokens(row, tokenizer, mask_prompt)
        prompt_length = max(prompt_length, 1)  # nothing predicts the first token
        if len(ids) > max_seq_length and prompt_length < max_seq_length:
            cut += 1
        ids = ids[:max_seq_length]
        if prompt_length >= len(ids):
            dropped += 1
        else:
            yield Sample(ids[:-1], [IGNORE] * (prompt_length - 1) + ids[prompt_length:])
    limit = f"--max-seq-length {max_seq_length}"
    if cut:
        notes.append(f"{split}: {cut} of {len(rows)} rows cut to {limit}")
    if dropped:
        notes.append(f"{split}: {dropped} of {len(rows)} rows dropped: nothing to train on within {limit}")


def _row_tokens(row: Row, tokenizer, mask_prompt: bool) -> tuple[list[int], int]:
    """Tokens of a row, and how many at its start are prompt."""
    if row.kind == "text":
        return _with_eos(_tokens(tokenizer, row.value["text"]), tokenizer), 0
    if row.kind == "completion" and not tokenizer.chat_template:
        prompt, completion = row.value["prompt"], row.value["completion"]
        ids = _with_eos(_tokens(tokenizer, prompt + completion), tokenizer)
        return ids, _common_length(ids, _tokens(tokenizer, prompt)) if mask_prompt else 0
    if row.kind == "completion":
        messages = [
            {"role": "user", "content": row.value["prompt"]},
            {"role": "assistant", "content": row.value["completion"]},
        ]
    else:
        messages = row.value["messages"]
    if not tokenizer.chat_template:
        raise UserError(f"{row.where}: 'messages' needs a chat template, and the model's tokenizer has none")
    if not mask_prompt:
        return _chat_tokens(row, tokenizer, messages), 0
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise UserError(f"{row.where}: 'messages' has no assistant turn for --mask-prompt to train on")
    ids = _chat_tokens(row, tokenizer, messages[: last + 1])
    if last:
        prompt = _chat_tokens(row, tokenizer, messages[:last], add_generation_prompt=True)
    else:
        prompt = _chat_tokens(row, tokenizer, [{"role": "assistant", "content": ""}])
    return ids, _common_length(ids, prompt)


def _chat_tokens(row: Row, tokenizer, messages: list[dict], **options) -> list[int]:
    if "tool_calls" not in tokenizer.chat_template:
        messages = [_calls_as_content(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            messages, tools=row.value.get("tools"), tokenize=True, return_dict=False, **options
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{row.where}: the chat template refuses 'messages' with roles {roles}: {error}") from error


def _calls_as_content(message: dict) -> dict:
    """For templates without tools, calls in the form that SmolLM2, Qwen and Hermes write them."""
    calls = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in message.get("tool_calls") or ())
    return {**message, "content": "\n".join(part for part in (message["content"], calls) if part)}


def _tokens(tokenizer, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]  # not verbose: long rows are cut here, and counted


def _with_eos(ids: list[int], tokenizer) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _common_length(a: list[int], b: list[int]) -> int:
    # Not len(b): the last token of a prompt can merge with the first of the completion.
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Batches:
    """An endless sequence of batches, shuffled anew each epoch, in which any position can be asked for directly."""

    def __init__(self, samples: list[Sample], batch_size: int, seed: int | None):
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.per_epoch = -(-len(samples) // batch_size)
        self.longest = max(len(sample.input_ids) for sample in samples)
        self._epoch, self._order = None, list(range(len(samples)))

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, index = divmod(position, self.per_epoch)
        if self.seed is not None and epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.samples), generator=generator).tolist()
        chosen = self._order[index * self.batch_size : (index + 1) * self.batch_size]
        return collate([self.samples[i] for i in chosen], self.longest)


def collate(samples: list[Sample], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and targets [batch, seq_len], padded on the right.

    Padding on the right needs no attention mask in a causal model: no real token attends to what follows it. The
    length is a multiple of 32, or `longest`, so that mps compiles its graphs for few shapes.
    """
    length = min(-(-max(len(sample.input_ids) for sample in samples) // 32) * 32, longest)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    targets = torch.full_like(ids, IGNORE)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        targets[row, : len(sample.targets)] = torch.tensor(sample.targets)
    return ids, targets
