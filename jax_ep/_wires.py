"""The formats in which rows cross the link. A new format is a new entry of `WIRES`, `DISPATCH_WIRES` or `GRAD_WIRES`.

An fp8 wire carries values of 8 bits (`Fp8Type`) and one scale per block of channels. A block has 128 channels, as in
DeepSeek-V3's activations (https://arxiv.org/abs/2412.19437, section 3.3), or 32 in "mxfp8" (OCP Microscaling Formats
1.0, section 5, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). The last block
has the remaining channels. On the CUDA backend, the dispatch kernel casts bfloat16 rows to blocks of 128 channels, in a
dispatch and in the backward pass of combine. The combine kernel casts float32 sums. The functions of this file cast all
other rows, and all rows on the other backends. Every backend makes the same bits, except for the bits of a NaN in a
gradient. So nothing here may depend on how a compiler rounds: XLA divides with 2 ulp on GPUs, may convert to fp8 by way
of float16, and skips the rounding to a 16-bit type between two float32 computations where no barrier keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._constants import CHANNELS_PER_SCALE, Cast

Wire: TypeAlias = Literal["fp8", "fp8_pow2"]
DispatchWire: TypeAlias = Literal["fp8", "fp8_pow2", "mxfp8"]
GradWire: TypeAlias = Literal["fp8", "fp8_pow2", "fp8_e5m2"]
FP8 = jnp.float8_e4m3fn
CHANNELS_PER_UNIT = 16  # of an fp8 row: a row in transit has whole units of 16 bytes

_AMAX_FLOOR = np.float32(1e-4)  # keeps the scale of an all-zero block finite
_FP8_NAN = np.uint8(0x7F)  # a NaN of both fp8 types
_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x7FFFFF)
_ONE = np.uint32(0x800000)  # the leading one of a float32 mantissa, and one step of its exponent


def num_scales(hidden: int, channels_per_scale: int = CHANNELS_PER_SCALE) -> int:
    """Returns the number of scales of a row of `hidden` channels."""
    return -(-hidden // channels_per_scale)


def _in_blocks(x: jax.Array, channels_per_scale: int) -> jax.Array:
    """Returns x [..., H] as [..., num_scales, channels_per_scale], with zeros behind the last channel."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % channels_per_scale)]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], num_scales(x.shape[-1], channels_per_scale), channels_per_scale)


def _out_of_blocks(blocks: jax.Array, hidden: int) -> jax.Array:
    """The inverse of `_in_blocks`."""
    rows = blocks.reshape(
        *blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]
    )  # with -1, reshape fails if there are no rows
    return rows[..., :hidden]


def quantize(x: jax.Array, wire: str) -> tuple[jax.Array, jax.Array]:
    """Casts x [..., H] to (fp8 [..., H], float32 scales, one per block of channels) such that x ~= q * scale.

    A NaN or infinity makes its whole block NaN: every q is 0x7f and the scale is 0x7fc00000.
    """
    wire_format = FORMATS[wire]
    blocks = _in_blocks(lax.optimization_barrier(x).astype(jnp.float32), wire_format.channels_per_scale)
    # As integers, the bits of |x| have the order of the values, and every NaN comes last. No platform drops a NaN here.
    largest = jnp.max(lax.bitcast_convert_type(blocks, jnp.uint32) & ~_SIGN, axis=-1)
    is_finite = largest < _INFINITY
    amax = jnp.maximum(lax.bitcast_convert_type(jnp.where(is_finite, largest, 0), jnp.float32), _AMAX_FLOOR)
    scales, factor = wire_format.scale(amax)
    q = lax.bitcast_convert_type(_round_to_fp8(blocks * factor[..., None], wire_format.type), jnp.uint8)
    q = lax.bitcast_convert_type(jnp.where(is_finite[..., None], q, _FP8_NAN), wire_format.type.dtype)
    return _out_of_blocks(q, x.shape[-1]), jnp.where(is_finite, scales, np.float32(np.nan))


