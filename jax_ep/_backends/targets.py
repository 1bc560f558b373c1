"""The XLA FFI targets of the CUDA backend: the names and the order of operands, results and attributes.

The handlers in ffi/cuda have the same order; tests/test_targets.py compares the two. `Target.in_order` is the only
place that puts operands in order. The handler of every target but those in LOCAL has one more operand and one more
result, in front of the declared ones: the token of `_ordered_calls`.
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
    """An operand or a result. An array without elements means "none"."""

    name: str
    dims: str
    """Names of dimensions, such as "T K". A dimension whose name begins with "*" stands for any number of them."""
    dtype: Any = None
    """None: each call has its own dtype."""


class Result(NamedTuple):
    """The type of a result in one call."""

    shape: tuple[int, ...]
    dtype: Any


NONE = Result((0,), jnp.float32)
_INT, _FLOAT = jnp.int32, jnp.float32
_AXIS_INDEX = Array("axis_index", "", _INT)  # the rank that XLA runs; kernels compare it with the group's mesh
# struct PendingCall in ffi/cuda/call.h. Its dtype is one that has cotangents: see jax_ep/_split_calls.py.
_PENDING = Array("pending", "2", _FLOAT)


@dataclasses.dataclass(frozen=True)
class Target:
    """One FFI target.

    The letters of dimensions: R ranks, T tokens, K = top_k, H channels of a row, S scales of a row. P is T, or 2 T over
    a network. `*rows` are the leading dimensions of received rows, and N is their product. `*pairs` are the dimensions
    of their weights: `*rows` or, in the layout "token", N K. `*scales` are the dimensions of their scales, which depend
    on the scales_format. M rows of all_to_all. L home experts of a rank (E_local in docstrings), B replica slots of a
    rank, C = L + B slots of a rank. D elements of an expert's weights, W words of `work`. RC is R * C.
    """

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attributes: tuple[str, ...] = ()

    @cached_property
    def start(self) -> Target:
        """The start of a split-phase call. It takes the memory of the results as operands."""
        return Target(f"{self.name}_start", (*self.operands, *self.results), (_PENDING,), self.attributes)

    @cached_property
    def done(self) -> Target:
        """The done of a split-phase call. It takes the operands of the start, except axis_index.

        Its results are in the memory that the start got for them.
        """
        operands = [operand for operand in self.operands if operand != _AXIS_INDEX]
        return Target(f"{self.name}_done", (*operands, *self.results, _PENDING), self.results)

    def in_order(self, operands: Mapping[str, jax.Array | None]) -> tuple[jax.Array | None, ...]:
        """Returns the operands, given by name, in the order of the handler."""
        declared = [operand.name for operand in self.operands]
        if declared_not := set(declared) ^ set(operands):
            raise TypeError(f"{self.name}: operands {sorted(declared_not)} are declared or given, not both")
        return tuple(operands[name] for name in declared)

    def encode(self, attributes: Mapping[str, int | bool]) -> dict[str, np.int64 | bool]:
        """Converts the attributes to the types that the handler decodes."""
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
        """Returns the type of each result, by name.

        Args:
            operands: give the sizes of their dimensions, which must agree with each other and with `sizes`.
            sizes: the sizes of the dimensions that no operand has.
            dtypes: the dtypes of the results that are declared without a dtype.
            absent: the results that the call does not need.
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
        """Adds the dimensions of an operand to `sizes`, and checks them."""
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


# A route: dispatch returns these arrays, and the later operations along the route take them.
_ROUTE = (
    # The index of each token among the rows sent to each rank; for this rank, the number of the token; -1 if the token
    # was not sent. Over a network, T more entries for the tokens that this rank forwarded (DispatchArgs in
    # ffi/cuda/dispatch.h).
    Array("send_index", "P R", _INT),
    Array("recv_row", "R T K", _INT),  # the row on this rank of each (source rank, index, k) that arrived, or -1
    Array("num_recv_per_rank", "R", _INT),  # the number of rows that came from each rank
)
_COUNTS = (Array("counts", "C", _INT), Array("group_sizes", "C", _INT))
_LAYOUT = ("layout", "capacity", "alignment")

