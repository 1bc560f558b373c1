"""The layout "token", expand and reduce: bit for bit against the oracle, and layers as with the ragged layout.

A test compiles few programs, and runs them with several routings.
"""

import dataclasses
from functools import partial

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
    assert_trees_same_bits,
    inputs_of_every_operation,
    make_mesh,
    open_group,
    order_sensitive_inputs,
    random_rows,
    spmd,
    to_numpy,
)
from jax_ep._token_layout import _PairCounts
from shapes import ODD, ROUTINGS, SMALL, Inputs, Shape, make_inputs, np_dtype, random_array
from test_balance import CASES, QUICK, TOKENS, routings_of
from test_balance import make_case as make_plan_case
from test_combine import ORDERED
from test_errors import assert_names
from test_gradients import SHAPE as EXPERTS_SHAPE
from test_gradients import assert_close, dense_gradients, make_case

SHAPE = dataclasses.replace(SMALL, dtype="float32", hidden=16)
WIDE = dataclasses.replace(SMALL, hidden=256)
BFLOAT16 = dataclasses.replace(SHAPE, name="bfloat16", dtype="bfloat16")
ODD_ROWS = ("shortest_row_f32", "hidden_1000", "top_32", "one_token")  # of shapes.ODD; hidden_1000 is float16


def run_spmd(fn, mesh, *args, **options):
    """`fn` compiled and run once on every device; a pytree of NumPy arrays."""
    return to_numpy(jax.jit(spmd(fn, mesh, **options), compiler_options=QUICK)(*args))


def dispatch_tokens(*inputs, group, **options):
    return ep.dispatch(*inputs, group=group, layout="token", **options)


def without_dropped(inputs, kept):
    """The inputs without the pairs that are not `kept` [R, T, K]."""
    return Inputs(inputs.x, np.where(kept, inputs.topk_idx, -1), inputs.topk_weights)


def assert_tokens_dispatched(recv, expected: oracle.TokenRows, *, zero_pad=False) -> None:
    """All that the contract promises about recv in the layout "token"."""
    for name in ("topk_idx", "weights", "counts", "num_rows", "num_dropped"):
        assert_same_bits(getattr(recv, name), getattr(expected, name), name)
    assert_same_bits(recv.group_sizes, expected.counts, "group_sizes")
    assert recv.x.shape == expected.x.shape
    promised = slice(None) if zero_pad else expected.is_token
    assert_same_bits(recv.x[promised], expected.x[promised], "x")
    if expected.scales is None:
        assert recv.scales is None
    else:
        assert_same_bits(recv.scales[expected.is_token], expected.scales[expected.is_token], "scales")


def in_groups(rows) -> np.ndarray:
    """Which rows of `Expanded` are in a group: bool [R, capacity]."""
    return np.arange(rows.x.shape[1]) < np.sum(rows.group_sizes, axis=1)[:, None]


def assert_expanded(rows, expected: oracle.Dispatched, zero_pad: bool = False) -> None:
    """`rows` are those of the ragged layout. Rows of x after the last group are zero with zero_pad."""
    for name in ("counts", "group_sizes", "num_dropped"):
        assert_same_bits(getattr(rows, name), getattr(expected.route, name), name)
    assert_same_bits(rows.weights, expected.weights, "weights")
    compared = np.ones(rows.x.shape[:2], bool) if zero_pad else in_groups(rows)
    assert_same_bits(rows.x[compared], expected.x[compared], "x")
    if expected.scales is None:
        assert rows.scales is None
    else:
        assert_same_bits(rows.scales, expected.scales, "scales")


def token_sums(y, expected: oracle.TokenRows) -> tuple[np.ndarray, np.ndarray]:
    """The sum over ranks of the rows y [R, capacity, H] of each token, and that of their absolute values."""
    num_ranks, tokens, _ = expected.kept.shape
    total = np.zeros((num_ranks, tokens, y.shape[-1]))
    magnitude = np.zeros_like(total)
    where = tuple(expected.source[expected.is_token].T)
    terms = y[expected.is_token].astype(np.float64)
    np.add.at(total, where, terms)
    np.add.at(magnitude, where, np.abs(terms))
    return total, magnitude


def assert_sums(out, y, expected: oracle.TokenRows, dtype: str) -> None:
    total, magnitude = token_sums(y, expected)
    assert np.linalg.norm(out.astype(np.float64) - total) <= COMBINE_BOUND[dtype] * np.linalg.norm(magnitude)
    assert not out[magnitude == 0].any()


def random_token_rows(is_token, hidden, dtype) -> np.ndarray:
    """Rows [R, capacity, H] that nobody has computed: NaN where there is no token."""
    y = random_array(np.random.default_rng(7), (*is_token.shape, hidden), dtype)
    y[~is_token] = np.array(np.nan, np_dtype(dtype))
    return y


# --- values -----------------------------------------------------------------------------------------------------------


def every_operation(y_tokens, y_rows, *inputs, group, capacity=None, room=None, alignment=1):
    """dispatch, dispatch_like, combine, expand and reduce, with experts' outputs that do not depend on recv."""
    recv = dispatch_tokens(*inputs, group=group, capacity=capacity)
    rows = ep.expand(recv, capacity=room, alignment=alignment)
    reduced = ep.reduce(y_rows, rows)
    like = ep.dispatch_like(inputs[1], recv)
    return recv, like, rows, rows.row_expert, reduced, ep.combine(y_tokens, recv), ep.combine(reduced, recv)


