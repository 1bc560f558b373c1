"""Checks that several operations share. Each error names the operation, the argument, its value and what would fit."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep._wires import CHANNELS_PER_UNIT, WIRES

DTYPES = ("bfloat16", "float16", "float32")  # of activations
SETTINGS = {"E": "num_experts", "H": "hidden", "K": "top_k"}  # what a group fixes of an argument's shape
SWAPPED = "are topk_idx and topk_weights swapped? jax.lax.top_k returns the ids second"
MAX_INT32 = 2**31 - 1  # experts, tokens and rows are numbered in int32


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` is an int (a NumPy one will do) from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        is_number = isinstance(value, float) and math.isfinite(value)
        example = f", such as {math.ceil(value)}" if is_number else " known when tracing"
        raise TypeError(f"{name} is {value!r}, {kind(value)}; it must be an int{example}")
    if value < least or (most is not None and value > most):
        raise ValueError(
            f"{name} is {value}; it must be {f'at least {least}' if most is None else f'{least} to {most}'}"
        )
    return int(value)


def positive(name: str, value: Any) -> Any:
    """`value` is a positive, finite number, static. It is returned unchanged: float(float32) prints other digits."""
    _number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be positive and finite")
    return value


def not_negative(name: str, value: Any) -> float:
    """`value` is a finite number that is not negative, static."""
    _number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be finite and at least 0")
    return float(value)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {value!r}, {kind(value)}; it must be a number known when tracing")


def array(op: str, name: str, value: Any, dims: dict[str, int | None], dtype: Any, no_cast: str = "") -> None:
    """`value` is an array of `dtype` whose dimensions are `dims`: a letter each, and a size where it is fixed.

    `no_cast`: the advice in the error message if a cast would change the meaning of the values.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{op}: {name} is {kind(value)}; it must be an array")
    shape = tuple(value.shape)
    fits = len(shape) == len(dims) and all(
        want in (None, size) for size, want in zip(shape, dims.values(), strict=True)
    )
    if not fits:
        origins = {letter: f"group.{setting} = " for letter, setting in SETTINGS.items()}
        fixed = ", ".join(f"{d} = {origins.get(d, '')}{size}" for d, size in dims.items() if size is not None)
        raise ValueError(
            f"{op}: {name} has shape {shape}; it must be [{', '.join(dims)}]{f' with {fixed}' if fixed else ''}"
        )
    if value.dtype != dtype:
        want = jnp.dtype(dtype)
        fix = f"use {name}.astype({want.name!r})" if may_cast(value.dtype, want) else no_cast
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; it must be {want.name}{f' ({fix})' if fix else ''}")


def may_cast(found: Any, want: np.dtype) -> bool:
    """Whether values mean the same in the other dtype: both are integers, or floating-point numbers without scales."""
    kinds = (jnp.integer, jnp.floating)
    same = any(jnp.issubdtype(found, of) and jnp.issubdtype(want, of) for of in kinds)
    return same and (jnp.issubdtype(want, jnp.integer) or min(found.itemsize, want.itemsize) > 1)


def kind(value: Any) -> str:
    """What `value` is, with an article."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return "an array"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def num_rows(op: str, letter: str, size: int, max_tokens_per_rank: int, name: str = "x") -> None:
    """`size` tokens or rows fit in a group with this maximum."""
    if size > max_tokens_per_rank:
        raise ValueError(
            f"{op}: {name} has {letter} = {size} rows; at most max_tokens_per_rank = {max_tokens_per_rank} fit; "
            f"make the Group with max_tokens_per_rank={size}"
        )


def wire(op: str, value: Any, hidden: int, name: str = "wire", formats: Collection[str] = WIRES) -> None:
    """`value` is None, or one of `formats` that can carry rows of `hidden` channels. `name`: of the argument."""
    choice(f"{op}: {name}", value, (None, *formats))
    if value is not None and hidden % CHANNELS_PER_UNIT:
        raise ValueError(
            f"{op}: {name} is {value!r}, which needs hidden to be a multiple of {CHANNELS_PER_UNIT}; the group's is "
            f"{hidden}: use {name}=None"
        )


def choice(name: str, value: Any, choices: Collection[str | None]) -> None:
    """`value` is one of `choices`; it may be of any type, such as an array, which does not compare."""
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def boolean(op: str, name: str, value: Any) -> None:
    """`value` is True or False, static."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{op}: {name} is {value!r}, {kind(value)}; it must be True or False, a bool known when tracing"
        )


def dtype(name: str, value: Any) -> np.dtype:
    """`value` as the dtype of activations."""
    try:
        found = jnp.dtype(value)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise TypeError(f"{name} is {value!r}; it must be one of {', '.join(DTYPES)}")
    return found
