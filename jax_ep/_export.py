"""What `jax.export` must be told about programs that contain operations."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jax_ep._backends import targets


def export_checks() -> list[DisabledSafetyCheck]:
    """Returns the `disabled_checks` with which `jax.export.export` accepts the operations of the CUDA backend.

    `jax.export` refuses foreign calls unless the caller vouches for them. jax_ep vouches for its own calls between
    processes that run the same version of jax_ep. A group of the reference backend needs no such checks.

    Example:
        >>> layer = on_each_rank(lambda x, topk_idx: ep.dispatch(x, topk_idx, group=group, layout="ragged").x)
        >>> exported = jax.export.export(layer, disabled_checks=ep.export_checks())(x, topk_idx)
        >>> exported.nr_devices == R
        True
    """
    split = [half for target in targets.SPLIT for half in (target.start, target.done)]
    names = [target.name for target in (*targets.TARGETS, *split)]
    return [DisabledSafetyCheck.custom_call(f"jax_ep_{name}") for name in (*names, "room", "dispatch_layout")]
