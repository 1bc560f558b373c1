"""Reads the logs of scripts/gpu_check.sh or scripts/gpu_soak.sh, and adds the results to benchmarks/results/.

Both scripts call this program at their end.

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

MEASURED = ("bench", "matmul", "balance", "layer", "overlap", "peers", "train", "soak")
NOT_A_FILTER = re.compile(r"--(durations|maxfail)=\S+|-[vqx]+")  # options of pytest that select no tests


def commit() -> str:
    """Returns JAX_EP_COMMIT, which copies without git must set, or git's commit, with "+" if files differ from it."""
    if "JAX_EP_COMMIT" in os.environ:
        return os.environ["JAX_EP_COMMIT"]
    try:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        dirty = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT, text=True)
        return head.strip()[:7] + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def package_root() -> Path:
    """Returns the folder of the jax_ep that ran: the installed package, or this checkout if none is installed."""
    spec = importlib.util.find_spec("jax_ep")
    return Path(spec.origin).resolve().parent.parent if spec and spec.origin else ROOT


def filter_of(step: str, environment: dict[str, str]) -> str:
    """Returns the options with which the environment limited pytest or the bench in a part of gpu_check.sh."""
    if step.startswith(("native", "sanitizer", "tests-3", "processes-1", "processes-one-gpu")):
        return ""  # such a part always runs as a whole
    names = ("BENCH_ARGS",) if "bench" in step or step == "matmul-1-experts" else ("PYTEST_ARGS", "PYTEST_ADDOPTS")
    given = " ".join(environment[name] for name in names if name in environment)
    return " ".join(NOT_A_FILTER.sub("", given).split())


def counts(log: str) -> dict[str, Any]:
    """Returns the numbers in pytest's last line. If several processes ran, each is a list with an entry per process."""
    lines = sorted(line for line in log.splitlines() if re.search(r"\d+ (passed|failed).* in [\d.]+s", line))
    found = [{name: int(number) for number, name in re.findall(r"(\d+) ([a-z]+)", line)} for line in lines]
    names = [
        name
        for name in ("passed", "failed", "error", "errors", "skipped", "deselected")
        if any(name in c for c in found)
    ]
    return {name: [c.get(name, 0) for c in found] if len(found) > 1 else found[0].get(name, 0) for name in names}


def tests(path: Path) -> dict[str, list[str]]:
    """Returns the failed tests, and the reasons of skipped tests, from pytest's XML report.

    A step that ran out of time has no report.
    """
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
    """Returns the result of a step, from its NAME.status, NAME.log and NAME.xml. Status 124: it ran out of time."""
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
    """Returns, for both backends, the steps, the speed and the last loss, and the largest difference of the losses."""
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
    """Returns the rows of a step's JSON file. Each row also gets the values that all rows of its table share."""
    if isinstance(found, list):
        return found
    key = next((key for key in ("rows", "variants", "skews") if key in found), None)
    if key is None:
        return [found]
    shared = {name: value for name, value in found.items() if not isinstance(value, list)}
    return [shared | row for entry in found[key] for row in rows(entry)]


# Raw samples, and values that the run itself has once for all rows.
LEFT_OUT = ("samples_ms", "date", "commit", "native_hash", "versions", "jax", "device", "num_devices")


def measured(logs: Path, names: Sequence[str]) -> dict[str, list[Row]]:
    """Returns the measurements of the steps, by table, from their NAME.json."""
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
