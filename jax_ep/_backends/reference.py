"""The reference backend: plain JAX and `lax` collectives, on any platform and any number of processes.

The other backends must give the same results, so this file favours clear code over speed. Every rank gathers all ids
and all tokens of its group, and selects its own rows. combine sends back one partial sum per token and rank, as the
kernels do. Rows that hold no token are zero in this backend. With JAX_EP_DEBUG_NANS=1 in the environment, unspecified
rows are NaN instead.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _compat, _layouts, _placement, _scales, _wires
from jax_ep._backends import plain_expand, plain_replicate
from jax_ep._layouts import take
from jax_ep._settings import GroupSettings
from jax_ep._types import AllToAll, Backend, DispatchCall, Dispatched, Route
from jax_ep._wires import GradWire, Wire

_DEBUG_NANS = "JAX_EP_DEBUG_NANS"  # in the environment, when a group is made: "1" fills unspecified rows with NaN


class ReferenceRoute(NamedTuple):
    """One rank's part of a route, for the experts' side. An index one past the end means "none"."""

    row: jax.Array  # [R, T, K] int32: the row on this rank for each (source rank, token, k)
    source: jax.Array  # [rows] int32: source rank * T + token for each row


class ReferenceBackend(Backend):
    memory_bytes = 0

    def __init__(self, group: GroupSettings) -> None:
        self.group = group
        self.closed = False
        self.debug_nans = os.environ.get(_DEBUG_NANS) == "1"

    def close(self) -> None:
        self.closed = True

    def check(self) -> None:
        """Does nothing: JAX itself reports all errors of this backend."""

    def stats(self) -> dict[str, Any]:
        return {}  # counting the executions would take a host callback in each operation

    def balance(self, topk_idx: jax.Array, tolerance_units: int) -> _placement.PlanArrays:
        return _placement.plan(self.group, topk_idx, tolerance_units)

    def replicate(self, w: jax.Array, slots: jax.Array) -> jax.Array:
        return plain_replicate.replicate(self.group, w, slots)

    def copy_experts(self, w: jax.Array, slots: jax.Array) -> jax.Array:
        return plain_replicate.copy_experts(self.group, w, slots)

    def add_copies(self, g: jax.Array, copies: jax.Array, slots: jax.Array) -> jax.Array:
        return plain_replicate.add_copies(self.group, g, copies, slots)

    def expand(
        self,
        x: jax.Array,
        row_of_pair: jax.Array,
        counts: jax.Array,
        group_sizes: jax.Array,
        *,
        capacity: int,
        zero_pad: bool,
    ) -> tuple[jax.Array, jax.Array]:
        del counts
        rows, pair_of_row = plain_expand.expand(x, row_of_pair, capacity)
        if not zero_pad:
            rows = self._fill_unspecified(rows, jnp.arange(capacity) < jnp.sum(group_sizes))
        return rows, pair_of_row

    def reduce(self, y: jax.Array, weights: jax.Array | None, row_of_pair: jax.Array) -> jax.Array:
        return plain_expand.reduce(y, weights, row_of_pair)

    def reduce_back(
        self, g: jax.Array, y: jax.Array | None, weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        return plain_expand.reduce_back(g, y, weights, row_of_pair, pair_of_row)

    def dispatch_start(self, call: DispatchCall, *operands: Any, zero_pad: bool) -> None:
        """The whole operation runs in its done."""

    def dispatch(
        self,
        call: DispatchCall,
        x: Any,
        topk_idx: jax.Array,
        topk_weights: jax.Array | None,
        started: None,
        *,
        zero_pad: bool,
    ) -> Dispatched:
        del started
        placement, arrays = self._route(call, self._gather(topk_idx))
        route, options = call.route(arrays), call.options
        scales = None
        if call.quantized:
            x, scales = x
        elif options.wire is not None:
            x, scales = _wires.quantize(x, options.wire)
        rows = self._rows(route, x)
        if scales is not None:
            scales = self._rows(route, scales)
            if options.dequantize:
                rows, scales = _wires.dequantize(rows, scales, self.group.dtype, call.channels_per_scale), None
        if not zero_pad:
            is_specified = _is_in_group(route, placement)  # also the rows that alignment adds
            rows = self._fill_unspecified(rows, is_specified)
            scales = None if scales is None else self._fill_unspecified(scales, is_specified)
        return Dispatched(
            x=rows,
            counts=placement.counts,
            group_sizes=placement.group_sizes,
            weights=self._row_weights(route, topk_weights),
            scales=None if scales is None else _scales.arrange(scales, call.scales_format),
            num_dropped=placement.num_dropped,
            route=route,
        )

    def dispatch_like(self, route: Route, x: jax.Array, *, zero_pad: bool) -> jax.Array:
        rows = self._rows(route, x)
        return rows if zero_pad else self._fill_unspecified(rows, self._holds_token(route))

    def dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None, wire: GradWire | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        x = topk_weights = None
        if rows is not None:
            x = self._sum_rows(route, rows, None, rows.dtype, wire)
        if weights is not None:
            # Each (token, k) has a row on at most one rank; the other ranks add zero.
            topk_weights = self._sum_over_ranks(take(weights.reshape(-1), route.arrays.row), weights.dtype)
        return x, topk_weights

    def combine_start(self, route: Route, *operands: Any) -> None:
        """The whole operation runs in its done."""

    def combine(
        self, route: Route, y: jax.Array, weights: jax.Array, started: None, out_dtype: Any, wire: Wire | None
    ) -> jax.Array:
        del started
        return self._sum_rows(route, y, weights, out_dtype, wire)

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[jax.Array, jax.Array | None]:
        if wire is None:
            rows = self._rows(route, g).astype(jnp.float32)
        else:
            rows = _wires.unpack(self._rows(route, _wires.pack(g, wire)), self.group.hidden, wire)
        holds_token = self._holds_token(route)
        y_cotangent = jnp.where(holds_token[..., None], rows * weights[..., None], 0).astype(g.dtype)
        if y is None:
            return y_cotangent, None
        products = jnp.sum(rows * y.astype(jnp.float32), axis=-1)
        return y_cotangent, jnp.where(holds_token, products, 0)

    def all_to_all(
        self, x: jax.Array, splits: jax.Array, wire: str | None, *, dequantize: bool, zero_pad: bool
    ) -> AllToAll:
        blocks = _layouts.split_blocks(splits, x.shape[0], self.group.num_ranks)
        rows = _rows_of_blocks(blocks, x.shape[0])
        scales = None
        if wire is not None:
            x, scales = _wires.quantize(x, wire)
            scales = self._exchange(take(scales, rows))
        x, splits = self._exchange(take(x, rows)), self._exchange(blocks.splits)
        if scales is not None and dequantize:
            x, scales = _wires.dequantize(x, scales, self.group.dtype), None
        if not zero_pad:
            is_specified = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < jnp.sum(splits, axis=1, keepdims=True)
            x = self._fill_unspecified(x, is_specified)
            scales = None if scales is None else self._fill_unspecified(scales, is_specified)
        return AllToAll(x, splits, scales, self.group)

    def all_to_all_back(self, y: jax.Array, splits: jax.Array) -> jax.Array:
        num_rows, hidden = y.shape[1:]
        rows = _rows_of_blocks(_layouts.split_blocks(splits, num_rows, self.group.num_ranks), num_rows)
        back = self._exchange(y).reshape(-1, hidden)
        return jnp.zeros_like(y[0]).at[rows.reshape(-1)].set(back, mode="drop")

    def _route(self, call: DispatchCall, topk_idx: jax.Array) -> tuple[_layouts.RowPlacement, ReferenceRoute]:
        """Computes the row of every (source rank, token, k) of topk_idx [R, T, K] that names a slot of this rank."""
        num_slots, (num_ranks, num_tokens, _) = self.group.slots_per_rank, topk_idx.shape
        first_slot = lax.axis_index(self.group.axis_name) * num_slots
        slot = topk_idx - first_slot  # of this rank
        is_here = (slot >= 0) & (slot < num_slots)
        names = slot[..., None] == jnp.arange(num_slots, dtype=jnp.int32)[None, None, None]  # [R, T, K, num_slots]
        num_pairs = jnp.sum(names, axis=2, dtype=jnp.int32)  # of each (source rank, token, slot)

        route = call.route(None)
        placement = _layouts.place_rows(
            jnp.sum(num_pairs, axis=1, dtype=jnp.int32).T,
            layout=route.layout,
            capacity=route.capacity,
            alignment=route.alignment,
            first_slot=first_slot,
        )
        first_row = placement.first_row[:, None] + jnp.cumsum(placement.kept, axis=1, dtype=jnp.int32) - placement.kept
        # The rows of a slot from one source rank are in the order (token, k).
        earlier_tokens = jnp.cumsum(num_pairs, axis=1, dtype=jnp.int32) - num_pairs
        earlier_k = jnp.tril(slot[..., None] == slot[..., None, :], -1)  # [R, T, K, K]
        earlier = _at(earlier_tokens, slot) + jnp.sum(earlier_k, axis=-1, dtype=jnp.int32)

        num_rows = _size(route.rows_shape)
        kept, first_row = (_at(table.T[:, None], slot) for table in (placement.kept, first_row))
        row = jnp.where(is_here & (earlier < kept), first_row + earlier, num_rows)
        index = jnp.arange(num_ranks * num_tokens, dtype=jnp.int32).reshape(num_ranks, num_tokens, 1)
        none = jnp.full(num_rows, index.size, jnp.int32)
        return placement, ReferenceRoute(row, none.at[row].set(index, mode="drop"))

    def _rows(self, route: Route, x: jax.Array) -> jax.Array:
        """x [T, ...] of all ranks in this rank's rows; zero in rows that hold no token."""
        tokens = self._gather(x).reshape(-1, *x.shape[1:])
        return take(tokens, route.arrays.source).reshape(*route.rows_shape, *x.shape[1:])

    def _holds_token(self, route: Route) -> jax.Array:
        """Which rows hold a token: bool [rows]."""
        none = jnp.zeros(_size(route.rows_shape), jnp.bool)
        return none.at[route.arrays.row.reshape(-1)].set(True, mode="drop").reshape(route.rows_shape)

    def _fill_unspecified(self, rows: jax.Array, is_specified: jax.Array) -> jax.Array:
        """`rows` [*rows, ...] with NaN, or the largest integer, where it is not specified, to show who reads there."""
        if not self.debug_nans:
            return rows
        is_float = jnp.issubdtype(rows.dtype, jnp.inexact)
        garbage = jnp.nan if is_float else rows.dtype == jnp.bool or jnp.iinfo(rows.dtype).max
        return jnp.where(is_specified[..., None], rows, jnp.asarray(garbage, rows.dtype))

    def _row_weights(self, route: Route, topk_weights: jax.Array | None) -> jax.Array:
        """Returns the weight of each row: float32 [rows]."""
        row = route.arrays.row.reshape(-1)
        weights = 1.0 if topk_weights is None else self._gather(topk_weights).reshape(-1)
        zeros = jnp.zeros(_size(route.rows_shape), jnp.float32)
        return zeros.at[row].set(weights, mode="drop").reshape(route.rows_shape)

    def _sum_rows(
        self, route: Route, rows: jax.Array, weights: jax.Array | None, out_dtype: Any, wire: GradWire | None
    ) -> jax.Array:
        """Sums rows [rows, H'] times weights [rows], or unweighted, to [T, H'] on the tokens' ranks."""
        sums = _partial_sums(route, rows, weights)
        if wire is None:
            return self._sum_over_ranks(sums.astype(rows.dtype), out_dtype)
        arrived = _wires.unpack(self._exchange(_wires.pack(sums, wire)), rows.shape[-1], wire)
        arrived = self._with_own(arrived, sums)
        return reduce(operator.add, arrived).astype(out_dtype)

    def _with_own(self, arrived: jax.Array, sums: jax.Array) -> jax.Array:
        """`arrived` [R, ...] with this rank's own block of `sums` [R, ...], which no wire has rounded."""
        own = lax.axis_index(self.group.axis_name)
        return arrived.at[own].set(sums[own])

    def _gather(self, x: jax.Array) -> jax.Array:
        """Returns the x of every rank: [R, ...]."""
        return _as_bits(lambda bits: lax.all_gather(bits, self.group.axis_name), x)

    def _exchange(self, blocks: jax.Array) -> jax.Array:
        """Sends block r of [R, ...] to rank r. Block r of the result came from rank r."""
        return _as_bits(lambda bits: lax.all_to_all(bits, self.group.axis_name, 0, 0), blocks)

    def _sum_over_ranks(self, blocks: jax.Array, out_dtype: Any) -> jax.Array:
        """Sends block r of [R, T, ...] to rank r. Sums the blocks that arrive, in float32, in the order of ranks."""
        arrived = self._exchange(blocks).astype(jnp.float32)
        return reduce(operator.add, arrived).astype(out_dtype)


