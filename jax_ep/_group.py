"""The group of devices over which experts are spread."""

from __future__ import annotations

import inspect
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jax_ep import _backends, _processes
from jax_ep._settings import GroupSettings, Mesh, mesh_or_context
from jax_ep._stats import GroupStats
from jax_ep._types import Backend

BackendName: TypeAlias = Literal["auto", "cuda", "collectives", "reference", "emulated"]


class Group(GroupSettings):
    """An expert-parallel group: the devices along one or more mesh axes, which share `num_experts` experts.

    Rank r, the index along `axis_name`, owns the experts [r * E_local, (r + 1) * E_local) with
    E_local = num_experts // num_ranks. For each index along the mesh's other axes, the devices along `axis_name` form a
    separate group of the same shape. A group is static data: JAX hashes it by identity, and jitted functions may
    close over it. `with Group(...) as group:` closes the group at the end of the block. All arguments are read-only
    attributes. num_ranks, experts_per_rank, axis_names (axis_name as a tuple), has_devices and backend (the name of the
    chosen backend) are also read-only attributes.

    Args:
        mesh: the `jax.sharding.Mesh` of the surrounding `jax.shard_map`. None means the mesh of `jax.set_mesh`. With a
            `jax.sharding.AbstractMesh`, the group has no devices: you can trace, lower and export its programs. To run
            them, open an equal group on devices (`open`).
        axis_name: the mesh axis along which experts are spread, or a tuple of axes. With a tuple, a rank is the index
            along the flattened axes, the first axis major. `jax.shard_map` must make these axes manual; it may leave
            the other axes automatic. With the backend "cuda", a group has at most 32 ranks, or 256 over a network.
        num_experts: the number of experts on all ranks, a multiple of the number of ranks.
        top_k: experts per token, 1 to 32, and at most num_experts.
        hidden: channels of a token; hidden * itemsize must be a multiple of 16 bytes.
        max_tokens_per_rank: the largest T (tokens per rank) of any call.
        dtype: the dtype of activations: bfloat16, float16 or float32.
        backend: the code that moves the rows. All backends give the same results.

            - "cuda": jax_ep's kernels, on GPUs. `jax_ep.backends()` says whether it is available, or the reason.
            - "collectives": plain JAX, on any devices.
            - "reference": plain JAX, on any devices. Each rank gathers the tokens of all ranks.
            - "auto": "cuda" if all devices and links of the group can run the kernels; otherwise, "reference" on CPUs
              and "collectives" elsewhere. On GPUs, "collectives" warns and gives the reason. On an AbstractMesh, "auto"
              chooses by the mesh's abstract_device.
            - "emulated": for the tests of a source checkout. It runs the kernels of "cuda" on CPU devices.
        num_sms: streaming multiprocessors (SMs) that one operation may use; None lets each operation choose. A
            split-phase call (`dispatch_start`, `combine_start`) uses at most 64 SMs and at most half of the device's
            SMs. With None, it uses at most 32.
        timeout: seconds. With the backend "cuda", an operation fails if a device waits longer for another rank. A
            process also waits at most this long for the other processes when the group is made. Operations of the
            backends in plain JAX have no time-out.
        replicas: B, the number of replica slots per rank, 0 to E_local. A plan of `balance` fills them with copies of
            other ranks' experts. A dispatch along a plan returns E_local + B entries per rank: first the rank's own
            experts, then the slots. A dispatch without a plan returns E_local entries; if B > 0, in the layout
            "expert", it also copies its rows once in memory. With the backend "cuda", a group with replicas has at most
            4096 experts.
        max_arena_bytes: with the backend "cuda", the most bytes per device for rows in transit. If the rows of
            max_tokens_per_rank tokens need more, operations with many tokens run in rounds, as several kernels one
            after another. The results have the same bits. Split-phase calls have no rounds: with too many tokens, they
            raise an error that names the bytes that they need. None means 512 MiB if one round would need more than
            2 GiB, and no rounds otherwise.

    With `jax.distributed`, every process that owns devices of the mesh must make the same groups in the same order.

    Raises:
        ValueError, TypeError: an argument is not valid. The message gives the valid values.
        jax_ep.Error: the group's memory does not fit on a device, or another process makes no group or a different
            group.

    Examples:
        >>> with ep.Group(mesh, num_experts=2 * R, top_k=2, hidden=64, max_tokens_per_rank=8) as small:
        ...     (small.num_ranks, small.experts_per_rank) == (R, 2)
        True
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        axis_name: str | tuple[str, ...] = "ep",
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        backend: BackendName = "auto",
        num_sms: int | None = None,
        timeout: float = 300.0,
        replicas: int = 0,
        max_arena_bytes: int | None = None,
    ) -> None:
        super().__init__(
            mesh,
            axis_name,
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            num_sms=num_sms,
            timeout=timeout,
            replicas=replicas,
            max_arena_bytes=max_arena_bytes,
        )
        choice = _backends.choose(backend, self.mesh, axis_name, self.timeout)
        self.backend: str = choice.backend
        """Name of the backend in use."""
        self._impl = _backends.open_backend(choice, self)
        self._without_tokens = _backends.open_backend(_backends.Choice("reference"), self)
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
        """Bytes of memory that the group holds on each device, in addition to XLA's memory."""
        return self._impl.memory_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._impl.closed

    def open(self, mesh: jax.sharding.Mesh | None = None) -> Group:
        """Makes an equal group on the devices of `mesh`. Programs that were lowered with this group run with it.

        Use it for a group on a `jax.sharding.AbstractMesh`, which has no devices, or to replace a closed group.

        Args:
            mesh: a mesh of devices with the same axes as this group's mesh. None means the mesh of `jax.set_mesh`.

        Raises:
            ValueError, TypeError: the mesh has other axes or no devices, or the backend cannot be used on it.

        Examples:
            >>> abstract = ep.Group(mesh.abstract_mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T)
            >>> with abstract.open(mesh) as opened:
            ...     (abstract.has_devices, opened.has_devices)
            (False, True)
        """
        mesh = _mesh_to_open(mesh, self)
        names = [name for name, p in inspect.signature(Group).parameters.items() if p.kind is p.KEYWORD_ONLY]
        return Group(mesh, self.axis_name, **{name: getattr(self, name) for name in names})

    def close(self) -> None:
        """Closes the group and frees its memory on the devices. A second call has no effect.

        Call `jax.block_until_ready` on the results first: with the backend "cuda", programs that still run return
        poison or raise an error. Later, an operation of the group raises `ValueError` when JAX traces it. `check` and
        `stats` still work. In several processes, each process closes its groups.

        Examples:
            >>> small = ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T)
            >>> small.close()
            >>> small.closed
            True
        """
        self._impl.close()

    def check(self) -> None:
        """Raises the error that an operation recorded on a device, if there is one.

        After such an error, results may be poison: rows are NaN, counts are 0, and num_dropped is -1. `check` waits for
        no device, so call `jax.block_until_ready` on the results first. With a backend in plain JAX, it never raises.

        Raises:
            jax_ep.PeerTimeoutError: a rank waited for another rank longer than the timeout.
            jax_ep.Error: any other failure, for example: ranks ran different calls, operations of one group overlapped
                on a device, or a program placed ranks on other devices than the mesh.

        Examples:
            >>> recv = on_each_rank(lambda x, topk_idx: ep.dispatch(x, topk_idx, group=group).x)(x, topk_idx)
            >>> recv = jax.block_until_ready(recv)
            >>> group.check()  # raises nothing: no operation has failed
        """
        self._impl.check()

    def stats(self) -> GroupStats:
        """Returns counters of this process's ranks since the group was made, and how long they waited for each rank.

        Counting costs the operations no time. This method reads the devices' counters and waits for no operation. So
        the counters may include only a part of an operation in flight, or nothing of it. The method also works on a
        closed group. Only the backend "cuda" counts.

        Raises:
            ValueError: the group is on an AbstractMesh.

        Examples:
            >>> before = group.stats()
            >>> recv = on_each_rank(lambda x, topk_idx: ep.dispatch(x, topk_idx, group=group).x)(x, topk_idx)
            >>> recv = jax.block_until_ready(recv)
            >>> after = group.stats()
            >>> if group.backend == "cuda":  # the other backends count nothing
            ...     rows = after.rows_sent - before.rows_sent
        """
        if not isinstance(self.mesh, jax.sharding.Mesh):
            raise ValueError("stats: the group is on an AbstractMesh and has no devices; ask the group that runs")
        here = [
            (rank, str(device))
            for ep_group in _processes.ep_groups(self.mesh, self.axis_name)
            for rank, device in enumerate(ep_group)
            if device.process_index == jax.process_index()
        ]
        ranks, devices = zip(*here, strict=True)
        return GroupStats(ranks, devices, **self._impl.stats())

    def _backend_for(self, num_tokens: int) -> Backend:
        """The backend that moves `num_tokens` tokens per rank: the reference backend for 0, as no rank must wait."""
        return self._impl if num_tokens else self._without_tokens

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Group({self.num_ranks} ranks along {self.axis_name!r}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, hidden={self.hidden}, max_tokens_per_rank={self.max_tokens_per_rank}, "
            f"dtype={self.dtype}, backend={self.backend!r}{'' if self.has_devices else ', no devices'}"
            f"{', closed' if self.closed else ''})"
        )


