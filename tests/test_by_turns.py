"""benchmarks/by_turns.py: which times belong to one case."""

import json

import pytest

from helpers import load_program

by_turns = load_program("benchmarks/by_turns.py")


@pytest.fixture
def ran(monkeypatch):
    """The calls of a bench that takes 10 * tokens with the build "old" and 20 * tokens with any other."""
    calls = []

    def bench(folder, options):
        calls.append((folder, *options))
        tokens = [int(number) for number in options[1].split(",")]
        return [{"tokens": number, "pair_us": number * (10.0 if folder == "old" else 20.0)} for number in tokens]

    monkeypatch.setattr(by_turns, "bench", bench)
    return calls


def test_orders_of_cases_are_pooled(ran):
    times = by_turns.measure({"a": "old", "b": "new"}, ["--tokens 1,8", "--tokens 8"], 2)
    assert times == {
        "tokens=1": {"a": {"pair_us": [10.0] * 2}, "b": {"pair_us": [20.0] * 2}},
        "tokens=8": {"a": {"pair_us": [80.0] * 4}, "b": {"pair_us": [160.0] * 4}},
    }
    assert ran == [(build, "--tokens", of) for of in ("1,8", "8") for build in ("old", "new")] * 2


def test_ratios_are_to_the_first_build(ran, monkeypatch, capsys, tmp_path):
    path = tmp_path / "times.json"
    arguments = ["a=old", "b=new", "--rounds", "1", "--bench", "--tokens 8", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["by_turns.py", *arguments])
    by_turns.main()
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()] == [
        ["a", "pair_us", "80.00", "1.000"],
        ["b", "pair_us", "160.00", "2.000"],
    ]
    (row,) = json.loads(path.read_text())
    assert row == {"case": "tokens=8", "times": {"a": {"pair_us": [80.0]}, "b": {"pair_us": [160.0]}}}
