"""scripts/: results of GPU runs, the claims and tables that documents take from them, and training curves."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
RUN = {"date": "2026-01-02T03:04:05+00:00", "commit": "abc1234", "device": "NVIDIA X", "num_devices": 2}
PRESENT = {"run": "new", "versions": {"jax": "0.11.2"}} | RUN


def script(name):
    """The module of scripts/ of this name."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


gpu_report, gpu_results, native_hash = script("gpu_report"), script("gpu_results"), script("native_hash")
compare_training, plot_results, update_tables = map(script, ("compare_training", "plot_results", "update_tables"))


def record(folder, run, *steps, **tables):
    hashes = {"native_hash": "other", "python_hash": "other"}
    gpu_results.record("2xNVIDIA-X", PRESENT | hashes | run, {"steps": list(steps)} | tables, folder)


def recorded(folder):
    return gpu_results.load("2xNVIDIA-X", folder)


# Hashes


def test_results_outlive_comments():
    """The hash that ties GPU results to sources does not change with what is not compiled."""
    source = rb"""f("// \" /*", 1);  // "one"
    /* two
       lines */ g( 2 );"""
    assert native_hash.compiled(source) == rb"""f("// \" /*", 1); g( 2 );"""


@pytest.mark.parametrize(
    ("path", "native", "python"),
    [
        ("ffi/cuda/a.cu", True, False),
        ("ffi/README.md", False, False),
        ("ffi/emulator/a.cc", False, False),
        ("CMakeLists.txt", True, False),
        ("jax_ep/bench/a.py", False, True),
        ("docs/a.py", False, False),
    ],
)
def test_hashes_are_of_what_runs_on_gpus(tmp_path, path, native, python):
    for name in ("CMakeLists.txt", "ffi/cuda/b.cu", "jax_ep/b.py", path):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    before = native_hash.native_hash(tmp_path), native_hash.python_hash(tmp_path)
    (tmp_path / path).write_text("after")
    after = native_hash.native_hash(tmp_path), native_hash.python_hash(tmp_path)
    assert (before[0] != after[0], before[1] != after[1]) == (native, python)


def test_the_hash_is_of_the_package_that_ran(tmp_path):
    """Not of this checkout, from which another version may be installed."""
    (tmp_path / "jax_ep").mkdir()
    (tmp_path / "jax_ep" / "__init__.py").write_text("")
    program = "import sys; sys.path[:0] = sys.argv[1:]; import gpu_report; print(gpu_report.package_root())"

    def package_root(*path):  # -S: without the packages of this environment
        command = [sys.executable, "-S", "-c", program, ROOT / "scripts", *path]
        return subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=True).stdout.strip()

    assert package_root(tmp_path) == str(tmp_path)
    assert package_root() == str(ROOT)  # none is installed


# Results


def test_the_newest_run_of_each_step_stays(tmp_path):
    record(tmp_path, {"run": "1"}, {"step": "tests-1", "ok": True}, {"step": "native-run", "ok": True})
    record(tmp_path, {"run": "2", "commit": "def5678"}, {"step": "tests-1", "ok": False})
    results = recorded(tmp_path)
    assert [(row["step"], row["run"], row["ok"]) for row in results["steps"]] == [
        ("native-run", "1", True),
        ("tests-1", "2", False),
    ]
    record(tmp_path, {"run": "3"}, {"step": "native-run", "ok": True})
    assert [run["run"] for run in recorded(tmp_path)["runs"]] == ["2", "3"]  # of run 1 nothing is left


def test_a_run_of_some_tests_does_not_replace_a_run_of_all(tmp_path):
    record(tmp_path, {"run": "1"}, {"step": "tests-1", "ok": True})
    record(tmp_path, {"run": "2"}, {"step": "tests-1", "ok": True, "filter": "-k combine"})
    assert [row["run"] for row in recorded(tmp_path)["steps"]] == ["1", "2"]
    record(tmp_path, {"run": "3"}, {"step": "tests-1", "ok": True})
    assert [row["run"] for row in recorded(tmp_path)["steps"]] == ["3"]


