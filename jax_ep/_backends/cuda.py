"""The CUDA backend: each operation is one XLA FFI call, which launches one kernel (ffi/cuda/) on the rank's device.

`targets.py` declares the operands and results of each call. Nothing here knows how devices reach each other: the native
group does (ffi/cuda/group.h).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _compat, _layouts, _wires
from jax_ep._backends import targets
from jax_ep._backends.native_group import GroupOfPrograms, NativeGroup
from jax_ep._backends.targets import NONE, Result, Target
from jax_ep._constants import CHANNELS_PER_SCALE, Layout
from jax_ep._ordered_calls import ordered_call
from jax_ep._types import AllToAll, Backend, DispatchCall, Dispatched, Route

_Started: TypeAlias = tuple[jax.Array | None, ...]  # memory for the results, None for NONE; the ticket


class RouteArrays(NamedTuple):
    """One rank's part of a route, named as the operands and results in `targets`, which say what they are."""

    place: jax.Array
    rows: jax.Array
    num_arrived: jax.Array
    counts: jax.Array
    group_sizes: jax.Array


class _CudaOperations(Backend):
    """The operations of a `NativeGroup`, or of a `GroupOfPrograms`."""

    _id: int  # the group's number, which programs contain
    _has_network: bool

    def dispatch_start(
        self, call: DispatchCall, x: Any, topk_idx: jax.Array, topk_weights: jax.Array | None, *, zero_pad: bool
    ) -> _Started:
        operands, results, settings = self._dispatch_call(call, x, topk_idx, topk_weights, zero_pad)
        return self._start(targets.DISPATCH, operands, results, **settings)

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
        operands, results, settings = self._dispatch_call(call, x, topk_idx, topk_weights, zero_pad)
        if started is None:
            got = self._call(targets.DISPATCH, operands, results, **settings)
        else:
            got = self._done(targets.DISPATCH, operands, started)
        return Dispatched(
            x=got["out"],
            counts=got["counts"],
            group_sizes=got["group_sizes"],
            weights=got["weights"],
            scales=got["out_scales"] if call.returns_fp8 else None,
            num_dropped=got["num_dropped"],
            route=call.route(RouteArrays(**{name: got[name] for name in RouteArrays._fields})),
        )

    def dispatch_like(self, route: Route, x: jax.Array) -> jax.Array:
        channels = x.shape[1]
        x = _pad_to_units(x)
        operands = {"x": x, **route.arrays._asdict()}
        results = targets.DISPATCH_LIKE.result_types(operands, {"*rows": route.rows_shape}, {"out": x.dtype})
        got = self._call(targets.DISPATCH_LIKE, operands, results, **_route_attributes(route))
        return got["out"][..., :channels]

    def dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        channels, absent, dtypes = 0, [], {}
        if rows is None:
            absent.append("out")
        else:
            channels, dtypes["out"] = rows.shape[-1], rows.dtype
            rows = _pad_to_units(rows.reshape(-1, channels))
        if weights is None:
            absent.append("topk_weights")
        operands = {"y": rows, "weights": weights, **_without_counts(route)}
        results = targets.DISPATCH_BACK.result_types(operands, {"*rows": route.rows_shape}, dtypes, absent)
        got = self._call(targets.DISPATCH_BACK, operands, results)
        return (None if rows is None else got["out"][:, :channels]), (None if weights is None else got["topk_weights"])

    def combine_start(self, route: Route, y: jax.Array, weights: jax.Array, out_dtype: Any) -> _Started:
        operands, results = self._combine_call(route, y, weights, out_dtype)
        return self._start(targets.COMBINE, operands, results)

    def combine(self, route: Route, y: jax.Array, weights: jax.Array, started: Any, out_dtype: Any) -> jax.Array:
        operands, results = self._combine_call(route, y, weights, out_dtype)
        if started is None:
            return self._call(targets.COMBINE, operands, results)["out"]
        return self._done(targets.COMBINE, operands, started)["out"]

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        operands = {"g": g, **route.arrays._asdict(), "y": y, "row_weights": weights}
        results = targets.COMBINE_BACK.result_types(
            operands,
            {"*rows": route.rows_shape},
            {"y_cotangent": g.dtype},
            absent=["weights_cotangent"] if y is None else [],
        )
        got = self._call(targets.COMBINE_BACK, operands, results, **_route_attributes(route))
        return got["y_cotangent"], None if y is None else got["weights_cotangent"]

    def all_to_all(self, x: jax.Array, splits: jax.Array, wire: str | None, *, zero_pad: bool) -> AllToAll:
        group, num_rows = self.group, x.shape[0]
        blocks = _layouts.split_blocks(splits, num_rows, group.num_ranks)
        operands = {"x": x, "splits": blocks.splits.reshape(-1), "place": _place_in_block(blocks, num_rows)}
        results = targets.ALL_TO_ALL.result_types(
            operands,
            {"E": group.experts_per_rank, "S": group.hidden // CHANNELS_PER_SCALE},
            {"out": x.dtype if wire is None else _wires.FP8},
            absent=["out_scales"] if wire is None else [],
        )
        cast = _wires.cast_of(wire)
        got = self._call(targets.ALL_TO_ALL, operands, results, agreed=(wire,), cast=cast, zero_pad=zero_pad)
        return AllToAll(got["out"], got["out_splits"], None if wire is None else got["out_scales"], group)

    def all_to_all_back(self, y: jax.Array, splits: jax.Array) -> jax.Array:
        num_rows = y.shape[1]
        blocks = _layouts.split_blocks(splits, num_rows, self.group.num_ranks)
        operands = {"y": y, "num_sent": blocks.sizes, "place": _place_in_block(blocks, num_rows)}
        results = targets.ALL_TO_ALL_BACK.result_types(operands, {}, {"out": y.dtype})
        return self._call(targets.ALL_TO_ALL_BACK, operands, results)["out"]

    def _dispatch_call(
        self, call: DispatchCall, x: Any, topk_idx: jax.Array, topk_weights: jax.Array | None, zero_pad: bool
    ) -> tuple[dict[str, jax.Array | None], dict[str, Result], dict[str, Any]]:
        """The operands, results and settings of a dispatch."""
        group, options, route = self.group, call.options, call.route(None)
        rows, scales = x if call.quantized else (x, None)
        operands = {"x": rows, "x_scales": scales, "topk_idx": topk_idx, "topk_weights": topk_weights}
        results = targets.DISPATCH.result_types(
            operands,
            {
                "*rows": route.rows_shape,
                "E": group.experts_per_rank,
                "P": call.num_tokens * (2 if self._has_network else 1),
                "R": group.num_ranks,
                "S": group.hidden // CHANNELS_PER_SCALE,
            },
            {"out": _wires.FP8 if call.returns_fp8 else group.dtype},
            absent=[] if call.returns_fp8 else ["out_scales"],
        )
        settings = {
            "agreed": (options.layout, options.capacity, options.alignment, options.wire),
            "cast": _wires.cast_of(options.wire),
            "dequantize": options.dequantize and call.arrives_fp8,
            "zero_pad": zero_pad,
            **_route_attributes(route),
        }
        return operands, results, settings

    def _combine_call(
        self, route: Route, y: jax.Array, weights: jax.Array, out_dtype: Any
    ) -> tuple[dict[str, jax.Array | None], dict[str, Result]]:
        operands: dict[str, jax.Array | None] = {"y": y, "row_weights": weights, **_without_counts(route)}
        return operands, targets.COMBINE.result_types(operands, {"*rows": route.rows_shape}, {"out": out_dtype})

    def _call(
        self,
        target: Target,
        operands: Mapping[str, jax.Array | None],
        results: Mapping[str, Result],
        *,
        agreed: tuple[Any, ...] | None = (),
        aliases: Mapping[int, int] | None = None,
        has_side_effect: bool = False,
        **attributes: Any,
    ) -> dict[str, jax.Array]:
        """One FFI call; its results by name.

        Args:
            agreed: what ranks must agree on besides the types of the operands. The kernels compare a hash of both. None
                for a done, which is part of the call that its start has begun.
            aliases: operand -> result in the same memory.
        """
        if agreed is not None:
            operands = {"axis_index": lax.axis_index(self.group.axis_name), **operands}
        given = target.in_order(operands)
        if agreed is not None:
            types = tuple(None if operand is None else (operand.shape, str(operand.dtype)) for operand in given[1:])
            agreed = (target.name, types, agreed)
        arrays = self._arrays(given)
        call = ordered_call(
            f"jax_ep_{target.name}",
            arrays,
            _types(arrays, results),
            attributes={"group": np.int64(self._id), **target.encode(attributes)},
            agreed=agreed,
            aliases=aliases,
            has_side_effect=has_side_effect,
        )
        return dict(zip(results, lax.optimization_barrier(call), strict=True))

    def _start(
        self,
        target: Target,
        operands: Mapping[str, jax.Array | None],
        results: Mapping[str, Result],
        **settings: Any,
    ) -> _Started:
        """Starts `target`; gives the memory that its done will return as the results, and the ticket.

        The memory comes from a separate, pure call. If jax.checkpoint runs that again in a backward pass, as it does
        with barriers behind a start, it gets other memory, and XLA need not copy.
        """
        arrays = self._arrays(operands.values())
        allocate = jax.ffi.ffi_call("jax_ep_room", _types(arrays, results), vmap_method="sequential")
        room = lax.optimization_barrier(allocate(*arrays))
        memory = dict(zip(results, room, strict=True))
        start = target.start
        ticket = self._call(
            start, {**operands, **memory}, start.result_types({}, {}, {}), has_side_effect=True, **settings
        )["ticket"]
        # An array of no elements, as the argument of a program or of shard_map, is too much for XLA of jax 0.11.
        return *(None if results[name] is NONE else array for name, array in memory.items()), ticket

    def _done(
        self, target: Target, operands: Mapping[str, jax.Array | None], started: _Started
    ) -> dict[str, jax.Array]:
        """Ends `target`, which was `started` with `operands`. XLA keeps the operands and the results' memory for it."""
        *memory, ticket = started
        given = {result.name: array for result, array in zip(target.results, memory, strict=True)}
        results = {name: NONE if array is None else Result(array.shape, array.dtype) for name, array in given.items()}
        aliases = {len(operands) + i: i for i in range(len(results))}
        operands = {**operands, **given, "ticket": ticket}
        return self._call(target.done, operands, results, agreed=None, aliases=aliases, has_side_effect=True)

    def _arrays(self, operands: Collection[jax.Array | None]) -> tuple[jax.Array, ...]:
        """The operands of a foreign call: no None, all varying over the EP axis, behind a barrier."""
        arrays = tuple(jnp.zeros(0, jnp.float32) if operand is None else operand for operand in operands)
        # XLA:GPU would fuse the call with slices around it, then fail on an update of a result, or run a half twice.
        return lax.optimization_barrier(_compat.vary(arrays, self.group.axis_names))


class CudaBackend(NativeGroup, _CudaOperations):
    """A group on GPUs, which runs the operations."""


class CudaPrograms(GroupOfPrograms, _CudaOperations):
    """A group on an abstract mesh, which only traces and lowers the operations."""


def _types(operands: tuple[jax.Array, ...], results: Mapping[str, Result]) -> Sequence[Any]:
    """The types of a foreign call's results: they vary over the mesh axes that its operands vary over."""
    return [_compat.result_type(operands[0], shape, dtype) for shape, dtype in results.values()]


def _route_attributes(route: Route) -> dict[str, Any]:
    layout = Layout[route.layout.upper()]
    return {"layout": layout, "capacity": route.capacity, "alignment": route.alignment}


def _without_counts(route: Route) -> dict[str, jax.Array]:
    """The arrays of a route that the way back takes."""
    arrays = route.arrays
    return {"place": arrays.place, "rows": arrays.rows, "num_arrived": arrays.num_arrived}


def _pad_to_units(rows: jax.Array) -> jax.Array:
    """Rows of whole 16-byte units, in which they travel."""
    unit = 16 // rows.dtype.itemsize
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[-1] % unit)))


def _place_in_block(blocks: _layouts.Blocks, num_rows: int) -> jax.Array:
    """Where in its rank's block each row goes: [M, R] int32, -1 where it does not go to the rank."""
    place = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - blocks.first_row[None]
    return jnp.where((place >= 0) & (place < blocks.sizes[None]), place, -1)
