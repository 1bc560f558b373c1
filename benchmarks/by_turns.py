"""Compares installations of jax_ep by turns, on one machine: the bench's times in microseconds, and ratios.

    pip install --no-deps --target build/old OLD.whl    (and so on for each version)
    python benchmarks/by_turns.py old=build/old new=build/new --rounds 3 --bench "--tokens 1,8,32,128 --wire fp8"

Each round runs `jax-ep bench` once with every installation, one after the other. So a change of the machine's clocks or
memory meets all installations alike. Ratios are to the first installation.

The time of a pair of few tokens also depends on what its process ran before. So give --bench several times, with the
same cases in other orders. Each round then runs all of them, and a case has the times of all these processes:

    --bench "--tokens 1,8 --wire fp8" --bench "--tokens 8,1 --wire fp8" --bench "--tokens 1,8 --wire none,fp8"
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


Times = dict[str, dict[str, dict[str, list[float]]]]  # case, installation, name of the time


def measure(builds: dict[str, str], benches: list[str], rounds: int) -> Times:
    """All times, in the order in which they were measured."""
    times: Times = {}
    for _ in range(rounds):
        for options in benches:
            for build, folder in builds.items():
                for row in bench(folder, shlex.split(options)):
                    case = " ".join(f"{setting}={row[setting]}" for setting in SETTINGS if setting in row)
                    of_build = times.setdefault(case, {}).setdefault(build, {})
                    for name in TIMES:
                        if row.get(name):
                            of_build.setdefault(name, []).append(row[name])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bench", action="append", metavar="OPTIONS", help="options of the bench, in one argument")
    parser.add_argument("--json", help="a file for all times")
    arguments = parser.parse_args()
    builds = dict(build.split("=", 1) for build in arguments.builds)
    times = measure(builds, arguments.bench or [""], arguments.rounds)
    for case, of_builds in times.items():
        first = of_builds[next(iter(builds))]
        for build, columns in of_builds.items():
            medians = [
                f"{name} {statistics.median(column):8.2f} {_ratio(column, first[name]):6.3f}"
                for name, column in columns.items()
            ]
            print(f"{case:100} {build:10} {'  '.join(medians)}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([{"case": case, "times": of_builds} for case, of_builds in times.items()], file)


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(times) / statistics.median(others)


if __name__ == "__main__":
    main()
