"""The one place where a backend is chosen. `Backend` in jax_ep/_types.py says what a backend must do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, cast

import jax
import numpy as np

from jax_ep import _checks, _native, _network, _processes, _transport
from jax_ep._backends.collectives import CollectivesBackend
from jax_ep._backends.cuda import AbstractCudaBackend, CudaBackend
from jax_ep._backends.emulated import EmulatedBackend
from jax_ep._backends.reference import ReferenceBackend
from jax_ep._constants import MAX_LOCAL_RANKS, MAX_RANKS
from jax_ep._settings import GroupSettings, Mesh
from jax_ep._transport import Transport
from jax_ep._types import Backend


class BackendStatus(NamedTuple):
    """Whether a backend can run on this machine, and if not, the reason ("" if it can).

    Examples:
        >>> ep.backends()["reference"].available
        True
    """

    available: bool
    reason: str


class Choice(NamedTuple):
    """A backend, and how the ranks of a group on it reach one another's memory. XLA decides that for plain JAX."""

    backend: str
    transport: Transport = "host"


def backends() -> dict[str, BackendStatus]:
    """Returns the backends by their names for `Group(backend=...)`: whether each is available, and if not, the reason.

    Examples:
        >>> sorted(ep.backends())
        ['collectives', 'cuda', 'reference']
    """
    reason = _cuda_reason()
    return {
        "cuda": BackendStatus(reason is None, reason or ""),
        "collectives": BackendStatus(True, ""),
        "reference": BackendStatus(True, ""),
    }


def choose(requested: str, mesh: Mesh, axis_name: str | tuple[str, ...], timeout: float = 300.0) -> Choice:
    """Chooses the backend for a group along `axis_name` of `mesh` whose user requests `requested`.

    All processes of the mesh get the same answer. They wait for one another, for at most `timeout` seconds. On an
    abstract mesh, the answer is the backend that the programs will need.
    """
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return Choice(_choose_without_devices(requested, mesh, axis_name))
    known = backends()
    is_emulated = isinstance(requested, str) and requested == "emulated"
    if is_emulated and _native.emulated is not None:  # for tests: `backends()` does not list it
        return Choice(requested, _emulated_transport(mesh, axis_name, timeout))
    _checks.choice("backend", requested, ("auto", *known))
    if requested in ("reference", "collectives"):
        return Choice(requested)
    platform = mesh.devices.flat[0].platform
    reason = _mesh_reason(mesh, axis_name)
    if not reason:
        reason, transport = _agree(known["cuda"].reason, mesh, axis_name, timeout)
        if not reason:
            return Choice("cuda", transport)
    if requested == "cuda":
        raise ValueError(
            f"backend is 'cuda', which cannot be used here: {reason}. Use backend='auto', 'collectives' or 'reference'."
        )
    if platform == "cpu":
        return Choice("reference")
    if platform != "gpu":
        return Choice("collectives")
    warnings.warn(f"jax_ep uses XLA's collectives on GPUs, not its kernels: {reason}", stacklevel=4)
    return Choice("collectives")


def _choose_without_devices(requested: str, mesh: jax.sharding.AbstractMesh, axis_name: str | tuple[str, ...]) -> str:
    """Returns the backend for programs that this machine only traces and lowers. It need not work on this machine."""
    known = [*backends(), *(["emulated"] if _native.emulated is not None else [])]
    _checks.choice("backend", requested, ("auto", *known))
    reason = _size_reason(mesh, axis_name)
    if requested == "cuda" and reason:
        raise ValueError(
            f"backend is 'cuda', which cannot be used here: {reason}. Use backend='auto', 'collectives' or 'reference'."
        )
    if requested != "auto":
        return requested
    if (device := mesh.abstract_device) is None:
        raise ValueError(
            "backend is 'auto', and the mesh is an AbstractMesh that does not say what its devices are; choose "
            "backend='cuda' (for GPUs), 'collectives' or 'reference', or give the AbstractMesh an abstract_device"
        )
    if device.platform == "cpu":
        return "reference"
    return "cuda" if device.platform in ("gpu", "cuda") and not reason else "collectives"


def open_backend(choice: Choice, group: GroupSettings) -> Backend:
    """Makes the backend for `group`. `choice` is a result of `choose`."""
    name, transport = choice
    if name == "reference":
        return ReferenceBackend(group)
    if name == "collectives":
        return CollectivesBackend(group)
    if not group.has_devices:
        return AbstractCudaBackend(group)
    if name == "emulated":
        return EmulatedBackend(group, transport)
    return CudaBackend(group, cast(ModuleType, _native.cuda), transport)


def _mesh_reason(mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...]) -> str:
    """Returns why no process can use the CUDA backend along `axis_name` of `mesh`, or "" if they can.

    The result is the same in all processes.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return "the mesh's devices are not GPUs"
    return _size_reason(mesh, axis_name)


def _size_reason(mesh: Mesh, axis_name: str | tuple[str, ...]) -> str:
    """Returns why no CUDA group can have as many ranks as `mesh` has along `axis_name`, or "" if one can."""
    return _too_many(mesh, axis_name, MAX_RANKS, "a CUDA group")


def _too_many(mesh: Mesh, axis_name: str | tuple[str, ...], most: int, group: str) -> str:
    """Returns that `mesh` has more than `most` ranks along `axis_name`, and the fix; "" if it has not."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (ranks := math.prod(mesh.shape[name] for name in names)) <= most:
        return ""
    return f"axis_name is {axis_name!r}, along which the mesh has {ranks} devices, and {group} has at most {most}; " + (
        f"give that axis at most {most}, in a mesh of ('data', {axis_name!r}) for example"
        if len(names) == 1
        else "leave some of the axes out of axis_name: each index along them is then a group of its own"
    )