def test_the_history_keeps_the_rows_of_all_runs(tmp_path):
    def bench(pair_us):
        return [{"step": "bench-1-tokens", "tokens": 8, "wire": None, "pair_us": pair_us}]

    for run, pair_us in (("1", 11.123456), ("2", 12.0)):
        step = {"step": "bench-1-tokens", "ok": True}
        record(tmp_path, {"run": run, "date": f"2026-01-0{run}"}, step, bench=bench(pair_us))
        record(tmp_path, {"run": run, "date": f"2026-01-0{run}"}, step, bench=bench(pair_us))  # adds nothing
    (row,) = recorded(tmp_path)["bench"]
    assert row == {"step": "bench-1-tokens", "run": "2", "tokens": 8, "pair_us": 12.0}
    kept = gpu_results.history(tmp_path)
    assert [(row["date"], row["pair_us"], row["wire"]) for row in kept] == [
        ("2026-01-01", "11.123", ""),
        ("2026-01-02", "12.0", ""),
    ]


def test_the_history_tells_wire_formats_of_all_legs_apart(tmp_path):
    (tmp_path / gpu_results.HISTORY).write_text("date,wire,pair_us\n2026-01-01,fp8,11.0\n")  # without newer columns
    row = {"step": "bench-10-legs", "wire": "fp8", "grad_wire": "fp8_e5m2", "pair_us": 12.0}
    legs = [row | {"combine_wire": wire} for wire in (None, "fp8")]
    record(tmp_path, {"date": "2026-01-02"}, {"step": "bench-10-legs", "ok": True}, bench=legs)
    kept = [(row["date"], row["combine_wire"], row["grad_wire"]) for row in gpu_results.history(tmp_path)]
    assert kept == [("2026-01-01", "", ""), ("2026-01-02", "", "fp8_e5m2"), ("2026-01-02", "fp8", "fp8_e5m2")]


def test_a_file_of_results_has_a_line_per_row(tmp_path):
    record(tmp_path, {}, {"step": "tests-1", "ok": True}, {"step": "tests-2", "ok": True})
    lines = (tmp_path / "2xNVIDIA-X.json").read_text().splitlines()
    assert sum('"step"' in line for line in lines) == 2


def test_rows_of_a_table_of_tables():
    found = {"tokens": 4, "skew": [0.0], "skews": [{"skew": 0.0, "variants": [{"step_ms": 1.0}, {"step_ms": 2.0}]}]}
    assert gpu_report.rows(found) == [
        {"tokens": 4, "skew": 0.0, "step_ms": 1.0},
        {"tokens": 4, "skew": 0.0, "step_ms": 2.0},
    ]


def test_results_name_no_path_of_the_machine():
    for path in gpu_results.RESULTS.glob("*.json"):
        assert not re.search(r': "(/|[A-Z]:)', path.read_text()), path.name


def test_tracked_results_are_small():
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    files = subprocess.check_output(["git", "ls-files", "*.json"], cwd=ROOT, text=True).split()
    assert 0 < sum(len((ROOT / name).read_text().splitlines()) for name in files) < 2000


# Reports of runs


