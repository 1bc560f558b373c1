"""Gradients, against a dense MoE that JAX differentiates and against the oracle's transposes."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jax_ep as ep
import oracle
from helpers import COMBINE_BOUND, assert_same_bits, make_mesh, random_rows, run_spmd, spmd, to_numpy
from shapes import SHAPES, SMALL, make_inputs, np_dtype, random_array

SHAPE = dataclasses.replace(SMALL, hidden=32, dtype="float32")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def moe(x, topk_idx, topk_weights, experts, *, group, **options):
    """One MoE layer on one device; experts [E_local, H, H]."""
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **options)
    if options["layout"] == "ragged":
        y = jax.lax.ragged_dot(recv.x, experts, recv.group_sizes, precision="highest")
    else:
        y = jnp.einsum("ech,ehf->ecf", recv.x, experts, precision="highest")
    return ep.combine(jnp.tanh(y), recv)


def make_case(shape, num_ranks, routing="uneven"):
    """x, topk_idx, topk_weights, experts [R, E_local, H, H], and the cotangent of the output."""
    rng = np.random.default_rng(4)
    experts = random_array(rng, (num_ranks, shape.num_experts // num_ranks, shape.hidden, shape.hidden), "float32")
    cotangent = random_array(rng, (num_ranks, shape.tokens, shape.hidden), "float32")
    inputs = make_inputs(shape, num_ranks, routing)
    return *inputs, (experts / np.sqrt(shape.hidden)).astype(np_dtype(shape.dtype)), cotangent


def dense_gradients(x, topk_idx, topk_weights, experts, cotangent, kept=True):
    """Value, and gradients in x, topk_weights and experts; choices that are not `kept` count as no expert's."""

    def loss(x, topk_weights, experts):
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, topk_idx, jnp.where(kept, topk_weights, 0)))
        out = oracle.dense_moe(*flat, experts.reshape(-1, *experts.shape[2:]))
        return jnp.sum(out * cotangent.reshape(out.shape))

    float32 = [np.asarray(a, np.float32) for a in (x, topk_weights, experts)]
    return to_numpy(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*float32))


def assert_close(actual, expected, tolerance):
    for name, a, b in zip(("x", "topk_weights", "experts"), actual, expected, strict=True):
        error = np.linalg.norm(a.astype(np.float32) - b)
        assert error <= tolerance * np.linalg.norm(b), f"gradient in {name}"


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_a_second_derivative_is_refused(make_group, mesh, layout, transform):
    group = make_group(mesh, SHAPE)

    def loss(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
        return jnp.sum(ep.combine(jnp.sin(recv.x), recv))

    def second(x, *routing):
        return transform(lambda x: jnp.sum(jax.grad(loss)(x, *routing)))(x)

    with pytest.raises(TypeError, match="have first derivatives only"):
        jax.eval_shape(spmd(second, mesh), *make_inputs(SHAPE, mesh.size))


def check_against_dense(group, mesh, shape, case, *, check_vma=True, kept=True, **options):
    x, topk_idx, topk_weights, experts, cotangent = case
    layer = spmd(lambda *args: moe(*args, group=group, **options), mesh, check_vma=check_vma)

    def loss(x, topk_weights, experts):
        return jnp.sum(layer(x, topk_idx, topk_weights, experts).astype(jnp.float32) * cotangent)

    value, gradients = to_numpy(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, topk_weights, experts))
    dense_value, dense = dense_gradients(*case, kept)
    np.testing.assert_allclose(value, dense_value, rtol=TOLERANCE[shape.dtype], atol=TOLERANCE[shape.dtype])
    assert_close(gradients, dense, TOLERANCE[shape.dtype])
    return gradients


def test_moe_at_every_ep_size(make_group, any_mesh, layout):
    check_against_dense(make_group(any_mesh, SHAPE), any_mesh, SHAPE, make_case(SHAPE, any_mesh.size), layout=layout)


