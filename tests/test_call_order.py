"""All ranks must run the same calls of a group in the same order. Otherwise, the group must fail.

Data dependencies order the calls of a program. Each call has a number, by which ranks detect a mismatch. Two groups
whose operations come in different order on different devices fail, too.
"""

import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_ep as ep
from helpers import (
    NO_GRAPHS,
    assert_same_bits,
    assert_trees_same_bits,
    chain,
    compiled,
    emulated_patience,
    in_one_process,
    make_mesh,
    open_group,
    place,
    run_spmd,
    to_numpy,
)
from jax_ep import _native
from shapes import SMALL, make_inputs


@pytest.fixture
def inputs(mesh):
    return make_inputs(SMALL, mesh.size)


@pytest.fixture
def late(kernel_backend):
    """On emulated GPUs, calls end some milliseconds before XLA hears of it."""
    if kernel_backend == "emulated":
        _native.emulated.set_adversary(1, "delays_launches=1,delays_stores=0,shuffles_warps=0")
    yield
    if kernel_backend == "emulated":
        _native.emulated.set_adversary(0)


def test_independent_calls_are_made_in_one_order(kernel_backend, mesh, inputs, late):
    """Without an order by data, XLA:CPU goes on with the chain whose last call it hears of first."""

    def chains(x, *routing):
        results = []  # all of them: XLA would give those that nobody uses the same memory, and so order the calls
        for scale in range(1, 5):
            rows = jnp.tanh(x * scale)
            for _ in range(2):
                recv = ep.dispatch(rows, *routing, group=group, layout="ragged", zero_pad=True)
                rows = ep.combine(recv.x, recv)
                results += [recv, rows]
        return results

    with open_group(mesh, SMALL, backend=kernel_backend, timeout=5.0) as group:
        program = compiled(chains, mesh, *place(inputs, mesh))
        with emulated_patience(1.0):
            first, *others = (to_numpy(program(*place(inputs, mesh))) for _ in range(5))
        group.check()
    for other in others:
        assert_trees_same_bits(other, first)


def after(x, other):
    """x, but not before `other` is there: XLA:CPU keeps no optimization barrier in its schedule."""
    return x + jnp.minimum(jnp.isnan(other).sum(), 0).astype(x.dtype)


def dispatches(group, *inputs):
    """Two dispatches that have all in common but their rows."""
    x, *routing = inputs
    rows = [ep.dispatch(x * scale, *routing, group=group, layout="ragged", zero_pad=True).x for scale in (1, -2)]
    return tuple(rows)


def forward(group, is_first, x, *routing):
    """The two dispatches in either order. JAX leaves out a call of `both` that nobody needs."""
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


# --- two groups -----------------------------------------------------------------------------------------------------

IN_OTHER_ORDER = "ranks . and . run operations of this group and of another group in different order"


@pytest.fixture(scope="module")
def pair():
    """A mesh of two ranks."""
    return make_mesh((2,))


@pytest.fixture
def two_groups(kernel_backend, pair):
    """Two groups on the same devices, with a time-out that no test waits for."""
    settings = {"backend": kernel_backend, "timeout": 200.0}
    with open_group(pair, SMALL, **settings) as one, open_group(pair, SMALL, **settings) as other:
        yield one, other


def run(program, inputs, errors):
    """Runs a program; an error of XLA's goes to `errors`."""
    try:
        to_numpy(program(*inputs))
    except jax.errors.JaxRuntimeError as error:
        errors.append(str(error))


def expect_other_order(groups, begun, errors):
    assert time.monotonic() - begun < 15  # emulated GPUs that waited would take PATIENCE_S
    assert any("in different order" in error for error in errors)
    for group in groups:
        with pytest.raises(ep.Error, match=IN_OTHER_ORDER):
            group.check()


@in_one_process
def test_groups_in_other_order_in_one_program(two_groups, pair):
    one, other = two_groups
    inputs = place(make_inputs(SMALL, pair.size), pair)

    # Programs of their own: each call has the same number in both branches.
    first, second = (jax.jit(partial(chain, group, layers=1)) for group in (one, other))

    def at_odds(x, *routing):
        def in_order(x):
            return second(first(x, *routing), *routing)

        def in_other_order(x):
            return first(second(x, *routing), *routing)

        return lax.cond(lax.axis_index("ep") == 0, in_order, in_other_order, x)

    program = compiled(at_odds, pair, *inputs, options=NO_GRAPHS, check_vma=False)
    begun, errors = time.monotonic(), []
    run(program, inputs, errors)
    expect_other_order(two_groups, begun, errors)


@in_one_process
def test_groups_of_two_threads(two_groups, pair):
    """GPUs may get the programs of two host threads in different order, and then both groups fail. Or all is well."""
    inputs = place(make_inputs(SMALL, pair.size), pair)
    programs = [compiled(partial(chain, group), pair, *inputs, options=NO_GRAPHS) for group in two_groups]
    begun, errors = time.monotonic(), []

    def run_often(program):
        for _ in range(20):
            run(program, inputs, errors)

    threads = [threading.Thread(target=run_often, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        expect_other_order(two_groups, begun, errors)
    else:
        assert time.monotonic() - begun < 15
        for group in two_groups:
            group.check()


def test_groups_in_one_order(two_groups, pair):
    """Programs that one host thread calls, without waiting for them."""
    inputs = place(make_inputs(SMALL, pair.size), pair)
    programs = [compiled(partial(chain, group), pair, *inputs) for group in two_groups]
    first = [to_numpy(program(*inputs)) for program in programs]
    again = [program(*inputs) for _ in range(4) for program in programs]
    for turn, out in enumerate(again):
        assert_same_bits(out, first[turn % 2])
    for group in two_groups:
        group.check()