def _mesh_to_open(mesh: Any, group: Group) -> jax.sharding.Mesh:
    """The mesh with devices on which `group` is opened."""
    mesh = mesh_or_context(mesh)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError("open: mesh is an AbstractMesh; it must be a jax.sharding.Mesh of devices")
    if list(mesh.shape.items()) != list(group.mesh.shape.items()):  # programs depend on the axes' order, too
        raise ValueError(
            f"open: mesh is {dict(mesh.shape)}; it must have the group's axes, in their order: {dict(group.mesh.shape)}"
        )
    return mesh


def check_usable(op: str, value: Any) -> None:
    """`value` is an open group, and `op` is called inside a shard_map that makes the group's axes manual."""
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
    if dict(mesh.shape) != wanted:
        raise ValueError(
            f"{op}: the surrounding jax.shard_map has the mesh {dict(mesh.shape)}, the group {wanted}; "
            "pass mesh=group.mesh to jax.shard_map, or make the Group on the mesh of the jax.shard_map"
        )
    if automatic := tuple(name for name in group.axis_names if name not in mesh.manual_axes):
        raise ValueError(
            f"{op}: the surrounding jax.shard_map leaves the group's own axes {automatic} automatic: it makes only "
            f"{tuple(mesh.manual_axes)} manual. The axes of axis_name = {group.axis_name!r} must be manual: add "
            f"{automatic} to axis_names= of jax.shard_map, or leave axis_names= out"
        )
