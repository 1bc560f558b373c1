"""combine: the weighted sum, its error, its order, and what it never reads.

Every y here holds NaN in the rows that hold no token (helpers.random_rows), so each test also shows that padding is not
read.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import COMBINE_BOUND, assert_combined, assert_same_bits, make_mesh, random_rows, run_spmd, spmd, to_numpy
from shapes import ROUTINGS, SMALL, make_inputs, np_dtype, random_array


def combine_case(shape, mesh, layout, routing="uneven", **options):
    """Inputs, y for the rows they lead to, and the oracle's dispatch."""
    inputs = make_inputs(shape, mesh.size, routing)
    expected = oracle.dispatch(*inputs, num_experts=shape.num_experts, layout=layout, **options)
    return inputs, random_rows(expected.route, shape.hidden, shape.dtype), expected


@pytest.fixture(scope="module")
def small_combine(make_group, any_mesh, layout):
    """dispatch and combine of the small shape, compiled once for all routings."""
    group = make_group(any_mesh, SMALL)

    def dispatch_combine(y, *inputs):
        return ep.combine(y, ep.dispatch(*inputs, group=group, layout=layout))

    return jax.jit(spmd(dispatch_combine, any_mesh))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_at_every_ep_size(small_combine, any_mesh, layout, routing):
    inputs, y, expected = combine_case(SMALL, any_mesh, layout, routing)
    out = to_numpy(small_combine(y, *inputs))
    assert out.dtype == y.dtype
    assert_combined(out, y, expected.weights, expected.route, dtype=SMALL.dtype)


def test_same_bits_on_every_run(small_combine, any_mesh, layout):
    inputs, y, _ = combine_case(SMALL, any_mesh, layout)
    assert_same_bits(small_combine(y, *inputs), small_combine(y, *inputs))


def test_order_of_sums(make_group, any_mesh):
    """In the order of k, then of ranks, bit for bit."""
    x, topk_idx, topk_weights = make_inputs(SMALL, any_mesh.size)
    topk_weights = np.exp2(np.round(topk_weights))
    group = make_group(any_mesh, SMALL)

    def there_and_back(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout="ragged")
        return ep.combine(recv.x, recv)

    out = run_spmd(there_and_back, any_mesh, x, topk_idx, topk_weights)
    parts = oracle.rank_sums(x, topk_idx, topk_weights, SMALL.num_experts)
    assert_same_bits(out, oracle.sum_over_ranks(parts, node_size=any_mesh.size))


def test_order_of_sums_by_node():
    """The oracle's own: another node's sum is rounded, here from 257 to 256; the own ranks are added one by one."""
    parts = np.array([-256, 0, 256, 1], np_dtype("bfloat16")).reshape(4, 1, 1, 1).repeat(4, axis=1)
    assert oracle.sum_over_ranks(parts, node_size=4).ravel().tolist() == [1, 1, 1, 1]
    assert oracle.sum_over_ranks(parts, node_size=2).ravel().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", COMBINE_BOUND)
