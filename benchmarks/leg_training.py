"""Trains examples/train_moe.py with wire formats on its legs, and compares losses and gradient norms.

    python benchmarks/leg_training.py                          # 300 steps in bfloat16, seeds 0, 1 and 2
    python benchmarks/leg_training.py --json legs.json -- --mesh=1x8 --batch=32

Options after "--" go to train_moe.py. There is a run for each choice of formats and each seed: 24 runs, each of a
minute or more. A seed gives all choices the same initial weights and batches.

Prints a table. Each cell has the mean over the seeds and, in brackets, the lowest and the highest value. The last
column compares the held-out loss with that of the first choice, seed by seed. The held-out loss is computed with the
same wire formats. The gradient norm is taken before clipping.
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
LAST_STEPS = 50  # the training loss and the gradient norm are averaged over the last steps

# The options of train_moe.py for each choice.
ALL = ("wire", "combine-wire", "combine-grad-wire", "grad-wire")
CHOICES = {
    "none": [],
    "wire=fp8": ["--wire=fp8"],
    "combine_wire=fp8": ["--combine-wire=fp8"],
    "combine_grad_wire=fp8": ["--combine-grad-wire=fp8"],
    "combine_grad_wire=fp8_e5m2": ["--combine-grad-wire=fp8_e5m2"],
    "grad_wire=fp8": ["--grad-wire=fp8"],
    "grad_wire=fp8_e5m2": ["--grad-wire=fp8_e5m2"],
    "all=fp8": [f"--{argument}=fp8" for argument in ALL],
}
COLUMNS = {"held_out": "held-out loss", "loss": "training loss", "grad_norm": "gradient norm"}


def train(options: Sequence[str]) -> dict[str, float]:
    """Runs train_moe.py; returns the held-out loss, and the training loss and the gradient's norm at the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), *options, f"--out={folder}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "train_moe.json").read_text())
    last = {name: float(np.mean(result[name][-LAST_STEPS:])) for name in ("loss", "grad_norm")}
    return {"held_out": result["held_out_nats"]} | last


def table(rows: Sequence[dict]) -> str:
    lines = [f"| formats | {' | '.join(COLUMNS.values())} | held-out loss, difference |", f"| --- |{' --: |' * 4}"]
    first = {row["seed"]: row["held_out"] for row in rows if row["choice"] == rows[0]["choice"]}
    for choice in dict.fromkeys(row["choice"] for row in rows):
        runs = [row for row in rows if row["choice"] == choice]
        cells = [_cell([run[column] for run in runs]) for column in COLUMNS]
        cells.append(_cell([run["held_out"] - first[run["seed"]] for run in runs]))
        lines.append(f"| {choice} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--json", type=Path, help="a file for all results")
    parser.add_argument("options", nargs="*", help="options of train_moe.py, after --")
    arguments = parser.parse_args(argv)
    rows: list[dict] = []
    for seed in arguments.seeds:
        for choice in arguments.choices:
            options = ["--steps=300", "--dtype=bfloat16", *arguments.options, f"--seed={seed}", *CHOICES[choice]]
            rows.append({"choice": choice, "seed": seed} | train(options))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if arguments.json:  # after every run, so that an error in a later one costs no results
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
