"""FFI calls that XLA runs in program order, and that are numbered.

If ranks run a group's calls in different orders, they wait for each other forever. XLA keeps the order of two calls
only if one uses a result of the other. So each call has one more operand and one more result, an int32 token that
nobody reads or writes. Each call takes the token of the call before it.

If ranks still run different calls at the same time, the kernels detect it: they compare a hash of the program's name,
of the call's number in the program, and of its shapes and settings.

Tokens and numbers are added when JAX lowers a program: after it has differentiated the program, repeated calls for
jax.checkpoint, and removed calls whose results nobody uses. If gradients and jax.checkpoint saw the token, they would
run calls again only to produce it. (XLA cannot remove a call whose token another call takes.)

The calls of one function are one chain. A loop body, a branch, a nested jit and a jax.checkpoint are functions of their
own: XLA may reorder two of them if neither uses a result of the other. What JAX lowers once and uses at several places,
such as two equal jax.checkpoints, has the same numbers at each.

The primitive below is similar to the one of jax.ffi.ffi_call. Only this file and `_compat` use private parts of JAX.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import dispatch, effects
from jax._src.lib.mlir import ir
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep import _compat
from jax_ep._errors import SplitCallError


@dataclasses.dataclass(frozen=True)  # jax.export compares effects
class _MustRun(effects.Effect):
    """Marks a call that must run even if nobody uses its results."""


_MUST_RUN = _MustRun()
effects.lowerable_effects.add_type(_MustRun)
effects.control_flow_allowed_effects.add_type(_MustRun)
effects.custom_derivatives_allowed_effects.add_type(_MustRun)
effects.remat_allowed_effects.add_type(_MustRun)

_TOKEN = jax.core.ShapedArray((), jnp.dtype(jnp.int32))
_call_p = Primitive("jax_ep_call")
_call_p.multiple_results = True


def ordered_call(
    target: str,
    operands: Sequence[jax.Array],
    result_types: Sequence[Any],
    *,
    attributes: Mapping[str, Any],
    agreed: Any = None,
    aliases: Mapping[int, int] | None = None,
    has_side_effect: bool = False,
) -> Sequence[jax.Array]:
    """Calls the FFI target `target` after all calls before it in the same function.

    Args:
        target: its handler takes the token first, as an operand and as a result.
        operands: arrays.
        result_types: abstract values, as jax.typeof returns them.
        attributes: name -> a value for `jax.ffi.ffi_call`, hashable.
        agreed: the facts on which all ranks must agree: hashable, with a repr that is the same in all processes. If it
            is not None, the call gets a number, and the handler also gets the attribute `hash`.
        aliases: index of an operand -> index of the result in the same memory.
        has_side_effect: whether the call runs even if nobody uses its results.
    """
    return _call_p.bind(
        *operands,
        target=target,
        result_types=tuple(result_types),
        attributes=tuple(sorted(attributes.items())),
        agreed=agreed,
        aliases=tuple(sorted((aliases or {}).items())),
        has_side_effect=has_side_effect,
    )


@_call_p.def_effectful_abstract_eval
def _abstract_results(*_: Any, result_types: tuple[Any, ...], has_side_effect: bool, **__: Any) -> Any:
    return list(result_types), {_MUST_RUN} if has_side_effect else effects.no_effects


def _batch_by_loop(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """The rule for vmap: runs the call once per element, in order.

    Refuses split-phase calls: all starts would run before the first done, and there is no room for that many.
    """
    if params["has_side_effect"]:
        op = params["target"].removeprefix("jax_ep_")
        whole, _, _ = op.rpartition("_")
        raise SplitCallError(
            f"{op}: split-phase calls do not run under vmap; call {whole} in place of {whole}_start and {whole}_done, "
            "or replace vmap by jax.lax.map"
        )
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

    def call(slices: list[Any]) -> Any:
        rest = iter(slices)
        whole = (x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True))
        return _call_p.bind(*whole, **params)

    results = lax.map(call, mapped)
    return results, [0] * len(results)


def _program_name(ctx: mlir.LoweringRuleContext) -> str:
    """The name of the program that JAX lowers, such as "jit_step" for a jitted function `step`."""
    return str(ctx.module_context.module.operation.attributes["sym_name"])


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    target: str,
    attributes: tuple[tuple[str, Any], ...],
    agreed: Any,
    aliases: tuple[tuple[int, int], ...],
    has_side_effect: bool,
    **_: Any,
) -> Sequence[Any]:
    state = ctx.module_context.cached_primitive_lowerings  # private: a dict that lives while a program is lowered
    attrs = dict(attributes)
    if agreed is not None:
        number = state[_call_p] = state.get(_call_p, -1) + 1
        attrs["hash"] = np.int64(zlib.crc32(repr((_program_name(ctx), number, agreed)).encode()))
    rule = jax.ffi.ffi_lowering(
        target,
        has_side_effect=has_side_effect,
        operand_output_aliases={1 + operand: 1 + result for operand, result in aliases},
    )
    chain = _call_p, ir.InsertionPoint.current.block
    token = state[chain] if chain in state else mlir.ir_constant(np.int32(0))
    ctx = ctx.replace(avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out])
    state[chain], *results = rule(ctx, token, *operands, **attrs)
    return results


dispatch.simple_impl(_call_p)
ad.primitive_jvps[_call_p] = _compat.refuse_second_derivative
batching.primitive_batchers[_call_p] = _batch_by_loop
mlir.register_lowering(_call_p, _lower, cacheable=False)
