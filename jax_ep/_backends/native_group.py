"""The part of the CUDA backend that owns native state: the memory that ranks map, failures and counters."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from types import ModuleType
from typing import Any, TypeAlias

import jax
import numpy as np

from jax_ep import _network, _processes
from jax_ep._backends.failures import error_of
from jax_ep._constants import ELSEWHERE
from jax_ep._errors import Error
from jax_ep._settings import GroupSettings

# Environment variables.
_SHARING = "JAX_EP_SHARING"  # "descriptor" or "ipc": forces how processes map each other's memory
_SAME_GPU = "JAX_EP_SAME_GPU"  # "1" lets processes share a GPU, in time slices; for tests only

_Parcel: TypeAlias = tuple[bytes, list[int]]  # the handles of a process's memory, and file descriptors


class NativeGroup:
    """A group's memory on this process's devices. The native module keeps it under an id, which programs contain."""

    def __init__(self, group: GroupSettings, native: ModuleType) -> None:
        """`native` is the extension module whose kernels run: `_cuda`, or `_emulated`."""
        self.group = group
        self._native = native
        mesh = group.mesh
        self._ep_groups = _processes.ep_groups(mesh, group.axis_name)
        place = [[device.id for device in mesh.devices.flat], list(mesh.shape.items()), group.axis_name]
        self._rendezvous = _processes.Rendezvous(_digest(place), _processes.owners(mesh), group.timeout)
        self._settings = {
            "num_experts": group.num_experts,
            "top_k": group.top_k,
            "hidden": group.hidden,
            "max_tokens_per_rank": group.max_tokens_per_rank,
            "dtype": str(group.dtype),
            "node_size": _network.given_node_size(),
        }
        # Compiled programs contain the id, and must be the same in all processes. So the id is a hash, not a counter.
        self._id = int(_digest([self._rendezvous.key, self._settings])[:15], 16)
        try:
            with self._rendezvous:
                self._open()
        except BaseException:  # an error here, or a process that does not come to the end of the rendezvous
            self._native.close_group(self._id)
            raise
        self.memory_bytes: int = self._native.group_bytes(self._id)
        self.closed = False

    def _open(self) -> None:
        group, me = self.group, jax.process_index()
        gpus = [self._native.device_uuid(ordinal).hex() for ordinal in _local_ordinals(self._ep_groups)]
        published = self._rendezvous.exchange({"settings": self._settings, "gpus": gpus, "host": _processes.host()})
        _expect_same_settings(published, me)
        expect_own_gpus(published)
        hosts = {process: answer["host"] for process, answer in published.items()}
        network = None
        if _network.is_needed(self._ep_groups, hosts):
            network = self._start_network(hosts)
        self._has_network = network is not None
        self._sharing = choose_sharing(self._ep_groups, self._native) if network is None else "none"
        self._frees_together = self._has_network
        try:
            self._native.open_group(
                self._id,
                num_experts=group.num_experts,
                top_k=group.top_k,
                max_tokens=group.max_tokens_per_rank,
                max_payload=group.hidden * group.dtype.itemsize,
                num_sms=group.num_sms or 0,
                timeout_seconds=group.timeout,
                devices=[
                    [self._ordinal(device) if device.process_index == me else ELSEWHERE for device in ep_group]
                    for ep_group in self._ep_groups
                ],
                sharing=self._sharing,
                exchange=self._exchange if network is None else self._exchange_nothing,
                network=network,
                pes=[[self._processing_element(device) for device in ep_group] for ep_group in self._ep_groups],
                node_size=_network.node_size(self._ep_groups, hosts),
            )
        except RuntimeError as error:
            raise Error(f"Group: {error}") from None
        self._rendezvous.exchange(None)  # no kernel writes to a peer before all memory is ready

    def _start_network(self, hosts: dict[int, str]) -> Any:
        """Starts NVSHMEM, and returns its functions for the native group. `hosts` maps each process to its host."""
        return _network.start(self._rendezvous, hosts.values(), _local_ordinals(self._ep_groups)[0])

    def _processing_element(self, device: jax.Device) -> int:
        """Returns NVSHMEM's number of a device, its processing element (PE)."""
        return self._rendezvous.processes.index(device.process_index)

    def _ordinal(self, device: jax.Device) -> int:
        """Returns the CUDA ordinal of a device of this process."""
        return device.local_hardware_id

    def _exchange(self, mine: _Parcel) -> list[_Parcel]:
        """Sends the handles to this process's memory to the processes that share an EP group with it.

        Returns the handles of those processes.
        """
        rendezvous, me = self._rendezvous, jax.process_index()
        handles, descriptors = mine
        with _processes.Mailbox() as mailbox:
            published = rendezvous.exchange(
                {"sharing": self._sharing, "mailbox": mailbox.address, "handles": handles.hex()}
            )
            # With CUDA IPC in any process, all processes must unmap its memory before it is freed.
            self._frees_together = any(answer["sharing"] == "ipc" for answer in published.values())
            owners = [{device.process_index for device in ep_group} for ep_group in self._ep_groups]
            others = sorted(set().union(*(processes for processes in owners if me in processes)) - {me})
            for process in others:
                _processes.send_descriptors(published[process]["mailbox"], descriptors, rendezvous.timeout)
            received = mailbox.receive(others, rendezvous.timeout)
        return [(bytes.fromhex(published[process]["handles"]), received[process]) for process in others]

    def _exchange_nothing(self, _: _Parcel) -> list[_Parcel]:
        """Waits for the other processes. They exchange no handles: NVSHMEM maps the memory."""
        self._rendezvous.exchange(None)
        return []

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._native.close_group(self._id)
        if not self._frees_together:
            return
        try:
            self._rendezvous.wait_for_all()
        except Exception as error:  # a process may have died, and jax.distributed with it
            warnings.warn(f"Group.close: its memory stays taken, as others may still use it: {error}", stacklevel=3)
        else:
            self._native.free_arenas(self._id)

    def traffic(self) -> tuple[int, int]:
        """Returns the number of rows, and of their bytes, that this process has sent over a network so far."""
        return self._native.group_traffic(self._id)

    def check(self) -> None:
        failure = self._native.group_failure(self._id)
        if failure is not None:
            raise error_of(*failure)

    def stats(self) -> dict[str, Any]:
        operations, dropped, peers = zip(*self._native.group_stats(self._id), strict=True)
        rows_sent, bytes_sent, rows_received, bytes_received, ns_waited = np.moveaxis(np.array(peers, np.int64), -1, 0)
        return {
            "operations": {op: np.array([of_rank[op] for of_rank in operations], np.int64) for op in operations[0]},
            "rows_dropped": np.array(dropped, np.int64),
            "rows_sent": rows_sent,
            "rows_received": rows_received,
            "bytes_sent": bytes_sent,
            "bytes_received": bytes_received,
            "seconds_waited": ns_waited / 1e9,
        }


