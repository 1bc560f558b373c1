"""The formats in which rows cross the link. A new wire format is a new entry of `WIRES`.

An fp8 wire carries float8_e4m3fn values and one float32 scale per 128 channels (the blocks of DeepSeek-V3's
activations, https://arxiv.org/abs/2412.19437, section 3.3). The last block has the remaining channels. The CUDA
backend casts bfloat16 in its kernels, and other dtypes with the functions of this file. Every backend makes the same
bits, so nothing here may depend on how a compiler rounds: XLA divides with 2 ulp on GPUs, may convert to fp8 by way of
float16, and skips the rounding to a 16-bit type between two float32 computations where no barrier keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._constants import CHANNELS_PER_SCALE, Cast

Wire: TypeAlias = Literal["fp8", "fp8_pow2"]
FP8 = jnp.float8_e4m3fn
CHANNELS_PER_UNIT = 16  # of an fp8 row: a row in transit has whole units of 16 bytes

_FP8_MAX = np.float32(448)
_AMAX_FLOOR = np.float32(1e-4)  # keeps the scale of an all-zero block finite
_FP8_NAN = np.uint8(0x7F)
_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x7FFFFF)
_ONE = np.uint32(0x800000)  # the leading one of a float32 mantissa, and one step of its exponent


def num_scales(hidden: int) -> int:
    """Returns the number of scales of a row of `hidden` channels."""
    return -(-hidden // CHANNELS_PER_SCALE)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Returns x [..., H] as [..., num_scales(H), 128], with zeros behind the last channel."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % CHANNELS_PER_SCALE)]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], num_scales(x.shape[-1]), CHANNELS_PER_SCALE)


def _out_of_blocks(blocks: jax.Array, hidden: int) -> jax.Array:
    """The inverse of `_in_blocks`."""
    rows = blocks.reshape(
        *blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]
    )  # with -1, reshape fails if there are no rows
    return rows[..., :hidden]


def quantize(x: jax.Array, wire: str) -> tuple[jax.Array, jax.Array]:
    """Casts x [..., H] to (float8_e4m3fn [..., H], float32 scales [..., ceil(H/128)]) such that x ~= q * scale.

    A NaN or infinity makes its whole block NaN: every q is 0x7f and the scale is 0x7fc00000.
    """
    blocks = _in_blocks(lax.optimization_barrier(x).astype(jnp.float32))
    # As integers, the bits of |x| have the order of the values, and every NaN comes last. No platform drops a NaN here.
    largest = jnp.max(lax.bitcast_convert_type(blocks, jnp.uint32) & ~_SIGN, axis=-1)
    is_finite = largest < _INFINITY
    amax = jnp.maximum(lax.bitcast_convert_type(jnp.where(is_finite, largest, 0), jnp.float32), _AMAX_FLOOR)
    scales, factor = WIRES[wire].scale(amax)
    q = lax.bitcast_convert_type(_round_to_fp8(blocks * factor[..., None]), jnp.uint8)
    q = lax.bitcast_convert_type(jnp.where(is_finite[..., None], q, _FP8_NAN), FP8)
    return _out_of_blocks(q, x.shape[-1]), jnp.where(is_finite, scales, np.float32(np.nan))


def dequantize(q: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Inverts `quantize`: q * scale in float32, rounded once to `dtype`. Every NaN of the result has NumPy's bits."""
    values = _out_of_blocks(_in_blocks(q.astype(jnp.float32)) * scales[..., None], q.shape[-1])
    return lax.optimization_barrier(_unify_nans(values.astype(dtype)))


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


def _power_of_two_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scale, 1 / scale) with the scale rounded up to a power of two, exact in UE8M0. Both are finite."""
    bits = lax.bitcast_convert_type(amax * np.float32(1 / 448), jnp.uint32)
    exponent = (bits + _MANTISSA) & ~_MANTISSA
    scale = lax.bitcast_convert_type(exponent, jnp.float32)
    return scale, lax.bitcast_convert_type(np.uint32(254) * _ONE - exponent, jnp.float32)


class WireFormat(NamedTuple):
    """How an fp8 wire casts a block of channels."""

    cast: Cast
    """The kernels' name of the format."""
    scale: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    """The largest |x| of a block, finite and at least 1e-4 -> the block's scale, and the factor that multiplies x."""


WIRES: dict[str, WireFormat] = {
    "fp8": WireFormat(Cast.AMAX, _amax_scale),
    "fp8_pow2": WireFormat(Cast.POWER_OF_TWO, _power_of_two_scale),
}


def cast_of(wire: str | None) -> Cast:
    """What the send kernel does for a wire format."""
    return Cast.NONE if wire is None else WIRES[wire].cast


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


def _round_to_fp8(x: jax.Array) -> jax.Array:
    """float32 to float8_e4m3fn, to nearest even, saturated. Rounds on the fp8 grid first, so that the cast is exact."""
    x = jnp.clip(x, -_FP8_MAX, _FP8_MAX)
    exponent = lax.bitcast_convert_type(x, jnp.uint32) >> 23 & 0xFF
    exponent = jnp.clip(exponent, 127 - 6, 127 + 8)  # below 2**-6 the grid stays as it is: fp8 subnormals
    step = lax.bitcast_convert_type((exponent - 3) << 23, jnp.float32)  # three mantissa bits
    inverse_step = lax.bitcast_convert_type((254 + 3 - exponent) << 23, jnp.float32)
    return (lax.round(x * inverse_step, lax.RoundingMethod.TO_NEAREST_EVEN) * step).astype(FP8)
