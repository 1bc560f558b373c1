"""combine: the weighted sum, its error, its order, and what it never reads.

Every y here holds NaN in the rows that hold no token (helpers.random_rows), so each test also shows that padding is not
read.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import (
    COMBINE_BOUND,
    assert_combined,
    assert_each_token_combined,
    assert_same_bits,
    make_mesh,
    open_group,
    order_sensitive_inputs,
    random_rows,
    run_spmd,
    spmd,
    to_numpy,
)
from shapes import ROUTINGS, SMALL, make_inputs, np_dtype, random_array

ORDERED = dataclasses.replace(SMALL, num_experts=32, top_k=8, tokens=32)  # for order_sensitive_inputs


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
    assert_each_token_combined(out, y, expected.weights, expected.route, dtype=SMALL.dtype)


def test_same_bits_on_every_run(small_combine, any_mesh, layout):
    inputs, y, _ = combine_case(SMALL, any_mesh, layout)
    assert_same_bits(small_combine(y, *inputs), small_combine(y, *inputs))


def check_order_of_sums(group, mesh, shape):
    """combine, and the cotangent of dispatch's x, have the bits of sums in the contract's order.

    The experts return their rows. The cotangent of each row is the row times its weight, so that both sums have the
    same terms. Over a network, a node adds its rows of many tokens first.
    """
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, mesh.size)

    def sums(x, topk_idx, topk_weights):
        def rows(x):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged", zero_pad=True)
            return recv.x, recv

        y, transpose, recv = jax.vjp(rows, x, has_aux=True)
        return ep.combine(y, recv), transpose((y * recv.weights[:, None]).astype(y.dtype))[0]

    parts = oracle.rank_sums(x, topk_idx, topk_weights, shape.num_experts)
    node_size = int(os.environ.get("JAX_EP_NODE_SIZE", mesh.size)) if shape.tokens > 32 else mesh.size
    expected = oracle.sum_over_ranks(parts, node_size)
    out, dx = run_spmd(sums, mesh, x, topk_idx, topk_weights)
    assert_same_bits(out, expected, "combine")
    assert_same_bits(dx, expected, "cotangent of x")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_order_of_sums(make_group, any_mesh, dtype):
    """In the order of k, rounded to the dtype of y, then in the order of ranks."""
    shape = dataclasses.replace(ORDERED, dtype=dtype)
    check_order_of_sums(make_group(any_mesh, shape), any_mesh, shape)


@pytest.mark.parametrize(("tokens", "num_sms"), [(32, 4), (40, None), (260, None)])
def test_order_of_sums_in_other_kernels(kernel_backend, mesh, tokens, num_sms):
    """The CUDA backend chooses its kernel by the number of tokens, and by num_sms if that is given."""
    shape = dataclasses.replace(ORDERED, tokens=tokens)
    with open_group(mesh, shape, num_sms=num_sms, backend=kernel_backend) as group:
        check_order_of_sums(group, mesh, shape)


def test_order_of_sums_of_long_rows_on_two_ranks(kernel_backend):
    """With 17 to 32 tokens and rows longer than 4 KB, the CUDA backend has a plan for two ranks."""
    shape = dataclasses.replace(ORDERED, hidden=2304)
    mesh = make_mesh((min(2, jax.device_count()),))
    with open_group(mesh, shape, backend=kernel_backend) as group:
        check_order_of_sums(group, mesh, shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_oracle_order_shows_in_order_sensitive_inputs(num_ranks, dtype):
    """The oracle's sums of these inputs have other bits if the order of the terms is another."""
    shape = dataclasses.replace(ORDERED, dtype=dtype)
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, num_ranks)

    def sums(k=slice(None), order_of_ranks=slice(None)):
        parts = oracle.rank_sums(x, topk_idx[..., k], topk_weights[..., k], shape.num_experts)
        return oracle.sum_over_ranks(parts[order_of_ranks], node_size=num_ranks)

    def share_of_other_tokens(**options):
        return np.mean((sums(**options) != sums()).any(axis=-1))

    assert share_of_other_tokens(k=slice(None, None, -1)) > 0.1
    if num_ranks > 1:
        assert share_of_other_tokens(order_of_ranks=slice(None, None, -1)) > 0.1
        assert share_of_other_tokens(order_of_ranks=np.roll(np.arange(num_ranks), 1)) > 0.1


def test_oracle_order_of_sums_by_node():
    """Another node's sum is rounded, here from 257 to 256; the parts of the own node are added one by one."""
    parts = np.array([-256, 0, 256, 1], np_dtype("bfloat16")).reshape(4, 1, 1, 1).repeat(4, axis=1)
    assert oracle.sum_over_ranks(parts, node_size=4).ravel().tolist() == [1, 1, 1, 1]
    assert oracle.sum_over_ranks(parts, node_size=2).ravel().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", COMBINE_BOUND)
@pytest.mark.parametrize("node_size", [1, 2, 8])
def test_oracle_error_of_sums_by_node(dtype, node_size):
    """A further rounding at each node keeps the sum within the bound."""
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


@pytest.mark.parametrize(("dtype", "small"), [("bfloat16", 2**-9), ("float16", 2**-12)])
def test_parts_are_rounded_once(make_group, layout, dtype, small):
    """A rank rounds its part of a sum to the dtype of y, in which 1 + small is 1; the source adds parts in float32."""
    mesh = make_mesh((4,))
    shape = dataclasses.replace(SMALL, dtype=dtype, top_k=2)
    x, topk_idx, topk_weights = make_inputs(shape, mesh.size)
    topk_idx[:, ::2], topk_idx[:, 1::2] = [4, 5], [4, 8]  # of one rank, of two ranks
    topk_weights[:] = [1, small]
    group = make_group(mesh, shape)

    def dispatch_combine(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return ep.combine(jnp.ones_like(recv.x), recv, out_dtype="float32")

    out = run_spmd(dispatch_combine, mesh, x, topk_idx, topk_weights)
    np.testing.assert_array_equal(out[:, ::2], 1)
    np.testing.assert_array_equal(out[:, 1::2], 1 + small)


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
