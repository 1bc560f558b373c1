"""The hash that ties GPU results to the native sources they were measured with.

`python scripts/native_hash.py` prints it; `--check` warns, without failing, if the newest results in
benchmarks/results/ belong to other sources, or tell of a step that failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


# Strings stay as they are, whatever looks like a comment in them.
_STRING_OR_BETWEEN = re.compile(rb'("(?:\\.|[^"\\\n])*")|(?://[^\n]*|/\*.*?\*/|\s)+', re.DOTALL)


def compiled(source: bytes) -> bytes:
    """C++ with a space in place of all comments and spaces in a row: who changes only these needs no new results."""
    return _STRING_OR_BETWEEN.sub(lambda match: match[1] or b" ", source)


def native_hash() -> str:
    """Of CMakeLists.txt and all that is compiled in ffi/."""
    sources = [ROOT / "CMakeLists.txt", *sorted((ROOT / "ffi").rglob("*"))]
    digest = hashlib.sha256()
    for source in sources:
        if source.is_file() and source.suffix != ".md":
            text = source.read_bytes() if source.suffix == ".txt" else compiled(source.read_bytes())
            digest.update(source.relative_to(ROOT).as_posix().encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:16]


def check() -> str:
    """One line on whether the newest results belong to the present sources."""
    results = [json.loads(path.read_text()) for path in RESULTS.glob("gpu_check-*.json")]
    if not results:
        return (
            "WARNING: there are no GPU results in benchmarks/results/; run scripts/gpu_check.sh on a machine with GPUs"
        )
    results.sort(key=lambda result: result["date"])
    newest, present = results[-1], [result for result in results if result["native_hash"] == native_hash()]
    if not present:
        return (
            f"WARNING: the native sources ({native_hash()}) have not run on a GPU; the newest results, of "
            f"{newest['date']}, belong to {newest['native_hash']}: run scripts/gpu_check.sh on a machine with GPUs"
        )
    devices = sorted({f"{result['num_devices']} x {result['device']}" for result in present})
    ran = f"The native sources ({native_hash()}) ran on {', '.join(devices)}, last on {present[-1]['date']}"
    steps = {name: step for result in present for name, step in result["steps"].items()}  # each as it ran last
    if failed := [name for name, step in steps.items() if not step["ok"]]:
        return f"WARNING: {ran}, where {', '.join(failed)} failed: see benchmarks/results/"
    return f"{ran}: {', '.join(sorted(steps))}."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    print(check() if parser.parse_args().check else native_hash())