def check_values(run, inputs, num_experts, dtype, capacity=None, room=None, alignment=1):
    """Compares the results of `every_operation` with the oracle. Returns the rows of tokens, and the ragged rows."""
    expected = oracle.dispatch_tokens(*inputs, num_experts=num_experts, capacity=capacity)
    kept = without_dropped(inputs, expected.kept)
    if room is None:
        num_ranks, tokens, top_k = inputs.topk_idx.shape
        local = num_experts // num_ranks
        most = min(top_k, local) * min(num_ranks * tokens, expected.x.shape[1])
        room = oracle.round_up(most + local * (alignment - 1), alignment)
    ragged = oracle.dispatch(*kept, num_experts=num_experts, layout="ragged", capacity=room, alignment=alignment)
    route, hidden = ragged.route, inputs.x.shape[-1]
    y_tokens, y_rows = random_token_rows(expected.is_token, hidden, dtype), random_rows(route, hidden, dtype)

    recv, like, rows, row_expert, reduced, out, reduced_out = to_numpy(run(y_tokens, y_rows, *inputs))
    assert_tokens_dispatched(recv, expected)
    source = expected.source[expected.is_token]
    assert_same_bits(like[expected.is_token], inputs.topk_idx[tuple(source.T)])
    assert_sums(out, y_tokens, expected, dtype)
    assert_expanded(rows, ragged)
    rank, row = np.nonzero(route.is_token)
    r, token, k = route.source[rank, row].T
    np.testing.assert_array_equal(row_expert[rank, row], inputs.topk_idx[r, token, k] % (num_experts // len(out)))
    assert_combined(reduced_out, y_rows, ragged.weights, route, dtype=dtype)
    assert_each_token_combined(reduced_out, y_rows, ragged.weights, route, dtype=dtype)
    assert not reduced[~expected.is_token].any()
    return expected, ragged


@pytest.fixture(scope="module")
def values(make_group, any_mesh):
    """every_operation of the small shape, compiled once for all routings."""
    group = make_group(any_mesh, SHAPE)
    return jax.jit(spmd(partial(every_operation, group=group), any_mesh), compiler_options=QUICK)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_at_every_ep_size(values, any_mesh, routing):
    check_values(values, make_inputs(SHAPE, any_mesh.size, routing), SHAPE.num_experts, SHAPE.dtype)


def test_same_bits_on_every_run(values, any_mesh):
    inputs = make_inputs(SHAPE, any_mesh.size, "uneven")
    rows = any_mesh.size * SHAPE.tokens
    y = random_array(np.random.default_rng(0), (any_mesh.size, rows, SHAPE.hidden), "float32")
    y_rows = np.repeat(y, min(SHAPE.top_k, SHAPE.num_experts // any_mesh.size), axis=1)
    first, second = (to_numpy(values(y, y_rows, *inputs)) for _ in range(2))

    def specified(values):  # without recv, which has unspecified rows
        _, _, rows, *others = values
        return dataclasses.replace(rows, x=rows.x[in_groups(rows)]), others

    assert_trees_same_bits(specified(first), specified(second))


@pytest.mark.parametrize("shape", [BFLOAT16, *(shape for shape in ODD if shape.name in ODD_ROWS)], ids=str)
def test_dtypes_and_odd_shapes(make_group, mesh, shape):
    run = jax.jit(spmd(partial(every_operation, group=make_group(mesh, shape)), mesh), compiler_options=QUICK)
    check_values(run, make_inputs(shape, mesh.size), shape.num_experts, shape.dtype)


def test_outputs_in_another_dtype(make_group, mesh):
    """The rows of y have 8 bytes, less than the 16 of the kernels' units."""
    shape = dataclasses.replace(SHAPE, hidden=4)
    inputs = make_inputs(shape, mesh.size)
    group = make_group(mesh, shape)

    def reduced(*inputs):
        rows = ep.expand(dispatch_tokens(*inputs, group=group), zero_pad=True)

        def reduce(x, weights):
            return ep.reduce(x.astype(jnp.bfloat16), dataclasses.replace(rows, weights=weights))

        out, transpose = jax.vjp(reduce, rows.x, rows.weights)
        return rows, out, transpose(out)

    rows, out, (dx, dweights) = run_spmd(reduced, mesh, *inputs)
    x, out = np.asarray(rows.x, np.float32), out.astype(np.float32)
    for rank in range(mesh.size):
        row, pair = (rows.row_of_pair[rank].reshape(-1), np.arange(rows.row_of_pair[rank].size))
        token, row = pair[row < x.shape[1]] // shape.top_k, row[row < x.shape[1]]
        expected = np.zeros_like(out[rank])
        np.add.at(expected, token, x[rank, row] * rows.weights[rank, row, None])
        np.testing.assert_allclose(out[rank], expected, rtol=0.03, atol=0.03)
        np.testing.assert_allclose(
            dx[rank, row], out[rank, token] * rows.weights[rank, row, None], rtol=0.03, atol=1e-3
        )
        products = np.sum(out[rank, token] * x[rank, row], axis=-1)
        np.testing.assert_allclose(dweights[rank, row], products, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("capacity", "room", "alignment"), [(3, 8, 2), (17, 15, 3)])
def test_too_little_room_is_shared_fairly(make_group, mesh, capacity, room, alignment):
    """Among sources in the layout "token", beginning with rank 0; among experts and sources in expand."""
    shape = dataclasses.replace(SHAPE, num_experts=12, tokens=24)
    options = {"capacity": capacity, "room": room, "alignment": alignment}
    program = partial(every_operation, group=make_group(mesh, shape), **options)
    run = jax.jit(spmd(program, mesh), compiler_options=QUICK)
    dropped = np.zeros(2, int)
    for routing in ("uneven", "out_of_range", "hot_expert", "duplicates"):
        inputs = make_inputs(shape, mesh.size, routing)
        expected, ragged = check_values(run, inputs, shape.num_experts, shape.dtype, **options)
        dropped += expected.num_dropped.sum(), ragged.route.num_dropped.sum()
    assert dropped.all()


def test_what_is_left_over_goes_to_rank_0_first(make_group, mesh):
    """On every rank, also on those whose first expert's number is not a multiple of the number of ranks."""
    shape = dataclasses.replace(SHAPE, num_experts=mesh.size, top_k=1)
    inputs = make_inputs(shape, mesh.size)
    inputs.topk_idx[:] = np.arange(shape.tokens)[:, None] % mesh.size
    group = make_group(mesh, shape)
    capacity = mesh.size + 1
    recv = run_spmd(partial(dispatch_tokens, group=group, capacity=capacity), mesh, *inputs)
    assert (recv.num_rows_per_rank == [2] + [1] * (mesh.size - 1)).all()
    assert_tokens_dispatched(recv, oracle.dispatch_tokens(*inputs, num_experts=mesh.size, capacity=capacity))


def test_zero_pad_and_alignment(make_group, mesh):
    """There is nothing to align: all rows fit, also where the default capacity is no multiple of the alignment."""
    inputs = make_inputs(SHAPE, mesh.size, "hot_expert")
    inputs[1][:, ::3] = -1  # so that some rows of the buffer hold no token, also on two ranks
    options = {"group": make_group(mesh, SHAPE), "zero_pad": True, "alignment": 5}
    recv = run_spmd(partial(dispatch_tokens, **options), mesh, *inputs)
    expected = oracle.dispatch_tokens(*inputs, num_experts=SHAPE.num_experts)
    assert not expected.is_token.all()
    assert_tokens_dispatched(recv, expected, zero_pad=True)


def test_rows_shorter_than_their_ids_and_weights(make_group, mesh):
    """A row of 8 channels has fewer bytes than its ids and weights."""
    shape = Shape("few_bytes", num_experts=16, top_k=5, hidden=8, tokens=4)
    inputs = make_inputs(shape, mesh.size, "out_of_range")
    group = make_group(mesh, shape)
    expected = oracle.dispatch_tokens(*inputs, num_experts=shape.num_experts)
    dweights = random_array(np.random.default_rng(1), expected.weights.shape, "float32")

    def weights(dweights, x, topk_idx, topk_weights):
        def dispatch(topk_weights):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group)
            return recv.weights, recv

        _, transpose, recv = jax.vjp(dispatch, topk_weights, has_aux=True)
        return recv, transpose(dweights)[0]

    recv, gradient = run_spmd(weights, mesh, dweights, *inputs)
    assert_tokens_dispatched(recv, expected)
    assert_same_bits(gradient, weights_at_sources(dweights, expected))


@pytest.mark.parametrize(("tokens", "capacity"), [(0, None), (0, 8), (1, None)])
def test_fewer_tokens_than_the_group_allows(make_group, mesh, tokens, capacity):
    inputs = Inputs(*(a[:, :tokens] for a in make_inputs(SHAPE, mesh.size)))
    options = {"group": make_group(mesh, SHAPE), "capacity": capacity}
    run = jax.jit(spmd(partial(every_operation, **options), mesh), compiler_options=QUICK)
    check_values(run, inputs, SHAPE.num_experts, SHAPE.dtype, capacity)


def test_gradient_without_tokens(make_group, mesh):
    group = make_group(mesh, SHAPE)
    x, topk_idx, topk_weights = (a[:, :0] for a in make_inputs(SHAPE, mesh.size))

    def gradients(x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group)
            rows = ep.expand(recv, alignment=4)  # padding alone
            return jnp.sum(ep.combine(ep.reduce(jnp.tanh(rows.x), rows), recv))

        return jax.grad(loss, (0, 1))(x, topk_weights)

    dx, dweights = run_spmd(gradients, mesh, x, topk_idx, topk_weights)
    assert dx.shape == x.shape
    assert dweights.shape == topk_weights.shape


def test_no_weights_means_a_weight_of_1(make_group, mesh):
    x, topk_idx, _ = make_inputs(SHAPE, mesh.size, "out_of_range")
    recv = run_spmd(partial(dispatch_tokens, group=make_group(mesh, SHAPE)), mesh, x, topk_idx)
    assert_tokens_dispatched(recv, oracle.dispatch_tokens(x, topk_idx, None, num_experts=SHAPE.num_experts))


def test_default_capacities(make_group, mesh):
    """Room for all tokens of all ranks, and in expand for each of their pairs, or for the rows that arrive."""
    group, inputs = make_group(mesh, SHAPE), make_inputs(SHAPE, mesh.size)
    tokens, local = mesh.size * SHAPE.tokens, group.experts_per_rank

    def capacities(alignment=1, **options):
        def lengths(*inputs):
            recv = dispatch_tokens(*inputs, group=group, **options)
            return recv.x, ep.expand(recv, alignment=alignment).x

        return [rows.shape[1] for rows in jax.eval_shape(spmd(lengths, mesh), *inputs)]

    pairs = tokens * min(SHAPE.top_k, local)
    assert capacities() == [tokens, pairs]
    assert capacities(alignment=8) == [tokens, oracle.round_up(pairs + local * 7, 8)]
    assert capacities(capacity=3) == [3, 3 * min(SHAPE.top_k, local)]
    assert capacities(capacity=2 * tokens) == [2 * tokens, pairs]
    assert capacities(capacity_factor=0.5)[0] == SHAPE.tokens * SHAPE.top_k // 2
    assert capacities(capacity_factor=1000.0)[0] == tokens  # more rows never arrive


@pytest.mark.parametrize("num_sms", [None, 4])
def test_order_of_sums(make_group, mesh, num_sms):
    """reduce adds in float32 in the order of k, and rounds once. So do the gradients of expand.

    With num_sms, the CUDA backend's combine copies the rows of a token into the sum.
    """
    shape = dataclasses.replace(ORDERED, dtype="bfloat16")
    group = make_group(mesh, shape, num_sms=num_sms)
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, mesh.size)

    def sums(x, topk_idx, topk_weights):
        def rows(x):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group)
            rows = ep.expand(recv)
            return rows.x, (recv, rows)

        y, transpose, (recv, rows) = jax.vjp(rows, x, has_aux=True)
        return ep.combine(ep.reduce(y, rows), recv), transpose((y * rows.weights[:, None]).astype(y.dtype))[0]

    parts = oracle.rank_sums(x, topk_idx, topk_weights, shape.num_experts)
    out, dx = run_spmd(sums, mesh, x, topk_idx, topk_weights)
    expected = oracle.sum_over_ranks(parts, mesh.size)  # nodes are summed up for calls with more tokens only
    assert_same_bits(out, expected, "combine")
    assert_same_bits(dx, expected, "cotangent of x")


@pytest.mark.parametrize("num_sms", [None, 4])
def test_rows_with_the_bits_of_missing_units_and_of_no_number(make_group, mesh, num_sms):
    shape = dataclasses.replace(SMALL, hidden=2 * WIDE.hidden)
    inputs = inputs_of_every_operation(shape, mesh.size)[:3]
    inputs[0][:, 2, ::3] = -0.0
    inputs[0][:, 2, 1::3] = np.array(0xFFA5, np.uint16).view(inputs[0].dtype)  # a NaN

    def sums(*inputs, group):
        recv = dispatch_tokens(*inputs, group=group)
        return ep.combine(recv.x, recv)

    with open_group(mesh, shape, backend="reference") as reference:
        expected = run_spmd(partial(sums, group=reference), mesh, *inputs)
    out = run_spmd(partial(sums, group=make_group(mesh, shape, num_sms=num_sms)), mesh, *inputs)
    is_nan = np.isnan(expected)  # NaN has other bits on other backends
    assert is_nan.any()
    np.testing.assert_array_equal(np.isnan(out), is_nan)
    assert_same_bits(out[~is_nan], expected[~is_nan])


# --- wires ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["fp8", "fp8_pow2", None])
def test_fp8_rows(make_group, mesh, wire):
    """As fp8 and dequantised on arrival; also rows that the caller has quantised (None). expand keeps the scales."""
    group = make_group(mesh, WIDE)
    inputs = make_inputs(WIDE, mesh.size, "uneven")
    x = inputs.x if wire else oracle.quantize(inputs.x, "fp8")

    def dispatch(x, *routing):
        options = {"group": group, "wire": wire, "zero_pad": True}
        recv, on_arrival = (dispatch_tokens(x, *routing, **options, dequantize=d) for d in (False, True))
        rows = ep.expand(recv, zero_pad=True)
        return recv, on_arrival, rows, ep.dequantize(rows)

    recv, on_arrival, rows, later = run_spmd(dispatch, mesh, x, *inputs[1:])
    options = {"num_experts": WIDE.num_experts, "wire": wire}
    to = {"dequantize_to": np_dtype(WIDE.dtype)}
    assert_tokens_dispatched(recv, oracle.dispatch_tokens(x, *inputs[1:], **options), zero_pad=True)
    assert_tokens_dispatched(on_arrival, oracle.dispatch_tokens(x, *inputs[1:], **options, **to), zero_pad=True)
    assert_expanded(rows, oracle.dispatch(x, *inputs[1:], **options, layout="ragged"), zero_pad=True)
    assert_same_bits(later, oracle.dispatch(x, *inputs[1:], **options, **to, layout="ragged").x)


@pytest.mark.parametrize("dequantize", [False, True])
def test_own_rows_that_senders_write(make_group, mesh, dequantize):
    """With many tokens on few SMs, senders also write a token's own row, from the 33rd token on."""
    shape = dataclasses.replace(WIDE, tokens=72)
    inputs = make_inputs(shape, mesh.size, "uneven")
    group = make_group(mesh, shape, num_sms=2)
    options = {"wire": "fp8", "capacity": 25 * mesh.size}
    dispatch = partial(dispatch_tokens, group=group, dequantize=dequantize, zero_pad=True, **options)
    recv = run_spmd(dispatch, mesh, *inputs)
    options["dequantize_to"] = np_dtype(shape.dtype) if dequantize else None
    expected = oracle.dispatch_tokens(*inputs, num_experts=shape.num_experts, **options)
    assert expected.num_dropped.any()
    assert_tokens_dispatched(recv, expected, zero_pad=True)


@pytest.mark.parametrize("wire", ["fp8", None])
def test_fp8_rows_are_not_differentiable(make_group, mesh, wire):
    group = make_group(mesh, WIDE)
    x, topk_idx, topk_weights = make_inputs(WIDE, mesh.size)
    x = x if wire else oracle.quantize(x, "fp8")

    def gradient(x, topk_idx, topk_weights):
        def loss(topk_weights):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group, wire=wire, dequantize=False)
            return jnp.sum(recv.weights)

        return jax.grad(loss)(topk_weights)

    with pytest.raises(TypeError, match="dequantize=True"):
        jax.eval_shape(spmd(gradient, mesh), x, topk_idx, topk_weights)


