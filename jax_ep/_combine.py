"""combine: bring the expert outputs back and sum them with the router's weights."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jax_ep import _checks, _compat
from jax_ep._group import check_usable
from jax_ep._split_calls import BackwardCall, Pending, check_compiled, check_pending
from jax_ep._types import Dispatched, Route, route_of
from jax_ep._wires import GRAD_WIRES, GradWire, Wire


@_compat.named
def combine(
    y: Annotated[jax.Array, "group.dtype, the shape of recv.x"],
    recv: Dispatched,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    wire: Wire | None = None,
    grad_wire: GradWire | None = None,
) -> Annotated[jax.Array, "out_dtype [T, H]"]:
    """Brings expert outputs back to their tokens and sums them: out[t] = sum over k of weights[t, k] * y[row(t, k)].

    Each rank that holds experts of a token sums its rows of the token in float32. It sends the sum back as one row, in
    y's dtype, or in the format of wire. The token's own rank sums these rows in float32, in a fixed order, so the
    result has the same bits on every run.
    Differentiable in y and recv.weights, in reverse mode.

    In the layout "token", the sum has no weights: out[t] is the sum of the token's rows of y over ranks. The caller
    multiplies by the weights, as `reduce` does. The cotangent of recv.weights is zero.

    Args:
        y: expert outputs in the shape of recv.x and the group's dtype. combine never reads rows that hold no token, and
            their cotangents are exactly zero.
        recv: the result of dispatch.
        out_dtype: bfloat16, float16 or float32; None means y's dtype.
        wire: the format in which the ranks' sums travel. None sends them in y's dtype. "fp8" casts each float32 sum to
            float8_e4m3fn with one float32 scale per 128 channels. "fp8_pow2" does the same with scales that are powers
            of two. Both formats need group.hidden to be a multiple of 16. The token's own rank keeps its sum in
            float32. The gradient ignores this rounding.
        grad_wire: the format in which the cotangent of the result travels in the backward pass. None sends it in the
            group's dtype. "fp8" and "fp8_pow2" cast as for wire, and "fp8_e5m2" casts to float8_e5m2. All rows are
            cast, also those that stay on their rank.

    Returns:
        [T, H] in out_dtype. If all rows of a token were dropped, its result is zero.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> def identity(x, topk_idx, topk_weights):
        ...     recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
        ...     return ep.combine(recv.x, recv, out_dtype="float32")
        >>> out = on_each_rank(identity)(x, topk_idx, topk_weights)
        >>> bool(jnp.allclose(out, x * jnp.sum(topk_weights, axis=1, keepdims=True), atol=0.02))
        True
    """
    options, *operands = _prepare("combine", y, recv, out_dtype, wire, grad_wire)
    return _combine(options, *operands, None, None)


@_compat.named
def combine_start(
    y: Annotated[jax.Array, "group.dtype, the shape of recv.x"],
    recv: Dispatched,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    wire: Wire | None = None,
    grad_wire: GradWire | None = None,
) -> Pending:
    """Starts a `combine` and waits for no other rank. The arguments, and the other errors, are those of `combine`.

    The computation between this call and `combine_done` may run while the rows travel. XLA decides the order, and may
    put the done directly after the start. docs/overlap.md shows how to fix the order.

    Returns:
        An opaque pending call. Pass it to `combine_done` once.

    Raises:
        jax_ep.SplitCallError: the call is outside of `jax.jit`; or it is under `jax.vmap`, and the group's backend is
            "cuda". (Under vmap, the other backends run it.) Replace vmap by `jax.lax.map`, or call `combine`.

    Examples:
        >>> def layer(x, topk_idx, topk_weights):
        ...     recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
        ...     pending = ep.combine_start(recv.x, recv)
        ...     shared = jnp.tanh(x)  # may run while the rows travel
        ...     return shared + ep.combine_done(pending)
        >>> on_each_rank(layer)(x, topk_idx, topk_weights).shape == x.shape
        True
    """
    check_compiled("combine_start")
    options, y, weights, route = _prepare("combine_start", y, recv, out_dtype, wire, grad_wire)
    y, weights, route = _compat.in_one_place((y, weights, route))
    if route.backend.splits_calls:
        options = dataclasses.replace(options, backward=BackwardCall(y, weights))
        y, weights, started = _start(options, y, weights, route)  # the cotangents from the done go to the start
    else:
        started = route.backend.combine_start(route, y, weights, options.out_dtype, options.wire)
    return Pending((y, weights, route, started), "combine", recv.group, options)


@_compat.named
def combine_done(pending: Pending) -> Annotated[jax.Array, "out_dtype [T, H]"]:
    """Ends a `combine_start` and returns the result of `combine`. Both calls must be in one compiled program.

    Raises:
        TypeError: `pending` is not what `combine_start` returned.
        ValueError: the group is closed, or the call is not inside a shard_map over the group's mesh.
        jax_ep.SplitCallError: an earlier `combine_done` took `pending`, or an inner function (of jit, checkpoint, grad,
            vmap, scan, while_loop or cond) closes over `pending`. Call the start and the done in one function. An inner
            jit may also take `pending` as an argument.
        jax_ep.Error: an earlier operation of the group failed on a device.
        jax.errors.JaxRuntimeError: on GPUs, when the program runs: `pending` comes from another program, an earlier
            `combine_done` took it, or XLA copied it, for example in the carry of a loop.

    Examples:
        >>> def layer(x, topk_idx):
        ...     recv = ep.dispatch(x, topk_idx, group=group, layout="ragged")
        ...     return ep.combine_done(ep.combine_start(recv.x, recv))
        >>> on_each_rank(layer)(x, topk_idx).shape == x.shape
        True
    """
    check_pending("combine", pending)
    check_usable("combine_done", pending.group)
    operands = pending.take()
    options, start_operands = pending.take_static()
    return _combine(options, *operands, start_operands)


@dataclasses.dataclass(frozen=True)
class CombineOptions:
    """The keyword arguments of `combine`, checked. They are static: JAX does not trace them."""

    out_dtype: Any
    wire: Wire | None
    grad_wire: GradWire | None
    backward: BackwardCall | None = None  # of a split-phase call


def _prepare(
    op: str, y: Any, recv: Any, out_dtype: Any, wire: Any, grad_wire: Any
) -> tuple[CombineOptions, jax.Array, jax.Array, Route]:
    """Checks the arguments of a combine; returns its static part and its operands."""
    route = route_of(op, recv)
    group = route.group
    check_usable(op, group)
    letters = ("E_local", "capacity") if route.layout == "expert" else ("capacity",)
    rows: dict[str, int | None] = dict(zip(letters, route.visible_rows_shape, strict=True))
    no_cast = "fp8 rows need their scales: take jax_ep.dequantize(recv), or give dispatch dequantize=True"
    _checks.array(op, "y", y, rows | {"H": group.hidden}, group.dtype, no_cast)
    if route.layout == "token":  # the weights are the caller's
        weights = jnp.ones(route.rows_shape, jnp.float32)
    else:
        weights = recv.weights
        _checks.array(op, "recv.weights", weights, rows, jnp.float32)
    out_dtype = _checks.dtype(f"{op}: out_dtype", y.dtype if out_dtype is None else out_dtype)
    _checks.wire(op, wire, group.hidden)
    _checks.wire(op, grad_wire, group.hidden, "grad_wire", GRAD_WIRES)
    y, weights = (route.with_empty_slots(of_rows) for of_rows in (y, weights))
    return CombineOptions(out_dtype, wire, grad_wire), *_compat.vary((y, weights, route), group.axis_names)


def _start_sums(options: CombineOptions, y: jax.Array, weights: jax.Array, route: Route) -> Any:
    return y, weights, route.backend.combine_start(route, y, weights, options.out_dtype, options.wire)


def _start_fwd(options: CombineOptions, y: Any, weights: Any, route: Any) -> tuple[Any, None]:
    return _start_sums(options, *_compat.values((y, weights, route))), None


def _start_bwd(options: CombineOptions, saved: None, g: Any) -> tuple[Any, Any, None]:
    assert options.backward is not None
    y_cotangent, weights_cotangent, started = _compat.without_zeros(g)
    if end := options.backward.pop_end():
        y_cotangent, weights_cotangent = end(started)
    return y_cotangent, weights_cotangent, None


_start = _compat.differentiable(_start_sums, _start_fwd, _start_bwd)


def _combine_rows(
    options: CombineOptions, y: jax.Array, weights: jax.Array, route: Route, started: Any, start_operands: Any
) -> jax.Array:
    return route.backend.combine(route, y, weights, started, options.out_dtype, options.wire)


def _combine_fwd(
    options: CombineOptions, y: Any, weights: Any, route: Any, started: Any, start_operands: Any
) -> tuple[jax.Array, Any]:
    # A barrier before a done makes JAX mark all operands of the done as differentiated. The
    # operands of the start show which ones the user differentiates.
    y_perturbed, weights_perturbed = (leaf.perturbed for leaf in start_operands or (y, weights))
    y, weights, route, started = _compat.values((y, weights, route, started))
    out = _combine_rows(options, y, weights, route, started, None)
    if not y_perturbed and not weights_perturbed:
        return out, None
    # y is as large as the worst case of routing: keep it only where the weights' gradient needs it.
    return out, (y if weights_perturbed else None, weights, route)


def _combine_bwd(options: CombineOptions, saved: Any, g: jax.Array) -> tuple[Any, Any, None, Any, None]:
    if saved is None:
        return None, None, None, None, None
    y, weights, route = saved
    g = g.astype(route.group.dtype)
    if options.backward is not None:
        begun = route.backend.start_combine_back(route, g, y, weights, options.grad_wire)
        if begun is not None:
            started, end = begun
            options.backward.set_end(end)
            return None, None, None, started, None
    y_cotangent, weights_cotangent = route.backend.combine_back(route, g, y, weights, options.grad_wire)
    return y_cotangent, weights_cotangent, None, None, None


_combine = _compat.differentiable(_combine_rows, _combine_fwd, _combine_bwd)
