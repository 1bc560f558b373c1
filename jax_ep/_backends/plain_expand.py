"""expand and reduce in plain JAX: for the backends without kernels."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jax_ep import _compat
from jax_ep._layouts import take


def expand(x: jax.Array, row_of_pair: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Copies x [N, H] to the rows of its pairs. Returns the rows [capacity, H] and pair_of_row [capacity].

    Rows without a pair are zero.
    """
    pairs = jnp.arange(row_of_pair.size, dtype=jnp.int32).reshape(row_of_pair.shape)
    none = _compat.vary((jnp.full(capacity, row_of_pair.size, jnp.int32), row_of_pair), ())[0]
    pair_of_row = none.at[row_of_pair].set(pairs, mode="drop")
    return take(x, pair_of_row // row_of_pair.shape[1]), pair_of_row


def reduce(y: jax.Array, weights: jax.Array | None, row_of_pair: jax.Array) -> jax.Array:
    """Sums the rows of each token's pairs, times their weights: y [capacity, H] to [N, H]."""
    rows = row_of_pair.T
    if weights is None:
        return _sum(take(y, row).astype(jnp.float32) for row in rows).astype(y.dtype)
    return _sum(take(y, row).astype(jnp.float32) * take(weights, row)[:, None] for row in rows).astype(y.dtype)


def reduce_back(
    g: jax.Array, y: jax.Array | None, weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The backward pass of `reduce`: `Backend.reduce_back` describes it."""
    g_rows = take(g, pair_of_row // row_of_pair.shape[1]).astype(jnp.float32)  # zero in rows without a pair
    has_pair = pair_of_row < row_of_pair.size
    y_cotangent = jnp.where(has_pair[:, None], g_rows * weights[:, None], 0).astype(g.dtype)
    if y is None:
        return y_cotangent, None
    products = jnp.sum(g_rows * y.astype(jnp.float32), axis=-1)
    return y_cotangent, jnp.where(has_pair, products, 0)


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    """Sums the terms of each k, in the order of k."""
    total = jnp.zeros((), jnp.float32)
    for term in terms:
        total += term
    return total
