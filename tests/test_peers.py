"""benchmarks/peers.py: which cases run, and what happens to a case that fails or hangs. No other library is needed."""

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from helpers import ROOT, load_program

peers = load_program("benchmarks/peers.py")
update_tables = load_program("scripts/update_tables.py")

PROGRAM = """
import json, os, sys, time
settings, rank = json.loads(sys.argv[1]), int(os.environ["SLURM_PROCID"])
assert settings["ranks"] == 2 and settings["tokens"] == 8
open(os.path.join({folder!r}, str(os.getpid())), "w").close()
print("a line of a library")
{body}
"""
PRINTS = 'if rank == 0: print(json.dumps({"pair_us": 5.0, "checked": True}), "a warning", sep="\\n")'


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Replaces each rank's program by one that ends with `body`. Each process makes a file, named by its process id."""

    def program(body):
        path = tmp_path / "rank.py"
        path.write_text(PROGRAM.replace("{folder!r}", repr(str(tmp_path))).replace("{body}", body))
        monkeypatch.setattr(peers, "RANK_PROGRAM", path)

    return program


def run(num_sms=None, timeout=60):
    return peers.run_peer("v1", 2, 8, num_sms, timeout)


def test_a_row_has_the_case_and_the_times_of_rank_0(program):
    program(PRINTS)
    row = {"library": "DeepEP V1", "mode": "normal", "tokens": 8, "pair_us": 5.0, "checked": True}
    assert run(num_sms=24) == row | {"num_sms": 24}
    assert run() == row


def test_a_case_that_fails_has_no_row(program, capsys):
    program(f'assert rank == 0, "broken"\n{PRINTS}')
    assert run() is None
    assert "broken" in capsys.readouterr().err


def test_a_case_ends_when_one_rank_fails(program):
    program("assert rank == 0\ntime.sleep(600)")
    begun = time.monotonic()
    assert run(timeout=60) is None
    assert time.monotonic() - begun < 30


