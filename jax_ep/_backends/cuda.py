"""The CUDA backend: each operation is one XLA FFI call, which launches one kernel (ffi/cuda/) on the rank's device.

What it saves in a route, and hands to the kernels again, is `RouteArrays`. An operand or result of shape [0] stands for
"none". Nothing here knows how devices reach each other: the native group does (ffi/cuda/group.h).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _compat, _layouts, _network, _processes, _wires
from jax_ep._errors import Error, PeerTimeoutError
from jax_ep._ordered_calls import ordered_call
from jax_ep._types import AllToAll, DispatchCall, Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._group import Group

MAX_RANKS = 32  # of a group: kMaxRanks in ffi/arena.h
_LAYOUT_CODES = {"expert": 0, "ragged": 1}  # enum Layout in ffi/layout.h
_CAST_CODES = {None: 0, "fp8": 1, "fp8_pow2": 2}  # enum Cast in ffi/cuda/rows.cuh
_ELSEWHERE = -1  # kElsewhere in ffi/cuda/group.h
_SHARING = "JAX_EP_SHARING"  # in the environment: how processes map each other's memory, if not as found best
_SAME_GPU = "JAX_EP_SAME_GPU"  # in the environment: "1" lets processes share a GPU, in time slices; for tests only
_Parcel: TypeAlias = tuple[bytes, list[int]]  # of a process: plain bytes, and file descriptors
_Result: TypeAlias = tuple[tuple[int, ...], Any]  # shape, dtype
_NONE: _Result = ((0,), jnp.float32)
_TICKET: _Result = ((2,), jnp.int32)  # struct Ticket in ffi/cuda/call.h
_Started: TypeAlias = tuple[jax.Array | None, ...]  # memory for the results, None for _NONE; the ticket


class RouteArrays(NamedTuple):
    """One rank's part of a route."""

    # [T, R] int32: index of the token among the rows sent to each rank (for this one, the token), -1 if it was not.
    # Over a network [2 T, R]: then those of the tokens that this rank passed on for its counterparts (ScatterArgs in
    # ffi/cuda/scatter.h).
    place: jax.Array
    rows: jax.Array  # [R, T, K] int32: row here of each arrived (source rank, index, k), -1 if none
    num_arrived: jax.Array  # [R] int32: rows that came from each rank
    counts: jax.Array  # [E_local] int32, as in Dispatched
    group_sizes: jax.Array  # [E_local] int32


