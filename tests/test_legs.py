"""fp8 on the other legs: `wire` of combine, `grad_wire` of dispatch and of combine. Rows are compared bit for bit.

Weights are powers of two, so that a sum has the same bits whether products are rounded before they are added or not.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import assert_same_bits, order_sensitive_inputs, random_rows, run_spmd
from shapes import SMALL, make_inputs, random_array

SHAPE = dataclasses.replace(SMALL, num_experts=32, top_k=8, tokens=32)
WIRES = ["fp8", "fp8_pow2"]
GRAD_WIRES = [*WIRES, "fp8_e5m2"]
HIDDEN = [256, 144]  # 144: the last scale has 16 channels


def shape_of(hidden, dtype):
    return dataclasses.replace(SHAPE, hidden=hidden, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # the weights exceed the range of float16
@pytest.mark.parametrize("hidden", HIDDEN)
def test_sums_come_back_by_wire(make_group, mesh, hidden, dtype):
    """Both sums of the exchange: combine's, and the cotangent of dispatch's x. The experts return their rows."""
    shape = shape_of(hidden, dtype)
    group = make_group(mesh, shape)
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, mesh.size)

    def sums(x, topk_idx, topk_weights):
        def rows(x, grad_wire):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, grad_wire=grad_wire, zero_pad=True)
            return recv.x, recv

        def back(wire):
            y, transpose, recv = jax.vjp(lambda x: rows(x, wire), x, has_aux=True)
            return transpose((y * recv.weights[:, None]).astype(y.dtype))[0]

        _, recv = rows(x, None)
        outs = [ep.combine(recv.x, recv, out_dtype="float32", wire=wire) for wire in WIRES]
        return outs, [back(wire) for wire in GRAD_WIRES]

    parts = oracle.rank_sums(x, topk_idx, topk_weights, shape.num_experts, np.float32)
    outs, cotangents = run_spmd(sums, mesh, x, topk_idx, topk_weights)
    for out, wire in zip(outs, WIRES, strict=True):
        assert_same_bits(out, oracle.sum_over_wire(parts, wire), wire)
    for dx, wire in zip(cotangents, GRAD_WIRES, strict=True):
        assert_same_bits(dx, oracle.sum_over_wire(parts, wire).astype(x.dtype), wire)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_cotangent_of_a_combine_travels_by_wire(make_group, mesh, layout, hidden, dtype):
    """All rows are cast, also those that stay on their rank. Rows that hold no token have no cotangent."""
    shape = shape_of(hidden, dtype)
    group = make_group(mesh, shape)
    inputs = make_inputs(shape, mesh.size, "uneven")
    inputs = inputs._replace(topk_weights=np.exp2(np.round(inputs.topk_weights * 4)).astype(np.float32))
    expected = oracle.dispatch(*inputs, num_experts=shape.num_experts, layout=layout)
    route, weights = expected.route, expected.weights
    y = random_rows(route, hidden, dtype)
    g = random_array(np.random.default_rng(2), inputs.x.shape, dtype)

    def cotangents(y, g, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)

        def of_wire(wire):
            def combine(y, weights):
                return ep.combine(y, dataclasses.replace(recv, weights=weights), grad_wire=wire)

            (dy_alone,) = jax.vjp(lambda y: combine(y, recv.weights), y)[1](g)
            return *jax.vjp(combine, y, recv.weights)[1](g), dy_alone

        return [of_wire(wire) for wire in GRAD_WIRES]

    for (dy, dweights, dy_alone), wire in zip(run_spmd(cotangents, mesh, y, g, *inputs), GRAD_WIRES, strict=True):
        arrived = route.gather(oracle.through_wire(g.astype(np.float32), wire))
        token = route.is_token[..., None]
        assert_same_bits(dy, np.where(token, weights[..., None] * arrived, 0).astype(dy.dtype), wire)
        assert_same_bits(dy_alone, dy, wire)
        terms = np.where(token, y.astype(np.float64) * arrived, 0)
        error = np.linalg.norm(dweights - terms.sum(axis=-1))
        assert error <= 1e-6 * np.linalg.norm(np.abs(terms).sum(axis=-1)), wire


def test_wire_does_not_change_gradients(make_group, mesh, layout):
    """The gradient ignores the rounding of `wire`."""
    shape = shape_of(144, "bfloat16")
    group = make_group(mesh, shape)
    inputs = make_inputs(shape, mesh.size, "uneven")

    def gradients(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, zero_pad=True)

        def of_wire(wire):
            def loss(y, weights):
                out = ep.combine(y, dataclasses.replace(recv, weights=weights), wire=wire)
                return jnp.sum(out[:, ::2].astype(jnp.float32))

            return jax.grad(loss, argnums=(0, 1))(recv.x, recv.weights)

        return of_wire(None), of_wire("fp8")

    plain, through_fp8 = run_spmd(gradients, mesh, *inputs)
    for a, b in zip(plain, through_fp8, strict=True):
        assert_same_bits(a, b)


def test_nan_stays_in_its_block(make_group, mesh):
    """A NaN of another rank's sum makes its block of 128 channels NaN; in the rank's own sum, only its channel."""
    shape = shape_of(256, "bfloat16")
    group = make_group(mesh, shape)
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, mesh.size)
    x[:, 3, 200] = np.nan

    def combine(*inputs):
        recv = ep.dispatch(*inputs, group=group)
        return ep.combine(recv.x, recv, out_dtype="float32", wire="fp8")

    parts = oracle.rank_sums(x, topk_idx, topk_weights, shape.num_experts, np.float32)
    out = run_spmd(combine, mesh, x, topk_idx, topk_weights)
    assert_same_bits(np.isnan(out), np.isnan(oracle.sum_over_wire(parts, "fp8")))
    assert np.isnan(out[:, 3, 200]).all()
    assert not np.isnan(out[:, 3, :128]).any()


@pytest.mark.parametrize("split", [False, True])
def test_split_phase_and_token_layout(make_group, mesh, split):
    """The sums of the layout "token" and of split-phase calls are cast, too."""
    shape = shape_of(144, "bfloat16")
    group = make_group(mesh, shape)
    x, topk_idx, topk_weights = order_sensitive_inputs(shape, mesh.size)
    topk_weights = np.ones_like(topk_weights)

    def combine(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="token", zero_pad=True)
        y = jnp.sum(recv.weights, axis=1, keepdims=True) * recv.x.astype(jnp.float32)
        y = y.astype(recv.x.dtype)
        if split:
            return ep.combine_done(ep.combine_start(y, recv, out_dtype="float32", wire="fp8"))
        return ep.combine(y, recv, out_dtype="float32", wire="fp8")

    # A rank's row is its total weight times x, rounded to x's dtype.
    weight = oracle.rank_sums(np.ones_like(x), topk_idx, topk_weights, shape.num_experts, np.float32)
    parts = (weight * x.astype(np.float32)).astype(x.dtype).astype(np.float32)
    assert_same_bits(run_spmd(combine, mesh, x, topk_idx, topk_weights), oracle.sum_over_wire(parts, "fp8"))


def test_all_legs_of_a_balanced_layer(make_group, mesh):
    """A hot expert has copies on other ranks. All four legs travel as fp8, and change results by rounding only."""
    shape = dataclasses.replace(SMALL, dtype="float32", hidden=144)
    group = make_group(mesh, shape, replicas=shape.num_experts // mesh.size)
    x, topk_idx, topk_weights = make_inputs(shape, mesh.size)
    topk_idx[:, :, 0] = 1

    def layer(x, topk_idx, topk_weights):
        plan = ep.balance(topk_idx, group=group)

        def through(out, back):
            def loss(x, topk_weights):
                recv = ep.dispatch(x, topk_idx, topk_weights, group=group, plan=plan, wire=out, grad_wire=back)
                y = ep.combine(jnp.tanh(recv.x), recv, wire=out, grad_wire=back)
                return jnp.sum(y**2), y

            gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, topk_weights)
            return y, *gradients

        return through(None, None), through("fp8", "fp8_e5m2")

    plain, cast = run_spmd(layer, mesh, x, topk_idx, topk_weights)
    for a, b in zip(plain, cast, strict=True):
        assert 0 < np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(a)
