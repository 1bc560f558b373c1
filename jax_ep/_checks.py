"""Checks that several operations share. Each error names the operation, the argument, its value and what would fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._group import Group
from jax_ep._types import Dispatched, Pending, Route
from jax_ep._wires import CHANNELS_PER_SCALE, WIRES


def group(op: str, value: Any) -> None:
    """`value` is an open group, and `op` is called inside a shard_map over the whole of its mesh."""
    if not isinstance(value, Group):
        raise TypeError(f"{op}: group is a {type(value).__name__}; it must be a jax_ep.Group")
    if value.closed:
        raise ValueError(f"{op}: group is closed: {value}; make a new Group")
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


def array(op: str, name: str, value: Any, dims: dict[str, int | None], dtype: Any) -> None:
    """`value` is an array of `dtype` whose dimensions are `dims`: a letter each, and a size where it is fixed."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be an array")
    shape = tuple(value.shape)
    fits = len(shape) == len(dims) and all(
        want in (None, size) for size, want in zip(shape, dims.values(), strict=True)
    )
    if not fits:
        fixed = ", ".join(f"{letter} = {size}" for letter, size in dims.items() if size is not None)
        raise ValueError(
            f"{op}: {name} has shape {shape}; it must be [{', '.join(dims)}]{f' with {fixed}' if fixed else ''}"
        )
    if value.dtype != dtype:
        want = jnp.dtype(dtype).name
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; it must be {want} (use {name}.astype({want!r}))")


def num_rows(op: str, letter: str, size: int, group: Group) -> None:
    """`size` tokens or rows fit in the group."""
    if size > group.max_tokens_per_rank:
        raise ValueError(
            f"{op}: x has {letter} = {size} rows; at most max_tokens_per_rank = {group.max_tokens_per_rank} fit; "
            f"make the Group with max_tokens_per_rank={size}"
        )


def wire(op: str, value: Any, group: Group) -> None:
    """`value` is a wire format, or None, that can carry the group's rows."""
    if value is not None and value not in WIRES:
        raise ValueError(f"{op}: wire is {value!r}; it must be None or one of {sorted(WIRES)}")
    if value is not None and group.hidden % CHANNELS_PER_SCALE:
        raise ValueError(
            f"{op}: wire is {value!r}, which needs hidden to be a multiple of {CHANNELS_PER_SCALE}; the group's is "
            f"{group.hidden}: use wire=None"
        )


def choice(op: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def received(op: str, value: Any) -> Route:
    """`value` is what dispatch returned; its route."""
    if not isinstance(value, Dispatched):
        raise TypeError(f"{op}: recv is a {type(value).__name__}; it must be what dispatch returned")
    return value.route


def pending(op: str, value: Any) -> Any:
    """`value` is what `op`_start returned; its static part."""
    if not isinstance(value, Pending) or value.op != op:
        given = f"of {value.op}_start" if isinstance(value, Pending) else f"a {type(value).__name__}"
        raise TypeError(f"{op}_done: pending is {given}; it must be what {op}_start returned")
    return value.static
