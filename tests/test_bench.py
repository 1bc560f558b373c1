"""jax-ep bench."""

import importlib.util
import json
import re
import subprocess
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jax_ep as ep
from helpers import JAX_EP, TESTS, make_mesh
from jax_ep import _native
from jax_ep.bench import balance
from jax_ep.bench.__main__ import _parse, main
from jax_ep.bench.cases import ROUTINGS, Case, make_inputs
from jax_ep.bench.exchanges import AXIS, EpExchange, LaxExchange
from jax_ep.bench.floor import combine_row_bytes, dispatch_row_bytes, measure_floor, over_network, rows_between_ranks
from jax_ep.bench.models import MODELS
from jax_ep.bench.report import LiveReport
from jax_ep.bench.timeline import KINDS, Event, TimeLine, events_of_gpus, operations_of, time_line
from jax_ep.bench.timing import _expect_operations, _expect_room, time_backward, time_forward


@pytest.fixture
def case():
    return Case(
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


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("ranks", "top_k"), [(1, 8), (4, 1), (4, 5), (8, 4)])
def test_routings_name_no_expert_twice(routing, ranks, top_k):
    case = Case(ranks, 7, 128, top_k, 8, "float32", None, "ragged", routing)
    topk_idx = np.sort(make_inputs(case).topk_idx, axis=-1)
    assert topk_idx.shape == (ranks, 7, top_k)
    assert (np.diff(topk_idx) > 0).all() and topk_idx.min() >= 0 and topk_idx.max() < 8


@pytest.mark.parametrize("top_k", [1, 4, 7])
def test_skewed_sends_half_of_the_rows_to_rank_0(top_k):
    case = Case(4, 8, 128, top_k, 64, "float32", None, "ragged", "skewed")
    assert (make_inputs(case).topk_idx < case.experts_per_rank).mean() == 0.5


class Forgetful(LaxExchange):
    """Loses the first token."""

    def combine(self, y, recv):
        return super().combine(y, recv).at[0].set(0)


class Confused(LaxExchange):
    """Gives each expert the rows of its neighbour."""

    def dispatch(self, x, topk_idx, topk_weights):
        return super().dispatch(x, topk_idx ^ 1, topk_weights)


@pytest.mark.parametrize(("exchange", "right"), [(LaxExchange, True), (Forgetful, False), (Confused, False)])
def test_wrong_results_are_found(case, exchange, right):
    timing = time_forward(exchange(case, ragged=False), case, make_mesh((2,), (AXIS,)), 2, traced=False).timing
    assert timing.right is right
    assert timing.wall.pair_us > 0
    assert timing.time_line is None


