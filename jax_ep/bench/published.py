"""Times that other libraries published, and the rule that says which rows of the bench may be compared with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# The settings that must be equal.
COMPARED = ("ranks", "tokens", "hidden", "top_k", "experts", "dtype", "wire", "combine_wire", "transport")


@dataclasses.dataclass(frozen=True)
class Published:
    """One published measurement. The settings have the names and the meaning of the JSON rows.

    Add only times that the authors of a library published, with the page where a reader finds them.
    """

    library: str
    source: str  # URL
    devices: str
    ranks: int
    tokens: int  # per rank
    hidden: int
    top_k: int
    experts: int | None  # None: the source does not say
    dtype: str
    wire: str | None  # None: rows travel in dtype
    combine_wire: str | None
    transport: str
    dispatch_us: float | None  # None: not published
    combine_us: float | None
    pair_us: float | None


# Ranks, and microseconds of dispatch and of combine: "Low-latency kernels with pure RDMA".
_DEEPEP_LOW_LATENCY = ((8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360))

PUBLISHED: tuple[Published, ...] = tuple(
    Published(
        library="DeepEP V1, low latency",
        source="https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md#performance",
        devices=f"{ranks} x H800, 400 Gb/s InfiniBand",
        ranks=ranks,
        tokens=128,
        hidden=7168,
        top_k=8,
        experts=None,
        dtype="bfloat16",
        wire="fp8",
        combine_wire=None,
        transport="nvshmem",
        dispatch_us=dispatch_us,
        combine_us=combine_us,
        pair_us=None,
    )
    for ranks, dispatch_us, combine_us in _DEEPEP_LOW_LATENCY
)


def is_comparable(row: Mapping[str, Any], published: Published) -> bool:
    """True if a row of the bench has the settings of a published measurement, and times that can be compared.

    Devices may differ: the page names both. A row with wrong results, without times from the GPUs' time lines, with a
    skewed routing, or with padding to zero cannot be compared. Nor can a row of the layout "token", whose operations do
    less: expand and reduce do the rest.
    """
    if not row["checked"] or row["pair_us"] is None or row["routing"] != "uniform" or row["zero_pad"]:
        return False
    if row["layout"] == "token":
        return False
    wanted = {name: getattr(published, name) for name in COMPARED}
    if published.experts is None:
        del wanted["experts"]
    return all(row[name] == value for name, value in wanted.items())