@pytest.mark.parametrize("check_vma", [True, False])
def test_moe_in_bfloat16(make_group, mesh, layout, check_vma):
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    group = make_group(mesh, shape)
    check_against_dense(group, mesh, shape, make_case(shape, mesh.size), layout=layout, check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_names", [("data", "ep"), ("ep", "data")], ids="-".join)
def test_moe_whose_experts_are_replicated_over_the_data_axis(make_group, layout, axis_names, check_vma):
    """The usual training step: tokens split over both axes, one gradient for all replicas of an expert."""
    mesh = make_mesh((2, 2), axis_names)
    group = make_group(mesh, SHAPE)
    x, topk_idx, topk_weights, _, cotangent = (a.reshape(-1, a.shape[-1]) for a in make_case(SHAPE, 4))
    experts = np.concatenate(make_case(SHAPE, 2)[3])
    by_token, by_expert = PartitionSpec(axis_names), PartitionSpec("ep")
    layer = jax.shard_map(
        lambda *args: moe(*args, group=group, layout=layout),
        mesh=mesh,
        in_specs=(by_token, by_token, by_token, by_expert),
        out_specs=by_token,
        check_vma=check_vma,
    )

    def loss(x, topk_weights, experts):
        return jnp.sum(layer(x, topk_idx, topk_weights, experts) * cotangent)

    gradients = to_numpy(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, topk_weights, experts))
    _, dense = dense_gradients(x, topk_idx, topk_weights, experts[None], cotangent)
    assert_close(gradients, (*dense[:2], dense[2][0]), TOLERANCE["float32"])


@pytest.mark.parametrize("routing", ["duplicates", "hot_expert", "out_of_range", "nothing"])
def test_dropped_choices_have_no_gradient(make_group, mesh, layout, routing):
    capacity, alignment = {"expert": (8, 1), "ragged": (32, 8)}[layout]
    case = make_case(SHAPE, mesh.size, routing)
    options = {"layout": layout, "capacity": capacity, "alignment": alignment}
    kept = oracle.route(case[1], num_experts=SHAPE.num_experts, **options).kept
    _, dweights, _ = check_against_dense(make_group(mesh, SHAPE), mesh, SHAPE, case, kept=kept, **options)
    assert not dweights[~kept].any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_x_replicated_over_the_ep_axis(make_group, mesh, layout, check_vma):
    """Every rank routes the same x its own way: the gradient is the sum over the ranks."""
    x, topk_idx, topk_weights, experts, cotangent = make_case(SHAPE, mesh.size)
    x[1:] = x[0]
    group = make_group(mesh, SHAPE)
    layer = spmd(lambda *args: moe(*args, group=group, layout=layout), mesh, check_vma=check_vma, replicated=(0,))

    def loss(x, topk_weights, experts):
        return jnp.sum(layer(x, topk_idx, topk_weights, experts) * cotangent)

    gradients = to_numpy(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x[0], topk_weights, experts))
    _, (dx, *others) = dense_gradients(x, topk_idx, topk_weights, experts, cotangent)
    assert_close(gradients, (dx.sum(axis=0), *others), TOLERANCE["float32"])


