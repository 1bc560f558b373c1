"""Groups over a network: decides which ranks form a node, and starts NVSHMEM.

docs/network.md explains how rows travel over a network. The module _nvshmem is imported only when a group needs it.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
from collections.abc import Collection, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jax_ep import _compat, _processes
from jax_ep._errors import Error

NODE_SIZE = "JAX_EP_NODE_SIZE"  # environment variable: this many consecutive ranks form a node
_INSTALLING = "install nvidia-nvshmem-cu13 as docs/multi_host.md says (over a network)"
_LAST_CALL_S = 10.0  # seconds that a process waits for the others when it ends

_started: list[int] = []  # the processes for which NVSHMEM runs, in the order of their processing elements (PEs)


def override() -> str:
    """Returns the value of JAX_EP_NODE_SIZE in this process. It must be the same in all processes."""
    return os.environ.get(NODE_SIZE, "")


def expect_same_override(published: dict[int, str]) -> None:
    """Raises an error if override() differs between processes. `published` has its result in each process."""
    mine = override()
    for process, other in published.items():
        if other != mine:
            raise Error(
                f"Group: {NODE_SIZE} is {other!r} in process {process}, and {mine!r} in process "
                f"{jax.process_index()}; set it to the same number in all, or in none"
            )


def given_node_size() -> int:
    """Returns the number of ranks per node that the user has set, or 0."""
    text = override()
    if text and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{NODE_SIZE} is {text!r}; it must be a number of ranks, or not be set")
    return int(text or 0)


def node_size(ep_groups: np.ndarray, hosts: dict[int, str]) -> int:
    """Returns the number of ranks per node. A node starts at each multiple of it. `hosts` maps processes to hosts.

    The ranks of a node map each other's memory. Ranks of different nodes may not.
    """
    num_ranks, given = ep_groups.shape[1], given_node_size()
    if given >= num_ranks:
        return num_ranks
    if given:
        if num_ranks % given:
            raise ValueError(f"{NODE_SIZE} is {given}; it must divide the group's {num_ranks} ranks")
        return given
    neighbours = (groupby(ep_group, key=lambda device: hosts[device.process_index]) for ep_group in ep_groups)
    return math.gcd(*(len(list(of_host)) for ep_group in neighbours for _, of_host in ep_group))


def nodes(ep_group: Sequence[jax.Device], hosts: dict[int, str]) -> list[int]:
    """Returns the node of each rank of an EP group. `hosts` maps each process to its host."""
    size = node_size(np.array([ep_group]), hosts)
    return [rank // size for rank in range(len(ep_group))]


def is_needed(ep_groups: np.ndarray, hosts: dict[int, str]) -> bool:
    """Returns True if the group's ranks are on several nodes, or on several hosts.

    The group then needs NVSHMEM, unless fabric handles work (`_transport`).
    """
    hosts_of_groups = [{hosts[device.process_index] for device in ep_group} for ep_group in ep_groups]
    return node_size(ep_groups, hosts) < ep_groups.shape[1] or any(len(used) > 1 for used in hosts_of_groups)


def obstacle(mesh: jax.sharding.Mesh) -> str:
    """Returns why this process cannot be part of a group over a network, and the fix; "" if it can."""
    if (devices := len(mesh.local_devices)) != 1:
        return (
            f"{devices} devices of the mesh in one process, and NVSHMEM wants one process per GPU; start as many "
            "processes as there are GPUs (srun --ntasks-per-node=8, or jax-ep launch)"
        )
    return module_obstacle()


def module_obstacle() -> str:
    """Returns why the module _nvshmem cannot be used, and the fix; "" if it can. Does not depend on the mesh."""
    try:
        _module()
    except ModuleNotFoundError:
        return f"jax_ep was built without NVSHMEM; {_INSTALLING}, and reinstall jax_ep"
    except ImportError as error:
        return f"NVSHMEM does not load ({error}); {_INSTALLING}"
    return ""


def start(rendezvous: _processes.Rendezvous, hosts: Collection[str], ordinal: int) -> Any:
    """Starts NVSHMEM for the processes of `rendezvous`, if it does not run yet. Returns its table of functions.

    NVSHMEM can start only once in a process.

    Args:
        rendezvous: of the processes that make the group.
        hosts: the host of each process.
        ordinal: the CUDA ordinal of this process's device.
    """
    module, processes, me = _module(), list(rendezvous.processes), jax.process_index()
    if _started:
        if _started != processes:
            raise Error(
                f"Group: its mesh is of the processes {processes}, and an earlier group over a network of {_started}; "
                "NVSHMEM spans the same processes all the time: make each such group on a mesh of all of them"
            )
        return module.network()
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # NVLS is for collectives: jax_ep uses none
    if len(set(hosts)) == 1:  # NVSHMEM need not look for a network
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        os.environ.setdefault("NVSHMEM_DISABLE_MNNVL", "1")
        os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
    published = rendezvous.exchange(module.unique_id().hex() if me == processes[0] else None)
    unique_id = bytes.fromhex(published[processes[0]])
    try:
        module.start(unique_id, pe=processes.index(me), num_pes=len(processes), ordinal=ordinal)
    except RuntimeError as error:
        raise Error(f"Group: {error}") from None
    _started.extend(processes)
    atexit.register(_finish, ordinal)
    return module.network()


def _finish(ordinal: int) -> None:
    """Ends NVSHMEM, if all processes do so together. Otherwise, NVSHMEM ends with the process."""
    try:
        all_end = _compat.barrier("jax_ep/network/end", _started, _LAST_CALL_S)
    except RuntimeError:  # jax.distributed or another process has ended
        return
    if all_end:
        _module().finish(ordinal)


def _module() -> ModuleType:
    return importlib.import_module("jax_ep._nvshmem")
