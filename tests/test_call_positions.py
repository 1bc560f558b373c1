"""The number of a call in its program, which ranks compare: two calls of equal shapes never meet unnoticed."""

import gc
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_ep as ep
from helpers import assert_same_bits, compiled, emulated_patience, open_group, place, run_spmd, spmd, to_numpy
from jax_ep import _compat
from shapes import SMALL, make_inputs


@pytest.fixture(scope="module")
def group(mesh):
    with open_group(mesh, SMALL, backend="reference") as group:
        yield group


@pytest.fixture
def inputs(mesh):
    return make_inputs(SMALL, mesh.size)


def traced(mesh, function, *inputs):
    """Traces `function` on every device and forgets the result."""
    jax.eval_shape(spmd(function, mesh), *inputs)


# --- how calls are numbered -----------------------------------------------------------------------------------------


@pytest.fixture
def numbers(monkeypatch):
    """The numbers that calls take, in their order."""
    taken, take = [], ep.Group._next_call

    def next_call(group):
        taken.append(take(group))
        return taken[-1]

    monkeypatch.setattr(ep.Group, "_next_call", next_call)
    return taken


def test_every_operation_takes_a_number(group, mesh, inputs, numbers):
    def all_ops(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged")
        pending = ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout="ragged")
        recv = ep.dispatch_done(pending)
        y = ep.combine(ep.dispatch_like(x, recv), recv)
        y += ep.combine_done(ep.combine_start(recv.x, recv))
        splits = jnp.zeros(group.num_experts, jnp.int32)
        return y, ep.all_to_all_back(ep.all_to_all(x, splits, group=group).x, splits, group=group)

    traced(mesh, all_ops, *inputs)
    assert numbers == list(range(9))


def test_a_program_that_is_traced_again_has_the_same_numbers(group, mesh, inputs, numbers):
    def layers(x, *routing):
        for _ in range(2):
            recv = ep.dispatch(x, *routing, group=group, layout="ragged")
            x = ep.combine(recv.x, recv)
        return x

    for _ in range(3):
        jax.clear_caches()
        traced(mesh, layers, *inputs)
    spmd(layers, mesh)(*inputs)  # eager
    assert numbers == [0, 1, 2, 3] * 4


