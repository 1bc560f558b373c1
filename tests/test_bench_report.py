"""The page of `jax-ep bench --report`."""

import dataclasses
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from helpers import in_one_process
from jax_ep.bench import log_plot, page, run_page
from jax_ep.bench.__main__ import main
from jax_ep.bench.cases import Case
from jax_ep.bench.published import Published, is_comparable
from jax_ep.bench.report import HEADINGS

pytestmark = in_one_process

CASE = Case(8, 128, 7168, 8, 256, "bfloat16", "fp8", "ragged", "uniform")
MEASURED = dict.fromkeys(HEADINGS) | {
    "dispatch_us": 15.04,
    "combine_us": 20.5,
    "pair_us": 36.0,
    "wall_pair_us": 39.0,
    "floor_dispatch_us": 12.0,
    "floor_combine_us": 17.0,
    "floor_pair_us": 29.0,
    "chain": 50,
    "zero_pad": False,
    "checked": True,
    "backend": "cuda",
    "device": "NVIDIA H200",
    "processes": 1,
    "nodes": 1,
    "transport": "nvlink",
}
THEIRS = Published(
    library="Other|Lib",
    source="https://example.org/times",
    devices="8 x Made-up GPU",
    ranks=8,
    tokens=128,
    hidden=7168,
    top_k=8,
    experts=None,
    dtype="bfloat16",
    wire="fp8",
    combine_wire=None,
    transport="nvlink",
    dispatch_us=77.25,
    combine_us=114.0,
    pair_us=None,
)


def row(**changed):
    """A row of the JSON file with made-up times."""
    return dataclasses.asdict(CASE) | MEASURED | changed


def tables(document):
    """The cells of the tables of an HTML page: [table][row][cell]. Raises an error if its tags do not match."""

    class Parser(HTMLParser):
        VOID = ("meta",)
        found, opened = [], []

        def handle_starttag(self, tag, attributes):
            self.opened += [tag] if tag not in self.VOID else []
            if tag == "table":
                self.found.append([])
            elif tag == "tr":
                self.found[-1].append([])
            elif tag in ("td", "th"):
                self.found[-1][-1].append("")

        def handle_startendtag(self, tag, attributes):
            assert "svg" in self.opened  # HTML itself has no such tags

        def handle_endtag(self, tag):
            assert self.opened.pop() == tag

        def handle_data(self, data):
            if {"td", "th"} & set(self.opened):
                self.found[-1][-1][-1] += data

    parser = Parser()
    parser.feed(document)
    parser.close()
    assert not parser.opened
    return parser.found


def markdown_tables(document):
    """The cells of the tables of a markdown page, without escapes: [table][row][cell]."""
    blocks = [block.splitlines() for block in document.split("\n\n") if block.startswith("| ")]
    return [
        [[cell.replace("\\", "") for cell in re.split(r" (?<!\\)\| ", line[2:-2])] for line in (heading, *lines)]
        for heading, _, *lines in blocks
    ]


def build(*rows, about=None, command="jax-ep bench", published=()):
    return run_page.build(rows, about or {"host": "here"}, command, published)


def test_values_of_the_table():
    slow = row(tokens=4096, dispatch_us=None, pair_us=None, floor_pair_us=None, checked=False, grad_pair_us=70.04)
    built = build(row(), slow)
    html = page.to_html(built)
    assert [" ".join(line) for line in tables(html)[1]] == [
        "tokens hidden wire layout dispatch combine pair wall floor pair / floor backward checked",
        "128 7168 fp8 ragged 15.0 20.5 36.0 39.0 29.0 1.24 - yes",
        "4096 7168 fp8 ragged - 20.5 - 39.0 - - 70.0 WRONG",
    ]
    assert "ranks 8, top_k 8, experts 256, dtype bfloat16, routing uniform, num_sms auto, capacity_factor none" in html
    assert "at least one row has wrong results" in html
    assert "at least one row has wrong results" not in page.to_html(build(row()))


def test_columns_of_what_was_not_run_are_left_out():
    """The page explains the columns that it has."""
    without, with_all = (
        page.to_html(build(row(**changed))) for changed in ({}, {"lax_pair_us": 9.0, "zero_pad": True})
    )
    assert "all_to_all" not in without and "Backward" not in without
    assert "lax.all_to_all" in with_all and "Backward" in with_all
    assert tables(with_all)[1][1][-2:] == ["9.0", "yes"]


