"""Writes what scripts/gpu_check.sh found, from its logs, to benchmarks/results/gpu_check-*.json."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

import jax
import jaxlib

sys.path.insert(0, str(Path(__file__).resolve().parent))
from native_hash import RESULTS, ROOT, native_hash  # noqa: E402


def commit() -> str:
    """JAX_EP_COMMIT, for copies without a history of their own; else the commit, with "+" if files differ from it."""
    if "JAX_EP_COMMIT" in os.environ:
        return os.environ["JAX_EP_COMMIT"]
    try:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        dirty = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT, text=True)
        return head.strip() + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def tests(parts: Iterable[Path]) -> dict[str, object] | None:
    """What pytest reported of some steps; one that was cut has left no report."""
    suites = [suite for path in parts if path.exists() for suite in ElementTree.parse(path).iter("testsuite")]
    if not suites:
        return None
    cases = [case for suite in suites for case in suite.iter("testcase")]
    count = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
    failing = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    reasons = sorted({skip.get("message", "") for case in cases for skip in case.iter("skipped")})
    faults = {
        case.get("name"): float(case.get("time", 0))
        for case in cases
        if case.get("classname") == "tests.test_faults" and case.find("skipped") is None
    }
    return {**count, "failing": failing, "skip_reasons": reasons, "seconds_of_faults": faults}


def training(logs: Path) -> dict[str, object] | None:
    """The loss curves of the two backends, every tenth step, how far they are apart at most, and how fast they were."""
    curves, tokens_per_second = {}, {}
    for backend in ("cuda", "reference"):
        path = logs / backend / "train_moe.json"
        if not path.exists():
            return None
        report = json.loads(path.read_text())
        curves[backend], tokens_per_second[backend] = report["loss"], report["tokens_per_second"]
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    return {
        "steps": len(curves["cuda"]),
        "largest_difference": apart,
        "tokens_per_second": tokens_per_second,
        **{backend: [round(loss, 5) for loss in curve[::10]] for backend, curve in curves.items()},
    }


def read(path: Path) -> object:
    return json.loads(path.read_text()) if path.exists() else None


def step(path: Path) -> dict[str, object]:
    """What became of a step, and what was set for it in the environment, from its NAME.status and NAME.log."""
    outcome, *arguments = path.read_text().splitlines()
    status, seconds = outcome.split()
    # A status of 124: out of time.
    result: dict[str, object] = {"ok": status == "0", "status": int(status), "seconds": int(seconds)}
    if arguments:
        result["arguments"] = dict(argument.split("=", 1) for argument in arguments)
    text = path.with_suffix(".log").read_text(errors="replace")
    log = text.replace(f"{ROOT}/", "").replace(sys.executable, "python3").splitlines()  # no paths of one machine
    if counts := [line for line in log if re.search(r"\d+ passed", line)]:
        result["pytest"] = sorted(counts) if len(counts) > 1 else counts[0]  # of each process
    if status != "0":
        result["end_of_log"] = log[-40:]
    return result


def main(logs: Path) -> None:
    steps = {path.stem: step(path) for path in sorted(logs.glob("*.status"))}
    devices = jax.devices()
    date = datetime.datetime.now(datetime.UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "commit": commit(),
        "native_hash": native_hash(),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "steps": steps,
        "tests": tests(logs / f"{name}.xml" for name in steps if name.startswith("tests-")),
        "training": training(logs) if "train-cuda" in steps else None,
        "bench": [row for path in sorted(logs.glob("bench-*.json")) for row in json.loads(path.read_text())],
        "moe_step": read(logs / "moe_step.json"),
        "overlap": read(logs / "overlap.json"),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"gpu_check-{len(devices)}x{devices[0].device_kind.replace(' ', '-')}-{date:%Y%m%dT%H%M%S}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
