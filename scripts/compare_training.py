"""Compares the loss curves of two runs of examples/train_moe.py, as scripts/gpu_check.sh makes them with two backends.

    python scripts/compare_training.py build/gpu_check/cuda build/gpu_check/reference

The exit status is 1 if the losses of any step are further apart than the tolerance of that step.

Two backends round the same sums in another order. Up to step 90, their losses agree to 1e-6 on CPUs and to 1e-5 on
2 x H200. Then a token is routed to another expert in one run, and the difference grows: at most 0.0131 in 300 steps, in
four runs on 2 x H200 (commits 679b0f3 to b02df1b). A backend that loses one row per step is
2e-4 off at step 1 if combine loses the row, and 2.6e-4 off at step 10 if the gradient loses it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

EARLY_STEPS = 90
EARLY_TOLERANCE = 1e-4  # ten times the difference that rounding makes
LATE_TOLERANCE = 0.04  # three times the difference that rounding makes


def losses(directory: Path) -> list[float]:
    """The loss of each step, in nats per byte, from the file that examples/train_moe.py --out writes."""
    return json.loads((directory / "train_moe.json").read_text())["loss"]


def mismatches(one: list[float], other: list[float]) -> list[str]:
    """One line for each step whose losses are further apart than the tolerance. A NaN is further apart."""
    if len(one) != len(other):
        return [f"one run has {len(one)} steps, the other run has {len(other)}"]
    lines = []
    for step, (a, b) in enumerate(zip(one, other, strict=True), start=1):
        tolerance = EARLY_TOLERANCE if step <= EARLY_STEPS else LATE_TOLERANCE
        if not abs(a - b) <= tolerance:
            lines.append(f"step {step}: {a:.6f} and {b:.6f} are further apart than {tolerance}")
    return lines


def main(one: Path, other: Path) -> int:
    curves = losses(one), losses(other)
    wrong = mismatches(*curves)
    for line in wrong[:10]:
        print(line)
    for name, steps in (("early", slice(EARLY_STEPS)), ("late", slice(EARLY_STEPS, None))):
        apart = max((abs(a - b) for a, b in zip(*(curve[steps] for curve in curves), strict=False)), default=0.0)
        print(f"largest difference in {name} steps: {apart:.2e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
