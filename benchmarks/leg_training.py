"""Trains examples/train_moe.py with wire formats on its legs, and compares losses and gradient norms.

    python benchmarks/leg_training.py                          # 300 steps in bfloat16, seeds 0, 1 and 2
    python benchmarks/leg_training.py --json legs.json -- --mesh=1x8 --steps=300

Prints a table: for each choice of formats, the mean over seeds and, in brackets, the lowest and the highest seed. A
difference between two choices that is smaller than the difference between seeds is noise. Options behind "--" go to
train_moe.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TRAIN = Path(__file__).resolve().parent.parent / "examples" / "train_moe.py"
LAST_STEPS = 50  # the steps at the end over which the training loss and the gradient's norm are averaged

# Options of train_moe.py for each choice.
CHOICES = {
    "no wire format": [],
    "tokens out: fp8": ["--wire=fp8"],
    "outputs back: fp8": ["--combine-wire=fp8"],
    "cotangents out: fp8": ["--combine-grad-wire=fp8"],
    "cotangents out: fp8_e5m2": ["--combine-grad-wire=fp8_e5m2"],
    "cotangents back: fp8": ["--grad-wire=fp8"],
    "cotangents back: fp8_e5m2": ["--grad-wire=fp8_e5m2"],
    "all four: fp8": [f"--{leg}=fp8" for leg in ("wire", "combine-wire", "combine-grad-wire", "grad-wire")],
}
COLUMNS = {"held_out": "held-out loss", "loss": "training loss", "grad_norm": "gradient norm"}


def train(options: Sequence[str]) -> dict[str, float]:
    """Runs train_moe.py; returns the held-out loss, and the training loss and the gradient's norm at the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), *options, f"--out={folder}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} has failed:\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "train_moe.json").read_text())
    last = {name: float(np.mean(result[name][-LAST_STEPS:])) for name in ("loss", "grad_norm")}
    return {"held_out": result["held_out_nats"]} | last


def table(rows: Sequence[dict]) -> str:
    lines = [f"| formats | {' | '.join(COLUMNS.values())} |", f"| --- |{' --: |' * len(COLUMNS)}"]
    for choice in dict.fromkeys(row["choice"] for row in rows):
        runs = [row for row in rows if row["choice"] == choice]
        cells = []
        for column in COLUMNS:
            values = [run[column] for run in runs]
            cells.append(f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {choice} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--json", type=Path, help="a file for all results")
    parser.add_argument("options", nargs="*", help="of train_moe.py, behind --")
    arguments = parser.parse_args(argv)
    rows: list[dict] = []
    for seed in arguments.seeds:
        for choice in arguments.choices:
            options = ["--steps=300", "--dtype=bfloat16", *arguments.options, f"--seed={seed}", *CHOICES[choice]]
            rows.append({"choice": choice, "seed": seed} | train(options))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
