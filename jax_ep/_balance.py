"""balance plans which rank computes which rows, so that all compute equally many. replicate copies the experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _checks, _compat
from jax_ep._constants import TOLERANCE_UNITS_PER_ONE
from jax_ep._group import Group, check_usable

Weights = TypeVar("Weights")  # a pytree of arrays


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot_expert", "num_rows", "home_rows", "slots", "topk_slot"],
    meta_fields=["group", "tolerance_units"],
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the rows of one routing go. A pytree of arrays. B = group.replicas, E_local = experts per rank.

    Attributes:
        slot_expert: [B] int32, the global expert whose copy is in each replica slot of this rank; -1 for none.
        num_rows: [] int32, the rows that this rank will receive: its load with the plan.
        home_rows: [] int32, the rows that name this rank's home experts: its load without the plan.
        slots: [R, B] int32, the slot_expert of every rank. Its elements are expert ids, not slot numbers.
        topk_slot: [T, K] int32, where each pair (token, k) goes: rank * (E_local + B) + slot; -1 for no expert. The
            home experts of a rank have the slots before the copies.
        group: the `Group`.
        tolerance_units: the tolerance in units of 1/4096, rounded.

    Examples:
        >>> with ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T, replicas=E // R) as balanced:
        ...     def copies(topk_idx):
        ...         return ep.balance(topk_idx, group=balanced).slot_expert
        ...     on_each_rank(copies)(topk_idx).shape == (E,)
        True
    """

    slot_expert: jax.Array
    num_rows: jax.Array
    home_rows: jax.Array
    slots: jax.Array
    topk_slot: jax.Array
    group: Group
    tolerance_units: int


@_compat.named
def balance(topk_idx: Annotated[jax.Array, "int32 [T, K]"], *, group: Group, tolerance: float = 0.0) -> Plan:
    """Plans which rank computes which rows, so that ranks compute equally many. Call it inside `shard_map`.

    A rank's share is ceil(P / R) rows, where P is the number of valid pairs (token, k) of all ranks. With
    group.replicas = E_local, each rank gets at most (1 + tolerance) times its share, for any routing. Each rank takes
    rows of one other rank only. These rows need copies of that rank's experts: see `replicate`. The plan is the same on
    every run and every backend. docs/balance.md explains the algorithm.

    If no rank has more rows than (1 + tolerance) times its share, the plan copies no expert and moves no row. With
    fewer replicas than E_local, rows that find no slot stay with their home experts. If a rank would then have more
    rows than the busiest rank has without a plan, the plan also copies no expert and moves no row.

    Args:
        topk_idx: [T, K] int32, as for `dispatch`.
        group: the `Group`. Give it replicas=B, the slots per rank for copies. With B = 0, the plan moves no row.
        tolerance: how much more than its share a rank may compute, as a fraction of its share. A larger tolerance
            copies fewer experts, and reserves more room in the ragged layout. A tolerance of R - 1 or more copies no
            expert, and a larger one still reserves more room.

    Returns:
        A `Plan` for `dispatch` and `replicate`.

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> with ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T, replicas=E // R) as balanced:
        ...     def num_rows(topk_idx):
        ...         return ep.balance(topk_idx, group=balanced).num_rows[None]
        ...     int(jnp.max(on_each_rank(num_rows)(topk_idx))) <= T * K
        True
    """
    check_usable("balance", group)
    _checks.array("balance", "topk_idx", topk_idx, {"T": None, "K": group.top_k}, jnp.int32)
    _checks.num_rows("balance", "T", topk_idx.shape[0], group.max_tokens_per_rank, name="topk_idx")
    units = round(TOLERANCE_UNITS_PER_ONE * _checks.not_negative("balance: tolerance", tolerance))
    # With a limit of R times the mean, no rank is above the limit.
    arrays = group._impl.balance(topk_idx, min(units, TOLERANCE_UNITS_PER_ONE * (group.num_ranks - 1)))
    return Plan(**arrays._asdict(), group=group, tolerance_units=units)


