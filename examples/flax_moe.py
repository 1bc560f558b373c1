"""A mixture-of-experts layer for Flax NNX, in a small model that learns to predict bytes.

    python examples/flax_moe.py     # this machine's GPUs, else 8 virtual CPU devices

The layer replaces a feed-forward layer. The model predicts a byte from the bytes before it. Experts and tokens are
split over the devices. The rest of the model is replicated and need not know about this: it calls `MoE` like any other
layer, with global arrays.
"""

import os

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
HIDDEN, EXPERT_HIDDEN, EXPERTS_PER_DEVICE, TOP_K = 128, 256, 2, 2


class MoE(nnx.Module):
    """SwiGLU experts, split over a group's devices: [..., hidden] -> [..., hidden], split along the leading axis."""

    def __init__(self, group: ep.Group, expert_hidden: int, *, rngs: nnx.Rngs) -> None:
        E, H, F = group.num_experts, group.hidden, expert_hidden
        init = nnx.initializers.lecun_normal(batch_axis=0)
        by_expert = NamedSharding(group.mesh, P(group.axis_name))
        self.group = group
        self.router = nnx.Linear(H, E, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(jax.device_put(init(rngs.params(), (E, H, 2 * F)), by_expert))
        self.down = nnx.Param(jax.device_put(init(rngs.params(), (E, F, H)), by_expert))

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, self.group.hidden)
        logits, ids = jax.lax.top_k(self.router(tokens).astype(jnp.float32), self.group.top_k)
        split = P(self.group.axis_name)
        experts = jax.shard_map(self._experts, mesh=self.group.mesh, in_specs=split, out_specs=split)
        return experts(tokens, ids, jax.nn.softmax(logits), self.gate_up[...], self.down[...]).reshape(x.shape)

    def _experts(self, x, ids, weights, gate_up, down):
        """Runs on one device, with its own tokens x [T, H] and its own experts."""
        recv = ep.dispatch(x, ids, weights, group=self.group, layout="ragged")
        gate, up = jnp.split(jax.lax.ragged_dot(recv.x, gate_up.astype(x.dtype), recv.group_sizes), 2, axis=-1)
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down.astype(x.dtype), recv.group_sizes)
        return ep.combine(y, recv)


class Model(nnx.Module):
    """Predicts the next byte: int32 [B, CONTEXT] -> logits [B, 256]. `feed_forward` maps HIDDEN to HIDDEN channels."""

    def __init__(self, feed_forward: nnx.Module, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(256, HIDDEN, rngs=rngs)
        self.mix = nnx.Linear(CONTEXT * HIDDEN, HIDDEN, rngs=rngs)
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.feed_forward = feed_forward
        self.out = nnx.Linear(HIDDEN, 256, rngs=rngs)

    def __call__(self, read: jax.Array) -> jax.Array:
        x = self.mix(self.embedding(read).reshape(len(read), -1))
        return self.out(x + self.feed_forward(self.norm(x)))


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
        model = Model(MoE(group, EXPERT_HIDDEN, rngs=rngs), rngs=rngs)
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        shape, sharding = (BATCH * mesh.size, CONTEXT + 1), NamedSharding(mesh, P("ep"))
        for step in range(STEPS):
            loss = train_step(model, optimizer, corpus.training_batch(0, step, shape, sharding))
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