def test_inner_functions_have_numbers_of_their_own(group, mesh, inputs, numbers):
    """JAX traces an inner function once and uses its trace at several places. Its calls do not count outside of it."""
    dispatch = partial(ep.dispatch, group=group, layout="ragged")

    def inner(x, *routing):
        return dispatch(x, *routing).x.sum() + dispatch(2 * x, *routing).x.sum()

    def program(x, *routing):
        first = dispatch(x, *routing).x
        in_scan = lax.scan(lambda carry, _: (carry, inner(x, *routing)), 0, length=3)[1]
        # Far more inner functions than a list of a few recent ones would hold.
        others = [jax.checkpoint(lambda x, i=i: inner(x + i, *routing))(x) for i in range(20)]
        in_jit = [jax.jit(inner)(x, *routing) for _ in range(2)]
        return first, in_scan, others, in_jit, dispatch(x, *routing).x

    traced(mesh, program, *inputs)
    outer = [numbers.pop(0), numbers.pop()]
    assert outer == [0, 1]
    assert numbers == [0, 1] * (len(numbers) // 2)
    assert len(numbers) >= 2 * 22


def test_a_cached_inner_function_changes_no_number(group, mesh, inputs, numbers):
    """A process may have traced the inner function before, and another process may not: their hashes must agree."""
    dispatch = partial(ep.dispatch, group=group, layout="ragged")
    inner = jax.jit(lambda *inputs: dispatch(*inputs).x)

    def program(*inputs):
        return dispatch(*inputs).x, inner(*inputs), dispatch(*inputs).x

    for expected in ([0, 0, 1], [0, 1]):
        numbers.clear()
        traced(mesh, lambda *inputs: program(*inputs), *inputs)
        assert numbers == expected


def test_vmap_and_grad_count_on(group, mesh, inputs, numbers):
    """They trace no function of its own: their calls stand in the program beside the others."""
    dispatch = partial(ep.dispatch, group=group, layout="ragged")

    def program(x, *routing):
        def loss(x):
            return dispatch(x, *routing).x.astype(jnp.float32).sum()

        return loss(x), jax.grad(loss)(x), jax.vmap(loss)(jnp.stack([x, x])), jax.grad(loss)(2 * x), loss(x)

    traced(mesh, program, *inputs)
    assert numbers == list(range(5))


def test_groups_count_for_themselves(group, mesh, inputs, numbers):
    with open_group(mesh, SMALL, backend="reference") as other:

        def program(*inputs):
            return [ep.dispatch(*inputs, group=of, layout="ragged").x for of in (group, other, group, other)]

        traced(mesh, program, *inputs)
    assert numbers == [0, 0, 1, 1]


def test_threads_that_trace_at_once_count_for_themselves(group, mesh, inputs):
    results, barrier = [], threading.Barrier(4)

    def trace():
        taken = []

        def program(*inputs):
            for _ in range(20):
                barrier.wait(60)
                taken.append(group._next_call())
            return inputs

        traced(mesh, program, *inputs)
        results.append(taken)

    threads = [threading.Thread(target=trace) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(range(20))] * barrier.parties


def test_a_group_keeps_no_trace(group, mesh, inputs):
    def program(*inputs):
        traces.append(_compat.current_trace()._trace_ref)
        return ep.dispatch(*inputs, group=group, layout="ragged").x

    traces = []
    traced(mesh, program, *inputs)
    jax.clear_caches()
    gc.collect()
    assert [trace() for trace in traces] == [None]
    assert not group._num_calls


def test_results_and_pending_have_the_type_of_any_call(group, mesh, inputs):
    """Or branches of cond, and the carry of a loop, could not return them."""

    def program(*inputs):
        dispatch, start = (partial(op, group=group, layout="ragged") for op in (ep.dispatch, ep.dispatch_start))
        recvs = [dispatch(*inputs) for _ in range(2)]
        types.append({jax.tree.structure(recv) for recv in recvs})
        types.append({jax.tree.structure(start(*inputs)) for _ in range(2)})
        types.append({jax.tree.structure(ep.combine_start(recv.x, recv)) for recv in recvs})
        types.append({jax.tree.structure(ep.all_to_all(inputs[0], splits, group=group)) for _ in range(2)})
        return recvs

    types, splits = [], jnp.zeros(group.num_experts, jnp.int32)
    traced(mesh, program, *inputs)
    assert [len(of_op) for of_op in types] == [1, 1, 1, 1]


# --- what ranks do with the numbers ---------------------------------------------------------------------------------


def after(x, other):
    """x, but not before `other` is there: XLA:CPU keeps no optimization barrier in its schedule."""
    return x + jnp.minimum(jnp.isnan(other).sum(), 0).astype(x.dtype)


def dispatches(group, *inputs):
    """Two dispatches that have all in common but their rows."""
    x, *routing = inputs
    rows = [ep.dispatch(x * scale, *routing, group=group, layout="ragged", zero_pad=True).x for scale in (1, -2)]
    return tuple(rows)


def forward(group, is_first, x, *routing):
    """The two dispatches in either order. XLA leaves out the half of `both` that nobody uses."""
    both = jax.jit(partial(dispatches, group))

    def in_order(x, *routing):
        first = both(x, *routing)[0]
        return first, both(after(x, first), *routing)[1]

    def in_another_order(x, *routing):
        second = both(x, *routing)[1]
        return both(after(x, second), *routing)[0], second

    return lax.cond(is_first, in_order, in_another_order, x, *routing)


def backward(group, is_first, x, *routing):
    """The gradients of two dispatches in either order."""

    def dispatch(x):
        return ep.dispatch(x, *routing, group=group, layout="ragged").x

    rows, back = jax.vjp(dispatch, x)
    other_rows, other_back = jax.vjp(dispatch, after(-2 * x, rows))

    def in_order(rows, other_rows):
        (first,) = back(rows)
        return first, *other_back(after(other_rows, first))

    def in_another_order(rows, other_rows):
        (second,) = other_back(other_rows)
        return *back(after(rows, second)), second

    return lax.cond(is_first, in_order, in_another_order, rows, other_rows)


@pytest.mark.parametrize("program", [forward, backward])
def test_ranks_run_equal_calls_in_different_order(kernel_backend, mesh, inputs, program):
    """Without the number, the rows of one call would be taken for those of the other."""
    inputs = place(inputs, mesh)
    with open_group(mesh, SMALL, backend=kernel_backend, timeout=2.0) as group:

        def in_one_order(is_first, *inputs):
            return program(group, is_first, *inputs)

        def at_odds(*inputs):
            return program(group, lax.axis_index("ep") == 0, *inputs)

        one_order, other_order = (
            run_spmd(in_one_order, mesh, is_first, *inputs, replicated=(0,)) for is_first in (True, False)
        )
        for a, b in zip(one_order, other_order, strict=True):
            assert_same_bits(a, b)
        executable = compiled(at_odds, mesh, *inputs, check_vma=False)
        with emulated_patience(0.2):
            try:
                to_numpy(executable(*inputs))
            except jax.errors.JaxRuntimeError as error:
                assert "its group has failed before" in str(error)
        with pytest.raises(ep.Error, match="^dispatch.*: rank . was in another call than rank "):
            group.check()
