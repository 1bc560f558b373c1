"""python -m jax_ep.bench."""

import json
import subprocess
import sys

import numpy as np
import pytest

from helpers import make_mesh
from jax_ep import bench


@pytest.fixture
def case():
    return bench.Case(
        ranks=2,
        tokens=5,
        hidden=128,
        top_k=3,
        experts=8,
        dtype="float32",
        wire=None,
        layout="ragged",
        routing="uniform",
    )


@pytest.mark.parametrize("routing", bench.ROUTINGS)
@pytest.mark.parametrize(("ranks", "top_k"), [(1, 8), (4, 1), (4, 5), (8, 4)])
def test_routings_name_no_expert_twice(routing, ranks, top_k):
    case = bench.Case(ranks, 7, 128, top_k, 8, "float32", None, "ragged", routing)
    topk_idx = np.sort(bench.make_inputs(case, pairs=2).topk_idx, axis=-1)
    assert topk_idx.shape == (ranks, 2, 7, top_k)
    assert (np.diff(topk_idx) > 0).all() and topk_idx.min() >= 0 and topk_idx.max() < 8


@pytest.mark.parametrize("top_k", [1, 4, 7])
def test_skewed_sends_half_of_the_rows_to_rank_0(top_k):
    case = bench.Case(4, 8, 128, top_k, 64, "float32", None, "ragged", "skewed")
    topk_idx = bench.make_inputs(case, pairs=1).topk_idx
    assert (topk_idx < case.experts_per_rank).mean() == 0.5


class Forgetful(bench.LaxExchange):
    """Loses the first token."""

    def combine(self, y, recv):
        return super().combine(y, recv).at[0].set(0)


class Confused(bench.LaxExchange):
    """Gives each expert the rows of its neighbour."""

    def dispatch(self, x, topk_idx, topk_weights):
        return super().dispatch(x, topk_idx ^ 1, topk_weights)


@pytest.mark.parametrize(("exchange", "right"), [(bench.LaxExchange, True), (Forgetful, False), (Confused, False)])
def test_wrong_results_are_found(case, exchange, right):
    timing = bench.time_pair(exchange(case, ragged=False), case, make_mesh((2,), (bench.AXIS,)), pairs=2)
    assert timing.right is right
    assert timing.wall_pair_us > 0


@pytest.mark.parametrize(
    "options",
    ["--tokens=1,3", "--wire=fp8 --routing=skewed", "--wire=fp8_pow2 --dtype=float16 --layout=expert"],
)
def test_rows_of_the_report(tmp_path, capsys, backend, options):
    file = tmp_path / "rows.json"
    small = f"--tokens=3 --hidden=128 --top-k=2 --experts=16 --chain=2 --backend={backend} --json={file}"
    assert bench.main([*small.split(), *options.split()]) == 0
    rows = json.loads(file.read_text())
    assert [row["tokens"] for row in rows] == ([1, 3] if "1,3" in options else [3])
    for row in rows:
        assert row["checked"] is True
        assert row["wall_pair_us"] > 0 and row["lax_pair_us"] > 0
        assert row["backend"] == backend
        assert row["pair_us"] is None
    assert "WRONG" not in capsys.readouterr().out


def test_impossible_options_are_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--top-k=9", "--experts=8"])
    assert "--top-k is 9; it must be at most --experts = 8" in capsys.readouterr().err


def test_runs_as_a_command():
    sizes = ["--tokens=2", "--hidden=16", "--top-k=1", "--experts=64", "--chain=1"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jax_ep.bench", *sizes], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].endswith("yes")