def test_a_case_that_hangs_is_ended(program, capsys, tmp_path):
    program("if rank == 1: time.sleep(600)")
    assert run(timeout=3) is None
    assert "v1, 8 tokens, all SMs failed: [" in (err := capsys.readouterr().err) and "[1] a line of a library" in err
    ids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(ids) == 2
    for process in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize(
    "installed, names",
    [
        ([], []),
        (["deep_ep"], []),
        (["torch"], ["nccl"]),
        (["torch", "deep_ep"], ["v1", "v1-low-latency", "v2", "v2-expanded", "nccl"]),
    ],
)
def test_installed_peers_are_those_whose_packages_exist(installed, names, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert peers.installed_peers() == names


def test_some_cases_take_few_tokens_only_or_no_limit_on_sms():
    cases = {(256, None): True, (512, None): False, (128, 24): False}
    assert {case: peers.is_supported("v1-low-latency", *case) for case in cases} == cases
    assert [peers.is_supported("nccl", 4096, num_sms) for num_sms in (None, 24)] == [True, False]
    assert peers.is_supported("v2", 4096, 24)


def test_each_peer_has_a_class():
    """The test parses peer_rank.py. It cannot import it, because PyTorch is not installed here."""
    tree = ast.parse((ROOT / "benchmarks" / "peer_rank.py").read_text())
    (cases,) = (node.value for node in tree.body if ast.unparse(node).startswith("CASES = "))
    assert [key.value for key in cases.keys] == list(peers.PEERS)


def test_rows_of_jax_ep_are_those_of_its_bench(monkeypatch):
    """Values that do not apply, such as num_sms, are left out. If the bench fails, there are no rows."""
    rows = [
        {"tokens": 8, "num_sms": None, "pair_us": 7.0, "checked": True, "hidden": 16},
        {"tokens": 8, "num_sms": 24, "pair_us": 9.0, "checked": True},
    ]
    commands, status = [], [0, 1]

    def run_bench(command, **options):
        commands.append(" ".join(command))
        Path(command[command.index("--json") + 1]).write_text(json.dumps(rows))
        return argparse.Namespace(returncode=status.pop(0))

    monkeypatch.setattr(subprocess, "run", run_bench)
    found = peers.run_jax_ep("token", [8, 16], [None, 24])
    expected = [{"tokens": 8, "pair_us": 7.0}, {"tokens": 8, "num_sms": 24, "pair_us": 9.0}]
    assert found == [{"library": "jax_ep", "mode": "token", "checked": True} | row for row in expected]
    assert peers.run_jax_ep("token", [8, 16], [None, 24]) == []
    for option in ("--tokens 8,16", "--num-sms auto,24", "--wire fp8", "--layout token", "--hidden 7168", "--no-lax"):
        assert option in commands[0]


@pytest.fixture
def gpus(monkeypatch):
    """Makes the program see two GPUs, PyTorch and DeepEP, and replaces the bench of jax_ep."""
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(peers, "installed_peers", lambda: list(peers.PEERS))
    monkeypatch.setattr(peers, "run_jax_ep", lambda layout, tokens, num_sms: [{"library": "jax_ep", "mode": layout}])


def test_a_failed_case_gives_status_1_and_keeps_the_other_rows(gpus, monkeypatch, tmp_path):
    def run_peer(name, num_ranks, tokens, num_sms, timeout):
        return None if name == "v2" else {"library": name, "tokens": tokens, "num_sms": num_sms}

    monkeypatch.setattr(peers, "run_peer", run_peer)
    path = tmp_path / "rows.json"
    names = ["--only", "v1", "v2", "nccl"]
    assert peers.main(["--tokens", "8", *names, "--json", str(path)]) == 1
    assert [(row["library"], row.get("num_sms")) for row in json.loads(path.read_text())] == [
        ("jax_ep", None),
        ("jax_ep", None),
        ("v1", None),
        ("v1", 24),
        ("nccl", None),
    ]
    assert peers.main(["--tokens", "8", "--only", "v1"]) == 0


def test_rows_survive_an_interrupt(gpus, monkeypatch, tmp_path):
    def run_peer(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(peers, "run_peer", run_peer)
    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        peers.main(["--json", str(path)])
    assert [row["mode"] for row in json.loads(path.read_text())] == ["ragged", "token"]


def test_without_another_library_nothing_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "installed_peers", list)
    assert peers.main(["--json", str(tmp_path / "rows.json")]) == 0
    assert not list(tmp_path.iterdir())
    assert "none of the chosen libraries is installed" in capsys.readouterr().out


def test_with_one_gpu_nothing_is_written(gpus, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys.modules["torch"].cuda, "device_count", lambda: 1)
    assert peers.main(["--json", str(tmp_path / "rows.json")]) == 0
    assert not list(tmp_path.iterdir())
    assert "found 1 GPUs" in capsys.readouterr().out


def test_a_failed_bench_of_jax_ep_gives_status_1(gpus, monkeypatch):
    monkeypatch.setattr(peers, "run_jax_ep", lambda *arguments: [])
    monkeypatch.setattr(peers, "run_peer", lambda name, *arguments: {"library": name})
    assert peers.main(["--only", "nccl"]) == 1


def test_the_table_divides_by_jax_ep_with_the_same_kind_of_rows():
    def row(library, mode, pair_us, **other):
        return {"run": "1", "tokens": 8, "library": library, "mode": mode, "pair_us": pair_us} | other

    rows = [
        row("jax_ep", "ragged", 10.0),
        row("jax_ep", "token", 5.0),
        row("jax_ep", "token", 8.0, num_sms=24),
        row("A", "low latency", 30.0),
        row("A", "normal", 10.0),
        row("A", "normal", 12.0, num_sms=24),
    ]
    machine = argparse.Namespace(rows=lambda *steps: rows, caption=lambda *arguments: "caption")
    cells = [line.split("|")[2:8] for line in update_tables.peers(machine).splitlines() if "| A |" in line]
    assert [[cell.strip() for cell in line] for line in cells] == [
        ["its choice", "token and expert", "A", "low latency", "30.0", "3.00"],
        ["all", "token and rank", "A", "normal", "10.0", "2.00"],
        ["24", "token and rank", "A", "normal", "12.0", "1.50"],
    ]
