"""Which hardware the kernels support, and what runs elsewhere: a row per kind, for the doctor and docs/hardware.md."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from jax_ep._constants import MAX_LOCAL_RANKS, MAX_RANKS


class Hardware(NamedTuple):
    """One kind of hardware."""

    name: str
    backend: Literal["cuda", "collectives", "reference"]
    """What `Group(backend="auto")` takes."""
    state: Literal["tried", "untried", "does not work"]
    """Whether jax_ep's tests have run on such hardware. docs/hardware.md defines the states."""
    reason: str

    def __str__(self) -> str:
        """The line of the doctor."""
        return f"{self.name}: backend {self.backend}, {self.state}; {self.reason}"


HARDWARE: dict[str, Hardware] = {
    "hopper": Hardware(
        "H200 and H100 SXM (sm_90, 132 SMs) with NVLink",
        "cuda",
        "tried",
        "the kernels are tuned and tested here; benchmarks/results/ has the runs",
    ),
    "other_hopper": Hardware(
        "other Hopper boards (sm_90): H20 (78 SMs), H100 PCIe (114 SMs), H100 NVL, GH200",
        "cuda",
        "untried",
        "each launch is planned for the SMs of the device, and the plans are tested for other numbers of SMs. Links "
        "must have native atomics: NVLink has them, so an H100 PCIe needs the NVLink bridge",
    ),
    "blackwell": Hardware(
        "data center Blackwell (sm_100, sm_103): B200, GB200, B300",
        "cuda",
        "untried",
        "the kernels are compiled for sm_100, and tuned for Hopper",
    ),
    "small_blackwell": Hardware(
        "other Blackwell (sm_120, sm_121): RTX 5090, RTX PRO 6000, GB10",
        "collectives",
        "untried",
        "a thread block has 99 KiB of shared memory; the kernels need 204 KiB",
    ),
    "older": Hardware(
        "GPUs before Hopper: A100 (sm_80), L40S and RTX 4090 (sm_89)",
        "collectives",
        "untried",
        "the kernels need compute capability 9.0",
    ),
    "no_atomics": Hardware(
        "two GPUs whose link is PCIe without native atomics",
        "collectives",
        "untried",
        "PCIe may split a 16-byte store, and the kernels need whole ones",
    ),
    "no_access": Hardware(
        "two GPUs without peer access to each other's memory",
        "collectives",
        "untried",
        "the kernels store into the memory of the peer",
    ),
    "mig": Hardware(
        "two or more MIG instances",
        "collectives",
        "does not work",
        "a group opens, but its operations fail: MIG instances (parts of a GPU) have no peer access, and NCCL refuses "
        "several instances (https://github.com/NVIDIA/nccl/issues/1716). A group of one instance takes the backend of "
        "its GPU",
    ),
    "many_ranks": Hardware(
        f"more than {MAX_LOCAL_RANKS} GPUs of one host, or more than {MAX_RANKS} GPUs, along `axis_name`",
        "collectives",
        "untried",
        f"a group on the kernels has at most {MAX_RANKS} ranks, or {MAX_LOCAL_RANKS} without a network. Each index "
        "along the other mesh axes is a group of its own",
    ),
    "other": Hardware(
        "other accelerators: AMD GPUs, TPUs", "collectives", "untried", "the kernels are CUDA; the backend is plain JAX"
    ),
    "cpu": Hardware(
        "CPUs",
        "reference",
        "tried",
        "all tests that need no GPU run here. backend='collectives' may need less memory for gradients",
    ),
}


def find(device: Any) -> Hardware:
    """The row of a device of JAX. The rows about links and about the number of GPUs belong to no device."""
    if device.platform == "cpu":
        return HARDWARE["cpu"]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD's are no numbers
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        return HARDWARE["other"]
    if "MIG" in device.device_kind:
        return HARDWARE["mig"]
    major = int(capability.partition(".")[0])
    if major < 9:
        return HARDWARE["older"]
    if major == 9:
        is_tried = re.search(r"H200(?! NVL)|H100 80GB HBM3", device.device_kind) and "GH200" not in device.device_kind
        return HARDWARE["hopper" if is_tried else "other_hopper"]
    return HARDWARE["blackwell" if major < 12 else "small_blackwell"]


def table() -> str:
    """The rows in Markdown."""
    lines = ['| hardware | `backend="auto"` takes | state | why |', "| --- | --- | --- | --- |"]
    for row in HARDWARE.values():
        lines.append(f'| {row.name} | `"{row.backend}"` | {row.state} | {row.reason} |')
    return "\n".join(lines)
