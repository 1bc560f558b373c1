"""The one place where a backend is chosen. `Backend` in jax_ep/_types.py says what a backend must do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, cast

import jax
import numpy as np

from jax_ep import _checks, _native, _network, _processes
from jax_ep._backends.cuda import CudaBackend, CudaPrograms
from jax_ep._backends.emulated import EmulatedBackend
from jax_ep._backends.reference import ReferenceBackend
from jax_ep._constants import MAX_RANKS
from jax_ep._settings import GroupSettings, Mesh
from jax_ep._types import Backend


class BackendStatus(NamedTuple):
    """Whether a backend can run on this machine, and if not, the reason.

    Example:
        >>> ep.backends()["reference"].available
        True
    """

    available: bool
    reason: str


def backends() -> dict[str, BackendStatus]:
    """Returns the backends by their names for `Group(backend=...)`: whether each is available, and if not, the reason.

    Example:
        >>> sorted(ep.backends())
        ['cuda', 'reference']
    """
    reason = _cuda_reason()
    return {"cuda": BackendStatus(reason is None, reason or ""), "reference": BackendStatus(True, "")}


def choose(requested: str, mesh: Mesh, axis_name: str | tuple[str, ...], timeout: float = 300.0) -> str:
    """The backend for a group along `axis_name` of `mesh` whose user asks for `requested`; the same in all processes.

    They wait `timeout` seconds for one another. On an abstract mesh, the choice is what the programs will need.
    """
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return _choose_without_devices(requested, mesh, axis_name)
    known = backends()
    is_emulated = isinstance(requested, str) and requested == "emulated"
    if is_emulated and _native.emulated is not None:  # for tests; it is not among those for users
        return requested
    _checks.choice("backend", requested, ("auto", *known))
    if requested == "reference":
        return requested
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    reason = _mesh_reason(mesh, axis_name) or _agreed_reason(known["cuda"].reason, mesh, axis_name, timeout)
    if not reason:
        return "cuda"
    if requested == "cuda":
        raise ValueError(f"backend is 'cuda', which cannot be used here: {reason}. Use backend='auto' or 'reference'.")
    if on_gpus:
        warnings.warn(f"jax_ep uses the slow reference backend on GPUs: {reason}", stacklevel=4)
    return "reference"


def _choose_without_devices(requested: str, mesh: jax.sharding.AbstractMesh, axis_name: str | tuple[str, ...]) -> str:
    """The backend for programs that are only traced and lowered here. It need not work on this machine."""
    known = ["cuda", "reference", *(["emulated"] if _native.emulated is not None else [])]
    _checks.choice("backend", requested, ("auto", *known))
    if requested == "auto":
        if (device := mesh.abstract_device) is None:
            raise ValueError(
                "backend is 'auto', and the mesh is an AbstractMesh that does not say what its devices are; choose "
                "backend='cuda' (for GPUs) or 'reference', or give the AbstractMesh an abstract_device"
            )
        requested = "cuda" if device.platform in ("gpu", "cuda") else "reference"
    if requested == "cuda" and (reason := _size_reason(mesh, axis_name)):
        raise ValueError(f"backend is 'cuda', which cannot be used here: {reason}. Use backend='reference'.")
    return requested


def open_backend(name: str, group: GroupSettings) -> Backend:
    """Makes the backend `name`, as returned by `choose`, for `group`."""
    if name == "reference":
        return ReferenceBackend(group)
    if not group.has_devices:
        return CudaPrograms(group)
    if name == "emulated":
        return EmulatedBackend(group)
    return CudaBackend(group, cast(ModuleType, _native.cuda))


def _mesh_reason(mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...]) -> str:
    """Why no process can use the CUDA backend along `axis_name` of `mesh`, or ""; the same in all."""
    if mesh.devices.flat[0].platform != "gpu":
        return "the mesh's devices are not GPUs"
    return _size_reason(mesh, axis_name)


def _size_reason(mesh: Mesh, axis_name: str | tuple[str, ...]) -> str:
    """Why a CUDA group cannot have as many ranks as there are along `axis_name` of `mesh`, or ""."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (ranks := math.prod(mesh.shape[name] for name in names)) <= MAX_RANKS:
        return ""
    return f"axis_name is {axis_name!r}, along which the mesh has {ranks} devices, and a CUDA group has at most " + (
        f"{MAX_RANKS}; give that axis at most {MAX_RANKS}, in a mesh of ('data', {axis_name!r}) for example"
        if len(names) == 1
        else f"{MAX_RANKS}; leave some of the axes out of axis_name: each index along them is then a group of its own"
    )


