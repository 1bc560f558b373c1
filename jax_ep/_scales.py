"""The forms in which `dispatch` and `expand` return the scales of fp8 rows: those that GEMMs of experts read.

CUDA kernels write scales in these forms, with the bits that `arrange` gives. The forms with columns are those of
DeepGEMM (https://github.com/deepseek-ai/DeepGEMM), whose kernels read scales with the tensor memory accelerator (TMA):
a column must begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _checks, _wires

ScalesFormat: TypeAlias = Literal["float32", "float32_columns", "ue8m0", "ue8m0_columns"]
FORMATS = get_args(ScalesFormat)
UE8M0 = jnp.float8_e8m0fnu  # the exponent of a power of two, as float32 stores it; 255 is NaN
WORDS_PER_TMA_UNIT = 4  # a word has 4 bytes
_EXPONENTS_PER_WORD = 4


def check(op: str, scales_format: str, *, returns_fp8: bool, quantized: bool, wire: str | None) -> None:
    """`scales_format` is one of FORMATS, and fits the scales of the call. `quantized`: x comes with its scales."""
    _checks.choice(f"{op}: scales_format", scales_format, FORMATS)
    if scales_format == "float32":
        return
    if not returns_fp8:
        raise ValueError(
            f"{op}: scales_format is {scales_format!r}, but the rows have no scales; it must be 'float32', or give "
            "dequantize=False and an fp8 wire or a quantised x"
        )
    if scales_format.startswith("ue8m0") and not _wires.has_power_of_two_scales(wire):
        fix = "call dispatch"
        if quantized:
            fix = "the scales of a quantised x may be other numbers: give x in the group's dtype"
        raise ValueError(
            f"{op}: scales_format is {scales_format!r}, which holds only powers of two; {fix} with "
            "wire='fp8_pow2' or 'mxfp8', or give scales_format='float32' or 'float32_columns'"
        )


def arrange(scales: jax.Array, scales_format: ScalesFormat) -> jax.Array:
    """Returns float32 scales [..., rows, S] in `scales_format`. For UE8M0, they are 0, a power of two, or NaN."""
    if scales_format == "float32":
        return scales
    if scales_format == "float32_columns":
        return _to_columns(scales)
    if scales_format == "ue8m0":
        return lax.bitcast_convert_type(_exponents(scales), UE8M0)
    return _to_columns(to_words(scales))


def restore(arranged: jax.Array, scales_format: ScalesFormat, num_rows: int, num_scales: int) -> jax.Array:
    """The inverse of `arrange`: float32 [..., num_rows, num_scales]."""
    if scales_format == "float32":
        return arranged
    if scales_format == "float32_columns":
        return _to_rows(arranged, num_rows)
    if scales_format == "ue8m0":
        return _from_exponents(lax.bitcast_convert_type(arranged, jnp.uint8))
    return from_words(_to_rows(arranged, num_rows), num_scales)


def arranged_type(scales_format: ScalesFormat, rows_shape: tuple[int, ...], num_scales: int) -> jax.ShapeDtypeStruct:
    """The shape and the dtype of what `arrange` returns."""
    plain = jax.ShapeDtypeStruct((*rows_shape, num_scales), jnp.float32)
    return jax.eval_shape(lambda scales: arrange(scales, scales_format), plain)


def to_words(scales: jax.Array) -> jax.Array:
    """Packs float32 scales [..., S] that are 0, a power of two, or NaN into int32 [..., ceil(S/4)].

    A word has the exponents of four scales, the first in its lowest byte.
    """
    exponents = _padded(_exponents(scales), _EXPONENTS_PER_WORD)
    shape = (*scales.shape[:-1], exponents.shape[-1] // _EXPONENTS_PER_WORD, _EXPONENTS_PER_WORD)
    return lax.bitcast_convert_type(exponents.reshape(shape), jnp.int32)


def from_words(words: jax.Array, num_scales: int) -> jax.Array:
    """The inverse of `to_words`: float32 [..., num_scales]."""
    shape = (*words.shape[:-1], _EXPONENTS_PER_WORD * words.shape[-1])
    return _from_exponents(lax.bitcast_convert_type(words, jnp.uint8).reshape(shape)[..., :num_scales])


def _exponents(scales: jax.Array) -> jax.Array:
    """The exponents of float32 scales that are 0, a power of two, or NaN: uint8."""
    return (lax.bitcast_convert_type(scales, jnp.uint32) >> 23).astype(jnp.uint8)


def _from_exponents(exponents: jax.Array) -> jax.Array:
    """The inverse of `_exponents`."""
    # 255 is NaN. As an exponent of float32 alone, it would be infinity.
    bits = (exponents.astype(jnp.uint32) << 23) | jnp.where(exponents == 255, jnp.uint32(1 << 22), jnp.uint32(0))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _padded(array: jax.Array, multiple: int) -> jax.Array:
    """Returns `array` with zeros behind its last axis, whose size becomes a multiple of `multiple`."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % multiple)])


def _to_columns(rows: jax.Array) -> jax.Array:
    """Returns rows [..., N, C] as columns [..., C, N'], padded with zeros to a multiple of four."""
    return _padded(jnp.swapaxes(rows, -1, -2), WORDS_PER_TMA_UNIT)


def _to_rows(columns: jax.Array, num_rows: int) -> jax.Array:
    """The inverse of `_to_columns`."""
    return jnp.swapaxes(columns[..., :num_rows], -1, -2)