def test_results_tell_with_which_settings_each_step_ran(tmp_path):
    """Also if another call of the script has run another step with other settings."""
    logs = tmp_path / "logs"

    def check(name, **settings):
        env = {"PATH": os.environ["PATH"], "PYTHON": shutil.which("true"), "GPU_CHECK_LOGS": str(logs)}
        script = ROOT / "scripts" / "gpu_check.sh"
        done = subprocess.run([script, name], env=env | settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    logs.mkdir()
    former = logs / "tests-1.xml"
    former.write_text("an earlier run's")
    check("tests", PYTEST_ARGS="-k 'a or b=c' --durations=8 -x", CUDA_VISIBLE_DEVICES="0,1")
    check("bench-7-grad", STEP_TIMEOUT="60", BENCH_ARGS="--tokens 128")
    check("layer", PYTEST_ARGS="-k a")
    steps = {path.stem: gpu_report.step(logs, path.stem) for path in logs.glob("*.status")}
    assert all(step["ok"] for step in steps.values())
    for part in ("tests-1", "tests-2"):
        assert steps[part]["filter"] == "-k 'a or b=c'"
    for part in ("native-run", "tests-3", "processes-1", "processes-one-gpu"):
        assert gpu_report.filter_of(part, {"PYTEST_ARGS": "-m gpu"}) == ""
    assert steps["bench-7-grad"]["filter"] == "--tokens 128"
    assert not former.exists()


def test_a_step_has_the_counts_of_its_tests(tmp_path):
    (tmp_path / "tests-2.status").write_text("1 12\n")
    (tmp_path / "tests-2.log").write_text("...\n1 failed, 2 passed, 1 skipped, 7 deselected in 3.45s\n")
    (tmp_path / "tests-2.xml").write_text(
        '<testsuites><testsuite><testcase classname="c" name="fails"><failure/></testcase>'
        '<testcase classname="c" name="left out"><skipped message="why"/></testcase></testsuite></testsuites>'
    )
    assert gpu_report.step(tmp_path, "tests-2") == {
        **{"step": "tests-2", "ok": False, "seconds": 12, "status": 1},
        **{"passed": 2, "failed": 1, "skipped": 1, "deselected": 7},
        **{"failing": ["c::fails"], "skipped_because": ["why"]},
    }


def test_several_processes_have_counts_of_their_own():
    log = "[1] 3 passed, 1 skipped in 2.00s\n[0] 4 passed in 2.10s\n"
    assert gpu_report.counts(log) == {"passed": [4, 3], "skipped": [0, 1]}


def test_measured_rows_have_no_raw_samples(tmp_path):
    layer = {"tokens": 4, "device": "X", "variants": [{"variant": "ideal", "step_ms": 1.0, "samples_ms": [1.0]}]}
    (tmp_path / "layer.json").write_text(json.dumps(layer))
    (tmp_path / "processes-4-bench.json").write_text(json.dumps([{"tokens": 1, "pair_us": 2.0}]))
    assert gpu_report.measured(tmp_path, ["layer", "processes-4-bench", "tests-1"]) == {
        "train": [],
        "layer": [{"step": "layer", "tokens": 4, "variant": "ideal", "step_ms": 1.0}],
        "bench": [{"step": "processes-4-bench", "tokens": 1, "pair_us": 2.0}],
    }


# Claims


@pytest.fixture
def claims_of(tmp_path):
    """What native_hash.check says of a document, with results of 2xNVIDIA-X in this folder."""

    def check(claim):
        document = tmp_path / "document.md"
        document.write_text(f"Text. <!-- claim: {claim} -->\n")
        return native_hash.check([document], tmp_path, tmp_path)

    return check


def present():
    return {"native_hash": native_hash.native_hash(), "python_hash": native_hash.python_hash()}


def test_claims_of_the_present_need_a_run_of_the_present_sources(tmp_path, claims_of):
    record(tmp_path, present(), {"step": "tests-1", "ok": True, "filter": "-m gpu"})
    assert claims_of('2xNVIDIA-X tests-1 filter="-m gpu" at=present') == []
    for hashes in (present() | {"native_hash": "other"}, present() | {"python_hash": "other"}):
        record(tmp_path, hashes, {"step": "tests-1", "ok": True, "filter": "-m gpu"})
        (wrong,) = claims_of('2xNVIDIA-X tests-1 filter="-m gpu" at=present')
        assert "has not run with the present sources" in wrong


@pytest.mark.parametrize("at", ["present", "abc1234"])
@pytest.mark.parametrize(
    ("claim", "wrong"),
    [
        ("4xNVIDIA-X tests-1", "nothing has run on 4xNVIDIA-X"),
        ("2xNVIDIA-X tests-2", "tests-2 has not run on 2xNVIDIA-X"),
        ("2xNVIDIA-X tests-1", "tests-1 has run with the filters '-m gpu', not with ''"),
        ('2xNVIDIA-X tests-1 filter="-k combine"', "tests-1 has run with the filters '-m gpu', not with '-k combine'"),
        ("2xNVIDIA-X layer", "layer failed"),
    ],
)
def test_a_claim_without_results_fails(tmp_path, claims_of, claim, wrong, at):
    record(tmp_path, present(), {"step": "tests-1", "ok": True, "filter": "-m gpu"}, {"step": "layer", "ok": False})
    (line,) = claims_of(f"{claim} at={at}")
    assert line.endswith(wrong)


def test_a_claim_that_names_its_commit_may_be_older_than_the_sources(tmp_path, claims_of, capsys):
    record(tmp_path, {}, {"step": "tests-1", "ok": True})
    assert claims_of('2xNVIDIA-X tests-1 filter="-m gpu" at=abc1234') == []  # a run of all tests has these, too
    assert "older than the sources: document.md: 2xNVIDIA-X tests-1" in capsys.readouterr().out
    (wrong,) = claims_of("2xNVIDIA-X tests-1 at=def5678")
    assert wrong.endswith("the newest run of tests-1 is of commit abc1234, not of def5678")


def test_a_claim_must_name_steps_and_a_commit(claims_of):
    for claim in ("2xNVIDIA-X tests-1", "2xNVIDIA-X at=present"):
        with pytest.raises(ValueError, match="must name a machine, steps and at=COMMIT"):
            claims_of(claim)


def test_the_command_fails_if_a_claim_of_the_documents_has_no_results():
    """The same call as in .ci/run, here of documents as they are: all of their claims have results."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "native_hash.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Tables


def test_the_documents_have_the_tables_that_the_results_give():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "update_tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_table_names_machine_commit_and_date(tmp_path):
    row = {"step": "bench-1-tokens", "tokens": 8, "dtype": "bfloat16", "wire": "fp8"}
    times = {"dispatch_us": 7, "combine_us": 5.25, "pair_us": 12.5, "floor_pair_us": 10, "wall_pair_us": 123.4}
    record(tmp_path, {}, {"step": "bench-1-tokens", "ok": True}, bench=[row | times])
    before = "Text.\n\n<!-- table: pairs 2xNVIDIA-X -->\nold\n<!-- end of table -->\n\nMore.\n"
    after = update_tables.updated(before, tmp_path)
    assert "*2 x X, commit abc1234 (2026-01-02, jax 0.11.2), `scripts/gpu_check.sh bench-1-tokens`." in after
    assert "| 8 | fp8 | 7.0 | 5.2 | 12.5 | 10.0 | 1.25 | 123 |" in after
    assert after.startswith("Text.\n\n<!-- table:") and after.endswith("<!-- end of table -->\n\nMore.\n")
    assert update_tables.updated(after, tmp_path) == after


TIMES = {"dispatch_us": 7.0, "combine_us": 5.0, "pair_us": 12.0, "floor_pair_us": 10.0, "wall_pair_us": 13.0}


def test_one_process_and_several_processes_are_of_one_run(tmp_path):
    """Although bench-1-tokens has a newer run."""

    def bench(step, tokens, pair_us):
        return {"step": step, "dtype": "bfloat16", "wire": "fp8", "tokens": tokens, **TIMES, "pair_us": pair_us}

    alone, together = ({"step": step, "ok": True} for step in ("bench-1-tokens", "processes-4-bench"))
    rows = [
        bench("bench-1-tokens", 8, 11.5),
        bench("bench-1-tokens", 8, 99.0) | {"wire": None},
        bench("processes-4-bench", 8, 12.5),
        bench("processes-4-bench", 16, 14.5),
    ]
    record(tmp_path, {"run": "1", "date": "2026-01-01"}, alone, together, bench=rows)
    record(tmp_path, {"run": "2", "date": "2026-01-02"}, alone, bench=[bench("bench-1-tokens", 8, 10.5)])
    table = update_tables.processes(update_tables.Machine("2xNVIDIA-X", tmp_path))
    assert table.splitlines()[-2:] == ["| 8 | 7.0 | 5.0 | 12.5 | 13.0 | 11.5 |", "| 16 | 7.0 | 5.0 | 14.5 | 13.0 |  |"]


def test_a_table_of_two_runs_names_the_rows_of_the_second(tmp_path):
    shape = {"tokens": 128, "hidden": 7168, "top_k": 8, "experts": 256, "routing": "uniform", **TIMES}
    for number, (step, change) in enumerate({"bench-2-hidden": {"hidden": 64}, "bench-3-top-k": {"top_k": 1}}.items()):
        run = {"run": str(number), "date": f"2026-01-0{number + 1}", "commit": f"commit{number}"}
        record(tmp_path, run, {"step": step, "ok": True}, bench=[{"step": step} | shape | change])
    assert " Rows of commit1: top-1.*\n" in update_tables.shapes(update_tables.Machine("2xNVIDIA-X", tmp_path))


def test_a_table_without_results_is_an_error(tmp_path):
    record(tmp_path, {}, {"step": "native-run", "ok": True})
    for machine in ("2xNVIDIA-X", "4xNVIDIA-X"):
        with pytest.raises(ValueError, match=machine):
            update_tables.updated(f"<!-- table: pairs {machine} -->\n<!-- end of table -->\n", tmp_path)


def test_pictures_show_their_commits(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    plot_results.performance(tmp_path / "performance.svg")
    picture = (tmp_path / "performance.svg").read_text()
    for device, num_devices in plot_results.MACHINES:
        newest = plot_results.rows_of(device, num_devices, tokens="4096")[-1]
        assert f"{num_devices} x H200, commit {newest['commit']}, {newest['date'][:10]}" in picture


@pytest.mark.parametrize("name", ["performance.png", "history.png"])
def test_pictures_are_of_the_present_history(name):
    """scripts/plot_results.py draws them anew."""
    assert f"history.csv {plot_results.history_hash()}".encode() in (ROOT / "docs" / name).read_bytes()


# Training


def test_training_curves_that_are_apart_are_found():
    mismatches = compare_training.mismatches
    curve = np.linspace(6, 1.5, 300).tolist()

    def changed(step, difference):
        return [loss + difference if number == step else loss for number, loss in enumerate(curve, start=1)]

    assert mismatches(curve, curve) == []
    assert mismatches(curve, changed(90, 0.9e-4)) == mismatches(curve, changed(91, 0.039)) == []
    for step, difference in ((1, 2e-4), (90, -2e-4), (91, 0.05), (300, -0.05), (7, np.nan)):
        (line,) = mismatches(curve, changed(step, difference))
        assert line.startswith(f"step {step}: ")
    assert mismatches(curve, curve[:-1]) == ["one run has 300 steps, the other run has 299"]


def test_the_comparison_of_training_runs_fails_if_they_are_apart(tmp_path):
    for name, last in (("one", 2.0), ("same", 2.01), ("apart", 2.1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_moe.json").write_text(json.dumps({"loss": [6.0] * 299 + [last]}))
    command = [sys.executable, ROOT / "scripts" / "compare_training.py", tmp_path / "one"]
    for other, status in (("same", 0), ("apart", 1), ("missing", 1)):
        assert subprocess.run([*command, tmp_path / other], capture_output=True).returncode == status
