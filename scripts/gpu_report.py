"""Adds what scripts/gpu_check.sh or scripts/gpu_soak.sh found to benchmarks/results/, from the logs of their steps.

python scripts/gpu_report.py LOGS STEP...     # the steps that have just run
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_results  # noqa: E402
from gpu_results import ROOT, Row  # noqa: E402
from native_hash import native_hash, python_hash  # noqa: E402

MEASURED = ("bench", "layer", "overlap", "train", "soak")
NOT_A_FILTER = re.compile(r"--(durations|maxfail)=\S+|-[vqx]+")  # options of pytest that leave out no test


def commit() -> str:
    """JAX_EP_COMMIT, for copies without a history of their own; else the commit, with "+" if files differ from it."""
    if "JAX_EP_COMMIT" in os.environ:
        return os.environ["JAX_EP_COMMIT"]
    try:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        dirty = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT, text=True)
        return head.strip()[:7] + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def package_root() -> Path:
    """The folder of the package that ran: of the installed jax_ep, or this checkout if none is installed."""
    spec = importlib.util.find_spec("jax_ep")
    return Path(spec.origin).resolve().parent.parent if spec and spec.origin else ROOT


def filter_of(step: str, environment: dict[str, str]) -> str:
    """What the environment selected of a step: options of pytest, or of the bench."""
    names = ("BENCH_ARGS",) if "bench" in step else ("PYTEST_ARGS", "PYTEST_ADDOPTS")
    given = " ".join(environment[name] for name in names if name in environment)
    return " ".join(NOT_A_FILTER.sub("", given).split())


def counts(log: str) -> dict[str, Any]:
    """The numbers in pytest's last line; a list of them, one per process, if several processes ran."""
    lines = sorted(line for line in log.splitlines() if re.search(r"\d+ (passed|failed).* in [\d.]+s", line))
    found = [{name: int(number) for number, name in re.findall(r"(\d+) ([a-z]+)", line)} for line in lines]
    names = [
        name
        for name in ("passed", "failed", "error", "errors", "skipped", "deselected")
        if any(name in c for c in found)
    ]
    return {name: [c.get(name, 0) for c in found] if len(found) > 1 else found[0].get(name, 0) for name in names}


def tests(path: Path) -> dict[str, list[str]]:
    """Which tests failed, and why others were skipped, from pytest's XML report. A step that was cut has left none."""
    if not path.exists():
        return {}
    cases = list(ElementTree.parse(path).iter("testcase"))
    failing = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    reasons = sorted({skip.get("message", "") for case in cases for skip in case.iter("skipped")})
    return {name: found for name, found in (("failing", failing), ("skipped_because", reasons)) if found}


def step(logs: Path, name: str) -> Row:
    """What became of a step, from its NAME.status, NAME.log and NAME.xml. Status 124: it ran out of time."""
    outcome, *settings = (logs / f"{name}.status").read_text().splitlines()
    status, seconds = map(int, outcome.split())
    row: Row = {"step": name, "ok": status == 0, "seconds": seconds}
    if status:
        row["status"] = status
    environment = dict(setting.split("=", 1) for setting in settings)
    if selected := filter_of(name, environment):
        row["filter"] = selected
    if "GPUS_PER_HOST" in environment:
        row["gpus_per_host"] = int(environment["GPUS_PER_HOST"])
    return row | counts((logs / f"{name}.log").read_text(errors="replace")) | tests(logs / f"{name}.xml")


def training(logs: Path) -> list[Row]:
    """Of the two backends: how many steps, how fast, the last loss, how far the loss curves are apart at most."""
    paths = [logs / backend / "train_moe.json" for backend in ("cuda", "reference")]
    if not all(path.exists() for path in paths):
        return []
    cuda, reference = (json.loads(path.read_text()) for path in paths)
    apart = max(abs(a - b) for a, b in zip(cuda["loss"], reference["loss"], strict=True))
    return [
        {
            "step": "train-curves",
            "backend": backend,
            "steps": len(report["loss"]),
            "tokens_per_second": report["tokens_per_second"],
            "last_loss": report["loss"][-1],
            "largest_difference": apart,
        }
        for backend, report in (("cuda", cuda), ("reference", reference))
    ]


def rows(found: Any) -> list[Row]:
    """The rows of a step's JSON file: those of a table, each with what the table's rows share."""
    if isinstance(found, list):
        return found
    key = next((key for key in ("rows", "variants") if key in found), None)
    if key is None:
        return [found]
    shared = {name: value for name, value in found.items() if not isinstance(value, list)}
    return [shared | row for row in found[key]]


# Raw samples, and what the run states once for all rows.
LEFT_OUT = ("samples_ms", "date", "commit", "native_hash", "versions", "jax", "device", "num_devices")


def measured(logs: Path, names: Sequence[str]) -> dict[str, list[Row]]:
    """What steps measured, by table, from their NAME.json."""
    tables: dict[str, list[Row]] = {"train": training(logs) if "train-curves" in names else []}
    for name in names:
        path = logs / f"{name}.json"
        if path.exists():
            (table,) = (table for table in MEASURED if table in name)
            tables[table] = tables.get(table, []) + [
                {"step": name} | {key: value for key, value in row.items() if key not in LEFT_OUT}
                for row in rows(json.loads(path.read_text()))
            ]
    return tables


def main(logs: Path, names: Sequence[str]) -> None:
    import jax
    import jaxlib

    devices = jax.devices()
    date = datetime.datetime.now(datetime.UTC)
    run = {
        "run": f"{date:%Y%m%dT%H%M%S}",
        "date": date.isoformat(timespec="seconds"),
        "commit": commit(),
        "native_hash": native_hash(),
        "python_hash": python_hash(package_root()),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__, "jaxlib": jaxlib.__version__},
    }
    tables = measured(logs, names) | {"steps": [step(logs, name) for name in names]}
    path = gpu_results.record(gpu_results.machine_name(run["device"], len(devices)), run, tables)
    for row in tables["steps"]:
        print(json.dumps(row))
    print(f"gpu_report: {path.relative_to(ROOT)} has these steps now; update the tables: scripts/update_tables.py")


if __name__ == "__main__":
    if sys.argv[2:]:
        main(Path(sys.argv[1]), sys.argv[2:])