# --- gradients --------------------------------------------------------------------------------------------------------


def layer(x, topk_idx, topk_weights, experts, *, group, room=None, alignment=1, **options):
    """One MoE layer on one device; experts [E_local, H, H]."""
    recv = dispatch_tokens(x, topk_idx, topk_weights, group=group, **options)
    rows = ep.expand(recv, capacity=room, alignment=alignment)
    y = jax.lax.ragged_dot(rows.x, experts, rows.group_sizes, precision="highest")
    return ep.combine(ep.reduce(jnp.tanh(y), rows), recv)


def check_against_dense(group, mesh, case, kept=True, check_vma=True, **options):
    x, topk_idx, topk_weights, experts, cotangent = case
    sharded = spmd(partial(layer, group=group, **options), mesh, check_vma=check_vma)

    @partial(jax.jit, compiler_options=QUICK)
    @partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss(x, topk_weights, experts):
        return jnp.sum(sharded(x, topk_idx, topk_weights, experts).astype(jnp.float32) * cotangent)

    value, gradients = to_numpy(loss(x, topk_weights, experts))
    dense_value, dense = dense_gradients(*case, kept)
    np.testing.assert_allclose(value, dense_value, rtol=1e-5, atol=1e-5)
    assert_close(gradients, dense, 1e-5)
    return gradients


