"""A mixture-of-experts layer on `dispatch` and `combine`: the router's arithmetic, and the experts' MLP.

Example: a layer of SwiGLU experts, with I channels inside each expert:

    >>> from functools import partial
    >>> I = 64
    >>> w_router = jax.random.normal(jax.random.key(3), (H, E), group.dtype)
    >>> w_gate_up = jax.random.normal(jax.random.key(4), (E, H, 2 * I), group.dtype)
    >>> w_down = jax.random.normal(jax.random.key(5), (E, I, H), group.dtype)
    >>> split, whole = jax.sharding.PartitionSpec("ep"), jax.sharding.PartitionSpec()
    >>> @jax.jit
    ... @partial(jax.shard_map, mesh=mesh, in_specs=(split, whole, split, split), out_specs=split)
    ... def moe_layer(x, w_router, w_gate_up, w_down):
    ...     routing = ep.moe.route(x @ w_router, top_k=K)
    ...     return ep.moe.mlp(x, routing.topk_idx, routing.topk_weights, w_gate_up, w_down, group=group)
    >>> moe_layer(x, w_router, w_gate_up, w_down).shape == x.shape
    True
"""

from jax_ep.moe._layer import mlp
from jax_ep.moe._routing import Routing, route

__all__ = ["Routing", "mlp", "route"]
