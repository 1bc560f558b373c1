"""mlp: dispatch, the experts' gated MLP, and combine."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _checks, _compat
from jax_ep._balance import Plan, replicate, with_copies
from jax_ep._balance import balance as make_plan
from jax_ep._combine import combine
from jax_ep._dequantize import dequantize
from jax_ep._dispatch import dispatch
from jax_ep._group import Group, check_usable
from jax_ep._layouts import capacity_of_factor
from jax_ep._token_layout import expand, reduce
from jax_ep._types import Dispatched, Expanded
from jax_ep._wires import GRAD_WIRES, GradWire, Wire
from jax_ep.moe._grouped_matmul import Implementation, no_grouped_reason
from jax_ep.moe._portable_matmul import portable_matmul

Experts: TypeAlias = Literal["auto", "grouped", "einsum", "ragged_dot", "tokamax"]
EXPERTS: tuple[Experts, ...] = get_args(Experts)

# "auto" pads every expert to its worst case, group.num_ranks * T rows, up to this many rows. An H200 needs about 160
# rows per expert before a matmul's arithmetic takes longer than reading its weights (790 TFLOP/s, 4.8 TB/s, bfloat16).
# Below that, padding costs no time, and one batched matmul for all experts reads the weights once.
FEW_ROWS = 64

# Arguments of dispatch that mlp sets: `group` and `layout` are its own, and the plan follows from `balance`.
_DECIDED = ("group", "layout", "plan")
_DISPATCH_ARGUMENTS = tuple(
    parameter.name
    for parameter in inspect.signature(dispatch).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _DECIDED
)


@_compat.named
def mlp(
    x: Annotated[jax.Array, "group.dtype [..., H]"],
    topk_idx: Annotated[jax.Array, "int32 [..., K]"],
    topk_weights: Annotated[jax.Array, "float32 [..., K]"] | None,
    w_gate_up: Annotated[jax.Array, "group.dtype [E_local, H, 2I]"],
    w_down: Annotated[jax.Array, "group.dtype [E_local, I, H]"],
    *,
    group: Group,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    balance: float | None = None,
    experts: Experts = "auto",
    layout: Literal["token"] | None = None,
    combine_wire: Wire | None = None,
    combine_grad_wire: GradWire | None = None,
    **dispatch_arguments: Any,
) -> Annotated[jax.Array, "group.dtype [..., H]"]:
    """A mixture of gated MLPs: dispatch, the experts, combine. Call it inside `jax.shard_map` over `group.mesh`.

    The result of a token is the sum over k of topk_weights[k] * expert(topk_idx[k]), where each expert computes
    (activation(x @ gate) * (x @ up)) @ down. Shapes are per device; `...` stands for any leading dimensions, with at
    most group.max_tokens_per_rank tokens in all. K = group.top_k, H = group.hidden, I channels inside an expert.
    Differentiable in x, topk_weights, w_gate_up and w_down, in reverse mode.

    Args:
        x: [..., H] in group.dtype.
        topk_idx: [..., K] int32, as for `dispatch`. An id outside [0, num_experts) means no expert: give padding tokens
            the id -1. If a token names an expert twice, the default capacity may drop rows.
        topk_weights: [..., K] float32, the router's weights; None means 1.
        w_gate_up: [E_local, H, 2I], the weights of this rank's experts: gate in the first I columns, up in the last I.
            Split the experts over group.axis_name: `PartitionSpec(group.axis_name)`.
        w_down: [E_local, I, H]. All weights are in group.dtype.
        group: the `Group`.
        activation: an elementwise function. It is applied to x @ gate.
        balance: None sends each row to the rank of its expert. A number is the tolerance of `jax_ep.balance`: ranks
            then also compute rows of other ranks' experts. The layer copies the weights of these experts for the call,
            and adds the copies' gradients to those of the home experts. With group.replicas = E_local, no rank computes
            more than (1 + tolerance) times its share, for any routing; 0 is exact balance. With fewer replicas, a rank
            may compute more. Without replicas, balance= has no effect.
        experts: how the experts multiply.

            - "einsum": one batched matmul over rows that are padded for each expert (dispatch's layout "expert").
            - "grouped": CUTLASS's grouped GEMM, on Hopper GPUs. It and the next two use dispatch's layout "ragged".
            - "ragged_dot": `jax.lax.ragged_dot`. It can take many times as long as "grouped" (docs/moe.md).
            - "tokamax": the ragged dot of the package tokamax.
            - "auto": the first of the following that fits. All ranks make the same choice.
                1. "einsum", if group.num_ranks * T is at most 64 for T tokens per rank, and you give no `layout`,
                   `capacity`, `capacity_factor` or `alignment`.
                2. "grouped", if the group has backend="cuda", its dtype is bfloat16 or float16, H and I are multiples
                   of 8, all its devices are Hopper GPUs, and all its processes have built the grouped GEMM. On Hopper
                   GPUs, check that `jax-ep doctor` shows `_grouped_matmul: loaded`.
                3. "ragged_dot".
        layout: None takes the layout of `experts`. "token" sends and returns a row per token and rank, and copies rows
            for their experts on the rank (`jax_ep.expand`, `jax_ep.reduce`). docs/moe.md says when. With "token",
            `experts` must not be "einsum".
        combine_wire: passed to `combine` as `wire`. The experts' outputs come back in this format; with None, in
            group.dtype.
        combine_grad_wire: passed to `combine` as `grad_wire`. The cotangent of the result travels to the experts in
            this format.
        **dispatch_arguments: capacity, capacity_factor, alignment, wire, grad_wire, dequantize, scales_format and
            zero_pad, as for `dispatch`. The unit of `capacity` depends on the layout. The unit of `capacity_factor`
            does not. dequantize is True by default: with an fp8 wire, rows arrive in group.dtype, and the layer is
            differentiable. With dequantize=False, the layer dequantizes the rows itself, and cannot be differentiated.

    Returns:
        [..., H] in group.dtype.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    **Dropped rows.** If `capacity` is too small, dropped rows count as zero. The result does not contain the number of
    dropped rows. With the CUDA backend, `group.stats().rows_dropped` counts them. To get the number inside the program,
    call `dispatch` and `combine` yourself, and read `recv.num_dropped`. With layout="token", `expand` may drop rows,
    too, which `stats` does not count: call `expand` yourself, and add its `num_dropped`.

    **Rematerialisation.** `jax.checkpoint` policies can name the values of this table. A policy such as
    `jax.checkpoint_policies.save_only_these_names("jax_ep_dispatch", "jax_ep_moe_gate_up")` saves the named values, and
    computes the other values again:

    | name | value | if saved, the backward pass does not repeat |
    | --- | --- | --- |
    | `jax_ep_dispatch` | the result of `dispatch`: rows [rows, H] and their route | the dispatch |
    | `jax_ep_replicate` | with `balance`: the copies [B, ...] with "grouped", else [E_local + B, ...] | the copies |
    | `jax_ep_moe_gate_up` | x @ w_gate_up of each row, [rows, 2I] | the first matmul |
    | `jax_ep_moe_down` | the experts' outputs, [rows, H] | the second matmul |
    | `jax_ep_moe_output` | the result, [T, H] | the combine |

    Examples:
        >>> w_gate_up = jax.random.normal(jax.random.key(4), (E, H, 2 * 64), group.dtype)
        >>> w_down = jax.random.normal(jax.random.key(5), (E, 64, H), group.dtype)
        >>> layer = on_each_rank(lambda *arrays: ep.moe.mlp(*arrays, group=group, wire="fp8"))
        >>> layer(x, topk_idx, topk_weights, w_gate_up, w_down).shape == x.shape
        True
    """
    op = "moe.mlp"
    tokens = _check_tokens(op, group, x, topk_idx, topk_weights)
    inner = _check_weights(op, group, w_gate_up, w_down)
    if not callable(activation):
        raise TypeError(
            f"{op}: activation is {activation!r}, {_checks.kind(activation)}; it must be a function, such as "
            "jax.nn.silu"
        )
    if balance is not None:
        _checks.not_negative(f"{op}: balance", balance)
    _checks.choice(f"{op}: experts", experts, EXPERTS)
    _check_layout(op, layout, experts)
    _checks.wire(op, combine_wire, group.hidden, "combine_wire")
    _checks.wire(op, combine_grad_wire, group.hidden, "combine_grad_wire", GRAD_WIRES)
    _check_dispatch_arguments(op, dispatch_arguments)

    channels = group.hidden, 2 * inner, inner
    if experts == "grouped" and (reason := no_grouped_reason(group.dtype, channels, _devices_of(group))):
        raise ValueError(f"{op}: experts is 'grouped', but {reason}; use experts='auto'")
    implementation = experts
    if implementation == "auto":
        pads = layout is None and _pads_at_no_cost(group, len(tokens[0]), dispatch_arguments)
        implementation = "einsum" if pads else _ragged_experts(group, channels)
    plan = None if balance is None else make_plan(tokens[1], group=group, tolerance=balance)
    options: dict[str, Any] = {"group": group, "plan": plan, **dispatch_arguments}
    arrived: Dispatched | Expanded
    if layout == "token":
        recv, arrived = _token_rows(tokens, options)
    else:
        recv = arrived = dispatch(*tokens, layout="expert" if implementation == "einsum" else "ragged", **options)
    # A plan copies no expert without rows. So a copy has rows unless dispatch drops them, which the default room
    # excludes.
    has_default_room = not any(dispatch_arguments.get(name) is not None for name in ("capacity", "capacity_factor"))
    leaves_empty_copies = has_default_room and group.replicas == group.experts_per_rank
    weights = _Weights(w_gate_up), _Weights(w_down)
    if plan is not None:
        weights = (
            _weights_with_copies(w_gate_up, plan, implementation),
            _weights_with_copies(w_down, plan, implementation),
        )
    # Cast here, so that the gradient of weights that are replicated over other mesh axes is summed over these.
    rows, (for_gate_up, for_down) = _compat.vary((dequantize(arrived), weights), [])

    def matmul(rows: jax.Array, weights: _Weights) -> jax.Array:
        return portable_matmul(
            rows,
            weights.w,
            arrived.group_sizes,
            implementation=implementation,
            copies=weights.copies,
            leaves_empty_copies=leaves_empty_copies,
        )

    gate_up = checkpoint_name(matmul(rows, for_gate_up), "jax_ep_moe_gate_up")
    gate, up = gate_up[..., :inner], gate_up[..., inner:]
    activated = activation(gate)
    if getattr(activated, "shape", None) != gate.shape:
        raise ValueError(
            f"{op}: activation returned {_described(activated)} for an array of shape {gate.shape}; it must return an "
            "array of the same shape (mlp splits gate and up itself)"
        )
    hidden = (activated * up).astype(group.dtype)
    y = checkpoint_name(matmul(hidden, for_down), "jax_ep_moe_down")
    if isinstance(arrived, Expanded):
        y = reduce(y, arrived)
    out = combine(y, recv, wire=combine_wire, grad_wire=combine_grad_wire)
    out = checkpoint_name(out, "jax_ep_moe_output")
    return out.reshape(x.shape)


def _token_rows(tokens: tuple[Any, Any, Any], options: dict[str, Any]) -> tuple[Dispatched, Expanded]:
    """Dispatches in the layout "token", and expands the rows that arrive."""
    alignment = options.get("alignment", 1)
    recv = dispatch(*tokens, layout="token", **options)
    room = None
    if (factor := options.get("capacity_factor")) is not None:
        group = recv.route.group
        sizes = {"num_tokens": len(tokens[0]), "top_k": group.top_k, "experts_per_rank": group.experts_per_rank}
        room = capacity_of_factor("ragged", factor, **sizes, alignment=alignment)
    return recv, expand(recv, capacity=room, alignment=alignment, zero_pad=options.get("zero_pad"))


class _Weights(NamedTuple):
    """The weights of all groups of rows: w, then copies if they are in an array of their own."""

    w: jax.Array  # [E_local, ...], or [E_local + B, ...] with the copies
    copies: jax.Array | None = None  # [B, ...]


def _weights_with_copies(w: jax.Array, plan: Plan, implementation: Implementation) -> _Weights:
    """Adds the copies of a plan. The grouped GEMM reads no weights of empty groups, and takes copies apart from w."""
    if implementation == "grouped" and plan.group.replicas:
        return _Weights(*with_copies(w, plan))
    return _Weights(replicate(w, plan))


def _devices_of(group: Group) -> list[Any]:
    """The group's devices; none if its mesh is abstract."""
    return list(group.mesh.devices.flat) if isinstance(group.mesh, jax.sharding.Mesh) else []


def _ragged_experts(group: Group, channels: tuple[int, ...]) -> Implementation:
    """What "auto" is for ragged rows. All ranks must choose alike, because results differ in their last bits."""
    is_fast = group._impl.has_grouped_gemm and no_grouped_reason(group.dtype, channels) is None
    return "grouped" if is_fast else "ragged_dot"


def _pads_at_no_cost(group: Group, num_tokens: int, dispatch_arguments: dict[str, Any]) -> bool:
    """Whether "auto" uses the layout "expert". The unit of a capacity is that of the layout "ragged" otherwise."""
    given = [dispatch_arguments.get(name) is not None for name in ("capacity", "capacity_factor")]
    has_own_room = any(given) or dispatch_arguments.get("alignment", 1) != 1
    return group.num_ranks * num_tokens <= FEW_ROWS and not has_own_room


def _check_tokens(op: str, group: Group, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[Any, Any, Any]:
    """Checks the arguments that have a row per token; returns them with one leading dimension."""
    check_usable(op, group)
    for name, value in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if value is None and name == "topk_weights":
            continue
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(f"{op}: {name} is {_checks.kind(value)}; it must be an array")
        if not value.shape:
            last = "H" if name == "x" else "K"
            raise ValueError(f"{op}: {name} has shape (); it must be [..., {last}]")
        if value.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(value.shape)}; its leading dimensions must be those of x, "
                f"{tuple(x.shape[:-1])}"
            )

    # JAX cannot reshape axes that are sharded over explicit mesh axes.
    x, topk_idx, topk_weights = _compat.vary((x, topk_idx, topk_weights), ())

    def flat(value: Any) -> Any:
        return value.reshape(math.prod(value.shape[:-1]), value.shape[-1])

    x, topk_idx = flat(x), flat(topk_idx)
    topk_weights = None if topk_weights is None else flat(topk_weights)
    _checks.array(op, "x", x, {"T": None, "H": group.hidden}, group.dtype)
    _checks.num_rows(op, "T", len(x), group.max_tokens_per_rank)
    choices: dict[str, int | None] = {"T": len(x), "K": group.top_k}
    _checks.array(op, "topk_idx", topk_idx, choices, jnp.int32, _checks.SWAPPED)
    if topk_weights is not None:
        _checks.array(op, "topk_weights", topk_weights, choices, jnp.float32, _checks.SWAPPED)
    return x, topk_idx, topk_weights


