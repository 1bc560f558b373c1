"""benchmarks/overlap.py, and with it the recipe of docs/overlap.md."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_trees_same_bits, load_program, run_spmd
from jax_ep.bench.timeline import Event
from shapes import SMALL, make_inputs

overlap = load_program("benchmarks/overlap.py")

TINY = ["--tokens=8", "--hidden=16", "--top-k=2", "--gemms-by=auto"]


def test_sums_of_token_rows_are_checked(capsys, monkeypatch):
    """In the layout "token", combine adds a token's rows of all ranks. Wrong sums make the program fail."""
    monkeypatch.setattr(overlap, "STEPS", 3)
    options = [*TINY, "--experts=16", "--num-sms=24", "--layout=token", "--forms", "shared expert"]
    assert overlap.main(options) == 0
    shown = capsys.readouterr().out
    assert "shared expert" in shown and "two halves" not in shown
    monkeypatch.setattr(overlap.Exchange, "after_steps", lambda exchange, x, topk_idx: x)
    assert overlap.main(options) == 1


def test_all_tokens_come_back(tmp_path, capsys, backend, monkeypatch):
    monkeypatch.setattr(overlap, "STEPS", 3)
    file = tmp_path / "overlap.json"
    num_sms = [24, None] if backend == "reference" else [None]  # each compiles for long
    sms = ["--num-sms", *(str(number or "auto") for number in num_sms)]
    assert overlap.main([*TINY, "--experts=16", *sms, f"--backend={backend}", f"--json={file}"]) == 0
    result = json.loads(file.read_text())
    assert result["checked"] is True and result["backend"] == backend and result["ranks"] == jax.device_count()
    rows = [(row["form"], row["num_sms"]) for row in result["rows"]]
    assert rows == [(form, number) for number in num_sms for form in overlap.FORMS]
    shown = capsys.readouterr().out
    assert "two halves" in shown and "auto" in shown
    on_cpu = jax.default_backend() == "cpu"
    assert ("no time line" in shown) == on_cpu
    for row in result["rows"]:
        assert ("hidden_share" not in row) == on_cpu


def test_a_wrong_result_is_found(capsys, monkeypatch):
    def forgets(*arguments):
        result, x = overlap.sequential(*arguments)
        return jax.tree.map(lambda a: a * 0, result), x

    monkeypatch.setattr(overlap, "overlapped", forgets)
    monkeypatch.setattr(overlap, "STEPS", 3)
    assert overlap.main([*TINY, "--experts=16", "--num-sms=24"]) == 1
    assert "WRONG" in capsys.readouterr().out


def chain_of_events(executions, steps, *kernels):
    """A GPU's events, of which each step has `kernels`: name, start in the step, duration; a step takes 100 us."""
    return [
        Event(name, 1e3 * (1e4 * execution + 100 * step + start), 1e3 * duration)
        for execution in range(executions)
        for step in range(steps)
        for name, start, duration in kernels
    ]


def test_times_and_shares():
    kernels = [("start_kernel", 0, 0), ("void dispatch_kernel<1>", 0, 30), ("dispatch_kernel", 30, 10)]
    kernels += [("combine_kernel", 50, 20)]
    gemms = [("gemm", 15, 20), ("wrapped_add", 65, 10)]
    gpus = [chain_of_events(overlap.EXECUTIONS, overlap.STEPS, *kernels, *gemms)] * 2
    assert overlap.step_us(gpus) == pytest.approx(100)
    assert overlap.kind_us(gpus, "dispatch") == pytest.approx(40)
    assert overlap.kind_us(gpus, "combine") == pytest.approx(20)
    assert overlap.beside_gemms(gpus) == pytest.approx((15 + 5 + 5) / 60)
    assert overlap.compute_us(gpus) == pytest.approx(overlap.STEPS * 30)


