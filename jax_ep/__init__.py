"""Expert-parallel dispatch and combine for mixture-of-experts models in JAX.

import jax_ep as ep

group = ep.Group(mesh, num_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128)

recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")  # inside jax.shard_map
y = jax.lax.ragged_dot(recv.x, w, recv.group_sizes)
out = ep.combine(y, recv)
"""

from jax_ep._all_to_all import all_to_all, all_to_all_back
from jax_ep._backends import BackendStatus, backends
from jax_ep._combine import combine, combine_done, combine_start
from jax_ep._dequantize import dequantize
from jax_ep._dispatch import dispatch, dispatch_done, dispatch_like, dispatch_start
from jax_ep._dispatch_layout import DispatchLayout, dispatch_layout
from jax_ep._errors import Error, PeerTimeoutError, SplitCallError
from jax_ep._group import Group
from jax_ep._stats import GroupStats
from jax_ep._types import AllToAll, Dispatched

__all__ = [
    "AllToAll",
    "BackendStatus",
    "DispatchLayout",
    "Dispatched",
    "Error",
    "Group",
    "GroupStats",
    "PeerTimeoutError",
    "SplitCallError",
    "all_to_all",
    "all_to_all_back",
    "backends",
    "combine",
    "combine_done",
    "combine_start",
    "dequantize",
    "dispatch",
    "dispatch_done",
    "dispatch_layout",
    "dispatch_like",
    "dispatch_start",
]

__version__ = "0.1.0"
