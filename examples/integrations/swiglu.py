"""SwiGLU experts, as the integrations of this folder and their tests share them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def experts(
    rows: jax.Array, group_sizes: jax.Array, w13: jax.Array, w2: jax.Array, activation: Activation = jax.nn.silu
) -> jax.Array:
    """Each local expert on its rows: [capacity, H]. w13 [E_local, H, 2I] has the gate first; w2 is [E_local, I, H]."""
    gate, up = jnp.split(jax.lax.ragged_dot(rows, w13, group_sizes), 2, axis=-1)
    return jax.lax.ragged_dot(activation(gate) * up, w2, group_sizes)


def dense(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    activation: Activation = jax.nn.silu,
) -> jax.Array:
    """The same layer on one device, with every expert on every token. The tests compare each integration with it."""
    gate, up = jnp.split(jnp.einsum("th,ehi->tei", x, w13), 2, axis=-1)
    outputs = jnp.einsum("tei,eih->teh", activation(gate) * up, w2)
    gates = jnp.einsum("tk,tke->te", topk_weights, jax.nn.one_hot(topk_idx, len(w13)))
    return jnp.einsum("te,teh->th", gates, outputs)
