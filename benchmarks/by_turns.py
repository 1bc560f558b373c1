"""Compares installations of jax_ep by turns, on one machine: the bench's times in microseconds, and ratios.

    pip install --no-deps --target build/old OLD.whl    (and so on for each version)
    python benchmarks/by_turns.py old=build/old new=build/new --rounds 3 --bench "--tokens 1,8,32,128 --wire fp8"

Each round runs `jax-ep bench` once with every installation, one after the other. So a change of the machine's clocks or
memory meets all installations alike. Ratios are to the first installation.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from jax_ep.bench.report import SETTINGS

TIMES = ("dispatch_us", "combine_us", "pair_us", "grad_pair_us")


def bench(folder: str, options: list[str]) -> list[dict[str, Any]]:
    """The rows that the bench of the installation in `folder` reports."""
    with tempfile.TemporaryDirectory() as scratch:
        report = os.path.join(scratch, "rows.json")
        command = [sys.executable, "-m", "jax_ep.bench", "--no-lax", "--json", report, *options]
        environment = os.environ | {"PYTHONPATH": os.path.abspath(folder)}
        done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} with {folder} has failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        with open(report) as file:
            return json.load(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bench", default="", help="options of the bench, in one argument")
    parser.add_argument("--json", help="a file for all times")
    arguments = parser.parse_args()
    options = shlex.split(arguments.bench)
    builds = dict(build.split("=", 1) for build in arguments.builds)
    rounds = [{name: bench(folder, options) for name, folder in builds.items()} for _ in range(arguments.rounds)]
    report = []
    for number, case in enumerate(next(iter(rounds[0].values()))):
        what = " ".join(f"{setting}={case[setting]}" for setting in SETTINGS if setting in case)
        measured = [name for name in TIMES if case.get(name)]
        times = {build: {name: [turn[build][number][name] for turn in rounds] for name in measured} for build in builds}
        report.append({"case": what, "times": times})
        first = next(iter(times.values()))
        for build, columns in times.items():
            medians = [
                f"{name} {statistics.median(column):8.2f} {_ratio(column, first[name]):6.3f}"
                for name, column in columns.items()
            ]
            print(f"{what:100} {build:10} {'  '.join(medians)}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file)


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(times) / statistics.median(others)


if __name__ == "__main__":
    main()