def dequantize(
    q: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike, channels_per_scale: int = CHANNELS_PER_SCALE
) -> jax.Array:
    """Inverts `quantize`: q * scale in float32, rounded once to `dtype`. Every NaN of the result has NumPy's bits."""
    blocks = _in_blocks(q.astype(jnp.float32), channels_per_scale)
    values = _out_of_blocks(blocks * scales[..., None], q.shape[-1])
    return lax.optimization_barrier(_unify_nans(values.astype(dtype)))


def pack(x: jax.Array, wire: str) -> jax.Array:
    """Casts x [..., H] for a wire. Returns what crosses the link: uint8 [..., H + 4 * num_scales(H)]."""
    q, scales = quantize(x, wire)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
    return jnp.concatenate(
        [lax.bitcast_convert_type(q, jnp.uint8), scale_bytes.reshape(*scales.shape[:-1], 4 * scales.shape[-1])], axis=-1
    )


def unpack(packed: jax.Array, hidden: int, wire: str) -> jax.Array:
    """Returns the float32 rows [..., H] of rows that `pack` made."""
    q = lax.bitcast_convert_type(packed[..., :hidden], GRAD_WIRES[wire].type.dtype)
    scale_bytes = packed[..., hidden:].reshape(*packed.shape[:-1], num_scales(hidden), 4)
    return dequantize(q, lax.bitcast_convert_type(scale_bytes, jnp.float32), jnp.float32)


@jax.custom_jvp
def _unify_nans(x: jax.Array) -> jax.Array:
    """x with the bits of NumPy's NaN in place of any other NaN, whose bits depend on the platform.

    Selects among integers: XLA may convert floats for a select, and a conversion may change a NaN.
    """
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    nan = np.array(np.nan, x.dtype).view(bits.dtype)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(x), nan, bits), x.dtype)


_unify_nans.defjvps(lambda tangent, result, x: tangent)  # a bitcast has no gradient


def _amax_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scale, factor) where the block's largest value becomes 448."""
    return amax * np.float32(1 / 448), _divide_448_by(amax)


def _e5m2_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scale, factor) where the block's largest value becomes 57344 = 448 * 2**7. Powers of two multiply exactly."""
    scale, factor = _amax_scale(amax)
    return scale * np.float32(2**-7), factor * np.float32(2**7)


def _power_of_two_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scale, 1 / scale) with the scale rounded up to a power of two, exact in UE8M0. Both are finite."""
    bits = lax.bitcast_convert_type(amax * np.float32(1 / 448), jnp.uint32)
    exponent = (bits + _MANTISSA) & ~_MANTISSA
    scale = lax.bitcast_convert_type(exponent, jnp.float32)
    return scale, lax.bitcast_convert_type(np.uint32(254) * _ONE - exponent, jnp.float32)


class Fp8Type(NamedTuple):
    """A float type of 8 bits. Its largest value is 1.75 * 2**max_exponent."""

    dtype: Any
    mantissa_bits: int
    min_exponent: int
    """2**min_exponent is the smallest normal value."""
    max_exponent: int


E4M3 = Fp8Type(FP8, 3, -6, 8)
E5M2 = Fp8Type(jnp.float8_e5m2, 2, -14, 15)


class WireFormat(NamedTuple):
    """How an fp8 wire casts a block of channels."""

    cast: Cast | None
    """The kernels' name of the format; None if no kernel casts to it."""
    type: Fp8Type
    scale: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    """The largest |x| of a block, finite and at least 1e-4 -> the block's scale, and the factor that multiplies x."""
    channels_per_scale: int = CHANNELS_PER_SCALE


WIRES: dict[str, WireFormat] = {
    "fp8": WireFormat(Cast.AMAX, E4M3, _amax_scale),
    "fp8_pow2": WireFormat(Cast.POWER_OF_TWO, E4M3, _power_of_two_scale),
}
DISPATCH_WIRES = WIRES | {"mxfp8": WireFormat(None, E4M3, _power_of_two_scale, channels_per_scale=32)}
"""The formats of dispatch's `wire`. GEMMs of experts read these rows, so there is one more format for them."""
GRAD_WIRES = WIRES | {"fp8_e5m2": WireFormat(Cast.E5M2, E5M2, _e5m2_scale)}
"""The formats of `grad_wire`. They include all formats of `wire`. E5M2 has a wider range, and rounds more coarsely."""
FORMATS = DISPATCH_WIRES | GRAD_WIRES