def choose_sharing(devices: np.ndarray, native: ModuleType) -> str:
    """Returns how this process shares the memory of its own devices in `devices` with other processes.

    Returns "none" if it owns all of `devices`.
    """
    here = _local_ordinals(devices)
    if len(here) == devices.size:
        return "none"
    chosen = os.environ.get(_SHARING)
    if chosen not in (None, "", "descriptor", "ipc"):
        raise ValueError(f"{_SHARING} is {chosen!r}; it must be 'descriptor' or 'ipc', or not be set")
    return chosen or native.best_sharing(here)


def _local_ordinals(devices: np.ndarray) -> list[int]:
    me = jax.process_index()
    return [device.local_hardware_id for device in devices.flat if device.process_index == me]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _expect_same_settings(published: dict[int, Any], me: int) -> None:
    mine = published[me]["settings"]
    for process, answer in published.items():
        for name, value in answer["settings"].items():
            if value != mine[name]:
                raise Error(
                    f"Group: process {process} makes its group with {name}={value!r}, process {me} with "
                    f"{mine[name]!r}; every process must make the same groups in the same order"
                )


def expect_own_gpus(published: dict[int, Any]) -> None:
    """Raises an error if two processes use the same GPU. published[process]["gpus"] has the UUIDs of its GPUs."""
    if os.environ.get(_SAME_GPU) == "1":
        return
    users: dict[str, int] = {}
    for process, answer in published.items():
        for gpu in answer["gpus"]:
            if (user := users.setdefault(gpu, process)) != process:
                raise Error(
                    f"Group: processes {user} and {process} use the same GPU ({gpu}); give each its own, by "
                    "local_device_ids of jax.distributed.initialize or by CUDA_VISIBLE_DEVICES"
                )
