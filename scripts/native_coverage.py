"""Reports the lines of ffi/cuda that the emulated kernels have run: `make coverage`.

    python scripts/native_coverage.py build/coverage --at-least 90

The argument is the folder of a build with -DJAX_EP_COVERAGE=ON, with which tests have run. The exit status is 1 if
fewer percent of the lines ran than --at-least.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def counts_of(data: Path) -> dict[str, dict[int, int]]:
    """Returns the line counts of one object file: source -> line -> number of executions."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["gcov", "--json-format", "--stdout", data.resolve()]
        output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    counts: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    found = json.loads(output)
    for file in found["files"]:
        path = Path(file["file"])
        path = path if path.is_absolute() else Path(found["current_working_directory"]) / path
        try:
            source = path.resolve().relative_to(ROOT).as_posix()
        except ValueError:  # the compiler's own headers
            continue
        if source.startswith("ffi/cuda/"):
            for line in file["lines"]:  # once for each instance of a template
                counts[source][line["line_number"]] += line["count"]
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="the folder of the build")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT", help="of the lines that must run")
    parser.add_argument("--lines", action="store_true", help="print the lines that did not run")
    arguments = parser.parse_args()
    total: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for data in sorted(arguments.build.rglob("*.gcno")):
        for source, counts in counts_of(data).items():
            for line, count in counts.items():
                total[source][line] += count
    if not total:
        raise SystemExit(f"{arguments.build} has no counts of ffi/cuda; build with -DJAX_EP_COVERAGE=ON and run tests")
    num_run = num_lines = 0
    for source, counts in sorted(total.items()):
        not_run = sorted(line for line, count in counts.items() if count == 0)
        num_lines += len(counts)
        num_run += len(counts) - len(not_run)
        print(f"{source}: {len(counts) - len(not_run)} of {len(counts)} lines")
        if arguments.lines and not_run:
            print("  not", ", ".join(map(str, not_run)))
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ffi" / "cuda").rglob("*.c[cu]")}
    if not_compiled := sorted(sources - total.keys()):
        print("not compiled for emulated GPUs, and not counted:", ", ".join(not_compiled))
    percent = 100 * num_run / num_lines
    print(f"all: {num_run} of {num_lines} lines, {percent:.1f} %")
    return 0 if percent >= arguments.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
