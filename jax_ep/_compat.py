"""Every use of JAX that is private or differs between the supported releases (0.10 to 0.12).

Nothing else may be, but for the primitive of `_ordered_calls`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core, distributed
from jax._src import mesh as mesh_lib
from jax._src.interpreters import partial_eval
from jax.extend import core as jex_core

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes over which any of `arrays` varies, as `shard_map(check_vma=True)` tracks it.

    Empty under `check_vma=False`, where nothing is tracked.
    """
    leaves = jax.tree.leaves(arrays)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def vary(operands: T, axes: Iterable[str]) -> T:
    """Casts every array in the pytree `operands` to vary over `axes` and over all that any of them varies over.

    A collective or foreign call mixes its operands, so each result varies over the union. The cast's transpose is the
    sum over the added axes, which is what makes gradients right for an operand that was replicated.

    An operand that is sharded over explicit axes, which the shard_map has left out, is gathered along them. XLA does
    the same for automatic axes.
    """
    union = varying_axes(operands) | set(axes)

    def cast(leaf: Any) -> Any:
        if any(jax.typeof(leaf).sharding.spec):
            leaf = jax.sharding.reshard(leaf, jax.sharding.PartitionSpec(*[None] * leaf.ndim))
        missing = tuple(sorted(union - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, operands)


def result_type(operand: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a foreign call's result that varies over the same manual mesh axes as `operand`."""
    return jax.typeof(operand).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def mesh_in_context() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh of `jax.set_mesh`, also while a function is traced; else that of `jax.sharding.use_abstract_mesh`."""
    for mesh in (mesh_lib.get_concrete_mesh(), jax.sharding.get_abstract_mesh()):
        if not mesh.empty:
            return mesh
    return None


def named(function: F) -> F:
    """`function`, which is public, with its name on all that it traces, as profilers show it: jax_ep.dispatch.

    (The scope as a decorator, which 0.10 makes once for all calls, would mix up threads that trace at once.)
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(f"jax_ep.{function.__name__}"):
            return function(*args, **kwargs)

    return cast(F, call)


def in_one_place(operands: T) -> T:
    """The arrays of `operands` such that whoever uses them is given the same memory.

    Where XLA copies an operand (into the layout that a foreign call wants, say), it does so for each that uses it, but
    not behind a barrier. One for each array: a common one would differentiate all where one is differentiated.
    """
    return jax.tree.map(lax.optimization_barrier, operands)


def publish(key: str, value: str) -> None:
    """Puts `value` into the key-value store that the processes of `jax.distributed` share."""
    _store().key_value_set(key, value, allow_overwrite=True)


def look_up(key: str, timeout: float) -> str | None:
    """The value of `key` in the store; None if there is none within `timeout` seconds, which may be over already."""
    try:
        if timeout <= 0:
            return _store().key_value_try_get(key)
        return _store().blocking_key_value_get(key, math.ceil(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def forget(key: str) -> None:
    """Takes `key` out of the store."""
    _store().key_value_delete(key)


def barrier(name: str, processes: Sequence[int], timeout: float) -> bool:
    """Waits until all `processes` have come to the barrier `name`; False if some do not within `timeout` seconds."""
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
    """An object equal to itself for as long as the same function is being traced, to tell one trace from another."""
    return jex_core.get_opaque_trace_state()


def differentiable(function: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """`function(static, *operands)` with a gradient rule; forward and backward see which operands and cotangents count.

    An eager shard_map takes such rules from compiled functions only. Elsewhere it is not compiled by itself, as its
    calls would then be in another function than the caller's (see `_ordered_calls`).
    """
    rule = jax.custom_vjp(function, nondiff_argnums=(0,))
    rule.defvjp(forward, backward, symbolic_zeros=True)
    jitted = partial(jax.jit, static_argnums=(0,))(rule)

    def compiled(*arguments: Any) -> Any:
        with jax.disable_jit(False):  # under jax.disable_jit, all but the operations runs step by step
            return jitted(*arguments)

    return lambda static, *operands: (rule if _is_tracing() else compiled)(static, *operands)


def _is_tracing() -> bool:
    """Whether JAX traces a function here, rather than running it at once; vmap and grad do either."""
    trace = core.trace_ctx.trace
    while not isinstance(trace, partial_eval.DynamicJaxprTrace):
        if (trace := getattr(trace, "parent_trace", None)) is None:
            return False
    return True


def values(operands: Any) -> Any:
    """The operands of a forward rule without the marks of what is differentiated."""
    return jax.tree.map(lambda primal: primal.value, operands)
