"""Routing from hypothesis, in and out of range, and a few random cases of soak.py, against the oracle."""

import dataclasses

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jax_ep as ep
import oracle
import soak
from helpers import assert_combined, assert_dispatched, random_rows, spmd, to_numpy
from shapes import SMALL, make_inputs

SHAPE = dataclasses.replace(SMALL, num_experts=8, top_k=3, hidden=16, tokens=5, dtype="float32")
OPTIONS = {
    "default": {},
    "one_row": {"capacity": 1},
    "short": {"capacity": 12, "alignment": 4},
    "aligned": {"capacity": 64, "alignment": 16},
}


@pytest.fixture(scope="module", params=OPTIONS)
def case(request, make_group, mesh, layout):
    """Options of dispatch, and a program for them: ids and y in, recv and the combination of y out."""
    group = make_group(mesh, SHAPE)
    options = {"layout": layout, **OPTIONS[request.param]}

    def dispatch_combine(y, *inputs):
        recv = ep.dispatch(*inputs, group=group, **options)
        return recv, ep.combine(y, recv)

    return jax.jit(spmd(dispatch_combine, mesh)), options


@settings(max_examples=40)
@given(data=st.data())
def test_any_routing(case, mesh, data):
    program, options = case
    x, topk_idx, topk_weights = make_inputs(SHAPE, mesh.size)
    # A few experts only, so that duplicates and crowds are as common as spread-out ids.
    ids = data.draw(st.sampled_from([st.integers(-2, SHAPE.num_experts + 1), st.integers(3, 4), st.integers(-1, 0)]))
    topk_idx = data.draw(hnp.arrays(np.int32, topk_idx.shape, elements=ids))
    expected = oracle.dispatch(x, topk_idx, topk_weights, num_experts=SHAPE.num_experts, **options)
    y = random_rows(expected.route, SHAPE.hidden, SHAPE.dtype)
    recv, out = to_numpy(program(y, x, topk_idx, topk_weights))
    assert_dispatched(recv, expected)
    assert_combined(out, y, expected.weights, expected.route, dtype=SHAPE.dtype)


@pytest.fixture
def one_process():
    if jax.process_count() > 1:
        pytest.skip("a random mesh may have no device of a process")


@pytest.mark.parametrize("seed", range(4))
def test_random_groups_and_programs(one_process, backend, seed):
    assert soak.run_case(seed, jax.devices(), backend) > 0


def zero_everywhere(array):
    return np.zeros_like(array)


def zero_in_the_largest_row(array):
    """Arrays of rows have at least four axes: lines of the mesh, ranks, rows, channels. Others stay as they are."""
    if array.ndim < 4 or np.issubdtype(array.dtype, np.integer):
        return array
    rows = array.reshape(-1, array.shape[-1]).copy()
    with np.errstate(invalid="ignore"):  # rows that hold no token may hold any bits
        sizes = np.linalg.norm(np.nan_to_num(rows.astype(np.float64)), axis=-1)
    rows[np.argmax(sizes)] = 0
    return rows.reshape(array.shape)


@pytest.mark.parametrize("spoil", [zero_everywhere, zero_in_the_largest_row])
def test_wrong_results_are_found(one_process, backend, monkeypatch, spoil):
    """Or else a soak that finds nothing would say nothing."""
    monkeypatch.setattr(soak, "to_numpy", lambda results: jax.tree.map(spoil, to_numpy(results)))
    _, (wrong,) = soak.attempt(0, lambda: soak.run_case(0, jax.devices(), backend))
    assert wrong["seed"] == 0
    assert wrong["error"].startswith("AssertionError")


def test_late_ranks_change_no_bit(mesh, backend):
    assert soak.run_late(mesh, backend, num_operations=40)["operations"] == 40
