"""benchmarks/by_turns.py: which times belong to one case, and what the ratio of a case is."""

import json
import shlex

import pytest

from helpers import load_program

by_turns = load_program("benchmarks/by_turns.py")


@pytest.fixture
def bench_calls(monkeypatch):
    """The calls of a bench whose times follow from its arguments. The build "old" has no setting combine_wire."""
    calls = []

    def bench(folder, options):
        calls.append((folder, *options))
        routing, tokens = options[1], [int(number) for number in options[3].split(",")]
        newer = {} if folder == "old" else {"combine_wire": None}
        us = (10.0 if folder == "old" else 20.0) * len(tokens)
        return [{"tokens": number, "routing": routing, "pair_us": us * number} | newer for number in tokens]

    monkeypatch.setattr(by_turns, "bench", bench)
    return calls


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["by_turns.py", "a=old", "b=new", *arguments])
    by_turns.main()


def test_a_case_has_the_times_of_each_bench(bench_calls):
    benches = ["--routing uniform --tokens 1,8", "--routing uniform --tokens 8", "--routing skewed --tokens 8"]
    times = by_turns.measure({"a": "old", "b": "new"}, benches, 2)
    assert times == {
        "tokens=1 routing=uniform": {
            "a": {"pair_us": [[20.0, 20.0], [], []]},
            "b": {"pair_us": [[40.0, 40.0], [], []]},
        },
        "tokens=8 routing=uniform": {
            "a": {"pair_us": [[160.0, 160.0], [80.0, 80.0], []]},
            "b": {"pair_us": [[320.0, 320.0], [160.0, 160.0], []]},
        },
        "tokens=8 routing=skewed": {
            "a": {"pair_us": [[], [], [80.0, 80.0]]},
            "b": {"pair_us": [[], [], [160.0, 160.0]]},
        },
    }
    assert bench_calls == [(build, *shlex.split(options)) for options in benches for build in ("old", "new")] * 2


def test_gradients_are_cases_of_their_own():
    assert by_turns.case_of({"tokens": 8, "grad_wire": None, "grad_pair_us": 1.0}) == "tokens=8 grad=True"
    assert by_turns.case_of({"tokens": 8, "grad_pair_us": None}) == "tokens=8"


def test_a_ratio_is_the_geometric_mean_of_the_ratios_of_all_benches():
    assert by_turns.summary([[2.0, 4.0, 9.0], [8.0], [5.0]], [[1.0, 2.0, 100.0], [8.0], []]).split() == [
        "5.67",
        "1.414",
    ]
    assert by_turns.summary([[2.0]], [[]]).split() == ["2.00", "-"]


def test_ratios_are_to_the_first_build(bench_calls, monkeypatch, capsys, tmp_path):
    path = tmp_path / "times.json"
    run(monkeypatch, "--rounds", "1", "--bench", "--routing uniform --tokens 8", "--json", str(path))
    assert [line.split()[2:] for line in capsys.readouterr().out.splitlines()] == [
        ["a", "pair_us", "80.00", "1.000"],
        ["b", "pair_us", "160.00", "2.000"],
    ]
    (row,) = json.loads(path.read_text())
    assert row == {
        "case": "tokens=8 routing=uniform",
        "times": {"a": {"pair_us": [[80.0]]}, "b": {"pair_us": [[160.0]]}},
    }
