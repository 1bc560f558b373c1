"""Every named shape once in each layout, through dispatch, dispatch_like and combine."""

import pytest

import jax_ep as ep
import oracle
from helpers import (
    assert_combined,
    assert_dispatched,
    assert_each_token_combined,
    assert_same_bits,
    random_rows,
    run_spmd,
)
from shapes import SHAPES, make_inputs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(make_group, largest_mesh, shape, layout):
    num_ranks = largest_mesh.size
    inputs = make_inputs(shape, num_ranks, "uneven")
    expected = oracle.dispatch(*inputs, num_experts=shape.num_experts, layout=layout)
    y = random_rows(expected.route, shape.hidden, shape.dtype)
    group = make_group(largest_mesh, shape)

    def round_trip(x, topk_idx, topk_weights, y):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
        return recv, ep.dispatch_like(x, recv), ep.combine(y, recv)

    recv, again, out = run_spmd(round_trip, largest_mesh, *inputs, y)
    assert_dispatched(recv, expected)
    is_token = expected.route.is_token
    assert_same_bits(again[is_token], expected.x[is_token])
    assert_combined(out, y, expected.weights, expected.route, dtype=shape.dtype)
    assert_each_token_combined(out, y, expected.weights, expected.route, dtype=shape.dtype)
