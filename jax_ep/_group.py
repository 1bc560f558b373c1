"""The group of devices over which experts are spread."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _backends, _checks, _processes
from jax_ep._stats import GroupStats

MAX_TOP_K = 32  # kMaxTopK in ffi/arena.h
MAX_SMS = 1024  # more than any GPU has


class Group:
    """An expert-parallel group: the devices along one mesh axis, which share `num_experts` experts.

    Rank r, the index along `axis_name`, owns the experts [r * E_local, (r + 1) * E_local) with
    E_local = num_experts // num_ranks. Every setting of the mesh's other axes is a group of its own, with the same
    shape. A group is static: it is hashed by identity, may be closed over by jitted functions, and is a context manager
    that closes itself. What it was made with are its attributes, which cannot be set; so are num_ranks,
    experts_per_rank and backend, the name of the one that was chosen.

    Args:
        mesh: the `jax.sharding.Mesh` of the surrounding `jax.shard_map`.
        axis_name: the mesh axis along which experts are spread.
        num_experts: experts in all, a multiple of the number of ranks.
        top_k: experts per token, 1 to 32.
        hidden: channels of a token; hidden * itemsize must be a multiple of 16 bytes.
        max_tokens_per_rank: the largest T of any call.
        dtype: of activations: bfloat16, float16 or float32.
        backend: "auto" takes the fastest that works here, `jax_ep.backends()` lists them.
        num_sms: streaming multiprocessors that one operation may use; None lets each choose. In halves
            (`dispatch_start`, `combine_start`) it uses at most 64 whatever this says, and 32 with None.
        timeout: seconds that a device waits for a peer before the operation fails; in making the group, seconds that a
            process waits for the others.

    With `jax.distributed`, every process that owns devices of the mesh makes the same groups in the same order.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says what would.
        Error: the group's memory does not fit on a device, or a process does not come or makes another group.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str = "ep",
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        backend: str = "auto",
        num_sms: int | None = None,
        timeout: float = 300.0,
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
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
            raise TypeError(f"timeout is {timeout!r}, a {type(timeout).__name__}; it must be a number of seconds")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout}; it must be a positive, finite number of seconds")
        self.timeout = float(timeout)
        if self.num_experts % self.num_ranks:
            up = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"num_experts is {num_experts}; it must be a multiple of the {self.num_ranks} ranks along mesh axis "
                f"{axis_name!r}, e.g. {up}"
            )
        self.experts_per_rank = self.num_experts // self.num_ranks
        row_bytes = self.hidden * self.dtype.itemsize
        if row_bytes % 16:
            unit = 16 // self.dtype.itemsize
            raise ValueError(
                f"hidden is {hidden}, a row of {row_bytes} bytes in {self.dtype}; it must be a multiple of {unit} "
                f"(16 bytes), e.g. {-(-self.hidden // unit) * unit}"
            )
        self.backend = _backends.choose(backend, mesh, axis_name, self.timeout)
        """Name of the backend in use."""
        self._impl = _backends.open_backend(self.backend, self)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_made", False):
            raise AttributeError(f"Group.{name} cannot be set: programs are compiled for a group as it is made")
        super().__setattr__(name, value)

    def __copy__(self) -> Group:
        return self  # it is hashed by identity and owns memory

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that the group holds on each device, outside XLA's."""
        return self._impl.memory_bytes

    @property
    def closed(self) -> bool:
        return self._impl.closed

    def close(self) -> None:
        """Gives the group's memory back. Closing twice is fine; tracing an operation of a closed group is an error."""
        self._impl.close()

    def check(self) -> None:
        """Raises what went wrong on a device, if anything did: results up to then may be poison.

        Raises:
            PeerTimeoutError: a rank waited for another longer than the timeout.
            Error: ranks were in different calls, or on other devices than those of the mesh.
        """
        self._impl.check()

    def stats(self) -> GroupStats:
        """What this process's ranks have done since the group was opened, and how long they waited for which rank.

        Devices count as they work, at no cost to it. This reads their counters and waits for no operation, so that one
        under way is counted in part or not at all; it works on a closed group, too.
        """
        here = [
            (rank, str(device))
            for line in _processes.lines(self.mesh, self.axis_name)
            for rank, device in enumerate(line)
            if device.process_index == jax.process_index()
        ]
        ranks, devices = zip(*here, strict=True)
        return GroupStats(ranks, devices, **self._impl.stats())

    def _backend_for(self, num_tokens: int) -> _backends.Backend:
        """What moves `num_tokens` tokens per rank. Where there are none, no rank need wait for another."""
        return self._impl if num_tokens else _backends.open_backend("reference", self)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Group({self.num_ranks} ranks along {self.axis_name!r}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, hidden={self.hidden}, max_tokens_per_rank={self.max_tokens_per_rank}, "
            f"dtype={self.dtype}, backend={self.backend!r}{', closed' if self.closed else ''})"
        )


def check_usable(op: str, value: Any) -> None:
    """`value` is an open group, and `op` is called inside a shard_map over the whole of its mesh."""
    if not isinstance(value, Group):
        raise TypeError(f"{op}: group is a {type(value).__name__}; it must be a jax_ep.Group")
    if value.closed:
        raise ValueError(f"{op}: group is closed: {value}; make a new Group")
    value.check()
    _inside_shard_map(op, value)


def _inside_shard_map(op: str, group: Group) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    wanted = dict(group.mesh.shape)
    if not mesh.manual_axes:
        raise ValueError(
            f"{op}: called outside jax.shard_map; call it in a function that jax.shard_map(..., mesh=group.mesh) maps "
            f"over the group's mesh {wanted}"
        )
    if not mesh.are_all_axes_manual:
        automatic = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
        raise ValueError(
            f"{op}: the surrounding jax.shard_map leaves the mesh axes {automatic} automatic, so that XLA would gather "
            "the operands; make all axes manual: leave out axis_names="
        )
    if dict(mesh.shape) != wanted:
        raise ValueError(
            f"{op}: the surrounding jax.shard_map has the mesh {dict(mesh.shape)}, the group {wanted}; "
            "pass mesh=group.mesh to jax.shard_map"
        )
