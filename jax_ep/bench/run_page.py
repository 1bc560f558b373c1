"""The page of a run of the bench (--report): the machine, the results, what others published, and plots."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_ep import doctor
from jax_ep.bench import log_plot
from jax_ep.bench.cases import Case
from jax_ep.bench.page import Code, Figure, Link, Page, Section, Table, to_html, to_markdown
from jax_ep.bench.published import COMPARED, PUBLISHED, Published, is_comparable
from jax_ep.bench.report import HEADINGS, SETTINGS, heading, series, text

Row = dict[str, Any]  # of the JSON file
_ALWAYS_COLUMNS = ("tokens", "hidden", "wire", "layout")
_OPERATIONS = ("dispatch_us", "combine_us", "pair_us")
_SETTINGS_OF_SERIES = [name for name in SETTINGS if name != "tokens"]
_MEANINGS = (
    "Times are in microseconds. Dispatch, combine and pair (one dispatch and one combine) are from the GPUs' time "
    "lines. Wall is the time of a pair on the host's clock. The floor is the time that the link needs for the same "
    "rows, measured in the same run. A dash means that the bench could not measure the value here."
)
_MEANINGS_OF_GRAD = (
    "All times of jax_ep are of differentiated calls, which also set padding to zero. Backward is the backward pass of "
    "a pair."
)
_MEANINGS_OF_LAX = (
    "The columns all_to_all and ragged_all_to_all have the time of a pair on the host's clock with lax.all_to_all and "
    "lax.ragged_all_to_all, and the code around them."
)
_ON_CPU = (
    "The devices are virtual CPU devices. The times show that jax_ep works on this machine, and say nothing about GPUs."
)


def write(folder: str, rows: Sequence[Row], command: str) -> Path:
    """Writes report.html, report.md and the plots to a folder, which may be new. Returns the path of report.html."""
    page = build(rows, machine(rows), command)
    files = {"report.html": to_html(page), "report.md": to_markdown(page)}
    files |= {f"{figure.name}.svg": figure.svg for figure in page.figures}
    Path(folder).mkdir(exist_ok=True)
    for name, content in files.items():
        (Path(folder) / name).write_text(content, encoding="utf-8")
    return Path(folder) / "report.html"


def machine(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the names and values of the first table: devices, host, date, versions and commit."""
    row = rows[0]
    return {
        "devices": f"{row['ranks']} x {row['device']}",
        "processes": str(row["processes"]),
        "nodes": str(row["nodes"]),
        "transport": row["transport"] or "XLA chooses",
        "backend": row["backend"],
        "host": socket.gethostname(),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        **doctor._versions(),
        "commit of jax_ep": _commit() or "not known",
    }


def _commit() -> str | None:
    """Returns JAX_EP_COMMIT, or the commit of the checkout that holds this file, with "+" if tracked files differ."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    if "JAX_EP_COMMIT" in os.environ:
        return os.environ["JAX_EP_COMMIT"]
    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails if an installed copy is inside another checkout
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def build(
    rows: Sequence[Row], about: Mapping[str, str], command: str, published: Sequence[Published] = PUBLISHED
) -> Page:
    """Makes the page of rows of the JSON file. `about` is the first table, `published` what others measured."""
    table = Table(["property", "value"], list(about.items()), text_columns=2)
    warning = [_ON_CPU] if rows[0]["device"] == "cpu" else []
    sections = [
        Section("Machine", [*warning, table, "The command line:", Code(command)]),
        Section("Results", _results(rows)),
        Section("Beside published times", _comparison(rows, published)),
        Section("Plots", _plots(rows)),
    ]
    return Page(f"jax-ep bench: {rows[0]['ranks']} x {rows[0]['device']}", sections)


def _results(rows: Sequence[Row]) -> list[str | Table]:
    fields = [field.name for field in dataclasses.fields(Case)]
    columns = [name for name in fields if name in _ALWAYS_COLUMNS or len({row[name] for row in rows}) > 1]
    times = [name for name in HEADINGS if not name.startswith(("grad_", "lax_")) or any(row[name] for row in rows)]
    table: dict[str, list[str]] = {}
    for name in (*columns, *times, "checked"):
        table[heading(name)] = [text(name, row[name]) for row in rows]
        if name == "floor_pair_us":
            table["pair / floor"] = [_ratio(row["pair_us"], row["floor_pair_us"]) for row in rows]
    shared = ", ".join(f"{name} {text(name, rows[0][name])}" for name in fields if name not in columns)
    blocks: list[str | Table] = [f"Each row has these settings: {shared}, chain {rows[0]['chain']}."]
    if not all(row["checked"] for row in rows):
        blocks.append("WRONG: at least one row has wrong results. Its times mean nothing.")
    blocks.append(_MEANINGS)
    blocks += [_MEANINGS_OF_GRAD] if rows[0]["zero_pad"] else []
    blocks += [_MEANINGS_OF_LAX] if "lax_pair_us" in times else []
    cells = list(zip(*table.values(), strict=True))
    return [*blocks, Table(list(table), cells, text_columns=0)]


def _ratio(time: float | None, floor: float | None) -> str:
    return f"{time / floor:.2f}" if time and floor else "-"


def _comparison(rows: Sequence[Row], published: Sequence[Published]) -> list[str | Table]:
    cells: list[list[str | Link]] = []
    for row in rows:
        theirs = [one for one in published if is_comparable(row, one)]
        if theirs:
            cells.append(["jax_ep, this run", f"{row['ranks']} x {row['device']}", *_us(row), *_settings(row)])
        cells += map(_published_cells, theirs)
    note = "A row of another library is below the row of jax_ep with the same settings. The devices may differ."
    if not cells:
        note = "No row of this run has the settings of a published time. These are the published times."
        cells = [_published_cells(one) for one in published]
    headings = ["library", "devices", *(HEADINGS[name] for name in _OPERATIONS), *COMPARED]
    return [f"{note} A dash means that the source does not give the value.", Table(headings, cells, text_columns=2)]


def _published_cells(one: Published) -> list[str | Link]:
    return [Link(one.library, one.source), one.devices, *_us(vars(one)), *_settings(vars(one))]


def _settings(row: Row) -> list[str]:
    return [text(name, row[name]) for name in COMPARED]


def _us(row: Row) -> list[str]:
    return [text(name, row[name]) for name in _OPERATIONS]


def _plots(rows: Sequence[Row]) -> list[str | Figure]:
    """Makes a plot of each operation that has times. Without a GPU time line, the pair is on the host's clock."""
    blocks: list[str | Figure] = []
    for column in _OPERATIONS:
        name = HEADINGS[column]
        clock = "GPU time line"
        if column == "pair_us" and not any(row[column] for row in rows):
            column, clock = "wall_pair_us", "host clock"
        drawn = [
            log_plot.Series(
                label.removeprefix(", ") or "jax_ep", _points(group, column), _points(group, f"floor_{name}_us")
            )
            for label, group in series(rows, _SETTINGS_OF_SERIES).items()
        ]
        if any(one.points for one in drawn):
            title = f"{name}: microseconds over tokens per rank ({clock})"
            svg = log_plot.draw(drawn, title=title, x_label="tokens per rank", y_label=f"{name}, microseconds")
            blocks.append(Figure(name, title, svg))
        else:
            blocks.append(f"There is no plot of {name}: the bench has no times of it from the GPUs' time lines.")
    return blocks


def _points(rows: Sequence[Row], column: str) -> list[log_plot.Point]:
    return [(row["tokens"], row[column]) for row in rows if row[column]]
