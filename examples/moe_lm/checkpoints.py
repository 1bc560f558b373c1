"""Saves and restores training state with Orbax. Every process of a run saves and restores its own shards."""

import copy
from pathlib import Path

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run. A checkpoint is a pytree of arrays and a JSON history; its key is the step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "history": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(directory.absolute(), item_handlers=handlers)

    @classmethod
    def are_in(cls, directory: Path) -> bool:
        """Returns True if `directory` holds checkpoints. Does not create it, unlike `Checkpoints(directory)`."""
        return directory.is_dir() and cls(directory).latest() is not None

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: dict, history: dict) -> None:
        # Orbax writes in the background, while training continues and appends to the history.
        history = copy.deepcopy(history)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), history=ocp.args.JsonSave(history))
        )

    def restore(self, state: dict) -> tuple[dict, dict]:
        """Returns the latest (state, history). Restores only the entries of the state that `state` has.

        `state` gives the shapes, dtypes and shardings. The mesh may differ from the mesh of the checkpoint. If shapes
        differ from the checkpoint, the program ends.
        """
        self._expect_same_sizes(state["params"])
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        named = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
        restored = self._manager.restore(
            self.latest(), args=ocp.args.Composite(state=named, history=ocp.args.JsonRestore())
        )
        return restored.state, restored.history

    def _expect_same_sizes(self, params: dict) -> None:
        saved = self._manager.item_metadata(self.latest()).state.tree["params"]
        there, here = (dict(jax.tree.leaves_with_path(tree)) for tree in (saved, params))
        for path, parameter in here.items():
            if there[path].shape != parameter.shape:
                raise SystemExit(
                    f"--checkpoint-dir {self._directory} is of a run with other sizes: "
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')} has shape {there[path].shape} there, "
                    f"{parameter.shape} here; give --layers, --hidden, --experts and --expert-hidden as for that run"
                )

    def close(self) -> None:
        """Waits until all saves are done."""
        self._manager.close()
