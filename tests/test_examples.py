"""The examples, run as a user would run them: in processes of their own, on CPU devices; and the cache of decoding."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from helpers import make_mesh, to_numpy
from moe_lm import decoding, model
from test_multiprocess import ROOT, launch

EXAMPLES = ROOT / "examples"
TINY = ("--hidden=32", "--heads=2", "--expert-hidden=32", "--batch=8", "--seq-len=32", "--checkpoint-every=3")


def start(script, *options, num_devices=8, **environment):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)} | environment
    command = [sys.executable, EXAMPLES / script, *map(str, options)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    try:
        stdout, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
    return SimpleNamespace(returncode=process.returncode, stdout=stdout, stderr=stderr)


def run(script, *options, **environment):
    result = finish(start(script, *options, **environment))
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(out, *options):
    """A tiny training run: what it printed, and what it wrote."""
    stdout = run("train_moe.py", *TINY, "--out", out, *options)
    return stdout, json.loads((out / "train_moe.json").read_text())


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Six steps on the default mesh without interruption, with checkpoints: the folder, and what it wrote."""
    folder = tmp_path_factory.mktemp("whole_run")
    _, result = train(folder, "--steps", 6, "--checkpoint-dir", folder / "checkpoints")
    return folder, result


def test_moe_layer_agrees_with_a_dense_layer():
    assert float(run("moe_layer.py").split()[-1]) < 1e-5


def test_training_learns_and_reports(tmp_path):
    stdout, result = train(tmp_path, "--steps", 60, "--learning-rate", 1e-2)
    assert result["held_out_nats"] < result["unigram_nats"]
    assert f"held-out loss {result['held_out_nats']:.3f} nats/byte" in stdout
    assert "step 60/60: loss" in stdout
    assert "a sample" in stdout
    assert (tmp_path / "train_moe.png").stat().st_size > 10_000
    assert np.shape(result["load"]) == (60, 2, 8)
    np.testing.assert_allclose(np.sum(result["load"], axis=-1), 1, rtol=1e-5)
    assert sum(result["dropped"]) == 0


def assert_same_curve(result, expected):
    np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-4)
    np.testing.assert_allclose(result["held_out_nats"], expected["held_out_nats"], rtol=1e-4)


@pytest.mark.parametrize("options", [["--mesh=1x1"], ["--mesh=2x4"]], ids=" ".join)
def test_every_way_to_train_gives_the_same_curve(tmp_path, whole_run, options):
    _, result = train(tmp_path, "--steps", 6, *options)
    assert_same_curve(result, whole_run[1])


def test_a_batch_in_parts_gives_the_same_curve(tmp_path):
    """Without the balance loss: each part has its own, which is that of its tokens."""
    options = ["--steps=6", "--balance-loss=0"]
    _, whole = train(tmp_path / "whole", *options)
    _, in_parts = train(tmp_path / "in_parts", *options, "--mesh=2x2", "--accumulate=2", "--remat")
    assert_same_curve(in_parts, whole)


