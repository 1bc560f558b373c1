"""Ties results of GPUs to the sources that ran.

    python scripts/native_hash.py             # prints the hashes of the native and the Python sources
    python scripts/native_hash.py --check     # exit status 1 if a claim of the documents has no result

A claim is a sentence of a document that says what ran on GPUs. A comment after the sentence states it for this script:

    <!-- claim: 2xNVIDIA-H200 tests-1 tests-2 filter="-m gpu" at=cb96048 -->

It names the machine, the parts of scripts/gpu_check.sh, the filter that PYTEST_ARGS or BENCH_ARGS set, if any, and the
commit. `at=present` claims that the parts passed with the sources of this folder. Tables that scripts/update_tables.py
writes are claims, too: their captions name the commit.

--check fails if benchmarks/results/ holds no such run, if a step of the run failed, or if the sources of a claim with
`at=present` have not run. A claim that names its commit stays true when the sources change: --check lists it as older.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_results  # noqa: E402
from gpu_results import RESULTS, ROOT, Row  # noqa: E402

# Matches strings, too, so that text in a string that looks like a comment stays.
_STRING_OR_BETWEEN = re.compile(rb'("(?:\\.|[^"\\\n])*")|(?://[^\n]*|/\*.*?\*/|\s)+', re.DOTALL)


@functools.cache
def compiled(source: bytes) -> bytes:
    """Replaces comments and spaces of C++ by one space: a change of comments or spaces needs no new results."""
    return _STRING_OR_BETWEEN.sub(lambda match: match[1] or b" ", source)


def native_hash(root: Path = ROOT) -> str:
    """Returns the hash of CMakeLists.txt and ffi/, without the emulator, which no GPU runs."""
    emulator = root / "ffi" / "emulator"
    sources = [root / "CMakeLists.txt", *sorted((root / "ffi").rglob("*"))]
    digest = hashlib.sha256()
    for source in sources:
        if source.is_file() and source.suffix != ".md" and emulator not in source.parents:
            text = source.read_bytes() if source.suffix == ".txt" else compiled(source.read_bytes())
            digest.update(source.relative_to(root).as_posix().encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:16]


def python_hash(root: Path = ROOT) -> str:
    """Returns the hash of the package's Python sources, byte for byte."""
    digest = hashlib.sha256()
    for source in sorted((root / "jax_ep").rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Claim(NamedTuple):
    document: str
    machine: str
    steps: list[str]
    filter: str
    at: str  # a commit, or "present"

    def __str__(self) -> str:
        filtered = f" with {self.filter}" if self.filter else ""
        return f"{self.document}: {self.machine} {' '.join(self.steps)}{filtered} at {self.at}"


def documents(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("ffi/*.md")])


def claims(paths: Iterable[Path], root: Path = ROOT) -> Iterator[Claim]:
    for path in paths:
        for text in re.findall(r"(?<!`)<!-- claim: (.*?) -->", path.read_text(), re.DOTALL):
            words = shlex.split(text)
            named = dict(word.split("=", 1) for word in words if re.match(r"(filter|at)=", word))
            machine, *steps = [word for word in words if not re.match(r"(filter|at)=", word)]
            document = path.relative_to(root).as_posix()
            if not steps or "at" not in named:
                raise ValueError(
                    f"{document}: the claim {text!r} must name a machine, steps and at=COMMIT or at=present"
                )
            yield Claim(document, machine, steps, named.get("filter", ""), named["at"])


def _is_present(run: Row) -> bool:
    return run.get("native_hash") == native_hash() and run.get("python_hash") == python_hash()


def problem(claim: Claim, step: str, folder: Path = RESULTS) -> str | None:
    """Returns why the results do not support a claim about a step, or None if they do."""
    if claim.machine not in gpu_results.machines(folder):
        return f"nothing has run on {claim.machine}"
    results = gpu_results.load(claim.machine, folder)
    runs = {run["run"]: run for run in results["runs"]}
    with_filter = [row for row in results["steps"] if row["step"] == step]
    if not with_filter:
        return f"{step} has not run on {claim.machine}"
    rows = [row for row in with_filter if gpu_results.test_filter(row) in (claim.filter, "")]
    if not rows:
        filters = ", ".join(repr(gpu_results.test_filter(row)) for row in with_filter)
        return f"{step} has run with the filters {filters}, not with {claim.filter!r}"
    row = max(rows, key=lambda row: runs[row["run"]]["date"])
    run = runs[row["run"]]
    if claim.at == "present" and not _is_present(run):
        return f"{step} has not run with the present sources; its newest run is of commit {run.get('commit')}"
    if claim.at != "present" and run.get("commit") != claim.at:
        return f"the newest run of {step} is of commit {run.get('commit')}, not of {claim.at}"
    return None if row["ok"] else f"{step} failed"


def check(paths: Iterable[Path] | None = None, folder: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """Prints the results that are older than the sources. Returns a line for each claim without results."""
    problems = []
    for claim in claims(documents(root) if paths is None else paths, root):
        wrong = [text for step in claim.steps if (text := problem(claim, step, folder))]
        problems += [f"{claim}: {text}" for text in wrong]
        if not wrong and claim.at != "present":
            runs = {run["run"]: run for run in gpu_results.load(claim.machine, folder)["runs"]}
            if not all(_is_present(run) for run in runs.values() if run.get("commit") == claim.at):
                print(f"older than the sources: {claim}")
    for machine in gpu_results.machines(folder):
        results = gpu_results.load(machine, folder)
        for run in results["runs"]:
            steps = [row["step"] for row in results["steps"] if row["run"] == run["run"]]
            measured = [
                name for name in gpu_results.TABLES[2:] if any(row["run"] == run["run"] for row in results[name])
            ]
            same_natives = run.get("native_hash") == native_hash()
            age = "present sources" if _is_present(run) else "other Python" if same_natives else "other native sources"
            print(f"{machine} at {run.get('commit')} ({run['date'][:10]}, {age}): {', '.join(steps or measured)}")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        problems = check()
        for line in problems:
            print(f"ERROR: {line}", file=sys.stderr)
        sys.exit(1 if problems else 0)
    print(native_hash())
    print(python_hash())
