"""scales_format: the forms of the scales of fp8 rows, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import assert_same_bits, run_spmd, spmd
from jax_ep import _scales
from shapes import SMALL, make_inputs

SHAPE = dataclasses.replace(SMALL, hidden=5 * 128, tokens=5)  # five scales: one full word of exponents, and one partial
FORMATS = ["float32", "float32_columns", "ue8m0", "ue8m0_columns"]


def columns(rows):
    """Each column's entries one after another, up to a multiple of 16 bytes."""
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-2] % 4)]
    return np.pad(np.swapaxes(rows, -1, -2), padding)


def arranged(scales, scales_format):
    if scales_format == "float32":
        return scales
    if scales_format == "float32_columns":
        return columns(scales)
    exponents = (scales.view(np.uint32) >> 23).astype(np.uint8)
    if scales_format == "ue8m0":
        return exponents.view(ml_dtypes.float8_e8m0fnu)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % 4)]
    return columns(np.pad(exponents, padding).view("<i4"))


@pytest.mark.parametrize(
    ("layout", "wire", "capacity"),
    [  # kernels write the format themselves if the capacity is a multiple of four; otherwise, a column needs padding
        ("ragged", "fp8_pow2", 40),
        ("ragged", "fp8_pow2", 41),
        ("expert", "fp8_pow2", 20),
        ("expert", "fp8_pow2", 19),
        ("token", "fp8_pow2", 17),
        ("ragged", "mxfp8", 40),
        ("ragged", "mxfp8", 41),
        ("expert", "mxfp8", 20),
        ("token", "mxfp8", 17),
    ],
)
def test_all_formats(make_group, mesh, layout, wire, capacity):
    inputs = make_inputs(SHAPE, mesh.size, "uneven")
    inputs.x[:, 2:, 130] = np.nan  # scales that are NaN
    group = make_group(mesh, SHAPE)
    options = {"group": group, "layout": layout, "capacity": capacity, "wire": wire, "zero_pad": True}

    def dispatch(*inputs):
        results = []
        for scales_format in FORMATS:
            recv = ep.dispatch(*inputs, **options, dequantize=False, scales_format=scales_format)
            rows = ep.expand(recv, capacity=43, zero_pad=True) if layout == "token" else recv
            results.append((recv.scales, rows.scales, ep.dequantize(recv), ep.dequantize(rows)))
        return results

    plain, *others = run_spmd(dispatch, mesh, *inputs)
    assert plain[0].dtype == np.float32
    assert plain[0].shape[-1] == SHAPE.hidden // (32 if wire == "mxfp8" else 128)
    assert np.isnan(plain[0]).any()
    for scales_format, (of_recv, of_rows, *dequantized) in zip(FORMATS[1:], others, strict=True):
        assert_same_bits(of_recv, plain[0] if layout == "token" else arranged(plain[0], scales_format))
        assert_same_bits(of_rows, arranged(plain[1], scales_format))
        for later, expected in zip(dequantized, plain[2:], strict=True):
            assert_same_bits(later, expected)


@pytest.mark.parametrize("scales_format", FORMATS)
def test_formats_of_known_bits(scales_format):
    """Three rows of two scales. DeepGEMM's word has the first exponent in its lowest byte."""
    scales = jnp.array([[1, 2], [0.5, 0.25], [2.0**-126, np.nan]], jnp.float32)
    expected = {
        "float32": np.asarray(scales),
        "float32_columns": np.array([[1, 0.5, 2.0**-126, 0], [2, 0.25, np.nan, 0]], np.float32),
        "ue8m0": np.array([[127, 128], [126, 125], [1, 255]], np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "ue8m0_columns": np.array([[127 + 256 * 128, 126 + 256 * 125, 1 + 256 * 255, 0]], np.int32),
    }[scales_format]
    found = _scales.arrange(scales, scales_format)
    assert_same_bits(np.asarray(found), expected)
    assert_same_bits(np.asarray(_scales.restore(found, scales_format, 3, 2)), np.asarray(scales))


def test_split_phase_and_the_static_format(make_group, mesh):
    """dispatch_done returns the scales in the format of the start. The format is static in the pytree."""
    group = make_group(mesh, SHAPE)
    options = {"group": group, "wire": "fp8_pow2", "dequantize": False, "scales_format": "ue8m0", "zero_pad": True}

    def dispatch_twice(*inputs):
        recv = ep.dispatch(*inputs, **options)
        assert jax.tree.map(lambda leaf: leaf, recv).scales_format == "ue8m0"
        return recv.scales, ep.dispatch_done(ep.dispatch_start(*inputs, **options)).scales

    whole, split = run_spmd(dispatch_twice, mesh, *make_inputs(SHAPE, mesh.size))
    assert whole.dtype == ml_dtypes.float8_e8m0fnu
    assert_same_bits(split, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales_format": "fp32"}, "dispatch: scales_format is 'fp32'; it must be"),
        ({"scales_format": "ue8m0"}, "dispatch: scales_format is 'ue8m0', but the rows have no scales; .*wire"),
        (
            {"scales_format": "float32_columns", "wire": "fp8"},
            "no scales; .*dequantize=False and an fp8 wire or a quantised x",
        ),
        (
            {"scales_format": "ue8m0_columns", "wire": "fp8", "dequantize": False},
            "'ue8m0_columns', which holds only powers of two; call dispatch with wire='fp8_pow2' or 'mxfp8'",
        ),
    ],
)
def test_a_format_that_does_not_fit(make_group, mesh, options, message):
    group = make_group(mesh, SHAPE)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            spmd(lambda *inputs: ep.dispatch(*inputs, group=group, **options).x, mesh), *make_inputs(SHAPE, mesh.size)
        )


def test_a_quantised_x_has_no_exponents(make_group, mesh):
    group = make_group(mesh, SHAPE)
    x, *routing = make_inputs(SHAPE, mesh.size)
    options = {"group": group, "dequantize": False, "scales_format": "ue8m0"}
    with pytest.raises(ValueError, match="scales of a quantised x may be other numbers: give x in the group's dtype"):
        jax.eval_shape(
            spmd(lambda *inputs: ep.dispatch(*inputs, **options).x, mesh), oracle.quantize(x, "fp8_pow2"), *routing
        )
