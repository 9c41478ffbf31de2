"""Data of examples/lora_finetune.py: text and JSONL files as people have them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from finetune import UserError, data

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('start with a user') }}{% endif %}" + CHATML


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<|im_start|>", "<|im_end|>", "xy"])}
    bpe = Tokenizer(models.BPE(vocab, [("x", "y")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHATML, **special)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def load(path, tokenizer, *, max_seq_length=64, mask_prompt=False):
    source = data.read(str(path), mask_prompt=mask_prompt, test=False)
    return data.encode(source, tokenizer, max_seq_length, mask_prompt)


def trained_text(sample, tokenizer):
    return tokenizer.decode([token for token in sample.targets if token != data.IGNORE])


ROWS = [
    {"prompt": "Кто написал «Войну и мир»?", "completion": "Толстой"},
    {"prompt": "two\nlines", "completion": "and\u2028more\u0085"},
    chat(("user", "a"), ("user", "b"), ("assistant", "c")),
]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"\xef\xbb\xbf" + raw,
        lambda raw: raw.replace(b"\n", b"\r\n"),
        lambda raw: raw + b"\n  \n",
        lambda raw: raw.rstrip(b"\n"),
    ],
    ids=["BOM", "CRLF", "blank last lines", "no last newline"],
)
def test_same_rows_whatever_the_file_format(tmp_path, tokenizer, change):
    path = write_rows(tmp_path / "rows.jsonl", *ROWS)
    plain = load(path, tokenizer, max_seq_length=200)
    assert len(plain.train) == 2 and len(plain.valid) == 1
    assert ROWS[0]["prompt"] + "<|im_end|>" in tokenizer.decode(plain.train[0].input_ids)
    assert tokenizer.decode(plain.train[0].input_ids).endswith(ROWS[0]["completion"] + "<|im_end|>")
    assert "two\nlines" in tokenizer.decode(plain.train[1].input_ids)
    assert "and\u2028more\u0085" in tokenizer.decode(plain.train[1].input_ids)
    path.write_bytes(change(path.read_bytes()))
    assert load(path, tokenizer, max_seq_length=200) == plain


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            '{"prompt": "a", "completions": "b"}',
            "keys are 'prompt', 'completions'; .*'completions' looks like 'completion'",
        ),
        ('{"txt": "a"}', "keys are 'txt'"),
        ("{}", "keys are none"),
        ('{"text": null}', "keys are 'text'"),
        ('{"text": 3}', "'text' is a int, expected a string"),
        ('{"prompt": ["a"], "completion": "b"}', "'prompt' is a list, expected a string"),
        ('{"text": "a", "messages": [{"role": "user", "content": "a"}]}', "has both 'text' and 'messages'"),
        ('{"messages": []}', r"'messages' is \[\], expected a list"),
        ('{"messages": "hello"}', "'messages' is 'hello', expected a list"),
        ('{"messages": [{"content": "a"}]}', r"messages\[0\]: .* has no 'role'"),
        (
            '{"messages": [{"role": "user", "contents": "a"}]}',
            r"messages\[0\]: keys are 'role', 'contents'; expected 'content'",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', r"messages\[0\]: 'content' is a int"),
        ('{"text": "a"', "not JSON"),
        ('["a"]', "got a JSON list, expected an object"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n\n' + row + "\n")
    with pytest.raises(UserError, match="rows.jsonl row 3: " + message):
        data.read(str(path), mask_prompt=False, test=False)


def test_tool_calls_without_content_and_developer_role(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "time?"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    row = {"messages": messages, "tools": []}
    dataset = load(write_rows(tmp_path / "rows.jsonl", row), tokenizer, max_seq_length=300, mask_prompt=True)
    assert trained_text(dataset.train[0], tokenizer) == f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>\n"
    assert tokenizer.decode(dataset.train[0].input_ids).startswith("<|im_start|>system\nbe brief")


def test_tool_calls_reach_a_template_that_knows_them(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for call in m.tool_calls %}{{ call.name }}!{% endfor %}{% endfor %}"
    )
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "now"}]}]}
    dataset = load(write_rows(tmp_path / "rows.jsonl", row), tokenizer)
    assert tokenizer.decode(dataset.train[0].input_ids) == "assistant:now"  # and "!", its last target


def test_roles_that_the_template_refuses_are_named(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    path = write_rows(tmp_path / "rows.jsonl", chat(("user", "a"), ("assistant", "b")), chat(("assistant", "b")))
    with pytest.raises(UserError, match="row 1: 'messages' needs a chat template"):
        load(path, tokenizer)
    tokenizer.chat_template = ALTERNATING
    with pytest.raises(UserError, match=r"row 2: .*refuses 'messages' with roles assistant: start with a user"):
        load(path, tokenizer)


@pytest.mark.parametrize(
    ("row", "target"),
    [
        ({"prompt": "one plus one", "completion": "two"}, "two<|im_end|>\n"),
        (chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), "d<|im_end|>\n"),
        (chat(("user", "a"), ("assistant", "b"), ("user", "c")), "b<|im_end|>\n"),
        (chat(("assistant", "alone")), "alone<|im_end|>\n"),
    ],
    ids=["completion", "last turn", "user turn at the end", "assistant alone"],
)
def test_mask_prompt_trains_on_the_answer_only(tmp_path, tokenizer, row, target):
    path = write_rows(tmp_path / "rows.jsonl", row)
    dataset = load(path, tokenizer, max_seq_length=200, mask_prompt=True)
    assert trained_text(dataset.train[0], tokenizer) == target
    unmasked = load(path, tokenizer, max_seq_length=200).train[0]
    assert data.IGNORE not in unmasked.targets and len(unmasked.targets) >= len(dataset.train[0].targets)


def test_mask_prompt_without_a_chat_template(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ax", "completion": "yb"}]
    dataset = load(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer, mask_prompt=True)
    assert trained_text(dataset.train[0], tokenizer) == "cd<|im_end|>"
    # x and y merge into one token, which no prompt ends with.
    assert trained_text(dataset.valid[0], tokenizer) == "xyb<|im_end|>"


def test_mask_prompt_needs_prompts(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", {"text": "a"})
    with pytest.raises(UserError, match=r"rows.jsonl row 1: --mask-prompt needs a prompt"):
        load(path, tokenizer, mask_prompt=True)
    with pytest.raises(UserError, match="--mask-prompt needs rows with prompts"):
        data.read(None, mask_prompt=True, test=False)
    path = write_rows(tmp_path / "rows.jsonl", chat(("user", "a")))
    with pytest.raises(UserError, match="row 1: 'messages' has no assistant turn"):
        load(path, tokenizer, mask_prompt=True)


def test_cut_and_dropped_rows_are_counted(tmp_path, tokenizer):
    fine = {"prompt": "p", "completion": "c" * 20}
    rows = [fine, {"prompt": "p" * 100, "completion": "lost"}, {"prompt": "p", "completion": "c" * 200_000}, fine]
    dataset = load(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer, mask_prompt=True)
    assert len(dataset.train) + len(dataset.valid) == 3
    assert len(dataset.train[1].input_ids) == 63
    assert dataset.notes[:2] == [
        "train: 1 of 4 rows cut to --max-seq-length 64",
        "train: 1 of 4 rows dropped: nothing to train on within --max-seq-length 64",
    ]
    assert "last 1 usable rows are held out" in dataset.notes[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no usable row: the files hold no rows"),
        (b"\n\n", "no usable row"),
        (b'{"text": ""}\n', "no usable row: train: 1 of 1 rows dropped"),
        (b"\xff\xfe{", "not UTF-8"),
    ],
)
def test_data_without_usable_rows(tmp_path, tokenizer, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(path, tokenizer)


def test_data_that_is_not_there(tmp_path, tokenizer):
    with pytest.raises(UserError, match="absent: no such file or folder"):
        load(tmp_path / "absent", tokenizer)
    write_rows(tmp_path / "valid.jsonl", {"text": "a"})
    with pytest.raises(UserError, match=r"no train.jsonl; the folder has valid.jsonl"):
        load(tmp_path, tokenizer)
    (tmp_path / "rows.json").write_text('[{"text": "a"}]')
    with pytest.raises(UserError, match=r"expected text, or .jsonl with one object per line, not .json"):
        load(tmp_path / "rows.json", tokenizer)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match="no text in it"):
        load(tmp_path / "empty.txt", tokenizer)
    write_rows(tmp_path / "train.jsonl", {"text": "a"})
    with pytest.raises(UserError, match=r"--test: no test.jsonl in"):
        data.read(str(tmp_path), mask_prompt=False, test=True)


def test_running_text_is_split_without_loss_or_overlap(tmp_path, tokenizer):
    text = "".join(chr(97 + i % 23) for i in range(1000))
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    dataset = load(path, tokenizer, max_seq_length=30)
    assert [len(part) for part in (dataset.train, dataset.valid, dataset.test)] == [28, 3, 3]
    targets = [
        token for part in (dataset.train, dataset.valid, dataset.test) for sample in part for token in sample.targets
    ]
    assert tokenizer.decode(targets) == text[1:] + "<|im_end|>"
    assert all(len(sample.input_ids) == 30 for sample in dataset.train)


def test_batches_cover_each_epoch_and_can_be_entered_anywhere():
    samples = [data.Sample([i] * (i + 1), [i] * (i + 1)) for i in range(8)]
    batches = data.Batches(samples, batch_size=3, seed=5)
    sequence = [batches[i] for i in range(6)]
    for epoch in (sequence[:3], sequence[3:]):
        starts = sorted(int(row[0]) for ids, _ in epoch for row in ids)
        assert starts == sorted(sample.input_ids[0] for sample in samples)
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(sequence[:3], sequence[3:], strict=True))
    again = data.Batches(samples, batch_size=3, seed=5)
    assert torch.equal(again[4][0], sequence[4][0]) and torch.equal(again[1][1], sequence[1][1])
