"""fp8 rows: both wire formats and quantised input, bit for bit, and dequantisation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import PURE_JAX, assert_combined, assert_dispatched, assert_same_bits, random_rows, run_spmd
from jax_ep import _wires
from jax_ep._backends.cuda import CudaBackend
from shapes import SMALL, make_inputs, np_dtype

SHAPE = dataclasses.replace(SMALL, hidden=256)
WIRES = ["fp8", "fp8_pow2"]
DTYPES = ["bfloat16", "float16", "float32"]


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
    blocks[-1, 3] = np.linspace(-1, 1, 128) * 2.0**-6  # small values, whose scale makes them large
    blocks[-1, 4] = np.linspace(-1, 1, 128) * largest_finite(shape.dtype)  # its scale must stay finite
    return inputs._replace(x=blocks.reshape(inputs.x.shape).astype(np_dtype(shape.dtype)))


def largest_finite(dtype):
    """The largest finite value of a dtype as a float32."""
    return np.float32(ml_dtypes.finfo(np_dtype(dtype)).max)


def dispatch_fp8(make_group, mesh, shape, wire, *inputs, **settings):
    """Returns recv with fp8 rows, these rows after `ep.dequantize`, and recv with rows dequantized on arrival."""
    group = make_group(mesh, shape, **settings)
    options = {"group": group, "layout": "ragged", "wire": wire, "zero_pad": True}

    def dispatch(*inputs):
        recv = ep.dispatch(*inputs, **options, dequantize=False)
        return recv, ep.dequantize(recv)

    def dispatch_and_dequantize(*inputs):
        return ep.dispatch(*inputs, **options, dequantize=True)

    return *run_spmd(dispatch, mesh, *inputs), run_spmd(dispatch_and_dequantize, mesh, *inputs)


def assert_fp8_dispatched(results, pair, inputs, shape):
    """Compares the results of `dispatch_fp8` with the oracle. `pair` is x of `inputs` after quantization."""
    recv, later, on_arrival = results
    options = {"num_experts": shape.num_experts, "layout": "ragged"}
    quantised = oracle.dispatch(pair, inputs.topk_idx, inputs.topk_weights, **options)
    dequantised = oracle.dispatch(
        pair, inputs.topk_idx, inputs.topk_weights, **options, dequantize_to=np_dtype(shape.dtype)
    )
    assert_dispatched(recv, quantised, zero_pad=True)
    assert_dispatched(on_arrival, dequantised, zero_pad=True)
    assert_same_bits(later, dequantised.x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
def test_nan_or_infinity_makes_its_block_nan(make_group, mesh, wire, dtype):
    """The value spoils its block from any channel, and leaves all other blocks as they are."""
    special = itertools.product([np.nan, -np.nan, np.inf, -np.inf], [0, 77, 127])  # value, channel of the block
    cases = [[case] for case in special] + [[(np.nan, 5), (-np.inf, 6)], [(np.inf, c) for c in range(128)]]
    shape = dataclasses.replace(SHAPE, hidden=384, tokens=len(cases), dtype=dtype)
    inputs = make_inputs(shape, mesh.size)
    pair = oracle.quantize(inputs.x, wire)
    codes, scales = (part.reshape(mesh.size, shape.tokens, 3, -1) for part in pair)
    blocks = inputs.x.reshape(codes.shape)
    for token, case in enumerate(cases):
        block = token % 3
        for value, channel in case:
            blocks[:, token, block, channel] = value
        codes[:, token, block] = np.uint8(0x7F).view(codes.dtype)
        scales[:, token, block] = np.uint32(0x7FC00000).view(np.float32)
    assert_same_bits(oracle.quantize(inputs.x, wire)[0], pair[0])
    assert_same_bits(oracle.quantize(inputs.x, wire)[1], pair[1])
    values = oracle.dequantize(*pair, np_dtype(dtype)).reshape(codes.shape)[:, 0, 0]
    nan = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}[dtype]
    assert_same_bits(values, np.full(values.shape, nan, f"u{values.itemsize}").view(values.dtype))
    results = dispatch_fp8(make_group, mesh, shape, wire, *inputs)
    assert_fp8_dispatched(results, pair, inputs, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
def test_every_subnormal(make_group, mesh, wire, dtype):
    """One block holds all subnormal fp8 values of either sign, the ties between them and the ties' neighbours."""
    subnormals = np.arange(9) * 2.0**-9  # zero, all subnormals and the least normal value
    ties = (subnormals[:-1] + 2.0**-10).astype(np_dtype(dtype))
    bits = ties.view(f"u{ties.itemsize}")
    near_ties = np.concatenate([bits - 1, bits + 1]).view(ties.dtype)
    positive = np.concatenate([subnormals, ties, near_ties])
    block = np.resize(np.concatenate([[448], positive, -positive]), 128).astype(ties.dtype)  # 448 makes the scale 1
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    inputs = make_inputs(shape, mesh.size)
    inputs.x[...] = np.concatenate([block, block * 2])
    pair = oracle.quantize(inputs.x, wire)
    for sent in np.split(pair[0][0, 0].view(np.uint8), 2):
        assert set(range(8)) | set(range(0x80, 0x88)) < set(sent.tolist())
    assert_same_bits(pair[1][0, 0], np.array([1, 2], np.float32))
    results = dispatch_fp8(make_group, mesh, shape, wire, *inputs)
    assert_fp8_dispatched(results, pair, inputs, shape)