def test_settings_that_differ_are_columns():
    _, results, _ = tables(page.to_html(build(row(num_sms=24, capacity_factor=1.25), row())))
    assert [line[results[0].index("num_sms")] for line in results] == ["num_sms", "24", "auto"]
    assert [line[results[0].index("capacity_factor")] for line in results] == ["capacity_factor", "1.25", "none"]


def test_both_forms_have_the_same_tables():
    built = build(row(), row(tokens=8, pair_us=12.0), published=[dataclasses.replace(THEIRS, library="Lib")])
    html, markdown = tables(page.to_html(built)), markdown_tables(page.to_markdown(built))
    assert len(html) == 3
    link = "[Lib](https://example.org/times)"
    assert [[[cell.replace(link, "Lib") for cell in line] for line in table] for table in markdown] == html


def test_text_is_escaped():
    nasty = '<b>&"|`_*'
    built = build(row(device=nasty), about={"host": nasty}, command=f"jax-ep bench {nasty}", published=[THEIRS])
    html = page.to_html(built)
    assert "<b>" not in html
    (about, *_, compared) = tables(html)
    assert about[1] == ["host", nasty]
    assert [line[0] for line in compared] == ["library", "jax_ep, this run", "Other|Lib"]
    assert f"<h1>{'jax-ep bench: 8 x &lt;b&gt;&amp;&quot;|`_*'}</h1>" in html
    markdown = page.to_markdown(built)
    assert '| host | \\<b\\>\\&"\\|\\`\\_\\* |' in markdown
    assert f"\n    jax-ep bench {nasty}\n" in markdown