def test_the_recipe_is_differentiable(make_group, mesh):
    """Operands of a start and what is pending pass through barriers, integers among them."""
    shape = dataclasses.replace(SMALL, hidden=128, dtype="float32")
    exchange = overlap.Exchange(make_group(mesh, shape), "ragged")

    def gradients(order, x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            inputs = overlap.Inputs(x, topk_idx, topk_weights)
            y, _ = overlap.shared_expert(order, exchange, overlap.Work(1, 1), jnp.eye(128), inputs, jnp.ones((1, 128)))
            return jnp.sum(jnp.tanh(y) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, topk_weights)

    inputs = make_inputs(shape, mesh.size, "uneven")
    found, wanted = (
        run_spmd(partial(gradients, order), mesh, *inputs) for order in (overlap.overlapped, overlap.sequential)
    )
    assert_trees_same_bits(found, wanted)


def test_a_trace_with_a_gap_is_no_measurement():
    events = chain_of_events(overlap.EXECUTIONS, overlap.STEPS, ("dispatch_kernel", 0, 1))
    with pytest.raises(SystemExit, match="not a multiple of"):
        overlap.step_us([events[1:]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts=17"], f"--experts is 17; it must be a multiple of the {jax.device_count()} devices"),
        (["--tokens=7"], "--tokens is 7; it must be an even number"),
        (["--gemm-rows=0"], "--gemm-rows is 0; it must be at least 1"),
        (["--num-sms", "24", "0"], "--num-sms is 0; it must be 1 to 1024"),
        (["--experts=16", "--top-k=17"], "--top-k is 17; it must be 1 to 16, with --experts=16"),
        (["--hidden=2", "--dtype=float32"], "--hidden is 2; it must be a multiple of 4, 16 bytes in float32"),
        (["--json=nowhere/result.json"], "--json is nowhere/result.json, in a directory that does not exist"),
    ],
)
def test_impossible_options_are_named(capsys, options, message):
    with pytest.raises(SystemExit):
        overlap.main(options)
    assert message in capsys.readouterr().err


def test_measured_lengths_set_the_work(monkeypatch):
    """As many GEMMs as take the time of a dispatch and of a combine, and what hides is taken from the steps' times."""
    alone = chain_of_events(overlap.EXECUTIONS, overlap.STEPS, ("dispatch_kernel", 0, 40), ("combine_kernel", 50, 61))
    gemms = [Event("gemm", 0.0, 20e3)] * overlap.EXECUTIONS * overlap.GEMMS_TIMED
    one_by_one = chain_of_events(overlap.EXECUTIONS, overlap.STEPS, ("dispatch_kernel", 0, 40), ("gemm", 40, 60))
    one_by_one = [event._replace(start_ns=event.start_ns * 2) for event in one_by_one]
    both = chain_of_events(overlap.EXECUTIONS, overlap.STEPS, ("dispatch_kernel", 0, 40), ("gemm", 0, 75))
    traces = iter([[alone], [gemms], [one_by_one], [both]])
    chosen = []
    monkeypatch.setattr(overlap, "events_of", lambda run: next(traces))
    monkeypatch.setattr(overlap, "compile_gemms", lambda bench: None)
    monkeypatch.setattr(
        overlap, "compile_chain", lambda bench, form, order, work: chosen.append(work) or (lambda: (np.ones(2),))
    )
    row = overlap.measure(
        overlap.Bench(overlap.Exchange(None, "ragged"), overlap.Inputs(np.ones(2), None, None), None, None),
        overlap.FORMS["shared expert"],
    )
    assert chosen[1:] == [overlap.Work(2, 3)] * 2
    assert row["hidden_share"] == pytest.approx(1) and row["gemms_us"] == pytest.approx(100) and row["checked"]
    assert row["gemms_slowed"] == pytest.approx(1.25) and row["gemm_kernels"] == ["gemm"]


@pytest.mark.gpu
def test_gemms_are_those_that_were_asked_for(mesh):
    """The names of XLA's options may change, and their meaning."""
    case = overlap.Case(mesh.size, 128, 256, 2, 16, "bfloat16", None, "ragged", "uniform", None)
    kernels = {}
    with overlap.open_group(case, mesh, "auto") as group:
        bench = overlap.make_bench(group, case, gemm_rows=256)
        for by in ("cublas", "triton"):
            (events, *_) = overlap.events_of(overlap.compile_gemms(bench._replace(gemms_by=by)))
            kernels[by] = {event.name for event in events if "Memset" not in event.name}
    assert all("fusion" in name for name in kernels["triton"])
    assert not any("fusion" in name for name in kernels["cublas"])
