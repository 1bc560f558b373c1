"""dequantize: received fp8 rows in the group's dtype."""

from __future__ import annotations

from typing import Annotated

import jax

from jax_ep import _checks, _compat, _scales, _wires
from jax_ep._types import AllToAll, Dispatched, Expanded


@_compat.named
def dequantize(recv: Dispatched | AllToAll | Expanded) -> Annotated[jax.Array, "group.dtype, the shape of recv.x"]:
    """Returns the received rows in group.dtype: each channel times the scale of its block, in float32, rounded once.

    Args:
        recv: the result of dispatch, all_to_all or expand. If it has no scales, recv.x is returned unchanged.

    Raises:
        TypeError: recv is something else.

    Examples:
        >>> def rows(x, topk_idx):
        ...     recv = ep.dispatch(x, topk_idx, group=group, layout="ragged", wire="fp8")
        ...     return ep.dequantize(recv)
        >>> on_each_rank(rows)(x, topk_idx).dtype == group.dtype
        True
    """
    if not isinstance(recv, (Dispatched, AllToAll, Expanded)):
        raise TypeError(
            f"dequantize: recv is {_checks.kind(recv)}; it must be what dispatch, all_to_all or expand returned"
        )
    if recv.scales is None:
        return recv.x
    scales, (num_rows, hidden) = recv.scales, recv.x.shape[-2:]
    if isinstance(recv, AllToAll):
        return _wires.dequantize(recv.x, scales, recv.group.dtype)
    if isinstance(recv, Expanded) or recv.route.layout != "token":  # scales of the layout "token" are float32 in rows
        num_scales = _wires.num_scales(hidden, recv.channels_per_scale)
        scales = _scales.restore(scales, recv.scales_format, num_rows, num_scales)
    return _wires.dequantize(recv.x, scales, recv.group.dtype, recv.channels_per_scale)
