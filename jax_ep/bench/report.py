"""The output of a run: a table that grows while the bench measures cases, and a plot."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from jax_ep.bench.cases import Case

SETTINGS_OF_LAX = ("hidden", "top_k", "experts", "tokens")
# The settings that may differ between the cases of a run.
SETTINGS = ("wire", "combine_wire", "grad_wire", "num_sms", *SETTINGS_OF_LAX)
HEADINGS = {
    "dispatch_us": "dispatch",
    "combine_us": "combine",
    "pair_us": "pair",
    "wall_pair_us": "wall",
    "floor_pair_us": "floor",
    "grad_pair_us": "backward",
    "grad_wall_pair_us": "backward wall",
    "lax_pair_us": "all_to_all",
    "lax_ragged_pair_us": "ragged_all_to_all",
}


class Report(Protocol):
    """A context manager around the measurements."""

    def __enter__(self) -> Report: ...

    def __exit__(self, *exception: object) -> None: ...

    def add(self, row: dict[str, Any]) -> None:
        """Shows a row of the JSON file."""


def open_report(cases: Sequence[Case], *, grad: bool, lax: bool) -> Report:
    """Prints the settings that all cases share. Returns a report with columns for the other settings and the times.

    On a terminal with rich installed, the report is a live table.
    """
    shared = {name: value for name, value in dataclasses.asdict(cases[0]).items() if not _differs(name, cases)}
    shared.pop("tokens", None)  # always a column
    print(", ".join(f"{name} {text(name, value)}" for name, value in shared.items()))
    settings = [name for name in SETTINGS if name not in shared]
    times = [
        name for name in HEADINGS if (grad or not name.startswith("grad_")) and (lax or not name.startswith("lax_"))
    ]
    columns = [*settings, *times, "checked"]
    if not sys.stdout.isatty():
        return PlainReport(columns)
    if why := missing("rich"):
        print(why, file=sys.stderr)
        return PlainReport(columns)
    return LiveReport(columns, len(cases))


def missing(package: str) -> str | None:
    """Returns how to install a package of the extra `bench`, or None if it is installed."""
    if importlib.util.find_spec(package):
        return None
    return f"{package} is not installed; pip install 'jax_ep[bench]' brings it"


class PlainReport:
    """Prints a line for each row at once, for logs and pipes."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._widths = {column: max(len(heading(column)), 8) for column in columns}

    def __enter__(self) -> PlainReport:
        self._print({column: heading(column) for column in self._widths})
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def add(self, row: dict[str, Any]) -> None:
        self._print({column: text(column, row[column]) for column in self._widths})

    def _print(self, cells: dict[str, str]) -> None:
        print("  ".join(cells[column].rjust(width) for column, width in self._widths.items()), flush=True)


class LiveReport:
    """A table that grows, above a progress bar."""

    def __init__(self, columns: Sequence[str], num_cases: int) -> None:
        from rich.box import SIMPLE
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Table

        self._columns = columns
        self._table = Table(box=SIMPLE, padding=0, collapse_padding=True)
        for column in columns:
            self._table.add_column(heading(column), justify="right", overflow="fold", min_width=6)
        bar = BarColumn(bar_width=None)
        self._progress = Progress(bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), expand=True)
        self._task = self._progress.add_task("", total=num_cases)
        self._live = Live(Group(self._table, self._progress), vertical_overflow="visible")

    def __enter__(self) -> LiveReport:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def add(self, row: dict[str, Any]) -> None:
        style = None if row["checked"] else "bold red"
        self._table.add_row(*(text(column, row[column]) for column in self._columns), style=style)
        self._progress.advance(self._task)


def _differs(name: str, cases: Sequence[Case]) -> bool:
    return len({getattr(case, name) for case in cases}) > 1


def heading(column: str) -> str:
    """Returns the heading of a column of the JSON rows."""
    return HEADINGS.get(column, column)


def text(column: str, cell: Any) -> str:
    """Formats a value of a JSON row."""
    if cell is None:
        return "none" if column.endswith("wire") else {"num_sms": "auto", "capacity_factor": "none"}.get(column, "-")
    if isinstance(cell, bool):
        return "yes" if cell else "WRONG"
    return f"{cell:.1f}" if column.endswith("_us") and isinstance(cell, float) else str(cell)


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Plots the time of a pair over tokens: jax_ep, the floor of the link, and lax.

    It draws a line for each combination of the settings that differ between rows. Without a GPU time line, it uses the
    host's clock.
    """
    from matplotlib.figure import Figure

    on_gpus = all(row["pair_us"] is not None for row in rows)
    has_lax = any(row["lax_pair_us"] is not None for row in rows)
    clock = "host clock" if not on_gpus else "GPU time line; lax: host clock" if has_lax else "GPU time line"
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()

    def draw(label: str, group: Sequence[dict[str, Any]], column: str, style: str, colour: str) -> None:
        points = sorted((row["tokens"], row[column]) for row in group if row[column] is not None)
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label)

    for index, (label, group) in enumerate(series(rows, SETTINGS[:-1]).items()):
        draw(f"jax_ep{label}", group, "pair_us" if on_gpus else "wall_pair_us", "o-", f"C{index}")
        draw(f"floor of the link{label}", group, "floor_pair_us", "--", f"C{index}")
    for label, group in series(rows, SETTINGS_OF_LAX[:-1]).items():
        draw(f"lax.all_to_all{label}", group, "lax_pair_us", ":", "0.5")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens per rank",
        ylabel=f"dispatch + combine, us ({clock})",
        title=f"{rows[0]['ranks']} x {rows[0]['device']}, {rows[0]['routing']} routing",
    )
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def series(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Groups the rows by the settings in `names` that differ between rows. Returns label -> rows."""
    names = [name for name in names if len({row[name] for row in rows}) > 1]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault("".join(f", {name} {text(name, row[name])}" for name in names), []).append(row)
    return groups
