"""The list of mutants agrees with the tree. tests/mutants.py runs them."""

import re
from pathlib import Path

import pytest

import mutants

ROOT = Path(__file__).parents[1]
MUTANTS, REASONS = mutants.read_list()
EXCHANGE_SEEDS = (ROOT / "tests" / "native" / "exchange_seeds.h").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_what_it_says(mutant):
    """Its words are in the sources, once, and it changes them; its tests exist."""
    assert [other.name for other in MUTANTS].count(mutant.name) == 1
    for edit in mutant.edits:
        text = (ROOT / edit.file).read_text()
        begin, end = edit.span(text)
        assert text[begin:end].strip() != edit.replacement.strip()
    runner, *arguments = mutant.command
    if runner == "pytest":
        assert all(edit.file.startswith("jax_ep/") for edit in mutant.edits)
        assert (ROOT / arguments[0]).exists()
    else:
        assert f'{{"{runner}", run_' in EXCHANGE_SEEDS
        assert all(edit.file.startswith("ffi/") for edit in mutant.edits)
        assert mutant.edits or arguments


def test_edits_do_not_cross():
    natives = [mutant for mutant in MUTANTS if mutant.is_native]
    files = {edit.file for mutant in natives for edit in mutant.edits}
    for file in sorted(files):
        text = (ROOT / file).read_text()
        assert mutants.with_branches(file, text, []) == text
        branches = mutants.with_branches(file, text, natives)
        assert branches.count("is_mutant(") == sum(edit.file == file for mutant in natives for edit in mutant.edits)


def test_every_order_has_a_mutant_or_a_reason():
    """Every row of the table in docs/design.md; and a heading of the list is a row, a paragraph or a file."""
    design = (ROOT / "docs" / "design.md").read_text()
    protocol = re.search(r"^## 5\..*?(?=^## 6\.)", design, re.DOTALL | re.MULTILINE)[0]
    table = re.search(r"^\| order \| upholds \|\n\|.*?\n((?:\|.*\n)+)", protocol, re.MULTILINE)[1]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert len(rows) > 8
    titles = [title.strip(".") for title in re.findall(r"^\*\*(.*?)\*\*", protocol, re.MULTILINE)]
    headings = {mutant.breaks for mutant in MUTANTS}
    for row in rows:
        assert any(row.startswith(heading) for heading in headings | set(REASONS)), row
    for heading in headings:
        assert heading in titles or (ROOT / heading).exists() or any(row.startswith(heading) for row in rows), heading