def _agree(
    reason: str, mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...], timeout: float
) -> tuple[str, Transport]:
    """Returns why the processes of `mesh` cannot use the CUDA backend together, or ""; and the transport if they can.

    `reason` is why this process alone cannot use it, or "".
    """
    me, processes = jax.process_index(), _processes.owners(mesh)
    if me not in processes:
        return f"process {me} has no device in the mesh", "host"
    mine = {
        "reason": reason,
        "host": _processes.host(),
        "override": _network.override(),
        "sharing": _transport.given_sharing(),
        "gpus": {} if reason else _uuids(mesh.local_devices),
    }
    ep_groups, native = _processes.ep_groups(mesh, axis_name), cast(ModuleType, _native.cuda)
    with _rendezvous(processes, timeout) as rendezvous:
        published = rendezvous.exchange(mine)
        _network.expect_same_override({process: answer["override"] for process, answer in published.items()})
        if agreed := _first_reason({process: answer["reason"] for process, answer in published.items()}):
            return agreed, "host"
        hosts = {process: answer["host"] for process, answer in published.items()}
        gpus = {device: uuid for answer in published.values() for device, uuid in answer["gpus"].items()}
        if agreed := _first_reason(rendezvous.exchange(_link_reason(ep_groups, hosts, gpus))):
            return agreed, "host"
        given = {process: answer["sharing"] for process, answer in published.items()}
        transport, no_fabric = _transport.choose(native, ep_groups, hosts, given, rendezvous)
        if transport == "network":
            return _no_network_reason(mesh, axis_name, no_fabric, rendezvous), transport
        return _too_many(mesh, axis_name, MAX_LOCAL_RANKS, "a CUDA group without a network"), transport


def _no_network_reason(
    mesh: jax.sharding.Mesh,
    axis_name: str | tuple[str, ...],
    no_fabric: str,
    rendezvous: _processes.Rendezvous,
) -> str:
    """Returns why the processes of `rendezvous` cannot use the network, or "". `no_fabric`: why no fabric handles."""
    for process, obstacle in rendezvous.exchange(_network.obstacle(mesh)).items():
        if obstacle:
            return (
                f"devices along {axis_name!r} are on several hosts, or in containers with a network of their own each, "
                f"and process {process} cannot use the network: {obstacle}. Fabric handles cannot be used either: "
                f"{no_fabric}"
            )
    return ""


def _emulated_transport(mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...], timeout: float) -> Transport:
    """Returns the transport of a group on emulated GPUs."""
    with _rendezvous(_processes.owners(mesh), timeout) as rendezvous:
        published = rendezvous.exchange([_processes.host(), _transport.given_sharing()])
        hosts = {process: host for process, (host, _) in published.items()}
        given = {process: sharing for process, (_, sharing) in published.items()}
        native = cast(ModuleType, _native.emulated)
        return _transport.choose(native, _processes.ep_groups(mesh, axis_name), hosts, given, rendezvous)[0]


def _rendezvous(processes: Sequence[int], timeout: float) -> _processes.Rendezvous:
    """Returns a rendezvous of `processes` to choose a backend together."""
    return _processes.Rendezvous(f"processes/{'-'.join(map(str, processes))}", processes, timeout)


def _first_reason(reasons: dict[int, str]) -> str:
    """Returns the first reason that a process gives, or "". Names the process if it is not this process."""
    for process, reason in reasons.items():
        if reason:
            return reason if process == jax.process_index() else f"process {process}: {reason}"
    return ""


def _uuids(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Maps JAX's id of each device (a string, because JSON has no other keys) to the UUID of the GPU."""
    native = cast(ModuleType, _native.cuda)
    return {str(device.id): native.device_uuid(device.local_hardware_id).hex() for device in devices}


def _link_reason(ep_groups: np.ndarray, hosts: dict[int, str], gpus: dict[str, str]) -> str:
    """Returns why two GPUs of a node cannot store into each other's memory, or "" if all can.

    Each process checks the GPUs that it sees in the nodes of its own ranks. It cannot check a GPU of another process
    that CUDA_VISIBLE_DEVICES or a container hides from it. `hosts` maps each process to its host.
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
    """Returns why this process cannot use the CUDA backend, or None if it can."""
    if reason := _native.cuda_reason():
        return reason
    try:
        devices = jax.local_devices(backend="gpu")
    except (RuntimeError, AssertionError):  # AssertionError: JAX_PLATFORMS=cuda and a broken driver
        return "JAX sees no GPU; pip install 'jax[cuda13]' on a machine with an NVIDIA driver"
    native = cast(ModuleType, _native.cuda)
    reasons = (native.unsupported_device(device.local_hardware_id) for device in devices)
    return next(filter(None, reasons), None)
