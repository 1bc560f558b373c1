"""`jax-ep doctor`: shows what jax_ep finds on this machine, what a `Group` would use and why, and its memory.

    jax-ep doctor [--json] [--tokens 128 --hidden 7168 --experts 256 --top-k 8 --dtype bfloat16 --ranks 8]

In several processes (started by jax-ep launch, srun or mpirun), it collects the findings of all, and process 0 prints.
docs/doctor.md explains the sections of the output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep as ep
from jax_ep import _backends, _checks, _hardware, _native, _network, _processes, _transport
from jax_ep._backends import native_group
from jax_ep._constants import MAX_LOCAL_RANKS, MAX_RANKS, MAX_TOP_K
from jax_ep._errors import Error

_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")
_DRIVER = Path("/proc/driver/nvidia/version")
_MOST = {"top_k": MAX_TOP_K, "ranks": MAX_RANKS}
_ROW_BYTES, _ROWS = 8192, 4096  # 32 MiB: large enough that the start and end of two kernels hardly count
_TRANSPORTS = {
    "reference": "XLA's collectives: the reference backend gathers all tokens on every rank",
    "collectives": "XLA's collectives: one copy of a token to each rank that has one of its experts",
    "none": "peer memory: all devices are of this process",
    "descriptor": "peer memory, which processes share as file descriptors",
    "ipc": "peer memory, which processes share by CUDA IPC",
    "fabric": "peer memory, which processes share by fabric handles, also between hosts of one NVLink domain",
    "network": "NVSHMEM between hosts (or between nodes of JAX_EP_NODE_SIZE ranks), and peer memory within each",
}
_WAYS = {  # how a rank of a CUDA group stores into another rank's memory: the letter in the matrix, and its meaning
    "none": ("P", "peer memory within a process"),
    "descriptor": ("D", _TRANSPORTS["descriptor"]),
    "ipc": ("I", _TRANSPORTS["ipc"]),
    "fabric": ("F", _TRANSPORTS["fabric"]),
    "mapped": ("M", "peer memory, which processes share by NVSHMEM"),
    "network": ("N", "over the network, by NVSHMEM (NVIDIA's library for transfers between GPUs)"),
}


class Sizes(NamedTuple):
    """The sizes of the group whose memory the doctor computes. The fields have the names of the options."""

    tokens: int = 128  # per rank, at most
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    dtype: str = "bfloat16"
    ranks: int | None = None  # None: all devices


def examine(sizes: Sizes) -> dict[str, Any]:
    """Returns all findings as JSON types. A problem of the machine is a finding, and raises no error."""
    try:
        devices = jax.devices()
        nothing = None
    except Exception as error:  # JAX raises several types, also AssertionError, if a platform does not start
        devices = []
        nothing = f"JAX finds no devices ({type(error).__name__}: {error})"
    group = _group(devices) if nothing is None else _no_group(nothing)  # first: the other processes wait
    return {
        "versions": _versions(),
        "devices": {"error": nothing} if nothing else _describe(devices),
        "links": _links(devices),
        "extensions": {
            "_cpu": _native.cpu is not None,
            "_cuda": _native.cuda is not None,
            "_nvshmem": not _network.module_obstacle(),
            "_grouped_matmul": _native.grouped_matmul is not None,
        },
        "backends": {name: status._asdict() for name, status in ep.backends().items()},
        **group,
        "memory": _memory(sizes, len(devices)),
    }


def _versions() -> dict[str, str]:
    """Returns the versions of jax_ep and of the packages that it needs, if they are installed."""
    versions = {"jax_ep": ep.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if _DRIVER.exists() and (number := re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())):
        versions["nvidia driver"] = number[0]
    return versions


def _describe(devices: Sequence[jax.Device]) -> dict[str, Any]:
    return {
        "error": None,
        "hardware": list(dict.fromkeys(str(_hardware.find(device)) for device in devices)),
        "platform": devices[0].platform,
        "kinds": dict(Counter(device.device_kind for device in devices)),
        "process": jax.process_index(),
        "processes": jax.process_count(),
    }


def _no_group(reason: str) -> dict[str, Any]:
    return {"auto": {"backend": None, "reason": reason, "transport": reason}, "processes": [], "ways": []}


def _group(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns what `Group(backend="auto")` would use along all `devices`, and the facts about each process."""
    try:
        with _processes.rendezvous_of_all("jax_ep.doctor", "group") as rendezvous:
            return _agreed_group(devices, rendezvous)
    except Exception as error:  # raised here, or in the process that the message names
        return _no_group(str(error))


