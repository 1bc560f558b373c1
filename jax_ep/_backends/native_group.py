"""The part of the CUDA backend that owns native state: the memory that ranks map, failures and counters."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
import warnings
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, cast

import jax
import numpy as np

from jax_ep import _native, _network, _processes, _transport
from jax_ep._backends.failures import error_of
from jax_ep._constants import ELSEWHERE, MAX_LOCAL_RANKS
from jax_ep._errors import Error
from jax_ep._settings import GroupSettings

_SAME_GPU = "JAX_EP_SAME_GPU"  # environment variable: "1" lets processes share a GPU, in time slices; for tests only

_NO_ID = -1  # before the processes have agreed on the group's id

_Parcel: TypeAlias = tuple[bytes, list[int]]  # the handles of a process's memory, and file descriptors


class GroupId:
    """Chooses a group's id, by which compiled programs name the group. All processes must compile the same program.

    The id is a hash of the group's settings, the shape of its mesh, whether it uses a network, and an index that counts
    the equal groups that are open at the same time. It does not depend on the process, or on closed groups. So a
    program that was exported, or compiled for a group that is closed now, runs with an equal group.
    """

    _taken: dict[str, set[int]] = {}  # by settings: the indices of the groups that this process has open
    _lock = threading.Lock()

    def __init__(self, group: GroupSettings) -> None:
        self.settings = {
            "num_experts": group.num_experts,
            "replicas": group.replicas,
            "top_k": group.top_k,
            "hidden": group.hidden,
            "max_tokens_per_rank": group.max_tokens_per_rank,
            "dtype": str(group.dtype),
            "node_size": _network.given_node_size(),
            "max_arena_bytes": group.max_arena_bytes,
        }
        self._place = [list(group.mesh.shape.items()), list(group.axis_names)]
        self._key = _digest([self._place, self.settings])
        self._index: int | None = None

    def taken(self) -> list[int]:
        """Returns the indices of the equal groups that this process has open."""
        with self._lock:
            return sorted(self._taken.get(self._key, ()))

    def take(self, taken_elsewhere: Collection[int]) -> None:
        """Takes the first index that no equal group has, in this process or in the others."""
        with self._lock:
            here = self._taken.setdefault(self._key, set())
            self._index = next(i for i in itertools.count() if i not in here and i not in taken_elsewhere)
            here.add(self._index)

    def give_back(self) -> None:
        """Lets an equal group that is opened later take the index."""
        with self._lock:
            self._taken[self._key].discard(self._index)

    def id(self, *, has_network: bool) -> int:
        """Returns the id. A group without devices has the id of the first equal group that is opened."""
        return int(_digest([self._place, self.settings, has_network, self._index or 0])[:15], 16)


class NativeGroup:
    """A group's memory on this process's devices. The native module keeps it under an id, which programs contain."""

    _closed_ids: ClassVar[set[int]] = set()  # ids that groups of this process have had

    def __init__(self, group: GroupSettings, native: ModuleType, transport: _transport.Transport) -> None:
        """Opens the group.

        Args:
            native: the extension module whose kernels run: `_cuda`, or `_emulated`.
            transport: how ranks reach one another's memory. It is the same in all processes.
        """
        self.group = group
        self._native = native
        self.transport = transport
        mesh = cast(jax.sharding.Mesh, group.mesh)
        self._ep_groups = _processes.ep_groups(mesh, group.axis_name)
        place = [[device.id for device in mesh.devices.flat], list(mesh.shape.items()), group.axis_name]
        self._rendezvous = _processes.Rendezvous(_digest(place), _processes.owners(mesh), group.timeout)
        self._group_id = GroupId(group)
        self._id = _NO_ID
        self._last_stats: Any = None
        self._last_failure: Any = None
        try:
            with self._rendezvous:
                self._open()
        except BaseException:  # an error here, or a process that does not come to the end of the rendezvous
            if self._id != _NO_ID:
                self._native.close_group(self._id)
                self._group_id.give_back()
            raise
        self.memory_bytes: int = self._native.group_bytes(self._id)
        self.round_tokens: int = self._native.group_round_tokens(self._id)
        """The most tokens per rank that an operation moves in one round."""
        self.closed = False

    def _open(self) -> None:
        group, me = self.group, jax.process_index()
        gpus = [self._native.device_uuid(ordinal).hex() for ordinal in _processes.local_ordinals(self._ep_groups)]
        published = self._rendezvous.exchange(
            {
                "settings": self._group_id.settings,
                "gpus": gpus,
                "host": _processes.host(),
                "taken": self._group_id.taken(),
                "grouped_gemm": self._load_grouped_gemm(),
            }
        )
        self.has_grouped_gemm = all(answer["grouped_gemm"] for answer in published.values())
        _expect_same_settings(published, me)
        expect_own_gpus(published)
        hosts = {process: answer["host"] for process, answer in published.items()}
        self._same_host = {process for process, host in hosts.items() if host == hosts[me]}
        self._has_network = self.transport == "network"
        network = self._start_network(hosts) if self._has_network else None
        self._group_id.take(taken_elsewhere={index for answer in published.values() for index in answer["taken"]})
        self._id = self._group_id.id(has_network=self._has_network)
        self._sharing = _transport.sharing(self.transport, self._ep_groups, self._native)
        self._frees_together = self._has_network
        if self._id in self._closed_ids:
            _wait_for_results(cast(jax.sharding.Mesh, group.mesh).local_devices)
        try:
            self._native.open_group(
                self._id,
                num_experts=group.num_ranks * group.slots_per_rank,
                replicas=group.replicas,
                max_arena_bytes=group.max_arena_bytes or 0,
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

    def _load_grouped_gemm(self) -> bool:
        """Loads the kernels of the grouped GEMM on this process's devices; returns False if it cannot run on them.

        A kernel that is loaded later, at its first launch, can deadlock while a peer's kernel waits for this device.
        """
        devices = [device for device in self._ep_groups.flat if device.process_index == jax.process_index()]
        if _native.grouped_matmul_reason(devices) is not None:
            return False
        assert _native.grouped_matmul is not None
        for device in devices:
            _native.grouped_matmul.load(self._ordinal(device))
        return True

    def _start_network(self, hosts: dict[int, str]) -> Any:
        """Starts NVSHMEM, and returns its functions for the native group. `hosts` maps each process to its host."""
        return _network.start(self._rendezvous, hosts.values(), _processes.local_ordinals(self._ep_groups)[0])

    def _processing_element(self, device: jax.Device) -> int:
        """Returns NVSHMEM's number of a device, its processing element (PE)."""
        return self._rendezvous.processes.index(device.process_index)

    def _ordinal(self, device: jax.Device) -> int:
        """Returns the CUDA ordinal of a device of this process."""
        return device.local_hardware_id

    def _exchange(self, mine: _Parcel) -> list[_Parcel]:
        """Sends the handles to this process's memory to the processes that share an EP group with it.

        Only processes of this host send and get file descriptors. Returns the handles of the other processes.
        """
        rendezvous = self._rendezvous
        handles, descriptors = mine
        with _processes.Mailbox() as mailbox:
            published = rendezvous.exchange(
                {"sharing": self._sharing, "mailbox": mailbox.address, "handles": handles.hex()}
            )
            # If any process has memory that may end with it, all processes must unmap the memory before it is freed.
            self._frees_together = not all(
                self._native.outlives_owner(answer["sharing"]) for answer in published.values()
            )
            others = _processes.peers(self._ep_groups)
            neighbours = [process for process in others if process in self._same_host]
            for process in neighbours:
                _processes.send_descriptors(published[process]["mailbox"], descriptors, rendezvous.timeout)
            received = mailbox.receive(neighbours, rendezvous.timeout)
        return [(bytes.fromhex(published[process]["handles"]), received.get(process, [])) for process in others]

    def _exchange_nothing(self, _: _Parcel) -> list[_Parcel]:
        """Waits for the other processes. They exchange no handles: NVSHMEM maps the memory."""
        self._rendezvous.exchange(None)
        return []

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._native.close_group(self._id)
        try:
            self._close_with_others()
        finally:
            # An equal group may take this id next. So the last counters and the failure are read now.
            self._last_stats = self._native.group_stats(self._id)
            self._last_failure = self._native.group_failure(self._id)
            self._closed_ids.add(self._id)
            self._group_id.give_back()

    def _close_with_others(self) -> None:
        if not self._frees_together:
            return
        try:
            self._rendezvous.wait_for_all()
        except Exception as error:  # a process may have died, and jax.distributed with it
            warnings.warn(f"Group.close: its memory stays taken, as others may still use it: {error}", stacklevel=3)
        else:
            self._native.free_arenas(self._id)

    def check_one_round(self, op: str, num_tokens: int) -> None:
        """Raises an error if a split-phase call of `num_tokens` tokens needs rounds."""
        if num_tokens > self.round_tokens:
            # A group makes its rounds as equal as possible, so memory for num_tokens may give smaller rounds.
            needed = self._native.arena_bytes_for(self._id, self.group.max_tokens_per_rank)
            raise ValueError(
                f"{op}: a rank has T = {num_tokens} tokens, but a round of this group has {self.round_tokens} "
                f"(max_arena_bytes={self.group.max_arena_bytes}), and split-phase calls do not run in rounds: make the "
                f"group with max_arena_bytes={needed}, or call {op.removesuffix('_start')}"
            )

    def traffic(self) -> tuple[int, int]:
        """Returns the number of rows, and of their bytes, that this process has sent over a network so far."""
        return self._native.group_traffic(self._id)

    def check(self) -> None:
        failure = self._last_failure if self.closed else self._native.group_failure(self._id)
        if failure is not None:
            raise error_of(*failure)

    def stats(self) -> dict[str, Any]:
        counters = self._last_stats if self.closed else self._native.group_stats(self._id)
        operations, dropped, placement, peers = zip(*counters, strict=True)
        home_rows, planned_rows, copies = np.array(placement, np.int64).T
        rows_sent, bytes_sent, rows_received, bytes_received, ns_waited = np.moveaxis(np.array(peers, np.int64), -1, 0)
        return {
            "operations": {op: np.array([of_rank[op] for of_rank in operations], np.int64) for op in operations[0]},
            "rows_dropped": np.array(dropped, np.int64),
            "home_rows": home_rows,
            "planned_rows": planned_rows,
            "copies": copies,
            "rows_sent": rows_sent,
            "rows_received": rows_received,
            "bytes_sent": bytes_sent,
            "bytes_received": bytes_received,
            "seconds_waited": ns_waited / 1e9,
        }


