"""Breaks the sources in one place at a time, and checks that a test fails each time.

    python tests/mutants.py                           # all mutants but those that are marked: no test catches them yet
    python tests/mutants.py tell-finished-relaxed     # some mutants
    python tests/mutants.py --sample 8 --seed 1234    # 8 random mutants, beside those that are named
    python tests/mutants.py --list                    # the mutants, and the orders that no mutant can show

A mutant is a wrong version of the sources, such as one without one of the orders in docs/design.md, section 5.
tests/mutants.txt has all of them, and says how they are written. There are two sorts:

- Mutants of ffi/ run random exchanges between emulated GPUs (tests/native/exchange_seeds.h). One program has all of
  these mutants, and an environment variable chooses one. First, the seeds 1 to 100 run without a mutant, and must pass.
  Then each mutant runs the seeds 1 to 200, or its part of the seeds 1 to 1000, until one fails. The ten seeds around
  this one must pass without the mutant.
- Mutants of jax_ep/ run tests of pytest. The environment must have jax_ep with the emulated backend (cmake's
  JAX_EP_EMULATOR=ON).

The exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.txt"
SEEDS = 200
SEEDS_OF_PARTS = 1000  # a part takes less time than all that a seed runs
SEEDS_OF_A_PROCESS = 10
PROCESS_SECONDS = 90  # a process that takes longer hangs
PYTEST_SECONDS = 600


# --- the list ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Edit:
    file: str
    old: list[str] = dataclasses.field(default_factory=list)  # lines, with their marks: "- " or "  "
    new: list[str] = dataclasses.field(default_factory=list)

    def span(self, text: str) -> tuple[int, int]:
        """Where the replaced words are in the file; raises ValueError unless the old lines are there exactly once.

        It does not matter how spaces are broken into lines. A comment behind the replaced words is kept.
        """
        pattern, is_open = "", False
        for number, line in enumerate(self.old):
            replaced = line.startswith("- ")
            code, comment = re.fullmatch(r"(.*?)(\s*//.*)?", line[2:].strip()).groups("")
            words = r"\s+".join(map(re.escape, code.split()))
            pattern += (r"\s*\n\s*" if number else "") + ("(" if replaced and not is_open else "") + words
            is_open |= replaced
            is_last = replaced and not any(later.startswith("- ") for later in self.old[number + 1 :])
            pattern += (")" if is_last else "") + re.escape(comment)
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            raise ValueError(f"{self.file} has {len(found)} times, and must have once: {self.old}")
        return found[0].span(1)

    @property
    def replacement(self) -> str:
        return "\n".join(self.new)


@dataclasses.dataclass
class Mutant:
    name: str
    breaks: str  # the heading
    command: list[str] = dataclasses.field(default_factory=lambda: ["seeds"])
    edits: list[Edit] = dataclasses.field(default_factory=list)
    survives: str = ""  # why no test catches it yet

    @property
    def is_native(self) -> bool:
        return self.command[0] != "pytest"


def read_list() -> tuple[list[Mutant], dict[str, str]]:
    """The mutants; and under which headings there is none, and why."""
    mutants: list[Mutant] = []
    reasons: dict[str, str] = {}
    heading = ""
    for line in LIST.read_text().splitlines():
        mark, rest = line[:2], line[2:]
        if line.startswith("## "):
            heading = line[3:]
        elif mark == "! ":
            reasons[heading] = f"{reasons.get(heading, '')} {rest}".strip()
        elif mark == "$ ":
            mutants[-1].command = shlex.split(rest)
        elif mark == "? ":
            mutants[-1].survives = f"{mutants[-1].survives} {rest}".strip()
        elif mark == "@ ":
            mutants[-1].edits.append(Edit(rest))
        elif mark in ("- ", "  "):
            mutants[-1].edits[-1].old.append(line)
        elif mark == "+ ":
            mutants[-1].edits[-1].new.append(rest)
        elif line and mark[0] != "#":
            mutants.append(Mutant(line, heading))
    return mutants, reasons


# --- the program that has all mutants of ffi/ -------------------------------------------------------------------------

# Number 0 is no mutant. Constants that the compiler evaluates are those of no mutant.
SWITCH = """#pragma once
#include <cstdlib>
namespace jax_ep {
inline int chosen_mutant() {
  static const int chosen = std::getenv("JAX_EP_MUTANT") ? std::atoi(std::getenv("JAX_EP_MUTANT")) : 0;
  return chosen;
}
constexpr bool is_mutant(int number) { return __builtin_is_constant_evaluated() ? false : chosen_mutant() == number; }
}  // namespace jax_ep
"""

MAKEFILE = """FLAGS = -std=c++17 -O1 -g1 -MMD -ffp-contract=off -w -DJAX_EP_EMULATOR
INCLUDES = -include switch.h -I. -Itests/native -Iffi/emulator/include
OBJECTS = {objects}
exchange_test: $(OBJECTS)
\t$(CXX) $^ -o $@ -lpthread
NETWORK = -DJAX_EP_NETWORK -Djax_ep=jax_ep_over_network
%.network.o: %.cu
\t$(CXX) $(FLAGS) $(INCLUDES) $(NETWORK) -x c++ -c $< -o $@
%.network.o: %.cc
\t$(CXX) $(FLAGS) $(INCLUDES) $(NETWORK) -c $< -o $@
%.o: %.cc
\t$(CXX) $(FLAGS) $(INCLUDES) -c $< -o $@
%.o: %.cu
\t$(CXX) $(FLAGS) $(INCLUDES) -x c++ -c $< -o $@
-include $(OBJECTS:.o=.d)
"""


def with_branches(file: str, text: str, mutants: Sequence[Mutant]) -> str:
    """A source of ffi/ with a branch in place of each edit: of statements, or within an expression.

    One edit may be within another, but two must not overlap in another way.
    """
    insertions = []
    spans = []
    for number, mutant in enumerate(mutants, start=1):
        for edit in mutant.edits:
            if edit.file != file:
                continue
            begin, end = edit.span(text)
            if any(b < begin < e < end or begin < b < end < e for b, e in spans):
                raise ValueError(f"{file}: an edit of {mutant.name} overlaps another mutant's")
            spans.append((begin, end))
            if text[begin:end].endswith((";", "}")):
                before, behind = f"{{ if (is_mutant({number})) {{ {edit.replacement} }} else {{ ", " } }"
            else:
                before, behind = f"(is_mutant({number}) ? ({edit.replacement}) : (", "))"
            # Of edits in the same place, the longest one is outermost.
            insertions.append((begin, 1, begin - end, number, before))
            insertions.append((end, 0, end - begin, -number, behind))
    pieces, at = [], 0
    for where, _, _, _, words in sorted(insertions):
        pieces += [text[at:where], words]
        at = where
    return "".join(pieces) + text[at:]


def write(path: Path, text: str) -> None:
    """Leaves a file of the same text as it is, so that make does not compile it again."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def build(folder: Path, mutants: Sequence[Mutant], jobs: int) -> Path:
    """Builds tests/native/exchange_test.cu, for emulated GPUs, with these mutants of ffi/."""
    sources = [path for path in (ROOT / "ffi").rglob("*") if path.suffix in (".h", ".cuh", ".cc", ".cu")]
    for source in [*sources, *(ROOT / "tests" / "native").glob("*.*")]:
        file = source.relative_to(ROOT).as_posix()
        write(folder / file, with_branches(file, source.read_text(), mutants))
    units = [*(ROOT / "ffi" / "cuda").glob("*.c[cu]"), *(ROOT / "ffi" / "emulator").glob("*.cc")]
    units.append(ROOT / "ffi" / "cuda" / "grouped_matmul" / "groups.cu")
    needs_xla = ("module", "handlers", "balance_handlers", "expand_handlers", "floor")
    units = [unit for unit in units if unit.stem not in needs_xla] + [ROOT / "tests" / "native" / "exchange_test.cu"]
    kernels = [
        ROOT / "ffi" / "cuda" / name for name in ("dispatch.cu", "combine.cu", "balance.cu", "replicate.cu", "start.cu")
    ]
    of_network = [*kernels, *(ROOT / "ffi" / "cuda" / "nvshmem").glob("*.cu"), kernels[0].parent / "nvshmem/network.cc"]
    objects = {unit.relative_to(ROOT).with_suffix(".o").as_posix(): unit for unit in units}
    objects |= {unit.relative_to(ROOT).with_suffix(".network.o").as_posix(): unit for unit in of_network}
    longest_first = sorted(objects, key=lambda name: -objects[name].stat().st_size)  # to compile
    write(folder / "switch.h", SWITCH)
    write(folder / "Makefile", MAKEFILE.format(objects=" ".join(longest_first)))
    made = run(["make", "-s", f"-j{jobs}", "-C", folder], seconds=1200)
    if made is not None:
        raise SystemExit(f"{made.output}\nthe sources do not compile with all mutants")
    return folder / "exchange_test"


