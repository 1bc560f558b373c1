"""replicate in plain JAX, over collectives: for the backends without kernels, and for what the kernels do not take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _compat
from jax_ep._settings import GroupSettings


def replicate(group: GroupSettings, w: jax.Array, slots: jax.Array) -> jax.Array:
    """w [E_local, ...] or [E_local + B, ...], and the experts [R, B] in the replica slots of all ranks."""
    copies = copy_experts(group, w, slots)
    if w.shape[0] == group.slots_per_rank:
        return w.at[group.experts_per_rank :].set(copies)  # XLA writes into a donated w
    return jnp.concatenate([w, copies])


def copy_experts(group: GroupSettings, w: jax.Array, slots: jax.Array) -> jax.Array:
    """The copies alone, [B, ...]. Slots without a copy are zero."""
    local, rank = group.experts_per_rank, lax.axis_index(group.axis_names)
    number, is_here = _numbers_here(group, slots)
    mine = lax.dynamic_index_in_dim(slots, rank, keepdims=False)

    def fetch(slot: jax.Array, copies: jax.Array) -> jax.Array:
        asked = w[jnp.minimum(number[:, slot], local - 1)]  # [R, ...]: what each rank wants in this slot
        arrived = lax.all_to_all(_keep(asked, is_here[:, slot]), group.axis_names, 0, 0)
        source = jnp.maximum(mine[slot], 0) // local
        return copies.at[slot].set(arrived[source])  # zero if the slot is empty: nobody sends for it

    copies = _compat.vary((jnp.zeros((group.replicas, *w.shape[1:]), w.dtype), w), [])[0]
    return lax.fori_loop(0, _num_used_slots(slots), fetch, copies)


def add_copies(group: GroupSettings, g: jax.Array, copies: jax.Array, slots: jax.Array) -> jax.Array:
    """Adds the gradients of copies [B, ...] to those of the home experts, g [E_local, ...]."""
    local, rank = group.experts_per_rank, lax.axis_index(group.axis_names)
    number, _ = _numbers_here(group, slots)
    mine = lax.dynamic_index_in_dim(slots, rank, keepdims=False)

    def add_slot(slot: jax.Array, total: jax.Array) -> jax.Array:
        goes = (jnp.arange(group.num_ranks) == mine[slot] // local) & (mine[slot] >= 0)  # to the home of the copy
        copy = jnp.broadcast_to(copies[slot], (group.num_ranks, *g.shape[1:]))
        arrived = lax.all_to_all(_keep(copy, goes), group.axis_names, 0, 0)  # [R, ...]: this slot of each rank

        def add_rank(rank: jax.Array, total: jax.Array) -> jax.Array:
            return total.at[number[rank, slot]].add(arrived[rank].astype(jnp.float32), mode="drop")

        return lax.fori_loop(0, group.num_ranks, add_rank, total)

    return lax.fori_loop(0, _num_used_slots(slots), add_slot, g.astype(jnp.float32)).astype(g.dtype)


def _num_used_slots(slots: jax.Array) -> jax.Array:
    """Slots that any rank uses. The number is the same on all ranks of the group, so collectives may run so often."""
    return jnp.sum(slots >= 0, axis=1, dtype=jnp.int32).max()


def _numbers_here(group: GroupSettings, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each slot [R, B]: its expert's local number, E_local if the home is another rank; and whether it is here."""
    local = group.experts_per_rank
    number = slots - lax.axis_index(group.axis_names) * local
    is_here = (number >= 0) & (number < local)
    return jnp.where(is_here, number, local), is_here


def _keep(array: jax.Array, mask: jax.Array) -> jax.Array:
    """`array` where `mask`, of its leading dimensions, is True; else zero."""
    mask = mask.reshape(*mask.shape, *[1] * (array.ndim - mask.ndim))
    return jnp.where(mask, array, jnp.zeros((), array.dtype))
