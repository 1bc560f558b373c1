"""A mixture-of-experts layer for Equinox, in a small model that learns bytes.

    python examples/equinox_moe.py     # this machine's GPUs, else 8 virtual CPU devices

Layers of Equinox map one vector, and `jax.vmap` maps the batch. `MoE` takes the whole batch instead, because the
devices exchange its tokens. `eqx.filter_vmap` stacks the blocks, and `jax.lax.scan` applies them.
"""

import os
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for machines without GPUs

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from moe_lm import corpus

CONTEXT, BATCH, STEPS = 8, 64, 60  # bytes that the model sees, windows of text per device and step
HIDDEN, EXPERT_HIDDEN, EXPERTS_PER_DEVICE, TOP_K, LAYERS = 128, 256, 2, 2, 2


class MoE(eqx.Module):
    """SwiGLU experts spread over a group's devices: [tokens, hidden] -> [tokens, hidden], split along the tokens."""

    router: eqx.nn.Linear
    gate_up: jax.Array  # [E, H, 2I]
    down: jax.Array  # [E, I, H]
    group: ep.Group = eqx.field(static=True)

    def __init__(self, group: ep.Group, expert_hidden: int, *, key: jax.Array) -> None:
        E, H, I = group.num_experts, group.hidden, expert_hidden
        by_expert = NamedSharding(group.mesh, P(group.axis_name))

        @partial(jax.jit, static_argnums=1, out_shardings=by_expert)  # no device ever holds the weights of all experts
        def initial(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.nn.initializers.lecun_normal(batch_axis=0)(key, shape)

        router_key, gate_up_key, down_key = jax.random.split(key, 3)
        self.router = eqx.nn.Linear(H, E, use_bias=False, key=router_key)
        self.gate_up = initial(gate_up_key, (E, H, 2 * I))
        self.down = initial(down_key, (E, I, H))
        self.group = group

    def __call__(self, x: jax.Array) -> jax.Array:
        routing = ep.moe.route(jax.vmap(self.router)(x), top_k=self.group.top_k)
        split = P(self.group.axis_name)
        experts = jax.shard_map(
            partial(ep.moe.mlp, group=self.group), mesh=self.group.mesh, in_specs=split, out_specs=split
        )
        return experts(x, routing.topk_idx, routing.topk_weights, self.gate_up, self.down)


class Block(eqx.Module):
    """A residual MoE layer behind a norm."""

    norm: eqx.nn.RMSNorm
    moe: MoE

    def __init__(self, group: ep.Group, *, key: jax.Array) -> None:
        self.norm = eqx.nn.RMSNorm(HIDDEN)
        self.moe = MoE(group, EXPERT_HIDDEN, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.moe(jax.vmap(self.norm)(x))


class Model(eqx.Module):
    """Logits of the next byte, [B, 256], from int32 [B, CONTEXT]."""

    embedding: eqx.nn.Embedding
    mix: eqx.nn.Linear
    blocks: Block  # the weights of all layers, stacked in a leading axis
    norm: eqx.nn.RMSNorm
    out: eqx.nn.Linear

    def __init__(self, group: ep.Group, *, key: jax.Array) -> None:
        embedding_key, mix_key, blocks_key, out_key = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(256, HIDDEN, key=embedding_key)
        self.mix = eqx.nn.Linear(CONTEXT * HIDDEN, HIDDEN, key=mix_key)
        self.blocks = eqx.filter_vmap(lambda key: Block(group, key=key))(jax.random.split(blocks_key, LAYERS))
        self.norm = eqx.nn.RMSNorm(HIDDEN)
        self.out = eqx.nn.Linear(HIDDEN, 256, key=out_key)

    def __call__(self, read: jax.Array) -> jax.Array:
        x = jax.vmap(self.mix)(jax.vmap(jax.vmap(self.embedding))(read).reshape(len(read), -1))
        weights, structure = eqx.partition(self.blocks, eqx.is_array)

        def apply(x: jax.Array, of_layer: Block) -> tuple[jax.Array, None]:
            return eqx.combine(of_layer, structure)(x), None

        x, _ = jax.lax.scan(apply, x, weights)
        return jax.vmap(self.out)(jax.vmap(self.norm)(x))


def main() -> None:
    # In a mesh of Auto axes, XLA shards the code outside of shard_map. The other layers need no shardings.
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    group = ep.Group(
        mesh,
        num_experts=EXPERTS_PER_DEVICE * mesh.size,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=BATCH,
        dtype=jnp.float32,
    )
    optimizer = optax.adam(3e-3)

    @eqx.filter_jit
    def train_step(model: Model, state: optax.OptState, windows: jax.Array) -> tuple[Model, optax.OptState, jax.Array]:
        def loss(model: Model) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, -1])
            return losses.mean()

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    with group:
        model = Model(group, key=jax.random.key(0))
        experts = model.blocks.moe.gate_up
        print(f"gate_up of all layers: {experts.shape}; on each device {experts.sharding.shard_shape(experts.shape)}")
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        shape, sharding = (BATCH * mesh.size, CONTEXT + 1), NamedSharding(mesh, P("ep"))
        for step in range(STEPS):
            model, state, loss = train_step(model, state, corpus.training_batch(0, step, shape, sharding))
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
