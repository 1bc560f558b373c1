"""Trains a byte-level mixture-of-experts language model on the Python standard library's own sources.

    python examples/train_moe.py                                    # this machine's GPUs, else 8 virtual CPU devices
    python examples/train_moe.py --mesh 2x4 --capacity-factor 1.25  # two groups of four ranks, with dropping
    python examples/train_moe.py --balance                          # all ranks compute equally many rows, none dropped
    python examples/train_moe.py --checkpoint-dir run --resume      # continues from the latest checkpoint
    python examples/train_moe.py --hidden 2048 --heads 16 --experts 64 --top-k 8 --layers 4 --expert-hidden 1024 \
        --seq-len 1024 --batch 64 --accumulate 4 --remat --capacity-factor 2 --learning-rate 3e-4   # for several GPUs

A place to start a real project from: moe_lm/model.py holds the model, whose MoE layers are jax_ep.moe.route and
jax_ep.moe.mlp; this file holds the sharding, the training step and the options.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from moe_lm import corpus, model
from moe_lm.checkpoints import Checkpoints
from moe_lm.options import model_mismatches, positive
from moe_lm.report import Report

BATCH = P(model.AXES)  # windows of text are split over all devices
PARTS = P(None, *BATCH)  # the leading axis is the parts of a step
HELD_OUT_BATCHES = 16
SAMPLE_BYTES = 256
# The wire arguments of ep.moe.mlp, and the rows that each casts. The options have the same names.
WIRE_ARGUMENTS = {
    "wire": "tokens on their way to the experts",
    "combine_wire": "the experts' outputs on their way back",
    "combine_grad_wire": "the cotangents of the layer's output on their way to the experts",
    "grad_wire": "the cotangents of tokens on their way back",
}
FORMATS = ["none", "fp8", "fp8_pow2"]
GRAD_FORMATS = [*FORMATS, "fp8_e5m2"]


class Programs(NamedTuple):
    """The jitted programs of a run. A state is {"params", "optimizer"}; a window is int32 [seq_len + 1]."""

    init: Callable  # key -> state
    train_step: Callable  # state (donated), windows [parts, batch / parts] -> state, metrics of the step
    evaluate: Callable  # params, windows [batch / parts] -> nats per byte
    sample: Callable  # params, prompts [devices, seq_len], key -> [devices, SAMPLE_BYTES]


def make_programs(cfg: model.Config, group: ep.Group, optimizer: optax.GradientTransformation) -> Programs:
    def init(key):
        params = model.init(key, cfg)
        return {"params": params, "optimizer": optimizer.init(params)}

    specs = model.partition_specs(jax.eval_shape(init, jax.random.key(0)))
    shardings = jax.tree.map(partial(NamedSharding, group.mesh), specs)
    loss = jax.shard_map(
        partial(model.loss, cfg=cfg, group=group),
        mesh=group.mesh,
        in_specs=(specs["params"], BATCH),
        out_specs=P(),
    )
    sample = jax.shard_map(
        partial(model.sample, num_bytes=SAMPLE_BYTES, cfg=cfg, group=group),
        mesh=group.mesh,
        in_specs=(specs["params"], BATCH, P()),
        out_specs=BATCH,
    )

    def train_step(state, windows):
        def add_gradients(total, part):
            # shard_map's transpose sums each gradient over the devices that its parameter is replicated on.
            grads, metrics = jax.grad(loss, has_aux=True)(state["params"], part)
            return jax.tree.map(jnp.add, total, grads), metrics

        # The parts run one after another, so only one part's activations are in memory.
        total, metrics = jax.lax.scan(add_gradients, jax.tree.map(jnp.zeros_like, state["params"]), windows)
        grads = jax.tree.map(lambda g: g / len(windows), total)
        metrics["grad_norm"] = optax.global_norm(grads)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, metrics

    return Programs(
        init=jax.jit(init, out_shardings=shardings),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)),
        evaluate=jax.jit(lambda params, windows: loss(params, windows)[1]["nats"]),
        sample=jax.jit(sample),
    )


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.learning_rate,
        warmup_steps=max(1, options.steps // 10),
        decay_steps=max(2, options.steps),  # includes the warm-up
        end_value=options.learning_rate / 10,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


def run(options: argparse.Namespace, cfg: model.Config, group: ep.Group) -> None:
    """Trains, evaluates on held-out text, and writes the report and a sample."""
    programs = make_programs(cfg, group, make_optimizer(options))
    parts = options.accumulate
    by_part, sharding = (NamedSharding(group.mesh, spec) for spec in (PARTS, BATCH))
    state, history, checkpoints = initial_state(options, programs)
    report = Report(
        steps=options.steps,
        tokens_per_step=options.batch * options.seq_len,
        history=history,
        loud=jax.process_index() == 0,
    )
    report.console.print(describe(state["params"], cfg, group))
    with report:
        for step in range(len(history["loss"]), options.steps):
            shape = parts, options.batch // parts, options.seq_len + 1
            windows = corpus.training_batch(options.seed, step, shape, by_part)
            state, metrics = programs.train_step(state, windows)
            report.step(jax.device_get(metrics))
            done = step + 1
            if checkpoints and (done % options.checkpoint_every == 0 or done == options.steps):
                checkpoints.save(done, state, history)
    if checkpoints:
        checkpoints.close()

    shape = HELD_OUT_BATCHES * parts, options.batch // parts, options.seq_len + 1
    held_out = corpus.held_out_batches(shape, sharding)
    losses = [programs.evaluate(state["params"], windows).item() for windows in held_out]
    _, text = corpus.load()
    report.write(options.out, held_out=float(np.mean(losses)), unigram=corpus.unigram_entropy(text))

    # All devices continue the same prompt, because an MoE layer must run on all devices.
    prompts = corpus.windows(text, np.zeros(group.mesh.size, int), options.seq_len, sharding)
    samples = programs.sample(state["params"], prompts, jax.random.key(options.seed))
    report.sample(*(bytes(x.addressable_data(0)[0].tolist()) for x in (prompts, samples)))


def initial_state(options: argparse.Namespace, programs: Programs) -> tuple[dict, dict, Checkpoints | None]:
    """Returns a new state, or the state of the latest checkpoint, with the history of its steps."""
    state = programs.init(jax.random.key(options.seed))
    history = {"loss": [], "grad_norm": [], "dropped": [], "load": []}
    if options.checkpoint_dir is None:
        return state, history, None
    checkpoints = Checkpoints(options.checkpoint_dir)
    if checkpoints.latest() is None:
        return state, history, checkpoints
    if not options.resume:
        raise SystemExit(
            f"--checkpoint-dir {options.checkpoint_dir} holds a run of {checkpoints.latest()} steps: "
            "add --resume to continue it, or name another directory"
        )
    state, restored = checkpoints.restore(state)
    steps = len(restored["loss"])
    return state, {name: restored.get(name, [math.nan] * steps) for name in history}, checkpoints


def describe(params: dict, cfg: model.Config, group: ep.Group) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in group.mesh.shape.items())
    total = sum(p.size for p in jax.tree.leaves(params))
    inactive = sum(p.size for p in jax.tree.leaves(params["layers"]["experts"])) * (1 - cfg.top_k / cfg.experts)
    train, held_out = (len(text) / 1e6 for text in corpus.load())
    return (
        f"{group.mesh.size} {group.mesh.devices.flat[0].device_kind} devices, mesh {mesh}, {group.backend} backend\n"
        f"{total / 1e6:.2f} M parameters, {(total - inactive) / 1e6:.2f} M active per token: {cfg.layers} layers of "
        f"{cfg.experts} experts, top {cfg.top_k}, hidden {cfg.hidden}\n"
        f"text: {train:.1f} MB of Python's standard library, {held_out:.1f} MB more held out"
    )


def start_devices(distributed: list[str] | None) -> None:
    """Joins the processes of a distributed run. Otherwise, a process without GPUs gets 8 virtual CPU devices."""
    if distributed is not None:
        address, *numbers = distributed or [None]
        jax.distributed.initialize(address, *map(int, numbers))
    elif "JAX_NUM_CPU_DEVICES" not in os.environ and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)


def default_mesh(experts: int) -> tuple[int, int]:
    """Returns the mesh in which the experts have the most ranks: the number must divide the devices and the experts."""
    ranks = math.gcd(jax.device_count(), experts)
    return jax.device_count() // ranks, ranks


def mesh_shape(text: str) -> tuple[int, int]:
    if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text} must be DATAxEP, such as 2x4")
    data, ranks = text.split("x")
    return int(data), int(ranks)


def mismatches(options: argparse.Namespace) -> Iterator[str]:
    """Yields a message for each wrong option, with a correct value."""
    shape, devices = options.mesh, jax.device_count()
    yield from model_mismatches(options, ranks=shape[1])
    if math.prod(shape) > devices:
        yield f"--mesh {shape[0]}x{shape[1]} needs {math.prod(shape)} devices; there are {devices}"
    unit = math.prod(shape) * options.accumulate
    if options.batch % unit:
        yield (
            f"--batch {options.batch} must be a multiple of the mesh's {math.prod(shape)} devices times "
            f"--accumulate {options.accumulate}, such as {-(-options.batch // unit) * unit}"
        )
    for argument in WIRE_ARGUMENTS:
        if getattr(options, argument) != "none" and options.hidden % 16:
            yield (
                f"--hidden {options.hidden} must be a multiple of 16 with --{argument.replace('_', '-')}, such as "
                f"{-(-options.hidden // 16) * 16}"
            )
    if options.balance is not None and not 0 <= options.balance < math.inf:
        yield f"--balance {options.balance} must be 0 or more, such as 0.1"
    if options.seed < 0:
        yield f"--seed {options.seed} must be 0 or more"
    if options.resume and options.checkpoint_dir is None:
        yield "--resume needs --checkpoint-dir"
    for name, path in (("--out", options.out), ("--checkpoint-dir", options.checkpoint_dir)):
        if path and path.is_file():
            yield f"{name} {path} is a file; name a directory"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])

    def add_number(name, default, meaning):
        parser.add_argument(name, type=positive(type(default)), default=default, help=f"{meaning} ({default})")

    add_number("--steps", 400, "training steps")
    add_number("--batch", 16, "windows of text per step, over all devices")
    add_number("--accumulate", 1, "parts of a batch, which run one after another, each with its own balance loss")
    add_number("--seq-len", 128, "bytes of a window")
    add_number("--learning-rate", 3e-3, "learning rate at the end of the warm-up")
    add_number("--layers", 2, "transformer blocks")
    add_number("--hidden", 128, "channels of a token")
    add_number("--heads", 4, "attention heads")
    add_number("--experts", 8, "experts of a layer")
    add_number("--top-k", 2, "experts per token")
    add_number("--expert-hidden", 256, "channels inside an expert")
    add_number("--checkpoint-every", 100, "steps between checkpoints")
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of parameters, batches and the sample (0)")
    add("--balance-loss", type=float, default=0.02, help="weight of the load-balancing loss (0.02)")
    add(
        "--balance",
        type=float,
        nargs="?",
        const=0.0,
        metavar="TOLERANCE",
        help="copy experts to other ranks in each layer, so that no rank has more than its share of the rows, plus "
        "this fraction of it (0 without a value)",
    )
    add("--checkpoint-dir", type=Path, help="directory of checkpoints (writes none)")
    add("--resume", action="store_true", help="continue from the latest checkpoint, if there is one")
    add("--out", type=Path, default=Path("out"), help="directory of train_moe.json and train_moe.png (out)")
    add(
        "--capacity-factor",
        type=positive(float),
        help="capacity of a rank, divided by its rows under a balanced load (room for all rows)",
    )
    for argument, rows in WIRE_ARGUMENTS.items():
        formats = GRAD_FORMATS if argument.endswith("grad_wire") else FORMATS
        name = f"--{argument.replace('_', '-')}"
        add(name, choices=formats, default="none", help=f"wire format of {rows} (none)")
    add("--remat", action="store_true", help="compute layers again in the backward pass, to save memory")
    add("--dtype", choices=["bfloat16", "float32"], help="of activations (bfloat16 on GPUs, else float32)")
    add("--backend", default="auto", choices=["auto", "cuda", "collectives", "reference"], help="of jax_ep (auto)")
    add("--mesh", type=mesh_shape, metavar="DATAxEP", help="shape (EP as large as devices and experts allow)")
    add(
        "--distributed",
        nargs="*",
        metavar="ADDRESS NUM_PROCESSES PROCESS_ID",
        help="run as one of several processes; without values, Slurm or MPI describes them (one process)",
    )
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.distributed and not re.fullmatch(r"\S+ \d+ \d+", " ".join(options.distributed)):
        parser.error("--distributed takes ADDRESS NUM_PROCESSES PROCESS_ID, or nothing")
    start_devices(options.distributed)
    options.mesh = options.mesh or default_mesh(options.experts)
    for wrong in mismatches(options):
        parser.error(wrong)
    mesh = jax.make_mesh(options.mesh, model.AXES)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    cfg = model.Config(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        experts=options.experts,
        top_k=options.top_k,
        expert_hidden=options.expert_hidden,
        capacity_factor=options.capacity_factor,
        balance_loss=options.balance_loss,
        balance=options.balance,
        remat=options.remat,
        wires=tuple((name, wire) for name in WIRE_ARGUMENTS if (wire := getattr(options, name)) != "none"),
        dtype=jnp.dtype(options.dtype or ("bfloat16" if on_gpu else "float32")),
    )
    group = ep.Group(
        mesh,
        num_experts=cfg.experts,
        top_k=cfg.top_k,
        hidden=cfg.hidden,
        max_tokens_per_rank=options.batch // options.accumulate * options.seq_len // mesh.size,
        dtype=cfg.dtype,
        backend=options.backend,
        replicas=0 if options.balance is None else cfg.experts // options.mesh[1],
    )
    with group:
        run(options, cfg, group)


if __name__ == "__main__":
    main()