def _agreed_group(devices: Sequence[jax.Device], rendezvous: _processes.Rendezvous) -> dict[str, Any]:
    me, mesh = jax.process_index(), jax.sharding.Mesh(devices, ("ep",))
    no_network = _network.obstacle(mesh) or None
    published = rendezvous.exchange({"host": _processes.host(), "gpus": _gpus(mesh.local_devices)})
    hosts = {process: answer["host"] for process, answer in published.items()}
    backend = sharing = None
    try:
        (backend, way), reason = _choice(mesh)
        if backend == "cuda":
            native_group.expect_own_gpus(published)
            native = cast(ModuleType, _native.cuda)
            sharing = "network" if way == "network" else _transport.sharing(way, np.array(devices), native)
        transport = _TRANSPORTS[sharing or backend]
    except (ValueError, Error) as error:  # the error that a group would raise: the environment is wrong
        backend, reason, transport = None, str(error), str(error)
    here = [(rank, str(device)) for rank, device in enumerate(devices) if device.process_index == me]
    mine = {
        "process": me,
        "host": socket.gethostname(),
        "ranks": [rank for rank, _ in here],
        "devices": [device for _, device in here],
        "sharing": sharing,
        "no_group": reason if backend is None else None,
        "no_network": no_network,
    }
    processes = list(rendezvous.exchange(mine).values())
    return {
        "auto": {"backend": backend, "reason": reason, "transport": transport},
        "processes": processes,
        "ways": _ways(devices, hosts, [process["sharing"] for process in processes]),
    }


def _choice(mesh: jax.sharding.Mesh) -> tuple[_backends.Choice, str]:
    """Returns the backend with its transport, and the reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choice = _backends.choose("auto", mesh, "ep")
    return choice, str(caught[0].message) if caught else f"the best on platform {mesh.devices.flat[0].platform!r}"


def _gpus(devices: Sequence[jax.Device]) -> list[str]:
    """Returns the UUIDs of those of this process's devices that a CUDA group could use."""
    if not ep.backends()["cuda"].available or devices[0].platform != "gpu":
        return []
    return [cast(ModuleType, _native.cuda).device_uuid(device.local_hardware_id).hex() for device in devices]


def _ways(
    devices: Sequence[jax.Device], hosts: dict[int, str], sharings: Sequence[str | None]
) -> list[list[str | None]]:
    """Returns how each rank would store into each other rank's memory: [from][to].

    The result is empty unless all processes would use CUDA. `sharings` has the way of each process.
    """
    if None in sharings:
        return []
    nodes = _network.nodes(devices, hosts)

    def way(source: int, to: int) -> str | None:
        owner = devices[to].process_index
        if source == to:
            return None
        if devices[source].process_index == owner:
            return "none"
        if sharings[owner] != "network":
            return sharings[owner]
        return "mapped" if nodes[source] == nodes[to] else "network"

    ranks = range(len(devices))
    return [[way(source, to) for to in ranks] for source in ranks]