DISPATCH = Target(
    "dispatch",
    (
        _AXIS_INDEX,
        Array("x", "T H"),
        Array("x_scales", "T S", _FLOAT),
        Array("topk_idx", "T K", _INT),
        Array("named_slot", "T K", _INT),  # only in the layout "token": TokenSlots.named
        Array("topk_weights", "T K", _FLOAT),
    ),
    (
        Array("out", "*rows H"),
        Array("out_scales", "*scales"),
        Array("weights", "*pairs", _FLOAT),
        *_COUNTS,
        Array("num_dropped", "", _INT),
        Array("recv_topk_idx", "*pairs", _INT),  # only in the layout "token", as the next one
        Array("num_rows_per_rank", "R", _INT),
        *_ROUTE,
    ),
    (*_LAYOUT, "cast", "dequantize", "zero_pad", "scales_format"),
)
DISPATCH_LIKE = Target(
    "dispatch_like", (_AXIS_INDEX, Array("x", "T H"), *_ROUTE, *_COUNTS), (Array("out", "*rows H"),), _LAYOUT
)
DISPATCH_BACK = Target(
    "dispatch_back",
    (_AXIS_INDEX, Array("y", "N H"), Array("weights", "*pairs", _FLOAT), *_ROUTE),
    (Array("out", "T H"), Array("topk_weights", "T K", _FLOAT)),
    ("layout", "cast"),
)
COMBINE = Target(
    "combine",
    (_AXIS_INDEX, Array("y", "*rows H"), Array("row_weights", "*rows", _FLOAT), *_ROUTE),
    (Array("out", "T H"),),
    ("cast",),
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
    (*_LAYOUT, "cast"),
)
ALL_TO_ALL = Target(
    "all_to_all",
    (
        _AXIS_INDEX,
        Array("x", "M H"),
        Array("x_scales", "M S", _FLOAT),
        Array("splits", "RC", _INT),
        Array("send_index", "M R", _INT),
    ),
    (Array("out", "R M H"), Array("out_scales", "R M S", _FLOAT), Array("out_splits", "R C", _INT)),
    ("cast", "dequantize", "zero_pad"),
)
ALL_TO_ALL_BACK = Target(
    "all_to_all_back",
    (_AXIS_INDEX, Array("y", "R M H"), Array("num_sent", "R", _INT), Array("send_index", "M R", _INT)),
    (Array("out", "M H"),),
)
BALANCE = Target(
    "balance",
    (_AXIS_INDEX, Array("topk_idx", "T K", _INT)),
    (  # jax_ep.Plan describes them
        Array("slot_expert", "B", _INT),
        Array("num_rows", "", _INT),
        Array("home_rows", "", _INT),
        Array("slots", "R B", _INT),
        Array("topk_slot", "T K", _INT),
        Array("work", "W", _INT),  # what one kernel leaves for the next
    ),
    ("tolerance",),
)
# Of replicate and its gradient, "out" has the memory of "experts".
REPLICATE = Target(
    "replicate",
    (_AXIS_INDEX, Array("experts", "C D"), Array("slots", "R B", _INT)),
    (Array("out", "C D"),),
    ("clears_slots",),
)
COPY_EXPERTS = Target(
    "copy_experts",
    (_AXIS_INDEX, Array("experts", "L D"), Array("slots", "R B", _INT)),
    (Array("out", "B D"),),
)
REPLICATE_BACK = Target(
    "replicate_back",
    (_AXIS_INDEX, Array("experts", "L D"), Array("copies", "B D"), Array("slots", "R B", _INT)),
    (Array("out", "L D"),),
)
# jax_ep.Expanded describes row_of_pair and pair_of_row.
_ROW_OF_PAIR = Array("row_of_pair", "T K", _INT)
_PAIR_OF_ROW = Array("pair_of_row", "N", _INT)
EXPAND = Target(
    "expand",
    (Array("x", "T H"), _ROW_OF_PAIR, *_COUNTS),
    (Array("out", "N H"), _PAIR_OF_ROW),
    ("zero_pad",),
)
REDUCE = Target(
    "reduce",
    (Array("y", "N H"), Array("weights", "N", _FLOAT), _ROW_OF_PAIR),
    (Array("out", "T H"),),
)
REDUCE_BACK = Target(
    "reduce_back",
    (Array("g", "T H"), Array("y", "N H"), Array("weights", "N", _FLOAT), _ROW_OF_PAIR, _PAIR_OF_ROW),
    (Array("y_cotangent", "N H"), Array("weights_cotangent", "N", _FLOAT)),
)
TARGETS = (
    DISPATCH,
    DISPATCH_LIKE,
    DISPATCH_BACK,
    COMBINE,
    COMBINE_BACK,
    ALL_TO_ALL,
    ALL_TO_ALL_BACK,
    BALANCE,
    REPLICATE,
    COPY_EXPERTS,
    REPLICATE_BACK,
)
LOCAL = (EXPAND, REDUCE, REDUCE_BACK)  # the targets that run on one rank, without a group
SPLIT = (DISPATCH, COMBINE, DISPATCH_BACK, COMBINE_BACK)  # the targets that have a start and a done