# --- runs -------------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    status: int  # of the process; below 0 a signal
    output: str


def run(command: Sequence[str | Path], seconds: float, **environment: str) -> Failure | None:
    """How the command fails, or None. A command that takes longer than `seconds` has failed."""
    environment = os.environ | environment
    pipe, to_pipe = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=to_pipe, start_new_session=True
    ) as it:
        try:
            output, _ = it.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(it.pid, signal.SIGKILL)  # also what it has started
            output, _ = it.communicate()
            output = b"hangs\n" + output
    if it.returncode == 0:
        return None
    return Failure(it.returncode, output.decode(errors="replace").strip() or f"ends with status {it.returncode}")


def seeds_command(program: Path, first: int, count: int, part: str = "seeds") -> tuple[str, ...]:
    return (str(program), part, str(first), str(count))


@functools.cache
def run_without_mutant(command: tuple[str, ...]) -> Failure | None:
    return run(command, PROCESS_SECONDS, JAX_EP_MUTANT="0")


def describe_failure(failure: Failure, first: int, count: int, part: str = "seeds") -> str:
    seed = re.findall(r"\bseed (\d+)", failure.output)[-1:] or [f"{first} to {first + count - 1}"]
    of_part = "" if part == "seeds" else f" of {part}"
    return f"at seed {seed[0]}{of_part} by: {failure.output.splitlines()[0][:150]}"


