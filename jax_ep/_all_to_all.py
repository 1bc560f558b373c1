"""all_to_all: exchange rows that the caller has already sorted by expert."""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp

from jax_ep import _checks, _compat
from jax_ep._group import Group, check_usable
from jax_ep._types import AllToAll
from jax_ep._wires import Wire


@_compat.named
def all_to_all(
    x: Annotated[jax.Array, "group.dtype [M, H]"],
    splits: Annotated[jax.Array, "int32 [E]"],
    *,
    group: Group,
    wire: Wire | None = None,
    dequantize: bool = True,
) -> AllToAll:
    """Sends rows that are already sorted by expert. Differentiable in x, in reverse mode.

    Args:
        x: [M, H] in group.dtype: first the rows for expert 0, then the rows for expert 1, and so on. M is static, the
            same on all ranks, and at most group.max_tokens_per_rank.
        splits: [E] int32, the number of rows for each expert. If their sum is less than M, the rows beyond the sum are
            not sent. If it is more, experts get rows in order until all M rows are used; the received splits show this.
        group: the `Group`.
        wire: None sends rows in group.dtype. "fp8" and "fp8_pow2" cast rows as in `dispatch`.
        dequantize: True converts fp8 rows to group.dtype on arrival. False returns fp8 rows and their scales; such a
            call cannot be differentiated.

    Returns:
        `AllToAll`.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        TypeError: a call that returns fp8 rows is differentiated.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> splits = jnp.zeros((R, E), jnp.int32).at[:, 0].set(T).reshape(-1)  # each rank sends its rows to expert 0
        >>> def rows_received(x, splits):
        ...     return jnp.sum(ep.all_to_all(x, splits, group=group).splits)[None]
        >>> on_each_rank(rows_received)(x, splits).tolist() == [R * T] + (R - 1) * [0]
        True
    """
    check_usable("all_to_all", group)
    _checks.array("all_to_all", "x", x, {"M": None, "H": group.hidden}, group.dtype)
    _checks.num_rows("all_to_all", "M", x.shape[0], group.max_tokens_per_rank)
    _checks.array("all_to_all", "splits", splits, {"E": group.num_experts}, jnp.int32)
    _checks.wire("all_to_all", wire, group.hidden)
    _checks.boolean("all_to_all", "dequantize", dequantize)
    return _all_to_all((group, wire, dequantize), *_compat.vary((x, splits), group.axis_names))


@_compat.named
def all_to_all_back(
    y: Annotated[jax.Array, "group.dtype [R, M, H]"], splits: Annotated[jax.Array, "int32 [E]"], *, group: Group
) -> Annotated[jax.Array, "group.dtype [M, H]"]:
    """Returns rows to the rank and position from which `all_to_all` sent them: its inverse, and its gradient.

    Differentiable in y, in reverse mode.

    Args:
        y: [R, M, H] in group.dtype, in the layout of AllToAll.x.
        splits: [E] int32, the splits that this rank passed to `all_to_all`.
        group: the `Group`.

    Returns:
        [M, H]. Rows beyond the sum of splits are zero.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> splits = jnp.zeros((R, E), jnp.int32).at[:, 0].set(T).reshape(-1)
        >>> def there_and_back(x, splits):
        ...     recv = ep.all_to_all(x, splits, group=group)
        ...     return ep.all_to_all_back(recv.x, splits, group=group)
        >>> bool(jnp.all(on_each_rank(there_and_back)(x, splits) == x))
        True
    """
    check_usable("all_to_all_back", group)
    _checks.array("all_to_all_back", "y", y, {"R": group.num_ranks, "M": None, "H": group.hidden}, group.dtype)
    _checks.num_rows("all_to_all_back", "M", y.shape[1], group.max_tokens_per_rank)
    _checks.array("all_to_all_back", "splits", splits, {"E": group.num_experts}, jnp.int32)
    return _all_to_all_back(group, *_compat.vary((y, splits), group.axis_names))


_Static: TypeAlias = tuple[Group, Wire | None, bool]  # group, wire, dequantize


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_to_all(static: _Static, x: jax.Array, splits: jax.Array) -> AllToAll:
    group, wire, dequantize = static
    return group._backend_for(x.shape[0]).all_to_all(x, splits, wire, dequantize=dequantize, zero_pad=False)


def _all_to_all_fwd(static: _Static, x: jax.Array, splits: jax.Array) -> tuple[AllToAll, jax.Array]:
    _, wire, dequantize = static
    if wire is not None and not dequantize:
        raise TypeError(
            f"all_to_all: fp8 rows cannot be differentiated (wire is {wire!r}); use dequantize=True or wire=None"
        )
    return _all_to_all(static, x, splits), splits


def _all_to_all_bwd(static: _Static, splits: jax.Array, g: AllToAll) -> tuple[jax.Array, None]:
    return _all_to_all_back(static[0], g.x, splits), None


_all_to_all.defvjp(_all_to_all_fwd, _all_to_all_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_to_all_back(group: Group, y: jax.Array, splits: jax.Array) -> jax.Array:
    return group._backend_for(y.shape[1]).all_to_all_back(y, splits)


def _all_to_all_back_fwd(group: Group, y: jax.Array, splits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _all_to_all_back(group, y, splits), splits


def _all_to_all_back_bwd(group: Group, splits: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    # What lies beyond the splits was never read: its cotangent is zero.
    return group._backend_for(g.shape[0]).all_to_all(g, splits, None, dequantize=True, zero_pad=True).x, None


_all_to_all_back.defvjp(_all_to_all_back_fwd, _all_to_all_back_bwd)
