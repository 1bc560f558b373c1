"""Writes the tables of the documents from benchmarks/results/.

    python scripts/update_tables.py            # rewrites the tables
    python scripts/update_tables.py --check    # exit status 1 if a table differs from the results

A table is between two comments. The first names the table and the machine:

    <!-- table: pairs 4xNVIDIA-H200 -->
    ...
    <!-- end of table -->

Its caption names the machine, the commit and the date of the run. `TABLES` below has all tables.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_results  # noqa: E402
from gpu_results import ROOT, Row  # noqa: E402
from native_hash import documents  # noqa: E402

BLOCK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


class Machine:
    """The results of one machine."""

    def __init__(self, name: str, folder: Path = gpu_results.RESULTS) -> None:
        self.name, self.folder = name, folder
        self.tables = gpu_results.load(name, folder)
        self.runs = {run["run"]: run for run in self.tables["runs"]}
        if not self.runs:
            raise ValueError(f"nothing has run on {name}")

    def rows(self, table: str, *steps: str) -> list[Row]:
        found = [row for step in steps for row in self.tables[table] if row["step"] == step]
        if not found:
            raise ValueError(f"{self.name} has no results of {' or '.join(steps)}")
        return found

    def caption(self, rows: Iterable[Row], command: str, text: str) -> str:
        """Returns the caption of a table: machine, sources, date and command, then the meaning of the numbers."""
        runs = sorted({row["run"] for row in rows})
        whens = [
            f"commit {run['commit']} ({run['date'][:10]}, jax {run['versions']['jax']})"
            for run in map(self.runs.__getitem__, runs)
        ]
        when = ", ".join(dict.fromkeys(whens))  # several runs may be of one commit
        notes = {self.runs[run]["note"] for run in runs if "note" in self.runs[run]}
        return f"*{self.device}, {when}, `{command}`. {' '.join([text, *sorted(notes)])}*"

    def measured_with(self, row: Row, step: str) -> list[dict[str, str]]:
        """Returns the rows of another step of the bench in the same run, from the history."""
        run = self.runs[row["run"]]
        of_run = {"step": step, "date": run["date"], "num_devices": str(run["num_devices"])}
        found = gpu_results.history(self.folder)
        return [row for row in found if all(row[name] == value for name, value in of_run.items())]

    def of_other_runs(self, rows: Sequence[Row], name: Callable[[Row], str]) -> str:
        """Names the rows that are not of the run of the first row, for a caption. Empty if all are of one run."""
        others: dict[str, list[str]] = {}
        for row in rows:
            if row["run"] != rows[0]["run"]:
                others.setdefault(self.runs[row["run"]]["commit"], []).append(name(row))
        return "".join(f" Rows of {commit}: {'; '.join(names)}." for commit, names in others.items())

    @property
    def device(self) -> str:
        run = next(iter(self.runs.values()))
        return f"{run['num_devices']} x {run['device'].removeprefix('NVIDIA ')}"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Formats a table. Its first columns are text, its other columns numbers."""
    rules = ["---" if column < text_columns else "--:" for column in range(len(headings))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rules, *rows])


def us(time: float | str | None) -> str:
    if time in (None, ""):
        return ""
    return f"{float(time):.1f}" if float(time) < 99.95 else f"{float(time):.0f}"


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}"


def wire(row: Row) -> str:
    return row.get("wire", row["dtype"])


PAIR_HEADINGS = ("dispatch", "combine", "pair", "floor", "pair / floor", "wall")


def pair_cells(row: Row) -> list[str]:
    times = [us(row[name]) for name in ("dispatch_us", "combine_us", "pair_us", "floor_pair_us")]
    return [*times, ratio(row["pair_us"], row["floor_pair_us"]), us(row["wall_pair_us"])]


SHAPE = "Hidden 7168, top-8 of 256 experts, uniform routing, ragged layout, activations in bfloat16"