def test_all_inputs_replicated_over_the_ep_axis(make_group, mesh, layout):
    """The same tokens on every rank, gradients taken inside the shard_map: still the sum over the ranks."""
    x, topk_idx, topk_weights, experts, cotangent = make_case(SHAPE, mesh.size)
    group = make_group(mesh, SHAPE)

    def gradients(x, topk_idx, topk_weights, cotangent, experts):
        def loss(x, topk_weights, experts):
            return jnp.sum(moe(x, topk_idx, topk_weights, experts, group=group, layout=layout) * cotangent)

        return jax.grad(loss, argnums=(0, 1, 2))(x, topk_weights, experts)

    shared = x[-1], topk_idx[-1], topk_weights[-1], cotangent[-1]
    dx, dweights, dexperts = run_spmd(gradients, mesh, *shared, experts, replicated=(0, 1, 2, 3))
    everywhere = [np.broadcast_to(a, (mesh.size, *a.shape)) for a in shared]
    _, expected = dense_gradients(*everywhere[:3], experts, everywhere[3])
    assert_close((dx[0], dweights[0], dexperts), (expected[0].sum(axis=0), expected[1].sum(axis=0), expected[2]), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_transposes_of_dispatch(make_group, mesh, layout, dtype):
    """The cotangent of x is the unweighted combine of the rows', topk_weights' is gathered; padding is never read.

    The same for every wire that dequantises on arrival: rounding on the way is differentiated straight through.
    """
    shape = dataclasses.replace(SMALL, dtype=dtype)
    inputs = make_inputs(shape, mesh.size, "uneven")
    route = oracle.route(inputs.topk_idx, num_experts=shape.num_experts, layout=layout)
    drows = random_rows(route, shape.hidden, dtype)
    dweights = random_array(np.random.default_rng(2), route.is_token.shape, "float32")
    dweights[~route.is_token] = np.nan
    group = make_group(mesh, shape)

    def cotangents(drows, dweights, x, topk_idx, topk_weights):
        def dispatch(x, topk_weights, **wire):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, **wire)
            return recv.x, recv.weights

        plain = jax.vjp(dispatch, x, topk_weights)[1]((drows, dweights))
        through_fp8 = jax.vjp(partial(dispatch, wire="fp8"), x, topk_weights)[1]((drows, dweights))
        return plain, through_fp8

    plain, through_fp8 = run_spmd(cotangents, mesh, drows, dweights, *inputs)
    total, magnitude = oracle.combine(drows, None, route)
    assert plain[0].dtype == drows.dtype
    assert np.linalg.norm(plain[0] - total) <= COMBINE_BOUND[dtype] * np.linalg.norm(magnitude)
    expected = np.zeros_like(inputs.topk_weights)
    expected[tuple(route.source[route.is_token].T)] = dweights[route.is_token]
    assert_same_bits(plain[1], expected)
    for a, b in zip(plain, through_fp8, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_transposes_of_combine(make_group, mesh, layout, dtype):
    """The cotangents of y and recv.weights, exactly zero in padding although y is NaN there."""
    shape = dataclasses.replace(SMALL, dtype=dtype)
    inputs = make_inputs(shape, mesh.size, "hot_expert")
    options = {"layout": layout, "capacity": {"expert": 8, "ragged": 24}[layout]}
    expected = oracle.dispatch(*inputs, num_experts=shape.num_experts, **options)
    route = expected.route
    y = random_rows(route, shape.hidden, dtype)
    dout = random_array(np.random.default_rng(2), inputs.x.shape, dtype)
    group = make_group(mesh, shape)

    def cotangents(y, dout, *inputs):
        recv = ep.dispatch(*inputs, group=group, **options)

        def combine(y, weights):
            return ep.combine(y, dataclasses.replace(recv, weights=weights))

        return jax.vjp(combine, y, recv.weights)[1](dout)

    dy, dweights = run_spmd(cotangents, mesh, y, dout, *inputs)
    assert dy.dtype == y.dtype
    assert dweights.dtype == np.float32
    padding = ~route.is_token
    assert not dy[padding].any()
    assert not dweights[padding].any()
    rows = route.gather(dout.astype(np.float64))
    expected_dy = expected.weights[..., None] * rows
    assert np.linalg.norm(dy - expected_dy) <= COMBINE_BOUND[dtype] * np.linalg.norm(expected_dy)
    terms = np.where(padding[..., None], 0, y.astype(np.float64)) * rows
    error = np.linalg.norm(dweights - terms.sum(axis=-1))
    assert error <= COMBINE_BOUND[dtype] * np.linalg.norm(np.abs(terms).sum(axis=-1))


@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 64), ("bfloat16", 128)])
def test_transpose_of_dispatch_like(make_group, mesh, layout, dtype, hidden):
    inputs = make_inputs(SMALL, mesh.size, "uneven")
    other = make_inputs(dataclasses.replace(SMALL, hidden=hidden, dtype=dtype), mesh.size, seed=1).x
    route = oracle.route(inputs.topk_idx, num_experts=SMALL.num_experts, layout=layout)
    drows = random_rows(route, hidden, dtype)
    group = make_group(mesh, SMALL)

    def cotangent(other, drows, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        return jax.vjp(lambda other: ep.dispatch_like(other, recv), other)[1](drows)[0]

    dother = run_spmd(cotangent, mesh, other, drows, *inputs)
    assert dother.dtype == other.dtype
    total, magnitude = oracle.combine(drows, None, route)
    assert np.linalg.norm(dother - total) <= COMBINE_BOUND[dtype] * np.linalg.norm(magnitude)


@pytest.mark.parametrize("wire", ["fp8", "mxfp8", None])
def test_fp8_rows_are_not_differentiable(make_group, mesh, layout, wire):
    """Neither those that a wire makes nor those that the caller has made: not even in topk_weights alone."""
    group = make_group(mesh, SMALL)
    x, topk_idx, topk_weights = make_inputs(SMALL, mesh.size)
    if wire is None:
        x = oracle.quantize(x, "fp8")

    def gradient(x, topk_idx, topk_weights):
        def loss(topk_weights):
            options = {"layout": layout, "wire": wire, "dequantize": False}
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **options)
            return jnp.sum(ep.dequantize(recv) * recv.weights[..., None])

        return jax.grad(loss)(topk_weights)

    with pytest.raises(TypeError, match="dequantize=True"):
        jax.eval_shape(spmd(gradient, mesh), x, topk_idx, topk_weights)