class CudaBackend:
    def __init__(self, group: Group, native: ModuleType) -> None:
        """`native`: the extension module whose kernels run, on GPUs or emulated ones."""
        self._group = group
        self._native = native
        mesh = group.mesh
        self._lines = _processes.lines(mesh, group.axis_name)
        place = [[device.id for device in mesh.devices.flat], list(mesh.shape.items()), group.axis_name]
        self._meeting = _processes.Meeting(_digest(place), _processes.owners(mesh), group.timeout)
        self._settings = {
            "num_experts": group.num_experts,
            "top_k": group.top_k,
            "hidden": group.hidden,
            "max_tokens_per_rank": group.max_tokens_per_rank,
            "dtype": str(group.dtype),
            "node_size": _network.given_node_size(),
        }
        # It stands in compiled programs, which must be the same in all processes.
        self._id = int(_digest([self._meeting.key, self._settings])[:15], 16)
        try:
            with self._meeting:
                self._open()
        except BaseException:  # of this process, or of one that does not come to the meeting's end
            self._native.close_group(self._id)
            raise
        self.memory_bytes: int = self._native.group_bytes(self._id)
        self.closed = False

    def _open(self) -> None:
        group, me = self._group, jax.process_index()
        gpus = [self._native.device_uuid(ordinal).hex() for ordinal in _local_ordinals(self._lines)]
        told = self._meeting.exchange({"settings": self._settings, "gpus": gpus, "host": _processes.host()})
        _expect_same_settings(told, me)
        expect_own_gpus(told)
        hosts = {process: answer["host"] for process, answer in told.items()}
        network = None
        if _network.is_needed(self._lines, hosts):
            network = self._start_network(hosts)
        self._has_network = network is not None
        self._sharing = choose_sharing(self._lines, self._native) if network is None else "none"
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
                    [self._ordinal(device) if device.process_index == me else _ELSEWHERE for device in line]
                    for line in self._lines
                ],
                sharing=self._sharing,
                exchange=self._exchange if network is None else self._exchange_nothing,
                network=network,
                pes=[[self._processing_element(device) for device in line] for line in self._lines],
                node_size=_network.node_size(self._lines, hosts),
            )
        except RuntimeError as error:
            raise Error(f"Group: {error}") from None
        self._meeting.exchange(None)  # no kernel writes to a peer before all memory is ready

    def _start_network(self, hosts: dict[int, str]) -> Any:
        """What the native group needs of NVSHMEM; `hosts`: of each process."""
        return _network.start(self._meeting, hosts.values(), _local_ordinals(self._lines)[0])

    def _processing_element(self, device: jax.Device) -> int:
        """The number that NVSHMEM knows a device by."""
        return self._meeting.processes.index(device.process_index)

    def _ordinal(self, device: jax.Device) -> int:
        """The number by which CUDA knows a device of this process."""
        return device.local_hardware_id

    def _exchange(self, mine: _Parcel) -> list[_Parcel]:
        """Gives what others need to map this process's memory to those that share a line of the mesh with it."""
        meeting, me = self._meeting, jax.process_index()
        handles, descriptors = mine
        with _processes.Mailbox() as mailbox:
            told = meeting.exchange({"sharing": self._sharing, "mailbox": mailbox.address, "handles": handles.hex()})
            # Where one process frees its memory by IPC's rules, all must say when they have unmapped it.
            self._frees_together = any(answer["sharing"] == "ipc" for answer in told.values())
            of_lines = [{device.process_index for device in line} for line in self._lines]
            others = sorted(set().union(*(line for line in of_lines if me in line)) - {me})
            for process in others:
                _processes.send_descriptors(told[process]["mailbox"], descriptors, meeting.timeout)
            received = mailbox.receive(others, meeting.timeout)
        return [(bytes.fromhex(told[process]["handles"]), received[process]) for process in others]

    def _exchange_nothing(self, _: _Parcel) -> list[_Parcel]:
        """Tells the others that this process has come so far, and waits for them."""
        self._meeting.exchange(None)
        return []

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._native.close_group(self._id)
        if not self._frees_together:
            return
        try:
            self._meeting.wait_for_all()
        except Exception as error:  # a peer may be dead, and jax.distributed with it
            warnings.warn(f"Group.close: its memory stays taken, as others may still use it: {error}", stacklevel=3)
        else:
            self._native.free_arenas(self._id)

    def traffic(self) -> tuple[int, int]:
        """The rows, and their bytes, that this process has sent over a network since the group was made."""
        return self._native.group_traffic(self._id)

    def check(self) -> None:
        failure = self._native.group_failure(self._id)
        if failure is None:
            return
        reason, op, rank, peer, expected, seen = failure
        timed_out = partial(PeerTimeoutError, op, waiting_rank=rank, missing_rank=peer, expected=expected, seen=seen)
        if reason == "timeout":
            raise timed_out()
        if reason == "other op":
            raise Error(
                f"{op}: rank {peer} was in another call than rank {rank} (call {seen:#x} against {expected:#x}); every "
                "rank must run the same operations, with the same shapes, in the same order"
            )
        if reason == "slot taken":
            raise Error(
                f"{op}: rank {rank} has no room for another operation while older halves are under way; end each start "
                "before the group's second (if its arena is small, fourth) operation after it"
            )
        if reason == "elsewhere":
            why = "Group.check of its process says why"
            raise timed_out(message=f"{op}: rank {peer} gave up, and rank {rank} with it; {why}")
        if reason == "other order":
            raise Error(
                f"{op}: ranks {rank} and {peer} run operations of this group and of another group in different order, "
                "so that each would wait for the other; run the operations of both groups in the same order on all "
                "devices: in one program, or in programs that one host thread calls"
            )
        raise Error(
            f"{op}: the program runs rank {seen} on the device that group.mesh has as rank {rank}; pass "
            "mesh=group.mesh to jax.shard_map"
        )

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

    def dispatch_start(
        self, call: DispatchCall, x: Any, topk_idx: jax.Array, topk_weights: jax.Array | None, *, zero_pad: bool
    ) -> _Started:
        operands = (*_parts(call, x), topk_idx, topk_weights)
        attrs = self._dispatch_attrs(call, zero_pad=zero_pad)
        return self._start("dispatch", operands, self._dispatch_results(call), **attrs)

    def dispatch(
        self,
        call: DispatchCall,
        x: Any,
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        started: Any,
        *,
        zero_pad: bool,
    ) -> Dispatched:
        operands = (*_parts(call, x), topk_idx, topk_weights)
        if started is None:
            attrs = self._dispatch_attrs(call, zero_pad=zero_pad)
            results = self._call("dispatch", operands, self._dispatch_results(call), **attrs)
        else:
            results = self._done("dispatch", operands, started)
        rows, scales, weights, counts, group_sizes, num_dropped, place, arrived_rows, num_arrived = results
        return Dispatched(
            x=rows,
            counts=counts,
            group_sizes=group_sizes,
            weights=weights,
            scales=scales if call.returns_fp8 else None,
            num_dropped=num_dropped,
            route=call.route(RouteArrays(place, arrived_rows, num_arrived, counts, group_sizes)),
        )

    def dispatch_like(self, route: Route, x: jax.Array) -> jax.Array:
        channels = x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, -channels % (16 // x.dtype.itemsize))))
        (rows,) = self._call(
            "dispatch_like",
            (x, *route.arrays),
            [((*route.rows_shape, x.shape[1]), x.dtype)],
            **_route_attrs(route),
        )
        return rows[..., :channels]

    def dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        channels = 0
        if rows is not None:
            channels = rows.shape[-1]
            rows = rows.reshape(-1, channels)
            rows = jnp.pad(rows, ((0, 0), (0, -channels % (16 // rows.dtype.itemsize))))
        x, topk_weights = self._call(
            "dispatch_back",
            (rows, weights, *route.arrays[:3]),
            [
                _NONE if rows is None else ((route.num_tokens, rows.shape[1]), rows.dtype),
                _NONE if weights is None else ((route.num_tokens, self._group.top_k), jnp.float32),
            ],
        )
        return (None if rows is None else x[:, :channels]), (None if weights is None else topk_weights)

    def combine_start(self, route: Route, y: jax.Array, weights: jax.Array, out_dtype: Any) -> _Started:
        operands = (y, weights, *route.arrays[:3])
        return self._start("combine", operands, [_sums(route, y, out_dtype)])

    def combine(self, route: Route, y: jax.Array, weights: jax.Array, started: Any, out_dtype: Any) -> jax.Array:
        operands = (y, weights, *route.arrays[:3])
        if started is None:
            (out,) = self._call("combine", operands, [_sums(route, y, out_dtype)])
        else:
            (out,) = self._done("combine", operands, started)
        return out

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        y_cotangent, weights_cotangent = self._call(
            "combine_back",
            (g, *route.arrays, y, weights),
            [
                ((*route.rows_shape, g.shape[1]), g.dtype),
                _NONE if y is None else (route.rows_shape, jnp.float32),
            ],
            **_route_attrs(route),
        )
        return y_cotangent, None if y is None else weights_cotangent

    def all_to_all(self, x: jax.Array, splits: jax.Array, wire: str | None, *, zero_pad: bool) -> AllToAll:
        group = self._group
        num_rows = x.shape[0]
        shape = (group.num_ranks, num_rows)
        blocks = _layouts.split_blocks(splits, num_rows, group.num_ranks)
        rows, scales, out_splits = self._call(
            "all_to_all",
            (x, blocks.splits.reshape(-1), _places(blocks, num_rows)),
            [
                ((*shape, group.hidden), x.dtype if wire is None else _wires.FP8),
                _NONE if wire is None else ((*shape, group.hidden // _wires.CHANNELS_PER_SCALE), jnp.float32),
                ((group.num_ranks, group.experts_per_rank), jnp.int32),
            ],
            agreed=(wire,),
            cast=_CAST_CODES[wire],
            zero_pad=zero_pad,
        )
        return AllToAll(rows, out_splits, None if wire is None else scales, group)

    def all_to_all_back(self, y: jax.Array, splits: jax.Array) -> jax.Array:
        num_rows = y.shape[1]
        blocks = _layouts.split_blocks(splits, num_rows, self._group.num_ranks)
        (out,) = self._call(
            "all_to_all_back",
            (y, blocks.sizes, _places(blocks, num_rows)),
            [((num_rows, y.shape[2]), y.dtype)],
        )
        return out

    def _dispatch_results(self, call: DispatchCall) -> list[_Result]:
        group = self._group
        num_ranks, num_experts = group.num_ranks, group.experts_per_rank
        shape = call.route(None).rows_shape
        scales_shape = (*shape, group.hidden // _wires.CHANNELS_PER_SCALE)
        return [
            ((*shape, group.hidden), _wires.FP8 if call.returns_fp8 else group.dtype),
            (scales_shape, jnp.float32) if call.returns_fp8 else _NONE,
            (shape, jnp.float32),
            ((num_experts,), jnp.int32),
            ((num_experts,), jnp.int32),
            ((), jnp.int32),
            ((call.num_tokens * (2 if self._has_network else 1), num_ranks), jnp.int32),
            ((num_ranks, call.num_tokens, group.top_k), jnp.int32),
            ((num_ranks,), jnp.int32),
        ]

    def _dispatch_attrs(self, call: DispatchCall, *, zero_pad: bool) -> dict[str, Any]:
        return {
            "agreed": (call.layout, call.capacity, call.alignment, call.wire),
            "cast": _CAST_CODES[call.wire],
            "dequantize": call.dequantize and (call.wire is not None or call.quantized),
            "zero_pad": zero_pad,
            **_route_attrs(call.route(None)),
        }

    def _call(
        self,
        op: str,
        operands: tuple[Any, ...],
        results: list[_Result],
        *,
        agreed: tuple[Any, ...] = (),
        has_side_effect: bool = False,
        **attrs: Any,
    ) -> Sequence[jax.Array]:
        """One FFI call: a whole operation, or a start. The kernels compare its hash, of what ranks must agree on."""
        types = tuple(None if operand is None else (operand.shape, str(operand.dtype)) for operand in operands)
        operands = (lax.axis_index(self._group.axis_name), *operands)
        agreed = (op, types, agreed)
        return self._ffi_call(op, operands, results, agreed=agreed, has_side_effect=has_side_effect, **attrs)

    def _start(self, op: str, operands: tuple[Any, ...], results: list[_Result], **attrs: Any) -> _Started:
        """Starts `op`; gives the memory that its done will return as the results, and the ticket.

        The memory comes from a separate, pure call. If jax.checkpoint runs that again in a backward pass, as it does
        with barriers behind a start, it gets other memory, and XLA need not copy.
        """
        arrays = self._arrays(operands)
        allocate = jax.ffi.ffi_call("jax_ep_room", _types(arrays, results), vmap_method="sequential")
        room = lax.optimization_barrier(allocate(*arrays))
        (ticket,) = self._call(f"{op}_start", (*operands, *room), [_TICKET], has_side_effect=True, **attrs)
        # An array of no elements, as the argument of a program or of shard_map, is too much for XLA of jax 0.11.
        return *(None if result is _NONE else array for array, result in zip(room, results, strict=True)), ticket

    def _done(self, op: str, operands: tuple[Any, ...], started: _Started) -> Sequence[jax.Array]:
        """Ends `op`, which was `started` with `operands`, so that XLA keeps them and the results' memory for it."""
        results = [_NONE if array is None else (array.shape, array.dtype) for array in started[:-1]]
        aliases = {len(operands) + i: i for i in range(len(results))}
        return self._ffi_call(f"{op}_done", (*operands, *started), results, aliases, has_side_effect=True)

    def _ffi_call(
        self,
        op: str,
        operands: tuple[Any, ...],
        results: list[_Result],
        aliases: dict[int, int] | None = None,  # operand -> result in the same memory
        agreed: tuple[Any, ...] | None = None,
        has_side_effect: bool = False,
        **attrs: Any,
    ) -> Sequence[jax.Array]:
        operands = self._arrays(operands)
        attrs = {name: value if isinstance(value, bool) else np.int64(value) for name, value in attrs.items()}
        call = ordered_call(
            f"jax_ep_{op}",
            operands,
            _types(operands, results),
            attributes={"group": np.int64(self._id), **attrs},
            agreed=agreed,
            aliases=aliases,
            has_side_effect=has_side_effect,
        )
        return lax.optimization_barrier(call)

    def _arrays(self, operands: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """The operands of a foreign call: no None, all varying over the EP axis, behind a barrier."""
        operands = tuple(jnp.zeros(0, jnp.float32) if operand is None else operand for operand in operands)
        # XLA:GPU would fuse the call with slices around it, then fail on an update of a result, or run a half twice.
        return lax.optimization_barrier(_compat.vary(operands, [self._group.axis_name]))


def choose_sharing(devices: np.ndarray, native: ModuleType) -> str:
    """How this process shares the memory of its `devices` with the owners of the others; "none" if it owns all."""
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


def _expect_same_settings(told: dict[int, Any], me: int) -> None:
    mine = told[me]["settings"]
    for process, answer in told.items():
        for name, value in answer["settings"].items():
            if value != mine[name]:
                raise Error(
                    f"Group: process {process} makes its group with {name}={value!r}, process {me} with "
                    f"{mine[name]!r}; every process must make the same groups in the same order"
                )


def expect_own_gpus(told: dict[int, Any]) -> None:
    """`told`: what processes say of themselves, among that their "gpus": how CUDA names them on all machines."""
    if os.environ.get(_SAME_GPU) == "1":
        return
    users: dict[str, int] = {}
    for process, answer in told.items():
        for gpu in answer["gpus"]:
            if (user := users.setdefault(gpu, process)) != process:
                raise Error(
                    f"Group: processes {user} and {process} use the same GPU ({gpu}); give each its own, by "
                    "local_device_ids of jax.distributed.initialize or by CUDA_VISIBLE_DEVICES"
                )


def _parts(call: DispatchCall, x: Any) -> tuple[jax.Array, jax.Array | None]:
    """The rows, and their scales if x is quantised."""
    return x if call.quantized else (x, None)


def _types(operands: tuple[jax.Array, ...], results: list[_Result]) -> list[Any]:
    """Of a foreign call's results: they vary over the mesh axes that its operands vary over."""
    return [_compat.result_type(operands[0], shape, dtype) for shape, dtype in results]


def _sums(route: Route, y: jax.Array, out_dtype: Any) -> _Result:
    return (route.num_tokens, y.shape[-1]), out_dtype


def _route_attrs(route: Route) -> dict[str, Any]:
    return {"layout": _LAYOUT_CODES[route.layout], "capacity": route.capacity, "alignment": route.alignment}


def _places(blocks: _layouts.Blocks, num_rows: int) -> jax.Array:
    """Where in its rank's block each row goes: [M, R] int32, -1 where it does not go to the rank."""
    place = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - blocks.first_row[None]
    return jnp.where((place >= 0) & (place < blocks.sizes[None]), place, -1)
