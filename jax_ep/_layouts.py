"""Where a rank's received rows are in its buffer. ffi/layout.h has the same arithmetic for the kernels.

Both layouts group rows by local expert and keep the order (source rank, source token, k) inside an expert:

* "expert": `[experts_per_rank, capacity]`, each expert has `capacity` rows of its own;
* "ragged": `[capacity]`, one expert after the other, each group rounded up to `alignment` rows, as
  `jax.lax.ragged_dot` and grouped GEMMs want it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

LayoutName: TypeAlias = Literal["expert", "ragged"]  # Layout in _constants.py numbers them
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)


class Placement(NamedTuple):
    """Where each local expert's rows start and how many there are; arrays are [experts_per_rank] int32."""

    first_row: jax.Array  # row of the flattened buffer
    counts: jax.Array  # rows that are kept
    group_sizes: jax.Array  # counts, rounded up to alignment in the ragged layout
    num_dropped: jax.Array  # [] int32, rows beyond the capacity


def align_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def default_capacity(
    layout: str, *, num_ranks: int, num_tokens: int, top_k: int, experts_per_rank: int, alignment: int
) -> int:
    """The smallest capacity that never drops a row, provided that no token names an expert twice."""
    if layout == "expert":
        return num_ranks * num_tokens
    most_rows = num_ranks * num_tokens * min(top_k, experts_per_rank)
    return align_up(most_rows + experts_per_rank * (alignment - 1), alignment)


def rows_shape(layout: str, *, capacity: int, experts_per_rank: int) -> tuple[int, ...]:
    """The leading dimensions of a buffer of rows."""
    return (experts_per_rank, capacity) if layout == "expert" else (capacity,)


def place(need: jax.Array, *, layout: str, capacity: int, alignment: int) -> Placement:
    """Places `need` [experts_per_rank] int32 rows per expert; where room runs out the first rows are kept."""
    if layout == "expert":
        first_row = jnp.arange(need.shape[0], dtype=jnp.int32) * capacity
        counts = jnp.minimum(need, capacity)
        group_sizes = counts
    else:
        # A group that overflows fills the buffer, so that clipping the start of all later groups to the capacity is the
        # same as adding up the sizes that are left after dropping.
        aligned = (need + (alignment - 1)) // alignment * alignment
        first_row = jnp.minimum(jnp.cumsum(aligned, dtype=jnp.int32) - aligned, capacity)
        counts = jnp.minimum(need, capacity - first_row)
        group_sizes = jnp.minimum(aligned, capacity - first_row)
    return Placement(first_row, counts, group_sizes, jnp.sum(need - counts, dtype=jnp.int32))


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
