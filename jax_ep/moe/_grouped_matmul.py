"""Matrix multiplication for ragged groups of rows: each group of rows is multiplied by its own expert's weights."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _checks, _compat, _native

Implementation: TypeAlias = Literal["grouped", "einsum", "ragged_dot", "tokamax"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
_OP = "grouped_matmul"
TARGET = "jax_ep_grouped_matmul"  # the FFI target of the implementation "grouped"


def grouped_matmul(
    rows: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: Implementation,
    copies: jax.Array | None = None,
    leaves_empty_copies: bool = False,
) -> jax.Array:
    """Multiplies each group of rows by the weights of its group. The device knows the groups' sizes, the host does not.

    The shape of `rows` says where the groups are:

    - [M, K], ragged: the rows of group 0 come first, then the rows of group 1, and so on, without gaps. This is the
      layout "ragged" of `jax_ep.dispatch`.
    - [G, C, K], padded: the rows of group g are rows[g, :group_sizes[g]]. This is the layout "expert".

    All other rows are *beyond the groups*. The result is unspecified in the rows beyond the groups, and may be NaN
    there. Rows beyond the groups, whatever they hold, contribute nothing to any gradient, and their own gradient is
    zero.

    The weights may be in two arrays: `w` has the weights of the first groups, `copies` the weights of the other groups.
    The implementation "grouped" reads both arrays in place, and writes their gradients to two arrays. The other
    implementations join the arrays first.

    | implementation | rows | dtypes |
    | --- | --- | --- |
    | "grouped" | ragged or padded | bfloat16, float16 |
    | "einsum" | padded | any |
    | "ragged_dot" | ragged | any |
    | "tokamax" | ragged | bfloat16, float16 |

    - "grouped" is CUTLASS's grouped GEMM, on Hopper GPUs. It neither reads nor writes rows beyond the groups, but for
      the zeros of their gradient. K and N must be multiples of 8.
    - "einsum" is one batched matrix multiplication, which multiplies the rows beyond the groups, too.
    - "ragged_dot" is `jax.lax.ragged_dot`. XLA multiplies every row by the weights of every group, except on a GPU with
      cuDNN 9.22 or newer, where only the gradient of w does.
    - "tokamax" is `tokamax.ragged_dot`, and needs that package.

    Args:
        rows: [M, K] or [G, C, K]; bfloat16, float16 or float32.
        w: [G, K, N], of the dtype of `rows`; with `copies`, [G1, K, N], at least one group.
        group_sizes: [G] int32, on the device: the number of rows of each group, at least 0. Their sum must not exceed
            M, and no size may exceed C; surplus rows are beyond the groups.
        implementation: see the table.
        copies: [G2, K, N], the weights of the last G2 of G = G1 + G2 groups, of the dtype of `rows`; or None.
        leaves_empty_copies: whether the gradient of `copies` may be unspecified in groups without rows. "grouped" then
            writes no zeros there.

    Returns:
        [M, N] or [G, C, N], of the dtype of `rows`. Sums are accumulated in float32.

    Raises:
        TypeError: the dtype of an argument does not fit.
        ValueError: a shape does not fit, or the implementation cannot multiply these arrays or is not installed.

    Differentiable in rows, w and copies, in reverse mode.

    Examples:
        >>> rows, w = jnp.ones((8, 4)), jnp.ones((2, 4, 3))
        >>> grouped_matmul(rows, w, jnp.array([5, 1], jnp.int32), implementation="ragged_dot")[:6].shape
        (6, 3)
    """
    _check(rows, w, copies, group_sizes, implementation)
    weights = (w,) if copies is None else (w, copies)
    rows, weights, group_sizes = _compat.vary((rows, weights, group_sizes), ())
    if implementation == "grouped":
        return _grouped(leaves_empty_copies, rows, weights, group_sizes)
    w = jnp.concatenate(weights)
    if implementation == "einsum":
        return _einsum(rows, w, group_sizes)
    ragged = _ragged_dot if implementation == "ragged_dot" else _tokamax
    return ragged(rows, w, group_sizes)


def _check(
    rows: jax.Array, w: jax.Array, copies: jax.Array | None, group_sizes: jax.Array, implementation: str
) -> None:
    _checks.choice(f"{_OP}: implementation", implementation, IMPLEMENTATIONS)
    dtype = _checks.dtype(f"{_OP}: the dtype of rows", getattr(rows, "dtype", None))
    if rows.ndim not in (2, 3):
        raise ValueError(f"{_OP}: rows has shape {rows.shape}; it must be [M, K] or [G, C, K]")
    _check_weights(w, copies, rows.shape[-1], dtype)
    num_groups = w.shape[0] + (0 if copies is None else copies.shape[0])
    if rows.ndim == 3 and rows.shape[0] != num_groups:
        raise ValueError(
            f"{_OP}: rows has shape {rows.shape}; it must be [G, C, K] with G = {num_groups}, the number of groups of w"
            f"{'' if copies is None else ' and copies'}"
        )
    _checks.array(_OP, "group_sizes", group_sizes, {"G": num_groups}, jnp.int32)
    layout = "[G, C, K]" if rows.ndim == 3 else "[M, K]"
    if implementation == "einsum" and rows.ndim == 2:
        raise ValueError(
            f'{_OP}: implementation="einsum" needs rows [G, C, K], the layout "expert" of dispatch; rows is {layout}'
        )
    if implementation in ("ragged_dot", "tokamax") and rows.ndim == 3:
        raise ValueError(
            f'{_OP}: implementation="{implementation}" needs rows [M, K], the layout "ragged" of dispatch; '
            f'rows is {layout}: use "einsum" or "grouped"'
        )
    if implementation == "grouped" and (reason := no_grouped_reason(rows.dtype, w.shape[1:])):
        raise ValueError(
            f'{_OP}: implementation="grouped" cannot multiply these arrays: {reason}; use "einsum" or "ragged_dot"'
        )
    if implementation == "tokamax" and importlib.util.find_spec("tokamax") is None:
        raise ValueError(f'{_OP}: implementation="tokamax" needs the package tokamax; install it, or use "ragged_dot"')


def _check_weights(w: jax.Array, copies: jax.Array | None, num_channels: int, dtype: np.dtype) -> None:
    _checks.array(_OP, "w", w, {"G": None, "K": None, "N": None}, dtype)
    if not w.shape[0]:
        raise ValueError(f"{_OP}: w has shape {w.shape}; it must have at least one group")
    if w.shape[1] != num_channels:
        raise ValueError(f"{_OP}: w has shape {w.shape}; it must be [G, K, N], and rows has K = {num_channels}")
    if copies is None:
        return
    _checks.array(_OP, "copies", copies, {"G2": None, "K": None, "N": None}, dtype)
    if copies.shape[1:] != w.shape[1:]:
        raise ValueError(
            f"{_OP}: copies has shape {copies.shape}; it must be [G2, K, N], and w has K = {w.shape[1]} and "
            f"N = {w.shape[2]}"
        )


# --- einsum ---------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def _einsum(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.einsum("gck,gkn->gcn", rows, w)


def _einsum_forward(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> Any:
    return _einsum(rows, w, group_sizes), (rows, w, group_sizes)


def _einsum_backward(residuals: Any, dy: jax.Array) -> Any:
    rows, w, group_sizes = residuals
    # Both operands need the zeros: a NaN in one of them times a zero of the other would be NaN.
    rows, dy = (_zero_beyond(array, group_sizes) for array in (rows, dy))
    return jnp.einsum("gcn,gkn->gck", dy, w), jnp.einsum("gck,gcn->gkn", rows, dy), None


_einsum.defvjp(_einsum_forward, _einsum_backward)


def _zero_beyond(array: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`array` with zeros in the rows beyond the groups."""
    if array.ndim == 3:
        is_valid = jnp.arange(array.shape[1], dtype=jnp.int32)[None] < group_sizes[:, None]
    else:
        is_valid = jnp.arange(array.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(is_valid[..., None], array, jnp.zeros((), array.dtype))


# --- ragged_dot and tokamax -----------------------------------------------------------------------------------------


@jax.custom_vjp
def _rows_with_gradient_in_groups(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`rows`; its gradient gets zeros beyond the groups."""
    return rows


_rows_with_gradient_in_groups.defvjp(
    lambda rows, group_sizes: (rows, group_sizes), lambda group_sizes, dy: (_zero_beyond(dy, group_sizes), None)
)


def _ragged_dot(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    # XLA documents no gradient of the rows beyond the groups, and has several kernels.
    return jax.lax.ragged_dot(_rows_with_gradient_in_groups(rows, group_sizes), w, group_sizes)


def _tokamax(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    import tokamax

    return tokamax.ragged_dot(_rows_with_gradient_in_groups(rows, group_sizes), w, group_sizes)


# --- grouped --------------------------------------------------------------------------------------------------------


class _Product(enum.IntEnum):
    """GroupedProduct in ffi/cuda/grouped_matmul/grouped_matmul.h."""

    FORWARD = 0
    ROWS_GRADIENT = 1
    WEIGHTS_GRADIENT = 2


_NATIVE_DTYPES = ("bfloat16", "float16")
_ALIGNMENT = 8  # elements: TMA needs 16 bytes


def no_grouped_reason(dtype: Any, channels: Iterable[int], devices: Iterable[Any] = ()) -> str | None:
    """Why the grouped GEMM cannot multiply arrays with these numbers of channels on these devices; None if it can."""
    if reason := _native.grouped_matmul_reason(devices):
        return reason
    if dtype.name not in _NATIVE_DTYPES:
        return f"the dtype is {dtype.name}, and must be one of {', '.join(_NATIVE_DTYPES)}"
    for number in channels:
        if number % _ALIGNMENT or not number:
            return f"{number} channels are not a multiple of {_ALIGNMENT}"
    return None


_Weights: TypeAlias = tuple[jax.Array, ...]  # w, or w and copies


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(leaves_empty_copies: bool, rows: jax.Array, weights: _Weights, group_sizes: jax.Array) -> jax.Array:
    shape = (*rows.shape[:-1], weights[0].shape[2])
    return _native_product(_Product.FORWARD, (rows, *weights), group_sizes, [shape])[0]


def _grouped_forward(
    leaves_empty_copies: bool, rows: jax.Array, weights: _Weights, group_sizes: jax.Array
) -> tuple[jax.Array, Any]:
    return _grouped(leaves_empty_copies, rows, weights, group_sizes), (rows, weights, group_sizes)


def _grouped_backward(leaves_empty_copies: bool, residuals: Any, dy: jax.Array) -> Any:
    rows, weights, group_sizes = residuals
    (d_rows,) = _native_product(_Product.ROWS_GRADIENT, (dy, *weights), group_sizes, [rows.shape])
    shapes = [w.shape for w in weights]
    d_weights = _native_product(_Product.WEIGHTS_GRADIENT, (rows, dy), group_sizes, shapes, leaves_empty_copies)
    return d_rows, d_weights, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _native_product(
    product: _Product,
    operands: Sequence[jax.Array],
    group_sizes: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    leaves_empty_copies: bool = False,
) -> tuple[jax.Array, ...]:
    """One product of ffi/cuda/grouped_matmul/grouped_matmul.h.

    Args:
        operands: lhs, rhs and, for FORWARD and ROWS_GRADIENT, the copies if there are any.
        shapes: of the result and, for WEIGHTS_GRADIENT, of the gradient of the copies if there are any.
    """
    native = _native.grouped_matmul
    assert native is not None
    lhs, rhs, *copies = operands
    out, *out_copies = (_compat.result_type(lhs, shape, lhs.dtype) for shape in shapes)
    workspace = _compat.result_type(lhs, (native.workspace_bytes(group_sizes.shape[0]),), jnp.uint8)
    call = jax.ffi.ffi_call(TARGET, (out, workspace, *out_copies), vmap_method="sequential")
    attributes = {"product": np.int32(product), "leaves_empty_copies": leaves_empty_copies}
    found, _, *found_copies = call(lhs, rhs, group_sizes, *copies, **attributes)
    return found, *found_copies
