"""Expert-parallel dispatch and combine for mixture-of-experts models in JAX.

Example: a layer on all devices, with R ranks, E experts, K experts per token, T tokens per rank, H channels:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_ep as ep
    >>> R = jax.device_count()
    >>> E, K, T, H = 2 * R, 2, 4, 128
    >>> mesh = jax.make_mesh((R,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> group = ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T)
    >>> def on_each_rank(function):
    ...     split = jax.sharding.PartitionSpec("ep")
    ...     return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split))
    >>> x = jax.random.normal(jax.random.key(0), (R * T, H), group.dtype)
    >>> router = jax.nn.softmax(jax.random.normal(jax.random.key(1), (R * T, E)))
    >>> topk_weights, topk_idx = jax.lax.top_k(router, K)
    >>> w = jax.random.normal(jax.random.key(2), (E, H, H), group.dtype)
    >>> def layer(x, topk_idx, topk_weights, w):
    ...     recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
    ...     y = jax.lax.ragged_dot(recv.x, w, recv.group_sizes)
    ...     return ep.combine(y, recv)
    >>> on_each_rank(layer)(x, topk_idx, topk_weights, w).shape == x.shape
    True

The examples of all functions and classes go on from here.
"""

from jax_ep import moe
from jax_ep._all_to_all import all_to_all, all_to_all_back
from jax_ep._backends import BackendStatus, backends
from jax_ep._balance import Plan, balance, replicate
from jax_ep._combine import combine, combine_done, combine_start
from jax_ep._dequantize import dequantize
from jax_ep._dispatch import dispatch, dispatch_done, dispatch_like, dispatch_start
from jax_ep._dispatch_layout import DispatchLayout, dispatch_layout
from jax_ep._errors import Error, PeerTimeoutError, SplitCallError
from jax_ep._export import export_checks
from jax_ep._group import Group
from jax_ep._stats import GroupStats
from jax_ep._token_layout import expand, reduce
from jax_ep._types import AllToAll, Dispatched, Expanded

__all__ = [
    "AllToAll",
    "BackendStatus",
    "DispatchLayout",
    "Dispatched",
    "Error",
    "Expanded",
    "Group",
    "GroupStats",
    "PeerTimeoutError",
    "Plan",
    "SplitCallError",
    "all_to_all",
    "all_to_all_back",
    "backends",
    "balance",
    "combine",
    "combine_done",
    "combine_start",
    "dequantize",
    "dispatch",
    "dispatch_done",
    "dispatch_layout",
    "dispatch_like",
    "dispatch_start",
    "expand",
    "export_checks",
    "moe",
    "reduce",
    "replicate",
]

__version__ = "0.1.0"
