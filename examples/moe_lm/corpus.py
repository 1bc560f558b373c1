"""The text: the Python standard library's own sources, as bytes."""

import functools
import math
import sysconfig
import zlib
from pathlib import Path

import jax
import numpy as np

# Third-party packages are not the standard library, and some distributions ship Python without its tests.
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests"}
HELD_OUT_ONE_IN = 20


@functools.cache
def load() -> tuple[np.ndarray, np.ndarray]:
    """Returns the training text and the held-out text, each uint8 [num_bytes].

    A file is held out by a hash of its path, so that the split is the same on every machine with this Python version
    and no file has a part on both sides.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_TEXT.isdisjoint(name.parts):
            texts[zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"".join(files), np.uint8) for files in texts)
    return train, held_out


def unigram_entropy(text: np.ndarray) -> float:
    """Returns the loss, in nats per byte, of a model that knows only the frequency of each byte."""
    frequency = np.bincount(text) / len(text)
    return -sum(p * math.log(p) for p in frequency if p > 0)


def windows(text: np.ndarray, starts: np.ndarray, length: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns text[start : start + length] for each start, int32 [*starts.shape, length].

    Each process makes the part of its own devices.
    """

    def part(index):
        return text[starts[index[:-1]][..., None] + np.arange(length)].astype(np.int32)

    return jax.make_array_from_callback((*starts.shape, length), sharding, part)


def training_batch(seed: int, step: int, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns random windows, int32 [*, length]. They depend only on seed and step, so a resumed run gets the same."""
    text, _ = load()
    *lead, length = shape
    starts = np.random.default_rng([seed, step]).integers(len(text) - length, size=lead)
    return windows(text, starts, length, sharding)


def held_out_batches(shape: tuple[int, int, int], sharding: jax.sharding.Sharding):
    """Yields batches of windows, spread evenly over the held-out text. `shape` is (batches, batch, length)."""
    _, text = load()
    num_batches, batch, length = shape
    starts = np.linspace(0, len(text) - length, num_batches * batch, dtype=np.int64)
    for part in np.split(starts, num_batches):
        yield windows(text, part, length, sharding)