def pairs(machine: Machine) -> str:
    """Makes the table of dispatch and combine over tokens."""
    rows = sorted(machine.rows("bench", "bench-1-tokens"), key=lambda row: (row["tokens"], wire(row)))
    cells = [[str(row["tokens"]), wire(row), *pair_cells(row)] for row in rows]
    caption = machine.caption(rows, "scripts/gpu_check.sh bench-1-tokens", f"{SHAPE}; microseconds.")
    return f"{caption}\n\n{markdown(['tokens per rank', 'wire', *PAIR_HEADINGS], cells, 2)}"


def shape(row: Row) -> str:
    """Describes how a row of the bench differs from the usual shape."""
    different = {
        f"hidden {row['hidden']}": row["hidden"] != 7168,
        f"top-{row['top_k']}": row["top_k"] != 8,
        f"{row['experts']} experts": row["experts"] != 256,
        "half of all rows to one rank": row["routing"] == "skewed",
        f"{row.get('num_sms')} SMs": "num_sms" in row,
        f"{row['tokens']} tokens": row["tokens"] != 128,
    }
    return ", ".join(name for name, is_so in different.items() if is_so)


def shapes(machine: Machine) -> str:
    """Makes the table of dispatch and combine in other shapes."""
    steps = ("bench-2-hidden", "bench-3-top-k", "bench-4-experts", "bench-5-skewed", "bench-6-num-sms")
    rows = machine.rows("bench", *steps)
    text = "128 tokens per rank and wire fp8 unless the first column says otherwise; microseconds."
    caption = machine.caption(rows, "scripts/gpu_check.sh bench", text + machine.of_other_runs(rows, shape))
    return f"{caption}\n\n{markdown(['shape', *PAIR_HEADINGS], [[shape(row), *pair_cells(row)] for row in rows])}"


def backward(machine: Machine) -> str:
    """Makes the table of a pair in training."""
    rows = machine.rows("bench", "bench-7-grad")
    cells = [
        [str(row["tokens"])]
        + [us(row[name]) for name in ("pair_us", "grad_pair_us", "grad_combine_us", "grad_dispatch_us")]
        + [us(row["floor_pair_us"])]
        for row in rows
    ]
    caption = machine.caption(rows, "scripts/gpu_check.sh bench-7-grad", f"{SHAPE}, default capacity; microseconds.")
    headings = [
        "tokens per rank",
        "forward pair",
        "backward pair",
        "of which combine's",
        "dispatch's",
        "floor of a pair",
    ]
    return f"{caption}\n\n{markdown(headings, cells)}"


def training(machine: Machine) -> str:
    """Makes the table of a pair in training with a small capacity: without fp8, and with fp8 on all legs."""
    rows = machine.rows("bench", "bench-12-capacity", "bench-13-capacity-fp8")
    cells = [
        [
            row.get("grad_wire", "none"),
            str(row["tokens"]),
            *(us(row[name]) for name in ("pair_us", "grad_pair_us")),
            f"{row['grad_pair_us'] / row['pair_us']:.2f}",
            *(us(row[name]) for name in ("grad_combine_us", "grad_dispatch_us", "floor_pair_us")),
        ]
        for row in rows
    ]
    text = f"{SHAPE}, capacity_factor 1.25; microseconds. The first column is the format on all legs."
    caption = machine.caption(rows, "scripts/gpu_check.sh bench-12-capacity bench-13-capacity-fp8", text)
    headings = [
        *("wires", "tokens per rank", "forward pair", "backward pair", "backward / forward"),
        *("of which combine's", "dispatch's", "floor of a pair"),
    ]
    return f"{caption}\n\n{markdown(headings, cells)}"


def forward_legs(machine: Machine) -> str:
    """Makes the table of pairs whose combine travels as fp8."""
    columns = {"combine": "combine_us", "pair": "pair_us", "floor": "floor_pair_us"}
    text = "wire fp8 in dispatch; microseconds. The floor is that of a pair."
    return _legs(machine, "bench-10-legs", "combine_wire", "wire of combine", columns, text)


def backward_legs(machine: Machine) -> str:
    """Makes the table of backward passes that travel as fp8."""
    columns = {
        "backward pair": "grad_pair_us",
        "of which combine's": "grad_combine_us",
        "dispatch's": "grad_dispatch_us",
    }
    text = "wire fp8 in dispatch and combine, default capacity; microseconds."
    return _legs(machine, "bench-11-grad-legs", "grad_wire", "`grad_wire` of both", columns, text)


