"""Chooses how the ranks of a CUDA group reach one another's memory. All processes of the group choose the same.

In one process or on one host, ranks map each other's memory. If a group spans hosts, its processes first try fabric
handles, by which a process maps the memory of a GPU on another host of the same NVLink domain. Otherwise, the group
needs a network (`_network`). docs/multi_host.md explains the ways for users.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Literal, TypeAlias

import jax
import numpy as np

from jax_ep import _network, _processes
from jax_ep._constants import MAX_LOCAL_RANKS
from jax_ep._errors import Error

Transport: TypeAlias = Literal["host", "fabric", "network"]
"""host: peer memory within a process or a host. fabric: peer memory by fabric handles. network: NVSHMEM."""

_SHARING = "JAX_EP_SHARING"  # environment variable: forces how processes map each other's memory
_WAYS = ("descriptor", "ipc", "fabric")
_FABRIC_FIX = (
    "If NVLink connects these hosts: the service nvidia-imex must run on all of them, with the same list of hosts, and "
    "each container needs a device /dev/nvidia-caps-imex-channels/channel0 (or another number, the same for all)"
)


def given_sharing() -> str:
    """Returns the value of JAX_EP_SHARING in this process, or "". It need not be valid."""
    return os.environ.get(_SHARING, "")


def expect_valid_sharing(published: dict[int, str]) -> None:
    """Raises an error if the value of JAX_EP_SHARING is unknown, or if only some processes force fabric handles.

    `published` has the result of given_sharing() in each process. All processes raise an error if one does.
    """
    me = jax.process_index()
    for process, value in published.items():
        if value and value not in _WAYS:
            reason = f"{_SHARING} is {value!r}; it must be 'descriptor', 'ipc' or 'fabric', or not be set"
            raise ValueError(reason) if process == me else Error(f"process {process}: {reason}")
    if "fabric" in published.values() and len(set(published.values())) > 1:
        forced = [str(process) for process, value in published.items() if value == "fabric"]
        raise Error(f"Group: {_SHARING} is 'fabric' in process {', '.join(forced)} only; set it in all, or in none")


def choose(
    native: ModuleType,
    ep_groups: np.ndarray,
    hosts: dict[int, str],
    given: dict[int, str],
    rendezvous: _processes.Rendezvous,
) -> tuple[Transport, str]:
    """Returns the transport; for a network, also why fabric handles cannot be used.

    The processes of `rendezvous` must call it together.

    Args:
        native: the extension module whose kernels will run.
        ep_groups: the devices of the group, as [EP groups, ranks].
        hosts: the host of each process.
        given: the result of given_sharing() in each process.

    Raises:
        Error: JAX_EP_SHARING forces fabric handles, and they cannot be used.
        ValueError: the value of JAX_EP_SHARING is unknown.
    """
    expect_valid_sharing(given)
    is_forced = len(given) > 1 and "fabric" in given.values()
    if not is_forced and not _network.is_needed(ep_groups, hosts):
        return "host", ""
    reason = _why_fabric_is_ruled_out(ep_groups.shape[1], given) or _why_fabric_fails(native, ep_groups, rendezvous)
    if not reason:
        return "fabric", ""
    if is_forced:
        raise Error(f"Group: {_SHARING} is 'fabric', but fabric handles cannot be used here: {reason}")
    return "network", reason


def sharing(transport: Transport, devices: np.ndarray, native: ModuleType) -> str:
    """Returns how this process shares the memory of its own devices in `devices` with other processes.

    The result is "none" if no other process has such devices, or if NVSHMEM maps the memory.
    """
    here = _processes.local_ordinals(devices)
    if transport == "network" or len(here) == devices.size:
        return "none"
    return "fabric" if transport == "fabric" else given_sharing() or native.best_sharing(here)


def _why_fabric_is_ruled_out(num_ranks: int, given: dict[int, str]) -> str:
    """Returns the setting or limit that rules out fabric handles, or "". It is the same in all processes."""
    if 0 < (node_size := _network.given_node_size()) < num_ranks:
        return f"{_network.NODE_SIZE} is {node_size}, which asks for a network between nodes of {node_size} ranks"
    if num_ranks > MAX_LOCAL_RANKS:
        return f"the group has {num_ranks} ranks, and with fabric handles it has at most {MAX_LOCAL_RANKS}"
    other = next((value for value in given.values() if value not in ("", "fabric")), "")
    return f"{_SHARING} is {other!r}" if other else ""


def _why_fabric_fails(native: ModuleType, ep_groups: np.ndarray, rendezvous: _processes.Rendezvous) -> str:
    """Returns why processes cannot map each other's memory by fabric handles, and the fix; "" if they can.

    The processes try it, because the driver reports fabric handles as supported where they do not work: on an H200
    without an IMEX channel, allocating such memory is "not permitted". The result is the same in all processes.
    """
    ordinals, offer, handles, reason = _processes.local_ordinals(ep_groups), None, "", ""
    try:
        offer = native.offer_fabric(ordinals)
        handles = offer.handles().hex()
    except RuntimeError as error:
        reason = f"it cannot create fabric handles for its memory: {error}"
    offered = rendezvous.exchange({"handles": handles, "reason": reason})
    reasons = {process: answer["reason"] for process, answer in offered.items()}
    if not any(reasons.values()):
        for process in _processes.peers(ep_groups):
            try:
                native.try_fabric(ordinals, bytes.fromhex(offered[process]["handles"]))
            except RuntimeError as error:
                reason = f"it cannot map the memory of process {process}: {error}"
                break
        reasons = rendezvous.exchange(reason)
    del offer  # no process maps it any more
    return next((f"process {process}: {text}. {_FABRIC_FIX}" for process, text in reasons.items() if text), "")