def _partial_sums(route: Route, y: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns this rank's part of each token's sum: float32 [R, T, H].

    Adds in the order of k, and reads no row that holds no token.
    """
    y = y.reshape(-1, y.shape[-1])
    total = jnp.zeros((), jnp.float32)
    for k in range(route.group.top_k):
        row = route.arrays.row[..., k]
        term = take(y, row).astype(jnp.float32)
        total += term if weights is None else term * take(weights.reshape(-1), row)[..., None]
    return total


def _is_in_group(route: Route, placement: _layouts.RowPlacement) -> jax.Array:
    """Which rows an expert's group occupies: bool [rows]."""
    row = jnp.arange(route.capacity, dtype=jnp.int32)
    if route.layout == "expert":
        return row[None] < placement.group_sizes[:, None]
    return row < jnp.sum(placement.group_sizes)


def _rows_of_blocks(blocks: _layouts.Blocks, num_rows: int) -> jax.Array:
    """Returns the row at each place of each rank's block: [R, M] int32."""
    place = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.where(place[None] < blocks.sizes[:, None], blocks.first_row[:, None] + place[None], num_rows)


def _at(table: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns table[r, t, slot[r, t, k]]: [R, T, K].

    table is [R, T, num_slots], or [R, 1, num_slots] for all tokens.
    """
    return jnp.take_along_axis(table, slot, axis=-1, mode="clip")


def _size(shape: tuple[int, ...]) -> int:
    return reduce(operator.mul, shape)


def _as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies `move` to floating-point x as integers, so that no compiler pass widens, flushes or changes a value."""
    return _from_bits(move(_to_bits(x)), x.dtype)


@jax.custom_jvp
def _to_bits(x: jax.Array) -> jax.Array:
    """Returns x as integers of its size if x is floating-point, else x itself."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


_to_bits.defjvp(_compat.refuse_second_derivative)


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Inverts `_to_bits`."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