def test_quantised_tokens_are_constants_to_the_weights(make_group, mesh, layout):
    """Rows that the caller has quantised, dequantised on arrival: the router's weights learn, the rows cannot."""
    group = make_group(mesh, SMALL)
    x, topk_idx, topk_weights = make_inputs(SMALL, mesh.size, "uneven")

    def loss(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
        return jnp.sum(ep.combine(recv.x, recv, out_dtype=jnp.float32))

    quantised = oracle.quantize(x, "fp8")
    plain = oracle.dequantize(*quantised, x.dtype)
    of_quantised, of_plain = (
        run_spmd(jax.grad(loss, argnums=2), mesh, given, topk_idx, topk_weights) for given in (quantised, plain)
    )
    assert_same_bits(of_quantised, of_plain)
    with pytest.raises(TypeError, match="stop_gradient"):
        jax.eval_shape(spmd(jax.grad(loss, allow_int=True), mesh), quantised, topk_idx, topk_weights)


@pytest.mark.parametrize("wire", ["fp8", "fp8_pow2"])
@pytest.mark.parametrize("op", [ep.dispatch, ep.all_to_all])
def test_fp8_rows_are_not_differentiable_in_x(make_group, mesh, op, wire):
    options = {"group": make_group(mesh, SMALL), "wire": wire, "dequantize": False}

    def gradient(x, topk_idx, topk_weights):
        def loss(x):
            if op is ep.dispatch:
                recv = ep.dispatch(x, topk_idx, topk_weights, **options)
            else:
                recv = ep.all_to_all(x, jnp.zeros(SMALL.num_experts, jnp.int32), **options)
            return jnp.sum(ep.dequantize(recv))

        return jax.grad(loss)(x)

    with pytest.raises(TypeError, match="dequantize=True"):
        jax.eval_shape(spmd(gradient, mesh), *make_inputs(SMALL, mesh.size))


def wide_moe(x, topk_idx, topk_weights, gates, *, group, **options):
    """A layer whose experts cost little however wide: expert e computes tanh(x * gates[e]); gates [E_local, H]."""
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **options)
    if options["layout"] == "ragged":
        gates = jnp.repeat(gates, recv.group_sizes, axis=0, total_repeat_length=len(recv.x))
    else:
        gates = gates[:, None]
    y = jnp.tanh(recv.x.astype(jnp.float32) * gates)
    return ep.combine(y.astype(x.dtype), recv, out_dtype=jnp.float32)


