"""All uses of JAX that are private, or differ between the supported releases (0.10 to 0.12).

The only other file with such uses is `_ordered_calls.py`, for its primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core, distributed
from jax._src import mesh as mesh_lib
from jax._src.interpreters import partial_eval
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex_core
from jax.sharding import AxisType

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which any of `arrays` varies, as `shard_map(check_vma=True)` tracks them.

    The result is empty with `check_vma=False`, which tracks nothing.
    """
    leaves = jax.tree.leaves(arrays)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def vary(operands: T, axes: Iterable[str]) -> T:
    """Casts every array in the pytree `operands` to vary over `axes`, and over each axis that any of them varies over.

    A collective or an FFI call mixes its operands, so each result varies over the union of these axes. The transpose of
    the cast sums over the added axes. This makes the gradient of a replicated operand correct.

    If an operand is sharded over explicit axes that the shard_map leaves out, it is gathered along them. XLA does the
    same for automatic axes.
    """
    union = varying_axes(operands) | set(axes)

    def cast(leaf: Any) -> Any:
        if any(jax.typeof(leaf).sharding.spec):
            leaf = jax.sharding.reshard(leaf, jax.sharding.PartitionSpec(*[None] * leaf.ndim))
        missing = tuple(sorted(union - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, operands)


def over_explicit_axes(function: F) -> F:
    """Returns `function` for a shard_map that leaves explicit axes out, if JAX has no sharding rule for what it calls.

    Every device along these axes computes the same. The operands must not be sharded over them: see `vary`.
    """

    @wraps(function)
    def call(*operands: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        explicit = {name for name, of in zip(mesh.axis_names, mesh.axis_types, strict=True) if of == AxisType.Explicit}
        if not explicit:
            return function(*operands)
        whole = jax.sharding.PartitionSpec()
        return jax.shard_map(function, in_specs=whole, out_specs=whole, axis_names=explicit)(*operands)

    return cast(F, call)


def result_type(operand: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the type of an FFI call's result that varies over the same manual mesh axes as `operand`."""
    return jax.typeof(operand).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def mesh_in_context() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """Returns the mesh of `jax.set_mesh`, also during tracing, or else of `jax.sharding.use_abstract_mesh`."""
    for mesh in (mesh_lib.get_concrete_mesh(), jax.sharding.get_abstract_mesh()):
        if not mesh.empty:
            return mesh
    return None


def named(function: F) -> F:
    """Decorates a public function: profilers show everything that it traces under its public name: jax_ep.dispatch.

    (jax.named_scope as a decorator would mix up threads that trace at the same time: JAX 0.10 makes one scope for all
    calls.)
    """
    modules = [name for name in function.__module__.split(".") if not name.startswith("_")]
    scope = ".".join([*modules, function.__name__])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return function(*args, **kwargs)

    return cast(F, call)


def in_one_place(operands: T) -> T:
    """Returns `operands` behind barriers, so that all users of an array get the same memory.

    Without a barrier, XLA may make a separate copy of an operand for each user, for example in the layout that an FFI
    call needs. Each array has a barrier of its own: a common barrier would differentiate all arrays if one is
    differentiated.
    """
    return jax.tree.map(lax.optimization_barrier, operands)


def publish(key: str, value: str) -> None:
    """Stores `value` in the key-value store that the processes of `jax.distributed` share."""
    _store().key_value_set(key, value, allow_overwrite=True)


def look_up(key: str, timeout: float) -> str | None:
    """Returns the value of `key` in the store, or None if it does not appear within `timeout` seconds.

    With a `timeout` of 0 or less, returns at once.
    """
    try:
        if timeout <= 0:
            return _store().key_value_try_get(key)
        return _store().blocking_key_value_get(key, math.ceil(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def forget(key: str) -> None:
    """Deletes `key` from the store."""
    _store().key_value_delete(key)


def barrier(name: str, processes: Sequence[int], timeout: float) -> bool:
    """Waits until all `processes` have reached the barrier `name`. Returns False after `timeout` seconds."""
    try:
        _store().wait_at_barrier(name, math.ceil(timeout * 1000), process_ids=list(processes))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


def _store() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialised in this process, or has been shut down")
    return client


def current_trace() -> Any:
    """Returns an object that identifies the current trace: two results are equal if they are from the same trace."""
    return jex_core.get_opaque_trace_state()


def differentiable(function: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Returns `function(static, *operands)` with the gradient rule (forward, backward).

    With symbolic_zeros, forward sees which operands are differentiated, and backward sees which cotangents are zero.

    An eager shard_map accepts such rules only in compiled functions, so the result is compiled there. While JAX traces
    a function, the result is not compiled separately: its calls would then be in another function than the caller's
    (see `_ordered_calls`).
    """
    rule = jax.custom_vjp(function, nondiff_argnums=(0,))
    rule.defvjp(forward, backward, symbolic_zeros=True)
    jitted = partial(jax.jit, static_argnums=(0,))(rule)

    def compiled(*arguments: Any) -> Any:
        with jax.disable_jit(False):  # under jax.disable_jit, all but the operations runs step by step
            return jitted(*arguments)

    return lambda static, *operands: (rule if is_tracing() else compiled)(static, *operands)


def is_tracing() -> bool:
    """Returns True if JAX traces a function, and False if it runs each operation eagerly.

    vmap and grad occur in both cases, so this looks at the trace below them.
    """
    trace = core.trace_ctx.trace
    while not isinstance(trace, partial_eval.DynamicJaxprTrace):
        if (trace := getattr(trace, "parent_trace", None)) is None:
            return False
    return True


def refuse_second_derivative(primals: Any, tangents: Any, **_: Any) -> NoReturn:
    """The forward-mode rule of what moves rows.

    JAX uses the gradient rules of the public functions first. A second derivative reaches this rule. Without the error,
    it would be zero for integers that stand for floating-point numbers.
    """
    raise TypeError(
        "jax_ep: dispatch, combine and their like have first derivatives only, in reverse mode; use no jvp, hessian or "
        "second grad through them"
    )


def is_differentiated(operands: Any) -> bool:
    """Whether a forward rule's operands, or a part of them, are differentiated."""
    return any(primal.perturbed for primal in jax.tree.leaves(operands))


def without_zeros(cotangents: Any) -> Any:
    """Returns the cotangents of a backward rule with None in place of symbolic zeros."""
    is_zero = lambda leaf: isinstance(leaf, SymbolicZero)  # noqa: E731
    return jax.tree.map(lambda leaf: None if is_zero(leaf) else leaf, cotangents, is_leaf=is_zero)


def values(operands: Any) -> Any:
    """Returns the operands of a forward rule without the flags that symbolic_zeros adds."""
    return jax.tree.map(lambda primal: primal.value, operands)
