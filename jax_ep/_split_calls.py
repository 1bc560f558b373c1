"""`Pending`: a split-phase call between its start and its done. `BackwardCall`: the same in the backward pass.

The backward pass of a split-phase call is also a split-phase call. JAX transposes the done first, and the start last.
So the gradient of the done starts the backward operation, and the gradient of the start ends it. The user's barriers
order the computation after the start and before the done. JAX transposes them, too: a barrier on a pending call becomes
a barrier on its cotangent, which is the pending backward operation. So the gradient of the computation stays between
the start and the done of the backward operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax

from jax_ep import _checks, _compat
from jax_ep._errors import SplitCallError
from jax_ep._settings import GroupSettings

EndBack: TypeAlias = Callable[[Any], tuple[jax.Array | None, jax.Array | None]]


class BackwardCall:
    """The backward operation of one split-phase call, from the gradient of the done to the gradient of the start.

    It is static in the forward pass. JAX traces both gradients in one backward pass, so this object may hold arrays of
    that trace in between. Objects of different traces are equal, so that the carry of a `lax.scan` may contain a
    pending call (where XLA does not copy it): then `pop_operands` returns None for its done.
    """

    def __init__(self, *operands: Any) -> None:
        """`operands`: those of the start that may be differentiated."""
        self._operands: tuple[Any, ...] | None = operands
        self._trace = _compat.current_trace()
        self._end: EndBack | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BackwardCall) and (self is other or self._trace != other._trace)

    def __hash__(self) -> int:
        return hash(BackwardCall)

    def pop_operands(self) -> tuple[Any, ...] | None:
        """Returns the operands of the start to its done, once; None if the start may be in another function.

        If a barrier before a done is differentiated, JAX also differentiates the done. Only the operands of the start
        show whether the start is.
        """
        operands, self._operands = self._operands, None
        return operands if self._trace == _compat.current_trace() else None

    def set_end(self, end: EndBack) -> None:
        """`end` ends the operation and returns the gradients. The gradient of the done calls this."""
        self._end = end

    def pop_end(self) -> EndBack | None:
        """Returns what `set_end` got; None if the gradient of the done ran the whole operation, or did not run."""
        end, self._end = self._end, None
        return end


@partial(jax.tree_util.register_dataclass, data_fields=["operands"], meta_fields=["op", "group", "static"])
@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """An operation that was started. It is opaque: pass it to its `*_done` once."""

    operands: Any
    op: str
    group: GroupSettings
    static: Any
    _trace: Any = dataclasses.field(default_factory=_compat.current_trace, init=False, repr=False)
    _done: list[str] = dataclasses.field(default_factory=list, init=False, repr=False)

    def take_static(self) -> tuple[Any, tuple[Any, ...] | None]:
        """Returns the static part, and what `BackwardCall.pop_operands` returns.

        If these operands are None, the static part has no `backward`, so the backward pass is a whole operation.
        """
        backward = self.static.backward
        operands = None if backward is None else backward.pop_operands()
        return (self.static if operands else dataclasses.replace(self.static, backward=None)), operands

    def take(self) -> Any:
        """Returns the operands. Raises an error if the trace shows that the program may end one start more than once.

        JAX traces an inner function (the body of a scan, for example) once, and may run it any number of times. So an
        inner function must not end a call that it closes over. It may end a call that it gets as an argument: in its
        trace, the argument is a new object.
        """
        if self._done:
            raise SplitCallError(f"{self.op}_done: pending was done before; call {self.op}_start again for each done")
        if _compat.current_trace() != self._trace:
            raise SplitCallError(
                f"{self.op}_done: pending is from an outer function; the inner function that calls {self.op}_done (of "
                "jit, checkpoint, grad, vmap, scan, while_loop or cond) must not close over it, because JAX may run an "
                f"inner function more than once: call {self.op}_start and {self.op}_done in one function or, if the "
                "inner function is of jit, give it pending as an argument"
            )
        self._done.append(self.op)
        return self.operands


def check_compiled(op: str) -> None:
    """`op`, the start of a split-phase call, is in a program that JAX compiles: its done must be in the same one."""
    if not _compat.is_tracing():
        raise SplitCallError(
            f"{op}: called outside of jax.jit, or under jax.disable_jit; a start and its done must be in one compiled "
            f"program: compile the function that has both, or call {op.removesuffix('_start')}"
        )


def check_pending(op: str, value: Any) -> None:
    """`value` is what `op`_start returned."""
    if not isinstance(value, Pending) or value.op != op:
        given = f"of {value.op}_start" if isinstance(value, Pending) else _checks.kind(value)
        raise TypeError(f"{op}_done: pending is {given}; it must be what {op}_start returned")