@pytest.mark.parametrize("node_size", [1, 2, 8])
def test_error_of_sums_by_node(dtype, node_size):
    """The oracle's own: rounding once more at each node keeps within the bound."""
    shape = dataclasses.replace(SMALL, dtype=dtype, top_k=8, tokens=64)
    x, topk_idx, topk_weights = make_inputs(shape, 8)
    topk_weights = np.exp2(np.round(topk_weights))
    parts = oracle.rank_sums(x, topk_idx, topk_weights, shape.num_experts)
    exact = topk_weights.sum(axis=-1, dtype=np.float64)[..., None] * x.astype(np.float64)
    error = oracle.sum_over_ranks(parts, node_size).astype(np.float64) - exact
    assert np.linalg.norm(error) <= COMBINE_BOUND[dtype] * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(make_group, mesh, layout, dtype):
    """The bound is the one of the coarser of two types: what travels, and what comes out."""
    shape = dataclasses.replace(SMALL, dtype=dtype)
    inputs, y, expected = combine_case(shape, mesh, layout)
    group = make_group(mesh, shape)
    out_dtypes = {None: dtype, "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}

    def dispatch_combine(y, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return [ep.combine(y, recv, out_dtype=out_dtype) for out_dtype in out_dtypes]

    for out, result in zip(run_spmd(dispatch_combine, mesh, y, *inputs), out_dtypes.values(), strict=True):
        assert out.dtype == jnp.dtype(result)
        coarser = max(dtype, result, key=lambda name: float(jnp.finfo(name).eps))
        assert_combined(out, y, expected.weights, expected.route, dtype=coarser)


@pytest.mark.parametrize(("dtype", "large"), [("bfloat16", 256), ("float16", 2048)])
@pytest.mark.parametrize(
    ("experts", "small"),
    [([4, 5, 6, 7], [1 + 2**-11, -1]), ([0, 4, 8, 12], [1, 0.5])],
    ids=["of_one_rank", "of_four_ranks"],
)
def test_sums_are_in_float32(make_group, layout, dtype, large, experts, small):
    """Weights and sums are not rounded to y's dtype, in which large + 1 is large and 1 + 2**-11 is 1."""
    mesh = make_mesh((4,))
    shape = dataclasses.replace(SMALL, dtype=dtype)
    x, topk_idx, topk_weights = make_inputs(shape, mesh.size)
    topk_idx[:] = experts
    topk_weights[:] = [large, *small, -large]
    group = make_group(mesh, shape)

    def dispatch_combine(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return ep.combine(jnp.ones_like(recv.x), recv, out_dtype="float32")

    np.testing.assert_array_equal(run_spmd(dispatch_combine, mesh, x, topk_idx, topk_weights), sum(small))


@pytest.mark.parametrize("alignment", [1, 8])
def test_dropped_rows_add_nothing(make_group, mesh, layout, alignment):
    capacity = {"expert": 8, "ragged": 24}[layout]
    options = {"capacity": capacity, "alignment": alignment}
    inputs, y, expected = combine_case(SMALL, mesh, layout, "hot_expert", **options)
    assert expected.route.num_dropped.any()
    group = make_group(mesh, SMALL)

    def dispatch_combine(y, *inputs):
        return ep.combine(y, ep.dispatch(*inputs, group=group, layout=layout, **options))

    out = run_spmd(dispatch_combine, mesh, y, *inputs)
    assert_combined(out, y, expected.weights, expected.route, dtype=SMALL.dtype)


def test_weights_are_those_of_recv(make_group, mesh, layout):
    """Replaced weights count, and those of rows without a token do not."""
    inputs, y, expected = combine_case(SMALL, mesh, layout)
    weights = random_array(np.random.default_rng(2), expected.weights.shape, "float32")
    weights[~expected.route.is_token] = np.nan
    group = make_group(mesh, SMALL)

    def dispatch_combine(y, weights, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return ep.combine(y, dataclasses.replace(recv, weights=weights))

    out = run_spmd(dispatch_combine, mesh, y, weights, *inputs)
    assert_combined(out, y, weights, expected.route, dtype=SMALL.dtype)


def test_no_weights_means_a_plain_sum(make_group, mesh, layout):
    (x, topk_idx, _), y, expected = combine_case(SMALL, mesh, layout)
    group = make_group(mesh, SMALL)

    def dispatch_combine(y, x, topk_idx):
        return ep.combine(y, ep.dispatch(x, topk_idx, None, group=group, layout=layout))

    out = run_spmd(dispatch_combine, mesh, y, x, topk_idx)
    assert_combined(out, y, None, expected.route, dtype=SMALL.dtype)


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_tokens_than_the_group_allows(make_group, mesh, layout, tokens):
    inputs = make_inputs(SMALL, mesh.size)
    first = (a[:, :tokens] for a in inputs)
    expected = oracle.dispatch(*first, num_experts=SMALL.num_experts, layout=layout)
    y = random_rows(expected.route, SMALL.hidden, SMALL.dtype)
    group = make_group(mesh, SMALL)

    def combine_first(y, *inputs):
        return ep.combine(y, ep.dispatch(*(a[:tokens] for a in inputs), group=group, layout=layout))

    out = run_spmd(combine_first, mesh, y, *inputs)
    assert_combined(out, y, expected.weights, expected.route, dtype=SMALL.dtype)