def _links(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns how this process's GPUs are connected: the driver's matrix, and measurements."""
    ordinals = [device.local_hardware_id for device in devices if device.process_index == jax.process_index()]
    if not devices or devices[0].platform != "gpu":
        reason = "there are no GPUs"
    elif _native.cuda is None:
        reason = "there is no CUDA extension"
    elif len(ordinals) < 2:
        reason = "this process has one GPU"
    else:
        reason = None
    pairs = [] if reason else [_link(source, to) for source in ordinals for to in ordinals if source != to]
    return {"topology": _topology(), "reason": reason, "pairs": pairs}


def _topology() -> list[str]:
    """Returns the lines of nvidia-smi's matrix, or none without nvidia-smi. nvidia-smi has its own numbers of GPUs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        printed = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    matrix = re.sub(r"\x1b\[\d*m", "", printed).partition("Legend")[0]
    return [line.expandtabs(8).rstrip() for line in matrix.splitlines() if line.strip()]


def _link(source: int, to: int) -> dict[str, Any]:
    """Measures the link from one CUDA ordinal to another, while nothing else uses it."""

    def microseconds(rows: int, row_bytes: int) -> float:
        assert _native.cuda is not None
        return _native.cuda.link_floor([source, to], [[0, rows], [0, 0]], row_bytes)

    try:
        least = microseconds(1, 16)
        rate = _ROWS * _ROW_BYTES / (microseconds(_ROWS, _ROW_BYTES) - least) / 1e3
    except RuntimeError as error:
        return {"from": source, "to": to, "gb_per_s": None, "least_us": None, "error": str(error)}
    return {"from": source, "to": to, "gb_per_s": round(rate, 1), "least_us": round(least, 2), "error": None}


def _memory(sizes: Sizes, num_devices: int) -> dict[str, Any]:
    """Returns the memory of a group of these sizes on each GPU."""
    ranks = sizes.ranks or max(1, num_devices)
    payload = sizes.hidden * jnp.dtype(sizes.dtype).itemsize
    num_bytes = reason = None
    if _native.cpu is None:
        reason = _native.cuda_reason()
    elif ranks > MAX_RANKS:
        reason = f"there are {ranks} devices, and a group has at most {MAX_RANKS} ranks; give --ranks"
    elif sizes.experts % ranks:
        reason = f"experts is {sizes.experts}; it must be a multiple of the {ranks} ranks"
    elif payload % 16:
        reason = f"hidden is {sizes.hidden}, a row of {payload} bytes; it must be a multiple of 16 bytes"
    else:
        num_bytes = _native.cpu.group_bytes(
            num_ranks=ranks,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            max_tokens=sizes.tokens,
            max_payload=payload,
        )
    return {**sizes._replace(ranks=ranks)._asdict(), "bytes_per_device": num_bytes, "reason": reason}


def report(findings: dict[str, Any]) -> str:
    """Formats `findings` as text."""
    auto, are_several = findings["auto"], len(findings["processes"]) > 1
    sections = {
        "versions": [f"{name} {version}" for name, version in findings["versions"].items()],
        "devices": [_devices_line(findings["devices"])],
        "hardware": findings["devices"].get("hardware", []),
        "processes": _processes_lines(findings["processes"]) if are_several else [],
        "links": _links_lines(findings["links"]),
        "extensions": [
            f"{name}: {'loaded' if is_loaded else 'no'}" for name, is_loaded in findings["extensions"].items()
        ],
        "backends": [
            f"{name}: {'yes' if status['available'] else 'no, ' + status['reason']}"
            for name, status in findings["backends"].items()
        ],
        'backend="auto" takes': [f"{auto['backend']}: {auto['reason']}"],
        "transport": [str(auto["transport"])],
        "ways between ranks": _ways_lines(findings["ways"]) if are_several and findings["ways"] else [],
        "memory of a group on the CUDA backend": [_memory_line(findings["memory"])],
    }
    return "\n".join("\n  ".join([heading, *lines]) for heading, lines in sections.items() if lines)


def _devices_line(devices: dict[str, Any]) -> str:
    if devices["error"] is not None:
        return devices["error"]
    kinds = ", ".join(f"{number} x {kind}" for kind, number in devices["kinds"].items())
    return f"{kinds} (platform {devices['platform']}), process {devices['process']} of {devices['processes']}"


def _processes_lines(processes: Sequence[dict[str, Any]]) -> list[str]:
    """Lists the processes, then the problems, and the processes that have them."""

    def which(finding: str, cannot: str) -> list[str]:
        of_reason: dict[str, list[str]] = {}
        for process in processes:
            if process[finding]:
                of_reason.setdefault(process[finding], []).append(str(process["process"]))
        return [f"process {', '.join(which)} {cannot}: {reason}" for reason, which in of_reason.items()]

    lines = []
    for process in processes:
        ranks = ", ".join(map("{} ({})".format, process["ranks"], process["devices"]))
        lines.append(f"process {process['process']} on {process['host']}: ranks {ranks}")
    no_network = which("no_network", "cannot use the network") or ["all can use the network"]
    return [*lines, *which("no_group", "cannot make a group"), *no_network]


def _ways_lines(ways: Sequence[Sequence[str | None]]) -> list[str]:
    """Formats the matrix of letters, and their meaning."""
    ranks = [str(rank) for rank in range(len(ways))]
    table = [["from \\ to", *ranks]]
    table += [[rank, *(_WAYS[way][0] if way else "" for way in row)] for rank, row in zip(ranks, ways, strict=True)]
    return [
        *(row[0].rjust(9) + "".join(cell.rjust(4) for cell in row[1:]) for row in table),
        *(f"{letter}: {words}" for way, (letter, words) in _WAYS.items() if any(way in row for row in ways)),
    ]


def _links_lines(links: dict[str, Any]) -> list[str]:
    if links["reason"] is not None:
        return [*links["topology"], f"not measured: {links['reason']}"]
    cells = {
        (pair["from"], pair["to"]): "-" if pair["error"] else f"{pair['gb_per_s']:.0f} | {pair['least_us']:.1f}"
        for pair in links["pairs"]
    }
    ordinals = sorted({source for source, _ in cells})
    table = [["from \\ to", *map(str, ordinals)]]
    table += [[str(source), *(cells.get((source, to), "") for to in ordinals)] for source in ordinals]
    return [
        *links["topology"],
        "measured, GB/s | us:",
        *("".join(cell.rjust(12) for cell in row) for row in table),
        *(f"from {pair['from']} to {pair['to']}: {pair['error']}" for pair in links["pairs"] if pair["error"]),
    ]


def _memory_line(memory: dict[str, Any]) -> str:
    num_bytes = memory["bytes_per_device"]
    amount = f"not known: {memory['reason']}" if num_bytes is None else f"{num_bytes / 2**20:.1f} MiB per device"
    if num_bytes is not None and memory["ranks"] > MAX_LOCAL_RANKS:
        amount += ", and over a network at least twice as much"
    sizes = ", ".join(f"{name} {memory[name]}" for name in Sizes._fields)
    return f"{amount} ({sizes})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jax-ep doctor",
        description="Says what jax_ep finds on this machine, which backend a Group would use and why, and how much "
        "device memory a group of the given sizes takes. Started in several processes, it asks all of them.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--tokens", metavar="N", type=int, help="the group's max_tokens_per_rank (default: %(default)s)")
    add("--hidden", metavar="N", type=int, help="channels of a token (default: %(default)s)")
    add("--experts", metavar="N", type=int, help="experts in all (default: %(default)s)")
    add("--top-k", metavar="N", type=int, help="experts per token (default: %(default)s)")
    add("--dtype", choices=_checks.DTYPES, help="dtype of activations (default: %(default)s)")
    add("--ranks", metavar="N", type=int, help="devices of the group (default: all devices that JAX finds)")
    parser.set_defaults(**Sizes._field_defaults)
    options = parser.parse_args(argv)
    for name in Sizes._fields:
        value = getattr(options, name)
        try:
            if isinstance(value, int):
                _checks.integer(f"--{name.replace('_', '-')}", value, 1, _MOST.get(name))
        except ValueError as error:
            parser.error(str(error))
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the findings. In several processes, only process 0 prints."""
    options = _parse(argv)
    findings = examine(Sizes(*(getattr(options, name) for name in Sizes._fields)))
    if findings["devices"].get("process", 0) == 0:
        print(json.dumps(findings, indent=1) if options.json else report(findings))


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command `jax-ep doctor`, in one process or several. Returns its exit status."""
    _processes.join()
    main(argv)
    return 0


if __name__ == "__main__":
    sys.exit(run())
