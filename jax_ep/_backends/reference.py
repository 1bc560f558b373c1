"""The reference backend: plain JAX and `lax` collectives, on any platform and any number of processes.

The other backends must give the same results, so this file favours clear code over speed. Every rank gathers all ids
and all tokens of its group, and selects its own rows. combine sends back one partial sum per token and rank, as the
kernels do. Rows that hold no token are always zero in this backend.
"""

from __future__ import annotations

import operator
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _layouts, _wires
from jax_ep._settings import GroupSettings
from jax_ep._types import AllToAll, Backend, DispatchCall, Dispatched, Route


class RouteArrays(NamedTuple):
    """One rank's part of a route, for the experts' side. An index one past the end means "none"."""

    row: jax.Array  # [R, T, K] int32: the row on this rank for each (source rank, token, k)
    source: jax.Array  # [rows] int32: source rank * T + token for each row


class ReferenceBackend(Backend):
    memory_bytes = 0

    def __init__(self, group: GroupSettings) -> None:
        self.group = group
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def check(self) -> None:
        """Does nothing: JAX itself reports all errors of this backend."""

    def stats(self) -> dict[str, Any]:
        return {}  # counting the executions would take a host callback in each operation

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
        del started, zero_pad  # padding is always zero here
        placement, arrays = self._route(call, self._gather(topk_idx))
        route, options = call.route(arrays), call.options
        scales = None
        if call.quantized:
            x, scales = x
        elif options.wire is not None:
            x, scales = _wires.quantize(x, options.wire)
        rows = self.dispatch_like(route, x)
        if scales is not None:
            scales = self.dispatch_like(route, scales)
            if options.dequantize:
                rows, scales = _wires.dequantize(rows, scales, self.group.dtype), None
        return Dispatched(
            x=rows,
            counts=placement.counts,
            group_sizes=placement.group_sizes,
            weights=self._row_weights(route, topk_weights),
            scales=scales,
            num_dropped=placement.num_dropped,
            route=route,
        )

    def dispatch_like(self, route: Route, x: jax.Array) -> jax.Array:
        tokens = self._gather(x).reshape(-1, *x.shape[1:])
        return _take(tokens, route.arrays.source).reshape(*route.rows_shape, *x.shape[1:])

    def dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        x = topk_weights = None
        if rows is not None:
            x = self._sum_over_ranks(_partial_sums(route, rows, None).astype(rows.dtype), rows.dtype)
        if weights is not None:
            # Each (token, k) has a row on at most one rank; the other ranks add zero.
            topk_weights = self._sum_over_ranks(_take(weights.reshape(-1), route.arrays.row), weights.dtype)
        return x, topk_weights

    def combine_start(self, route: Route, *operands: Any) -> None:
        """The whole operation runs in its done."""

    def combine(self, route: Route, y: jax.Array, weights: jax.Array, started: None, out_dtype: Any) -> jax.Array:
        del started
        return self._sum_over_ranks(_partial_sums(route, y, weights).astype(y.dtype), out_dtype)

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        rows = self.dispatch_like(route, g).astype(jnp.float32)
        holds_token = (route.arrays.source < self.group.num_ranks * route.num_tokens).reshape(route.rows_shape)
        y_cotangent = jnp.where(holds_token[..., None], rows * weights[..., None], 0).astype(g.dtype)
        if y is None:
            return y_cotangent, None
        products = jnp.sum(rows * y.astype(jnp.float32), axis=-1)
        return y_cotangent, jnp.where(holds_token, products, 0)

    def all_to_all(self, x: jax.Array, splits: jax.Array, wire: str | None, *, zero_pad: bool) -> AllToAll:
        del zero_pad  # padding is always zero here
        blocks = _layouts.split_blocks(splits, x.shape[0], self.group.num_ranks)
        rows = _rows_of_blocks(blocks, x.shape[0])
        scales = None
        if wire is not None:
            x, scales = _wires.quantize(x, wire)
            scales = self._exchange(_take(scales, rows))
        return AllToAll(self._exchange(_take(x, rows)), self._exchange(blocks.splits), scales, self.group)

    def all_to_all_back(self, y: jax.Array, splits: jax.Array) -> jax.Array:
        num_rows, hidden = y.shape[1:]
        rows = _rows_of_blocks(_layouts.split_blocks(splits, num_rows, self.group.num_ranks), num_rows)
        back = self._exchange(y).reshape(-1, hidden)
        return jnp.zeros_like(y[0]).at[rows.reshape(-1)].set(back, mode="drop")

    def _route(self, call: DispatchCall, topk_idx: jax.Array) -> tuple[_layouts.Placement, RouteArrays]:
        """Computes the row of every (source rank, token, k) of topk_idx [R, T, K] that names an expert of this rank."""
        num_experts = self.group.experts_per_rank
        expert = topk_idx.reshape(-1) - lax.axis_index(self.group.axis_name) * num_experts
        expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)

        need = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
        route = call.route(None)
        placement = _layouts.place(
            need[:num_experts], layout=route.layout, capacity=route.capacity, alignment=route.alignment
        )
        # A stable sort by expert keeps the order (source rank, token, k) within each expert.
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        index = jnp.arange(expert.size, dtype=jnp.int32)
        sorted_index = jnp.zeros_like(index).at[order].set(index)
        place_in_group = sorted_index - _take(jnp.cumsum(need, dtype=jnp.int32) - need, expert)

        num_rows = _size(route.rows_shape)
        kept = place_in_group < _take(placement.counts, expert)
        row = jnp.where(kept, _take(placement.first_row, expert) + place_in_group, num_rows)
        none = topk_idx.shape[0] * topk_idx.shape[1]
        source = jnp.full(num_rows, none, jnp.int32).at[row].set(index // self.group.top_k, mode="drop")
        return placement, RouteArrays(row.reshape(topk_idx.shape), source)

    def _row_weights(self, route: Route, topk_weights: jax.Array | None) -> jax.Array:
        """Returns the weight of each row: float32 [rows]."""
        row = route.arrays.row.reshape(-1)
        weights = 1.0 if topk_weights is None else self._gather(topk_weights).reshape(-1)
        zeros = jnp.zeros(_size(route.rows_shape), jnp.float32)
        return zeros.at[row].set(weights, mode="drop").reshape(route.rows_shape)

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
        term = _take(y, row).astype(jnp.float32)
        total += term if weights is None else term * _take(weights.reshape(-1), row)[..., None]
    return total


def _rows_of_blocks(blocks: _layouts.Blocks, num_rows: int) -> jax.Array:
    """Returns the row at each place of each rank's block: [R, M] int32."""
    place = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.where(place[None] < blocks.sizes[:, None], blocks.first_row[:, None] + place[None], num_rows)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], and zero if the index is one past the end."""
    if x.shape[0] == 0:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    return x.at[index].get(mode="fill", fill_value=0)


def _size(shape: tuple[int, ...]) -> int:
    return reduce(operator.mul, shape)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_bits(move: Any, x: jax.Array) -> jax.Array:
    """Applies `move` to floating-point x as integers, so that no compiler pass widens, flushes or changes a value."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(move(bits), x.dtype)


@_as_bits.defjvp
def _as_bits_jvp(move: Any, primals: Any, tangents: Any) -> Any:
    # JAX uses the gradient rules of the public functions first. A second derivative reaches this rule. Without the
    # error, it would be zero.
    raise TypeError(
        "jax_ep: dispatch, combine and their like have first derivatives only, in reverse mode; use no jvp, hessian or "
        "second grad through them"
    )
