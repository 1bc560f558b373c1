"""Compares installations of jax_ep by turns, on one machine: the bench's times in microseconds, and ratios.

    pip install --no-deps --target build/old OLD.whl    (and so on for each version)
    python benchmarks/by_turns.py old=build/old new=build/new --rounds 3 --bench "--tokens 1,8,32,128 --wire fp8"

Each round runs every --bench once per installation, one after the other. So a change of the machine's clocks or memory
meets all installations alike. Ratios are to the first installation. (benchmarks/native/by_turns.py compares kernels
without XLA.)

The time of a pair of few tokens may depend on the process (docs/experiments.md). So give --bench several times, with
the same cases in other orders. A ratio is then the geometric mean of the ratios of all --bench:

    --bench "--tokens 1,8 --wire fp8" --bench "--tokens 8,1 --wire fp8" --bench "--tokens 1,8 --wire none,fp8"
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from jax_ep.bench.cases import Case

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


# case, installation, name of the time, --bench, round
Times = dict[str, dict[str, dict[str, list[list[float]]]]]


def case_of(row: dict[str, Any]) -> str:
    """The settings of a row. (An older bench has fewer settings. A newer setting is None where it has no effect.)"""
    values = {field.name: row.get(field.name) for field in dataclasses.fields(Case)}
    values["grad"] = True if row.get("grad_pair_us") else None
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def measure(builds: dict[str, str], benches: list[str], rounds: int) -> Times:
    """All times. A --bench that does not have a case has an empty list there."""
    times: Times = {}
    for _ in range(rounds):
        for number, options in enumerate(benches):
            for build, folder in builds.items():
                for row in bench(folder, shlex.split(options)):
                    columns = times.setdefault(case_of(row), {}).setdefault(build, {})
                    for name in TIMES:
                        if row.get(name):
                            columns.setdefault(name, [[] for _ in benches])[number].append(row[name])
    return times


def summary(column: list[list[float]], first: list[list[float]]) -> str:
    """The mean of the medians of each --bench, and the geometric mean of their ratios to `first`, if that has times."""
    time = statistics.mean(statistics.median(times) for times in column if times)
    ratios = [
        statistics.median(times) / statistics.median(others)
        for times, others in zip(column, first, strict=True)
        if times and others
    ]
    return f"{time:8.2f} {statistics.geometric_mean(ratios):6.3f}" if ratios else f"{time:8.2f}      -"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--bench",
        action="append",
        metavar="OPTIONS",
        help="options of the bench, in one argument; may be given several times",
    )
    parser.add_argument("--json", help="a file for all times")
    arguments = parser.parse_args()
    builds = dict(build.split("=", 1) for build in arguments.builds)
    benches = arguments.bench or [""]
    times = measure(builds, benches, arguments.rounds)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([{"case": case, "times": of_builds} for case, of_builds in times.items()], file)
    for case, of_builds in times.items():
        first = of_builds.get(next(iter(builds)), {})
        for build, columns in of_builds.items():
            cells = [f"{name} {summary(columns[name], first.get(name, [[] for _ in benches]))}" for name in columns]
            print(f"{case}  {build:10} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
