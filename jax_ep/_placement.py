"""Exactly balanced placement: which rank computes which rows, if experts may be copied to other ranks.

R ranks, E experts, L = E / R home experts per rank, B replica slots per rank. n[e] is the number of rows that name
expert e in the whole group, and the home load of a rank is the sum over its home experts. No rank may compute more
than `limit` rows. A rank above the limit, a *donor*, gives rows away: to ranks below the limit, *receivers*, and to
the next donor.

Sort donors by excess and receivers by room, largest first; ties by rank. Put the excesses end to end on an axis, and
the rooms end to end on the same axis, cut off where the excesses end. So each receiver has an interval. It takes all
its rows from one donor: the first whose end is at or after the interval's end. A remainder that no receiver takes goes
to the next donor, which gives that many more of its own rows away. So each rank takes rows from at most one other rank,
and needs at most L copies of experts.

A donor sorts its home experts by n, largest first; ties by expert. Their rows end to end are the donor's *queue*. The
first rows of the queue go to the donor's receivers, in order, and the next rows to the next donor. The other rows stay.

Everything is sorting, running sums and comparisons of arrays [R] and [R, L]. All ranks compute the same placement.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _compat
from jax_ep._constants import TOLERANCE_UNITS_PER_ONE
from jax_ep._settings import GroupSettings

Rows = TypeVar("Rows", int, jax.Array)


class BalancedPlacement(NamedTuple):
    """Which rank computes which rows, with the copies that this needs. All ranks have the same arrays."""

    source: jax.Array
    """[R] int32: the rank from which each rank takes rows; -1 for none."""
    begin: jax.Array
    """[R] int32: the position of the first row that it takes, in the queue of `source`."""
    end: jax.Array
    """[R] int32: the position after the last row that it takes."""
    queue: jax.Array
    """[R, L] int32: the home experts of each rank in the order of its queue, as local numbers."""
    start: jax.Array
    """[R, L] int32: where each of these experts begins in the queue."""
    slot_expert: jax.Array
    """[R, B] int32: the global expert whose copy is in each replica slot; -1 for none."""
    num_rows: jax.Array
    """[R] int32: the rows that each rank computes."""
    home_rows: jax.Array
    """[R] int32: the rows of each rank's home experts."""


class PlanArrays(NamedTuple):
    """The arrays of a `Plan`, which describes them."""

    slot_expert: jax.Array
    num_rows: jax.Array
    home_rows: jax.Array
    slots: jax.Array
    topk_slot: jax.Array


def plan(group: GroupSettings, topk_idx: jax.Array, tolerance_units: int) -> PlanArrays:
    """Plans the rows of topk_idx [T, K], which names no expert where an id is outside [0, num_experts)."""
    topk_idx = _compat.vary(topk_idx, group.axis_names)
    is_valid = (topk_idx >= 0) & (topk_idx < group.num_experts)
    expert = jnp.where(is_valid, topk_idx, group.num_experts).reshape(-1)
    counts = jnp.zeros(group.num_experts, jnp.int32).at[expert].add(1, mode="drop")
    of_ranks = lax.all_gather(counts, group.axis_names)  # [R, E]
    placement = place_balanced(
        of_ranks.sum(axis=0, dtype=jnp.int32),
        num_ranks=group.num_ranks,
        num_slots=group.replicas,
        tolerance_units=tolerance_units,
    )
    rank = lax.axis_index(group.axis_names)
    before = jnp.where(jnp.arange(group.num_ranks)[:, None] < rank, of_ranks, 0).sum(axis=0, dtype=jnp.int32)
    position = before.at[expert].get(mode="fill", fill_value=0) + _earlier(expert)
    topk_slot = jnp.where(is_valid.reshape(-1), _slot_of(group, placement, expert, position), -1)
    here = partial(lax.dynamic_index_in_dim, index=rank, keepdims=False)
    return PlanArrays(
        here(placement.slot_expert),
        here(placement.num_rows),
        here(placement.home_rows),
        placement.slot_expert,
        topk_slot.reshape(topk_idx.shape),
    )


def _earlier(values: jax.Array) -> jax.Array:
    """How many of the values before each value are equal to it."""
    order = jnp.argsort(values, stable=True)
    ordered = values[order]
    index = jnp.arange(values.size, dtype=jnp.int32)
    # Not searchsorted, which fails in a shard_map that leaves automatic axes out (seen with JAX 0.10 and 0.12).
    is_first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(values).at[order].set(index - lax.cummax(jnp.where(is_first, index, 0)))


def _slot_of(group: GroupSettings, placement: BalancedPlacement, expert: jax.Array, position: jax.Array) -> jax.Array:
    """The slot, counted over all ranks, to which the row at `position` of its expert goes."""
    local = group.experts_per_rank
    home, number = expert // local, expert % local
    start = (
        jnp.zeros_like(placement.start).at[jnp.arange(group.num_ranks)[:, None], placement.queue].set(placement.start)
    )
    at = start.at[home, number].get(mode="fill", fill_value=0) + position  # in the home rank's queue
    takes = (placement.source == home[:, None]) & (placement.begin <= at[:, None]) & (at[:, None] < placement.end)
    to = jnp.argmax(takes, axis=1)
    copy = jnp.argmax(placement.slot_expert[to] == expert[:, None], axis=1) if group.replicas else 0
    moves = takes.any(axis=1)
    return jnp.where(moves, to * group.slots_per_rank + local + copy, home * group.slots_per_rank + number).astype(
        jnp.int32
    )