def test_gradients_of_a_layer(make_group, mesh):
    """A token may name an expert twice: the given room is enough for that."""
    group = make_group(mesh, EXPERTS_SHAPE)
    room = mesh.size * EXPERTS_SHAPE.tokens * EXPERTS_SHAPE.top_k
    case = make_case(EXPERTS_SHAPE, mesh.size, "duplicates")
    options = {"room": room + 4 * group.experts_per_rank, "alignment": 4, "check_vma": False}
    check_against_dense(group, mesh, case, **options)


def test_dropped_rows_have_no_gradient(make_group, mesh):
    """Rows that dispatch drops, and rows that expand drops."""
    case = make_case(EXPERTS_SHAPE, mesh.size, "hot_expert")
    inputs, capacity, room = Inputs(*case[:3]), 2 * mesh.size + 1, 8
    tokens = oracle.dispatch_tokens(*inputs, num_experts=EXPERTS_SHAPE.num_experts, capacity=capacity)
    options = {"num_experts": EXPERTS_SHAPE.num_experts, "layout": "ragged", "capacity": room}
    kept = oracle.route(without_dropped(inputs, tokens.kept).topk_idx, **options).kept
    assert tokens.num_dropped.any()
    assert (kept != tokens.kept).any()
    group = make_group(mesh, EXPERTS_SHAPE)
    gradients = check_against_dense(group, mesh, case, kept, capacity=capacity, room=room)
    assert not gradients[1][~kept].any()


