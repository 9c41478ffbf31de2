"""What a run shows and writes: progress bar, report lines, JSONL log, loss curves."""

import json
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class PeakMemory:
    """The highest sample so far of the larger of driver-allocated memory and resident size, in bytes.

    Sampled, because ``torch.mps`` keeps no peak of its own; what comes and goes between two samples is missed.
    """

    def __init__(self, device: torch.device):
        drivers = {"mps": torch.mps.driver_allocated_memory, "cuda": torch.cuda.memory_reserved}
        self._driver_allocated = drivers.get(device.type, lambda: 0)
        self._process = psutil.Process()
        self.bytes = 0

    def sample(self) -> int:
        self.bytes = max(self.bytes, self._process.memory_info().rss, self._driver_allocated())
        return self.bytes


class Reporter:
    """Prints and logs the reports of a run; `history` holds those of the run being resumed."""

    def __init__(self, console: Console, log: str | None, history: list[dict]):
        self.console = console
        self._log = None
        if log:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            self._log = open(log, "w", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
            for report in history:
                self._write(report)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_) -> None:
        if self._log:
            self._log.close()

    def report(self, report: dict) -> None:
        self._write(report)
        kind = "train" if "train_loss" in report else "val"
        self.console.print(
            f"Iter {report['iteration']}: {kind} loss {report[f'{kind}_loss']:.3f}, "
            f"learning rate {report['learning_rate']:.2e}, {report['tokens_per_second']:.0f} tokens/s, "
            f"{report['trained_tokens']:,} trained tokens, peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB"
        )

    def _write(self, report: dict) -> None:
        if self._log:
            self._log.write(json.dumps(report) + "\n")
            self._log.flush()


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
    )


def plot_losses(history: list[dict], path: Path) -> None:
    """Loss curves as a PNG."""
    from matplotlib.figure import Figure  # without pyplot, so that no window system is looked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label, marker in (("train_loss", "training", "."), ("val_loss", "validation", "o")):
        points = [(report["iteration"], report[key]) for report in history if key in report]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=label)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