@pytest.mark.parametrize("dtype", DTYPES)
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
        recv = ep.dispatch(*inputs, group=group, layout=layout, wire=wire, dequantize=False, zero_pad=True)
        on_arrival = ep.dispatch(*inputs, group=group, layout=layout, wire=wire, zero_pad=True)
        return recv, ep.dequantize(recv), on_arrival, ep.combine(y, recv)

    recv, later, on_arrival, out = run_spmd(dispatch_both, mesh, y, *inputs)
    assert_dispatched(recv, quantised, zero_pad=True)
    assert_dispatched(on_arrival, dequantised, zero_pad=True)
    assert_same_bits(later, dequantised.x)
    assert_combined(out, y, quantised.weights, quantised.route, dtype=dtype)


@pytest.mark.parametrize(
    ("hidden", "wire", "dtype", "num_sms"),
    [
        (16, "fp8", "bfloat16", None),
        (528, "fp8_pow2", "bfloat16", 4),
        (2880, "fp8", "bfloat16", None),
        (400, "fp8", "float32", None),
    ],
)
def test_last_scale_has_the_channels_that_are_left(make_group, mesh, hidden, wire, dtype, num_sms):
    """Half of the rows have their largest values there.

    With 528 channels, the last chunk of 512 bytes has one unit. With few SMs, a warp packs the scales of two chunks.
    """
    shape = dataclasses.replace(SHAPE, hidden=hidden, dtype=dtype)
    inputs = make_inputs(shape, mesh.size)
    inputs.x[:, ::2, hidden // 128 * 128 :] *= 100
    pair = oracle.quantize(inputs.x, wire)
    assert pair[1].shape == (*inputs.x.shape[:-1], -(-hidden // 128))
    results = dispatch_fp8(make_group, mesh, shape, wire, *inputs, num_sms=num_sms)
    assert_fp8_dispatched(results, pair, inputs, shape)
    group = make_group(mesh, shape, num_sms=num_sms)
    sent = run_spmd(
        lambda *pair: ep.dispatch(pair[:2], *pair[2:], group=group, layout="ragged", dequantize=False, zero_pad=True),
        mesh,
        *pair,
        *inputs[1:],
    )
    assert_same_bits(sent.x, results[0].x)
    assert_same_bits(sent.scales, results[0].scales)


@pytest.mark.parametrize(
    ("num_sms", "routing", "fits"), [(1, "duplicates", True), (2, "uneven", False), (4, "out_of_range", True)]
)
@pytest.mark.parametrize(("wire", "dequantize"), [("fp8", False), ("fp8_pow2", True)])
def test_own_rows_that_senders_write(make_group, mesh, layout, wire, dequantize, num_sms, routing, fits):
    """With many tokens on few SMs, senders also write a token's own row, after two steps. They cast it once."""
    shape = dataclasses.replace(SHAPE, hidden=528, tokens=88)
    inputs = make_inputs(shape, mesh.size, routing)
    needed = oracle.needed_capacity(inputs.topk_idx, shape.num_experts, layout, 1)
    options = {"layout": layout, "wire": wire, "capacity": needed if fits else needed * 3 // 4}
    group = make_group(mesh, shape, num_sms=num_sms)

    def dispatch(*inputs):
        recv = ep.dispatch(*inputs, group=group, dequantize=dequantize, zero_pad=True, **options)
        return recv, ep.dispatch_like(inputs[2], recv)

    recv, like = run_spmd(dispatch, mesh, *inputs)
    dequantize_to = np_dtype(shape.dtype) if dequantize else None
    expected = oracle.dispatch(*inputs, num_experts=shape.num_experts, dequantize_to=dequantize_to, **options)
    assert expected.route.num_dropped.any() == (not fits)
    assert_dispatched(recv, expected, zero_pad=True)
    assert_same_bits(like, expected.route.gather(inputs.topk_weights))


@pytest.mark.parametrize("num_sms", [None, 4])
def test_scales_with_the_bits_of_missing_units(make_group, mesh, num_sms):
    """A unit has the four scales of a chunk. A row has two chunks."""
    shape = dataclasses.replace(SHAPE, hidden=1024)
    inputs = make_inputs(shape, mesh.size)
    pair = oracle.quantize(inputs.x, "fp8")
    words = pair[1].view(np.uint32)
    words[:, 0, 4:] = words[:, 1, :4] = words[:, 2] = 0xFDFDFDFD  # the sentinel
    words[:, 2, 3] = 0xFDFDFDFC  # with the words before, its escape
    group = make_group(mesh, shape, num_sms=num_sms)
    recv = run_spmd(
        lambda *pair: ep.dispatch(pair[:2], *pair[2:], group=group, layout="ragged", dequantize=False, zero_pad=True),
        mesh,
        *pair,
        *inputs[1:],
    )
    expected = oracle.dispatch(pair, *inputs[1:], num_experts=shape.num_experts, layout="ragged")
    assert_dispatched(recv, expected, zero_pad=True)


@pytest.mark.parametrize(("hidden", "dtype"), [(256, "bfloat16"), (400, "bfloat16"), (528, "float32")])
def test_mxfp8(make_group, mesh, hidden, dtype):
    """Blocks of 32 channels of all magnitudes, some of them zero or NaN. The last block has the remaining channels."""
    shape = dataclasses.replace(SHAPE, hidden=hidden, dtype=dtype)
    inputs = make_inputs(shape, mesh.size)
    num_scales = -(-hidden // 32)
    exponents = np.random.default_rng(5).integers(-25, 60, (*inputs.x.shape[:-1], num_scales))
    inputs.x[...] = inputs.x * np.exp2(np.repeat(exponents, 32, axis=-1)[..., :hidden], dtype=np.float32)
    inputs.x[:, 1, 32:64] = 0
    inputs.x[:, 2, 65] = np.nan
    inputs.x[:, 3, -1] = -np.inf
    pair = oracle.quantize(inputs.x, "mxfp8")
    assert pair[1].shape == (*inputs.x.shape[:-1], num_scales)
    assert np.isnan(pair[1]).sum() == 2 * mesh.size
    assert_fp8_dispatched(dispatch_fp8(make_group, mesh, shape, "mxfp8", *inputs), pair, inputs, shape)


@pytest.mark.parametrize("wire", WIRES)
def test_wire_with_too_little_room(make_group, mesh, layout, wire):
    inputs = wide_range_inputs(SHAPE, mesh.size)
    group = make_group(mesh, SHAPE)
    alignment = 8
    capacity = oracle.needed_capacity(inputs.topk_idx, SHAPE.num_experts, layout, alignment) - alignment
    options = {"layout": layout, "wire": wire, "alignment": alignment, "capacity": max(capacity, alignment)}
    recv = run_spmd(lambda *inputs: ep.dispatch(*inputs, group=group, dequantize=False, **options), mesh, *inputs)
    assert_dispatched(recv, oracle.dispatch(*inputs, num_experts=SHAPE.num_experts, **options))


@pytest.mark.parametrize("op", ["dispatch", "all_to_all"])
def test_kernels_refuse_to_cast_other_dtypes(make_group, mesh, op, monkeypatch):
    shape = dataclasses.replace(SHAPE, dtype="float32")
    inputs = make_inputs(shape, mesh.size)
    group = make_group(mesh, shape)
    if group.backend in PURE_JAX:
        pytest.skip("it has no kernels")
    monkeypatch.setattr(CudaBackend, "_kernels_cast", lambda backend, wire: True)

    def rows(x, topk_idx, topk_weights):
        if op == "all_to_all":
            return ep.all_to_all(x, jnp.zeros(shape.num_experts, jnp.int32), group=group, wire="fp8").x
        return ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged", wire="fp8").x

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{op}: x is float32 .*; it must be bfloat16"):
        run_spmd(rows, mesh, *inputs)


def test_quantised_input(make_group, mesh, layout):
    """x quantised by the caller travels as it is, with its scales. By default it arrives in the group's dtype."""
    x, topk_idx, topk_weights = make_inputs(SHAPE, mesh.size, "uneven")
    inputs = (oracle.quantize(x, "fp8"), topk_idx, topk_weights)
    group = make_group(mesh, SHAPE)
    options = {"num_experts": SHAPE.num_experts, "layout": layout}

    def dispatch_both(*inputs):
        recv = ep.dispatch(*inputs, group=group, layout=layout, dequantize=False)
        on_arrival = ep.dispatch(*inputs, group=group, layout=layout)
        return recv, ep.dequantize(recv), on_arrival

    recv, later, on_arrival = run_spmd(dispatch_both, mesh, *inputs)
    quantised = oracle.dispatch(*inputs, **options)
    dequantised = oracle.dispatch(*inputs, **options, dequantize_to=np_dtype(SHAPE.dtype))
    assert_dispatched(recv, quantised)
    assert_dispatched(on_arrival, dequantised)
    is_token = quantised.route.is_token
    assert_same_bits(later[is_token], dequantised.x[is_token])


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_input_of_all_bytes(make_group, mesh, dtype):
    """The rows hold every fp8 byte, also NaNs of both signs, and scales of all kinds."""
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    inputs = make_inputs(shape, mesh.size)
    rng = np.random.default_rng(4)
    codes = rng.permuted(np.broadcast_to(np.arange(256, dtype=np.uint8), inputs.x.shape), axis=-1)
    special = [1, 0.75, 2.0**-9, 448, largest_finite(dtype), -1, 0, np.inf, -np.inf, np.nan, -np.nan]
    scales = np.resize(np.array(special, np.float32), (*inputs.x.shape[:-1], 2))
    pair = (codes.view(ml_dtypes.float8_e4m3fn), scales)
    results = dispatch_fp8(make_group, mesh, shape, None, pair, *inputs[1:])
    assert_fp8_dispatched(results, pair, inputs, shape)


@pytest.mark.parametrize("ulps", [-3, 0, 3])
def test_factor_is_correctly_rounded(ulps):
    """448 / amax for every mantissa of amax, also if the platform's division is off by a few ulp."""
    amax = (np.arange(2**23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    estimate = np.float32(1.75) / amax
    estimate = (estimate.view(np.uint32) + np.uint32(ulps % 2**32)).view(np.float32)
    for power in np.float32([2.0**-13, 1, 2.0**127]):
        assert_same_bits(jax.jit(_wires._corrected_quotient)(amax * power, estimate), np.float32(448) / (amax * power))


def test_oracle_quantised_rows_stay_close():
    """The oracle's own formula is sound: fp8 keeps x to within half a step of its three mantissa bits."""
    x = make_inputs(SHAPE, num_ranks=1).x
    for wire in [*WIRES, "mxfp8"]:
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
