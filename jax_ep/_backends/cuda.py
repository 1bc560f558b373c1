"""The CUDA backend: each operation is an XLA FFI call, which launches kernels (ffi/cuda/) on the rank's device.

A split-phase call is three FFI calls: one allocates the results, one starts the operation, and one ends it.

`targets.py` declares the operands and results of each call. This file does not depend on how devices reach each other's
memory: only the native group knows that (ffi/cuda/group.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _compat, _constants, _layouts, _placement, _scales, _wires
from jax_ep._backends import plain_replicate, targets
from jax_ep._backends.native_group import AbstractGroup, NativeGroup
from jax_ep._backends.targets import NONE, Result, Target
from jax_ep._constants import CHANNELS_PER_SCALE, MAX_BALANCE_BLOCKS, MAX_LOCAL_RANKS, Layout
from jax_ep._ordered_calls import ordered_call
from jax_ep._scales import ScalesFormat
from jax_ep._settings import GroupSettings
from jax_ep._split_calls import EndBack
from jax_ep._types import AllToAll, Backend, DispatchCall, Dispatched, Route, TokenSlots
from jax_ep._wires import GradWire, Wire

_BELOW_A_BYTE = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # several elements share a byte
_SentRows: TypeAlias = tuple[jax.Array, jax.Array | None]  # x as a kernel gets it; its scales if it is quantized


class _Started(NamedTuple):
    """What a start leaves for its done. As a cotangent, it has only `pending`."""

    memory: tuple[jax.Array | None, ...] | None  # for the results; None for NONE
    pending: jax.Array  # struct PendingCall in ffi/cuda/call.h
    quantized: _SentRows | None = None  # the rows that the start sends in place of its operand x


class CudaRoute(NamedTuple):
    """One rank's part of a route. `_ROUTE` and `_COUNTS` in targets.py describe the arrays."""

    send_index: jax.Array
    recv_row: jax.Array
    num_recv_per_rank: jax.Array
    counts: jax.Array
    group_sizes: jax.Array


def balance_work_words(group: GroupSettings) -> int:
    """The size of the array "work" of a balance: balance_work_words in ffi/plan_balance.h."""
    return (MAX_BALANCE_BLOCKS + 2) * group.num_experts + 4 * group.num_ranks + 1


