"""examples/integrations: each module replaces calls of another library, with its signatures, and equals a dense layer.

The callers here are small stand-ins for the libraries' own code.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from helpers import make_mesh, mesh_axis_of
from integrations import levanter_grug, maxtext, swiglu, transformer_engine

T, H, INNER, EXPERTS_PER_RANK, K = 8, 16, 8, 2, 3


def make_operands(num_ranks):
    """x, topk_idx, topk_weights of all ranks, w13 and w2, and the cotangent of the layer's result."""
    rng = np.random.default_rng(0)
    tokens, num_experts = T * num_ranks, EXPERTS_PER_RANK * num_ranks
    topk_idx = rng.random((tokens, num_experts)).argsort(axis=1)[:, :K].astype(np.int32)
    shapes = (tokens, H), (tokens, K), (num_experts, H, 2 * INNER), (num_experts, INNER, H), (tokens, H)
    x, topk_weights, w13, w2, cotangent = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return x, topk_idx, topk_weights, w13, w2, cotangent


def assert_equals_dense(layer, mesh, activation=jax.nn.silu):
    """layer(x, topk_idx, topk_weights, w13, w2) on global arrays: its result, and its gradients by all but the ids."""
    x, topk_idx, topk_weights, w13, w2, cotangent = make_operands(mesh.size)

    def results(function, place):
        def run(x, topk_weights, w13, w2, topk_idx, cotangent):
            out, transpose = jax.vjp(
                lambda x, topk_weights, w13, w2: function(x, topk_idx, topk_weights, w13, w2),
                x,
                topk_weights,
                w13,
                w2,
            )
            return out, *transpose(cotangent)

        operands = place((x, topk_weights, w13, w2, topk_idx, cotangent))
        with jax.default_matmul_precision("highest"):
            return jax.device_get(jax.jit(run)(*operands))

    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    actual = results(layer, lambda operands: jax.device_put(operands, sharding))
    wanted = results(lambda *args: swiglu.dense(*args, activation), lambda operands: operands)
    for a, b in zip(actual, wanted, strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


def make_group(mesh, backend, **overrides):
    settings = {
        "num_experts": EXPERTS_PER_RANK * mesh.size,
        "top_k": K,
        "hidden": H,
        "max_tokens_per_rank": T,
        "dtype": jnp.float32,
        "backend": backend,
    }
    return ep.Group(mesh, **{"axis_name": mesh.axis_names[0]} | settings | overrides)


def levanters_layer(backend_function, mesh, capacity_factor, activation):
    """As Levanter's `moe_mlp` calls a backend: in its shard_map over "expert"."""

    def local(x, selected, weights, w13, w2):
        out, dropped = backend_function(
            x,
            selected,
            weights,
            w13,
            w2,
            activation_fn=activation,
            num_experts=EXPERTS_PER_RANK * mesh.size,
            capacity_factor=capacity_factor,
        )
        return out, dropped

    specs = (P("expert"),) * 5
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P()))


def bind(group):
    return lambda *args, **options: levanter_grug.moe_mlp_ep_jax_ep_local(*args, group=group, **options)


def test_levanter(backend, mesh):
    mesh = mesh_axis_of(mesh, "expert")
    with make_group(mesh, backend) as group:
        layer = levanters_layer(bind(group), mesh, float(mesh.size), jax.nn.gelu)
        assert_equals_dense(lambda *args: layer(*args)[0], mesh, jax.nn.gelu)
        x, topk_idx, topk_weights, w13, w2, _ = make_operands(mesh.size)
        assert jax.jit(layer)(x, topk_idx, topk_weights, w13, w2)[1] == 0


