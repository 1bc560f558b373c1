"""Foreign calls that XLA keeps in the order of the program, and that know their place in it.

Ranks that run a group's calls in different order wait for one another. XLA keeps the order of two calls only where one
needs a result of the other. So each call has one operand and one result more, int32 scalars that nobody reads or
writes: what a call has as its result, the next one has as its operand.

Where ranks nevertheless meet in different calls, they must notice. So the kernels compare a hash, of what ranks must
agree on and of the call's number in the program: calls with equal shapes differ by it.

Both are added when JAX lowers a program, after it has derived, repeated and dropped calls: an operand that gradients
and `jax.checkpoint` saw would make them run calls only for the order. All calls of a program are numbered. Those of one
function (the program's own, a loop's body, a branch) are one chain; a function inside it has a chain of its own.

This is a primitive like that of jax.ffi.ffi_call. With `_compat`, this is the only file that uses what is private in
JAX.
"""

from __future__ import annotations

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
from jax.interpreters import batching, mlir


class _MustRun(effects.Effect):
    """Of a call that runs once for each time that the program says so, whoever uses its results."""


_MUST_RUN = _MustRun()
effects.lowerable_effects.add_type(_MustRun)
effects.control_flow_allowed_effects.add_type(_MustRun)
effects.custom_derivatives_allowed_effects.add_type(_MustRun)
effects.remat_allowed_effects.add_type(_MustRun)

_LINK = jax.core.ShapedArray((), jnp.dtype(jnp.int32))
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
    """Calls the FFI target `target` after all calls before it in the function that JAX traces.

    Args:
        target: its handler has one operand and one result before the others: those of the order.
        operands: arrays.
        result_types: abstract values, as jax.typeof returns them.
        attributes: name -> a value for `jax.ffi.ffi_call`, hashable.
        agreed: what all ranks must agree on, hashable, with a repr that is the same in all processes. Not None: the
            handler has one more attribute, `hash`.
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


def _one_after_the_other(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """The rule for vmap."""
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

    def call(slices: list[Any]) -> Any:
        rest = iter(slices)
        whole = (x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True))
        return _call_p.bind(*whole, **params)

    results = lax.map(call, mapped)
    return results, [0] * len(results)


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
    program = ctx.module_context.cached_primitive_lowerings  # a dict that primitives may use while a program is lowered
    attrs = dict(attributes)
    if agreed is not None:
        number = program[_call_p] = program.get(_call_p, -1) + 1
        attrs["hash"] = np.int64(zlib.crc32(repr((agreed, number)).encode()))
    rule = jax.ffi.ffi_lowering(
        target,
        has_side_effect=has_side_effect,
        operand_output_aliases={1 + operand: 1 + result for operand, result in aliases},
    )
    chain = _call_p, ir.InsertionPoint.current.block
    before = program[chain] if chain in program else mlir.ir_constant(np.int32(0))
    ctx = ctx.replace(avals_in=[_LINK, *ctx.avals_in], avals_out=[_LINK, *ctx.avals_out])
    program[chain], *results = rule(ctx, before, *operands, **attrs)
    return results


dispatch.simple_impl(_call_p)
batching.primitive_batchers[_call_p] = _one_after_the_other
mlir.register_lowering(_call_p, _lower, cacheable=False)