def limit_of(rows: Rows, tolerance_units: int) -> Rows:
    """rows + rows * tolerance_units // TOLERANCE_UNITS_PER_ONE.

    No intermediate value is larger than the result, or than TOLERANCE_UNITS_PER_ONE ** 2.
    """
    whole_rows, rest_rows = rows // TOLERANCE_UNITS_PER_ONE, rows % TOLERANCE_UNITS_PER_ONE
    whole_units, rest_units = divmod(tolerance_units, TOLERANCE_UNITS_PER_ONE)
    return rows + rows * whole_units + whole_rows * rest_units + rest_rows * rest_units // TOLERANCE_UNITS_PER_ONE


def place_balanced(needs: jax.Array, *, num_ranks: int, num_slots: int, tolerance_units: int = 0) -> BalancedPlacement:
    """Places the rows of a group.

    Args:
        needs: [E] int32, the rows that name each expert.
        num_ranks: R.
        num_slots: B, the replica slots per rank, at most L. With B = L, no rank computes more than the limit. With
            fewer slots, rows that have no slot stay with their home experts; and if a rank then has more rows than
            the busiest rank has without a plan, no row moves.
        tolerance_units: the tolerance over the mean, in units of 1 / TOLERANCE_UNITS_PER_ONE.
    """
    home = needs.reshape(num_ranks, -1)
    load = home.sum(axis=1, dtype=jnp.int32)
    limit = limit_of(-(-load.sum(dtype=jnp.int32) // num_ranks), tolerance_units)
    source, begin, end = _intervals(load, limit)
    queue = jnp.argsort(-home, axis=1, stable=True).astype(jnp.int32)
    lengths = jnp.take_along_axis(home, queue, axis=1)
    start = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
    slot_expert, end = _fill_slots(source, begin, end, queue, start, lengths, num_slots)
    taken = jnp.maximum(end - begin, 0)
    given = jnp.zeros_like(load).at[jnp.where(source >= 0, source, num_ranks)].add(taken, mode="drop")
    num_rows = load + taken - given
    moves = num_rows.max() <= load.max()
    no_source = jnp.full_like(source, -1)
    return BalancedPlacement(
        jnp.where(moves, source, no_source),
        jnp.where(moves, begin, 0),
        jnp.where(moves, end, 0),
        queue,
        start,
        jnp.where(moves, slot_expert, -1),
        jnp.where(moves, num_rows, load),
        load,
    )


def _intervals(load: jax.Array, limit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """From which rank each rank takes rows, and which part of that rank's queue."""
    num_ranks = load.shape[0]
    excess, room = jnp.maximum(load - limit, 0), jnp.maximum(limit - load, 0)
    donors, receivers = (jnp.argsort(-amount, stable=True).astype(jnp.int32) for amount in (excess, room))
    donor_end = jnp.cumsum(excess[donors], dtype=jnp.int32)
    total = donor_end[-1]
    room_end = jnp.cumsum(room[receivers], dtype=jnp.int32)
    last, first = jnp.minimum(room_end, total), jnp.minimum(room_end - room[receivers], total)
    takes = last > first
    donor = jnp.sum(donor_end < last[:, None], axis=1, dtype=jnp.int32)  # the number of each receiver's donor
    donor = jnp.minimum(donor, num_ranks - 1)
    # For each donor: the end of the last interval that it or an earlier donor serves.
    served = jnp.max(jnp.where(takes & (last <= donor_end[:, None]), last, 0), axis=1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), served[:-1]])  # where a donor's queue begins on the axis
    carry = donor_end - served
    source = jnp.full(num_ranks, -1, jnp.int32)
    begin = end = jnp.zeros(num_ranks, jnp.int32)
    to = jnp.where(takes, receivers, num_ranks)
    source = source.at[to].set(donors[donor], mode="drop")
    begin = begin.at[to].set(first - before[donor], mode="drop")
    end = end.at[to].set(last - before[donor], mode="drop")
    # A donor takes from the donor before it the remainder that no receiver takes.
    hands_on = jnp.arange(num_ranks - 1) < jnp.sum(excess > 0) - 1
    to = jnp.where(hands_on & (carry[:-1] > 0), donors[1:], num_ranks)
    source = source.at[to].set(donors[:-1], mode="drop")
    begin = begin.at[to].set(served[:-1] - before[:-1], mode="drop")
    end = end.at[to].set(served[:-1] - before[:-1] + carry[:-1], mode="drop")
    return source, begin, end


def _fill_slots(
    source: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    queue: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    num_slots: int,
) -> tuple[jax.Array, jax.Array]:
    """The expert in each replica slot, and where the interval ends if there are too few slots."""
    num_ranks, experts_per_rank = queue.shape
    at = jnp.maximum(source, 0)
    queue, start, lengths = (array[at] for array in (queue, start, lengths))  # of the rank from which each rank takes
    overlaps = (start < end[:, None]) & (start + lengths > begin[:, None]) & (source >= 0)[:, None]
    first = jnp.argmax(overlaps, axis=1)  # the experts of an interval follow one another in the queue
    number = first[:, None] + jnp.arange(num_slots)
    in_queue = jnp.minimum(number, experts_per_rank - 1)
    is_used = (number < experts_per_rank) & jnp.take_along_axis(overlaps, in_queue, axis=1)
    expert = at[:, None] * experts_per_rank + jnp.take_along_axis(queue, in_queue, axis=1)
    slot_expert = jnp.where(is_used, expert, -1).astype(jnp.int32)
    behind = jnp.take_along_axis(start + lengths, in_queue, axis=1)
    reach = jnp.max(jnp.where(is_used, behind, 0), axis=1, initial=0)
    return slot_expert, jnp.where(source >= 0, jnp.maximum(jnp.minimum(end, reach), begin), 0)
