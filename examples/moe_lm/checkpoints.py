"""Training state on disk, through Orbax: every process of a run saves and restores its own shards."""

import copy
from pathlib import Path

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run: a pytree of arrays and a JSON history, by number of steps done."""

    def __init__(self, directory: Path) -> None:
        self._manager = ocp.CheckpointManager(directory.absolute())

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: dict, history: dict) -> None:
        # Orbax writes in the background, while training goes on and appends to the history.
        history = copy.deepcopy(history)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), history=ocp.args.JsonSave(history))
        )

    def restore(self, state: dict) -> tuple[dict, dict]:
        """Returns the latest (state, history), of the state what `state` names.

        `state` gives the shapes, dtypes and shardings, also of another mesh.
        """
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        named = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
        restored = self._manager.restore(
            self.latest(), args=ocp.args.Composite(state=named, history=ocp.args.JsonRestore())
        )
        return restored.state, restored.history

    def close(self) -> None:
        """Waits for the saves that are under way."""
        self._manager.close()
