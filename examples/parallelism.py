"""Expert parallelism beside tensor parallelism, FSDP, and tokens that every rank has. docs/parallelism.md explains.

    python examples/parallelism.py     # this machine's GPUs, else 8 virtual CPU devices

Every recipe is a function that runs on one device, inside jax.shard_map. Each prints how far its result and its
gradients are from those of a dense layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for machines without GPUs

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from integrations import swiglu


def ep_fsdp(x, topk_idx, topk_weights, w13, w2, *, group, fsdp):
    """FSDP: tokens are split over both axes; an expert's weights are split over `fsdp`, too, and gathered for use."""
    w13, w2 = (lax.all_gather(w, fsdp, axis=1, tiled=True) for w in (w13, w2))  # its transpose: a reduce-scatter
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
    return ep.combine(swiglu.experts(recv.x, recv.group_sizes, w13, w2), recv)


def ep_tp(x, topk_idx, topk_weights, w13, w2, *, group, tp):
    """TP: each expert's inner channels are split over `tp`, and so are the tokens.

    Each rank of `tp` dispatches its own tokens along the EP axis. What it receives, it shares with the other ranks of
    `tp`. So a token crosses the EP axis once per rank of its experts, not once per rank of `tp` as well.
    """
    w13 = w13.reshape(*w13.shape[:2], -1)  # [E_local, H, 2, I / tp]
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
    rows, group_sizes = (lax.all_gather(a, tp) for a in (recv.x, recv.group_sizes))
    parts = [swiglu.experts(*one, w13, w2) for one in zip(rows, group_sizes, strict=True)]
    y = lax.psum_scatter(jnp.stack(parts), tp, scatter_dimension=0)  # the sum over inner channels, of its own rows
    return ep.combine(y, recv)


def replicated_by_share(x, topk_idx, topk_weights, w13, w2, *, group):
    """Every rank has all tokens: each dispatches its own share of them. For many tokens."""
    axis, num_ranks = group.axis_name, group.num_ranks
    tokens, padding = len(x), -len(x) % num_ranks
    x, topk_weights = (jnp.pad(a, ((0, padding), (0, 0))) for a in (x, topk_weights))
    topk_idx = jnp.pad(topk_idx, ((0, padding), (0, 0)), constant_values=-1)  # padding names no expert
    share = len(x) // num_ranks
    first = lax.axis_index(axis) * share
    own = (lax.dynamic_slice_in_dim(a, first, share) for a in (x, topk_idx, topk_weights))
    recv = ep.dispatch(*own, group=group, layout="ragged")
    out = ep.combine(swiglu.experts(recv.x, recv.group_sizes, w13, w2), recv)
    # As a sum over ranks, the result is known to be the same on all of them. lax.all_gather moves half as much, and
    # needs check_vma=False.
    whole = lax.dynamic_update_slice_in_dim(lax.pcast(jnp.zeros_like(x), axis, to="varying"), out, first, axis=0)
    return lax.psum(whole, axis)[:tokens]


def replicated_by_expert(x, topk_idx, topk_weights, w13, w2, *, group, axis):
    """Every rank has all tokens: each takes the rows of its own experts, and the ranks add. For few tokens.

    `group` has all experts and is over a mesh axis of size 1: its dispatch sorts rows, and sends nothing.
    """
    first = lax.axis_index(axis) * len(w13)
    is_own = (topk_idx >= first) & (topk_idx < first + len(w13))
    most_rows = len(x) * min(topk_idx.shape[1], len(w13))
    own_idx = jnp.where(is_own, topk_idx, -1)
    recv = ep.dispatch(x, own_idx, topk_weights, group=group, layout="ragged", capacity=most_rows)
    group_sizes = lax.dynamic_slice_in_dim(recv.group_sizes, first, len(w13))
    out = ep.combine(swiglu.experts(recv.x, group_sizes, w13, w2), recv)
    return lax.psum(out, (axis, *group.axis_names))


class Recipe(NamedTuple):
    """A recipe with its mesh: the sizes of the axes, given the number of devices."""

    layer: Callable[..., jax.Array]
    axes: Callable[[int], dict[str, int]]
    group_axis: str | tuple[str, ...]
    tokens: Any  # the specs of x, w13 and w2
    w13: Any
    w2: Any
    split_gate: bool = False  # w13 as [E, H, 2, I]


RECIPES = {
    "ep_fsdp": Recipe(
        partial(ep_fsdp, fsdp="fsdp"),
        lambda n: {"fsdp": 2 if n % 2 == 0 else 1, "ep": n // 2 if n % 2 == 0 else n},
        "ep",
        P(("fsdp", "ep")),
        P("ep", "fsdp"),
        P("ep", "fsdp"),
    ),
    "ep_tp": Recipe(
        partial(ep_tp, tp="tp"),
        lambda n: {"ep": n // 2 if n % 2 == 0 else n, "tp": 2 if n % 2 == 0 else 1},
        "ep",
        P(("ep", "tp")),
        P("ep", None, None, "tp"),
        P("ep", "tp"),
        split_gate=True,
    ),
    "replicated_by_share": Recipe(replicated_by_share, lambda n: {"ep": n}, "ep", P(), P("ep"), P("ep")),
    "replicated_by_expert": Recipe(
        partial(replicated_by_expert, axis="ep"), lambda n: {"ep": n, "one": 1}, "one", P(), P("ep"), P("ep")
    ),
}


def relative_errors(
    name: str, devices: list[jax.Device], *, tokens: int, hidden: int, inner: int, backend: str
) -> list[float]:
    """Returns the relative errors of a recipe's result, then of its gradients by x, the weights, w13 and w2."""
    recipe = RECIPES[name]
    axes = recipe.axes(len(devices))
    mesh = Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
    num_experts, top_k = 2 * len(devices), min(3, 2 * len(devices))
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (tokens, hidden), (tokens, num_experts), (num_experts, hidden, 2 * inner), (num_experts, inner, hidden)
    x, logits, w13, w2 = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    topk_weights, topk_idx = lax.top_k(jax.nn.softmax(logits), top_k)
    cotangent = jax.random.normal(keys[4], x.shape)

    with ep.Group(
        mesh,
        recipe.group_axis,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens_per_rank=tokens,
        dtype=x.dtype,
        backend=backend,
    ) as group:
        layer = jax.shard_map(
            partial(recipe.layer, group=group),
            mesh=mesh,
            in_specs=(recipe.tokens, recipe.tokens, recipe.tokens, recipe.w13, recipe.w2),
            out_specs=recipe.tokens,
        )

        def sharded(x, topk_weights, w13, w2):
            if recipe.split_gate:
                w13 = w13.reshape(num_experts, hidden, 2, inner)
            return layer(x, topk_idx, topk_weights, w13, w2)

        def dense(x, topk_weights, w13, w2):
            return swiglu.dense(x, topk_idx, topk_weights, w13, w2)

        def results(function):
            def run(*operands):
                out, transpose = jax.vjp(function, *operands)
                return out, *transpose(cotangent)

            with jax.default_matmul_precision("highest"):
                return jax.device_get(jax.jit(run)(x, topk_weights, w13, w2))

        pairs = zip(results(sharded), results(dense), strict=True)
        return [float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)) for actual, wanted in pairs]


def main() -> None:
    for name in RECIPES:
        found = relative_errors(name, jax.devices(), tokens=8 * jax.device_count(), hidden=64, inner=32, backend="auto")
        print(f"{name}: relative error {found[0]:.1e}; of gradients {max(found[1:]):.1e}")


if __name__ == "__main__":
    main()
