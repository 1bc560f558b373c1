"""fp8 rows: both wire formats and quantised input, bit for bit, and dequantisation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import assert_combined, assert_dispatched, assert_same_bits, random_rows, run_spmd
from shapes import SMALL, make_inputs, np_dtype

SHAPE = dataclasses.replace(SMALL, hidden=256)
WIRES = ["fp8", "fp8_pow2"]


def wide_range_inputs(shape, num_ranks):
    """Inputs whose blocks of channels have largest values of all magnitudes, and some special ones."""
    inputs = make_inputs(shape, num_ranks, "uneven")
    rng = np.random.default_rng(3)
    largest = 10 if shape.dtype == "float16" else 30
    exponents = rng.uniform(-largest, largest, (*inputs.x.shape[:-1], inputs.x.shape[-1] // 128, 1))
    blocks = inputs.x.astype(np.float32).reshape(*exponents.shape[:-1], 128) * np.exp2(exponents).astype(np.float32)
    blocks[-1, 0] = 0  # below the least amax
    blocks[-1, 1] = np.where(np.arange(128) % 2, -448, 1)  # a largest value whose scale is near a power of two
    blocks[-1, 2] = np.linspace(-1, 1, 128) * 1e-5  # not zero, but below the least amax
    blocks[-1, 3] = np.linspace(-1, 1, 128) * 2.0**-6  # reaches the subnormal values of fp8 and ties between them
    return inputs._replace(x=blocks.reshape(inputs.x.shape).astype(np_dtype(shape.dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wire", WIRES)
def test_wire_and_both_ways_to_dequantize(make_group, mesh, layout, wire, dtype):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    inputs = wide_range_inputs(shape, mesh.size)
    group = make_group(mesh, shape)
    options = {"num_experts": shape.num_experts, "layout": layout, "wire": wire}
    quantised = oracle.dispatch(*inputs, **options)
    dequantised = oracle.dispatch(*inputs, **options, dequantize_to=np_dtype(dtype))
    y = random_rows(quantised.route, shape.hidden, dtype)

    def dispatch_both(y, *inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, wire=wire, zero_pad=True)
        on_arrival = ep.dispatch(*inputs, group=group, layout=layout, wire=wire, dequantize=True, zero_pad=True)
        return recv, ep.dequantize(recv), on_arrival, ep.combine(y, recv)

    recv, later, on_arrival, out = run_spmd(dispatch_both, mesh, y, *inputs)
    assert_dispatched(recv, quantised, zero_pad=True)
    assert_dispatched(on_arrival, dequantised, zero_pad=True)
    assert_same_bits(later, dequantised.x)
    assert_combined(out, y, quantised.weights, quantised.route, dtype=dtype)


@pytest.mark.parametrize("wire", WIRES)
def test_wire_with_too_little_room(make_group, mesh, layout, wire):
    inputs = wide_range_inputs(SHAPE, mesh.size)
    group = make_group(mesh, SHAPE)
    alignment = 8
    capacity = oracle.needed_capacity(inputs.topk_idx, SHAPE.num_experts, layout, alignment) - alignment
    options = {"layout": layout, "wire": wire, "alignment": alignment, "capacity": max(capacity, alignment)}
    recv = run_spmd(lambda *inputs: ep.dispatch(*inputs, group=group, **options), mesh, *inputs)
    assert_dispatched(recv, oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, **options))


def test_quantised_input(make_group, mesh, layout):
    """x quantised by the caller travels as it is, with its scales."""
    x, topk_idx, topk_weights = make_inputs(SHAPE, mesh.size, "uneven")
    inputs = (oracle.quantize(x, "fp8"), topk_idx, topk_weights)
    group = make_group(mesh, SHAPE)
    options = {"num_experts": SHAPE.num_experts, "layout": layout}

    def dispatch_both(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout)
        on_arrival = ep.dispatch(*inputs, group=group, layout=layout, dequantize=True)
        return recv, ep.dequantize(recv), on_arrival

    recv, later, on_arrival = run_spmd(dispatch_both, mesh, *inputs)
    quantised = oracle.dispatch(*inputs, **options)
    dequantised = oracle.dispatch(*inputs, **options, dequantize_to=np_dtype(SHAPE.dtype))
    assert_dispatched(recv, quantised)
    assert_dispatched(on_arrival, dequantised)
    is_token = quantised.route.is_token
    assert_same_bits(later[is_token], dequantised.x[is_token])


def test_quantised_rows_stay_close():
    """The oracle's own formula is sound: fp8 keeps x to within half a step of its three mantissa bits."""
    x = make_inputs(SHAPE, num_ranks=1).x
    for wire in WIRES:
        values = oracle.dequantize(*oracle.quantize(x, wire), np.float32)
        assert np.linalg.norm(values - x.astype(np.float32)) < 0.04 * np.linalg.norm(x.astype(np.float32))


@pytest.mark.parametrize("wire", WIRES)
def test_rounding_is_not_skipped_between_float32_computations(make_group, mesh, layout, wire):
    """Neither that of x on its way to the cast, nor that of the rows on their way to the experts."""
    group = make_group(mesh, SHAPE)
    x, topk_idx, topk_weights = make_inputs(SHAPE, mesh.size)
    wide = x.astype(np.float32) * np.float32(1.001)  # has bits that bfloat16 has not

    def between(wide, topk_idx, topk_weights):
        def dispatch(x):
            options = {"layout": layout, "wire": wire, "dequantize": True, "zero_pad": True}
            return ep.dispatch(x, topk_idx, topk_weights, group=group, **options).x

        def spread(rows):
            return jnp.max(rows.astype(jnp.float32) * 3, axis=-1)

        x = wide.astype(group.dtype)
        rows = dispatch(jax.lax.optimization_barrier(x))
        return spread(dispatch(x)), spread(jax.lax.optimization_barrier(rows))

    assert_same_bits(*run_spmd(between, mesh, wide, topk_idx, topk_weights))