def _legs(machine: Machine, step: str, setting: str, heading: str, columns: dict[str, str], text: str) -> str:
    """Makes a table with a row for each number of tokens and each value of `setting`."""
    rows = sorted(machine.rows("bench", step), key=lambda row: (row["tokens"], row.get(setting, "")))
    cells = [
        [str(row["tokens"]), row.get(setting, "none"), *(us(row[name]) for name in columns.values())] for row in rows
    ]
    caption = machine.caption(rows, f"scripts/gpu_check.sh {step}", f"{SHAPE}, {text}")
    return f"{caption}\n\n{markdown(['tokens per rank', heading, *columns], cells, 2)}"


def rivals(machine: Machine) -> str:
    """Makes the table of jax_ep beside plain JAX."""
    rows = machine.rows("bench", "bench-8-lax")
    by_case: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["tokens"], {})[wire(row)] = row
    for row in machine.measured_with(rows[0], "bench-1-tokens"):  # the same chain, on the same clock
        case = by_case.get(int(row["tokens"]), {})
        if case and int(row["chain"]) == rows[0]["chain"]:
            case.setdefault(row["wire"] or row["dtype"], row)
    wires = [name for name in ("bfloat16", "fp8") if any(name in case for case in by_case.values())]
    cells = []
    for tokens, case in by_case.items():
        lax = next(row for row in case.values() if row.get("lax_pair_us"))
        ours = [us(case[name]["wall_pair_us"]) if name in case else "" for name in wires]
        cells.append([str(tokens), *ours, us(lax["lax_pair_us"]), us(lax.get("lax_ragged_pair_us"))])
    chain = rows[0]["chain"]
    text = (
        f"Microseconds of the host's clock per dispatch and combine, in chains of {chain} pairs, in every column. "
        "Hidden 7168, top-8 of 256 experts. lax sends rows in bfloat16."
    )
    headings = [
        "tokens per rank",
        *(f"jax_ep, {name}" for name in wires),
        "`lax.all_to_all`",
        "`lax.ragged_all_to_all`",
    ]
    if not any(wire(row) == "bfloat16" for row in rows):
        text += " The column of jax_ep with bfloat16 is from `bench-1-tokens` of the same run."
    return f"{machine.caption(rows, 'scripts/gpu_check.sh bench-8-lax', text)}\n\n{markdown(headings, cells)}"


def processes(machine: Machine) -> str:
    """Makes the table of one process per GPU beside one process, from one run."""
    rows = machine.rows("bench", "processes-4-bench")
    alone = {
        int(row["tokens"]): row["pair_us"]
        for row in machine.measured_with(rows[0], "bench-1-tokens")
        if row["wire"] == "fp8"
    }
    cells = [
        [str(row["tokens"])]
        + [us(row[name]) for name in ("dispatch_us", "combine_us", "pair_us", "wall_pair_us")]
        + [us(alone.get(row["tokens"]))]
        for row in rows
    ]
    command = "scripts/gpu_check.sh bench-1-tokens processes-4-bench"
    caption = machine.caption(rows, command, f"{SHAPE}, wire fp8; microseconds.")
    headings = ["tokens per rank", "dispatch", "combine", "pair", "wall", "one process: pair"]
    return f"{caption}\n\n{markdown(headings, cells)}"


