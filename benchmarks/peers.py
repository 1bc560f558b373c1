"""Times other libraries beside jax_ep on the GPUs of this machine, in one run.

    python benchmarks/peers.py --json peers.json
    python benchmarks/peers.py --tokens 4096 --num-sms 24 --only v1

jax_ep does not depend on these libraries. The program measures those that it finds:

    DeepEP    the package `deep_ep` for PyTorch: `Buffer` (V1, in the normal and in the low-latency mode), and
              `ElasticBuffer` (V2). peer_rank.py has the calls.
    NCCL      PyTorch's `all_to_all_single`, with the rows of a dispatch and of a combine

All libraries send the rows of a dispatch in fp8 and those of a combine in bfloat16, with hidden 7168 and top-8 of 256
experts, and the routing is uniform. docs/performance.md describes how the libraries differ.

The bench of jax_ep runs first, once per layout. Each case of another library runs in processes of its own, one per GPU,
for at most `--timeout` seconds. A case that fails has no row, and the program prints the end of its output. If the
bench of jax_ep fails, all rows of that layout are missing. In both cases, the program goes on, and ends with status 1.
The program writes the JSON file again after each case. Its rows have these values:

    library, mode      what ran; for jax_ep, the mode is the layout
    tokens             per rank
    num_sms            the limit on SMs. Without it: all SMs; NCCL and the low-latency mode choose their own number
    pair_us            microseconds of a dispatch and its combine, in a chain of pairs. For jax_ep, from a profiler
                       trace: see docs/performance.md. For the other libraries, from two CUDA graphs, on the slowest
                       rank
    checked            combine gave the right results
    dispatch_us, combine_us, floor_pair_us   only for jax_ep, as in its bench
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
RANK_PROGRAM = Path(__file__).resolve().with_name("peer_rank.py")
HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
# The environment of the other libraries, except for variables that the caller sets: no network, no NVLink multicast.
ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DISABLE_MNNVL": "1",
    "NCCL_NVLS_ENABLE": "0",
    "EP_DISABLE_GIN": "1",  # DeepEP V2: its kernels start no network transfers
}


class Peer(NamedTuple):
    library: str
    mode: str
    takes_num_sms: bool = True
    max_tokens: int | None = None


PEERS = {
    "v1": Peer("DeepEP V1", "normal"),
    # The low-latency buffers have room for the worst case: 4096 tokens would take 60 GB.
    "v1-low-latency": Peer("DeepEP V1", "low latency", takes_num_sms=False, max_tokens=256),
    "v2": Peer("DeepEP V2", "not expanded"),
    "v2-expanded": Peer("DeepEP V2", "expanded"),
    "nccl": Peer("NCCL", "all_to_all_single", takes_num_sms=False),
}


def installed_peers() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    return [name for name in PEERS if name == "nccl" or importlib.util.find_spec("deep_ep") is not None]


def is_supported(name: str, tokens: int, num_sms: int | None) -> bool:
    peer = PEERS[name]
    return (num_sms is None or peer.takes_num_sms) and (peer.max_tokens is None or tokens <= peer.max_tokens)


def run_elsewhere(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program of jax_ep in an empty folder: a checkout has the sources, without the native extensions."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, cwd=folder, **options)


def run_peer(name: str, num_ranks: int, tokens: int, num_sms: int | None, timeout: float) -> Row | None:
    """Runs a case with one process per GPU. Returns its row, or None if a process failed."""
    peer = PEERS[name]
    settings = {"case": name, "tokens": tokens, "num_sms": num_sms, "ranks": num_ranks}
    settings |= {"hidden": HIDDEN, "top_k": TOP_K, "experts": EXPERTS}
    command = [sys.executable, "-m", "jax_ep.launch", "-n", str(num_ranks), "--timeout", str(timeout)]
    command += [sys.executable, str(RANK_PROGRAM), json.dumps(settings)]
    done = run_elsewhere(command, env=ENVIRONMENT | os.environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{name}, {tokens} tokens, {num_sms or 'all'} SMs failed:", done.stdout[-3000:], file=sys.stderr)
        return None
    times = [line.removeprefix("[0] ") for line in done.stdout.splitlines() if line.startswith("[0] {")][-1]
    row: Row = {"library": peer.library, "mode": peer.mode, "tokens": tokens}
    return row | ({} if num_sms is None else {"num_sms": num_sms}) | json.loads(times)


def run_jax_ep(layout: str, tokens: list[int], num_sms: list[int | None]) -> list[Row]:
    """Runs the bench of jax_ep in the same shapes. Returns no rows if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "jax_ep.bench", "--no-lax", "--wire", "fp8", "--layout", layout]
        command += ["--hidden", str(HIDDEN), "--top-k", str(TOP_K), "--experts", str(EXPERTS)]
        command += ["--tokens", ",".join(map(str, tokens)), "--json", str(path)]
        command += ["--num-sms", ",".join("auto" if sms is None else str(sms) for sms in num_sms)]
        if run_elsewhere(command, stdout=subprocess.DEVNULL).returncode:
            return []
        rows = json.loads(path.read_text())
    names = ("tokens", "num_sms", "pair_us", "dispatch_us", "combine_us", "floor_pair_us", "checked")
    kept = [{name: row[name] for name in names if row.get(name) is not None} for row in rows]
    return [{"library": "jax_ep", "mode": layout} | row for row in kept]


def run_all(peers: list[str], num_ranks: int, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yields the rows of each case, and no rows for a case that fails."""
    sm_limits = [None, *options.num_sms]
    for layout in ("ragged", "token"):
        yield run_jax_ep(layout, options.tokens, sm_limits)
    for tokens in options.tokens:
        for name in peers:
            for num_sms in sm_limits:
                if is_supported(name, tokens, num_sms):
                    row = run_peer(name, num_ranks, tokens, num_sms, options.timeout)
                    yield [row] if row else []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096], help="per rank (%(default)s)")
    parser.add_argument(
        "--num-sms",
        type=int,
        nargs="+",
        default=[24],
        help="limits on SMs, in addition to no limit; DeepEP V1 needs even numbers (%(default)s)",
    )
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="these cases (default: all)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one case (%(default)s)")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args(arguments)
    peers = [name for name in installed_peers() if name in options.only]
    if not peers:
        print("none of the chosen libraries is installed: nothing to compare")
        return 0
    import torch

    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        print(f"found {num_ranks} GPUs: nothing to compare")
        return 0
    rows: list[Row] = []
    failed = False
    for found in run_all(peers, num_ranks, options):
        failed |= not found
        rows += found
        for row in found:
            print(json.dumps(row), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
