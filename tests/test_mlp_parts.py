"""benchmarks/mlp_parts.py."""

import json
from types import SimpleNamespace

import pytest

from helpers import load_program

mlp_parts = load_program("benchmarks/mlp_parts.py")


def test_times_the_parts_and_the_layer(tmp_path, capsys):
    file = tmp_path / "mlp_parts.json"
    options = ["--model=tiny", "--experts=4", "--top-k=2", "--tokens=8", "--seconds=0.001", "--samples=1"]
    assert mlp_parts.main([*options, "--implementations=einsum,ragged_dot", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    assert str(tmp_path) not in json.dumps(report)
    rows = report["rows"]
    us = {(row["implementation"], row["part"]): row["us"] for row in rows}
    parts = ("dispatch", "gate and up", "activation", "down", "combine")
    assert list(us) == [
        *(("einsum", part) for part in (*parts, "all parts", "moe.mlp")),
        ("ragged_dot", "moe.mlp"),
    ]
    assert us["einsum", "all parts"] == pytest.approx(sum(us["einsum", part] for part in parts))
    assert all(time > 0 for time in us.values())
    assert "moe.mlp" in capsys.readouterr().out


def test_the_layout_token_has_two_more_parts(tmp_path):
    file = tmp_path / "mlp_parts.json"
    options = ["--model=tiny", "--experts=4", "--top-k=2", "--tokens=8", "--seconds=0.001", "--samples=1"]
    assert mlp_parts.main([*options, "--layout=token", "--implementations=ragged_dot", f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    in_order = ["dispatch", "expand", "gate and up", "activation", "down", "reduce", "combine", "all parts", "moe.mlp"]
    assert [row["part"] for row in rows[:9]] == in_order
    copies = [(row["part"], row["implementation"]) for row in rows[9:]]
    parts = ("expand", "reduce", "gradient of expand", "gradient of reduce")
    assert copies == [(part, name) for part in parts for name in ("kernel", "plain JAX")]


@pytest.mark.parametrize("num_local", [1, 2])
def test_experts_of_other_ranks(num_local):
    group = SimpleNamespace(num_experts=4, hidden=16, top_k=2, dtype="float32")
    _, topk_idx, *_ = mlp_parts.make_arrays(group, tokens=8, num_local=num_local, intermediate=8)
    assert ((topk_idx >= 0).sum(axis=1) == num_local).all()