def network(machine: Machine) -> str:
    """Makes the table of NVSHMEM between halves of the GPUs beside NVLink, from one run."""
    rows = machine.rows("bench", "processes-5-bench-nvshmem")
    nvlink = {int(row["tokens"]): row["pair_us"] for row in machine.measured_with(rows[0], "processes-4-bench")}
    cells = [
        [str(row["tokens"]), us(nvlink.get(row["tokens"]))]
        + [us(row[name]) for name in ("dispatch_us", "combine_us", "pair_us")]
        + [str(row["network_rows"])]
        for row in rows
    ]
    nodes, of = rows[0]["nodes"], rows[0]["ranks"] // rows[0]["nodes"]
    caption = machine.caption(
        rows,
        "scripts/gpu_check.sh processes-4-bench processes-5-bench-nvshmem",
        f"{nodes} nodes of {of}. {SHAPE}, wire fp8; microseconds.",
    )
    headings = ["tokens per rank", "NVLink: pair", "NVSHMEM: dispatch", "combine", "pair", "`network_rows`"]
    few, many = rows[-2:]  # both with one level, or both with two (docs/network.md)
    num_rows = many["network_rows"] - few["network_rows"]
    over = many["pair_us"] - few["pair_us"]
    text = (
        f"From {few['tokens']} to {many['tokens']} tokens, one more row adds {over / num_rows:.2f} us to the pair over "
        "NVSHMEM"
    )
    if many["tokens"] in nvlink:
        over -= float(nvlink[many["tokens"]]) - float(nvlink[few["tokens"]])
        text += f"; `c / lanes` is {over / num_rows:.2f} us by the formula above"
    return f"{caption}\n\n{markdown(headings, cells)}\n\n{text}."


VARIANTS = {
    "jax_ep": "jax_ep",
    "all_to_all": "`lax.all_to_all`",
    "ragged_all_to_all": "`lax.ragged_all_to_all`",
    "ideal": "no communication",
}


def matmul(machine: Machine) -> str:
    """Makes the table of the experts' matrix products, in TFLOP/s: forward / both products of the gradient."""
    rows = machine.rows("matmul", "matmul-1-experts")
    by_case: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {}).setdefault(row["candidate"], {})[row["product"]] = row

    def rates(products: dict[str, Row]) -> str:
        if len(products) < 3:
            return ""
        tflops = {name: row["tflops"] for name, row in products.items()}
        gradient = 2 / (1 / tflops["rows_gradient"] + 1 / tflops["weights_gradient"])
        mark = "" if all(row.get("right", True) for row in products.values()) else " †"
        return f"{tflops['forward']:.0f} / {gradient:.0f}{mark}"

    candidates = list(dict.fromkeys(row["candidate"] for row in rows))
    cells = []
    for case, found in by_case.items():
        model, rows_per_expert, groups = case.split("/")
        cells.append([model, groups, rows_per_expert, *(rates(found.get(name, {})) for name in candidates)])
    headings = ["experts of", "groups", "rows per expert", *candidates]
    text = "bfloat16, TFLOP/s: forward / both products of the gradient together."
    if not all(row.get("right", True) for row in rows):
        text += " †: a product was not as exact as the bench asks."
    return f"{machine.caption(rows, 'scripts/gpu_check.sh matmul-1-experts', text)}\n\n{markdown(headings, cells, 2)}"


def layer(machine: Machine) -> str:
    """Makes the table of one MoE layer's training step."""
    rows = {row["variant"]: row for row in machine.rows("layer", "layer")}
    ideal = rows["ideal"]
    cells = [
        [
            text,
            f"{rows[name]['step_ms']:.2f}",
            f"{rows[name]['step_ms'] - ideal['step_ms']:.2f}" if name != "ideal" else "",
            f"{(rows[name]['executable_bytes'] + rows[name]['group_bytes']) / 2**20:.0f}",
        ]
        for name, text in VARIANTS.items()
    ]
    text = (
        f"Value and gradient of one MoE layer: {ideal['tokens']} tokens of {ideal['hidden']} channels per rank, "
        f"top-{ideal['top_k']} of {ideal['experts']} experts of {ideal['expert_hidden']} channels, {ideal['dtype']}. "
        "Milliseconds of the host's clock; MiB per rank."
    )
    caption = machine.caption(rows.values(), "scripts/gpu_check.sh layer", text)
    return f"{caption}\n\n{markdown(['exchange', 'step', 'beyond no communication', 'memory'], cells)}"


