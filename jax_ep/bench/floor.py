"""The floor of a case: the time that the link needs for its rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep import _native
from jax_ep._wires import num_scales
from jax_ep.bench.cases import Case

_UNIT = 16  # bytes; the size of a row is a multiple of it
_HEADER_BYTES = 16  # bytes per k in the header of a dispatched row
_HEADER_ROOM = 128  # bytes; the arena's room for a header is a multiple of it (ArenaLayout in ffi/arena.h)
_FEW_TOKENS = 32  # with at most this many tokens per rank, rows go directly to remote ranks (has_few_tokens in plan.h)


class Floor(NamedTuple):
    """Microseconds."""

    dispatch_us: float
    combine_us: float


def measure_floor(case: Case, topk_idx: np.ndarray, mesh: Mesh) -> Floor | None:
    """Times pushes of the rows of topk_idx [R, T, K] between the mesh's GPUs, if link_floor can."""
    rows = rows_between_ranks(case, topk_idx)
    dispatch_us = link_floor(mesh, rows, dispatch_row_bytes(case))
    combine_us = link_floor(mesh, rows.T, combine_row_bytes(case))
    return None if dispatch_us is None or combine_us is None else Floor(dispatch_us, combine_us)


def link_floor(mesh: Mesh, rows: np.ndarray, row_bytes: int) -> float | None:
    """Times a push of rows[from, to] rows of row_bytes between all of the mesh's GPUs, and a barrier: microseconds.

    Returns None if there is no link to measure, or if several processes own the GPUs: one process must push for all.
    """
    devices = mesh.devices.flat
    if _native.cuda is None or devices[0].platform != "gpu" or len(devices) < 2 or mesh.is_multi_process:
        return None
    ordinals = tuple(device.local_hardware_id for device in devices)
    return _link_floor(ordinals, tuple(map(tuple, rows.tolist())), row_bytes)


def rows_between_ranks(case: Case, topk_idx: np.ndarray) -> np.ndarray:
    """Returns the number of rows from each rank to each other rank: [R, R].

    A token crosses the link once per destination rank, and one sum per destination rank comes back.
    """
    owner = topk_idx // case.experts_per_rank  # [R, T, K]
    rows = np.stack([(owner == rank).any(axis=-1).sum(axis=-1) for rank in range(case.ranks)], axis=-1)
    np.fill_diagonal(rows, 0)
    return rows


def over_network(case: Case, topk_idx: np.ndarray, node_size: int) -> tuple[int, int]:
    """Returns the rows, and their bytes, that a rank sends to other nodes in a pair: the maximum over the ranks.

    docs/network.md explains the rules.
    """
    straight = case.tokens <= _FEW_TOKENS
    rows = rows_between_ranks(case, topk_idx) if straight else _rows_between_rail_peers(case, topk_idx, node_size)
    node = np.arange(case.ranks) // node_size
    rows = np.where(node[:, None] == node, 0, rows)
    dispatched, combined = rows.sum(axis=1), rows.sum(axis=0)
    num_bytes = dispatched * dispatch_row_bytes(case, header_unit=_HEADER_ROOM) + combined * combine_row_bytes(case)
    return int((dispatched + combined).max()), int(num_bytes.max())


def _rows_between_rail_peers(case: Case, topk_idx: np.ndarray, node_size: int) -> np.ndarray:
    """Returns the number of rows from each rank to its rail peers: [R, R]. A token goes once to each node."""
    node_of_expert = topk_idx // (case.experts_per_rank * node_size)  # [R, T, K]
    ranks = np.arange(case.ranks)
    rows = np.stack([(node_of_expert == rank // node_size).any(axis=-1).sum(axis=-1) for rank in ranks], axis=-1)
    return np.where(ranks[:, None] % node_size == ranks % node_size, rows, 0)


def dispatch_row_bytes(case: Case, header_unit: int = _UNIT) -> int:
    """Returns the bytes of one dispatched row: payload, scales and header.

    Over a network, a row is one message. It includes the arena's whole room for the header, a multiple of
    `header_unit`.
    """
    return _payload_bytes(case, case.wire) + _round_up(_HEADER_BYTES * case.top_k, header_unit)


def combine_row_bytes(case: Case) -> int:
    """Returns the bytes of one sum that travels back: payload and scales."""
    return _payload_bytes(case, case.combine_wire)


def _payload_bytes(case: Case, wire: str | None) -> int:
    fp8_bytes = case.hidden + 4 * num_scales(case.hidden)
    return row_bytes(case) if wire is None else _round_up(fp8_bytes, _UNIT)


def row_bytes(case: Case) -> int:
    """Returns the bytes of one row in the case's dtype."""
    return case.hidden * jnp.dtype(case.dtype).itemsize


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@functools.cache  # several cases of one run often need the same measurement
def _link_floor(devices: tuple[int, ...], rows: tuple[tuple[int, ...], ...], row_bytes: int) -> float:
    assert _native.cuda is not None
    return _native.cuda.link_floor(list(devices), list(map(list, rows)), row_bytes)
