"""Checks that several operations share. Each error names the operation, the argument, its value and what would fit."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jax_ep._types import Dispatched, Pending, Route
from jax_ep._wires import CHANNELS_PER_SCALE, WIRES

if TYPE_CHECKING:
    from jax_ep._group import Group

DTYPES = ("bfloat16", "float16", "float32")  # of activations
MAX_INT32 = 2**31 - 1  # experts, tokens and rows are numbered in int32


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` is an int (a NumPy one will do) from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it must be a (static) int")
    if value < least or (most is not None and value > most):
        raise ValueError(
            f"{name} is {value}; it must be {f'at least {least}' if most is None else f'{least} to {most}'}"
        )
    return int(value)


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
    choice(f"{op}: wire", value, (None, *WIRES))
    if value is not None and group.hidden % CHANNELS_PER_SCALE:
        raise ValueError(
            f"{op}: wire is {value!r}, which needs hidden to be a multiple of {CHANNELS_PER_SCALE}; the group's is "
            f"{group.hidden}: use wire=None"
        )


def choice(name: str, value: Any, choices: Collection[str | None]) -> None:
    """`value` is one of `choices`; it may be of any type, such as an array, which does not compare."""
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def boolean(op: str, name: str, value: Any) -> None:
    """`value` is True or False, static."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value!r}, a {type(value).__name__}; it must be a (static) bool")


def dtype(name: str, value: Any) -> np.dtype:
    """`value` as the dtype of activations."""
    try:
        found = jnp.dtype(value)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise TypeError(f"{name} is {value!r}; it must be one of {', '.join(DTYPES)}")
    return found


def received(op: str, value: Any) -> Route:
    """`value` is what dispatch returned; its route."""
    if not isinstance(value, Dispatched):
        raise TypeError(f"{op}: recv is a {type(value).__name__}; it must be what dispatch returned")
    return value.route


def pending(op: str, value: Any) -> None:
    """`value` is what `op`_start returned."""
    if not isinstance(value, Pending) or value.op != op:
        given = f"of {value.op}_start" if isinstance(value, Pending) else f"a {type(value).__name__}"
        raise TypeError(f"{op}_done: pending is {given}; it must be what {op}_start returned")
