"""The layout "token": a row per token that has an expert on the rank, instead of a row per expert.

All backends move these rows as the rows of a ragged layout: each token names a rank at most once, and names the rank's
first slot. The kernels send the local experts and the weights of a row in its header. With the backends in plain JAX,
they follow along the same route, as words of 32 bits. `expand` makes the ragged layout of the rows, and `reduce` sums
the experts' outputs. Both run on one rank and move nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _checks, _compat, _layouts, _scales
from jax_ep._dispatch_options import most_rows_of
from jax_ep._group import check_usable
from jax_ep._layouts import take
from jax_ep._settings import GroupSettings
from jax_ep._types import DispatchCall, Dispatched, Expanded, Route, TokenSlots, route_of
from jax_ep._wires import GradWire

# --- dispatch ---------------------------------------------------------------------------------------------------------


def token_slots(group: GroupSettings, topk_slot: jax.Array) -> TokenSlots:
    """Returns the slots for `dispatch`. topk_slot [T, K] has the slot of each pair, counted over all ranks."""
    is_valid = (topk_slot >= 0) & (topk_slot < group.num_ranks * group.slots_per_rank)
    rank = jnp.where(is_valid, topk_slot // group.slots_per_rank, -1)
    is_named_before = jnp.any(jnp.tril(rank[:, :, None] == rank[:, None, :], -1), axis=-1)
    return TokenSlots(jnp.where(is_valid & ~is_named_before, rank * group.slots_per_rank, -1), topk_slot)


def dispatch_start(
    call: DispatchCall, x: Any, slots: TokenSlots, topk_weights: jax.Array | None, *, zero_pad: bool
) -> Any:
    """Begins a `dispatch`. The arguments are those of `Backend.dispatch_start`."""
    if call.backend.sends_pairs:
        return call.backend.dispatch_start(call, x, slots, topk_weights, zero_pad=zero_pad)
    return call.backend.dispatch_start(call, x, slots.sent, None, zero_pad=zero_pad)


def dispatch(
    call: DispatchCall, x: Any, slots: TokenSlots, topk_weights: jax.Array | None, started: Any, *, zero_pad: bool
) -> Dispatched:
    """Sends each token once to each rank that it names. The arguments are those of `Backend.dispatch`."""
    backend = call.backend
    if backend.sends_pairs:
        recv = backend.dispatch(call, x, slots, topk_weights, started, zero_pad=zero_pad)
    else:
        recv = backend.dispatch(call, x, slots.sent, None, started, zero_pad=zero_pad)
        recv = _with_pairs(recv, slots, topk_weights)
    assert recv.topk_idx is not None and recv.num_rows_per_rank is not None
    counts = _count(recv.topk_idx, recv.group.slots_per_rank)
    num_rows = jnp.sum(recv.num_rows_per_rank, dtype=jnp.int32)
    return dataclasses.replace(recv, counts=counts, group_sizes=counts, num_rows=num_rows)


def _with_pairs(recv: Dispatched, slots: TokenSlots, topk_weights: jax.Array | None) -> Dispatched:
    """Sends the slots and the weights of the rows along their route. Returns `recv` with what arrives."""
    group = recv.group
    rank = lax.axis_index(group.axis_name)
    # [T, K] slots, [T, K] weights if there are any, and the source rank.
    weights = [] if topk_weights is None else [lax.bitcast_convert_type(topk_weights, jnp.int32)]
    source = jnp.broadcast_to(rank, (recv.route.num_tokens, 1))
    words = jnp.concatenate(_compat.vary([slots.named, *weights, source], group.axis_names), axis=1)
    words = recv.route.backend.dispatch_like(recv.route, words, zero_pad=False)

    holds_token = jnp.arange(len(words), dtype=jnp.int32) < jnp.sum(recv.counts, dtype=jnp.int32)
    local = words[:, : group.top_k] - rank * group.slots_per_rank
    is_here = holds_token[:, None] & (local >= 0) & (local < group.slots_per_rank)
    if topk_weights is None:
        weight = jnp.float32(1)
    else:
        weight = lax.bitcast_convert_type(words[:, group.top_k : 2 * group.top_k], jnp.float32)
    return dataclasses.replace(
        recv,
        weights=jnp.where(is_here, weight, jnp.float32(0)),
        topk_idx=jnp.where(is_here, local, -1),
        num_rows_per_rank=_count(jnp.where(holds_token, words[:, -1], -1), group.num_ranks),
    )


def dispatch_back(
    route: Route,
    topk_idx: jax.Array,
    rows: jax.Array | None,
    weights: jax.Array | None,
    wire: GradWire | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """The transpose of `dispatch`: sums rows [capacity, H] to [T, H], returns weights [capacity, K] to [T, K]; or None.

    `topk_idx` [capacity, K] is the one that `dispatch` returned.
    """
    weights = without_absent_pairs(topk_idx, weights)
    if route.backend.sends_pairs:
        return route.backend.dispatch_back(route, rows, weights, wire)
    x = topk_weights = None
    if rows is not None:
        x, _ = route.backend.dispatch_back(route, rows, None, wire)
    if weights is not None:
        topk_weights, _ = route.backend.dispatch_back(route, weights, None, None)
    return x, topk_weights


def without_absent_pairs(topk_idx: jax.Array, weights: jax.Array | None) -> jax.Array | None:
    """Cotangents of recv.weights, with zeros for pairs (token, k) of other ranks: each is on at most one rank."""
    return None if weights is None else jnp.where(topk_idx >= 0, weights, 0)


def _count(values: jax.Array, num: int) -> jax.Array:
    """Returns how often each of 0 .. num - 1 occurs in `values`: [num] int32."""
    return jnp.sum(values.reshape(-1, 1) == jnp.arange(num, dtype=jnp.int32), axis=0, dtype=jnp.int32)


# --- expand -----------------------------------------------------------------------------------------------------------


@_compat.named
def expand(recv: Dispatched, *, capacity: int | None = None, alignment: int = 1) -> Expanded:
    """Copies each row of the layout "token" once for each of its local experts, sorted by expert.

    The result is the ragged layout. Its rows are those of `dispatch` with layout="ragged": ordered by local expert,
    then source rank, then source token, then k. No rank communicates. Differentiable in recv.x and recv.weights, in
    reverse mode.

    Args:
        recv: the result of dispatch with layout="token".
        capacity: the number of rows, a multiple of alignment. The default is min(K, E_local) rows for each row of
            recv.x, or the default of `dispatch` in the ragged layout if that is smaller, plus the padding of alignment.
            (With a plan, E_local means E_local + B.) It is enough for any routing that names no expert twice for a
            token. If rows do not fit, the experts share the room fairly, and so do the source ranks in each expert
            (docs/concepts.md).
        alignment: each expert's group is padded with zero rows to a multiple of this number.

    Returns:
        `Expanded`, with the same bits on every run and every backend.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> def layer(x, topk_idx, topk_weights, w):
        ...     recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="token")
        ...     rows = ep.expand(recv)
        ...     y = jax.lax.ragged_dot(rows.x, w, rows.group_sizes)
        ...     return ep.combine(ep.reduce(y, rows), recv)
        >>> on_each_rank(layer)(x, topk_idx, topk_weights, w).shape == x.shape
        True
    """
    route = route_of("expand", recv)
    group = route.group
    check_usable("expand", group)
    if route.layout != "token" or recv.topk_idx is None or recv.num_rows_per_rank is None:
        raise ValueError(
            f"expand: recv has the layout {route.layout!r}; it must be what dispatch(layout='token') returned"
        )
    alignment = _checks.integer("expand: alignment", alignment, 1, _checks.MAX_INT32)
    capacity = _capacity(route, capacity, alignment)
    num_rows = route.capacity
    dims: dict[str, int | None] = {"capacity": num_rows, "K": group.top_k}
    _checks.array("expand", "recv.weights", recv.weights, dims, jnp.float32)

    x, weights, scales, topk_idx, num_rows_per_rank = _compat.vary(
        (recv.x, recv.weights, recv.scales, recv.topk_idx, recv.num_rows_per_rank), group.axis_names
    )
    placement, row_of_pair = _place_pairs(route, topk_idx, num_rows_per_rank, capacity, alignment)
    pairs = jnp.arange(num_rows * group.top_k, dtype=jnp.int32).reshape(num_rows, group.top_k)
    pair_of_row = jnp.full(capacity, pairs.size, jnp.int32).at[row_of_pair].set(pairs, mode="drop")
    token_of_row = pair_of_row // group.top_k
    return Expanded(
        x=_expand_rows(x, row_of_pair, token_of_row),
        counts=placement.counts,
        group_sizes=placement.group_sizes,
        weights=_expand_weights(weights, row_of_pair, pair_of_row),
        scales=None if scales is None else _scales.arrange(take(scales, token_of_row), recv.scales_format),
        num_dropped=placement.num_dropped,
        row_of_pair=row_of_pair,
        pair_of_row=pair_of_row,
        group=group,
        scales_format=recv.scales_format,
        channels_per_scale=recv.channels_per_scale,
    )


def _capacity(route: Route, capacity: int | None, alignment: int) -> int:
    """The capacity to use, checked against alignment."""
    group = route.group
    origin = ""
    if capacity is None:
        most_rows = most_rows_of("ragged", group, route.num_tokens, route.tolerance_units)
        most_rows = min(most_rows, route.capacity * min(group.top_k, route.num_entries))
        capacity = _layouts.capacity_for("ragged", most_rows, num_groups=route.num_entries, alignment=alignment)
        origin = ", which is enough for any routing that names no expert twice for a token"
    elif _checks.integer("expand: capacity", capacity, 1) % alignment:
        raise ValueError(
            f"expand: capacity is {capacity}; it must be a multiple of alignment = {alignment}, "
            f"e.g. {_layouts.align_up(capacity, alignment)}"
        )
    largest = _checks.MAX_INT32 // alignment * alignment
    if capacity > largest:
        raise ValueError(
            f"expand: capacity is {capacity}{origin}; a rank's rows are numbered in int32, so it must be at most "
            f"{largest}: give a smaller one"
        )
    return int(capacity)


def _place_pairs(
    route: Route, topk_idx: jax.Array, num_rows_per_rank: jax.Array, capacity: int, alignment: int
) -> tuple[_layouts.RowPlacement, jax.Array]:
    """Computes the row of each pair (token row, k) in the ragged layout: [N, K] int32, `capacity` for no row."""
    num_entries = route.num_entries
    expert_numbers = jnp.arange(num_entries, dtype=jnp.int32)
    is_pair = topk_idx >= 0
    num_pairs = jnp.sum(topk_idx[:, :, None] == expert_numbers, axis=1, dtype=jnp.int32)  # [N, E_local]
    # The pairs of each expert in the token rows before each row, and in all rows: [N + 1, E_local].
    before = jnp.pad(jnp.cumsum(num_pairs, axis=0, dtype=jnp.int32), ((1, 0), (0, 0)))
    end = jnp.cumsum(num_rows_per_rank, dtype=jnp.int32)
    before_source = before[end - num_rows_per_rank]  # [R, E_local]
    need = before[end] - before_source

    placement = _layouts.place_rows(
        need.T,
        layout="ragged",
        capacity=capacity,
        alignment=alignment,
        first_slot=lax.axis_index(route.group.axis_name) * route.group.slots_per_rank,
    )
    kept = placement.kept.T  # [R, E_local]
    first_row = placement.first_row + jnp.cumsum(kept, axis=0, dtype=jnp.int32) - kept

    row = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)
    source = jnp.sum(row[:, None] >= end[:-1], axis=1, dtype=jnp.int32)  # of each token row
    earlier_k = jnp.tril(topk_idx[:, :, None] == topk_idx[:, None, :], -1)
    # The pairs of the same expert and source before each pair.
    earlier = _at(before[:-1] - before_source[source], topk_idx) + jnp.sum(earlier_k, axis=-1, dtype=jnp.int32)
    is_kept = is_pair & (earlier < _at(kept[source], topk_idx))
    return placement, jnp.where(is_kept, _at(first_row[source], topk_idx) + earlier, capacity)


def _at(table: jax.Array, topk_idx: jax.Array) -> jax.Array:
    """Returns table[n, topk_idx[n, k]]: [N, K]. table is [N, E_local]."""
    return jnp.take_along_axis(table, topk_idx, axis=-1, mode="clip")


@jax.custom_vjp
def _expand_rows(x: jax.Array, row_of_pair: jax.Array, token_of_row: jax.Array) -> jax.Array:
    return take(x, token_of_row)


def _expand_rows_fwd(x: jax.Array, row_of_pair: jax.Array, token_of_row: jax.Array) -> tuple[jax.Array, jax.Array]:
    return take(x, token_of_row), row_of_pair


def _expand_rows_bwd(row_of_pair: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return _sum_pairs(take(g, row) for row in row_of_pair.T).astype(g.dtype), None, None


_expand_rows.defvjp(_expand_rows_fwd, _expand_rows_bwd)


@jax.custom_vjp
def _expand_weights(weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array) -> jax.Array:
    return take(weights.reshape(-1), pair_of_row)


def _expand_weights_fwd(
    weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return take(weights.reshape(-1), pair_of_row), row_of_pair


def _expand_weights_bwd(row_of_pair: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return take(g, row_of_pair), None, None


_expand_weights.defvjp(_expand_weights_fwd, _expand_weights_bwd)


# --- reduce -----------------------------------------------------------------------------------------------------------


@_compat.named
def reduce(
    y: Annotated[jax.Array, "[capacity, H], the shape of rows.x"], rows: Expanded
) -> Annotated[jax.Array, "y.dtype [N, H]"]:
    """Sums expert outputs to one row per token: out[n] = sum over k of weights[n, k] * y[row(n, k)].

    The result has a row for each row of recv.x, from which `expand` made `rows`. Give it to `combine`. The sum is in
    float32, in the order of k, so it has the same bits on every run. No rank communicates. Differentiable in y and
    rows.weights, in reverse mode.

    Args:
        y: expert outputs in the shape of rows.x; bfloat16, float16 or float32. reduce never reads rows that hold no
            token, and their cotangents are exactly zero.
        rows: the result of expand.

    Returns:
        [N, H] in y's dtype, with N = recv.x.shape[0]. combine takes it in group.dtype only: cast it if y has another
        dtype. A row is zero if all its pairs were dropped.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> def identity(x, topk_idx, topk_weights):
        ...     recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="token")
        ...     rows = ep.expand(recv)
        ...     return ep.combine(ep.reduce(rows.x, rows), recv)
        >>> out = on_each_rank(identity)(x, topk_idx, topk_weights)
        >>> bool(jnp.allclose(out, x * jnp.sum(topk_weights, axis=1, keepdims=True), atol=0.02))
        True
    """
    if not isinstance(rows, Expanded):
        raise TypeError(f"reduce: rows, the second argument, is {_checks.kind(rows)}; it must be what expand returned")
    group = rows.group
    check_usable("reduce", group)
    capacity = len(rows.pair_of_row)
    no_cast = "fp8 rows need their scales: take jax_ep.dequantize(rows), or give dispatch dequantize=True"
    dtype = getattr(y, "dtype", None)
    allowed = dtype if dtype is not None and dtype.name in _checks.DTYPES else group.dtype
    _checks.array("reduce", "y", y, {"capacity": capacity, "H": group.hidden}, allowed, no_cast)
    _checks.array("reduce", "rows.weights", rows.weights, {"capacity": capacity}, jnp.float32)
    return _reduce(None, *_compat.vary((y, rows.weights, rows.row_of_pair, rows.pair_of_row), group.axis_names))


def _reduce_rows(static: None, y: jax.Array, weights: jax.Array, row_of_pair: jax.Array, _: jax.Array) -> jax.Array:
    terms = (take(y, row).astype(jnp.float32) * take(weights, row)[:, None] for row in row_of_pair.T)
    return _sum_pairs(terms).astype(y.dtype)


def _reduce_fwd(static: None, y: Any, weights: Any, row_of_pair: Any, pair_of_row: Any) -> tuple[jax.Array, Any]:
    needs_y = weights.perturbed
    y, weights, row_of_pair, pair_of_row = _compat.values((y, weights, row_of_pair, pair_of_row))
    out = _reduce_rows(None, y, weights, row_of_pair, pair_of_row)
    # y is as large as the worst case of routing: keep it only where the weights' gradient needs it.
    return out, (y if needs_y else None, weights, row_of_pair, pair_of_row)


def _reduce_bwd(static: None, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array | None, None, None]:
    y, weights, row_of_pair, pair_of_row = saved
    num_pairs, top_k = row_of_pair.size, row_of_pair.shape[1]
    of_rows = take(g, pair_of_row // top_k).astype(jnp.float32)  # zero in rows that hold no token
    holds_token = pair_of_row < num_pairs
    y_cotangent = jnp.where(holds_token[:, None], of_rows * weights[:, None], 0).astype(g.dtype)
    if y is None:
        return y_cotangent, None, None, None
    products = jnp.sum(of_rows * y.astype(jnp.float32), axis=-1)
    return y_cotangent, jnp.where(holds_token, products, 0), None, None


_reduce = _compat.differentiable(_reduce_rows, _reduce_fwd, _reduce_bwd)


def _sum_pairs(terms: Iterable[jax.Array]) -> jax.Array:
    """Sums the terms of each k, in the order of k, in float32."""
    total = jnp.zeros((), jnp.float32)
    for term in terms:
        total += term.astype(jnp.float32)
    return total
