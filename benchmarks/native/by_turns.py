"""Compares builds of timeline.cu by turns, on one machine: medians in microseconds, and ratios to the first build.

    cmake --build build/native-gpu --target op_times    (for an older version, see docs/experiments.md)
    python benchmarks/native/by_turns.py old=build/old/op_times new=build/native-gpu/op_times
    python benchmarks/native/by_turns.py --cases few,grad --rounds 5 old=... new=...

Each round runs every case with every build, one after the other. So a change of the machine's clocks or memory meets
all builds alike. timeline.cu says what its settings mean. (benchmarks/by_turns.py compares installations of jax_ep.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys

FP8, BF16 = "1", "0"
CASES = {
    "few": [(t, FP8, {}) for t in (1, 8, 32)] + [(8, BF16, {})],
    "middle": [
        (128, FP8, {}),
        (128, BF16, {}),
        (512, FP8, {}),
        (128, FP8, {"TOP_K": "16"}),
        (128, FP8, {"SKEWED": "1"}),
    ],
    "many": [(4096, FP8, {}), (4096, BF16, {}), (4096, FP8, {"HIDDEN": "2048"})],
    "sms": [(128, FP8, {"NUM_SMS": "24"}), (4096, FP8, {"NUM_SMS": "24"})],
    "legs": [(t, FP8, {"CAST_BACK": "1"}) for t in (8, 128, 512, 4096)],
    "grad": [(8, BF16, {"GRAD": "1"}), (128, BF16, {"GRAD": "1"}), (4096, BF16, {"GRAD": "1"})],
}
TIMES = re.compile(r"(dispatch|combine_back) ([\d.]+) (combine|dispatch_back) ([\d.]+) pair ([\d.]+) us(.*)")


def run(program: str, tokens: int, cast: str, settings: dict[str, str]) -> list[float]:
    """Microseconds of the operation out, of the one back, and of the pair; NaN where the run has failed."""
    command = [program, str(tokens), cast]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    found = TIMES.search(done.stdout)
    if found is None or found[6]:
        print(f"{' '.join(command)} {settings} has failed: {done.stdout[-300:]}{done.stderr[-300:]}", file=sys.stderr)
        return [float("nan")] * 3
    return [float(found[group]) for group in (2, 4, 5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="NAME=PROGRAM")
    parser.add_argument("--cases", default=",".join(CASES), help="groups of cases (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file for all times")
    arguments = parser.parse_args()
    builds = dict(build.split("=", 1) for build in arguments.builds)
    rows = []
    for tokens, cast, settings in itertools.chain.from_iterable(CASES[name] for name in arguments.cases.split(",")):
        times: dict[str, list[list[float]]] = {name: [] for name in builds}
        for _ in range(arguments.rounds):
            for name, program in builds.items():
                times[name].append(run(program, tokens, cast, settings))
        medians = {
            name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in times.items()
        }
        first = next(iter(medians.values()))
        what = " ".join([f"T={tokens}", "fp8" if cast == FP8 else "bf16", *(f"{k}={v}" for k, v in settings.items())])
        for name, (out, back, pair) in medians.items():
            print(f"{what:28} {name:10} {out:8.2f} {back:8.2f} {pair:8.2f}  {pair / first[2]:6.3f}", flush=True)
        rows.append({"case": what, "times": times})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