def copies(machine: Machine) -> str:
    """Makes the table of the kernels of balanced placement."""
    rows = machine.rows("balance", "balance-1-kernels")

    def what(row: Row) -> str:
        number = {0: "no copies", 1: "1 copy"}.get(row["copies"], f"{row['copies']} copies")
        if "routing" in row:
            return f"{row['routing']} routing, {row['experts']} experts, {number}"
        return f"{number} of {row['expert_bytes'] / 1e6:.0f} MB" if row["copies"] else number

    def over_floor(row: Row) -> str:
        return ratio(row["us"], row["floor_us"]) if "floor_us" in row else ""

    cells = [[row["operation"], what(row), us(row["us"]), us(row.get("floor_us")), over_floor(row)] for row in rows]
    text = (
        "4096 tokens per rank, top-8; microseconds of the kernels. Copies are sums over ranks. In hot routing, every "
        "token names experts 0 to 7. The floor is the time that the link needs for the copies."
    )
    caption = machine.caption(rows, "scripts/gpu_check.sh balance-1-kernels", text)
    return f"{caption}\n\n{markdown(['operation', 'case', 'kernel', 'floor', 'kernel / floor'], cells, 2)}"


MATMULS = {"grouped": "grouped GEMM", "ragged_dot": "`jax.lax.ragged_dot`"}  # of --compute, with --skew


def balanced_step(machine: Machine) -> str:
    """Makes the table of one MoE layer's training step under skewed routing."""
    rows = machine.rows("balance", "balance-2-step")
    names = {"balanced": "balanced", "dropping": "dropping", "worst_case": "worst case"}
    cells = [
        [
            "one hot expert" if row["skew"] == "hot" else f"sigma {row['skew']}",
            names[row["variant"]],
            f"{row['step_ms']:.2f}",
            f"{(row['executable_bytes'] + row['group_bytes']) / 2**20:.0f}",
            f"{row['busiest_rows'] / row['mean_rows']:.2f}",
            str(row["dropped_rows"]),
            str(row["buffer_rows"]),
            str(row["copies"]),
        ]
        for row in rows
    ]
    first = rows[0]
    text = (
        f"Value and gradient of one MoE layer: {first['tokens']} tokens of {first['hidden']} channels per rank, "
        f"top-{first['top_k']} of {first['experts']} experts of {first['expert_hidden']} channels, {first['dtype']}, "
        f"experts: {MATMULS[first['compute']]}. Dropping has room for {first['capacity_factor']} times the mean. "
        "Milliseconds of the host's clock; MiB per rank. "
        '"Busiest / mean" counts kept rows only. "Dropped" and "copies" are sums over ranks.'
    )
    headings = ["routing", "room", "step", "memory", "busiest / mean", "dropped", "buffer rows", "copies"]
    return f"{machine.caption(rows, 'scripts/gpu_check.sh balance-2-step', text)}\n\n{markdown(headings, cells, 2)}"


GEMMS = {"triton": "Triton", "cublas": "cuBLAS", "auto": "auto"}


def overlap(machine: Machine) -> str:
    """Makes the table of communication hidden behind computation, by the recipes of docs/overlap.md."""
    return overlap_table(machine, "overlap-1-recipes")


def overlap_sms(machine: Machine) -> str:
    """Makes the same table for long GEMMs, over the SMs that the communication may use."""
    return overlap_table(machine, "overlap-2-sms")


def overlap_table(machine: Machine, step: str) -> str:
    rows = machine.rows("overlap", step)
    cells = [
        [row["form"], str(row.get("num_sms", "auto")), GEMMS[row["gemms_by"]]]
        + [us(row[name]) for name in ("alone_us", "sequential_us", "overlapped_us")]
        + [us(row["alone_us"] * (1 - row["hidden_share"]))]
        + [f"{row['hidden_share']:.0%}", f"{row['beside_gemms']:.0%}", f"{row['gemms_slowed']:.2f}"]
        for row in rows
    ]
    first = rows[0]
    text = (
        f"{first['tokens']} tokens of {first['hidden']} channels per rank, top-{first['top_k']} of "
        f'{first["experts"]} experts, {first["dtype"]}, layout "{first.get("layout", "ragged")}", GEMMs of '
        f"{first['gemm_rows']} rows; microseconds per step, with one dispatch and one combine of all tokens."
    )
    headings = ["recipe", "SMs", "GEMMs of", "alone", "in turn", "overlapped", "added"]
    headings += ["hidden", "beside GEMMs", "GEMMs slowed"]
    return f"{machine.caption(rows, f'scripts/gpu_check.sh {step}', text)}\n\n{markdown(headings, cells, 3)}"


