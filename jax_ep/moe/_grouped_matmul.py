"""Rows grouped by expert, times one matrix per expert."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Implementation: TypeAlias = Literal["auto", "grouped", "einsum", "ragged_dot", "tokamax"]


def grouped_matmul(
    rows: Annotated[jax.Array, "[M, K]"],
    w: Annotated[jax.Array, "[G, K, N]"],
    group_sizes: Annotated[jax.Array, "int32 [G]"],
    *,
    implementation: Implementation,
) -> Annotated[jax.Array, "[M, N]"]:
    """Multiplies the rows of group g by w[g]. Rows beyond the groups are unspecified in the result.

    "einsum" takes equal groups only: each has M / G rows. "auto" is "ragged_dot".
    """
    if implementation == "einsum":
        blocks = rows.reshape(w.shape[0], rows.shape[0] // w.shape[0], rows.shape[1])
        return jnp.einsum("gmk,gkn->gmn", blocks, w).reshape(rows.shape[0], w.shape[2])
    if implementation not in ("auto", "ragged_dot"):
        raise ValueError(f"experts is {implementation!r}, which is not available; use 'auto', 'einsum' or 'ragged_dot'")
    return lax.ragged_dot(rows, w, group_sizes)