def run_seeds(program: Path, number: int, part: str, *settings: str) -> str | None:
    """Runs `part` of the seeds with mutant `number`. Describes the first failure; None if all pass."""
    seeds = SEEDS if part == "seeds" else SEEDS_OF_PARTS
    for first in range(1, 1 + seeds, SEEDS_OF_A_PROCESS):
        count = min(SEEDS_OF_A_PROCESS, 1 + seeds - first)
        command = seeds_command(program, first, count, part)
        failure = run([*command, *settings], PROCESS_SECONDS, JAX_EP_MUTANT=str(number))
        if failure is None:
            continue
        if not settings and run_without_mutant(command):
            raise SystemExit(f"the seeds {first} to {first + count - 1} of {part} fail without a mutant")
        return describe_failure(failure, first, count, part)
    return None


def check_repeatable(program: Path) -> None:
    """Runs seed 10 alone, and after seeds 1 to 9. Stops if a seed fails, or if its two runs end at different times."""
    commands = [seeds_command(program, first, count) for first, count in ((1, 10), (10, 1))]
    reports = [subprocess.run(command, capture_output=True, text=True).stderr for command in commands]
    ends = [re.search(r"ended at virtual time (\d+)", report) for report in reports]
    if not all(ends) or ends[0][1] != ends[1][1]:
        raise SystemExit(f"a seed failed, or seed 10 ended at different times alone and after seeds 1 to 9: {reports}")


def check_refuses_unknown_parts(program: Path) -> None:
    """Stops if the program accepts a part that it does not have: a misspelt part would run nothing, and pass."""
    refused = subprocess.run([program, "1", "quick", "no_such_part"], capture_output=True, text=True)
    if refused.returncode != 2 or "the parts are:" not in refused.stderr:
        raise SystemExit(f"exchange_test accepts an unknown part: status {refused.returncode}: {refused.stderr}")