ROW_PER_EXPERT = ("ragged", "low latency", "expanded")  # modes in which a token has a row for each of its experts
TAKES_NO_LIMIT = ("low latency", "all_to_all_single")  # modes that choose their SMs


def peers(machine: Machine) -> str:
    """Makes the table of other libraries beside jax_ep."""
    found = machine.rows("peers", "peers")
    ours = {}
    for row in found:
        if row["library"] == "jax_ep":
            ours[row["tokens"], row.get("num_sms"), row["mode"] in ROW_PER_EXPERT] = row["pair_us"]
    cells = []
    for row in sorted(found, key=lambda row: (row["tokens"], row.get("num_sms", 0), row["mode"] not in ROW_PER_EXPERT)):
        per_expert, sms, mode = row["mode"] in ROW_PER_EXPERT, row.get("num_sms"), row["mode"]
        what = [str(row["tokens"]), "its choice" if mode in TAKES_NO_LIMIT else str(sms or "all")]
        what += ["token and expert" if per_expert else "token and rank", row["library"], mode]
        cells.append([*what, us(row["pair_us"]), ratio(row["pair_us"], ours[row["tokens"], sms, per_expert])])
    text = "Hidden 7168, top-8 of 256 experts, uniform routing, fp8 in dispatch, bfloat16 in combine; microseconds."
    caption = machine.caption(found, "scripts/gpu_check.sh peers", text)
    headings = ["tokens per rank", "SMs", "one row per", "library", "mode or layout", "pair", "pair / jax_ep's pair"]
    return f"{caption}\n\n{markdown(headings, cells, 5)}"


def each(count: int | list[int]) -> str:
    """Formats a count, or the counts of several processes."""
    return " + ".join(map(str, count)) if isinstance(count, list) else str(count)


def steps(machine: Machine) -> str:
    """Makes the table of the steps that ran on this machine, with their results."""
    cells = []
    for row in machine.tables["steps"]:
        run = machine.runs[row["run"]]
        names = ("passed", "failed", "error", "errors", "skipped")  # pytest writes "1 error" and "2 errors"
        counted = [f"{each(row[name])} {name}" for name in names if name in row]
        result = "passed" if row["ok"] else "**failed**"
        given = f"`{row['filter']}`" if "filter" in row else ""
        cells.append([f"`{row['step']}`", result, ", ".join(counted), given, run["commit"], run["date"][:10]])
    headings = ["step of `scripts/gpu_check.sh`", "result", "tests", "arguments", "commit", "date"]
    return f"*{machine.device}: the newest run of each step.*\n\n{markdown(headings, cells, len(headings))}"


TABLES: dict[str, Callable[[Machine], str]] = {
    function.__name__: function
    for function in (
        pairs,
        shapes,
        backward,
        forward_legs,
        backward_legs,
        training,
        rivals,
        processes,
        network,
        matmul,
        copies,
        balanced_step,
        layer,
        overlap,
        overlap_sms,
        peers,
        steps,
    )
}


def updated(text: str, folder: Path = gpu_results.RESULTS) -> str:
    """Replaces the tables of a document by tables from the results."""

    def table(match: re.Match[str]) -> str:
        begin, name, machine, end = match.groups()
        return f"{begin}\n{TABLES[name](Machine(machine, folder))}\n\n{end}"

    return BLOCK.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document would change")
    options: Any = parser.parse_args(argv)
    changed = []
    for path in documents():
        old = path.read_text()
        new = updated(old)
        if new != old:
            changed.append(path.relative_to(ROOT).as_posix())
            if not options.check:
                path.write_text(new)
    if changed:
        print(f"{'out of date' if options.check else 'updated'}: {', '.join(changed)}")
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
