"""Which lines of ffi/cuda the emulated kernels have run: `make coverage`.

    python scripts/native_coverage.py build/coverage --at-least 90

The folder holds what a build with -DJAX_EP_COVERAGE=ON, and the programs that ran with it, have left there. It is an
error if they have run fewer lines than so many of a hundred.
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
    """Of what one object file has run: source -> line -> how often."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["gcov", "--json-format", "--stdout", data.resolve()]
        output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    counts: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for file in json.loads(output)["files"]:
        path = Path(file["file"])
        path = path if path.is_absolute() else data.parent / path
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
    parser.add_argument("build", type=Path)
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    parser.add_argument("--lines", action="store_true", help="print the lines that did not run")
    arguments = parser.parse_args()
    total: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for data in sorted(arguments.build.rglob("*.gcda")):
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
    percent = 100 * num_run / num_lines
    print(f"all: {num_run} of {num_lines} lines, {percent:.1f} %")
    return 0 if percent >= arguments.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
