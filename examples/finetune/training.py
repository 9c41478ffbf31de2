"""The training loop."""

import dataclasses
import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy

from . import UserError, checkpoint
from .config import Config
from .data import IGNORE, Batches, Dataset, Sample
from .folders import newest_checkpoint
from .model import autocast, generate
from .report import PeakMemory, Reporter, progress_bar

MAX_GRAD_NORM = 1.0  # as transformers.TrainingArguments


class Interrupt:
    """Turns the first Ctrl-C into a request to stop, which the loop honours between steps; the second one exits."""

    requested = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, *_) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # os.write: print is not reentrant, and the signal may have arrived inside one.
        os.write(2, b"\nStopping after this step; Ctrl-C again exits at once, without saving.\n")


@dataclass
class Position:
    """How far a run is; with the generators' states it determines all that follows."""

    iteration: int = 0
    batches_drawn: int = 0
    trained_tokens: int = 0
    validated_at: int = -1
    # Since the last report of the training loss:
    window_loss: float = 0.0
    window_tokens: int = 0
    window_seconds: float = 0.0
    history: list[dict] = field(default_factory=list)


class Trainer:
    def __init__(self, config: Config, model: PeftModel, dataset: Dataset, device: torch.device, interrupt: Interrupt):
        self.config, self.model, self.device, self.interrupt = config, model, device, interrupt
        self.dataset = dataset
        self.batches = Batches(dataset.train, config.batch_size, config.seed)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate, weight_decay=0.0)
        warm_up = max(min(10, config.iters // 10), 1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / config.iters)),
        )
        # Of the device in use: GradScaler("cuda"), the default, does nothing on a Mac.
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.memory = PeakMemory(device)
        self.position = Position()

    def restore(self, path: Path) -> None:
        state = checkpoint.load_training_state(path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.position = Position(**state["position"])
        checkpoint.restore_random_state(state["random"], self.device)

    def save(self) -> Path:
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "position": dataclasses.asdict(self.position),
            "random": checkpoint.random_state(self.device),
        }
        run = {
            "config": dataclasses.asdict(self.config) | {"device": self.device.type, "resume": None},
            "data_sha256": self.dataset.sha256,
        }
        return checkpoint.save(Path(self.config.adapter_path), self.position.iteration, self.model, state, run)

    def run(self, reporter: Reporter) -> bool:
        """Trains up to `iters`, saving along the way; False if Ctrl-C ended it early.

        Raises:
            UserError: at a loss or a gradient that is not finite.
        """
        config, position = self.config, self.position
        with progress_bar(reporter.console) as bar:
            task = bar.add_task("training", total=config.iters, completed=position.iteration, status="")
            while not self.interrupt.requested:
                if self._validation_is_due():
                    bar.update(task, description="validating")
                    self._validate(reporter)
                    bar.update(task, description="training")
                    continue
                if position.iteration and position.iteration % config.save_every == 0:
                    self.save()
                if position.iteration == config.iters:
                    return True
                loss = self._step(reporter)
                bar.update(
                    task,
                    completed=position.iteration,
                    status=f"loss {loss:.3f}, {position.window_tokens / position.window_seconds:.0f} tokens/s, "
                    f"{self.memory.bytes / 1e9:.2f} GB",
                )
                if position.iteration % config.steps_per_report == 0 or position.iteration == config.iters:
                    self._report_window(reporter)
        return False

    def evaluate(self, samples: list[Sample], limit: int) -> tuple[float, int] | None:
        """Mean loss per token over the first `limit` batches (-1: all) and the tokens; None if Ctrl-C came."""
        batches = Batches(samples, self.config.batch_size, seed=None)
        total, tokens = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for index in range(batches.per_epoch if limit == -1 else min(limit, batches.per_epoch)):
                if self.interrupt.requested:
                    return None
                ids, targets = batches[index]
                total += self._loss_sum(ids, targets).item()
                tokens += (targets != IGNORE).sum().item()
                self.memory.sample()
        return total / tokens, tokens

    def sample(self, tokenizer, prompt: list[int], tokens: int) -> str:
        with autocast(self.config.precision, self.device):
            return generate(self.model, tokenizer, prompt, tokens)

    def _loss_sum(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast(self.config.precision, self.device):
            logits = self.model(input_ids=ids.to(self.device), use_cache=False).logits
        # In fp32, whatever the logits are.
        targets = targets.to(self.device).flatten()
        return cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORE, reduction="sum")

    def _step(self, reporter: Reporter) -> float:
        """One optimizer step over all batches it accumulates; the loss is the mean over all their tokens."""
        config, position = self.config, self.position
        start = time.perf_counter()
        first = position.batches_drawn
        batches = [self.batches[first + i] for i in range(config.grad_accumulation_steps)]
        tokens = sum((targets != IGNORE).sum().item() for _, targets in batches)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for ids, targets in batches:
            part = self._loss_sum(ids, targets) / tokens
            self.scaler.scale(part).backward()
            loss += part.item()
            self.memory.sample()
        iteration = position.iteration + 1
        self._stop_unless_finite(loss, f"iteration {iteration}: the training loss")

        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM).item()
        if not self.scaler.is_enabled():
            self._stop_unless_finite(norm, f"iteration {iteration}: the gradient norm")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if math.isfinite(norm):
            self.scheduler.step()
            position.trained_tokens += tokens
        else:
            scale = self.scaler.get_scale()
            reporter.console.print(
                f"Iter {iteration}: gradients overflowed fp16, step skipped, loss scale now {scale:g}"
            )
            self._stop_unless_finite(
                norm if scale < 1 else 0.0, f"iteration {iteration}: at every loss scale the gradient"
            )
        position.iteration = iteration
        position.batches_drawn += len(batches)
        position.window_loss += loss * tokens
        position.window_tokens += tokens
        position.window_seconds += time.perf_counter() - start
        return loss

    def _stop_unless_finite(self, value: float, what: str) -> None:
        if math.isfinite(value):
            return
        precision = "" if self.config.precision == "fp32" else ", --precision fp32"
        try:
            last = f"The last checkpoint is {newest_checkpoint(Path(self.config.adapter_path))}."
        except UserError:
            last = "No checkpoint had been saved."
        raise UserError(
            f"{what} is {value}; training stops here. Try a lower --learning-rate (now {self.config.learning_rate:g})"
            f"{precision}, or look for broken rows in the data. {last}"
        )

    def _report_window(self, reporter: Reporter) -> None:
        position = self.position
        loss = position.window_loss / position.window_tokens
        self._report(reporter, "train_loss", loss, position.window_tokens, position.window_seconds)
        position.window_loss, position.window_tokens, position.window_seconds = 0.0, 0, 0.0

    def _validation_is_due(self) -> bool:
        position, config = self.position, self.config
        due = position.iteration % config.steps_per_eval == 0 or position.iteration == config.iters
        return (
            due and position.validated_at != position.iteration and config.val_batches != 0 and bool(self.dataset.valid)
        )

    def _validate(self, reporter: Reporter) -> None:
        start = time.perf_counter()
        result = self.evaluate(self.dataset.valid, self.config.val_batches)
        if result is None:
            return
        loss, tokens = result
        self._stop_unless_finite(loss, f"iteration {self.position.iteration}: the validation loss")
        self.position.validated_at = self.position.iteration
        self._report(reporter, "val_loss", loss, tokens, time.perf_counter() - start)

    def _report(self, reporter: Reporter, key: str, loss: float, tokens: int, seconds: float) -> None:
        report = {
            "iteration": self.position.iteration,
            key: loss,
            "learning_rate": self.scheduler.get_last_lr()[0],
            "tokens_per_second": tokens / seconds,
            "trained_tokens": self.position.trained_tokens,
            "peak_memory_bytes": self.memory.sample(),
        }
        self.position.history.append(report)
        reporter.report(report)