def home_slots(group: Group, topk_idx: jax.Array) -> jax.Array:
    """Maps expert ids [T, K] to the slots of the same experts at home, numbered over all ranks.

    With replicas, an id that names no expert becomes -1. Without replicas, ids are slots and are returned unchanged.
    """
    if not group.replicas:
        return topk_idx
    is_valid = (topk_idx >= 0) & (topk_idx < group.num_experts)
    return jnp.where(is_valid, topk_idx + topk_idx // group.experts_per_rank * group.replicas, -1)


@_compat.named
def replicate(w: Weights, plan: Plan) -> Weights:
    """Copies the experts that a plan names: for each array [E_local, ...] of a pytree, an array [E_local + B, ...].

    The home experts come first, then the copies in the replica slots. Empty slots are zero. Differentiable in w: the
    gradients of all copies are added to the gradient of the home expert, in float32, in the order of slots, then ranks.
    If the plan copies nothing, no weights travel.

    For a gradient, JAX keeps the results until the backward pass. With `jax.checkpoint` and a policy that does not save
    the name "jax_ep_replicate", the backward pass makes the copies again instead.

    Args:
        w: a pytree of arrays [E_local, ...] or [E_local + B, ...], of any dtype. The copies replace the last B experts
            of an array [E_local + B, ...]. If such an array is donated, XLA can reuse its memory and need not copy the
            home experts.
        plan: the result of `balance`.

    Returns:
        A pytree of arrays [E_local + B, ...].

    Raises:
        ValueError, TypeError: an argument does not fit, the group is closed, or the call is not inside a shard_map over
            the group's mesh.
        jax_ep.Error: an earlier operation of the group failed on a device.

    Examples:
        >>> with ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T, replicas=E // R) as balanced:
        ...     def balanced_layer(x, topk_idx, topk_weights, w):
        ...         plan = ep.balance(topk_idx, group=balanced)
        ...         recv = ep.dispatch(x, topk_idx, topk_weights, group=balanced, plan=plan)
        ...         y = jax.lax.ragged_dot(recv.x, ep.replicate(w, plan), recv.group_sizes)
        ...         return ep.combine(y, recv)
        ...     on_each_rank(balanced_layer)(x, topk_idx, topk_weights, w).shape == x.shape
        True
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"replicate: plan is {_checks.kind(plan)}; it must be the result of balance")
    group = plan.group
    check_usable("replicate", group)
    sizes = (group.experts_per_rank, group.slots_per_rank)
    for path, leaf in jax.tree.leaves_with_path(w):
        name = f"w{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"replicate: {name} is {_checks.kind(leaf)}; it must be an array")
        if not leaf.shape or leaf.shape[0] not in sizes:
            raise ValueError(
                f"replicate: {name} has shape {tuple(leaf.shape)}; its first dimension must be E_local = {sizes[0]}, "
                f"the experts of this rank, or E_local + B = {sizes[1]}: split w over {group.axis_name!r} in the "
                "in_specs of jax.shard_map"
            )
    if not group.replicas:
        return w

    def copied(leaf: jax.Array) -> jax.Array:
        return checkpoint_name(
            _replicate(group, *_compat.vary((leaf, plan.slots), group.axis_names)), "jax_ep_replicate"
        )

    return jax.tree.map(copied, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replicate(group: Group, w: jax.Array, slots: jax.Array) -> jax.Array:
    return group._impl.replicate(w, slots)


def _replicate_fwd(group: Group, w: jax.Array, slots: jax.Array) -> tuple[jax.Array, tuple[jax.Array, bool]]:
    return _replicate(group, w, slots), (slots, w.shape[0] == group.slots_per_rank)


def _replicate_bwd(group: Group, saved: tuple[jax.Array, bool], g: jax.Array) -> tuple[jax.Array, None]:
    slots, has_slots = saved
    home, copies = g[: group.experts_per_rank], g[group.experts_per_rank :]
    total = group._impl.add_copies(home, copies, slots)
    return (jnp.concatenate([total, jnp.zeros_like(copies)]) if has_slots else total), None


_replicate.defvjp(_replicate_fwd, _replicate_bwd)


def with_copies(w: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Returns w [E_local, ...] itself, and the copies that a plan names, [B, ...], in an array of their own.

    Unlike `replicate`, it does not copy the home experts. Slots without a copy are unspecified: the caller must not
    read them, and need not give them a gradient. In the backward pass, the gradients of copies are added to those of w.
    """
    w, copies = _with_copies(plan.group, *_compat.vary((w, plan.slots), plan.group.axis_names))
    return w, checkpoint_name(copies, "jax_ep_replicate")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_copies(group: Group, w: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w, group._impl.copy_experts(w, slots)


def _with_copies_fwd(group: Group, w: jax.Array, slots: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    return _with_copies(group, w, slots), slots


def _with_copies_bwd(group: Group, slots: jax.Array, g: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    return _add_copies(group)(*g, slots), None


def _add_copies(group: Group) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns add_copies, with a rule for vmap over copies of weights that all elements share.

    Then g is one gradient, the sum over all elements. It must be added once, and the copies of each element.
    """

    @jax.custom_batching.custom_vmap
    def add(g: jax.Array, copies: jax.Array, slots: jax.Array) -> jax.Array:
        return group._impl.add_copies(g, copies, slots)

    @add.def_vmap
    def add_of_all(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        g, *of_elements = (
            a if batched or i == 0 else jnp.broadcast_to(a, (size, *a.shape))
            for i, (a, batched) in enumerate(zip(operands, is_batched, strict=True))
        )
        if is_batched[0]:
            return jax.lax.map(lambda element: add(*element), (g, *of_elements)), True
        return jax.lax.scan(lambda total, element: (add(total, *element), None), g, tuple(of_elements))[0], False

    return add


_with_copies.defvjp(_with_copies_fwd, _with_copies_bwd)