def test_what_surely_has_no_room_is_not_run():
    """On a device of this process: the others would wait for it in a collective."""
    compiled = jax.jit(lambda x: x + 1).lower(np.ones(256, np.float32)).compile()

    def mesh(stats):
        return SimpleNamespace(local_devices=[SimpleNamespace(memory_stats=lambda: stats)])

    _expect_room(compiled, mesh(None))
    _expect_room(compiled, mesh({"bytes_limit": 10_000, "bytes_in_use": 10_000 - 1024}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: 1024 bytes more do not fit"):
        _expect_room(compiled, mesh({"bytes_limit": 10_000, "bytes_in_use": 10_000 - 1023}))


class ForgetfulInReverse(EpExchange):
    """Loses the first token's gradient."""

    def backward(self, g, y, recv):
        return super().backward(g, y, recv).at[0].set(0)


@pytest.mark.parametrize(("exchange", "right"), [(EpExchange, True), (ForgetfulInReverse, False)])
def test_wrong_gradients_are_found(case, exchange, right, backend):
    mesh = make_mesh((2,), (AXIS,))
    sizes = {"num_experts": 8, "top_k": 3, "hidden": 128, "max_tokens_per_rank": 5, "dtype": "float32"}
    with ep.Group(mesh, AXIS, backend=backend, **sizes) as group:
        exchange = exchange(group, case.layout, case.wire)
        forward = time_forward(exchange, case, mesh, 2, traced=False)
        timing = time_backward(exchange, forward, mesh, 2)
    assert forward.timing.right
    assert timing.right is right


@pytest.mark.parametrize("name", [*(f"{kind}_kernel" for kind in KINDS), *balance.BALANCE_KERNELS, "replicate_kernel"])
def test_kernels_have_the_names_that_the_bench_looks_for(name):
    sources = [path.read_text() for path in (TESTS.parent / "ffi" / "cuda").glob("*.cu*")]
    assert sum(f" {name}(const __grid_constant__" in source for source in sources) == 1


DISPATCH, COMBINE = "void jax_ep::dispatch_kernel<4>(jax_ep::Peers)", "void jax_ep::combine_kernel<4>(jax_ep::Peers)"


def chain_of_events(pairs, period, begin=0):
    """Dispatches of 30 ns and combines of 40 ns, a pair every `period` ns."""
    events = []
    for start in range(begin, begin + pairs * period, period):
        events += [Event(DISPATCH, start, 30), Event(COMBINE, start + 35, 40)]
    return events


def times(*gpus, pairs):
    """The time line of the events of some GPUs, each of which is a rank."""
    return time_line([operations_of(events) for events in gpus], pairs, len(gpus))


def test_time_line_of_executions_on_several_gpus():
    """Pauses between executions do not count, nor does which GPU was seen first."""
    slow = [event for i in range(3) for event in chain_of_events(4, 3000, begin=i * 10**6)]
    fast = [event for i in range(3) for event in chain_of_events(4, 2000, begin=i * 10**6 + 17)]
    line = times(slow, fast, pairs=4)
    assert line == pytest.approx(
        TimeLine(
            pair_us=2.5,
            pair_us_fastest_rank=2.0,
            pair_us_slowest_rank=3.0,
            pair_us_median=2.5,
            pair_us_p95=3.0,
            dispatch_kernel_us=0.03,
            combine_kernel_us=0.04,
        )
    )


def test_a_slow_pair_in_a_chain():
    """The mean has a share of it, the median none."""
    events = chain_of_events(22, 2000)
    late = [event._replace(start_ns=event.start_ns + 4000) for event in events[20:]]
    line = times(events[:20] + late, events, pairs=22)
    assert line.pair_us_slowest_rank == pytest.approx((19 * 2 + 6) / 20)
    assert (line.pair_us_median, line.pair_us_p95) == pytest.approx((2.0, 2.0))
    line = times(events[:20] + late, pairs=22)
    assert line.pair_us_p95 == pytest.approx(6.0)


def test_the_first_pair_does_not_count():
    """In it, a GPU that was started before the others waits for them."""
    waits = [Event(DISPATCH, -500_000, 500_030)] + chain_of_events(4, 2000)[1:]
    assert times(waits, chain_of_events(4, 2000), pairs=4).pair_us_slowest_rank == 2.0


def test_all_work_counts():
    """What runs after a kernel, on whatever stream, is a part of its operation; what ran before the first is not."""
    events = [Event("MemcpyD2D", -50, 10)]
    for start in range(0, 3000, 1000):
        events += [
            Event("loop_convert_fusion", start + 90, 7),
            Event(DISPATCH, start, 30),
            Event("Memset", start + 10, 5),
            Event(DISPATCH, start + 32, 2),  # of the same operation
            Event(COMBINE, start + 80, 40),
            Event("gather_fusion", start + 130, 1),
        ]
    line = times(events, pairs=3)
    assert line.pair_us == 1.0
    assert line.dispatch_kernel_us == pytest.approx(0.037)
    assert line.combine_kernel_us == pytest.approx(0.048)


def test_no_time_line_without_the_kernels():
    assert times(pairs=4) is None
    assert times([Event("fusion", 0, 1)], [], pairs=4) is None
    assert times(chain_of_events(2, 1000), pairs=2) is None  # nothing to measure from start to start


def test_gpus_without_kernels_are_told_of():
    gpu, cpu = (SimpleNamespace(devices=np.array([SimpleNamespace(platform=name)])) for name in ("gpu", "cpu"))
    for traced in ([], [[], []]):
        with pytest.warns(UserWarning, match="no kernels of jax_ep on the GPUs: .* CUPTI is installed"):
            _expect_operations(traced, gpu)
    with warnings.catch_warnings(action="error"):
        _expect_operations([[], operations_of(chain_of_events(1, 1000))], gpu)
        _expect_operations([], cpu)


def test_a_broken_trace_gives_no_times():
    whole = chain_of_events(4, 1000)
    for broken in (whole[:-1], whole[:-2], []):
        with pytest.warns(UserWarning, match="the trace has 8.* operations .*, not a multiple of 8 of each of 2"):
            assert times(whole, broken, pairs=4) is None


def test_gpus_of_other_processes_do_not_count():
    """They are in a process's trace, idle."""
    gpu = operations_of(chain_of_events(4, 1000))
    expected = TimeLine(1.0, 1.0, 1.0, 1.0, 1.0, 0.03, 0.04)
    assert time_line([[], gpu, []], 4, num_ranks=1) == pytest.approx(expected)


def test_events_are_those_of_the_streams_of_gpus():
    def plane(name, line):
        return (
            f'planes {{ name: "{name}" event_metadata {{ key: 1 value {{ id: 1 name: "{DISPATCH}" }} }} lines {{ '
            f'name: "{line}" timestamp_ns: 1000 events {{ metadata_id: 1 offset_ps: 2000000 duration_ps: 3000 }} }} }}'
        )

    text = [
        plane("/device:GPU:0", "Stream #14(Compute,Memset)"),
        plane("/device:GPU:1", "XLA Ops"),
        plane("/host:CPU", "Stream #1"),
    ]
    data = jax.profiler.ProfileData
    profile = data.from_serialized_xspace(data.text_proto_to_serialized_xspace(" ".join(text)))
    assert events_of_gpus(profile) == [[Event(DISPATCH, 3000, 3)], []]


def test_rows_cross_the_link_once_per_rank():
    case = Case(2, 3, 128, 2, 4, "bfloat16", None, "ragged", "uniform")
    topk_idx = np.array([[[0, 1], [1, 2], [3, 2]], [[2, 3], [3, 2], [2, 1]]])
    np.testing.assert_array_equal(rows_between_ranks(case, topk_idx), [[0, 2], [1, 0]])


def test_few_rows_cross_a_network_once_per_far_rank():
    case = Case(4, 3, 128, 2, 4, "bfloat16", None, "ragged", "uniform")
    topk_idx = np.array([[[0, 1], [1, 2], [3, 2]], [[0, 1]] * 3, [[2, 3]] * 3, [[2, 3]] * 3])
    # Of rank 0's tokens two go to rank 2, one to rank 3, and their sums come back.
    assert over_network(case, topk_idx, node_size=2) == (3, 3 * (256 + 128))
    assert over_network(case, topk_idx, node_size=4) == (0, 0)


def test_many_rows_cross_a_network_once_per_far_node():
    case = Case(4, 33, 128, 2, 4, "bfloat16", None, "ragged", "uniform")
    there, both = [[2, 3]] * 33, [[0, 2]] * 33
    topk_idx = np.array([there, both, both, there])
    # Rank 0 sends its 33 tokens to rank 2, though to two ranks' experts, and a sum for each of rank 2's.
    assert over_network(case, topk_idx, node_size=2) == (33 + 33, 33 * (256 + 128) + 33 * 256)
    assert over_network(case, topk_idx, node_size=1)[0] > 66


@pytest.mark.parametrize(
    ("top_k", "wire", "expected"),
    [
        (1, None, 128 + 2 * 1024 + 2 * 1024),  # room for eight headers, of which one is used
        (8, None, 128 + 2 * 1024 + 2 * 1024),
        (9, None, 256 + 2 * 1024 + 2 * 1024),
        (32, None, 512 + 2 * 1024 + 2 * 1024),
        (9, "fp8", 256 + 1024 + 8 * 4 + 2 * 1024),  # a scale per 128 channels
    ],
)
def test_bytes_over_a_network(top_k, wire, expected):
    """Of a row there, with all of the room for headers, and of its sum, which has none, on the way back."""
    case = Case(2, 1, 1024, top_k, 64, "bfloat16", wire, "ragged", "uniform")
    there = np.arange(32, 32 + top_k)[None]
    assert over_network(case, np.stack([there, there - 32]), node_size=1) == (2, expected)


@pytest.mark.parametrize(
    ("dtype", "wire", "hidden", "top_k", "expected"),
    [
        ("bfloat16", None, 7168, 8, 14336 + 128),
        ("bfloat16", "fp8", 7168, 8, 7168 + 224 + 128),
        ("float32", "fp8_pow2", 128, 1, 128 + 16 + 16),
        ("bfloat16", "fp8", 2880, 8, 2880 + 96 + 128),  # 23 scales, rounded up to whole units of 16 bytes
    ],
)
def test_bytes_of_a_row(dtype, wire, hidden, top_k, expected):
    case = Case(2, 1, hidden, top_k, 32, dtype, wire, "ragged", "uniform", combine_wire=wire)
    assert dispatch_row_bytes(case) == expected
    assert combine_row_bytes(case) == expected - 16 * top_k  # without headers


@pytest.mark.gpu
def test_floor_of_the_link():
    mesh = make_mesh((2,), (AXIS,))

    def floor(tokens):
        case = Case(2, tokens, 4096, 2, 8, "bfloat16", None, "ragged", "uniform")
        return measure_floor(case, make_inputs(case).topk_idx, mesh)

    few, many = floor(1), floor(4096)
    assert 1 < few.dispatch_us < many.dispatch_us < 10_000
    assert 1 < few.combine_us < many.combine_us < 10_000
    with pytest.raises(ValueError, match="row_bytes is 24"):
        _native.cuda.link_floor([0, 1], [[0, 1], [1, 0]], 24)


@pytest.mark.parametrize(
    ("options", "num_rows"),
    [
        ("--tokens=1,3", 2),
        ("--wire=none,fp8 --routing=skewed --num-sms=auto,8 --no-lax", 4),
        ("--wire=fp8_pow2 --dtype=float16 --layout=expert --grad --no-lax", 1),
        ("--wire=fp8 --layout=token --combine-wire=fp8 --grad-wire=fp8,fp8_e5m2 --grad --no-lax", 2),
        ("--wire=mxfp8 --capacity-factor=8.25", 1),
    ],
)
def test_rows_of_the_report(tmp_path, capsys, backend, options, num_rows):
    json_file, picture = tmp_path / "rows.json", tmp_path / "pairs.png"
    small = f"--tokens=3 --hidden=128 --top-k=2 --experts=16 --chain=3 --backend={backend}"
    assert main([*small.split(), *options.split(), f"--json={json_file}", f"--plot={picture}"]) == 0
    rows = json.loads(json_file.read_text())
    assert len(rows) == num_rows
    on_gpus = backend == "cuda"
    for row in rows:
        assert row["checked"] is True
        assert row["backend"] == backend
        assert (row["processes"], row["transport"]) == (1, "nvlink" if on_gpus else None)
        assert row["wall_pair_us"] > 0 and row["wall_waiting_pair_us"] > 0
        assert (row["lax_pair_us"] is None) == ("--no-lax" in options)
        assert (row["grad_wall_pair_us"] is None) == ("--grad" not in options)
        for time in ("pair_us", "dispatch_us", "combine_us"):
            assert (row[time] is not None) == on_gpus
        assert (row["grad_pair_us"] is not None) == (on_gpus and "--grad" in options)
        assert {"floor_dispatch_us", "floor_combine_us", "floor_pair_us", "arena_bytes", "ranks", "num_sms"} <= set(row)
    assert len(capsys.readouterr().out.splitlines()) >= 1 + num_rows
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rows_that_do_not_fit_are_wrong_results(tmp_path, capsys):
    json_file = tmp_path / "rows.json"
    options = "--tokens=8 --hidden=128 --top-k=2 --experts=16 --chain=3 --backend=reference --no-lax"
    assert main([*options.split(), "--capacity-factor=0.5", f"--json={json_file}"]) == 1
    (row,) = json.loads(json_file.read_text())
    assert (row["capacity_factor"], row["checked"]) == (0.5, False)
    assert re.search(r"^\d+ rows did not fit, .* larger --capacity-factor$", capsys.readouterr().out, re.MULTILINE)


def test_balance_and_copies(tmp_path, capsys):
    """The balance of three routings, and replicate and its gradient without and with copies."""
    small = f"--tokens=6 --hidden=16 --top-k=2 --experts={2 * jax.device_count()} --expert-mb=0.001,0.002 --chain=2"
    assert balance.main([*small.split(), f"--json={tmp_path / 'rows.json'}"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["operation"] for row in rows] == ["balance"] * 3 + ["replicate", "replicate, gradient"] * 3
    assert all(row["us"] > 0 and row["checked"] for row in rows)
    assert [row["copies"] > 0 for row in rows[2:]] == [True, False, False, True, True, True, True]
    assert "WRONG" not in capsys.readouterr().out


def test_the_time_of_a_balance_is_that_of_its_kernels(monkeypatch, mesh):
    """From the start of the first kernel to the end of the last, without the first call of a chain."""

    def call(start, duration):
        names = [f"void jax_ep::{name}(jax_ep::Peers)" for name in balance.BALANCE_KERNELS]
        return [Event(name, start + 1000 * i, duration) for i, name in enumerate(names)] + [Event("copy", start, 5000)]

    gpu = call(20_000, 700) + call(0, 90_000)
    monkeypatch.setattr(balance, "trace", lambda run: [gpu, gpu])
    ranks = np.zeros((mesh.size, 1), np.float32)
    us, result = balance.time_us(lambda x: x + 1, (ranks,), mesh, balance.BALANCE_KERNELS, calls=2)
    assert us == 2.7 and (np.asarray(result) == 1).all()


def test_copies_between_ranks():
    slots = np.array([[-1, -1], [1, 0], [3, -1]])  # of three ranks with two experts each
    assert balance.copies_between_ranks(slots, 2).tolist() == [[0, 2, 0], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_sizes_of_a_model(on_cpu):
    """An option that names a size overrides the model's."""

    def sizes(*argv):
        options = _parse(argv, num_ranks=8, on_cpu=on_cpu)
        return options.hidden, options.top_k, options.experts

    for model in MODELS.values():
        assert sizes(f"--model={model.name}") == ([model.hidden], [model.top_k], [model.num_experts])
    assert sizes("--model=kimi-k3", "--hidden=256,512") == ([256, 512], [16], [896])
    assert sizes() == ([256], [4], [32]) if on_cpu else ([7168], [8], [256])


def test_live_table(capsys):
    with LiveReport(["wire", "tokens", "pair_us", "checked"], num_cases=2) as table:
        table.add({"wire": None, "tokens": 8, "pair_us": None, "checked": True})
        table.add({"wire": "fp8", "tokens": 8, "pair_us": 12.34, "checked": False})
    shown = capsys.readouterr().out
    assert "12.3" in shown and "WRONG" in shown and "none" in shown and "2/2" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--top-k=4,9 --experts=16,8", "--top-k is 9; it must be 1 to 8, with --experts=8"),
        ("--top-k=33 --experts=64", "--top-k is 33; it must be 1 to 32, with --experts=64"),
        ("--top-k=0", "--top-k is 0; it must be at least 1"),
        ("--experts=33", f"--experts is 33; it must be a multiple of the {jax.device_count()} devices"),
        ("--model=bert", "argument --model: invalid choice: 'bert'"),
        ("--model=mixtral-8x7b --top-k=9", "--top-k is 9; it must be 1 to 8, with --experts=8"),
        ("--wire=fp4", "'fp4' is no choice of this option; choose from none, fp8, fp8_pow2"),
        ("--combine-wire=fp8_pow2", "'fp8_pow2' is no choice of this option; choose from none, fp8"),
        ("--grad-wire=fp8", "--grad-wire is fp8; it needs --grad"),
        ("--capacity-factor=inf", "--capacity-factor is inf; it must be positive and finite"),
        ("--hidden=72 --grad --grad-wire=fp8", "--hidden is 72; it must be a multiple of 16, with --grad-wire=fp8"),
        ("--chain=0", "--chain is 0; it must be at least 1"),
        ("--tokens=8,0", "--tokens is 0; it must be at least 1"),
        ("--tokens=-8", "--tokens is -8; it must be at least 1"),
        ("--experts=0", "--experts is 0; it must be at least 1"),
        ("--num-sms=auto,0", "--num-sms is 0; it must be 1 to 1024"),
        ("--hidden=128,100", "--hidden is 100; it must be a multiple of 8, 16 bytes in bfloat16"),
        ("--hidden=72 --wire=none,fp8", "--hidden is 72; it must be a multiple of 16, with --wire=fp8"),
        ("--tokens=8,x", "argument --tokens: '8,x' is no list of whole numbers, such as 8,32"),
        ("--num-sms=all", "argument --num-sms: 'all' is no list of whole numbers or auto, such as 24,auto"),
        ("--json=nowhere/rows.json", "--json is nowhere/rows.json, in a directory that does not exist; make it first"),
        ("--plot=nowhere/a.png", "--plot is nowhere/a.png, in a directory that does not exist; make it first"),
        ("--json=.", "--json is ., a directory; name a file in it"),
        ("--plot=pairs.txt", "--plot is pairs.txt; it must end in ."),
    ],
)
def test_impossible_options_are_named(capsys, options, message):
    with pytest.raises(SystemExit):
        main(options.split())
    assert message in capsys.readouterr().err


def test_a_backend_that_cannot_be_used_says_why(capsys, monkeypatch):
    missing = {"cuda": ep.BackendStatus(False, "no driver; install one"), "reference": ep.BackendStatus(True, "")}
    monkeypatch.setattr(ep, "backends", lambda: missing)
    with pytest.raises(SystemExit):
        main(["--backend=cuda"])
    assert "--backend is cuda, which cannot be used here: no driver; install one" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--plot=pairs.png"])
    assert "matplotlib is not installed; pip install 'jax_ep[bench]'" in capsys.readouterr().err


def test_runs_as_a_command():
    sizes = ["--tokens=2", "--hidden=16", "--top-k=1", "--experts=64", "--chain=1"]
    done = subprocess.run([*JAX_EP, "bench", *sizes], cwd=TESTS, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("yes")
