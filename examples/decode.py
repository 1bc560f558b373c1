"""Decodes greedily with a byte-level mixture-of-experts language model, at several numbers of sequences per device.

    python examples/decode.py                         # this machine's GPUs, else 8 virtual CPU devices
    python examples/decode.py --checkpoint-dir run    # with weights of train_moe.py --checkpoint-dir run; else random
    python examples/decode.py --batch 1 --wire none   # one sequence per device; rows travel in the activations' dtype

The core of a server: moe_lm/decoding.py holds the step with its cache of keys and values, whose MoE layers send fp8
rows to the experts; this file holds the loop.
"""

import argparse
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for machines without GPUs

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from moe_lm import corpus, decoding, model
from moe_lm.checkpoints import Checkpoints
from moe_lm.options import model_mismatches, positive

SEQUENCES = P("ep")  # each device decodes its own sequences


def make_params(cfg: model.Config, mesh: jax.sharding.Mesh, checkpoint_dir: Path | None) -> dict:
    """Returns the parameters of the latest checkpoint, or random ones, in the form that `decoding.step` takes."""

    def init(key):
        return model.init(key, cfg)

    specs = model.partition_specs(jax.eval_shape(init, jax.random.key(0)))
    params = jax.jit(init, out_shardings=jax.tree.map(partial(NamedSharding, mesh), specs))(jax.random.key(0))
    if checkpoint_dir is not None:
        params = Checkpoints(checkpoint_dir).restore({"params": params})[0]["params"]
    return jax.jit(partial(decoding.serving, cfg=cfg))(params)


def make_step(params: dict, cfg: model.Config, group: ep.Group, wire: str | None):
    """Compiles (params, cache (donated), bytes read [B], position) -> (next bytes [B], cache)."""

    def step(params, cache, read, position):
        logits, cache = decoding.step(params, cache, read, position, cfg, group, wire)
        return jnp.argmax(logits, axis=-1).astype(read.dtype), cache

    specs = jax.tree.map(lambda p: p.sharding.spec, params)
    in_specs = specs, SEQUENCES, SEQUENCES, P()
    mapped = jax.shard_map(step, mesh=group.mesh, in_specs=in_specs, out_specs=(SEQUENCES, SEQUENCES))
    return jax.jit(mapped, donate_argnums=1)


def decode(step, params: dict, prompts: np.ndarray, length: int, cfg: model.Config, mesh: jax.sharding.Mesh):
    """Continues prompts, uint8 [B, S], to `length` bytes. Returns the bytes [B, length], and each step's seconds."""
    sharding = NamedSharding(mesh, SEQUENCES)
    cache = jax.jit(partial(decoding.empty_cache, len(prompts), length, cfg), out_shardings=sharding)()
    text, seconds = np.zeros((len(prompts), length), np.int32), []
    text[:, : prompts.shape[1]] = prompts
    for position in range(length - 1):
        begun = time.perf_counter()
        following, cache = step(params, cache, jax.device_put(text[:, position], sharding), position)
        following = np.asarray(following)  # a server also needs the bytes on the host after each step
        seconds.append(time.perf_counter() - begun)
        if position + 1 >= prompts.shape[1]:
            text[:, position + 1] = following
    return text, seconds


def mismatches(options: argparse.Namespace) -> Iterator[str]:
    """Yields a message for each wrong option, with a correct value."""
    yield from model_mismatches(options, ranks=jax.device_count())
    if options.prompt >= options.length:
        yield f"--prompt {options.prompt} must be less than --length {options.length}"
    if options.wire != "none" and options.hidden % 16:
        yield f"--wire {options.wire} needs --hidden {options.hidden} to be a multiple of 16; use --wire none"
    if options.checkpoint_dir and not Checkpoints.are_in(options.checkpoint_dir):
        yield (
            f"--checkpoint-dir {options.checkpoint_dir} holds no checkpoint; name a directory that "
            "train_moe.py --checkpoint-dir has written to"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--batch",
        type=positive(int),
        nargs="+",
        default=[1, 8, 64],
        help="sequences per device; several numbers run in turn",
    )
    add("--prompt", type=positive(int), default=32, help="bytes of each prompt")
    add("--length", type=positive(int), default=96, help="bytes of a sequence, including the prompt")
    add("--checkpoint-dir", type=Path, help="checkpoints of a training run with the same sizes; None: random weights")
    add("--layers", type=positive(int), default=2, help="transformer blocks")
    add("--hidden", type=positive(int), default=128, help="channels of a token")
    add("--heads", type=positive(int), default=4, help="attention heads")
    add("--experts", type=positive(int), default=8, help="experts of a layer")
    add("--top-k", type=positive(int), default=2, help="experts per token")
    add("--expert-hidden", type=positive(int), default=256, help="channels inside an expert")
    add("--wire", default="fp8", choices=["fp8", "fp8_pow2", "none"], help="what rows travel as to the experts")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of activations and weights")
    add("--backend", default="auto", choices=["auto", "cuda", "collectives", "reference"], help="of jax_ep")
    options = parser.parse_args()
    for wrong in mismatches(options):
        parser.error(wrong)
    return options


def main() -> None:
    options = parse_options()
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    cfg = model.Config(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        experts=options.experts,
        top_k=options.top_k,
        expert_hidden=options.expert_hidden,
        dtype=jnp.dtype(options.dtype),
    )
    group = ep.Group(
        mesh,
        num_experts=cfg.experts,
        top_k=cfg.top_k,
        hidden=cfg.hidden,
        max_tokens_per_rank=max(options.batch),
        dtype=cfg.dtype,
        backend=options.backend,
    )
    with group:
        params = make_params(cfg, mesh, options.checkpoint_dir)
        step = make_step(params, cfg, group, None if options.wire == "none" else options.wire)
        _, held_out = corpus.load()
        print(f"{mesh.size} {mesh.devices.flat[0].device_kind} devices, {group.backend} backend, wire {options.wire}")
        for batch in options.batch:
            sequences = batch * mesh.size
            starts = np.linspace(0, len(held_out) - options.prompt, sequences, dtype=np.int64)
            prompts = held_out[starts[:, None] + np.arange(options.prompt)]
            text, seconds = decode(step, params, prompts, options.length, cfg, mesh)
            each = np.median(seconds[1:])  # the first step compiles
            print(f"{batch:3} per device: {each * 1e3:8.3f} ms per step, {sequences / each:12,.0f} tokens/s")
        print(f"the first sequence; its first {options.prompt} bytes are the prompt:")
        print(bytes(text[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
