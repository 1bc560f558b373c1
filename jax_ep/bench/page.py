"""A page of sections, and its two forms: one HTML file without scripts, and markdown with plots in files beside it."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Sequence

FONT = "system-ui, sans-serif"
_STYLE = f"""
:root {{ color-scheme: light dark }}
body {{ font: 1rem/1.5 {FONT}; max-width: 62rem; margin: auto; padding: 1rem; overflow-wrap: anywhere }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: 0.2rem 0.6rem; border-bottom: 1px solid #8885; text-align: right; white-space: nowrap }}
.text {{ text-align: left }}
pre {{ white-space: pre-wrap }}
figure {{ margin: 1rem 0 }}
svg {{ display: block; width: 100%; max-width: 36rem }}
"""


@dataclasses.dataclass(frozen=True)
class Link:
    """A cell of a table that leads to another page."""

    text: str
    url: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Its first `text_columns` columns are text, its other columns numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    text_columns: int = 1


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture. In markdown, it is the file `name`.svg beside the page."""

    name: str
    title: str
    svg: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Text that a reader may paste into a shell."""

    text: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and its contents. A str is a paragraph of plain text."""

    title: str
    blocks: Sequence[str | Table | Figure | Code]


@dataclasses.dataclass(frozen=True)
class Page:
    title: str
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def to_html(page: Page) -> str:
    """Returns the page as one HTML file, which needs no other file."""
    title = html.escape(page.title)
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{title}</title>'
    body = [f"<h1>{title}</h1>"]
    for section in page.sections:
        body += [f"<h2>{html.escape(section.title)}</h2>", *map(_html_block, section.blocks)]
    lines = [f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n<style>{_STYLE}</style>\n</head>\n<body>', *body]
    return "\n".join([*lines, "</body>\n</html>\n"])


def _html_block(block: str | Table | Figure | Code) -> str:
    match block:
        case Table():
            rows = [_html_row(block, "th", block.headings), *(_html_row(block, "td", row) for row in block.rows)]
            return "\n".join(["<div><table>", *rows, "</table></div>"])
        case Figure():
            return f"<figure>\n<figcaption>{html.escape(block.title)}</figcaption>\n{block.svg}</figure>"
        case Code():
            return f"<pre><code>{html.escape(block.text)}</code></pre>"
    return f"<p>{html.escape(block)}</p>"


def _html_row(table: Table, tag: str, cells: Sequence[str | Link]) -> str:
    def cell(index: int, content: str | Link) -> str:
        text = html.escape(content.text if isinstance(content, Link) else content)
        if isinstance(content, Link):
            text = f'<a href="{html.escape(content.url)}">{text}</a>'
        return f'<{tag} class="text">{text}</{tag}>' if index < table.text_columns else f"<{tag}>{text}</{tag}>"

    return f"<tr>{''.join(cell(*numbered) for numbered in enumerate(cells))}</tr>"


def to_markdown(page: Page) -> str:
    """Returns the page as GitHub-flavoured markdown."""
    blocks = [f"# {_escaped(page.title)}"]
    for section in page.sections:
        blocks += [f"## {_escaped(section.title)}", *map(_markdown_block, section.blocks)]
    return "\n\n".join(blocks) + "\n"


def _markdown_block(block: str | Table | Figure | Code) -> str:
    match block:
        case Table():
            rules = ["---" if column < block.text_columns else "--:" for column in range(len(block.headings))]
            cells = [list(map(_markdown_cell, row)) for row in (block.headings, *block.rows)]
            return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], rules, *cells[1:]])
        case Figure():
            return f"![{_escaped(block.title)}]({block.name}.svg)"
        case Code():
            return re.sub("^", "    ", block.text, flags=re.MULTILINE)  # not a fence: the text may contain one
    return _escaped(block)


def _markdown_cell(content: str | Link) -> str:
    return f"[{_escaped(content.text)}]({content.url})" if isinstance(content, Link) else _escaped(content)


def _escaped(text: str) -> str:
    """Returns text on one line that markdown shows as it is. An underscore inside a word needs no escape."""
    return re.sub(r"[\\`*\[\]<>|#~&]|\b_|_\b|(?<!\w)_", r"\\\g<0>", " ".join(text.split()))