def weights_at_sources(dweights, expected: oracle.TokenRows) -> np.ndarray:
    """dweights [R, capacity, K] of the rows, at their sources [R, T, K]."""
    found = np.zeros(expected.kept.shape, np.float32)
    rank, row, k = np.nonzero(expected.topk_idx >= 0)
    r, token = expected.source[rank, row].T
    found[r, token, k] = dweights[rank, row, k]
    return found


def test_transposes_of_dispatch(make_group, mesh):
    """Cotangents are summed over ranks, or gathered, and nobody reads those of rows or k that hold nothing.

    The same for wires that dequantise on arrival: rounding on the way is differentiated straight through.
    """
    inputs = make_inputs(WIDE, mesh.size, "out_of_range")
    expected = oracle.dispatch_tokens(*inputs, num_experts=WIDE.num_experts)
    drows = random_token_rows(expected.is_token, WIDE.hidden, WIDE.dtype)
    dweights = random_array(np.random.default_rng(2), expected.weights.shape, "float32")
    dweights[expected.topk_idx < 0] = np.nan
    group = make_group(mesh, WIDE)

    def cotangents(drows, dweights, x, topk_idx, topk_weights):
        def dispatch(x, topk_weights, wire):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group, wire=wire)
            return recv.x, recv.weights

        return [jax.vjp(partial(dispatch, wire=wire), x, topk_weights)[1]((drows, dweights)) for wire in (None, "fp8")]

    plain, through_fp8 = run_spmd(cotangents, mesh, drows, dweights, *inputs)
    assert plain[0].dtype == drows.dtype
    assert_sums(plain[0], drows, expected, WIDE.dtype)
    assert_same_bits(plain[1], weights_at_sources(dweights, expected))
    assert_trees_same_bits(through_fp8, plain)


def test_transposes_of_combine_and_dispatch_like(make_group, mesh):
    """The cotangent of y is a dispatch, exactly zero in rows that hold no token. recv.weights gets none."""
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    expected = oracle.dispatch_tokens(*inputs, num_experts=SHAPE.num_experts)
    y = random_token_rows(expected.is_token, SHAPE.hidden, SHAPE.dtype)
    dout = random_array(np.random.default_rng(2), inputs.x.shape, SHAPE.dtype)
    group = make_group(mesh, SHAPE)

    def cotangents(y, dout, x, *routing):
        recv = dispatch_tokens(x, *routing, group=group)

        def combine(y, weights):
            return ep.combine(y, dataclasses.replace(recv, weights=weights))

        _, of_like = jax.vjp(lambda x: ep.dispatch_like(x[:, :3], recv), x)
        return jax.vjp(combine, y, recv.weights)[1](dout), of_like(y[:, :3])

    (dy, dweights), (dx,) = run_spmd(cotangents, mesh, y, dout, *inputs)
    rows = np.where(expected.is_token[..., None], dout[expected.source[..., 0], expected.source[..., 1]], 0)
    assert_same_bits(dy, rows)
    assert not dweights.any()
    assert_sums(dx[..., :3], y[..., :3], expected, SHAPE.dtype)
    assert not dx[..., 3:].any()


def test_transposes_of_reduce(make_group, mesh):
    """Replaced weights count; in rows that hold no token, nothing is read and cotangents are exactly zero."""
    inputs = make_inputs(SHAPE, mesh.size, "out_of_range")
    tokens = oracle.dispatch_tokens(*inputs, num_experts=SHAPE.num_experts)
    expected = oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, layout="ragged", alignment=4)
    route = expected.route
    y = random_rows(route, SHAPE.hidden, SHAPE.dtype)
    weights = random_array(np.random.default_rng(2), expected.weights.shape, "float32")
    weights[~route.is_token] = np.nan
    dout = random_token_rows(tokens.is_token, SHAPE.hidden, SHAPE.dtype)
    group = make_group(mesh, SHAPE)

    def cotangents(y, weights, dout, *inputs):
        recv = dispatch_tokens(*inputs, group=group)
        rows = ep.expand(recv, alignment=4)

        def reduce(y, weights):
            return ep.reduce(y, dataclasses.replace(rows, weights=weights))

        out, transpose = jax.vjp(reduce, y, weights)
        return ep.combine(out, recv), transpose(dout), rows.pair_of_row

    out, (dy, dweights), pair_of_row = run_spmd(cotangents, mesh, y, weights, dout, *inputs)
    assert_combined(out, y, weights, route, dtype="float32")
    rank, row = np.nonzero(route.is_token)
    token_row, k = np.divmod(pair_of_row[rank, row], SHAPE.top_k)
    np.testing.assert_array_equal(tokens.source[rank, token_row], route.source[rank, row, :2])
    np.testing.assert_array_equal(k, route.source[rank, row, 2])
    of_rows = dout[rank, token_row]
    np.testing.assert_allclose(dy[rank, row], of_rows * weights[rank, row, None], rtol=1e-6)
    np.testing.assert_allclose(dweights[rank, row], (of_rows * y[rank, row]).sum(axis=-1), rtol=1e-5, atol=1e-5)
    assert not dy[~route.is_token].any()
    assert not dweights[~route.is_token].any()


