"""Reads and writes benchmarks/results/: the runs on GPUs, and their measurements. A module for the other scripts.

MACHINE.json, such as 2xNVIDIA-H200.json, holds the newest run of each part of scripts/gpu_check.sh on that machine.
It has one line per row:

    runs      a row per call of gpu_check.sh: date, commit, hashes of the native and Python sources, versions
    steps     a row per part (tests-1 is a part of the step tests): its run, its result, its filter (options of pytest
              or of the bench), counts of tests
    bench, matmul, balance, layer, overlap, train, soak    the measurements of the steps with these names

history.csv holds every row that the bench has measured, in all runs on all machines. scripts/plot_results.py draws it.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HISTORY = "history.csv"
Row = dict[str, Any]

TABLES = ("runs", "steps", "bench", "matmul", "balance", "layer", "overlap", "peers", "train", "soak")
HISTORY_COLUMNS = (
    *("date", "commit", "native_hash", "device", "num_devices", "step", "chain", "processes", "nodes"),
    *("tokens", "hidden", "top_k", "experts", "dtype", "wire", "combine_wire", "grad_wire"),
    *("layout", "routing", "num_sms", "capacity_factor"),
    *("dispatch_us", "combine_us", "pair_us", "wall_pair_us", "floor_pair_us"),
    *("grad_pair_us", "lax_pair_us", "lax_ragged_pair_us"),
)


def machine_name(device: str, num_devices: int) -> str:
    return f"{num_devices}x{device.replace(' ', '-')}"


def load(machine: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Returns the tables of a machine. They are empty if nothing has run there."""
    path = folder / f"{machine}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {"machine": machine} | {name: found.get(name, []) for name in TABLES}


def machines(folder: Path = RESULTS) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


def save(results: dict[str, Any], folder: Path = RESULTS) -> Path:
    lines = [f'"machine": {json.dumps(results["machine"])}']
    for name in TABLES:
        if results[name]:
            lines.append(f'"{name}": [\n  ' + ",\n  ".join(json.dumps(row) for row in results[name]) + "\n]")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results['machine']}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def compact(value: Any) -> Any:
    """Removes nulls, and rounds numbers to five significant digits."""
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [compact(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def test_filter(step: Row) -> str:
    return str(step.get("filter", ""))


def record(machine: str, run: Row, tables: dict[str, list[Row]], folder: Path = RESULTS) -> Path:
    """Adds a run to the machine's file and to the history. It replaces older runs of the same steps in the file.

    A step with a filter replaces only an older step with the same filter. A step without a filter replaces all older
    runs of the step. A step with measurements replaces all older runs in any case.
    """
    results = load(machine, folder)
    new = {
        table: [{"step": row["step"], "run": run["run"]} | compact(row) for row in tables.get(table, [])]
        for table in TABLES[1:]
    }
    measured = {row["step"] for table in TABLES[2:] for row in new[table]}

    def replaced(old: Row) -> bool:
        return any(
            row["step"] == old["step"] and (old["step"] in measured or test_filter(row) in ("", test_filter(old)))
            for row in new["steps"]
        )

    for table in TABLES[1:]:
        kept = [row for row in results[table] if not (replaced(row) if table == "steps" else row["step"] in measured)]
        results[table] = sorted(kept + new[table], key=lambda row: row["step"])
    used = {row["run"] for table in TABLES[1:] for row in results[table]}
    runs = [old for old in results["runs"] if old["run"] != run["run"]] + [compact(run)]
    results["runs"] = sorted((run for run in runs if run["run"] in used), key=lambda run: run["date"])
    path = save(results, folder)
    of_run = {name: run[name] for name in ("date", "commit", "native_hash", "device", "num_devices")}
    add_to_history([of_run | row for row in tables.get("bench", [])], folder)
    return path


def add_to_history(rows: list[Row], folder: Path = RESULTS) -> None:
    """Removes duplicate rows, and sorts by date."""
    lines = {tuple(row.get(column, "") for column in HISTORY_COLUMNS): None for row in history(folder)}
    for row in rows:
        row = compact(row)
        lines[tuple(str(row.get(column, "")) for column in HISTORY_COLUMNS)] = None
    with (folder / HISTORY).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HISTORY_COLUMNS)
        writer.writerows(sorted(lines, key=lambda line: line[0]))


def history(folder: Path = RESULTS) -> list[dict[str, str]]:
    """Returns all rows of the bench, as text. An empty cell is a value that was not set, or not measured."""
    path = folder / HISTORY
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
