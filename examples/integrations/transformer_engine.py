"""TransformerEngine's JAX calls for expert parallelism, on jax_ep.

TransformerEngine 2.19 (transformer_engine/jax/ep.py) works on global arrays, whose leading axis is sharded over the EP
axis. `ep_dispatch` returns five results (four in earlier releases). The fifth is the number of rows before any is
dropped, so a caller can detect overflow. `ep_combine` adds without weights: the caller multiplies by
`recv_topk_weights` before. The functions here have the same arguments, results and meaning.

    experts = ExpertParallel(mesh, "ep", num_experts=E, max_tokens_per_rank=T, hidden_dim=H)  # for ep_bootstrap
    ep_dispatch, ep_combine = experts.ep_dispatch, experts.ep_combine

What is different: any number of devices per process; any number of such objects; bfloat16, float16 and float32; rows
beyond the capacity are always dropped, as with `drop_on_overflow=True`, and shared fairly. `handle_mem` is a pytree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep as ep


@dataclasses.dataclass(frozen=True)
class EpLayerConfig:
    """The static settings of a layer. It has the fields of TransformerEngine's EpLayerConfig."""

    top_k: int
    dispatch_output_per_expert_alignment: int = 0


class ExpertParallel:
    """The calls for one mesh. R is the number of ranks: the product of the sizes of the EP axes and of `dp_axes`.

    The leading axis of all arrays is sharded over dp_axes, then the EP axes. Results have the same sharding, whatever
    `out_sharding` is.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        ep_axis: str | tuple[str, ...],
        *,
        num_experts: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        max_token_dtype: Any = jnp.bfloat16,
        max_num_sms: int = 0,
        dp_axes: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self._mesh, self._axis = mesh, ep_axis
        self._split = P((*dp_axes, *((ep_axis,) if isinstance(ep_axis, str) else ep_axis)))
        self._settings = settings | {
            "num_experts": num_experts,
            "max_tokens_per_rank": max_tokens_per_rank,
            "hidden": hidden_dim,
            "dtype": max_token_dtype,
            "num_sms": max_num_sms or None,
        }
        self._groups: dict[int, ep.Group] = {}  # by top_k, which TransformerEngine has in a layer's config

    def ep_dispatch(
        self,
        cfg: EpLayerConfig,
        topk_idx: jax.Array,
        tokens: jax.Array,
        topk_weights: jax.Array,
        recv_capacity_per_rank: int,
        out_sharding: Any = None,
    ) -> tuple[jax.Array, jax.Array, Any, jax.Array, jax.Array]:
        """tokens [..., H], topk_idx and topk_weights [..., K], with the leading axis sharded over the EP axis.

        Returns recv_tokens [R, capacity, H], recv_topk_weights [R, capacity], handle_mem, token_counts [R, E_local]
        with the padding of the alignment, and total_recv_tokens [R, 1]: the rows that each rank would have with enough
        room, padding included. The step has overflowed if a total exceeds the capacity.
        """
        del out_sharding
        alignment = max(1, cfg.dispatch_output_per_expert_alignment)
        group = self._group(cfg)

        def on_rank(topk_idx: jax.Array, tokens: jax.Array, topk_weights: jax.Array) -> Any:
            recv = ep.dispatch(
                tokens.reshape(-1, tokens.shape[-1]),
                topk_idx.reshape(-1, cfg.top_k).astype(jnp.int32),
                topk_weights.reshape(-1, cfg.top_k).astype(jnp.float32),
                group=group,
                layout="ragged",
                capacity=recv_capacity_per_rank,
                alignment=alignment,
                zero_pad=True,
            )
            total = _rows_wanted(topk_idx.reshape(-1), group, alignment)
            # ep_combine adds without weights. It needs the route but no rows, so handle_mem holds rows with 0 channels.
            handle_mem = dataclasses.replace(recv, x=recv.x[:, :0], weights=jnp.ones_like(recv.weights))
            results = recv.x, recv.weights, handle_mem, recv.group_sizes, total[None]
            return jax.tree.map(lambda array: array[None], results)

        return self._map(on_rank)(topk_idx, tokens, topk_weights)

    def ep_combine(
        self,
        cfg: EpLayerConfig,
        handle_mem: Any,
        token_counts: jax.Array,
        expert_out: jax.Array,
        num_local_tokens: int | tuple[int, ...],
        out_sharding: Any = None,
    ) -> jax.Array:
        """Adds expert_out [R, capacity, H], which the caller has weighted, to [*num_local_tokens, H].

        As in TransformerEngine, `num_local_tokens` is the shape of all ranks' tokens.
        """
        del token_counts, out_sharding
        shape = (num_local_tokens,) if isinstance(num_local_tokens, int) else tuple(num_local_tokens)

        def on_rank(handle_mem: Any, expert_out: jax.Array) -> jax.Array:
            recv = jax.tree.map(lambda array: array[0], jax.lax.stop_gradient(handle_mem))
            out = ep.combine(expert_out[0], recv)
            return out.reshape(-1, *shape[1:], out.shape[-1])

        return self._map(on_rank)(handle_mem, expert_out)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def _group(self, cfg: EpLayerConfig) -> ep.Group:
        if cfg.top_k not in self._groups:
            self._groups[cfg.top_k] = ep.Group(self._mesh, self._axis, top_k=cfg.top_k, **self._settings)
        return self._groups[cfg.top_k]

    def _map(self, on_rank: Any) -> Any:
        return jax.shard_map(on_rank, mesh=self._mesh, in_specs=self._split, out_specs=self._split)


def _rows_wanted(experts: jax.Array, group: ep.Group, alignment: int) -> jax.Array:
    """The rows that this rank would receive if it had room for all, each expert's rounded up to the alignment: []."""
    is_expert = (experts >= 0) & (experts < group.num_experts)
    sent = (
        jnp.zeros(group.num_experts, jnp.int32).at[jnp.where(is_expert, experts, group.num_experts)].add(1, mode="drop")
    )
    wanted = jax.lax.psum_scatter(sent, group.axis_name, tiled=True)  # of this rank's experts
    return jnp.sum((wanted + (alignment - 1)) // alignment * alignment)