def run_pytest(folder: Path, command: Sequence[str], edits: Sequence[Edit]) -> str | None:
    """The test that fails with these edits of jax_ep/, or None."""
    emulated = importlib.util.find_spec("jax_ep._emulated")
    if emulated is None or emulated.origin is None:
        raise SystemExit("jax_ep is not installed with the emulated backend (cmake's JAX_EP_EMULATOR=ON)")
    package = Path(tempfile.mkdtemp(dir=folder)) / "jax_ep"
    shutil.copytree(ROOT / "jax_ep", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for extension in Path(emulated.origin).parent.glob("*.so"):
        (package / extension.name).symlink_to(extension)
    for edit in edits:
        path = package.parent / edit.file
        text = path.read_text()
        begin, end = edit.span(text)
        path.write_text(text[:begin] + edit.replacement + text[end:])
    # With -S and PYTHONSAFEPATH, neither an editable installation nor the folder here goes before the copy.
    search_path = [str(package.parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    command = [sys.executable, "-S", "-m", *command, "-x", "-q", "-p", "no:cacheprovider"]
    failure = run(command, PYTEST_SECONDS, PYTHONPATH=os.pathsep.join(search_path), PYTHONSAFEPATH="1")
    if failure is None:
        return None
    failures = re.findall(r"^(?:FAILED|ERROR) (.*)$", failure.output, re.MULTILINE)
    if failure.status > 0 and not failures:  # no such test, for example
        raise SystemExit(f"{failure.output}\n{shlex.join(command)} ends with status {failure.status}")
    return f"by: {next(iter(failures), failure.output.splitlines()[-1])[:150]}"


def catch(mutants: Sequence[Mutant], natives: Sequence[Mutant], arguments: argparse.Namespace) -> list[str]:
    """Runs `mutants`, `natives` being all of ffi/; the names of those that survive."""
    survivors = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(temporary)
        program = folder
        if any(mutant.is_native for mutant in mutants):
            begun = time.monotonic()
            program = build(arguments.build or folder / "build", natives, arguments.jobs)
            print(f"built in {time.monotonic() - begun:.0f} s", flush=True)
            begun = time.monotonic()
            count, firsts = SEEDS_OF_A_PROCESS, range(1, 101, SEEDS_OF_A_PROCESS)
            commands = [seeds_command(program, first, count) for first in firsts]
            for first, failure in zip(firsts, pool.map(run_without_mutant, commands), strict=True):
                if failure is not None:
                    raise SystemExit(f"without a mutant, exchange_test fails {describe_failure(failure, first, count)}")
            check_repeatable(program)
            check_refuses_unknown_parts(program)
            print(f"100 seeds pass without a mutant ({time.monotonic() - begun:.0f} s)", flush=True)

        for command in {tuple(mutant.command) for mutant in mutants if not mutant.is_native}:
            if failure := run_pytest(folder, command, []):
                raise SystemExit(f"without a mutant, {shlex.join(command)} fails {failure}")

        def catch_one(mutant: Mutant) -> None:
            begun = time.monotonic()
            if mutant.is_native:
                number = natives.index(mutant) + 1
                failure = run_seeds(program, number, *mutant.command)
            else:
                failure = run_pytest(folder, mutant.command, mutant.edits)
            if failure is None:
                survivors.append(mutant.name)
            says = f"caught {failure}" if failure else "SURVIVED"
            print(f"{mutant.name}: {says} ({time.monotonic() - begun:.0f} s)", flush=True)

        list(pool.map(catch_one, mutants))
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants; if no name is given, all but those marked in the list")
    parser.add_argument("--sample", type=int, metavar="N", help="run N more that tests catch, by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--build", type=Path, help="a folder to build in, which is kept")
    parser.add_argument("--list", action="store_true", help="print the mutants, and what no mutant can show")
    arguments = parser.parse_args()
    mutants, reasons = read_list()
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.breaks}{' (survives)' if mutant.survives else ''}")
        print("\nNo mutant can show:")
        for order, reason in reasons.items():
            print(f"{order}: {reason}")
        return 0
    by_name = {mutant.name: mutant for mutant in mutants}
    if unknown := [name for name in arguments.names if name not in by_name]:
        parser.error(f"there are no mutants {', '.join(unknown)}; --list tells their names")
    chosen = [by_name[name] for name in dict.fromkeys(arguments.names)]
    others = [mutant for mutant in mutants if mutant not in chosen and not mutant.survives]
    if arguments.sample is not None:
        chosen += random.Random(arguments.seed).sample(others, min(arguments.sample, len(others)))
    elif not chosen:
        chosen = others
    survivors = catch(chosen, [mutant for mutant in mutants if mutant.is_native], arguments)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
