"""dispatch: send each token to the ranks that hold its experts.

The path of a call: `dispatch` checks its arguments and makes a `DispatchCall`, which holds the static values of the
call. `_dispatch` attaches the gradient. The group's backend moves the rows. The result contains a `Route` for combine
and for the backward pass.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _checks, _compat, _scales, _token_layout, _wires
from jax_ep._balance import Plan, home_slots
from jax_ep._dispatch_options import DispatchOptions
from jax_ep._group import Group, check_usable
from jax_ep._layouts import LayoutName
from jax_ep._scales import ScalesFormat
from jax_ep._split_calls import BackwardCall, Pending, check_compiled, check_pending
from jax_ep._types import DispatchCall, Dispatched, Route, route_of
from jax_ep._wires import DispatchWire, GradWire

QuantizedRows: TypeAlias = tuple[
    Annotated[jax.Array, "float8_e4m3fn [T, H]"], Annotated[jax.Array, "float32 [T, ceil(H/128)]"]
]


@_compat.named
def dispatch(
    x: Annotated[jax.Array, "group.dtype [T, H]"] | QuantizedRows,
    topk_idx: Annotated[jax.Array, "int32 [T, K]"],
    topk_weights: Annotated[jax.Array, "float32 [T, K]"] | None = None,
    *,
    group: Group,
    layout: LayoutName = "ragged",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    wire: DispatchWire | None = None,
    grad_wire: GradWire | None = None,
    dequantize: bool = True,
    scales_format: ScalesFormat = "float32",
    zero_pad: bool | None = None,
    plan: Plan | None = None,
) -> Dispatched:
    """Sends each token to the ranks that hold its top-k experts. Call it inside `jax.shard_map` over `group.mesh`.

    Shapes are per device: T tokens (static, the same on all ranks), K = group.top_k, H = group.hidden, R ranks.
    Differentiable in x and topk_weights, in reverse mode.

    Args:
        x: [T, H] in group.dtype; or an already quantised pair (float8_e4m3fn [T, H], float32 scales [T, ceil(H/128)]).
        topk_idx: [T, K] int32, global expert ids. An id outside [0, num_experts) means no expert: nothing is sent. If a
            token names an expert twice, the expert receives two rows.
        topk_weights: [T, K] float32, the router's weights; None means 1.
        group: the `Group`.
        layout: the arrangement of the rows that arrive. E_local = experts per rank.

            - "ragged": recv.x [capacity, H], grouped by local expert.
            - "expert": recv.x [E_local, capacity, H], a block of rows for each local expert.
            - "token": recv.x [capacity, H], one row for all experts of a token on the rank: see `expand`.
        capacity: the number of rows per rank ("ragged", "token") or per local expert ("expert"). It must be a multiple
            of alignment, in all layouts. The default is R * T ("expert", "token", whatever the alignment), or
            R * T * min(K, E_local) plus the padding of alignment ("ragged"). It is enough for any routing that names no
            expert twice for a token ("token": for any routing). If rows do not fit, the experts share the room
            fairly, and so do the source ranks in each expert (docs/concepts.md). recv.num_dropped counts the dropped
            rows, and combine treats them as zero.
        capacity_factor: use it in place of capacity. The capacity is then capacity_factor times the rows that a
            balanced router sends: T * K rows per rank ("ragged") or T * K / E_local rows per local expert ("expert"),
            rounded up to a multiple of alignment. With "token", it is that of "ragged", but at most R * T (not
            rounded), because a rank never gets more rows.
        alignment: in the ragged layout, each expert's group is padded with zero rows to a multiple of this number. The
            other layouts pad no group: a capacity from capacity_factor is rounded up to a multiple of alignment, a
            given capacity must be a multiple, and the default is not rounded. With "token", give alignment to `expand`.
        wire: the format in which rows travel. All fp8 formats need group.hidden to be a multiple of 16.

            - None: x's dtype.
            - "fp8": float8_e4m3fn, with one float32 scale per 128 channels.
            - "fp8_pow2": as "fp8", but each scale is a power of two.
            - "mxfp8": as "fp8_pow2", but one scale per 32 channels, for experts that multiply in MXFP8.
        grad_wire: the format in which the cotangent of x comes back in the backward pass. None sends it in the group's
            dtype. "fp8" and "fp8_pow2" cast as for wire, and "fp8_e5m2" casts to float8_e5m2. Each rank sums its rows
            of a token in float32, and then casts the sum. The token's own rank does not cast its own sum.
        dequantize: True converts fp8 rows, from an fp8 wire or from a quantised x, to group.dtype on arrival. With an
            fp8 wire, the gradient is then the one of wire=None: it ignores the rounding. A quantised x has no gradient.
            False keeps recv.x in fp8, for experts that apply recv.scales themselves. `jax_ep.dequantize` also applies
            them. Such a call cannot be differentiated.
        scales_format: the form of recv.scales. The rows are [..., N, H]. A row has S scales: ceil(H/128), or ceil(H/32)
            with "mxfp8". N' is N, rounded up to a multiple of 4.

            - "float32": float32 [..., N, S].
            - "float32_columns": float32 [..., S, N'], as DeepGEMM reads it.
            - "ue8m0": float8_e8m0fnu [..., N, S].
            - "ue8m0_columns": int32 [..., ceil(S/4), N'], as DeepGEMM reads it: four exponents per word, the first in
              the lowest byte.

            All but "float32" need fp8 rows and dequantize=False. "ue8m0" and "ue8m0_columns" also need
            wire="fp8_pow2" or "mxfp8". In the layout "token", recv.scales is always float32, and scales_format is the
            form of the scales that `expand` returns.
        zero_pad: True zeroes rows that hold no token. False leaves them unspecified, except the rows that alignment
            adds, which are zero. None, the default, means True if the call is differentiated, and False otherwise.
        plan: None sends each row to the rank of its expert. The result of `balance` for the same topk_idx sends rows
            where the plan says. counts, group_sizes and the layout "expert" then have E_local + B entries, with
            B = group.replicas: first the rank's own experts, then the copies of other ranks' experts. With B = E_local,
            the default capacity of the ragged layout is T * K * (1 + tolerance) rows, plus the padding of alignment: no
            routing drops a row.

    Returns:
        `Dispatched`. All specified values have the same bits on every run and every backend.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        TypeError: a call that returns fp8 rows is differentiated, or a call is differentiated in a quantised x.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> def rows_of_experts(x, topk_idx, topk_weights):
        ...     recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="expert", capacity=8)
        ...     return recv.x  # [E_local, 8, H] on each rank
        >>> on_each_rank(rows_of_experts)(x, topk_idx, topk_weights).shape == (E, 8, H)
        True
    """
    options = DispatchOptions(
        layout, capacity, capacity_factor, alignment, wire, grad_wire, dequantize, zero_pad, scales_format
    )
    call, operands = _prepare("dispatch", group, options, x, topk_idx, topk_weights, plan)
    return _visible(call, _dispatch(call, *operands, None, None))


@_compat.named
def dispatch_start(
    x: Annotated[jax.Array, "group.dtype [T, H]"] | QuantizedRows,
    topk_idx: Annotated[jax.Array, "int32 [T, K]"],
    topk_weights: Annotated[jax.Array, "float32 [T, K]"] | None = None,
    *,
    group: Group,
    layout: LayoutName = "ragged",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    wire: DispatchWire | None = None,
    grad_wire: GradWire | None = None,
    dequantize: bool = True,
    scales_format: ScalesFormat = "float32",
    zero_pad: bool | None = None,
    plan: Plan | None = None,
) -> Pending:
    """Starts a `dispatch` and waits for no other rank. The arguments, and the other errors, are those of `dispatch`.

    The computation between this call and `dispatch_done` may run while the rows travel. XLA decides the order, and may
    put the done directly after the start. docs/overlap.md shows how to fix the order.

    Returns:
        An opaque pending call. Pass it to `dispatch_done` once.

    Raises:
        jax_ep.SplitCallError: the call is outside of `jax.jit`; or it is under `jax.vmap`, and the group's backend is
            "cuda". (Under vmap, the other backends run it.) Replace vmap by `jax.lax.map`, or call `dispatch`.

    Examples:
        >>> def layer(x, topk_idx, topk_weights):
        ...     pending = ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout="ragged")
        ...     shared = jnp.tanh(x)  # may run while the rows travel
        ...     recv = ep.dispatch_done(pending)
        ...     return shared + ep.combine(recv.x, recv)
        >>> on_each_rank(layer)(x, topk_idx, topk_weights).shape == x.shape
        True
    """
    options = DispatchOptions(
        layout, capacity, capacity_factor, alignment, wire, grad_wire, dequantize, zero_pad, scales_format
    )
    check_compiled("dispatch_start")
    call, operands = _prepare("dispatch_start", group, options, x, topk_idx, topk_weights, plan)
    x, topk_idx, topk_weights = _compat.in_one_place(operands)
    if call.backend.splits_calls and not call.quantized:
        call = dataclasses.replace(call, backward=BackwardCall(x, topk_weights))
    *differentiated, started = _start(call, x, topk_idx, topk_weights)
    if call.backward is not None:
        x, topk_weights = differentiated  # the cotangents from the done go to the start
    return Pending((x, topk_idx, topk_weights, started), "dispatch", group, call)


@_compat.named
def dispatch_done(pending: Pending) -> Dispatched:
    """Ends a `dispatch_start` and returns the result of `dispatch`. Both calls must be in one compiled program.

    Raises:
        TypeError: `pending` is not what `dispatch_start` returned.
        ValueError: the group is closed, or the call is not inside a shard_map over the group's mesh.
        jax_ep.SplitCallError: an earlier `dispatch_done` took `pending`, or an inner function (of jit, checkpoint,
            grad, vmap, scan, while_loop or cond) closes over `pending`. Call the start and the done in one function. An
            inner jit may also take `pending` as an argument.
        jax_ep.Error: an earlier operation of the group failed on a device.
        jax.errors.JaxRuntimeError: on GPUs, when the program runs: `pending` comes from another program, an earlier
            `dispatch_done` took it, or XLA copied it, for example in the carry of a loop.

    Examples:
        >>> def rows(x, topk_idx):
        ...     return ep.dispatch_done(ep.dispatch_start(x, topk_idx, group=group, layout="expert", capacity=8)).x
        >>> on_each_rank(rows)(x, topk_idx).shape == (E, 8, H)
        True
    """
    check_pending("dispatch", pending)
    check_usable("dispatch_done", pending.group)
    operands = pending.take()
    call, start_operands = pending.take_static()
    return _visible(call, _dispatch(call, *operands, start_operands))


@_compat.named
def dispatch_like(
    x: Annotated[jax.Array, "[T, H']"], recv: Dispatched
) -> Annotated[jax.Array, "[E_local, capacity, H'] or [capacity, H']"]:
    """Sends another tensor along the route of an earlier dispatch, without sending ids or counts again.

    Differentiable in x, in reverse mode: the transpose is the unweighted combine.

    Args:
        x: [T, H'] with the T of the dispatch, in any dtype with elements of whole bytes. H' * itemsize must be at most
            the group's hidden * dtype.itemsize.
        recv: the result of the dispatch.

    Returns:
        [E_local, capacity, H'] or [capacity, H'], in the layout of recv.x and x's dtype. Rows that hold no token are
        zero if the call is differentiated, and unspecified otherwise.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> def token_of_each_row(x, topk_idx):
        ...     recv = ep.dispatch(x, topk_idx, group=group, layout="expert", capacity=8)
        ...     return ep.dispatch_like(jnp.arange(T, dtype=jnp.int32)[:, None], recv)
        >>> on_each_rank(token_of_each_row)(x, topk_idx).shape == (E, 8, 1)
        True
    """
    route = route_of("dispatch_like", recv)
    check_usable("dispatch_like", route.group)
    _checks.array("dispatch_like", "x", x, {"T": route.num_tokens, "H'": None}, getattr(x, "dtype", None))
    # PRNG keys are not numbers, and XLA packs several int4 into a byte.
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or jax.dtypes.itemsize_bits(x.dtype) % 8:
        raise TypeError(f"dispatch_like: x has dtype {x.dtype}; it must be of whole bytes, such as int8 or float32")
    group = route.group
    limit = group.hidden * group.dtype.itemsize
    if not 0 < x.shape[1] * x.dtype.itemsize <= limit:
        raise ValueError(
            f"dispatch_like: x has H' = {x.shape[1]} channels of {x.dtype}; a row of the group holds {limit} bytes, so "
            f"1 to {limit // x.dtype.itemsize} channels"
        )
    return route.without_empty_slots(_dispatch_like(*_compat.vary((x, route), group.axis_names)))


def _prepare(
    op: str, group: Group, options: DispatchOptions, x: Any, topk_idx: Any, topk_weights: Any, plan: Any
) -> tuple[DispatchCall, Any]:
    """Checks the arguments of a dispatch; returns its static part and its operands."""
    check_usable(op, group)
    quantized = isinstance(x, (tuple, list))
    if quantized:
        num_tokens = _check_quantized(op, x, options.wire, group)
    else:
        _checks.array(op, "x", x, {"T": None, "H": group.hidden}, group.dtype, "fp8 comes in a pair: (x, scales)")
        num_tokens = x.shape[0]
    _checks.num_rows(op, "T", num_tokens, group.max_tokens_per_rank)
    choices: dict[str, int | None] = {"T": num_tokens, "K": group.top_k}
    _checks.array(op, "topk_idx", topk_idx, choices, jnp.int32, _checks.SWAPPED)
    if topk_weights is not None:
        _checks.array(op, "topk_weights", topk_weights, choices, jnp.float32, _checks.SWAPPED)
    if plan is not None:
        _check_plan(op, plan, group, topk_idx)
    tolerance_units = None if plan is None else plan.tolerance_units
    checked = options.checked(op, group, num_tokens, tolerance_units)
    topk_idx = home_slots(group, topk_idx) if plan is None else plan.topk_slot
    if checked.layout == "token":
        topk_idx = _token_layout.token_slots(group, topk_idx)
    call = DispatchCall(group._backend_for(num_tokens), checked, num_tokens, quantized, tolerance_units)
    _scales.check(op, checked.scales_format, returns_fp8=call.returns_fp8, quantized=quantized, wire=checked.wire)
    return call, _compat.vary((tuple(x) if quantized else x, topk_idx, topk_weights), group.axis_names)


def _check_plan(op: str, plan: Any, group: Group, topk_idx: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"{op}: plan is {_checks.kind(plan)}; it must be the result of balance, or None")
    if plan.group is not group:
        raise ValueError(
            f"{op}: plan is of another group, {plan.group} with replicas={plan.group.replicas}; the group of this call "
            f"is {group} with replicas={group.replicas}: give {op} and balance the same group"
        )
    if plan.topk_slot.shape != topk_idx.shape:
        raise ValueError(
            f"{op}: plan is for topk_idx of shape {plan.topk_slot.shape}, and topk_idx has shape {topk_idx.shape}; "
            f"give {op} the topk_idx that balance was given"
        )


def _visible(call: DispatchCall, recv: Dispatched) -> Dispatched:
    """What the user sees of the backend's `recv`: no empty slots, and the facts that `dequantize` and `expand` need."""
    return dataclasses.replace(
        _without_empty_slots(recv),
        scales_format=call.options.scales_format,
        channels_per_scale=call.channels_per_scale,
    )


def _without_empty_slots(recv: Dispatched) -> Dispatched:
    """`recv` with an entry per home expert if the call has no plan."""
    route = recv.route
    if not route.has_empty_slots:
        return recv
    num_home_experts = route.group.experts_per_rank
    return dataclasses.replace(
        recv,
        x=route.without_empty_slots(recv.x),
        counts=recv.counts[:num_home_experts],
        group_sizes=recv.group_sizes[:num_home_experts],
        weights=route.without_empty_slots(recv.weights),
        scales=None if recv.scales is None else route.without_empty_slots(recv.scales),
    )


def _check_quantized(op: str, x: Any, wire: str | None, group: Group) -> int:
    """Checks a pair of fp8 rows and scales; returns T."""
    if len(x) != 2:
        raise ValueError(
            f"{op}: x is a {type(x).__name__} of {len(x)}; it must be an array [T, H] or, if it is quantised, a pair "
            "(float8_e4m3fn [T, H], scales [T, ceil(H/128)])"
        )
    if wire is not None:
        raise ValueError(f"{op}: wire is {wire!r}, but x is already quantised; it must be None")
    if group.hidden % _wires.CHANNELS_PER_UNIT:
        raise ValueError(
            f"{op}: x is quantised, which needs hidden to be a multiple of {_wires.CHANNELS_PER_UNIT}; the group's is "
            f"{group.hidden}: give x in {group.dtype}"
        )
    no_cast = f"for rows in {group.dtype}, give them alone, with wire='fp8'"
    _checks.array(op, "x[0]", x[0], {"T": None, "H": group.hidden}, _wires.FP8, no_cast)
    num_tokens = x[0].shape[0]
    num_scales = _wires.num_scales(group.hidden)
    _checks.array(op, "x[1]", x[1], {"T": num_tokens, "ceil(H/128)": num_scales}, jnp.float32)
    return num_tokens


def _start_move(call: DispatchCall, x: Any, topk_idx: Any, topk_weights: jax.Array | None, *, zero_pad: bool) -> Any:
    start = _token_layout.dispatch_start if call.options.layout == "token" else call.backend.dispatch_start
    return start(call, x, topk_idx, topk_weights, zero_pad=zero_pad)


def _start_rows(call: DispatchCall, x: Any, topk_idx: Any, topk_weights: jax.Array | None) -> Any:
    started = _start_move(call, x, topk_idx, topk_weights, zero_pad=bool(call.options.zero_pad))
    return x, topk_weights, started


def _start_fwd(call: DispatchCall, *operands: Any) -> tuple[Any, None]:
    x, topk_idx, topk_weights = _compat.values(operands)
    started = _start_move(call, x, topk_idx, topk_weights, zero_pad=call.options.zero_pad is not False)
    return (x, topk_weights, started), None


def _start_bwd(call: DispatchCall, saved: None, g: Any) -> tuple[Any, None, Any]:
    x, topk_weights, started = _compat.without_zeros(g)
    if call.backward is not None and (end := call.backward.pop_end()):
        x, topk_weights = end(started)
    return x, None, topk_weights


_start = _compat.differentiable(_start_rows, _start_fwd, _start_bwd)


def _move(call: DispatchCall, *operands: Any, zero_pad: bool) -> Dispatched:
    """Dispatches operands x, topk_idx, topk_weights, started; in the layout "token", topk_idx is a `TokenSlots`."""
    dispatch = _token_layout.dispatch if call.options.layout == "token" else call.backend.dispatch
    return dispatch(call, *operands, zero_pad=zero_pad)


def _dispatch_rows(call: DispatchCall, *operands: Any) -> Dispatched:
    *moved, _ = operands  # the operands of the start are for the forward rule
    return _move(call, *moved, zero_pad=bool(call.options.zero_pad))


def _dispatch_fwd(call: DispatchCall, x: Any, *others: Any) -> tuple[Dispatched, Any]:
    *operands, start_operands = others
    if call.quantized and any(part.perturbed for part in x):
        raise TypeError(
            "dispatch: a quantised x cannot be differentiated; give x in the group's dtype with wire='fp8', "
            "or jax.lax.stop_gradient of the pair"
        )
    if call.returns_fp8:
        given = "x is quantised" if call.quantized else f"wire is {call.options.wire!r}"
        raise TypeError(f"dispatch: fp8 rows cannot be differentiated ({given}); use dequantize=True")
    recv = _move(call, *_compat.values((x, *operands)), zero_pad=call.options.zero_pad is not False)
    # Named here: otherwise, no checkpoint policy could save the route, which the backward rule needs.
    recv = checkpoint_name(recv, "jax_ep_dispatch")
    if start_operands is not None and not _compat.is_differentiated(start_operands):
        return recv, None
    return recv, (recv.route, recv.topk_idx)


def _dispatch_bwd(
    call: DispatchCall, saved: tuple[Route, jax.Array | None] | None, g: Dispatched
) -> tuple[Any, None, jax.Array | None, Any, None]:
    if saved is None:
        return None, None, None, None, None
    route, topk_idx = saved
    rows, weights = _compat.without_zeros((g.x, g.weights))
    if call.quantized:
        rows = None  # x and its scales are constants: otherwise, the forward rule raises an error
    if rows is None and weights is None:
        return None, None, None, None, None
    if call.backward is not None:
        if topk_idx is not None:
            weights = _token_layout.without_absent_pairs(topk_idx, weights)
        begun = call.backend.start_dispatch_back(route, rows, weights, call.options.grad_wire)
        if begun is not None:
            started, end = begun
            call.backward.set_end(end)
            return None, None, None, started, None
    if topk_idx is None:
        x, topk_weights = call.backend.dispatch_back(route, rows, weights, call.options.grad_wire)
    else:
        x, topk_weights = _token_layout.dispatch_back(route, topk_idx, rows, weights, call.options.grad_wire)
    return x, None, topk_weights, None, None


_dispatch = _compat.differentiable(_dispatch_rows, _dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def _dispatch_like(x: jax.Array, route: Route) -> jax.Array:
    return route.backend.dispatch_like(route, x, zero_pad=False)


def _dispatch_like_fwd(x: jax.Array, route: Route) -> tuple[jax.Array, Route]:
    return route.backend.dispatch_like(route, x, zero_pad=True), route


def _dispatch_like_bwd(route: Route, g: jax.Array) -> tuple[jax.Array | None, None]:
    x, _ = route.backend.dispatch_back(route, g, None, None)
    return x, None


_dispatch_like.defvjp(_dispatch_like_fwd, _dispatch_like_bwd)
