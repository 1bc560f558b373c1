"""The layout "token": a row per token that has an expert on the rank, instead of a row per expert.

All backends move these rows as the rows of a ragged layout: each token names a rank at most once, and names the rank's
first slot. The kernels send the local experts and the weights of a row in its header. With the backends in plain JAX,
they follow along the same route, as words of 32 bits. `expand` makes the ragged layout of the rows, and `reduce` sums
the experts' outputs. Both run on one rank and move nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _checks, _compat, _layouts, _scales
from jax_ep._dispatch_options import most_rows_of
from jax_ep._group import check_usable
from jax_ep._layouts import take
from jax_ep._settings import GroupSettings
from jax_ep._types import Backend, DispatchCall, Dispatched, Expanded, Route, TokenSlots, route_of
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
def expand(
    recv: Dispatched, *, capacity: int | None = None, alignment: int = 1, zero_pad: bool | None = None
) -> Expanded:
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
        zero_pad: True zeroes the rows of x after the last group. False leaves them unspecified. None, the default,
            means True if the call is differentiated, and False otherwise.

    Returns:
        `Expanded`. All that is specified has the same bits on every run and every backend.

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
    if zero_pad is not None:
        _checks.boolean("expand", "zero_pad", zero_pad)
    capacity = _capacity(route, capacity, alignment)
    num_rows = route.capacity
    dims: dict[str, int | None] = {"capacity": num_rows, "K": group.top_k}
    _checks.array("expand", "recv.weights", recv.weights, dims, jnp.float32)

    x, weights, scales, topk_idx, num_rows_per_rank = _compat.vary(
        (recv.x, recv.weights, recv.scales, recv.topk_idx, recv.num_rows_per_rank), group.axis_names
    )
    placement, row_of_pair = _place_pairs(route, topk_idx, num_rows_per_rank, capacity, alignment)
    operands = x, row_of_pair, placement.counts, placement.group_sizes
    rows, pair_of_row = _expand_rows((route.backend, capacity, zero_pad), *operands)
    pair_of_row = lax.stop_gradient(pair_of_row)  # so JAX does not treat values computed from it as differentiated
    if scales is not None:
        scales = _scales.arrange(take(scales, pair_of_row // group.top_k), recv.scales_format)
    return Expanded(
        x=rows,
        counts=placement.counts,
        group_sizes=placement.group_sizes,
        weights=_expand_weights(weights, row_of_pair, pair_of_row),
        scales=scales,
        num_dropped=placement.num_dropped,
        row_of_pair=row_of_pair,
        pair_of_row=pair_of_row,
        backend=route.backend,
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
    num_rows, top_k = topk_idx.shape
    ends = jnp.cumsum(num_rows_per_rank, dtype=jnp.int32)
    counts = _PairCounts(topk_idx, route.num_entries)
    before_ends = counts.before(ends)  # [R, E_local]
    need = jnp.diff(before_ends, axis=0, prepend=0)
    placement = _layouts.place_rows(
        need.T,
        layout="ragged",
        capacity=capacity,
        alignment=alignment,
        first_slot=lax.axis_index(route.group.axis_name) * route.group.slots_per_rank,
        most_rows=num_rows * top_k,
    )
    kept = placement.kept.T  # [R, E_local]
    before_source = before_ends - need
    first_row = placement.first_row + jnp.cumsum(kept, axis=0, dtype=jnp.int32) - kept

    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    source = jnp.sum(row >= ends[:-1], axis=1, dtype=jnp.int32, keepdims=True)  # of each token row
    entry = source * route.num_entries + topk_idx
    is_kept = (topk_idx >= 0) & (counts.earlier < _at(before_source + kept, entry))
    return placement, jnp.where(is_kept, _at(first_row - before_source, entry) + counts.earlier, capacity)


class _PairCounts:
    """Counts, for each expert, the pairs of topk_idx [N, K] that come before a given pair or row.

    Pairs are ordered by row, then k. Cumulative sums over [N, E_local] would give the same numbers, but XLA compiles
    them to many small kernels. So this class counts inside blocks of rows, and adds the counts of all blocks before.
    """

    _BLOCK_PAIRS = 128  # a block has at most so many, or K; each pair is compared with all of its block

    def __init__(self, topk_idx: jax.Array, num_experts: int) -> None:
        num_rows, top_k = topk_idx.shape
        self._block_rows = max(self._BLOCK_PAIRS // top_k, 1)
        num_blocks = num_rows // self._block_rows + 1
        padding = ((0, num_blocks * self._block_rows - num_rows), (0, 0))
        self._idx = jnp.pad(topk_idx, padding, constant_values=-1).reshape(num_blocks, -1)  # [blocks, pairs]
        self._expert = jnp.arange(num_experts, dtype=jnp.int32)
        in_block = jnp.sum(self._idx[:, :, None] == self._expert, axis=1, dtype=jnp.int32)  # [blocks, E_local]
        self._before_block = _exclusive_sums(in_block)

        pair = jnp.arange(self._idx.shape[1], dtype=jnp.int32)
        is_earlier = (self._idx[:, None, :] == self._idx[:, :, None]) & (pair < pair[:, None])
        block = jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
        earlier = jnp.sum(is_earlier, axis=2, dtype=jnp.int32)
        earlier += _at(self._before_block, block * num_experts + self._idx)
        self.earlier = earlier.reshape(-1, top_k)[:num_rows]
        """The pairs before each pair that name the same expert: [N, K]."""

    def before(self, row: jax.Array) -> jax.Array:
        """The pairs of each expert in the rows before row [R]: [R, E_local]."""
        block = row // self._block_rows
        idx = self._idx[block]  # [R, pairs]
        num_before = row % self._block_rows * (idx.shape[1] // self._block_rows)
        is_before = jnp.arange(idx.shape[1], dtype=jnp.int32) < num_before[:, None]
        names = (idx[:, :, None] == self._expert) & is_before[:, :, None]
        return self._before_block[block] + jnp.sum(names, axis=1, dtype=jnp.int32)


def _exclusive_sums(counts: jax.Array) -> jax.Array:
    """For each block, the sum of the counts [blocks, E_local] of the blocks before it."""
    if len(counts) > 512:
        return jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    block = jnp.arange(len(counts), dtype=jnp.int32)  # few blocks: all comparisons fit in one small kernel
    return jnp.sum(jnp.where(block[:, None, None] > block[:, None], counts, 0), axis=1, dtype=jnp.int32)


def _at(table: jax.Array, entry: jax.Array) -> jax.Array:
    """Returns table.reshape(-1)[entry], in the shape of `entry`."""
    return jnp.take(table.reshape(-1), entry, mode="clip")


_ExpandSettings: TypeAlias = tuple[Backend, int, bool | None]  # the backend; capacity; zero_pad, as the caller gave it


def _expand_rows_primal(settings: _ExpandSettings, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    backend, capacity, zero_pad = settings
    return backend.expand(*operands, capacity=capacity, zero_pad=bool(zero_pad))


def _expand_rows_fwd(settings: _ExpandSettings, *operands: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    backend, capacity, zero_pad = settings
    x, row_of_pair, *others = _compat.values(operands)
    return _expand_rows_primal((backend, capacity, zero_pad is not False), x, row_of_pair, *others), row_of_pair


def _expand_rows_bwd(
    settings: _ExpandSettings, row_of_pair: jax.Array, cotangents: Any
) -> tuple[jax.Array | None, None, None, None]:
    g, _ = _compat.without_zeros(cotangents)
    return None if g is None else settings[0].reduce(g, None, row_of_pair), None, None, None


_expand_rows = _compat.differentiable(_expand_rows_primal, _expand_rows_fwd, _expand_rows_bwd)


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
    operands = _compat.vary((y, rows.weights, rows.row_of_pair, rows.pair_of_row), group.axis_names)
    return _reduce(rows.backend, *operands)


def _reduce_primal(
    backend: Backend, y: jax.Array, weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array
) -> jax.Array:
    del pair_of_row
    return backend.reduce(y, weights, row_of_pair)


def _reduce_fwd(backend: Backend, *operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    needs_y = operands[1].perturbed
    y, *others = _compat.values(operands)
    # y is as large as the worst case of routing: keep it only where the weights' gradient needs it.
    return _reduce_primal(backend, y, *others), (y if needs_y else None, *others)


def _reduce_bwd(
    backend: Backend, saved: tuple[Any, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array | None, None, None]:
    return *backend.reduce_back(g, *saved), None, None


_reduce = _compat.differentiable(_reduce_primal, _reduce_fwd, _reduce_bwd)
