"""`Pending`: a split-phase call between its start and its done."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from jax_ep import _checks, _compat
from jax_ep._errors import SplitCallError
from jax_ep._settings import GroupSettings


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
