"""Options of examples/lora_finetune.py: command line and YAML."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from finetune import UserError
from finetune.config import parse

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_yaml_values_mean_what_they_say(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 2e-4\nnum-layers: -1\niters: 1e3\nbatch-size: '4'\ndata: notes.txt\nmask_prompt: false\n"
        "fine_tune_type: lora\nresume_adapter_file: null\n"
        "lora_parameters: {rank: 4, scale: 20.0, dropout: 1e-1, keys: [self_attn.q_proj, v_proj]}\n"
    )
    config = parse(["-c", str(path)])
    assert (config.learning_rate, config.num_layers, config.iters, config.batch_size) == (2e-4, -1, 1000, 4)
    assert (config.rank, config.scaling_alpha, config.dropout) == (4, 80.0, 0.1)
    assert config.target_modules == ("self_attn.q_proj", "v_proj")
    assert config.data == "notes.txt" and config.mask_prompt is False and config.train


def test_command_line_overrides_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("scale: 2\nrank: 4\nbf16: true\n")
    assert parse(["-c", str(path)]).precision == "bf16"
    assert parse(["-c", str(path), "--rank", "16"]).scaling_alpha == 32
    overridden = parse(["-c", str(path), "--alpha", "5", "--precision", "fp16"])
    assert (overridden.scaling_alpha, overridden.precision) == (5, "fp16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha: 16\nscale: 2", "alpha and scale are both given"),
        ("alpha: 16\nlora_parameters: {scale: 2}", "alpha and scale are both given"),
        ("rank: 4\nlora_parameters: {rank: 8}", "rank and lora_parameters.rank are both given"),
        ("lora_parameters: {ranks: 8}", "unknown key lora_parameters.ranks"),
        ("learning_rat: 1e-4", "unknown key 'learning_rat' .did you mean learning_rate"),
        ("num-layers: 4\nnum_layers: 8", "given twice"),
        ("iters: 4\niters: 8", "'iters' is given twice"),
        ("learning_rate: fast", "learning_rate: got 'fast', expected a number"),
        ("learning_rate: .nan", "learning_rate: got nan, expected a number"),
        ("iters: 2.5", "iters: got 2.5, expected a whole number"),
        ("iters: true", "iters: got True, expected a whole number"),
        ("iters: null", "iters: got None, expected a whole number"),
        ("mask_prompt: 'yes'", "mask_prompt: got 'yes', expected true or false"),
        ("dropout: 1.0", "dropout: got 1.0, expected at least 0 and below 1"),
        ("precision: fp8", "precision: got 'fp8', expected one of fp32, fp16, bf16"),
        ("target_modules: {q_proj: true}", "target_modules: got .*, expected module names"),
        ("fine_tune_type: dora", "fine_tune_type"),
        ("bf16: true\nfp16: true", "bf16 and fp16 are both true"),
        ("bf16: true\nprecision: fp16", "precision is 'fp16', but bf16 and fp16 say 'bf16'"),
        ("bf16: false\nprecision: bf16", "precision is 'bf16', but bf16 is false"),
        ("bf16: false\nfp16: false\nload_in_4bit: true", "load_in_4bit: .*bitsandbytes"),
        ("num_layers: 0", "--num-layers: got 0"),
        ("- iters", "should map names to values, got list"),
        ("a: [", "not YAML"),
    ],
)
def test_yaml_faults_are_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        parse(["--config", str(path)])


def test_bf16_and_fp16_both_false_is_fp32(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("bf16: false\nfp16: false\nload_in_4bit: false\n")
    assert parse(["-c", str(path)]).precision == "fp32"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--iters many", "--iters: got 'many', expected a whole number"),
        ("--iters 0", "--iters: got '0', expected at least 1"),
        ("--learning-rate 0", "--learning-rate: got 0, expected more than 0"),
        ("--target-modules ,", "--target-modules: got .*, expected module names"),
        ("--plot curves.txt", "--plot: got 'curves.txt', expected a .png file"),
        ("--no-train", "nothing to do"),
        ("--config absent.yaml", "absent.yaml: No such file"),
        ("--resume absent", "no checkpoint in absent"),
        ("--test --adapter-path absent", "no checkpoint in absent"),
    ],
)
def test_command_line_faults_are_named(argv, message):
    with pytest.raises(UserError, match=message):
        parse(argv.split())


def test_abbreviated_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--learning", "1e-4"])
    assert "unrecognized arguments: --learning" in capsys.readouterr().err


def test_help_explains_the_peak_and_does_not_wait_for_torch():
    code = "import sys, finetune.config as c\ntry: c.parse(['--help'])\nfinally: assert 'torch' not in sys.modules"
    wide = os.environ | {"COLUMNS": "1000"}
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, env=wide, capture_output=True, text=True, check=True
    )
    assert "larger of driver-allocated memory and resident size" in shown.stdout
    flags = (
        "--model --train --data --iters --batch-size --num-layers --learning-rate --max-seq-length --grad-checkpoint "
        "--grad-accumulation-steps --mask-prompt --resume-adapter-file --adapter-path --save-every --val-batches "
        "--steps-per-report --steps-per-eval --test --seed -c --config --rank --alpha --dropout --target-modules "
        "--precision --device --resume --no-patch --plot --log"
    )
    assert all(flag in shown.stdout for flag in flags.split())
