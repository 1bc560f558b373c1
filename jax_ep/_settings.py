"""What a group is made of: the arguments of `Group`, checked."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import numpy as np

from jax_ep import _checks, _compat
from jax_ep._constants import MAX_TOP_K

MAX_SMS = 1024  # more than any GPU has

Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


class GroupSettings:
    """The facts of a group that its backend and its results need. `Group` is the only subclass, and documents them."""

    def __init__(
        self,
        mesh: Mesh | None,
        axis_name: str | tuple[str, ...],
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: jax.typing.DTypeLike,
        num_sms: int | None,
        timeout: float,
        replicas: int,
        max_arena_bytes: int | None,
    ) -> None:
        self.mesh = mesh_or_context(mesh)
        self.axis_name = axis_name
        self.axis_names = _axis_names(axis_name, self.mesh)
        """The axes of axis_name as a tuple, major first."""
        self.num_ranks = math.prod(self.mesh.shape[name] for name in self.axis_names)
        self.num_experts = _checks.integer("num_experts", num_experts, 1, _checks.MAX_INT32)
        self.top_k = _checks.integer("top_k", top_k, 1, MAX_TOP_K)
        self.max_tokens_per_rank = _checks.integer("max_tokens_per_rank", max_tokens_per_rank, 1, _checks.MAX_INT32)
        self.dtype = _checks.dtype("dtype", dtype)
        self.hidden = _checks.integer("hidden", hidden, 1, _checks.MAX_INT32 // self.dtype.itemsize)
        self.num_sms = None if num_sms is None else _checks.integer("num_sms", num_sms, 1, MAX_SMS)
        self.timeout = _seconds(timeout)
        self.max_arena_bytes = (
            None if max_arena_bytes is None else _checks.integer("max_arena_bytes", max_arena_bytes, 1, 2**63 - 1)
        )
        if self.num_experts % self.num_ranks:
            up = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"num_experts is {num_experts}; it must be a multiple of the {self.num_ranks} ranks along mesh axis "
                f"{axis_name!r}, e.g. {up}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {top_k}; it must be at most num_experts = {num_experts}")
        self.experts_per_rank = self.num_experts // self.num_ranks
        self.replicas = _checks.integer("replicas", replicas, -_checks.MAX_INT32)
        if not 0 <= self.replicas <= self.experts_per_rank:
            raise ValueError(
                f"replicas is {replicas}; it must be 0 to {self.experts_per_rank}, the number of experts per rank: no "
                "plan needs more copies"
            )
        self.slots_per_rank = self.experts_per_rank + self.replicas
        """The experts that a rank can compute: its own, and copies of other ranks' experts behind them."""
        row_bytes = self.hidden * self.dtype.itemsize
        if row_bytes % 16:
            unit = 16 // self.dtype.itemsize
            raise ValueError(
                f"hidden is {hidden}, a row of {row_bytes} bytes in {self.dtype}; it must be a multiple of {unit} "
                f"(16 bytes), e.g. {-(-self.hidden // unit) * unit}"
            )

    @property
    def has_devices(self) -> bool:
        """Whether the mesh has devices. A `jax.sharding.AbstractMesh` has none."""
        return isinstance(self.mesh, jax.sharding.Mesh)


def mesh_or_context(mesh: Any) -> Mesh:
    """`mesh`, or the mesh of the context if it is None."""
    if mesh is None:
        if (mesh := _compat.mesh_in_context()) is None:
            raise ValueError(
                "mesh is None, and no mesh is set: call ep.Group in `with jax.set_mesh(mesh):` (a bare `with mesh:` "
                "does not set it), or pass mesh=mesh"
            )
    elif not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(
            f"mesh is {mesh!r}, {_checks.kind(mesh)}; it must be a jax.sharding.Mesh, a jax.sharding.AbstractMesh, or "
            "None for the mesh of jax.set_mesh"
        )
    return mesh


def _axis_names(axis_name: Any, mesh: Mesh) -> tuple[str, ...]:
    """The axes that `axis_name` names, all of them different axes of `mesh`."""
    if isinstance(axis_name, tuple):
        names, wanted = axis_name, f"a tuple of different axes of the mesh, {mesh.axis_names}"
    else:
        names, wanted = (axis_name,), f"one of the mesh's axes {mesh.axis_names}, or a tuple of them"
    if not names or len(set(map(str, names))) < len(names) or any(name not in mesh.axis_names for name in names):
        raise ValueError(f"axis_name is {axis_name!r}; it must be {wanted}")
    return names


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise TypeError(f"timeout is {timeout!r}, a {type(timeout).__name__}; it must be a number of seconds")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; it must be a positive, finite number of seconds")
    return float(timeout)