def dense_wide_moe(x, topk_idx, topk_weights, gates):
    """The same in float32, without moving a token; gates [E, H], all others [..., T, *]."""
    is_expert = (topk_idx >= 0) & (topk_idx < len(gates))
    y = jnp.tanh(x[..., None, :] * gates[jnp.where(is_expert, topk_idx, 0)])
    return jnp.einsum("...tk,...tkh->...th", jnp.where(is_expert, topk_weights, 0), y, precision="highest")


def gradients_of(layer, cotangent):
    """x, topk_idx, topk_weights, gates -> the gradients of sum(output * cotangent) in all of them but the ids."""

    def loss(x, topk_weights, gates, topk_idx):
        return jnp.sum(layer(x, topk_idx, topk_weights, gates) * cotangent)

    def gradients(x, topk_idx, topk_weights, gates):
        return jax.grad(loss, argnums=(0, 1, 2))(x, topk_weights, gates, topk_idx)

    return gradients


def random_gates(shape, *lead):
    return random_array(np.random.default_rng(3), (*lead, shape.num_experts, shape.hidden), "float32")


def assert_within_bounds(actual, expected, dtype, num_layers=1):
    """Each gradient is within combine's bound, once for each layer, relative to the gradient itself.

    The contract's bound is relative to the sizes of a sum's terms, and so is wider. Among many tokens, a row that is
    lost stays below either: so the gradient of each token (or expert) is also within eight times the bound, relative to
    the root mean square of all of them.
    """
    for name, a, b in zip(("x", "topk_weights", "gates"), actual, expected, strict=True):
        errors, sizes = (np.linalg.norm(array, axis=-1) for array in (a.astype(np.float64) - b, b.astype(np.float64)))
        bound = num_layers * COMBINE_BOUND[dtype]
        assert np.linalg.norm(errors) <= bound * np.linalg.norm(sizes), f"gradient in {name}"
        assert errors.max() <= 8 * bound * np.sqrt(np.mean(sizes**2)), f"gradient in {name}, of one token or expert"


def by_turns(cases):
    """Adds one layout to each case, in turn: each case compiles for seconds, and other tests try all combinations."""
    return [(*case, layout) for case, layout in zip(cases, itertools.cycle(("ragged", "expert")), strict=False)]


SHAPES_AND_WIRES = [(s, wire) for s in SHAPES for wire in (None, "fp8") if wire is None or s.hidden % 16 == 0]


@pytest.mark.parametrize(("shape", "wire", "layout"), by_turns(SHAPES_AND_WIRES), ids=str)
def test_every_named_shape(make_group, largest_mesh, layout, shape, wire):
    """Within the bounds of combine; rounding to fp8 on the way is differentiated straight through."""
    x, topk_idx, topk_weights = make_inputs(shape, largest_mesh.size, "uneven")
    gates = random_gates(shape)
    cotangent = random_array(np.random.default_rng(4), x.shape, shape.dtype).astype(np.float32)
    options = {"layout": layout, "wire": wire}
    group = make_group(largest_mesh, shape)
    layer = spmd(lambda *args: wide_moe(*args, group=group, **options), largest_mesh)

    def sharded_layer(x, topk_idx, topk_weights, gates):
        return layer(x, topk_idx, topk_weights, gates.reshape(largest_mesh.size, -1, shape.hidden))

    arrived = x if wire is None else oracle.dequantize(*oracle.quantize(x, wire), x.dtype)
    actual, expected = (
        to_numpy(jax.jit(gradients_of(moe, cotangent))(x, topk_idx, topk_weights, gates))
        for moe, x in ((sharded_layer, x), (dense_wide_moe, arrived.astype(np.float32)))
    )
    assert_within_bounds(actual, expected, shape.dtype)


