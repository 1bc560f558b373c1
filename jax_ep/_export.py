"""The safety checks of `jax.export` that do not know the operations of jax_ep."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jax_ep._backends import targets
from jax_ep.moe import _grouped_matmul


def export_checks() -> list[DisabledSafetyCheck]:
    """Returns the `disabled_checks` with which `jax.export.export` accepts the CUDA backend and the grouped GEMM.

    `jax.export` refuses FFI calls that it does not know, unless you disable its check for these calls. jax_ep keeps its
    own calls compatible between processes that run the same version of jax_ep. The backends "reference" and
    "collectives" make no FFI calls.

    Examples:
        >>> layer = on_each_rank(lambda x, topk_idx: ep.dispatch(x, topk_idx, group=group, layout="ragged").x)
        >>> exported = jax.export.export(layer, disabled_checks=ep.export_checks())(x, topk_idx)
        >>> exported.nr_devices == R
        True
    """
    split_phase = [part for target in targets.SPLIT for part in (target.start, target.done)]
    names = [target.name for target in (*targets.TARGETS, *targets.LOCAL, *split_phase)]
    calls = [*(f"jax_ep_{name}" for name in (*names, "room", "dispatch_layout")), _grouped_matmul.TARGET]
    return [DisabledSafetyCheck.custom_call(call) for call in calls]
