"""benchmarks/moe_step.py."""

import json

import jax
import numpy as np
import pytest

import jax_ep as ep
from helpers import load_program
from jax_ep.bench.cases import Case

moe_step = load_program("benchmarks/moe_step.py")

TINY = ["--tokens=16", "--hidden=32", "--expert-hidden=16", "--experts=16", "--top-k=3", "--capacity-factor=4"]


@pytest.mark.parametrize("compute", ["einsum", "ragged_dot"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_variants_give_the_same_loss_and_gradients(tmp_path, capsys, backend, compute, dtype):
    file = tmp_path / "moe_step.json"
    options = [f"--compute={compute}", f"--dtype={dtype}", f"--backend={backend}", f"--json={file}"]
    with jax.default_matmul_precision("highest"):
        assert moe_step.main([*TINY, "--samples=1", *options]) == 0
    result = json.loads(file.read_text())
    assert result["checked"] is True and result["backend"] == backend and result["ranks"] == jax.device_count()
    shown = capsys.readouterr().out
    rows = {row["variant"]: row for row in result["variants"]}
    assert {"all_to_all", "jax_ep", "ideal"} <= set(rows)
    assert ("ragged_all_to_all" in rows) == (jax.default_backend() != "cpu")
    for name, row in rows.items():
        assert name in shown
        assert row["step_ms"] > 0 and row["executable_bytes"] > 0
        assert (row["group_bytes"] > 0) == (name == "jax_ep" and backend == "cuda")
        assert row["overhead_ms"] == pytest.approx(row["step_ms"] - rows["ideal"]["step_ms"])
        if dtype == "float32":
            assert row["difference"] < 1e-4


def test_skewed_routing(tmp_path, capsys, backend):
    """Balanced: every rank has the same rows, in a buffer of T * K. Otherwise rows are dropped, or memory is."""
    file = tmp_path / "moe_step.json"
    skews = [0, 1.5, "hot"] if backend == "reference" else [0, "hot"]  # each runs for long
    options = ["--dtype=float32", f"--backend={backend}", f"--json={file}", "--samples=1", "--skew", *map(str, skews)]
    with jax.default_matmul_precision("highest"):
        assert moe_step.main([*TINY[:-1], "--capacity-factor=1.25", *options]) == 0
    result = json.loads(file.read_text())
    assert result["checked"] is True and result["backend"] == backend
    shown = capsys.readouterr().out
    assert [skew["skew"] for skew in result["skews"]] == skews
    ranks = jax.device_count()
    for skew in result["skews"]:
        rows = {row["variant"]: row for row in skew["variants"]}
        assert skew["difference"] < 1e-4
        balanced, worst_case, dropping = rows["balanced"], rows["worst_case"], rows["dropping"]
        assert balanced["busiest_rows"] == balanced["mean_rows"] == balanced["buffer_rows"] == 16 * 3
        assert worst_case["buffer_rows"] == ranks * 16 * min(3, 16 // ranks) and worst_case["mean_rows"] == 16 * 3
        assert balanced["dropped_rows"] == worst_case["dropped_rows"] == 0
        assert dropping["buffer_rows"] == 60 >= dropping["busiest_rows"]
        assert dropping["dropped_rows"] == ranks * 16 * 3 - dropping["mean_rows"] * ranks
        assert (balanced["copies"] > 0) == (worst_case["busiest_rows"] > 16 * 3)
        assert worst_case["copies"] == dropping["copies"] == 0
        assert all(row["step_ms"] > 0 and row["variant"] in shown for row in skew["variants"])
    assert dropping["dropped_rows"] > 0 and ranks > 1
    # The program is the same for all skews, and so is its memory.
    for variant in range(3):
        assert len({skew["variants"][variant]["executable_bytes"] for skew in result["skews"]}) == 1


class Forgetful(moe_step.LocalExchange):
    """Loses the first token."""

    def combine(self, y, recv):
        return super().combine(y, recv).at[0].set(0)


def test_a_wrong_variant_is_found(capsys, monkeypatch):
    monkeypatch.setattr(moe_step, "LocalExchange", Forgetful)
    assert moe_step.main([*TINY, "--samples=1", "--dtype=float32"]) == 1
    assert "WRONG: a difference is larger than 0.001" in capsys.readouterr().out


def test_the_load_that_must_fit():
    case = Case(2, 2, 128, 2, 4, "float32", None, "expert", "router")
    even = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    assert moe_step.needed_capacity_factor(even, case) == 1
    one_expert = np.array([[[0, 1], [2, 3]], [[0, 2], [0, 3]]])  # expert 0 gets 3 of 8 rows
    assert moe_step.needed_capacity_factor(one_expert, case) == 1.5
    one_local_expert = np.array([[[0, 2], [0, 2]], [[1, 3], [1, 3]]])  # the ideal's rank 0 gives all to one expert
    assert moe_step.needed_capacity_factor(one_local_expert, case) == 2
    one_pair = np.array([[[0, 1], [0, 1]], [[2, 3], [2, 3]]])  # all rows stay on their rank
    assert moe_step.needed_capacity_factor(one_pair, case) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--capacity-factor=0.5", "--capacity-factor is 0.5; this routing needs "),
        ("--top-k=17", "--top-k is 17; it must be 1 to 16, with --experts=16"),
        ("--hidden=12", "--hidden is 12; it must be a multiple of 8, 16 bytes in bfloat16"),
        ("--tokens=0", "--tokens is 0; it must be at least 1"),
        ("--json=nowhere/result.json", "--json is nowhere/result.json, in a directory that does not exist"),
        ("--experts=17", f"--experts is 17; it must be a multiple of the {jax.device_count()} devices"),
        ("--skew=-1", "--skew: -1 must be 0 or more, or hot"),
        ("--tolerance=-1", "--tolerance is -1.0; it must be 0 or more"),
        ("--replicas=99", "--replicas is 99; it must be at most "),
        ("--samples=0", "--samples is 0; it must be at least 1"),
    ],
)
def test_impossible_options_are_named(capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        moe_step.main([*TINY, options])
    assert message in f"{exit.value}{capsys.readouterr().err}"


def test_a_backend_that_cannot_be_used_says_why(capsys, monkeypatch):
    missing = {"cuda": ep.BackendStatus(False, "no driver; install one"), "reference": ep.BackendStatus(True, "")}
    monkeypatch.setattr(ep, "backends", lambda: missing)
    with pytest.raises(SystemExit):
        moe_step.main([*TINY, "--backend=cuda"])
    assert "--backend is cuda, which cannot be used here: no driver; install one" in capsys.readouterr().err