def test_levanters_drops_are_those_of_all_ranks(mesh):
    mesh = mesh_axis_of(mesh, "expert")
    x, topk_idx, topk_weights, w13, w2, _ = make_operands(mesh.size)
    with make_group(mesh, "reference") as group:
        layer = levanters_layer(bind(group), mesh, 0.5, jax.nn.silu)
        _, dropped = jax.jit(layer)(x, topk_idx, topk_weights, w13, w2)
    rows = np.bincount(topk_idx.ravel() // EXPERTS_PER_RANK, minlength=mesh.size)
    assert dropped == np.maximum(rows - T * K // 2, 0).sum() > 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_levanters_drops_beside_a_data_axis(check_vma):
    """As in Levanter, the batch is split over both axes, and the drops are the same on all devices."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    x, topk_idx, topk_weights, w13, w2, _ = make_operands(4)
    topk_idx %= 2 * EXPERTS_PER_RANK
    batch = P(("data", "expert"))
    with make_group(mesh, "reference", num_experts=2 * EXPERTS_PER_RANK, axis_name="expert") as group:

        def local(*args):
            options = {"num_experts": group.num_experts, "capacity_factor": 0.5, "activation_fn": jax.nn.silu}
            return levanter_grug.moe_mlp_ep_jax_ep_local(*args, group=group, batch_axes=("data", "expert"), **options)

        specs = {"in_specs": (batch, batch, batch, P("expert"), P("expert")), "out_specs": (batch, P())}
        layer = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs))
        _, dropped = layer(x, topk_idx, topk_weights, w13[: group.num_experts], w2[: group.num_experts])
    ranks = (topk_idx // EXPERTS_PER_RANK).reshape(2, -1)  # of each data shard
    rows = np.stack([np.bincount(of_shard, minlength=2) for of_shard in ranks])
    expected = np.maximum(rows - T * K // 2, 0).sum()
    assert [int(shard.data) for shard in dropped.addressable_shards] == [expected] * 4 and expected > 0


def test_maxtext(backend, mesh):
    mesh = mesh_axis_of(mesh, "expert")
    batch = 2

    def get_topk(logits, pre_bias_logits, rngs, input_ids):
        """The test's routing comes as logits: the weights, and the ids."""
        weights, experts = jnp.split(logits, 2, axis=-1)
        return weights, experts.astype(jnp.int32)

    def sparse_matmul(x, logits, w0, w1, wo):
        """The part of `RoutedMoE.sparse_matmul` that one device runs, with its calls."""
        moves = maxtext.TokenMoves(group, get_topk)
        batch_size, sequence_length, embed_dim = x.shape
        shard = jax.lax.axis_index("expert")
        rows, routing, route_metadata = moves.ra2a_and_route(x, logits, None, mesh.size, shard, None, input_ids=None)
        assert routing.selected_experts.shape == rows.shape[:1]
        layer_w0 = jax.lax.ragged_dot(rows, w0, routing.group_sizes)
        layer_w1 = jax.lax.ragged_dot(rows, w1, routing.group_sizes)
        intermediate_output = jax.lax.ragged_dot(jax.nn.silu(layer_w0) * layer_w1, wo, routing.group_sizes)
        original_inputs_first_dim = batch_size * sequence_length * K
        assert routing.sorted_selected_experts.shape[0] == original_inputs_first_dim
        output_shape = jnp.zeros((original_inputs_first_dim, embed_dim), rows.dtype)
        intermediate_output = moves.unsort_output_and_ra2a(
            intermediate_output, routing, route_metadata, output_shape, True
        )
        return moves.unpermute(
            intermediate_output,
            routing.sorted_selected_experts,
            routing.weights,
            batch_size=batch_size,
            sequence_length=sequence_length,
            use_custom_sort_vjp=True,
            group_sizes=routing.group_sizes,
        )

    mapped = jax.shard_map(sparse_matmul, mesh=mesh, in_specs=(P("expert"),) * 5, out_specs=P("expert"))

    def layer(x, topk_idx, topk_weights, w13, w2):
        logits = jnp.concatenate([topk_weights, topk_idx.astype(jnp.float32)], axis=-1)
        by_batch = [a.reshape(batch * mesh.size, -1, a.shape[-1]) for a in (x, logits)]
        w0, w1 = jnp.split(w13, 2, axis=-1)
        return mapped(*by_batch, w0, w1, w2).reshape(x.shape)

    with make_group(mesh, backend) as group:
        assert_equals_dense(layer, mesh)


def test_maxtexts_rows_know_their_expert(mesh):
    """MaxText adds the experts' biases by `selected_experts`."""
    mesh = mesh_axis_of(mesh, "expert")
    x, topk_idx, topk_weights, *_ = make_operands(mesh.size)

    def on_device(x, topk_idx, topk_weights):
        moves = maxtext.TokenMoves(group, lambda *args: (topk_weights[None], topk_idx[None]))
        _, routing, recv = moves.ra2a_and_route(x[None], None, None, mesh.size, 0, None)
        # Each row's global expert, sent along the route of the tokens that chose it.
        sent = ep.dispatch_like(topk_idx, recv)
        own = routing.selected_experts + jax.lax.axis_index("expert") * EXPERTS_PER_RANK
        return jnp.where(recv.weights != 0, jnp.any(sent == own[:, None], axis=1), True)

    with make_group(mesh, "reference") as group:
        split = P("expert")
        fits = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split))(x, topk_idx, topk_weights)
    assert np.all(fits)


