"""A run from its options to its exit status: checks first, then the model, then training."""

import os
import shlex
from pathlib import Path

import transformers
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import torch_metalk

from . import UserError, data, model
from .checkpoint import load_adapter
from .config import Config
from .folders import read_run, set_aside_old_run
from .report import Reporter, plot_losses
from .training import Interrupt, Trainer

SAMPLE_TOKENS = 48


def run(config: Config) -> int:
    transformers.utils.logging.disable_progress_bar()
    console = Console(markup=False, highlight=False, soft_wrap=True)
    device = model.find_device(config.device)
    source = model.find_model(config.model)
    adapter = config.resume or config.resume_adapter_file
    if adapter and not Path(adapter).exists():
        raise UserError(f"--resume-adapter-file {adapter}: no such file or folder")
    rows = data.read(config.data, mask_prompt=config.mask_prompt, test=config.test)
    if config.train:
        _make_folders(config)
    tokenizer = model.load_tokenizer(source)
    dataset = data.encode(rows, tokenizer, config.max_seq_length, config.mask_prompt)
    if config.test and not dataset.test:
        raise UserError("--test: no usable test row")
    if config.resume and read_run(Path(config.resume))["data_sha256"] != dataset.sha256:
        raise UserError(f"this checkpoint belongs to another configuration: --data is not what {config.resume} read")

    transformers.set_seed(config.seed)
    base = model.load_model(source, config.precision, device)
    peft_model = model.add_lora(base, config)
    if adapter:
        load_adapter(peft_model, Path(adapter))
    if config.patch:
        console.print(str(torch_metalk.patch(peft_model)))
    if config.grad_checkpoint:
        model.enable_grad_checkpoint(base, device)
    trainable, total = peft_model.get_nb_trainable_parameters()
    console.print(f"{source.name} on {device} in {config.precision}: {trainable:,} of {total:,} parameters are trained")
    for note in dataset.notes:
        console.print(note)

    with Interrupt() as interrupt:
        trainer = Trainer(config, peft_model, dataset, device, interrupt)
        if config.train and not train(trainer, tokenizer, console):
            return 130
        if config.test and (result := trainer.evaluate(dataset.test, limit=-1)):
            console.print(f"Test loss {result[0]:.3f} over {result[1]:,} tokens")
    return 0


def train(trainer: Trainer, tokenizer: transformers.PreTrainedTokenizerBase, console: Console) -> bool:
    """Trains, and leaves a checkpoint and the loss curves; False if Ctrl-C ended it early."""
    config, adapter_path = trainer.config, Path(trainer.config.adapter_path)
    prompt = trainer.dataset.sample_prompt()

    def show_sample(title: str) -> None:
        text = Text.assemble((tokenizer.decode(prompt), "dim"), trainer.sample(tokenizer, prompt, SAMPLE_TOKENS))
        console.print(Panel(text, title=title, title_align="left"), soft_wrap=False)

    if config.resume:
        trainer.restore(Path(config.resume))
    else:
        if aside := set_aside_old_run(adapter_path):
            console.print(f"{adapter_path} held an earlier run, which is now in {aside}")
        show_sample("Sample before training")
    with Reporter(console, config.log, trainer.position.history) as reporter:
        finished = trainer.run(reporter)
    saved = trainer.save()
    plot = Path(config.plot or adapter_path / "loss.png")
    if trainer.position.history:
        plot_losses(trainer.position.history, plot)
    if not finished:
        resume = _command("--resume", saved)
        console.print(f"Stopped after iteration {trainer.position.iteration}. To continue: {resume}")
        return False
    show_sample("Sample after training")
    console.print(f"Adapter: {saved}; loss curves: {plot}")
    console.print(f'Use it: peft.PeftModel.from_pretrained(model, "{saved}")')
    console.print(f"Train it further: {_command('--resume-adapter-file', saved)}")
    return True


def _make_folders(config: Config) -> None:
    """A folder that cannot be made should not be noticed at the first checkpoint."""
    folders = {"--adapter-path": Path(config.adapter_path)}
    folders |= {flag: Path(file).parent for flag, file in (("--log", config.log), ("--plot", config.plot)) if file}
    for flag, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{flag}: cannot create the folder {folder}: {error.strerror}") from error


def _command(flag: str, path: Path) -> str:
    script = Path(__file__).parents[1] / "lora_finetune.py"
    return shlex.join(["python", os.path.relpath(script), flag, str(path)])
