"""The XLA FFI targets of the CUDA backend: what each takes and gives, named and in order, as in ffi/cuda/handlers.cc.

`Target.in_order` is the only place that puts operands in order. tests/test_targets.py compares the declarations with
handlers.cc. Every target has one more operand and one more result in front, the token of `_ordered_calls`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Sizes: TypeAlias = Mapping[str, int | tuple[int, ...]]


class Array(NamedTuple):
    """An operand or a result. An array of no elements stands for "none"."""

    name: str
    dims: str
    """Names of dimensions, such as "T K". A dimension whose name begins with "*" stands for any number of them."""
    dtype: Any = None
    """None: that of the call."""


class Result(NamedTuple):
    """The type of one result of one call."""

    shape: tuple[int, ...]
    dtype: Any


NONE = Result((0,), jnp.float32)
_INT, _FLOAT = jnp.int32, jnp.float32
_AXIS_INDEX = Array("axis_index", "", _INT)  # which rank XLA runs: the kernels compare it with the group's mesh
_TICKET = Array("ticket", "2", _INT)  # struct PendingCall in ffi/cuda/call.h


@dataclasses.dataclass(frozen=True)
class Target:
    """One FFI target. T tokens, K = top_k, H channels of a row, R ranks, E local experts, S scales of a row.

    `*rows` are the leading dimensions of received rows, N is how many rows these are. P = T, or 2 T over a network.
    """

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attributes: tuple[str, ...] = ()

    @cached_property
    def start(self) -> Target:
        """The start of a split-phase call: takes the memory of the results as operands."""
        return Target(f"{self.name}_start", (*self.operands, *self.results), (_TICKET,), self.attributes)

    @cached_property
    def done(self) -> Target:
        """The done: takes the operands of the start but for axis_index.

        Its results are in the memory that the start was given for them.
        """
        operands = [operand for operand in self.operands if operand != _AXIS_INDEX]
        return Target(f"{self.name}_done", (*operands, *self.results, _TICKET), self.results)

    def in_order(self, operands: Mapping[str, jax.Array | None]) -> tuple[jax.Array | None, ...]:
        """The operands by name -> in the order of the handler."""
        declared = [operand.name for operand in self.operands]
        if declared_not := set(declared) ^ set(operands):
            raise TypeError(f"{self.name}: operands {sorted(declared_not)} are declared or given, not both")
        return tuple(operands[name] for name in declared)

    def encode(self, attributes: Mapping[str, int | bool]) -> dict[str, np.int64 | bool]:
        """The attributes as the handler decodes them."""
        if set(attributes) != set(self.attributes):
            raise TypeError(f"{self.name}: attributes {sorted(attributes)}; declared are {sorted(self.attributes)}")
        return {name: value if isinstance(value, bool) else np.int64(value) for name, value in attributes.items()}

    def result_types(
        self,
        operands: Mapping[str, jax.Array | None],
        sizes: Sizes,
        dtypes: Mapping[str, Any],
        absent: Collection[str] = (),
    ) -> dict[str, Result]:
        """The type of each result, by name.

        Args:
            operands: their shapes tell the sizes of dimensions, and must agree with each other and with `sizes`.
            sizes: of dimensions that no operand has.
            dtypes: of the results that are declared without one.
            absent: results that the call does not want.
        """
        sizes = dict(sizes)
        for declared in self.operands:
            if (operand := operands.get(declared.name)) is not None:
                self._bind(declared, operand, sizes)
        return {
            result.name: NONE
            if result.name in absent
            else Result(_shape(result, sizes), result.dtype or dtypes[result.name])
            for result in self.results
        }

    def _bind(self, declared: Array, operand: jax.Array, sizes: dict[str, int | tuple[int, ...]]) -> None:
        """Adds the dimensions of an operand to `sizes`."""
        names = declared.dims.split()
        shape: list[int | tuple[int, ...]] = list(operand.shape)
        if names and names[0].startswith("*"):
            num_leading = operand.ndim - len(names) + 1
            shape = [operand.shape[:num_leading], *operand.shape[num_leading:]]
        known = [sizes.setdefault(name, size) for name, size in zip(names, shape, strict=True)]
        if known != shape or operand.dtype != (declared.dtype or operand.dtype):
            want = f"{declared.dtype and np.dtype(declared.dtype)}[{declared.dims}] with {sizes}"
            raise TypeError(f"{self.name}: {declared.name} is {operand.dtype}{operand.shape}; it is declared {want}")


def _shape(declared: Array, sizes: Sizes) -> tuple[int, ...]:
    shape: tuple[int, ...] = ()
    for name in declared.dims.split():
        size = int(name) if name.isdigit() else sizes[name]
        shape += size if isinstance(size, tuple) else (size,)
    return shape


# A route: what dispatch finds out, and the operations along it take again.
_ROUTE = (
    # Index of the token among the rows sent to each rank (for this rank, the token), -1 if it was not sent. Over a
    # network, T more for the tokens that this rank forwarded (DispatchArgs in ffi/cuda/dispatch.h).
    Array("send_slot", "P R", _INT),
    Array("recv_row", "R T K", _INT),  # row here of each arrived (source rank, index, k), -1 if none
    Array("num_recv_per_rank", "R", _INT),  # rows that came from each rank
)
_COUNTS = (Array("counts", "E", _INT), Array("group_sizes", "E", _INT))
_LAYOUT = ("layout", "capacity", "alignment")

DISPATCH = Target(
    "dispatch",
    (
        _AXIS_INDEX,
        Array("x", "T H"),
        Array("x_scales", "T S", _FLOAT),
        Array("topk_idx", "T K", _INT),
        Array("topk_weights", "T K", _FLOAT),
    ),
    (
        Array("out", "*rows H"),
        Array("out_scales", "*rows S", _FLOAT),
        Array("weights", "*rows", _FLOAT),
        *_COUNTS,
        Array("num_dropped", "", _INT),
        *_ROUTE,
    ),
    (*_LAYOUT, "cast", "dequantize", "zero_pad"),
)
DISPATCH_LIKE = Target(
    "dispatch_like", (_AXIS_INDEX, Array("x", "T H"), *_ROUTE, *_COUNTS), (Array("out", "*rows H"),), _LAYOUT
)
DISPATCH_BACK = Target(
    "dispatch_back",
    (_AXIS_INDEX, Array("y", "N H"), Array("weights", "*rows", _FLOAT), *_ROUTE),
    (Array("out", "T H"), Array("topk_weights", "T K", _FLOAT)),
)
COMBINE = Target(
    "combine",
    (_AXIS_INDEX, Array("y", "*rows H"), Array("row_weights", "*rows", _FLOAT), *_ROUTE),
    (Array("out", "T H"),),
)
COMBINE_BACK = Target(
    "combine_back",
    (
        _AXIS_INDEX,
        Array("g", "T H"),
        *_ROUTE,
        *_COUNTS,
        Array("y", "*rows H"),
        Array("row_weights", "*rows", _FLOAT),
    ),
    (Array("y_cotangent", "*rows H"), Array("weights_cotangent", "*rows", _FLOAT)),
    _LAYOUT,
)
ALL_TO_ALL = Target(
    "all_to_all",
    (
        _AXIS_INDEX,
        Array("x", "M H"),
        Array("x_scales", "M S", _FLOAT),
        Array("splits", "R*E", _INT),
        Array("send_slot", "M R", _INT),
    ),
    (Array("out", "R M H"), Array("out_scales", "R M S", _FLOAT), Array("out_splits", "R E", _INT)),
    ("cast", "dequantize", "zero_pad"),
)
ALL_TO_ALL_BACK = Target(
    "all_to_all_back",
    (_AXIS_INDEX, Array("y", "R M H"), Array("num_sent", "R", _INT), Array("send_slot", "M R", _INT)),
    (Array("out", "M H"),),
)
TARGETS = (DISPATCH, DISPATCH_LIKE, DISPATCH_BACK, COMBINE, COMBINE_BACK, ALL_TO_ALL, ALL_TO_ALL_BACK)
SPLIT = (DISPATCH, COMBINE)  # those that have a start and a done