def test_maxtexts_calls_that_do_not_fit(mesh):
    mesh = mesh_axis_of(mesh, "expert")
    with make_group(mesh, "reference") as group:
        moves = maxtext.TokenMoves(group, None)
        with pytest.raises(ValueError, match="rows have 8 channels, and the group has 16: with tensor parallelism"):
            moves.unsort_output_and_ra2a(jnp.zeros((4, H // 2)), None, None, None, True)
        with pytest.raises(ValueError, match="24 rows for 8 tokens: call unsort_output_and_ra2a before"):
            moves.unpermute(jnp.zeros((8 * K, H)), None, None, 2, 4)


def te_layer(experts, capacity, mesh, alignment=0):
    """As TransformerEngine's users write a layer: global arrays, and the weights by hand."""
    cfg = transformer_engine.EpLayerConfig(top_k=K, dispatch_output_per_expert_alignment=alignment)
    split = P("ep")

    def ffn(rows, counts, w13, w2):
        return swiglu.experts(rows[0], counts[0], w13, w2)[None]

    def layer(x, topk_idx, topk_weights, w13, w2):
        recv_tokens, recv_topk_weights, handle_mem, token_counts, total_recv_tokens = experts.ep_dispatch(
            cfg, topk_idx, x, topk_weights, capacity
        )
        mapped = jax.shard_map(ffn, mesh=mesh, in_specs=split, out_specs=split)
        expert_out = mapped(recv_tokens, token_counts, w13, w2)
        mask = recv_topk_weights != 0
        weighted = jnp.where(mask[..., None], expert_out * recv_topk_weights[..., None], 0)
        return experts.ep_combine(cfg, handle_mem, token_counts, weighted, len(x)), total_recv_tokens

    return layer


def test_transformer_engine(backend, mesh):
    experts = te_experts(mesh, backend)
    layer = te_layer(experts, mesh.size * T * K, mesh)
    assert_equals_dense(lambda *args: layer(*args)[0], mesh)
    experts.close()


@pytest.mark.parametrize("alignment", [1, 8])
def test_transformer_engines_fifth_result_tells_of_overflow(mesh, alignment):
    x, topk_idx, topk_weights, w13, w2, _ = make_operands(mesh.size)
    experts = te_experts(mesh, "reference")
    wanted = np.bincount(topk_idx.ravel(), minlength=EXPERTS_PER_RANK * mesh.size).reshape(mesh.size, -1)
    padded = (-(-wanted // alignment) * alignment).sum(axis=1)
    for capacity in (padded.max(), padded.max() - alignment):
        _, total = jax.jit(te_layer(experts, int(capacity), mesh, alignment))(x, topk_idx, topk_weights, w13, w2)
        np.testing.assert_array_equal(total, padded[:, None])
    experts.close()


def test_transformer_engine_takes_batches(mesh):
    """Tokens of [batch, sequence, H] come back in that shape."""
    x, topk_idx, topk_weights, *_ = make_operands(mesh.size)
    experts, cfg = te_experts(mesh, "reference"), transformer_engine.EpLayerConfig(K, 4)
    shape = 2 * mesh.size, T // 2

    @jax.jit
    def there_and_back(x, topk_idx, topk_weights):
        x, topk_idx, topk_weights = (a.reshape(*shape, -1) for a in (x, topk_idx, topk_weights))
        rows, weights, handle_mem, counts, _ = experts.ep_dispatch(cfg, topk_idx, x, topk_weights, mesh.size * T * K)
        return experts.ep_combine(cfg, handle_mem, counts, rows * weights[..., None], shape), counts

    out, counts = there_and_back(x, topk_idx, topk_weights)
    assert out.shape == (*shape, H)
    expected = x * topk_weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out.reshape(x.shape), expected, rtol=1e-4, atol=1e-4)
    assert np.all(np.asarray(counts) % 4 == 0)
    experts.close()


def test_transformer_engine_beside_data_parallelism():
    """The leading axis is split over "dp", then "ep": each of the two EP groups moves its own tokens."""
    mesh = make_mesh((2, 2), ("dp", "ep"))
    x, topk_idx, topk_weights, *_ = make_operands(4)
    topk_idx %= 2 * EXPERTS_PER_RANK
    sizes = {"num_experts": 2 * EXPERTS_PER_RANK, "max_tokens_per_rank": T, "hidden_dim": H}
    experts = transformer_engine.ExpertParallel(
        mesh, "ep", **sizes, max_token_dtype=jnp.float32, dp_axes=("dp",), backend="reference"
    )
    cfg = transformer_engine.EpLayerConfig(K)

    @jax.jit
    def there_and_back(x, topk_idx, topk_weights):
        rows, weights, handle_mem, counts, _ = experts.ep_dispatch(cfg, topk_idx, x, topk_weights, 2 * T * K)
        return experts.ep_combine(cfg, handle_mem, counts, rows * weights[..., None], len(x)), rows

    out, rows = there_and_back(x, topk_idx, topk_weights)
    assert rows.shape == (4, 2 * T * K, H)
    np.testing.assert_allclose(out, x * topk_weights.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-4)
    experts.close()


def te_experts(mesh, backend):
    return transformer_engine.ExpertParallel(
        mesh,
        "ep",
        num_experts=EXPERTS_PER_RANK * mesh.size,
        max_tokens_per_rank=T,
        hidden_dim=H,
        max_token_dtype=jnp.float32,
        backend=backend,
    )


def test_a_replicated_batch_is_refused(mesh):
    moves = maxtext.TokenMoves(None, None)
    with pytest.raises(ValueError, match="docs/parallelism.md"):
        moves.unsort_output_and_ra2a(None, None, None, None, False)
