"""A backend for Levanter's Grug MoE: the local function that runs in its shard_map over the axis "expert".

Levanter (marin-community/marin, lib/levanter/src/levanter/grug/_moe, main of mid 2026) has a function per way to move
tokens, such as `_moe_mlp_ep_ring_local` and `_moe_mlp_ep_fixed_a2a_local`. All have the signature of
`moe_mlp_ep_jax_ep_local` without `group`. Bind the group once, and give Levanter the result:

    group = ep.Group(mesh, "expert", num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T, dtype=x.dtype)
    backend = functools.partial(moe_mlp_ep_jax_ep_local, group=group, batch_axes=("data", "expert"))

Newer versions of Levanter add the argument `token_valid_local` [T] bool. A token that is not valid names no expert:
selected_experts_local = jnp.where(token_valid_local[:, None], selected_experts_local, -1). They also return the drops
in a `MoeDispatchCounts`, by reason: rows without room are its `receiver_dropped`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_ep as ep
from integrations import swiglu


def moe_mlp_ep_jax_ep_local(
    x_local: jax.Array,
    selected_experts_local: jax.Array,
    combine_weights_local: jax.Array,
    moe_w13_local: jax.Array,
    moe_w2_local: jax.Array,
    *,
    activation_fn: Callable[[jax.Array], jax.Array],
    num_experts: int,
    capacity_factor: float,
    group: ep.Group,
    batch_axes: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The MoE layer of one device: [T, H], and the (token, k) pairs that no rank had room for, summed over all ranks.

    `batch_axes` are the mesh axes over which the batch is split, as Levanter's `_batch_axes(mesh)` has them; None means
    the group's axis alone. The number of pairs is the same on all devices of these axes.

    x_local [T, H], selected_experts_local and combine_weights_local [T, K], moe_w13_local [E_local, H, 2I] with the
    gate first, moe_w2_local [E_local, I, H]. A rank has room for capacity_factor times its share of a balanced load.
    """
    if num_experts != group.num_experts:
        raise ValueError(f"num_experts is {num_experts}; the group has {group.num_experts}")
    capacity = max(len(moe_w13_local), math.ceil(capacity_factor * selected_experts_local.size))
    recv = ep.dispatch(
        x_local,
        selected_experts_local.astype(jnp.int32),
        combine_weights_local.astype(jnp.float32),
        group=group,
        layout="ragged",
        capacity=capacity,
    )
    y = swiglu.experts(recv.x, recv.group_sizes, moe_w13_local, moe_w2_local, activation_fn)
    return ep.combine(y, recv), jax.lax.psum(recv.num_dropped, batch_axes or group.axis_name)
