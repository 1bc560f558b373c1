"""`grouped_matmul` for programs in which `jax.lax.ragged_dot` does not work: under vmap, and beside explicit axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jax_ep import _compat
from jax_ep.moe._grouped_matmul import Implementation, grouped_matmul

# JAX's `ragged_dot` has no rule for vmap with weights that all elements share, and no rule for explicit axes. tokamax
# calls it where it has no kernel of its own.
_LACKS_RULES = ("ragged_dot", "tokamax")


def portable_matmul(
    rows: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: Implementation,
    copies: jax.Array | None = None,
    leaves_empty_copies: bool = False,
) -> jax.Array:
    """`grouped_matmul` that also works under vmap, and in a shard_map that leaves explicit axes out.

    The implementations "ragged_dot" and "tokamax" run once per element of a vmap, in order, as the operations do.
    Operands must vary over the same mesh axes, and must not be sharded over explicit axes (`_compat.vary`).
    """
    if implementation in _LACKS_RULES:
        # The join is outside of `_one_by_one`: JAX 0.10.2 does not lower its gradient inside `over_explicit_axes`.
        weights = w if copies is None else jnp.concatenate((w, copies))
        return _one_by_one(implementation, rows, weights, group_sizes)
    return grouped_matmul(
        rows, w, group_sizes, implementation=implementation, copies=copies, leaves_empty_copies=leaves_empty_copies
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_by_one(implementation: Implementation, rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return sequential_vmap(_matmul(implementation))(rows, w, group_sizes)


_Residuals: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    implementation: Implementation, rows: jax.Array, w: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, _Residuals]:
    return _one_by_one(implementation, rows, w, group_sizes), (rows, w, group_sizes)


def _backward(
    implementation: Implementation, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    matmul = _matmul(implementation)

    @sequential_vmap
    def gradients(rows: jax.Array, w: jax.Array, group_sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, transpose = jax.vjp(lambda rows, w: matmul(rows, w, group_sizes), rows, w)
        return transpose(dy)

    return *gradients(*residuals, dy), None


_one_by_one.defvjp(_forward, _backward)


def _matmul(implementation: Implementation) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    return _compat.over_explicit_axes(partial(grouped_matmul, implementation=implementation))