class AbstractGroup:
    """A group on an abstract mesh. Its programs can be traced and lowered. They run with an equal group on devices."""

    memory_bytes = 0

    def __init__(self, group: GroupSettings) -> None:
        self.group = group
        self.closed = False
        node_size = _network.given_node_size()
        self._has_network = 0 < node_size < group.num_ranks or group.num_ranks > MAX_LOCAL_RANKS
        self._id = GroupId(group).id(has_network=self._has_network)

    def close(self) -> None:
        self.closed = True

    def check(self) -> None:
        """Does nothing: the group has no devices."""

    def check_one_round(self, op: str, num_tokens: int) -> None:
        """Does nothing: the devices on which the group is opened decide whether an operation has rounds."""

    def stats(self) -> dict[str, Any]:
        return {}


def _wait_for_results(devices: Sequence[jax.Device]) -> None:
    """Waits until the programs that compute arrays on `devices` of this process have ended, with an error or without.

    A program names its group by id only. If a program of a closed group still ran when an equal group took the id, its
    remaining operations would run in that group.
    """
    for array in jax.live_arrays(devices[0].platform):
        try:
            shards = [] if array.is_ready() else array.addressable_shards
        except RuntimeError:  # another thread has deleted the array
            continue
        for shard in shards:
            if shard.device in devices:
                with contextlib.suppress(RuntimeError):  # the program's error
                    shard.data.block_until_ready()


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
