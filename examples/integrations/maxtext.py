"""The two places of MaxText's `RoutedMoE.sparse_matmul` that move tokens.

MaxText (AI-Hypercomputer/maxtext, src/maxtext/layers/moe.py, main of mid 2026) sorts tokens by expert, exchanges them
by `ragged_all_to_all`, and sorts again (`ra2a_and_route`). After the experts, it reverses these steps
(`unsort_output_and_ra2a`, then `RoutedMoE.unpermute`). Here, dispatch and combine take these places, with the
signatures that `sparse_matmul` calls. In `sparse_matmul`:

    moves = TokenMoves(group, get_topk)
    ra2a_and_route = moves.ra2a_and_route
    unsort_output_and_ra2a = moves.unsort_output_and_ra2a

and call `moves.unpermute` for `self.unpermute`. `get_topk(logits, pre_bias_logits, rngs, input_ids)` returns the
weights and the experts of each token, both [batch, sequence, K], as `RoutedMoE.get_topk` does. The group is over
`axis_name=self._expert_parallelism_name`, which may be a tuple of axes.

Call both functions for one EP rank, too: MaxText skips them there. This module does not compute the losses and bias
updates that `RoutedMoE.permute` returns (lb_loss, bias_updates): compute them from the router's outputs, or leave them
None. It does not serve tensor parallelism, which splits the channels of rows before they return: see
docs/parallelism.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep as ep


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouteOutput:
    """The fields of MaxText's RouteOutput that `sparse_matmul` reads. Rows are those that this device received."""

    group_sizes: jax.Array  # [E_local], rows of each local expert
    selected_experts: jax.Array  # [rows], local expert of each row: MaxText adds biases by it
    sorted_selected_experts: jax.Array  # [batch * sequence * K]; `sparse_matmul` looks at its length only
    weights: jax.Array  # [batch, sequence, K]
    lb_loss: jax.Array | None = None
    bias_updates: jax.Array | None = None
    local_group_sizes: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class TokenMoves:
    """The functions that take the place of MaxText's, bound to a group."""

    group: ep.Group
    get_topk: Callable[..., tuple[jax.Array, jax.Array]]
    # The rows of the receive buffer, as for `ep.dispatch`. capacity_factor is MaxText's `ragged_buffer_factor`. Without
    # both, there is room for every routing.
    capacity: int | None = None
    capacity_factor: float | None = None

    def ra2a_and_route(
        self,
        x: jax.Array,
        logits: jax.Array,
        pre_bias_logits: jax.Array | None,
        num_ep: int,
        expert_shard_id: Any,
        rngs: Any,
        input_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, RouteOutput, ep.Dispatched]:
        """x [batch, sequence, H] -> rows [capacity, H], sorted by local expert; and what the inverse needs."""
        del num_ep, expert_shard_id  # the group knows them
        weights, experts = self.get_topk(logits, pre_bias_logits, rngs, input_ids)
        top_k = experts.shape[-1]
        recv = ep.dispatch(
            x.reshape(-1, x.shape[-1]),
            experts.reshape(-1, top_k).astype(jnp.int32),
            weights.reshape(-1, top_k).astype(jnp.float32),
            group=self.group,
            layout="ragged",
            capacity=self.capacity,
            capacity_factor=self.capacity_factor,
        )
        routing = RouteOutput(
            group_sizes=recv.group_sizes,
            selected_experts=recv.row_expert,  # -1 in rows outside of all groups, which combine does not read
            sorted_selected_experts=jnp.zeros(experts.size, jnp.int32),
            weights=weights,
        )
        return recv.x, routing, recv

    def unsort_output_and_ra2a(
        self,
        intermediate_output: jax.Array,
        routing: RouteOutput,
        route_metadata: ep.Dispatched,
        output_shape: jax.Array,
        is_batch_sharded_by_expert: bool,
    ) -> jax.Array:
        """The experts' rows [capacity, H] -> weighted sums of this device's tokens [batch * sequence, H]."""
        del routing, output_shape
        if not is_batch_sharded_by_expert:
            raise ValueError("the batch is replicated over the EP axis: docs/parallelism.md has the recipe")
        if intermediate_output.shape[-1] != self.group.hidden:
            raise ValueError(
                f"rows have {intermediate_output.shape[-1]} channels, and the group has {self.group.hidden}: with "
                "tensor parallelism, docs/parallelism.md has the recipe"
            )
        return ep.combine(intermediate_output, route_metadata)

    def unpermute(
        self,
        intermediate: jax.Array,
        sorted_selected_experts: jax.Array,
        weights: jax.Array,
        batch_size: int,
        sequence_length: int,
        use_custom_sort_vjp: bool = True,
        group_sizes: jax.Array | None = None,
    ) -> jax.Array:
        """[batch, sequence, H]. combine has summed with the weights already."""
        del sorted_selected_experts, weights, use_custom_sort_vjp, group_sizes
        if len(intermediate) != batch_size * sequence_length:
            raise ValueError(
                f"intermediate has {len(intermediate)} rows for {batch_size * sequence_length} tokens: call "
                "unsort_output_and_ra2a before, also if there is one EP rank"
            )
        return intermediate.reshape(batch_size, sequence_length, -1)
