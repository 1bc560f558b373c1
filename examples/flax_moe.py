"""A mixture-of-experts layer for Flax NNX that replaces a feed-forward layer, in a small model that learns bytes.

    python examples/flax_moe.py     # this machine's GPUs, else 8 virtual CPU devices

The model predicts a byte from the bytes before it. Experts are spread over the devices, as are the tokens. The rest of
the model is replicated, and its code does not mention devices: `MoE` is called like any layer, with whole arrays. The
blocks are stacked by `nnx.vmap`, so that `nnx.scan` compiles one of them.
"""

import os
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for machines without GPUs

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from moe_lm import corpus

CONTEXT, BATCH, STEPS = 8, 64, 60  # bytes that the model sees, windows of text per device and step
HIDDEN, EXPERT_HIDDEN, EXPERTS_PER_DEVICE, TOP_K, LAYERS = 128, 256, 2, 2, 2


class MoE(nnx.Module):
    """SwiGLU experts, split over a group's devices: [..., hidden] -> [..., hidden], split along the leading axis."""

    def __init__(self, group: ep.Group, expert_hidden: int, *, rngs: nnx.Rngs) -> None:
        E, H, I = group.num_experts, group.hidden, expert_hidden
        self.group = group
        self.router = nnx.Linear(H, E, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(self._initial(rngs.params(), (E, H, 2 * I)))
        self.down = nnx.Param(self._initial(rngs.params(), (E, I, H)))

    def _initial(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Each device computes the weights of its own experts: no device ever holds all of them."""
        initializer = nnx.initializers.lecun_normal(batch_axis=0)
        by_expert = NamedSharding(self.group.mesh, P(self.group.axis_name))
        return jax.jit(lambda key: initializer(key, shape), out_shardings=by_expert)(key)

    def __call__(self, x: jax.Array) -> jax.Array:
        routing = ep.moe.route(self.router(x), top_k=self.group.top_k)
        split = P(self.group.axis_name)
        experts = jax.shard_map(
            partial(ep.moe.mlp, group=self.group), mesh=self.group.mesh, in_specs=split, out_specs=split
        )
        weights = self.gate_up[...].astype(x.dtype), self.down[...].astype(x.dtype)
        return experts(x, routing.topk_idx, routing.topk_weights, *weights)


class Block(nnx.Module):
    """A residual MoE layer behind a norm."""

    def __init__(self, group: ep.Group, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.moe = MoE(group, EXPERT_HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.moe(self.norm(x))


class Model(nnx.Module):
    """Logits of the next byte, [B, 256], from int32 [B, CONTEXT]."""

    def __init__(self, group: ep.Group, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(group, rngs=rngs)

        self.embedding = nnx.Embed(256, HIDDEN, rngs=rngs)
        self.mix = nnx.Linear(CONTEXT * HIDDEN, HIDDEN, rngs=rngs)
        self.blocks = stack(rngs)  # the weights of all layers, stacked in a leading axis
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, 256, rngs=rngs)

    def __call__(self, read: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        x = self.mix(self.embedding(read).reshape(len(read), -1))
        return self.out(self.norm(run(self.blocks, x)))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    def loss(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, -1])
        return losses.mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main() -> None:
    # With Auto axes, XLA chooses the shardings outside shard_map, so Flax's layers need no sharding.
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    group = ep.Group(
        mesh,
        num_experts=EXPERTS_PER_DEVICE * mesh.size,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=BATCH,
        dtype=jnp.float32,
    )
    with group:
        rngs = nnx.Rngs(0)
        model = Model(group, rngs=rngs)
        experts = model.blocks.moe.gate_up[...]
        print(f"gate_up of all layers: {experts.shape}; on each device {experts.sharding.shard_shape(experts.shape)}")
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        shape, sharding = (BATCH * mesh.size, CONTEXT + 1), NamedSharding(mesh, P("ep"))
        for step in range(STEPS):
            loss = train_step(model, optimizer, corpus.training_batch(0, step, shape, sharding))
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