def test_the_html_page_needs_no_other_file():
    html = page.to_html(build(row(), row(tokens=8)))
    assert html.startswith("<!DOCTYPE html>\n")
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(|src=", html)
    assert re.findall(r'http[^"<]*', html) == ["http://www.w3.org/2000/svg"] * 3  # a name, which no browser loads


def lines_of(svg):
    """The points of each line of a plot, after a check that all are inside the picture."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    found = []
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        found.append([tuple(map(float, point.split(","))) for point in line.get("points").split()])
        assert all(0 < x < width and 0 < y < height for x, y in found[-1])
    return found


def test_points_of_a_plot():
    """They are in the order of x on two logarithmic axes, with the floor below."""
    series = log_plot.Series("a<b", points=[(100, 40), (1, 10), (10, 20)], floor=[(100, 20), (1, 5), (10, 10)])
    svg = log_plot.draw([series], title="A & B", x_label="x", y_label="y")
    floor, points = lines_of(svg)
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 > y1 > y2 and y0 - y1 == pytest.approx(y1 - y2, abs=0.11)  # y points down
    assert [x for x, _ in floor] == [x0, x1, x2]
    assert [y for _, y in floor] == pytest.approx([2 * y0 - y1, y0, y1], abs=0.21)  # half the time: one step lower
    texts = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["y", "x", "5", "10", "20", "50", "1", "10", "100", "a<b", "floor of the link"]


@pytest.mark.parametrize("us", [0.03, 1.0, 7.0, 99.99])
def test_a_plot_of_one_point(us):
    floor, points = lines_of(log_plot.draw([log_plot.Series("", [(8, us)], [])], title="", x_label="", y_label=""))
    assert len(points) == 1 and floor == []


def test_labels_of_an_axis_do_not_touch():
    points = [(x, 10) for x in range(1000, 1100)]
    svg = log_plot.draw([log_plot.Series("", points, [])], title="", x_label="", y_label="")
    labels = [int(label) for label in re.findall(r">(1\d\d\d)</text>", svg)]
    assert 5 < len(labels) < 15 and labels == sorted(labels)


def test_plots_of_a_run():
    """A series for each wire, from rows in any order."""
    rows = [row(tokens=tokens, wire=wire, dispatch_us=tokens / 8) for tokens in (32, 8) for wire in (None, "fp8")]
    built = build(*rows)
    assert [figure.name for figure in built.figures] == ["dispatch", "combine", "pair"]
    svg = built.figures[0].svg
    assert len(lines_of(svg)) == 4
    assert ">wire none<" in svg and ">wire fp8<" in svg
    assert re.findall(r"<title>(.*?)</title>", svg) == ["12", "12", "1", "4"] * 2
    assert all(f"]({name}.svg)" in page.to_markdown(built) for name in ("dispatch", "combine", "pair"))


def test_comparable_rows():
    assert is_comparable(row(), THEIRS)
    assert is_comparable(row(device="NVIDIA H100", layout="expert", num_sms=24), THEIRS)
    assert is_comparable(row(), dataclasses.replace(THEIRS, experts=256))
    assert not is_comparable(row(), dataclasses.replace(THEIRS, experts=288))


@pytest.mark.parametrize(
    "changed",
    [
        {"ranks": 4},
        {"tokens": 64},
        {"hidden": 4096},
        {"top_k": 6},
        {"dtype": "float16"},
        {"wire": None},
        {"combine_wire": "fp8"},
        {"transport": "nvshmem"},
        {"layout": "token"},
        {"routing": "skewed"},
        {"zero_pad": True},
        {"pair_us": None},
        {"checked": False},
    ],
)
def test_rows_that_are_not_comparable(changed):
    assert not is_comparable(row(**changed), THEIRS)


def test_the_table_of_published_times():
    """Only comparable rows are in it, each before the published times."""
    built = build(row(tokens=8), row(), published=[THEIRS, dataclasses.replace(THEIRS, tokens=4096)])
    (_, _, compared) = tables(page.to_html(built))
    settings = "8 128 7168 8 {} bfloat16 fp8 none nvlink".format
    assert compared[1] == ["jax_ep, this run", "8 x NVIDIA H200", "15.0", "20.5", "36.0", *settings(256).split()]
    assert compared[2] == ["Other|Lib", "8 x Made-up GPU", "77.2", "114.0", "-", *settings("-").split()]
    assert len(compared) == 3
    assert '<a href="https://example.org/times">Other|Lib</a>' in page.to_html(built)


def test_published_times_without_comparable_rows():
    html = page.to_html(build(row(tokens=8), published=[THEIRS]))
    assert "No row of this run has the settings of a published time." in html
    (published,) = tables(html)[2:]
    assert [cells[0] for cells in published] == ["library", "Other|Lib"]


def test_a_run_writes_the_page(tmp_path, capsys):
    """Together with --json, on CPU devices, to a new folder."""
    folder = tmp_path / "page"
    argv = ["--tokens=3,2", "--hidden=128", "--top-k=2", "--experts=16", "--chain=2", "--backend=reference"]
    argv += ["--no-lax", f"--json={tmp_path / 'rows.json'}", f"--report={folder}"]
    assert main(argv) == 0
    assert (tmp_path / "rows.json").exists()
    assert capsys.readouterr().out.endswith(f"wrote {folder / 'report.html'}\n")
    html = (folder / "report.html").read_text()
    about, results, _ = tables(html)
    assert {"host", "date", "jax", "jaxlib", "jax_ep", "commit of jax_ep"} <= {name for name, _ in about}
    assert [line[0] for line in results] == ["tokens", "3", "2"]
    markdown = (folder / "report.md").read_text()
    for document in (html, markdown):
        assert "say nothing about GPUs" in document
        assert f"jax-ep bench {' '.join(argv)}" in document
        assert "There is no plot of dispatch" in document
    assert "(host clock)](pair.svg)" in markdown
    assert (folder / "pair.svg").read_text() in html
    assert sorted(path.name for path in folder.iterdir()) == ["pair.svg", "report.html", "report.md"]


def test_an_error_in_a_later_case_costs_no_rows(tmp_path, monkeypatch):
    def measure(case, *_, **__):
        if case.tokens == 2:
            raise MemoryError
        return row(tokens=case.tokens)

    monkeypatch.setattr("jax_ep.bench.__main__.measure", measure)
    with pytest.raises(MemoryError):
        main(["--tokens=3,2", f"--report={tmp_path}"])
    assert tables((tmp_path / "report.html").read_text())[1][1][0] == "3"


def test_the_commit(monkeypatch):
    monkeypatch.setenv("JAX_EP_COMMIT", "abc1234")
    assert run_page.machine([row()])["commit of jax_ep"] == "abc1234"


def test_a_folder_that_cannot_be_is_named(tmp_path, capsys, monkeypatch):
    """Before the bench measures anything."""
    monkeypatch.setattr("jax_ep.bench.__main__.measure", lambda *_, **__: pytest.fail("the bench measures"))
    file = tmp_path / "file"
    file.touch()

    def error(folder):
        with pytest.raises(SystemExit):
            main([f"--report={folder}"])
        return capsys.readouterr().err

    assert f"--report is {file}, a file; name a directory, which may be new" in error(file)
    assert "/no/page, in a directory that does not exist; make it first" in error(tmp_path / "no" / "page")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for folder in (tmp_path, tmp_path / "new"):
        assert f"--report is {folder}, where this user may not write; name another directory" in error(folder)
