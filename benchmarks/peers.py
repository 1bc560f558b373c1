"""Times other libraries beside jax_ep on the GPUs of this machine, in one run.

    python benchmarks/peers.py --json peers.json
    python benchmarks/peers.py --tokens 4096 --num-sms 24 --only v1

jax_ep does not depend on these libraries. The program measures those that it finds:

    DeepEP    the package `deep_ep` for PyTorch: `Buffer` (V1, the normal and the low-latency mode) and `ElasticBuffer`
              (V2). peer_rank.py has the calls.
    NCCL      PyTorch's `all_to_all_single`, with the rows of a dispatch and of a combine

All move the rows of a dispatch in fp8 and those of a combine in bfloat16, with hidden 7168 and top-8 of 256 experts,
and the routing is uniform. They do different work beside that: NOTES says what each does.

Each case runs in processes of its own, one per GPU, for at most `--timeout` seconds. A case that fails has no row in
the JSON file; the program prints the end of what it wrote. In the JSON file:

    library, mode        what ran
    tokens, num_sms      per rank; no num_sms: all SMs, or for NCCL and the low-latency mode as many as they take
    pair_us              microseconds from the start of a pair (a dispatch and its combine) to the start of the next
    dispatch_us, combine_us   the kernels' times on the GPU's time line. For jax_ep, the medians of a profiler trace of
                         other executions of the same program
    note                 what the case does, where it differs from jax_ep in the layout "ragged"

The times of a peer are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RANK_PROGRAM = Path(__file__).with_name("peer_rank.py")
HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
LOW_LATENCY_TOKENS = 256  # the most tokens for the low-latency mode: its buffers have room for the worst case
# Cases of peers: the library, and what the case does.
NOTES = {
    "v1": ("DeepEP V1", "normal", "the caller casts; one row per token and rank; the routing is computed before"),
    "v1-low-latency": ("DeepEP V1", "low latency", "casts; takes all SMs"),
    "v2": ("DeepEP V2", "not expanded", "the caller casts; one row per token and rank"),
    "v2-expanded": ("DeepEP V2", "expanded", "the caller casts"),
    "nccl": ("NCCL", "all_to_all_single", "only moves rows; the caller has sorted them, and knows all counts"),
}
# One host: no network, and no NVLink multicast, as for jax_ep.
ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DISABLE_MNNVL": "1",
    "NCCL_NVLS_ENABLE": "0",
    "EP_DISABLE_GIN": "1",  # of DeepEP V2: no network
}


def available_cases() -> list[str]:
    """Returns the cases whose libraries are installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    return [case for case in NOTES if case == "nccl" or importlib.util.find_spec("deep_ep") is not None]


def runs(case: str, tokens: int, num_sms: int | None) -> bool:
    """True if the library can run the case with this number of tokens and of SMs."""
    if case == "v1-low-latency":
        return tokens <= LOW_LATENCY_TOKENS and num_sms is None
    return case != "nccl" or num_sms is None


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def ends_well(processes: list[subprocess.Popen], timeout: float) -> bool:
    """Waits until all processes end, until one fails, or until the time is over. Returns whether all ended well."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        states = [process.poll() for process in processes]
        if None not in states or any(states):
            return not any(states)
        time.sleep(0.1)
    return False


def run_peer(case: str, num_ranks: int, tokens: int, num_sms: int | None, timeout: float) -> Row | None:
    """Runs a case with one process per GPU. Returns its row, or None if a process failed."""
    settings = {
        "case": case,
        "tokens": tokens,
        "num_sms": num_sms,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "experts": EXPERTS,
    }
    environment = ENVIRONMENT | os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(num_ranks)]
        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(RANK_PROGRAM), json.dumps(settings | {"rank": rank, "ranks": num_ranks})]
            with log.open("w") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        has_ended = ends_well(processes, timeout)
        for process in processes:
            process.kill()
            process.wait()
        lines = logs[0].read_text(errors="replace").splitlines()
        if not has_ended or not lines:
            for log in logs:
                print(
                    f"--- {case}, {tokens} tokens, {num_sms} SMs, {log.name}", log.read_text(errors="replace")[-1500:]
                )
            return None
    library, mode, note = NOTES[case]
    row: Row = {"library": library, "mode": mode, "tokens": tokens, "note": note} | json.loads(lines[-1])
    return row if num_sms is None else row | {"num_sms": num_sms}


def run_jax_ep(tokens: list[int], num_sms: list[int | None]) -> list[Row]:
    """Runs the bench of jax_ep in the same shapes, in the layouts "ragged" and "token"."""
    rows = []
    for layout in ("ragged", "token"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            command = [sys.executable, "-m", "jax_ep.bench", "--no-lax", "--wire", "fp8", "--layout", layout]
            command += ["--tokens", ",".join(map(str, tokens)), "--json", str(path)]
            command += ["--num-sms", ",".join("auto" if sms is None else str(sms) for sms in num_sms)]
            # In its own folder: the current one may have sources of jax_ep without the native extensions.
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
            found = json.loads(path.read_text())
        for row in found:
            kept = ("tokens", "num_sms", "pair_us", "dispatch_us", "combine_us", "floor_pair_us", "checked")
            rows.append({"library": "jax_ep", "mode": layout} | {name: row[name] for name in kept if row.get(name)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096], help="per rank (%(default)s)")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[24], help="limits, beside no limit (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*NOTES, "jax_ep"], help="these cases only (default: all)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one case of a peer (%(default)s)")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    limits = [None, *options.num_sms]
    wanted = options.only or [*NOTES, "jax_ep"]
    cases = [case for case in available_cases() if case in wanted]
    print("found:", ", ".join(cases) or "no other library")
    rows = run_jax_ep(options.tokens, limits) if "jax_ep" in wanted else []
    if cases:
        import torch

        num_ranks = torch.cuda.device_count()
        for tokens in options.tokens:
            for case in cases:
                for num_sms in limits:
                    if runs(case, tokens, num_sms):
                        row = run_peer(case, num_ranks, tokens, num_sms, options.timeout)
                        rows += [row] if row else []
    for row in rows:
        print(json.dumps(row))
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