def cast_of(wire: str | None) -> Cast:
    """Returns how the kernels cast for a wire format: not at all if XLA casts."""
    return Cast.NONE if wire is None else FORMATS[wire].cast or Cast.NONE


def has_power_of_two_scales(wire: str | None) -> bool:
    """Returns whether UE8M0 can hold the scales of a wire format; None: of rows that are already quantised."""
    return wire is not None and FORMATS[wire].scale is _power_of_two_scale


def channels_per_scale(wire: str | None) -> int:
    """Returns the number of channels in a block of a wire format; None: of rows that are already quantised."""
    return CHANNELS_PER_SCALE if wire is None else FORMATS[wire].channels_per_scale


def _divide_448_by(amax: jax.Array) -> jax.Array:
    """448 / amax, correctly rounded, for finite amax >= 1e-4."""
    mantissa = lax.bitcast_convert_type(amax, jnp.uint32) & _MANTISSA | np.uint32(127) * _ONE
    return _corrected_quotient(amax, np.float32(1.75) / lax.bitcast_convert_type(mantissa, jnp.float32))


def _corrected_quotient(amax: jax.Array, estimate: jax.Array) -> jax.Array:
    """448 / amax, correctly rounded. 448 = 1.75 * 2**8.

    Args:
        amax: finite, at least 1e-4.
        estimate: 1.75 divided by the mantissa of amax, to within 100 ulp. The integer remainder of this quotient,
            modulo 2**32, corrects it.
    """
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    divisor = bits & _MANTISSA | _ONE
    below = (divisor > 7 << 21).astype(jnp.uint32)  # 1 if the quotient of the mantissas is below 1
    quotient = (estimate * jnp.where(below == 1, np.float32(2**24), np.float32(2**23))).astype(jnp.uint32)
    # The numerator is 7 << 44 or 7 << 45, which is 0 modulo 2**32. The remainder is small, so that int32 holds it.
    remainder = lax.bitcast_convert_type(np.uint32(0) - quotient * divisor, jnp.int32)
    signed_divisor = divisor.astype(jnp.int32)
    correction = jnp.floor_divide(remainder, signed_divisor)
    quotient += correction.astype(jnp.uint32)
    twice = 2 * (remainder - correction * signed_divisor)
    round_up = (twice > signed_divisor) | ((twice == signed_divisor) & (quotient & 1 == 1))
    exponent = np.uint32(127 + 8 + 127) - (bits >> 23) - below
    # Added, not or-ed: a mantissa that rounds up to 2 carries into the exponent.
    result = (exponent << 23) + (quotient - _ONE) + round_up.astype(jnp.uint32)
    return lax.bitcast_convert_type(result, jnp.float32)


def _round_to_fp8(x: jax.Array, to: Fp8Type) -> jax.Array:
    """float32 to fp8, to nearest even, saturated. Rounds on the fp8 grid first, so that the cast is exact."""
    largest = np.float32(1.75 * 2**to.max_exponent)
    x = jnp.clip(x, -largest, largest)
    exponent = lax.bitcast_convert_type(x, jnp.uint32) >> 23 & 0xFF
    # Below the smallest normal value, the step stays the same: these are the fp8 subnormals.
    exponent = jnp.clip(exponent, 127 + to.min_exponent, 127 + to.max_exponent)
    step = lax.bitcast_convert_type((exponent - to.mantissa_bits) << 23, jnp.float32)
    inverse_step = lax.bitcast_convert_type((254 + to.mantissa_bits - exponent) << 23, jnp.float32)
    return (lax.round(x * inverse_step, lax.RoundingMethod.TO_NEAREST_EVEN) * step).astype(to.dtype)