def test_resumed_run_gives_the_same_curve(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    options = ["--steps=6", "--mesh=2x2", "--accumulate=2", "--remat", "--dtype=bfloat16"]
    options += ["--wire=fp8", "--combine-wire=fp8_pow2", "--grad-wire=fp8", "--combine-grad-wire=fp8_e5m2"]
    options += ["--checkpoint-dir", checkpoints]
    _, whole = train(tmp_path, *options)
    shutil.rmtree(checkpoints / "6")  # as if the run had been stopped after step 3
    _, resumed = train(tmp_path, *options, "--resume")
    assert resumed["loss"] == whole["loss"]
    assert resumed["held_out_nats"] == whole["held_out_nats"]
    assert resumed["tokens_per_second"] > 0


def test_a_finished_run_is_not_overwritten(whole_run):
    result = finish(start("train_moe.py", *TINY, "--checkpoint-dir", whole_run[0] / "checkpoints"))
    assert result.returncode != 0
    assert "holds a run of 6 steps: add --resume" in result.stderr


@pytest.mark.parametrize("script", ["decode.py --wire=none", "train_moe.py --resume"])
def test_a_checkpoint_of_other_sizes_is_refused(whole_run, script):
    script, option = script.split()
    result = finish(start(script, *TINY[1:3], option, "--checkpoint-dir", whole_run[0] / "checkpoints"))
    assert result.returncode != 0
    assert "embedding has shape (256, 32) there, (256, 128) here; give --layers" in result.stderr


def test_dropped_rows_are_counted(tmp_path):
    _, result = train(tmp_path, "--steps", 2, "--capacity-factor", 0.5)
    # Half of the balanced load has room: of 8 * 32 tokens * top 2 in each of two layers, half is dropped at least.
    assert min(result["dropped"]) >= 8 * 32 * 2


def test_balanced_training_gives_the_same_curve(tmp_path, whole_run):
    """From a checkpoint of a run without --balance: optimizer states and checkpoints have home experts only."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(whole_run[0] / "checkpoints", checkpoints)
    shutil.rmtree(checkpoints / "6")
    options = ["--steps=6", "--mesh=2x4", "--remat", "--balance=0.25", "--resume", "--checkpoint-dir", checkpoints]
    _, result = train(tmp_path, *options)
    assert_same_curve(result, whole_run[1])


def test_balanced_training_drops_no_rows(tmp_path):
    """A rank has room for a balanced load only; test_dropped_rows_are_counted has too little room without --balance."""
    _, result = train(tmp_path, "--steps", 3, "--capacity-factor", 1, "--balance")
    assert result["dropped"] == [0, 0, 0]
    assert np.max(result["load"]) > 1.05 / 8  # the experts, one on each rank, are not balanced


def test_several_processes_give_the_same_curve(tmp_path, whole_run):
    options = [*TINY, "--steps=6", "--mesh=2x4", "--out", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints"]
    program = [sys.executable, EXAMPLES / "train_moe.py", *options, "--distributed"]
    done = launch(2, *program, devices=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] step 6/6" in done.stdout
    assert "[1] step" not in done.stdout
    result = json.loads((tmp_path / "train_moe.json").read_text())
    np.testing.assert_allclose(result["loss"], whole_run[1]["loss"], rtol=1e-4)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("train_moe.py", "--mesh 4x4", "--mesh 4x4 needs 16 devices; there are 8"),
        ("train_moe.py", "--batch 12", "--batch 12 must be a multiple of the mesh's 8 devices times --accumulate 1"),
        ("train_moe.py", "--batch 24 --accumulate 2", "times --accumulate 2, such as 32"),
        ("train_moe.py", "--checkpoint-every 0", "--checkpoint-every: 0 must be 1 or more"),
        ("train_moe.py", "--mesh four", "--mesh: four must be DATAxEP, such as 2x4"),
        ("train_moe.py", "--balance=-1", "--balance -1.0 must be 0 or more, such as 0.1"),
        (
            "train_moe.py",
            "--hidden 40 --combine-wire fp8",
            "--hidden 40 must be a multiple of 16 with --combine-wire, such as 48",
        ),
        ("train_moe.py", "--heads 3", "--hidden 128 must be a multiple of 24 with --heads 3"),
        ("train_moe.py", "--top-k 9", "--top-k 9 must be at most 8, with --experts 8"),
        ("train_moe.py", "--mesh 1x8 --experts 12", "--experts 12 must be a multiple of the 8 devices"),
        ("train_moe.py", f"--out {__file__}", "is a file; name a directory"),
        ("decode.py", "--checkpoint-dir nowhere", "--checkpoint-dir nowhere holds no checkpoint"),
        ("decode.py", "--prompt 96", "--prompt 96 must be less than --length 96"),
        ("decode.py", "--hidden 72", "--wire fp8 needs --hidden 72 to be a multiple of 16; use --wire none"),
        ("decode.py", "--backend cuda", "--backend cuda cannot be used here"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the messages are for eight CPU devices")
def test_a_wrong_option_is_named(script, options, message, monkeypatch, capsys):
    """In this process, which need not import JAX again: the programs check their options first."""
    monkeypatch.setattr(sys, "argv", [script, *options.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("framework", ["flax", "equinox"])
def test_a_frameworks_layer_learns(framework):
    pytest.importorskip(framework)
    # XLA optimizes here also in CI: the steps take longer than the compilation.
    stdout = run(f"{framework}_moe.py", XLA_FLAGS="")
    losses = re.findall(r"loss (\S+) nats", stdout)
    assert float(losses[-1]) < 2.6 < float(losses[0])
    assert "gate_up of all layers: (2, 16, 128, 512); on each device (2, 2, 128, 512)" in stdout


def test_decoding_tells_its_speed():
    stdout = run("decode.py", "--prompt=4", "--length=10")
    assert re.findall(r"^ *(\d+) per device: .* ms per step, .* tokens/s$", stdout, re.MULTILINE) == ["1", "8", "64"]


def test_decoding_with_a_training_runs_weights(whole_run):
    sizes = "--hidden=32", "--heads=2", "--expert-hidden=32"
    speed = "--wire=none", "--dtype=float32", "--batch=2", "--prompt=8", "--length=40"
    stdout = run("decode.py", *sizes, *speed, "--checkpoint-dir", whole_run[0] / "checkpoints")
    assert "the first sequence; its first 8 bytes are the prompt" in stdout


def test_decoding_with_a_cache_equals_reading_the_whole_text(backend):
    """Logits of every position, byte by byte through the cache and all at once."""
    mesh = make_mesh((1, 2), model.AXES)
    cfg = model.Config(layers=2, hidden=32, heads=2, experts=4, top_k=2, expert_hidden=32, dtype=np.dtype("float32"))
    params = model.init(jax.random.key(0), cfg)
    text = np.random.default_rng(0).integers(256, size=(4, 4), dtype=np.int32)
    settings = {"num_experts": cfg.experts, "top_k": cfg.top_k, "hidden": cfg.hidden, "dtype": cfg.dtype}

    def at_once(params, text):
        return model.forward(params, text, cfg, group)[0]

    def byte_by_byte(params, text):
        params = decoding.serving(params, cfg)
        cache = decoding.empty_cache(*text.shape, cfg)
        logits = []
        for position in range(text.shape[1]):
            following, cache = decoding.step(params, cache, text[:, position], jnp.int32(position), cfg, group)
            logits.append(following)
        return jnp.stack(logits, axis=1)

    specs = model.partition_specs(params), P(model.AXES)
    with (
        ep.Group(mesh, max_tokens_per_rank=text.size, backend=backend, **settings) as group,
        jax.default_matmul_precision("highest"),
    ):
        expected, actual = (
            to_numpy(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[1]))(params, text))
            for f in (at_once, byte_by_byte)
        )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
