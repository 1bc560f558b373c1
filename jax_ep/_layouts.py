"""Where a rank's received rows are in its buffer. ffi/layout.h has the same arithmetic for the kernels.

Two layouts group rows by local expert and keep the order (source rank, source token, k) inside an expert:

* "expert": `[experts_per_rank, capacity]`, each expert has `capacity` rows of its own;
* "ragged": `[capacity]`, one expert after the other, each group rounded up to `alignment` rows, as
  `jax.lax.ragged_dot` and grouped GEMMs want it.

The third layout has one group per rank, in which a token has one row:

* "token": `[capacity]`, in the order (source rank, source token). `_token_layout.py` describes it. The functions below
  place its rows as a ragged group of the rank's first expert.

If there is too little room, the experts share it, and the sources share the room of each expert (`fill`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _checks, _compat

LayoutName: TypeAlias = Literal["expert", "ragged", "token"]  # Layout in _constants.py numbers them
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)


class RowPlacement(NamedTuple):
    """Where the rows of each local expert are in a rank's buffer, and which rows are kept. All arrays are int32.

    Replica slots count as local experts: with them, read E_local + B for E_local.
    """

    first_row: jax.Array  # [E_local], row of the flattened buffer
    counts: jax.Array  # [E_local], rows that are kept
    group_sizes: jax.Array  # [E_local], counts, rounded up to alignment except in the expert layout
    kept: jax.Array  # [E_local, R], rows that are kept of each source rank
    num_dropped: jax.Array  # [], rows that did not fit


def align_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def most_rows(layout: str, *, num_ranks: int, num_tokens: int, top_k: int, experts_per_rank: int) -> int:
    """The most rows that a rank (or, in the layout "expert", an expert) gets if no token names an expert twice."""
    return num_ranks * num_tokens * (min(top_k, experts_per_rank) if layout == "ragged" else 1)


def capacity_for(layout: str, rows: int, *, num_groups: int, alignment: int) -> int:
    """The smallest capacity that holds `rows` rows in any `num_groups` groups."""
    return align_up(rows + num_groups * (alignment - 1), alignment) if layout == "ragged" else rows


def default_capacity(
    layout: str, *, num_ranks: int, num_tokens: int, top_k: int, experts_per_rank: int, alignment: int
) -> int:
    """The smallest capacity that never drops a row, provided that no token names an expert twice."""
    rows = most_rows(layout, num_ranks=num_ranks, num_tokens=num_tokens, top_k=top_k, experts_per_rank=experts_per_rank)
    return capacity_for(layout, rows, num_groups=experts_per_rank, alignment=alignment)


def rows_shape(layout: str, *, capacity: int, experts_per_rank: int) -> tuple[int, ...]:
    """The leading dimensions of a buffer of rows."""
    return (experts_per_rank, capacity) if layout == "expert" else (capacity,)


def capacity_of_factor(
    layout: str, factor: float, *, num_tokens: int, top_k: int, experts_per_rank: int, alignment: int
) -> int:
    """The capacity of `factor` times the rows that a balanced router sends, rounded up to alignment.

    A balanced router sends T * K pairs (token, k) to each rank, and T * K / E_local pairs to each expert. In the layout
    "token", this counts a row for each pair, though pairs of one token share a row.
    """
    # As the decimal number that the caller wrote: 1.1 * 10 rows are 11 rows, not 12.
    rows = Fraction(str(factor)) * num_tokens * top_k
    return align_up(math.ceil(rows / experts_per_rank if layout == "expert" else rows), alignment)


def fill(need: jax.Array, room: jax.Array | int, start: jax.Array | int = 0) -> jax.Array:
    """Shares `room` fairly: each entry of the last axis of `need` [..., N] keeps min(need, level).

    The level is the highest that fits. What is left over goes one each to the entries that want more, beginning at
    entry `start` and going round. `room` and `start` have the leading axes of `need`, or are scalars.
    """
    num, index = need.shape[-1], lax.broadcasted_iota(jnp.int32, need.shape, need.ndim - 1)
    room = jnp.broadcast_to(jnp.asarray(room, jnp.int32), need.shape[:-1])[..., None]
    start = jnp.broadcast_to(jnp.asarray(start, jnp.int32), need.shape[:-1])[..., None]
    # For each i: keep the i smallest needs whole, and give each of the others `level` rows. These rows are at least
    # sum(min(need, level)), and exactly that for one i. So a level fits if it fits for one i at least.
    ascending = jnp.sort(need, axis=-1)
    below = jnp.cumsum(ascending, axis=-1, dtype=jnp.int32) - ascending
    level = jnp.max((room - below) // (num - index), axis=-1, keepdims=True)
    kept = jnp.minimum(need, level)
    wants_more = (need > level).astype(jnp.int32)
    wanting = jnp.cumsum(wants_more, axis=-1, dtype=jnp.int32)  # entries that want more, through each one
    before_start = jnp.sum(jnp.where(index < start, wants_more, 0), axis=-1, keepdims=True, dtype=jnp.int32)
    turn = wanting - 1 - before_start + jnp.where(index < start, wanting[..., -1:], 0)
    left_over = room - jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32)
    return kept + jnp.where(turn < left_over, wants_more, 0)


def place_rows(
    need: jax.Array,
    *,
    layout: str,
    capacity: int,
    alignment: int,
    first_slot: jax.Array | int = 0,
    most_rows: int = _checks.MAX_INT32,
) -> RowPlacement:
    """Places need [E_local, R] rows, from each source rank for each local expert, and shares too little room fairly.

    `first_slot` is the number of the rank's first slot, counted over all ranks. Without replicas, it is the id of the
    rank's first expert. It decides which source rank is the first to get room that equal shares leave over. In the
    layout "token", that is rank 0. `most_rows` is an upper bound on the sum of `need`. In the ragged layout, if so many
    rows fit, no row can be dropped: the code that shares the room is left out, so XLA compiles fewer kernels.
    """
    num_rows = jnp.sum(need, axis=1, dtype=jnp.int32)
    num_slots, num_ranks = need.shape
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    if layout == "ragged" and capacity >= capacity_for(layout, most_rows, num_groups=num_slots, alignment=alignment):
        group_sizes = -(-num_rows // alignment) * alignment
        first_row = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
        return RowPlacement(first_row, num_rows, group_sizes, need, jnp.zeros_like(num_rows[0]))
    if layout == "expert":
        first_row = slots * capacity
        counts = jnp.minimum(num_rows, capacity)
        group_sizes = counts
    else:
        tiles = fill(-(-num_rows // alignment), capacity // alignment)
        group_sizes = tiles * alignment
        counts = jnp.minimum(num_rows, group_sizes)
        first_row = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    kept = fill(need, counts, 0 if layout == "token" else (first_slot + slots) % num_ranks)
    return RowPlacement(first_row, counts, group_sizes, kept, jnp.sum(num_rows - counts, dtype=jnp.int32))


def row_expert(group_sizes: jax.Array, *, layout: str, capacity: int) -> jax.Array:
    """The local expert of each row that `group_sizes` covers, and -1 elsewhere: int32, shaped as `rows_shape`."""
    expert = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    row = jnp.arange(capacity, dtype=jnp.int32)
    if layout == "expert":
        return jnp.where(row < group_sizes[:, None], expert[:, None], -1)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    # The number of groups that end at or before the row: comparisons, which XLA fuses, in place of a search.
    ended = jnp.sum(row[:, None] >= ends, axis=1, dtype=jnp.int32)
    return jnp.where(row < ends[-1], ended, -1)


class Blocks(NamedTuple):
    """Rows sorted by expert, cut into one block per rank."""

    splits: jax.Array  # [R, E_local] int32, rows for each expert
    sizes: jax.Array  # [R] int32, rows for each rank
    first_row: jax.Array  # [R] int32


def split_blocks(splits: jax.Array, num_rows: int, num_ranks: int) -> Blocks:
    """Cuts num_rows rows by splits [E]; experts get rows in order until there are none left."""
    # Clipped before the sum, too, which would overflow.
    ends = jnp.minimum(jnp.cumsum(jnp.clip(splits, 0, num_rows), dtype=jnp.int32), num_rows)
    splits = jnp.diff(ends, prepend=0).reshape(num_ranks, -1)
    sizes = jnp.sum(splits, axis=1, dtype=jnp.int32)
    return Blocks(splits, sizes, jnp.cumsum(sizes, dtype=jnp.int32) - sizes)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], and zero if the index is one past the end."""
    if x.shape[0] == 0:
        zeros = jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
        return _compat.vary((zeros, x, index), ())[0]
    return x.at[index].get(mode="fill", fill_value=0)