@pytest.mark.parametrize(("shape", "layout"), by_turns((shape,) for shape in SHAPES), ids=str)
def test_training_step_at_every_named_shape(make_group, largest_mesh, layout, shape):
    """All that a real step does at once, with rows dropped on the way.

    Tokens split over two axes and experts over one, a scan over layers that are computed again in the backward pass,
    and gradients summed over parts of the batch.
    """
    num_parts, num_layers, num_ranks = 2, 2, max(1, largest_mesh.size // 2)
    mesh = make_mesh((2, num_ranks), ("data", "ep"))
    parts = [make_inputs(shape, mesh.size, "uniform", seed=seed) for seed in range(num_parts)]
    x, topk_idx, topk_weights = (np.stack(arrays) for arrays in zip(*parts, strict=True))
    gates = random_gates(shape, num_layers)
    cotangent = random_array(np.random.default_rng(4), x.shape, shape.dtype).astype(np.float32)

    groups_idx = topk_idx.reshape(-1, num_ranks, *topk_idx.shape[2:])
    needed = max(oracle.needed_capacity(idx, shape.num_experts, layout) for idx in groups_idx)
    options = {"layout": layout, "capacity": max(1, needed * 3 // 4)}
    routes = [oracle.route(idx, num_experts=shape.num_experts, **options) for idx in groups_idx]
    kept = np.stack([route.kept for route in routes]).reshape(topk_idx.shape)
    group = make_group(mesh, shape)

    def layers(moe):
        def run(x, topk_idx, topk_weights, gates):
            def layer(x, gates):
                return x + moe(x, topk_idx, topk_weights, gates).astype(x.dtype), None

            return jax.lax.scan(jax.checkpoint(layer), x, gates)[0].astype(jnp.float32)

        return run

    by_token = PartitionSpec(("data", "ep"))
    mapped = jax.shard_map(
        layers(lambda *args: wide_moe(*args, group=group, **options)),
        mesh=mesh,
        in_specs=(by_token, by_token, by_token, PartitionSpec(None, "ep")),
        out_specs=by_token,
    )

    @jax.jit
    def step(x, topk_idx, topk_weights, gates):
        def add(total, part):
            *inputs, cotangent = (a.reshape(-1, a.shape[-1]) for a in part)
            dx, dweights, dgates = gradients_of(mapped, cotangent)(*inputs, gates)
            return total + dgates, (dx.reshape(part[0].shape), dweights.reshape(part[2].shape))

        dgates, (dx, dweights) = jax.lax.scan(add, jnp.zeros_like(gates), (x, topk_idx, topk_weights, cotangent))
        return dx, dweights, dgates

    actual = to_numpy(step(x, topk_idx, topk_weights, gates))
    dense = jax.jit(gradients_of(layers(dense_wide_moe), cotangent))
    expected = to_numpy(dense(x.astype(np.float32), np.where(kept, topk_idx, -1), topk_weights, gates))
    assert_within_bounds(actual, expected, shape.dtype, num_layers)
    assert not actual[1][~kept].any()


def test_finite_differences(make_group, mesh, layout):
    """The directional derivative of each input, without another implementation's help."""
    shape = dataclasses.replace(SHAPE, hidden=8, tokens=4)
    x, topk_idx, topk_weights, experts, cotangent = make_case(shape, mesh.size, "duplicates")
    group = make_group(mesh, shape)
    layer = spmd(lambda *args: moe(*args, group=group, layout=layout, capacity=16), mesh)

    @jax.jit
    @jax.value_and_grad
    def loss(inputs):
        return jnp.sum(layer(inputs["x"], topk_idx, inputs["topk_weights"], inputs["experts"]) * cotangent)

    inputs = {"x": x, "topk_weights": topk_weights, "experts": experts}
    _, gradients = to_numpy(loss(inputs))
    rng = np.random.default_rng(5)
    for name, value in inputs.items():
        direction = random_array(rng, value.shape, "float32")
        direction *= 1e-2 / np.linalg.norm(direction)
        there, back = (to_numpy(loss(inputs | {name: value + d}))[0] for d in (direction, -direction))
        typical = np.linalg.norm(gradients[name]) * np.linalg.norm(direction) / np.sqrt(direction.size)
        assert abs((there - back) / 2 - np.vdot(gradients[name], direction)) <= 1e-2 * typical, name
