"""The errors of jax_ep. Arguments that are not valid raise ValueError or TypeError instead."""

from __future__ import annotations


class Error(Exception):
    """Base class of jax_ep's own errors. Arguments that are not valid raise ValueError or TypeError instead.

    After an operation has failed on a device, all operations of its group fail. Close the group, make a new one, and
    restore the state from before the failure (docs/failures.md).

    Examples:
        >>> try:
        ...     group.check()
        ... except ep.Error as error:
        ...     print("close the group and make a new one:", error)
    """


class PeerTimeoutError(Error):
    """A device waited for another rank longer than `Group(timeout=...)`, and gave up the operation.

    Over a network, a rank also raises it if the other rank gave up first.

    **What to do.** Look at the rank `missing_rank`. If its process has died, start the whole program again. If it runs
    other operations than the rank `waiting_rank`, or runs them in another order, correct the program. If it is only
    late (it compiles, loads data or saves a checkpoint), make the new group with a longer `timeout`. The
    documentation of the class `Error` tells how to go on.

    Attributes:
        op: the operation that waited, e.g. "dispatch".
        waiting_rank: the rank that gave up.
        missing_rank: the rank that did not come in time, or that gave up first.
        expected: the number that the waiting rank needed. Usually, it is the number of the operation in its group,
            counted from 1.
        seen: the number that the waiting rank read last.

    Examples:
        >>> try:
        ...     group.check()
        ... except ep.PeerTimeoutError as error:
        ...     print(f"rank {error.waiting_rank} waited for rank {error.missing_rank} in {error.op}")
    """

    def __init__(
        self, op: str, *, waiting_rank: int, missing_rank: int, expected: int, seen: int, message: str | None = None
    ) -> None:
        super().__init__(
            message
            or f"{op}: rank {waiting_rank} gave up waiting for rank {missing_rank} "
            f"(expected {expected}, saw {seen}). Every rank of a group must run the same operations in the same order; "
            f"see whether the process of rank {missing_rank} is alive. If the rank is only late, raise the group's "
            "timeout."
        )
        self.op = op
        self.waiting_rank = waiting_rank
        self.missing_rank = missing_rank
        self.expected = expected
        self.seen = seen


class SplitCallError(Error):
    """A split-phase call is not one start and one done in one compiled program.

    For example: another done has already ended the pending call; the start is outside of `jax.jit`; or it is under
    `jax.vmap`, with the backend "cuda". `SplitCallError` is raised while JAX traces, or by an eager call. If tracing
    does not show the fault, the compiled program raises `jax.errors.JaxRuntimeError` when it runs on GPUs.

    Examples:
        >>> def twice(x, topk_idx):
        ...     pending = ep.dispatch_start(x, topk_idx, group=group, layout="ragged")
        ...     return ep.dispatch_done(pending).x + ep.dispatch_done(pending).x
        >>> try:
        ...     on_each_rank(twice)(x, topk_idx)
        ... except ep.SplitCallError as error:
        ...     print(error)
        dispatch_done: pending was done before; call dispatch_start again for each done
    """