def test_gradient_of_weights_alone(make_group, mesh):
    """Tokens that the caller has quantised are constants; the router's weights learn."""
    group = make_group(mesh, WIDE)
    x, topk_idx, topk_weights = make_inputs(WIDE, mesh.size, "uneven")

    def gradients(quantised, plain, topk_idx, topk_weights):
        def loss(topk_weights, x):
            rows = ep.expand(dispatch_tokens(x, topk_idx, topk_weights, group=group))
            return jnp.sum(ep.reduce(rows.x, rows).astype(jnp.float32))

        return [jax.grad(loss)(topk_weights, x) for x in (quantised, plain)]

    quantised = oracle.quantize(x, "fp8")
    plain = oracle.dequantize(*quantised, x.dtype)
    of_quantised, of_plain = run_spmd(gradients, mesh, quantised, plain, topk_idx, topk_weights)
    assert of_plain.any()
    assert_same_bits(of_quantised, of_plain)


def test_gradient_of_expanded_weights_alone(make_group, mesh):
    """No gradient reaches rows.x."""
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    group = make_group(mesh, SHAPE)

    def gradients(x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            return jnp.sum(ep.expand(dispatch_tokens(x, topk_idx, topk_weights, group=group)).weights)

        return jax.grad(loss, (0, 1))(x, topk_weights)

    dx, dweights = run_spmd(gradients, mesh, *inputs)
    assert not dx.any()
    is_valid = (inputs.topk_idx >= 0) & (inputs.topk_idx < SHAPE.num_experts)
    np.testing.assert_array_equal(dweights, is_valid.astype(np.float32))


def test_reduce_keeps_y_only_for_weights_that_learn(make_group, mesh):
    """y is as large as the worst case of routing."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size)

    def kept(x, topk_idx, topk_weights, learns):
        def layer(x, y):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group)
            if not learns:
                recv = dataclasses.replace(recv, weights=jax.lax.stop_gradient(recv.weights))
            rows = ep.expand(recv)
            return jnp.sum(ep.reduce(rows.x * y, rows))

        _, transpose = jax.vjp(layer, x, jnp.float32(2))
        return [leaf for leaf in jax.tree.leaves(transpose) if leaf.ndim == 2 and leaf.dtype == jnp.float32]

    sizes = [len(jax.eval_shape(spmd(partial(kept, learns=learns), mesh), *inputs)) for learns in (False, True)]
    assert sizes[1] == sizes[0] + 1


def test_tokens_that_all_ranks_share(make_group, mesh):
    """Gradients of replicated tokens and weights are summed over ranks."""
    x, topk_idx, topk_weights, _, cotangent = (a[0] for a in make_case(EXPERTS_SHAPE, mesh.size))
    experts = make_case(EXPERTS_SHAPE, mesh.size)[3]
    group = make_group(mesh, EXPERTS_SHAPE)

    def gradients(x, topk_idx, topk_weights, cotangent, experts):
        def loss(x, topk_weights, experts):
            return jnp.sum(layer(x, topk_idx, topk_weights, experts, group=group) * cotangent)

        return jax.grad(loss, (0, 1, 2))(x, topk_weights, experts)

    shared = x, topk_idx, topk_weights, cotangent
    dx, dweights, dexperts = run_spmd(gradients, mesh, *shared, experts, replicated=(0, 1, 2, 3))
    everywhere = [np.broadcast_to(a, (mesh.size, *a.shape)) for a in shared]
    _, expected = dense_gradients(*everywhere[:3], experts, everywhere[3])
    assert_close((dx[0], dweights[0], dexperts), (expected[0].sum(0), expected[1].sum(0), expected[2]), 1e-5)


def test_outputs_that_all_ranks_share(make_group, mesh):
    """The gradient of an expert output that is replicated is summed over ranks."""
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    bias = random_array(np.random.default_rng(1), (SHAPE.hidden,), "float32")

    def gradient(bias, *inputs):
        def loss(bias):
            rows = ep.expand(dispatch_tokens(*inputs, group=group))
            return jnp.sum(ep.reduce(jnp.broadcast_to(bias, rows.x.shape), rows))

        return jax.grad(loss)(bias)

    found = run_spmd(gradient, mesh, bias, *inputs, replicated=(0,))
    weight = oracle.dispatch_tokens(*inputs, num_experts=SHAPE.num_experts).weights.sum()
    np.testing.assert_allclose(found, np.full(found.shape, weight), rtol=1e-4)


# --- plans, split-phase calls, transformations ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aligned", "few_slots"])
def test_plans(make_group, name):
    """Rows go where the plan says. expand has the rows, and the default capacity, of the ragged layout."""
    case = CASES[name]
    mesh = make_mesh((case.num_ranks,))
    group = make_group(mesh, case.shape, replicas=case.replicas)

    def program(x, topk_idx, topk_weights, w, cotangent):
        plan = ep.balance(topk_idx, group=group, tolerance=case.tolerance)

        def out(x, topk_weights, w):
            recv = dispatch_tokens(x, topk_idx, topk_weights, group=group, plan=plan)
            rows = ep.expand(recv, alignment=case.alignment)
            y = jax.lax.ragged_dot(rows.x, ep.replicate(w, plan), rows.group_sizes, precision="highest")
            return ep.combine(ep.reduce(y, rows), recv), (recv, rows)

        out, transpose, (recv, rows) = jax.vjp(out, x, topk_weights, w, has_aux=True)
        return recv, rows, out, transpose(cotangent)

    run = jax.jit(spmd(program, mesh), compiler_options=QUICK)
    cotangent = np.random.default_rng(1).standard_normal((case.num_ranks, TOKENS, case.shape.hidden), np.float32)
    for routing in routings_of(case):
        inputs = make_plan_case(routing, case)
        x, topk_idx, topk_weights, w = inputs
        recv, rows, out, gradients = to_numpy(run(*inputs, cotangent))
        plan, ragged = case.expected(x, topk_idx, topk_weights)
        num_slots = case.num_ranks * (case.local + case.replicas)
        expected = oracle.dispatch_tokens(x, plan.topk_slot, topk_weights, num_experts=num_slots)
        assert_tokens_dispatched(recv, expected, zero_pad=True)
        assert_expanded(rows, ragged)
        dense_out, transpose = dense_vjp(*inputs)
        for one, other in zip((out, *gradients), (dense_out, *transpose(cotangent)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=routing)


@partial(jax.jit, compiler_options=QUICK)
def dense_vjp(x, topk_idx, topk_weights, w):
    def dense(x, topk_weights, w):
        w = w.reshape(-1, *w.shape[2:])
        named = jax.nn.one_hot(topk_idx, len(w))
        return jnp.einsum("rth,ehi,rtke,rtk->rti", x, w, named, topk_weights, precision="highest")

    return jax.vjp(dense, x, topk_weights, w)


def test_without_a_plan_in_a_group_with_replicas(make_group, mesh):
    """Results have an entry per home expert."""
    group = make_group(mesh, SHAPE, replicas=2)
    inputs = make_inputs(SHAPE, mesh.size, "out_of_range")

    def dispatch(*inputs):
        recv = dispatch_tokens(*inputs, group=group)
        rows = ep.expand(recv)
        return recv, rows, ep.combine(ep.reduce(rows.x, rows), recv)

    recv, rows, out = run_spmd(dispatch, mesh, *inputs)
    assert_tokens_dispatched(recv, oracle.dispatch_tokens(*inputs, num_experts=SHAPE.num_experts))
    ragged = oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, layout="ragged")
    assert_expanded(rows, ragged)
    assert_combined(out, ragged.x, ragged.weights, ragged.route, dtype="float32")


def test_split_phase_calls_equal_whole_calls(make_group, mesh):
    """Also their gradients."""
    options = {"capacity": 9}
    group = make_group(mesh, SHAPE)
    inputs = make_inputs(SHAPE, mesh.size, "uneven")

    def whole(x, topk_idx, topk_weights):
        recv = dispatch_tokens(x, topk_idx, topk_weights, group=group, zero_pad=True, **options)
        rows = ep.expand(recv)
        return ep.combine(ep.reduce(rows.x, rows), recv), recv

    def split_phase(x, topk_idx, topk_weights):
        pending = ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout="token", zero_pad=True, **options)
        recv = ep.dispatch_done(pending)
        rows = ep.expand(recv)
        return ep.combine_done(ep.combine_start(ep.reduce(rows.x, rows), recv)), recv

    def results(form, x, topk_idx, topk_weights):
        out, transpose, recv = jax.vjp(lambda x, w: form(x, topk_idx, w), x, topk_weights, has_aux=True)
        return out, dataclasses.replace(recv, route=None), transpose(out)

    assert_trees_same_bits(
        run_spmd(partial(results, split_phase), mesh, *inputs), run_spmd(partial(results, whole), mesh, *inputs)
    )


def test_scan_checkpoint_and_other_axes(make_group):
    """Layers in a scan that are computed again in the backward pass; tokens split over two axes, experts over one."""
    mesh = make_mesh((2, 2), ("data", "ep"))
    shape = dataclasses.replace(SHAPE, tokens=4)
    group = make_group(mesh, shape)
    replicas = [make_inputs(shape, 2, "uneven", seed) for seed in range(2)]
    inputs = [np.stack(arrays) for arrays in zip(*replicas, strict=True)]

    def gradients(x, topk_idx, topk_weights, layout):
        def step(x, scale):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
            rows = ep.expand(recv) if layout == "token" else recv
            y = jnp.sin(rows.x) * scale
            return x + ep.combine(ep.reduce(y, rows) if layout == "token" else y, recv), None

        def loss(x, topk_weights):
            return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, jnp.arange(1.0, 3.0, dtype=x.dtype))[0] ** 2)

        return jax.grad(loss)(x, topk_weights)

    token, ragged = (run_spmd(partial(gradients, layout=layout), mesh, *inputs) for layout in ("token", "ragged"))
    np.testing.assert_allclose(token, ragged, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plain_backend", ["reference", "collectives"])
def test_debug_nans(mesh, monkeypatch, plain_backend):
    """Unspecified rows of x are NaN. Ids and weights have no NaN, and no operation reads an unspecified row."""
    monkeypatch.setenv("JAX_EP_DEBUG_NANS", "1")
    inputs = make_inputs(SHAPE, mesh.size, "uneven")

    def layer(*inputs):
        recv = dispatch_tokens(*inputs, group=group)
        rows = ep.expand(recv)
        return recv, rows, ep.combine(ep.reduce(rows.x, rows), recv)

    with open_group(mesh, SHAPE, backend=plain_backend) as group:
        recv, rows, out = run_spmd(layer, mesh, *inputs)
    expected = oracle.dispatch_tokens(*inputs, num_experts=SHAPE.num_experts)
    assert_tokens_dispatched(recv, expected)
    assert np.isnan(recv.x[~expected.is_token]).all()
    assert_expanded(rows, oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, layout="ragged"))
    assert np.isnan(rows.x[~in_groups(rows)]).all()
    assert np.isfinite(out).all()


def rows_of_expand(group, mesh, inputs, zero_pad, differentiated):
    def rows_of(x, topk_idx, topk_weights):
        recv = dispatch_tokens(x, topk_idx, topk_weights, group=group)
        return ep.expand(recv, alignment=4, zero_pad=zero_pad)

    def rows_beside_gradient(x, *others):
        def loss(x):
            rows = rows_of(x, *others)
            return jnp.sum(rows.x[:1].astype(jnp.float32)), rows

        return jax.grad(loss, has_aux=True)(x)[1]

    return run_spmd(rows_beside_gradient if differentiated else rows_of, mesh, *inputs)


@pytest.mark.parametrize(
    ("zero_pad", "differentiated", "is_zero"),
    [(None, False, False), (None, True, True), (True, False, True), (True, True, True), (False, True, False)],
)
def test_rows_after_the_last_group(make_group, mesh, zero_pad, differentiated, is_zero):
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    rows = rows_of_expand(make_group(mesh, SHAPE), mesh, inputs, zero_pad, differentiated)
    options = {"layout": "ragged", "capacity": rows.x.shape[1], "alignment": 4}
    assert not in_groups(rows).all()
    assert_expanded(rows, oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, **options), zero_pad=is_zero)


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("zero_pad", [None, True, False])
def test_debug_nans_after_the_last_group(mesh, monkeypatch, zero_pad, differentiated):
    """By default, the rows are zero exactly if the call is differentiated."""
    monkeypatch.setenv("JAX_EP_DEBUG_NANS", "1")
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    with open_group(mesh, SHAPE, backend="reference") as group:
        rows = rows_of_expand(group, mesh, inputs, zero_pad, differentiated)
    after = rows.x[~in_groups(rows)]
    if differentiated if zero_pad is None else zero_pad:
        assert not after.any()
    else:
        assert np.isnan(after).all()


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts"), [(1, 1, 1), (33, 3, 4), (64, 32, 300), (70, 200, 5), (20000, 4, 3)], ids=str
)
def test_pair_counts(num_rows, top_k, num_experts):
    """In blocks of one row and of many; the last case has so many blocks that a cumulative sum adds them."""
    random = np.random.default_rng(0)
    topk_idx = random.integers(-1, num_experts, (num_rows, top_k)).astype(np.int32)
    one_hot = topk_idx.reshape(-1, 1) == np.arange(num_experts)
    before = np.cumsum(np.pad(one_hot, ((1, 0), (0, 0))), axis=0)
    row = np.unique([0, 1, num_rows // 2, num_rows])

    @jax.jit
    def counted(topk_idx):
        counts = _PairCounts(topk_idx, num_experts)
        return counts.earlier, counts.before(jnp.asarray(row))

    earlier, before_row = to_numpy(counted(topk_idx))
    np.testing.assert_array_equal(before_row, before[row * top_k])
    pair = np.flatnonzero(topk_idx.reshape(-1) >= 0)
    expected = before[pair, topk_idx.reshape(-1)[pair]]
    np.testing.assert_array_equal(earlier.reshape(-1)[pair], expected)


# --- errors -----------------------------------------------------------------------------------------------------------

# What to change in a good call, the error, and what its message mentions.
EXPAND = [
    ({"recv": 3}, TypeError, ["recv", "int", "dispatch"]),
    ({"layout": "ragged"}, ValueError, ["recv", "'ragged'", "layout='token'"]),
    ({"alignment": 0}, ValueError, ["alignment", 0, 1]),
    ({"alignment": 4, "capacity": 6}, ValueError, ["capacity", 6, 4, 8]),
    ({"capacity": 0}, ValueError, ["capacity", 0]),
    ({"capacity": 1.5}, TypeError, ["capacity", 1.5]),
    ({"capacity": 2**31}, ValueError, ["capacity", 2**31, 2**31 - 1]),
    ({"weights": jnp.ones(3)}, ValueError, ["recv.weights", "capacity", "K"]),
]
REDUCE = [
    ({"rows": 3}, TypeError, ["rows", "int", "expand"]),
    ({"y": jnp.ones((3, SHAPE.hidden))}, ValueError, ["y", "capacity", "H"]),
    ({"y": None}, TypeError, ["y", "NoneType"]),
    ({"dtype": jnp.int32}, TypeError, ["y", "int32", "float32"]),
    ({"weights": jnp.ones(3)}, ValueError, ["rows.weights", "capacity"]),
]


@pytest.fixture(scope="module")
def error_group():
    with open_group(make_mesh((2,)), SHAPE, backend="reference") as group:
        yield group


def trace(function, group):
    jax.eval_shape(spmd(function, group.mesh), *make_inputs(SHAPE, group.num_ranks))


@pytest.mark.parametrize(("changes", "error", "mentions"), EXPAND, ids=str)
def test_errors_of_expand(error_group, changes, error, mentions):
    changes = dict(changes)

    def call(*inputs):
        recv = ep.dispatch(*inputs, group=error_group, layout=changes.pop("layout", "token"))
        if "weights" in changes:
            recv = dataclasses.replace(recv, weights=changes.pop("weights"))
        return ep.expand(changes.pop("recv", recv), **changes).x

    with pytest.raises(error) as raised:
        trace(call, error_group)
    assert_names(raised.value, "expand", *mentions)


@pytest.mark.parametrize(("changes", "error", "mentions"), REDUCE, ids=str)
def test_errors_of_reduce(error_group, changes, error, mentions):
    def call(*inputs):
        rows = ep.expand(dispatch_tokens(*inputs, group=error_group))
        if "weights" in changes:
            rows = dataclasses.replace(rows, weights=changes["weights"])
        y = changes.get("y", rows.x.astype(changes.get("dtype", rows.x.dtype)))
        return ep.reduce(y, changes.get("rows", rows))

    with pytest.raises(error) as raised:
        trace(call, error_group)
    assert_names(raised.value, "reduce", *mentions)


def test_errors_of_a_token_layout_elsewhere(error_group):
    def row_expert(*inputs):
        return dispatch_tokens(*inputs, group=error_group).row_expert

    with pytest.raises(ValueError, match=r"use recv\.topk_idx, or expand\(recv\)\.row_expert"):
        trace(row_expert, error_group)

    def expanded(*inputs):
        recv = dispatch_tokens(*inputs, group=error_group)
        return ep.combine(ep.expand(recv).x, recv)

    with pytest.raises(ValueError, match="combine: y has shape"):
        trace(expanded, error_group)

    def huge(*inputs):
        return dispatch_tokens(*inputs, group=error_group, capacity=2**30).x

    with pytest.raises(ValueError, match=str((2**31 - 1) // SHAPE.top_k)):
        trace(huge, error_group)


def test_expand_and_reduce_are_called_inside_shard_map(error_group):
    recv = jax.jit(spmd(partial(dispatch_tokens, group=error_group), error_group.mesh))(*make_inputs(SHAPE, 2))
    with pytest.raises(ValueError, match="expand: called outside jax.shard_map"):
        ep.expand(recv)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_a_second_derivative_is_refused(error_group, transform):
    def loss(x, topk_idx, topk_weights):
        recv = dispatch_tokens(x, topk_idx, topk_weights, group=error_group)
        rows = ep.expand(recv)
        return jnp.sum(ep.combine(ep.reduce(jnp.sin(rows.x), rows), recv))

    def second(x, *routing):
        return transform(lambda x: jnp.sum(jax.grad(loss)(x, *routing)))(x)

    with pytest.raises(TypeError, match="have first derivatives only"):
        trace(second, error_group)