class _CudaOperations(Backend):
    """Runs the operations of a `NativeGroup`, or lowers those of an `AbstractGroup`, as FFI calls."""

    _id: int  # the group's id, which programs contain
    _has_network: bool
    check_one_round: Callable[[str, int], None]  # of NativeGroup and AbstractGroup
    splits_calls = True
    sends_pairs = True  # in the headers of the rows

    def dispatch_start(
        self,
        call: DispatchCall,
        x: Any,
        topk_idx: jax.Array | TokenSlots,
        topk_weights: jax.Array | None,
        *,
        zero_pad: bool,
    ) -> _Started:
        self.check_one_round("dispatch_start", call.num_tokens)
        rows = self._rows_to_send(call, x)
        is_quantized_here = rows[1] is not None and not call.quantized
        if is_quantized_here:
            rows = _compat.in_one_place(rows)
        operands, results, settings = self._dispatch_call(call, rows, topk_idx, topk_weights, zero_pad)
        started = self._start(targets.DISPATCH, operands, results, **settings)
        return started._replace(quantized=rows) if is_quantized_here else started

    def dispatch(
        self,
        call: DispatchCall,
        x: Any,
        topk_idx: jax.Array | TokenSlots,
        topk_weights: jax.Array | None,
        started: _Started | None,
        *,
        zero_pad: bool,
    ) -> Dispatched:
        quantized = None if started is None else started.quantized
        rows = quantized or self._rows_to_send(call, x)
        operands, results, settings = self._dispatch_call(call, rows, topk_idx, topk_weights, zero_pad)
        if started is None:
            got = self._call(targets.DISPATCH, operands, results, **settings)
        else:
            got = self._done(targets.DISPATCH, operands, started)
        out, scales = got["out"], got["out_scales"] if self._kernel_returns_fp8(call) else None
        if scales is not None:
            scales = self._arranged(scales, call)
            if call.options.dequantize:
                out, scales = _wires.dequantize(out, scales, self.group.dtype, call.channels_per_scale), None
        is_token = call.options.layout == "token"
        return Dispatched(
            x=out,
            counts=got["counts"],
            group_sizes=got["group_sizes"],
            weights=got["weights"],
            scales=scales,
            num_dropped=got["num_dropped"],
            route=call.route(CudaRoute(**{name: got[name] for name in CudaRoute._fields})),
            topk_idx=got["recv_topk_idx"] if is_token else None,
            num_rows_per_rank=got["num_rows_per_rank"] if is_token else None,
        )

    def dispatch_like(self, route: Route, x: jax.Array, *, zero_pad: bool) -> jax.Array:
        del zero_pad  # the kernels always write zeros here
        return self._send_along(route, x)

    def _send_along(self, route: Route, x: jax.Array, packed_as: GradWire | None = None) -> jax.Array:
        """Sends x [T, H'] along `route`. `packed_as`: the wire format if x is packed. All ranks must agree on it."""
        channels = x.shape[1]
        x = _pad_to_units(x)
        operands = {"x": x, **route.arrays._asdict()}
        results = targets.DISPATCH_LIKE.result_types(operands, {"*rows": route.rows_shape}, {"out": x.dtype})
        got = self._call(targets.DISPATCH_LIKE, operands, results, agreed=(packed_as,), **_route_attributes(route))
        return got["out"][..., :channels]

    def dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None, wire: GradWire | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        channels = 0 if rows is None else rows.shape[-1]
        operands, results, settings = self._dispatch_back_call(route, rows, weights, wire)
        got = self._call(targets.DISPATCH_BACK, operands, results, **settings)
        return (None if rows is None else got["out"][:, :channels]), (None if weights is None else got["topk_weights"])

    def start_dispatch_back(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None, wire: GradWire | None
    ) -> tuple[_Started, EndBack]:
        operands, results, settings = self._dispatch_back_call(route, rows, weights, wire)
        operands = _compat.in_one_place(operands)  # for the start and the done
        started = self._start(targets.DISPATCH_BACK, operands, results, **settings)

        def end(cotangent: _Started) -> tuple[jax.Array | None, jax.Array | None]:
            got = self._done(targets.DISPATCH_BACK, operands, started._replace(pending=cotangent.pending))
            return None if rows is None else got["out"], None if weights is None else got["topk_weights"]

        return _Started(None, started.pending), end

    def combine_start(
        self, route: Route, y: jax.Array, weights: jax.Array, out_dtype: Any, wire: Wire | None
    ) -> _Started:
        self.check_one_round("combine_start", route.num_tokens)
        operands, results = self._combine_call(route, y, weights, out_dtype)
        return self._start(targets.COMBINE, operands, results, agreed=(wire,), cast=_wires.cast_of(wire))

    def combine(
        self, route: Route, y: jax.Array, weights: jax.Array, started: Any, out_dtype: Any, wire: Wire | None
    ) -> jax.Array:
        operands, results = self._combine_call(route, y, weights, out_dtype)
        if started is None:
            cast = _wires.cast_of(wire)
            return self._call(targets.COMBINE, operands, results, agreed=(wire,), cast=cast)["out"]
        return self._done(targets.COMBINE, operands, started)["out"]

    def combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[jax.Array, jax.Array | None]:
        if wire is not None and not self._kernels_cast(wire):
            # XLA casts and packs the rows, and dispatch_like sends them.
            packed = self._send_along(route, _wires.pack(g, wire), wire)
            rows = _wires.unpack(packed, g.shape[-1], wire)
            y_cotangent = (rows * weights[..., None]).astype(g.dtype)
            if y is None:
                return y_cotangent, None
            holds_token = self._holds_token(route)
            # y is unspecified where no token is. A NaN there must not reach the sum.
            y = jnp.where(holds_token[..., None], y, 0).astype(jnp.float32)
            return y_cotangent, jnp.sum(rows * y, axis=-1)
        operands, results, settings = self._combine_back_call(route, g, y, weights, wire)
        got = self._call(targets.COMBINE_BACK, operands, results, **settings)
        return got["y_cotangent"], None if y is None else got["weights_cotangent"]

    def start_combine_back(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[_Started, EndBack] | None:
        if wire is not None and not self._kernels_cast(wire):
            return None
        operands, results, settings = self._combine_back_call(route, g, y, weights, wire)
        operands = _compat.in_one_place(operands)  # for the start and the done
        started = self._start(targets.COMBINE_BACK, operands, results, **settings)

        def end(cotangent: _Started) -> tuple[jax.Array | None, jax.Array | None]:
            got = self._done(targets.COMBINE_BACK, operands, started._replace(pending=cotangent.pending))
            return got["y_cotangent"], None if y is None else got["weights_cotangent"]

        return _Started(None, started.pending), end

    def _holds_token(self, route: Route) -> jax.Array:
        """Which rows hold a token: bool [*rows]."""
        row = route.arrays.recv_row.reshape(-1)
        num_rows = math.prod(route.rows_shape)
        none = jnp.zeros(num_rows, jnp.bool)
        return none.at[jnp.where(row < 0, num_rows, row)].set(True, mode="drop").reshape(route.rows_shape)

    def all_to_all(
        self, x: jax.Array, splits: jax.Array, wire: str | None, *, dequantize: bool, zero_pad: bool
    ) -> AllToAll:
        group, num_rows = self.group, x.shape[0]
        returns_fp8 = wire is not None and not (dequantize and self._kernels_cast(wire))
        blocks = _layouts.split_blocks(splits, num_rows, group.num_ranks)
        rows, scales = self._cast_for_wire(x, wire)
        operands = {
            "x": rows,
            "x_scales": scales,
            "splits": jnp.pad(blocks.splits, ((0, 0), (0, group.replicas))).reshape(-1),  # copies get no rows
            "send_index": _index_in_blocks(blocks, num_rows),
        }
        results = targets.ALL_TO_ALL.result_types(
            operands,
            {"C": group.slots_per_rank, "S": _wires.num_scales(group.hidden)},
            {"out": _wires.FP8 if returns_fp8 else x.dtype},
            absent=[] if returns_fp8 else ["out_scales"],
        )
        got = self._call(
            targets.ALL_TO_ALL,
            operands,
            results,
            agreed=(wire,),
            cast=_wires.cast_of(wire if scales is None else None),
            dequantize=wire is not None and not returns_fp8,
            zero_pad=zero_pad,
        )
        out, out_scales = got["out"], got["out_scales"] if returns_fp8 else None
        if out_scales is not None and dequantize:
            out, out_scales = _wires.dequantize(out, out_scales, group.dtype), None
        return AllToAll(out, got["out_splits"][:, : group.experts_per_rank], out_scales, group)

    def all_to_all_back(self, y: jax.Array, splits: jax.Array) -> jax.Array:
        num_rows = y.shape[1]
        blocks = _layouts.split_blocks(splits, num_rows, self.group.num_ranks)
        operands = {"y": y, "num_sent": blocks.sizes, "send_index": _index_in_blocks(blocks, num_rows)}
        results = targets.ALL_TO_ALL_BACK.result_types(operands, {}, {"out": y.dtype})
        return self._call(targets.ALL_TO_ALL_BACK, operands, results)["out"]

    def balance(self, topk_idx: jax.Array, tolerance_units: int) -> _placement.PlanArrays:
        # Without replicas, no row moves: the ranks only exchange how many rows each gets. The kernel has a lane per
        # rank.
        if not self.group.replicas or self.group.num_ranks > MAX_LOCAL_RANKS:
            return _placement.plan(self.group, topk_idx, tolerance_units)
        operands: dict[str, jax.Array | None] = {"topk_idx": topk_idx}
        sizes = {"B": self.group.replicas, "R": self.group.num_ranks, "W": balance_work_words(self.group)}
        results = targets.BALANCE.result_types(operands, sizes, {})
        got = self._call(targets.BALANCE, operands, results, agreed=(tolerance_units,), tolerance=tolerance_units)
        del got["work"]
        return _placement.PlanArrays(**got)

    def replicate(self, w: jax.Array, slots: jax.Array) -> jax.Array:
        if not self._kernels_copy(w, w.dtype.name not in _BELOW_A_BYTE):
            return plain_replicate.replicate(self.group, w, slots)
        has_slots = w.shape[0] == self.group.slots_per_rank
        experts = w if has_slots else jnp.pad(w, [(0, self.group.replicas), *[(0, 0)] * (w.ndim - 1)])
        return self._copies(targets.REPLICATE, {"experts": experts, "slots": slots}, True, clears_slots=has_slots)

    def copy_experts(self, w: jax.Array, slots: jax.Array) -> jax.Array:
        if not self._kernels_copy(w, w.dtype.name not in _BELOW_A_BYTE):
            return plain_replicate.copy_experts(self.group, w, slots)
        return self._copies(targets.COPY_EXPERTS, {"experts": w, "slots": slots}, False)

    def add_copies(self, g: jax.Array, copies: jax.Array, slots: jax.Array) -> jax.Array:
        if not self._kernels_copy(g, g.dtype.name in ("float32", "float16", "bfloat16")):
            return plain_replicate.add_copies(self.group, g, copies, slots)
        return self._copies(targets.REPLICATE_BACK, {"experts": g, "copies": copies, "slots": slots}, True)

    def _kernels_copy(self, experts: jax.Array, has_type: bool) -> bool:
        """Whether the kernels copy such experts: units of 16 bytes, between ranks that map each other's memory."""
        expert_bytes = experts.size // experts.shape[0] * experts.dtype.itemsize
        return has_type and expert_bytes > 0 and expert_bytes % 16 == 0 and not self._has_network

    def _copies(
        self, target: Target, operands: dict[str, jax.Array], is_in_place: bool, **attributes: Any
    ) -> jax.Array:
        """Calls a target that copies experts [..., D], or adds them up. In place, the result replaces `experts`."""
        experts = operands["experts"]
        flat: dict[str, jax.Array | None] = {
            name: array if name == "slots" else array.reshape(array.shape[0], -1) for name, array in operands.items()
        }
        results = target.result_types(flat, {"B": self.group.replicas}, {"out": experts.dtype})
        aliases = {1: 0} if is_in_place else {}
        out = self._call(target, flat, results, aliases=aliases, **attributes)["out"]
        return out.reshape(-1, *experts.shape[1:])

    def expand(
        self,
        x: jax.Array,
        row_of_pair: jax.Array,
        counts: jax.Array,
        group_sizes: jax.Array,
        *,
        capacity: int,
        zero_pad: bool,
    ) -> tuple[jax.Array, jax.Array]:
        channels = x.shape[1]
        x = _pad_to_units(x)
        operands = {"x": x, "row_of_pair": row_of_pair, "counts": counts, "group_sizes": group_sizes}
        results = targets.EXPAND.result_types(operands, {"N": capacity}, {"out": x.dtype})
        got = self._call_local(targets.EXPAND, operands, results, zero_pad=zero_pad)
        return got["out"][:, :channels], got["pair_of_row"]

    def reduce(self, y: jax.Array, weights: jax.Array | None, row_of_pair: jax.Array) -> jax.Array:
        channels = y.shape[1]
        operands = {"y": _pad_to_units(y), "weights": weights, "row_of_pair": row_of_pair}
        results = targets.REDUCE.result_types(operands, {}, {"out": y.dtype})
        return self._call_local(targets.REDUCE, operands, results)["out"][:, :channels]

    def reduce_back(
        self, g: jax.Array, y: jax.Array | None, weights: jax.Array, row_of_pair: jax.Array, pair_of_row: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        channels = g.shape[1]
        operands = {
            "g": _pad_to_units(g),
            "y": None if y is None else _pad_to_units(y),
            "weights": weights,
            "row_of_pair": row_of_pair,
            "pair_of_row": pair_of_row,
        }
        absent = ("weights_cotangent",) if y is None else ()
        results = targets.REDUCE_BACK.result_types(operands, {}, {"y_cotangent": g.dtype}, absent)
        got = self._call_local(targets.REDUCE_BACK, operands, results)
        return got["y_cotangent"][:, :channels], None if y is None else got["weights_cotangent"]

    def _kernels_cast(self, wire: str | None) -> bool:
        """True if the kernels cast rows of the group's dtype for a wire, and back. Otherwise XLA casts them."""
        return self.group.dtype == jnp.bfloat16 and (wire is None or _wires.FORMATS[wire].cast is not None)

    def _cast_for_wire(self, x: jax.Array, wire: str | None) -> _SentRows:
        if wire is None or self._kernels_cast(wire):
            return x, None
        rows, scales = _wires.quantize(x, wire)
        if _wires.channels_per_scale(wire) != CHANNELS_PER_SCALE:
            # Kernels copy one word per 128 channels, and do not interpret it. Here, it has four exponents.
            scales = lax.bitcast_convert_type(_scales.to_words(scales), jnp.float32)
        return rows, scales

    def _kernel_scales_format(self, call: DispatchCall) -> ScalesFormat:
        """The form in which the kernel writes the scales. `_arranged` converts it to the form of the call."""
        num_rows = call.route(None).rows_shape[-1]
        if num_rows % _scales.WORDS_PER_TMA_UNIT:
            return "float32"  # the kernel does not pad columns
        if call.channels_per_scale == CHANNELS_PER_SCALE:
            return call.scales_format
        # The kernel does not know that its words have four exponents each (`_cast_for_wire`).
        return "float32_columns" if call.scales_format == "ue8m0_columns" else "float32"

    def _arranged(self, scales: jax.Array, call: DispatchCall) -> jax.Array:
        """Returns the scales that a kernel wrote, in the form of the call."""
        written = self._kernel_scales_format(call)
        if call.channels_per_scale != CHANNELS_PER_SCALE:
            words = lax.bitcast_convert_type(scales, jnp.int32)
            if written == "float32_columns":
                return words
            scales = _scales.from_words(words, _wires.num_scales(self.group.hidden, call.channels_per_scale))
        elif written == call.scales_format:
            return scales
        return _scales.arrange(scales, call.scales_format)

    def _rows_to_send(self, call: DispatchCall, x: Any) -> _SentRows:
        return x if call.quantized else self._cast_for_wire(x, call.options.wire)

    def _kernel_returns_fp8(self, call: DispatchCall) -> bool:
        return call.returns_fp8 or (call.arrives_fp8 and not self._kernels_cast(call.options.wire))

    def _dispatch_call(
        self,
        call: DispatchCall,
        x: _SentRows,
        topk_idx: jax.Array | TokenSlots,
        topk_weights: jax.Array | None,
        zero_pad: bool,
    ) -> tuple[dict[str, jax.Array | None], dict[str, Result], dict[str, Any]]:
        """Returns the operands, result types and settings of a dispatch."""
        group, options, route = self.group, call.options, call.route(None)
        rows, scales = x
        returns_fp8 = self._kernel_returns_fp8(call)
        sent, named = topk_idx if isinstance(topk_idx, TokenSlots) else (topk_idx, None)
        operands = {
            "x": rows,
            "x_scales": scales,
            "topk_idx": sent,
            "named_slot": named,
            "topk_weights": topk_weights,
        }
        absent = [] if returns_fp8 else ["out_scales"]
        if named is None:
            absent += ["recv_topk_idx", "num_rows_per_rank"]
        scales_format = self._kernel_scales_format(call)
        num_scales = _wires.num_scales(group.hidden)
        out_scales = _scales.arranged_type(scales_format, route.rows_shape, num_scales) if returns_fp8 else NONE
        results = targets.DISPATCH.result_types(
            operands,
            {
                "*rows": route.rows_shape,
                "*pairs": route.rows_shape if named is None else (*route.rows_shape, group.top_k),
                "C": group.slots_per_rank,
                "P": call.num_tokens * (2 if self._has_network else 1),
                "R": group.num_ranks,
                "S": num_scales,
                "*scales": out_scales.shape,
            },
            {"out": _wires.FP8 if returns_fp8 else group.dtype, "out_scales": out_scales.dtype},
            absent=absent,
        )
        settings = {
            "agreed": (options.layout, options.capacity, options.alignment, options.wire),
            "cast": _wires.cast_of(options.wire if scales is None else None),
            "dequantize": call.arrives_fp8 and not returns_fp8,
            "zero_pad": zero_pad,
            "scales_format": _constants.ScalesFormat[scales_format.upper()],
            **_route_attributes(route),
        }
        return operands, results, settings

    def _dispatch_back_call(
        self, route: Route, rows: jax.Array | None, weights: jax.Array | None, wire: GradWire | None
    ) -> tuple[dict[str, Any], dict[str, Result], dict[str, Any]]:
        absent, dtypes = [], {}
        if rows is None:
            absent.append("out")
        else:
            dtypes["out"] = rows.dtype
            rows = _pad_to_units(rows.reshape(-1, rows.shape[-1]))
        if weights is None:
            absent.append("topk_weights")
        operands = {"y": rows, "weights": weights, **_without_counts(route)}
        settings = {"agreed": (wire,), "layout": _layout_number(route), "cast": _wires.cast_of(wire)}
        return operands, targets.DISPATCH_BACK.result_types(operands, {}, dtypes, absent), settings

    def _combine_back_call(
        self, route: Route, g: jax.Array, y: jax.Array | None, weights: jax.Array, wire: GradWire | None
    ) -> tuple[dict[str, Any], dict[str, Result], dict[str, Any]]:
        operands = {"g": g, **route.arrays._asdict(), "y": y, "row_weights": weights}
        results = targets.COMBINE_BACK.result_types(
            operands,
            {"*rows": route.rows_shape},
            {"y_cotangent": g.dtype},
            absent=["weights_cotangent"] if y is None else [],
        )
        return operands, results, {"agreed": (wire,), "cast": _wires.cast_of(wire), **_route_attributes(route)}

    def _combine_call(
        self, route: Route, y: jax.Array, weights: jax.Array, out_dtype: Any
    ) -> tuple[dict[str, jax.Array | None], dict[str, Result]]:
        has_weights = route.layout != "token"  # else the weights are ones
        operands: dict[str, jax.Array | None] = {
            "y": y,
            "row_weights": weights if has_weights else None,
            **_without_counts(route),
        }
        return operands, targets.COMBINE.result_types(operands, {"*rows": route.rows_shape}, {"out": out_dtype})

    def _call(
        self,
        target: Target,
        operands: Mapping[str, jax.Array | None],
        results: Mapping[str, Result],
        *,
        agreed: tuple[Any, ...] | None = (),
        aliases: Mapping[int, int] | None = None,
        has_side_effect: bool = False,
        **attributes: Any,
    ) -> dict[str, jax.Array]:
        """Adds one FFI call to the program. Returns its results by name.

        Args:
            agreed: the facts on which ranks must agree, in addition to the types of the operands. The kernels compare a
                hash of both. None for a done: it belongs to the call of its start.
            aliases: maps the index of an operand to the index of the result in the same memory.
        """
        if agreed is not None:
            operands = {"axis_index": lax.axis_index(self.group.axis_name), **operands}
        given = target.in_order(operands)
        if agreed is not None:
            types = tuple(None if operand is None else (operand.shape, str(operand.dtype)) for operand in given[1:])
            agreed = (target.name, types, agreed)
        arrays = self._arrays(given)
        call = ordered_call(
            f"jax_ep_{target.name}",
            arrays,
            _types(arrays, results),
            attributes={"group": np.int64(self._id), **target.encode(attributes)},
            agreed=agreed,
            aliases=aliases,
            has_side_effect=has_side_effect,
        )
        return dict(zip(results, lax.optimization_barrier(call), strict=True))

    def _call_local(
        self,
        target: Target,
        operands: Mapping[str, jax.Array | None],
        results: Mapping[str, Result],
        **attributes: bool,
    ) -> dict[str, jax.Array]:
        """Adds a call of a local target. It takes no order token, so XLA may run it in any order with other calls."""
        arrays = self._arrays(target.in_order(operands))
        call = jax.ffi.ffi_call(f"jax_ep_{target.name}", _types(arrays, results), vmap_method="sequential")
        without_jvp = jax.custom_jvp(lambda *arrays: call(*arrays, **target.encode(attributes)))
        without_jvp.defjvp(_compat.refuse_second_derivative)
        return dict(zip(results, lax.optimization_barrier(without_jvp(*arrays)), strict=True))

    def _start(
        self,
        target: Target,
        operands: Mapping[str, jax.Array | None],
        results: Mapping[str, Result],
        **settings: Any,
    ) -> _Started:
        """Starts `target`. Returns the memory that its done will return as the results, and the pending call.

        A separate, pure call allocates the memory. jax.checkpoint may run this call again in a backward pass, as it
        does with barriers after a start. The second call then gets other memory, and XLA need not copy.
        """
        arrays = self._arrays(operands.values())
        allocate = jax.ffi.ffi_call("jax_ep_room", _types(arrays, results), vmap_method="sequential")
        room = lax.optimization_barrier(allocate(*arrays))
        memory = dict(zip(results, room, strict=True))
        start = target.start
        pending = self._call(
            start, {**operands, **memory}, start.result_types({}, {}, {}), has_side_effect=True, **settings
        )["pending"]
        # None instead of an array without elements: XLA of jax 0.11 fails if a program or a shard_map has such an
        # argument.
        return _Started(tuple(None if results[name] is NONE else array for name, array in memory.items()), pending)

    def _done(
        self, target: Target, operands: Mapping[str, jax.Array | None], started: _Started
    ) -> dict[str, jax.Array]:
        """Ends `target`, which `_start` started with the same `operands`.

        XLA keeps the operands, and the memory of the results, until the done.
        """
        assert started.memory is not None
        given = {result.name: array for result, array in zip(target.results, started.memory, strict=True)}
        results = {name: NONE if array is None else Result(array.shape, array.dtype) for name, array in given.items()}
        aliases = {len(operands) + i: i for i in range(len(results))}
        operands = {**operands, **given, "pending": started.pending}
        return self._call(target.done, operands, results, agreed=None, aliases=aliases, has_side_effect=True)

    def _arrays(self, operands: Collection[jax.Array | None]) -> tuple[jax.Array, ...]:
        """Prepares the operands of an FFI call: replaces None, makes all vary over the EP axis, and adds a barrier."""
        arrays = tuple(jnp.zeros(0, jnp.float32) if operand is None else operand for operand in operands)
        # Without the barrier, XLA:GPU fuses the call with slices around it. It may then fail on an update of a result,
        # or run a start or a done twice.
        return lax.optimization_barrier(_compat.vary(arrays, self.group.axis_names))


class CudaBackend(NativeGroup, _CudaOperations):
    """A group on GPUs, which runs the operations."""


class AbstractCudaBackend(AbstractGroup, _CudaOperations):
    """A group on an abstract mesh, which only traces and lowers the operations."""


def _types(operands: tuple[jax.Array, ...], results: Mapping[str, Result]) -> Sequence[Any]:
    """Returns the types of an FFI call's results. Results vary over the same mesh axes as the operands."""
    return [_compat.result_type(operands[0], shape, dtype) for shape, dtype in results.values()]


def _route_attributes(route: Route) -> dict[str, Any]:
    return {"layout": _layout_number(route), "capacity": route.capacity, "alignment": route.alignment}


def _layout_number(route: Route) -> Layout:
    return Layout[route.layout.upper()]


def _without_counts(route: Route) -> dict[str, jax.Array]:
    """Returns the arrays of a route that combine and dispatch_back use."""
    arrays = route.arrays
    return {"send_index": arrays.send_index, "recv_row": arrays.recv_row, "num_recv_per_rank": arrays.num_recv_per_rank}


def _pad_to_units(rows: jax.Array) -> jax.Array:
    """Pads each row to a multiple of 16 bytes, the unit of the kernels."""
    unit = 16 // rows.dtype.itemsize
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[-1] % unit)))


def _index_in_blocks(blocks: _layouts.Blocks, num_rows: int) -> jax.Array:
    """Returns each row's index in the block of each rank: [M, R] int32, -1 if the row does not go to the rank."""
    index = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - blocks.first_row[None]
    return jnp.where((index >= 0) & (index < blocks.sizes[None]), index, -1)
