"""Draws the pictures of docs/ from benchmarks/results/history.csv. Needs matplotlib (the extra bench).

python scripts/plot_results.py     # docs/performance.png, docs/history.png
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_results  # noqa: E402
from gpu_results import ROOT  # noqa: E402

Rows = list[dict[str, str]]
MACHINES = (("NVIDIA H200", "2"), ("NVIDIA H200", "4"))


def rows_of(device: str, num_devices: str, **case: str) -> Rows:
    """Returns the rows of the step bench-1-tokens on a machine, sorted by date."""
    wanted = {"step": "bench-1-tokens", "device": device, "num_devices": num_devices} | case
    return [row for row in gpu_results.history() if all(row[name] == value for name, value in wanted.items())]


def history_hash() -> str:
    """Returns the hash of history.csv. Each picture contains the hash of the file from which it was drawn."""
    return hashlib.sha256((gpu_results.RESULTS / gpu_results.HISTORY).read_bytes()).hexdigest()[:16]


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Description": f"history.csv {history_hash()}"})


def label_times(axes: Axes) -> None:
    times = (5, 10, 20, 50, 100, 200, 500, 1000)
    axes.set_yticks(times, map(str, times))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.2)


def performance(path: Path) -> None:
    """Plots the time of a pair over tokens, beside the floor: a panel per machine, from its newest complete run."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    for axes, (device, num_devices) in zip(figure.subplots(1, len(MACHINES), sharey=True), MACHINES, strict=True):
        rows = rows_of(device, num_devices)
        newest = max(row["date"] for row in rows if row["tokens"] == "4096")
        rows = [row for row in rows if row["date"] == newest]
        for index, wire in enumerate(("", "fp8")):
            points = sorted((int(row["tokens"]), row) for row in rows if row["wire"] == wire)
            tokens = [number for number, _ in points]
            label = wire or "bfloat16"
            for name, column, style in (("jax_ep", "pair_us", "o-"), ("floor", "floor_pair_us", "--")):
                times = [float(row[column]) for _, row in points]
                axes.plot(tokens, times, style, color=f"C{index}", label=f"{name}, {label}")
        title = f"{num_devices} x {device.removeprefix('NVIDIA ')}, commit {rows[0]['commit']}, {newest[:10]}"
        axes.set(xscale="log", yscale="log", xlabel="tokens per rank", title=title)
        axes.set_xticks(tokens, [str(number) for number in tokens])
        axes.minorticks_off()
        label_times(axes)
    figure.axes[0].set(ylabel="dispatch + combine, us of the GPU's time line")
    figure.axes[0].legend(fontsize="small")
    save(figure, path)


def history(path: Path) -> None:
    """Plots the time of a pair with wire fp8 over dates: a line per number of tokens, a point per run."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    for axes, (device, num_devices) in zip(figure.subplots(1, len(MACHINES), sharey=True), MACHINES, strict=True):
        for tokens in ("8", "128", "512", "4096"):
            rows = rows_of(device, num_devices, tokens=tokens, wire="fp8")
            dates = [datetime.datetime.fromisoformat(row["date"]) for row in rows]
            axes.plot(dates, [float(row["pair_us"]) for row in rows], "o-", label=f"{tokens} tokens", markersize=4)
        first, last = (f"{row['commit']} ({row['date'][:10]})" for row in (rows[0], rows[-1]))
        axes.set(yscale="log", title=f"{num_devices} x {device.removeprefix('NVIDIA ')}, {first} to {last}")
        axes.title.set_fontsize("medium")
        axes.tick_params(axis="x", rotation=30)
        label_times(axes)
    figure.axes[0].set(ylabel="dispatch + combine, us, wire fp8")
    figure.axes[0].legend(fontsize="small")
    save(figure, path)


if __name__ == "__main__":
    performance(ROOT / "docs" / "performance.png")
    history(ROOT / "docs" / "history.png")
