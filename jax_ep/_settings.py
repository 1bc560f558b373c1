"""What a group is made of: the arguments of `Group`, checked."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jax_ep import _checks
from jax_ep._constants import MAX_TOP_K

MAX_SMS = 1024  # more than any GPU has


class GroupSettings:
    """The facts of a group that its backend and its results need. `Group` is the only subclass, and documents them."""

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: jax.typing.DTypeLike,
        num_sms: int | None,
        timeout: float,
    ) -> None:
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh of devices")
        if axis_name not in mesh.axis_names:
            raise ValueError(f"axis_name is {axis_name!r}; it must be one of the mesh's axes {mesh.axis_names}")
        self.mesh = mesh
        self.axis_name = axis_name
        self.num_ranks: int = mesh.shape[axis_name]
        self.num_experts = _checks.integer("num_experts", num_experts, 1, _checks.MAX_INT32)
        self.top_k = _checks.integer("top_k", top_k, 1, MAX_TOP_K)
        self.max_tokens_per_rank = _checks.integer("max_tokens_per_rank", max_tokens_per_rank, 1, _checks.MAX_INT32)
        self.dtype = _checks.dtype("dtype", dtype)
        self.hidden = _checks.integer("hidden", hidden, 1, _checks.MAX_INT32 // self.dtype.itemsize)
        self.num_sms = None if num_sms is None else _checks.integer("num_sms", num_sms, 1, MAX_SMS)
        self.timeout = _seconds(timeout)
        if self.num_experts % self.num_ranks:
            up = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"num_experts is {num_experts}; it must be a multiple of the {self.num_ranks} ranks along mesh axis "
                f"{axis_name!r}, e.g. {up}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {top_k}; it must be at most num_experts = {num_experts}")
        self.experts_per_rank = self.num_experts // self.num_ranks
        row_bytes = self.hidden * self.dtype.itemsize
        if row_bytes % 16:
            unit = 16 // self.dtype.itemsize
            raise ValueError(
                f"hidden is {hidden}, a row of {row_bytes} bytes in {self.dtype}; it must be a multiple of {unit} "
                f"(16 bytes), e.g. {-(-self.hidden // unit) * unit}"
            )


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise TypeError(f"timeout is {timeout!r}, a {type(timeout).__name__}; it must be a number of seconds")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; it must be a positive, finite number of seconds")
    return float(timeout)
