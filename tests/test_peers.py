"""benchmarks/peers.py: which cases run, and what happens to a case that fails or hangs. No peer is needed."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from helpers import load_program

peers = load_program("benchmarks/peers.py")

PROGRAM = """
import json, sys, time
settings = json.loads(sys.argv[1])
assert settings["ranks"] == 2 and settings["tokens"] == 8
print("a line of a library")
{body}
"""
PRINTS = 'if settings["rank"] == 0: print(json.dumps({"pair_us": 5.0, "checked": True}))'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a case of two ranks of 8 tokens. `body` is the end of each rank's program."""

    def run(body, num_sms=None, timeout=60):
        path = tmp_path / "rank.py"
        path.write_text(PROGRAM.replace("{body}", body))
        monkeypatch.setattr(peers, "RANK_PROGRAM", path)
        return peers.run_peer("v1", 2, 8, num_sms, timeout)

    return run


def test_a_row_has_the_case_and_the_times_of_rank_0(run):
    expected = {"library": "DeepEP V1", "mode": "normal", "tokens": 8, "num_sms": 24, "pair_us": 5.0, "checked": True}
    assert run(PRINTS, num_sms=24) == expected | {"note": peers.NOTES["v1"][2]}
    assert "num_sms" not in run(PRINTS)


def test_a_case_that_fails_has_no_row(run, capsys):
    assert run(f'assert settings["rank"] == 0, "broken"\n{PRINTS}') is None
    assert "broken" in capsys.readouterr().out


def test_a_case_that_hangs_is_ended(run, capsys):
    assert run('if settings["rank"] == 1: time.sleep(600)', timeout=1) is None
    assert "v1, 8 tokens, None SMs, 1.log" in capsys.readouterr().out


@pytest.mark.parametrize(
    "installed, cases",
    [
        ([], []),
        (["deep_ep"], []),
        (["torch"], ["nccl"]),
        (["torch", "deep_ep"], ["v1", "v1-low-latency", "v2", "v2-expanded", "nccl"]),
    ],
)
def test_only_cases_whose_libraries_are_installed(installed, cases, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert peers.available_cases() == cases


def test_the_low_latency_mode_takes_few_tokens_and_all_sms():
    limits = {(256, None): True, (512, None): False, (128, 24): False}
    assert {key: peers.runs("v1-low-latency", *key) for key in limits} == limits
    assert [peers.runs("nccl", 4096, num_sms) for num_sms in (None, 24)] == [True, False]
    assert peers.runs("v2", 4096, 24)


def test_rows_of_jax_ep_are_those_of_its_bench(monkeypatch):
    """The bench leaves out what does not apply, such as num_sms."""
    rows = [{"tokens": 8, "num_sms": None, "pair_us": 7.0, "hidden": 16}, {"tokens": 8, "num_sms": 24, "pair_us": 9.0}]
    commands = []

    def run(command, **options):
        commands.append(command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps(rows))

    monkeypatch.setattr(subprocess, "run", run)
    found = peers.run_jax_ep([8], [None, 24])
    expected = [{"tokens": 8, "pair_us": 7.0}, {"tokens": 8, "pair_us": 9.0, "num_sms": 24}]
    assert found == [{"library": "jax_ep", "mode": mode} | row for mode in ("ragged", "token") for row in expected]
    assert [command[command.index("--num-sms") + 1] for command in commands] == ["auto,24"] * 2