def _agreed_reason(reason: str, mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...], timeout: float) -> str:
    """Why the processes of `mesh` cannot use the CUDA backend together, or ""; `reason` is that of this process."""
    me, processes = jax.process_index(), _processes.owners(mesh)
    if me not in processes:
        return f"process {me} has no device in the mesh"
    owners = "-".join(map(str, processes))
    mine = {
        "reason": reason,
        "host": _processes.host(),
        "override": _network.override(),
        "gpus": {} if reason else _uuids(mesh.local_devices),
    }
    published = _processes.exchange(f"processes/{owners}", mine, processes, timeout)
    _network.expect_same_override({process: answer["override"] for process, answer in published.items()})
    if agreed := _first_reason({process: answer["reason"] for process, answer in published.items()}):
        return agreed
    hosts = {process: answer["host"] for process, answer in published.items()}
    ep_groups = _processes.ep_groups(mesh, axis_name)
    gpus = {device: uuid for answer in published.values() for device, uuid in answer["gpus"].items()}
    link_reasons = _processes.exchange(f"links/{owners}", _link_reason(ep_groups, hosts, gpus), processes, timeout)
    if agreed := _first_reason(link_reasons):
        return agreed
    if not _network.is_needed(ep_groups, hosts):
        return ""
    occasion = "network/" + "-".join(str(device.id) for device in mesh.devices.flat)
    obstacles = _processes.exchange(occasion, _network.obstacle(mesh), processes, timeout)
    for process, obstacle in obstacles.items():
        if obstacle:
            return (
                f"devices along {axis_name!r} are on several hosts, or in containers with a network of their own each, "
                f"and process {process} cannot use the network: {obstacle}"
            )
    return ""


def _first_reason(reasons: dict[int, str]) -> str:
    """The first reason that a process gives, and which process if it is another one; "" if none gives a reason."""
    for process, reason in reasons.items():
        if reason:
            return reason if process == jax.process_index() else f"process {process}: {reason}"
    return ""


def _uuids(devices: Sequence[jax.Device]) -> dict[str, str]:
    """JAX's number of each device (a string, as in JSON) -> what all processes call the GPU."""
    native = cast(ModuleType, _native.cuda)
    return {str(device.id): native.device_uuid(device.local_hardware_id).hex() for device in devices}


def _link_reason(ep_groups: np.ndarray, hosts: dict[int, str], gpus: dict[str, str]) -> str:
    """Why two GPUs of a node cannot store into each other's memory, or ""; `hosts`: of each process.

    Each process looks at the nodes of its own ranks, and at the GPUs that it sees there. CUDA says nothing about a GPU
    of another process that CUDA_VISIBLE_DEVICES or a container hides from this process.
    """
    native = cast(ModuleType, _native.cuda)
    for node in ep_groups.reshape(-1, _network.node_size(ep_groups, hosts)):
        if all(device.process_index != jax.process_index() for device in node):
            continue
        ordinals = [native.find_device(bytes.fromhex(gpus[str(device.id)])) for device in node]
        if reason := native.unsupported_pair([ordinal for ordinal in ordinals if ordinal >= 0]):
            return reason
    return ""


def _cuda_reason() -> str | None:
    """Why the CUDA backend cannot be used, or None."""
    if reason := _native.cuda_reason():
        return reason
    try:
        devices = jax.local_devices(backend="gpu")
    except (RuntimeError, AssertionError):  # the latter with JAX_PLATFORMS=cuda and a broken driver
        return "JAX sees no GPU; pip install 'jax[cuda13]' on a machine with an NVIDIA driver"
    native = cast(ModuleType, _native.cuda)
    reasons = (native.unsupported_device(device.local_hardware_id) for device in devices)
    return next(filter(None, reasons), None)