def _check_weights(op: str, group: Group, w_gate_up: Any, w_down: Any) -> int:
    """Checks the experts' weights; returns I."""
    local = group.experts_per_rank
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if len(getattr(w, "shape", ())) == 3 and w.shape[0] != local:
            raise ValueError(
                f"{op}: {name} has shape {tuple(w.shape)}, {w.shape[0]} experts; it must have those of this rank, "
                f"E_local = {local} of {group.num_experts}: split its first dimension over {group.axis_name!r} in the "
                "in_specs of jax.shard_map"
            )
    _checks.array(op, "w_gate_up", w_gate_up, {"E_local": local, "H": group.hidden, "2I": None}, group.dtype)
    columns = w_gate_up.shape[2]
    if columns % 2 or not columns:
        raise ValueError(
            f"{op}: w_gate_up has shape {tuple(w_gate_up.shape)}; its last dimension, 2I, must be even and positive: I "
            "columns for gate, then I for up"
        )
    if getattr(w_down, "shape", ())[1:] == (columns, group.hidden):
        raise ValueError(
            f"{op}: w_gate_up has shape {tuple(w_gate_up.shape)}, and w_down has I = {columns}; the last dimension of "
            f"w_gate_up must be 2I = {2 * columns}: I columns for gate, then I for up"
        )
    _checks.array(op, "w_down", w_down, {"E_local": local, "I": columns // 2, "H": group.hidden}, group.dtype)
    return columns // 2


def _check_layout(op: str, layout: Any, experts: Experts) -> None:
    if layout not in (None, "token"):
        raise ValueError(
            f"{op}: layout is {layout!r}; it must be 'token', or None for the layout of experts: 'expert' with "
            "experts='einsum', otherwise 'ragged'"
        )
    if layout == "token" and experts == "einsum":
        raise ValueError(f"{op}: layout is 'token' and experts is 'einsum', which needs layout=None; leave out one")


def _check_dispatch_arguments(op: str, arguments: dict[str, Any]) -> None:
    if "plan" in arguments:
        raise TypeError(
            f"{op}: plan is {_checks.kind(arguments['plan'])}, but mlp makes its own plan; give the tolerance of the "
            "plan as balance=, such as balance=0.0, in place of plan"
        )
    if unknown := arguments.keys() - set(_DISPATCH_ARGUMENTS):
        raise TypeError(
            f"{op}: {min(unknown)} is not an argument of mlp or of dispatch; dispatch takes "
            f"{', '.join(_DISPATCH_ARGUMENTS)}"
        )


def _described(value: Any) -> str:
    return f"an array of shape {value.shape}" if hasattr(value, "shape") else _checks.kind(value)
