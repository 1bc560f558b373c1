"""Converts a failure that a device has recorded to an error."""

from __future__ import annotations

from functools import partial

from jax_ep._constants import FailureReason
from jax_ep._errors import Error, PeerTimeoutError


def error_of(reason: str, op: str, rank: int, peer: int, expected: int, seen: int) -> Error:
    """Returns the error for the first failure of a native group: `rank` gave up the operation `op`.

    Args:
        reason: `FailureReason.words`.
        peer: the rank that `rank` waited for, or whose call it compared with its own.
        expected, seen: the values that `rank` compared.
    """
    timed_out = partial(PeerTimeoutError, op, waiting_rank=rank, missing_rank=peer, expected=expected, seen=seen)
    if reason == FailureReason.TIMEOUT.words:
        return timed_out()
    if reason == FailureReason.OTHER_OP.words:
        return Error(
            f"{op}: rank {peer} was in another call than rank {rank} (call {seen:#x} against {expected:#x}); every "
            "rank must run the same operations, with the same shapes, in the same order"
        )
    if reason == FailureReason.SLOT_TAKEN.words:
        return Error(
            f"{op}: rank {rank} has no room for another operation while older split-phase calls are in flight: "
            f"operation {expected} of the group (counted from 1) was started, its done has not run, and it keeps the "
            f"memory that {op} needs. Call its done before this {op}: a group has memory for two operations, or for "
            "four if the rows of four take at most 64 MiB (docs/overlap.md)"
        )
    if reason == FailureReason.ELSEWHERE.words:
        why = "Group.check of its process says why"
        return timed_out(message=f"{op}: rank {peer} gave up, and rank {rank} with it; {why}")
    if reason == FailureReason.OTHER_ORDER.words:
        return Error(
            f"{op}: ranks {rank} and {peer} run operations of this group and of another group in different order, "
            "so that each would wait for the other; run the operations of both groups in the same order on all "
            "devices: in one program, or in programs that one host thread calls"
        )
    if reason == FailureReason.OTHER_RUN.words:
        return Error(
            f"{op}: ranks {rank} and {peer} run programs with operations of this group in different order; call the "
            "programs from one host thread, or hold a lock around each call"
        )
    if reason == FailureReason.OVERLAP.words:
        return Error(
            f"{op}: rank {rank} runs another operation of the group at the same time; give the operations an order: "
            "let one use a result of the other, or call them in one function of one program"
        )
    return Error(
        f"{op}: the program runs rank {seen} on the device that group.mesh has as rank {rank}; pass "
        "mesh=group.mesh to jax.shard_map"
    )
