"""The output of a run: a progress bar, log lines, a JSON file with every step, and a plot."""

import json
import math
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_LINES = 10  # per run; logs do not keep the progress bar


class Report:
    """Collects the metrics of each step and shows them. It is a context manager around the training loop.

    In a distributed run, only one process should be `loud`. The others collect the same metrics and print nothing.
    """

    def __init__(self, *, steps: int, tokens_per_step: int, loud: bool, history: dict[str, list]) -> None:
        self.history = history
        self.console = Console(quiet=not loud, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._clock: list[float] = []  # when each step ended; the first one compiles
        bar, status = BarColumn(bar_width=None), TextColumn("{task.fields[status]}")
        columns = bar, MofNCompleteColumn(), status, TimeRemainingColumn()
        self._progress = Progress(*columns, console=self.console, transient=True, expand=True)
        self._task = self._progress.add_task("", total=steps, completed=len(history["loss"]), status="compiling")

    def __enter__(self) -> "Report":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, metrics: dict[str, np.ndarray]) -> None:
        """Adds the metrics of a step: those of `model.loss`, stacked over the parts of the step, and grad_norm."""
        self._clock.append(time.perf_counter())
        self.history["loss"].append(metrics["nats"].mean().item())
        self.history["grad_norm"].append(metrics["grad_norm"].item())
        self.history["dropped"].append(metrics["dropped"].sum().item())
        self.history["load"].append(metrics["load"].mean(axis=0).tolist())
        done = len(self.history["loss"])
        status = (
            f"loss {self.history['loss'][-1]:.3f}, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.history['dropped'][-1]} dropped, load max/mean {self.imbalance():.2f}"
        )
        self._progress.update(self._task, completed=done, status=status)
        if done == self._steps or done % max(1, self._steps // LOG_LINES) == 0:
            self.console.print(f"step {done:>{len(str(self._steps))}}/{self._steps}: {status}")

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of the whole mesh. It excludes the first step, which compiles."""
        steps = len(self._clock) - 1
        return steps * self._tokens_per_step / (self._clock[-1] - self._clock[0]) if steps > 0 else 0.0

    def imbalance(self) -> float:
        """Returns the largest load of an expert, divided by the mean load, in the worst layer of the last step."""
        load = np.array(self.history["load"][-1])
        return (load.max(axis=1) / load.mean(axis=1)).max().item()

    def write(self, directory: Path, *, held_out: float, unigram: float) -> None:
        """Prints the result and writes train_moe.json and train_moe.png. Losses are in nats per byte."""
        self.console.print(
            f"held-out loss {held_out:.3f} nats/byte = {held_out / math.log(2):.3f} bits/byte "
            f"(unigram entropy of that text: {unigram:.3f} nats = {unigram / math.log(2):.3f} bits)"
        )
        if self.console.quiet:
            return
        directory.mkdir(parents=True, exist_ok=True)
        result = {"held_out_nats": held_out, "unigram_nats": unigram, "tokens_per_second": self.tokens_per_second}
        (directory / "train_moe.json").write_text(json.dumps(result | self.history))
        plot(self.history, held_out, unigram, directory / "train_moe.png")
        self.console.print(f"wrote {directory}/train_moe.json and train_moe.png")

    def sample(self, prompt: bytes, continuation: bytes) -> None:
        self.console.print("a sample; the prompt comes from the held-out text:")
        self.console.print(prompt.decode(errors="replace"), style="dim", end="")
        self.console.print(continuation.decode(errors="replace"), style="bold")


def plot(history: dict[str, list], held_out: float, unigram: float, path: Path) -> None:
    """Plots the loss curve, and below it each layer's experts over time, coloured by load."""
    load = np.array(history["load"])  # [steps, layers, experts]
    steps, layers, experts = load.shape
    figure = Figure(figsize=(9, 4 + 1.4 * layers), layout="constrained")
    axes = figure.subplots(1 + layers, height_ratios=[2.5] + [1] * layers, sharex=True)
    axes[0].plot(np.arange(1, steps + 1), history["loss"], lw=1, label="training")
    axes[0].axhline(held_out, color="C1", label=f"held out, at the end: {held_out:.3f}")
    axes[0].axhline(unigram, color="0.5", ls=":", label=f"unigram entropy: {unigram:.3f}")
    axes[0].set(ylabel="nats per byte", title=f"loss; rows dropped: {sum(history['dropped'])}")
    axes[0].legend()
    for layer, axis in enumerate(axes[1:]):
        image = axis.imshow(
            load[:, layer].T * experts,
            aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2,
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )  # fmt: skip
        axis.set(ylabel=f"layer {layer}\nexpert")
    axes[-1].set(xlabel="step")
    figure.colorbar(image, ax=axes[1:], label="load / even share")
    figure.savefig(path, dpi=120)
