"""What the ranks of a group have done, as `Group.stats` tells it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class GroupStats:
    """Counters of this process's ranks since their group was made. R_local ranks in this process, R ranks in the group.

    A row that was sent or received is one token on its way to, or back from, one rank, however many of its experts are
    on that rank. Its bytes are those of payload, scales and headers as they travel, without notifications.
    `rows_dropped`, `home_rows` and `planned_rows` count differently: a row for each pair (token, k). (In the layout
    "token", `rows_dropped` counts tokens.) Entry [i, r] of an array
    [R_local, R] is about `ranks[i]` and rank r. If both are the same rank, the rows stay on the device. The backends
    "reference" and "collectives" count nothing: all fields except `ranks` and `devices` are None. `str(stats)` is a
    table of the counters, without `home_rows`, `planned_rows` and `copies`.

    The rank that holds the experts counts the rows in both directions. This process cannot read the counters of a rank
    on another host. So the rows sent to experts there are missing, and so are the rows that came back from them.
    `jax_ep.replicate` counts as an operation, but the bytes of its copies are in no counter. With more than 32 ranks,
    `jax_ep.balance` is not counted.

    Attributes:
        ranks: R_local numbers: the ranks of this process in their expert-parallel group.
        devices: R_local names: the devices of these ranks.
        operations: for each kind of operation, [R_local] int64: the number of operations that all ranks have
            entered. Each entry counts an operation once, and a split-phase call as one. The keys are
            "dispatch", "dispatch_like", "dispatch (backward)", "combine", "combine (backward)", "all_to_all",
            "all_to_all_back", "balance", "replicate" and "replicate (backward)".
        rows_dropped: [R_local] int64, the sum of `num_dropped`.
        home_rows: [R_local] int64, the sum of `home_rows` of the plans of `balance`: the load without the plans.
        planned_rows: [R_local] int64, the sum of `num_rows` of these plans: the load with the plans.
        copies: [R_local] int64, the copies of experts that these plans gave to the ranks.
        rows_sent: [R_local, R] int64, the rows from ranks[i] to rank r.
        rows_received: [R_local, R] int64, the rows from rank r to ranks[i].
        bytes_sent: [R_local, R] int64, the bytes of the rows sent.
        bytes_received: [R_local, R] int64, the bytes of the rows received.
        seconds_waited: [R_local, R] float64, the time from when ranks[i] entered an operation until rank r entered it,
            summed over all operations.

    Examples:
        >>> stats = group.stats()
        >>> stats.ranks == tuple(range(R))  # in one process
        True
        >>> [entry["rank"] for entry in stats.to_dict()["ranks"]] == list(range(R))
        True
    """

    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    operations: dict[str, np.ndarray] | None = None
    rows_dropped: np.ndarray | None = None
    home_rows: np.ndarray | None = None
    planned_rows: np.ndarray | None = None
    copies: np.ndarray | None = None
    rows_sent: np.ndarray | None = None
    rows_received: np.ndarray | None = None
    bytes_sent: np.ndarray | None = None
    bytes_received: np.ndarray | None = None
    seconds_waited: np.ndarray | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the counters as numbers, strings, lists and None, which `json.dumps` accepts.

        Returns:
            {"ranks": [a dict of "rank", "device" and the counters, for each rank], "total": the sums of the counters}.
            In each dict, a counter [R_local, R] is a list of R numbers, and a counter [R_local] is a number.

        Examples:
            >>> import json
            >>> sorted(json.loads(json.dumps(group.stats().to_dict())))
            ['ranks', 'total']
        """
        counters = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[2:]}

        def told(numbers: Callable[[np.ndarray], np.ndarray | np.generic]) -> dict[str, Any]:
            return {
                name: jax.tree.map(lambda counter: numbers(counter).tolist(), counter)
                for name, counter in counters.items()
            }

        ranks = [
            {"rank": rank, "device": device, **told(operator.itemgetter(i))}
            for i, (rank, device) in enumerate(zip(self.ranks, self.devices, strict=True))
        ]
        return {"ranks": ranks, "total": told(partial(np.sum, axis=0))}

    def __str__(self) -> str:
        """Formats a table with a line for each rank of this process, and a line with the sums.

        The columns "s for 0", "s for 1" and so on are seconds_waited.
        """
        if self.operations is None:
            return f"ranks {', '.join(map(str, self.ranks))}: a backend in plain JAX counts nothing"
        told = self.to_dict()
        num_ranks = len(told["total"]["seconds_waited"])
        of_rows, of_bytes = ["rows sent", "rows received", "rows dropped"], ["MB sent", "MB received"]
        titles = ["rank", "device", "operations", *of_rows, *of_bytes]
        lines = [[*titles, *(f"s for {rank}" for rank in range(num_ranks))]]
        for line in [*told["ranks"], {"rank": "all", "device": "", **told["total"]}]:
            counts = (
                sum(line["operations"].values()), sum(line["rows_sent"]), sum(line["rows_received"]),
                line["rows_dropped"],
            )  # fmt: skip
            megabytes = (f"{sum(line[name]) / 1e6:.1f}" for name in ("bytes_sent", "bytes_received"))
            waited = (f"{seconds:.4f}" for seconds in line["seconds_waited"])
            lines.append([str(line["rank"]), line["device"], *map(str, counts), *megabytes, *waited])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
