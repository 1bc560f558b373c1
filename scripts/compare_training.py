"""Compares the loss curves of two runs of examples/train_moe.py. scripts/gpu_check.sh makes one run per backend.

    python scripts/compare_training.py build/gpu_check/cuda build/gpu_check/reference

The exit status is 1 if the losses of any step differ by more than the tolerance of that step.

Two backends add the same numbers in different orders. So the sums are rounded differently. Up to step 90, the losses
agree to 1e-6 on CPUs and to 1e-5 on 2 x H200. Then the router of one run sends a token to another expert, and the
difference grows: at most 0.0131 in 300 steps, in four runs on 2 x H200 (commits 679b0f3 to b02df1b). If a backend loses
one row per step, the losses differ by 2e-4 at step 1 if combine loses the row, and by 2.6e-4 at step 10 if the gradient
loses the row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

EARLY_STEPS = 90
EARLY_TOLERANCE = 1e-4  # ten times the difference due to rounding
LATE_TOLERANCE = 0.04  # three times the difference due to rounding


def losses(directory: Path) -> list[float]:
    """Returns the loss of each step, in nats per byte, from the file that examples/train_moe.py --out writes."""
    return json.loads((directory / "train_moe.json").read_text())["loss"]


def mismatches(one: list[float], other: list[float]) -> list[str]:
    """Returns a line for each step whose losses differ by more than the tolerance, or are NaN."""
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
