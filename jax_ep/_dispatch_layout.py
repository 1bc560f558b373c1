"""How many tokens go where under a routing, without sending any."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _checks, _compat, _native


class DispatchLayout(NamedTuple):
    """The numbers of tokens that a routing sends to each rank and node, and of pairs (token, k) to each expert.

    Examples:
        >>> ep.dispatch_layout(topk_idx, num_experts=E, num_ranks=R).is_token_in_rank.shape == (R * T, R)
        True
    """

    num_tokens_per_rank: jax.Array
    """[R] int32: tokens with at least one expert on the rank."""
    num_tokens_per_node: jax.Array
    """[num_nodes] int32: tokens with at least one expert on the node."""
    num_tokens_per_expert: jax.Array
    """[E] int32: (token, k) pairs that name the expert."""
    is_token_in_rank: jax.Array
    """[T, R] bool: whether the token has an expert on the rank."""


@_compat.named
def dispatch_layout(
    topk_idx: Annotated[jax.Array, "int32 [T, K]"], *, num_experts: int, num_ranks: int, num_nodes: int = 1
) -> DispatchLayout:
    """Counts the tokens that a routing sends to each rank, node and expert.

    A token counts once for a rank or a node, however many of its experts are there. Ids outside [0, num_experts) are
    ignored. The function needs no group and no communication: inside `jax.shard_map`, it counts only this device's
    tokens.

    Args:
        topk_idx: [T, K] int32, the experts of each token; any T and K, also 0.
        num_experts: experts in all, a multiple of `num_ranks`. Each rank owns num_experts / num_ranks consecutive
            experts. On GPUs, this number is at most 12288.
        num_ranks: ranks in all, a multiple of `num_nodes`; a node is num_ranks / num_nodes consecutive ranks.
        num_nodes: nodes (hosts or NVLink domains) in all.

    Returns:
        A `DispatchLayout`.

    Raises:
        TypeError: topk_idx is not an int32 array, or a number is not an int.
        ValueError: topk_idx is not [T, K], or one number does not divide the other.

    Examples:
        >>> counts = ep.dispatch_layout(jnp.array([[0, 1], [0, 3]], jnp.int32), num_experts=4, num_ranks=2)
        >>> counts.num_tokens_per_rank.tolist(), counts.num_tokens_per_expert.tolist()
        ([2, 1], [2, 1, 0, 1])
    """
    op = "dispatch_layout"
    _checks.array(op, "topk_idx", topk_idx, {"T": None, "K": None}, jnp.int32, "jax.lax.top_k returns the ids second")
    sizes = {
        "num_experts": _checks.integer(f"{op}: num_experts", num_experts, 1, _checks.MAX_INT32),
        "num_ranks": _checks.integer(f"{op}: num_ranks", num_ranks, 1),
        "num_nodes": _checks.integer(f"{op}: num_nodes", num_nodes, 1),
    }
    for name, divisor in (("num_experts", "num_ranks"), ("num_ranks", "num_nodes")):
        _check_multiple(op, name, sizes[name], divisor, sizes[divisor])
    return _layout(topk_idx, **sizes)


def _check_multiple(op: str, name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(
            f"{op}: {name} is {value}; it must be a multiple of {divisor_name} = {divisor}, "
            f"e.g. {-(-value // divisor) * divisor}"
        )


@partial(jax.jit, static_argnames=("num_experts", "num_ranks", "num_nodes"))
def _layout(topk_idx: jax.Array, **sizes: Any) -> DispatchLayout:
    topk_idx = _compat.vary(topk_idx, ())  # an FFI call has no sharding rule for explicit axes
    modules = {"cpu": _native.cpu, "cuda": _native.cuda}
    native = {platform: partial(_native_layout, **sizes) for platform, module in modules.items() if module is not None}
    return jax.lax.platform_dependent(topk_idx, **native, default=partial(_pure_jax_layout, **sizes))


def _native_layout(
    topk_idx: jax.Array, *, num_experts: int, num_ranks: int, num_nodes: int, target: str = "jax_ep_dispatch_layout"
) -> DispatchLayout:
    def result(*shape: int, dtype: type = np.int32) -> Any:
        return _compat.result_type(topk_idx, shape, dtype)

    results = DispatchLayout(
        num_tokens_per_rank=result(num_ranks),
        num_tokens_per_node=result(num_nodes),
        num_tokens_per_expert=result(num_experts),
        is_token_in_rank=result(topk_idx.shape[0], num_ranks, dtype=np.bool_),
    )
    call = jax.ffi.ffi_call(target, tuple(results), vmap_method="sequential")
    attributes = {"num_experts": num_experts, "num_ranks": num_ranks, "num_nodes": num_nodes}
    return DispatchLayout(*call(topk_idx, **{name: np.int32(value) for name, value in attributes.items()}))


def _pure_jax_layout(topk_idx: jax.Array, *, num_experts: int, num_ranks: int, num_nodes: int) -> DispatchLayout:
    is_expert = topk_idx[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]  # [T, K, E]
    is_in_expert = jnp.any(is_expert, axis=1)  # [T, E]

    def is_in(num_parts: int) -> jax.Array:
        """[T, num_parts], where each part holds equally many consecutive experts."""
        return jnp.any(is_in_expert.reshape(topk_idx.shape[0], num_parts, num_experts // num_parts), axis=2)

    count = partial(jnp.sum, dtype=jnp.int32)
    return DispatchLayout(
        num_tokens_per_rank=count(is_in(num_ranks), axis=0),
        num_tokens_per_node=count(is_in(num_nodes), axis=0),
        num_tokens_per_expert=count(is_expert, axis=(0, 1)),
        is_token_in_rank=is_in(num_ranks),
    )
