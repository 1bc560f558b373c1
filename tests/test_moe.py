"""jax_ep.moe: the router against NumPy, and the layer against a dense one that JAX differentiates."""

import contextlib
import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_ep as ep
import oracle
from helpers import assert_same_bits, make_mesh, open_group, run_spmd, spmd, to_numpy
from jax_ep.moe import _layer
from shapes import Shape, make_inputs, np_dtype, random_array
from test_errors import assert_names

SHAPE = Shape("moe", num_experts=8, top_k=2, hidden=32, tokens=6, dtype="float32")
INNER = 24
CPU_EXPERTS = ("auto", "einsum", "ragged_dot")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


route = jax.jit(  # at once: eagerly, every operation is compiled by itself
    ep.moe.route, static_argnames=("top_k", "score", "num_groups", "topk_groups", "normalize", "scale")
)


# --- route ----------------------------------------------------------------------------------------------------------


def make_logits(*shape, seed=0):
    return 2 * random_array(np.random.default_rng(seed), shape, "float32")


def assert_routed(routing, ids, weights):
    assert routing.topk_idx.dtype == jnp.int32 and routing.topk_weights.dtype == jnp.float32
    np.testing.assert_array_equal(routing.topk_idx, ids)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 4), (32, 1), (4, 4)])
def test_softmax_scores_are_those_of_mixtral_and_gpt_oss(num_experts, top_k):
    logits = make_logits(50, num_experts)
    routing = route(logits, top_k=top_k)
    assert_routed(routing, *oracle.gate_of_mixtral(logits, top_k))
    assert_routed(routing, *oracle.gate_of_gpt_oss(logits, top_k))


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups"), [(256, 8, 8, 4), (16, 3, 4, 1), (6, 2, 6, 2), (8, 8, 2, 2)]
)
def test_sigmoid_scores_with_bias_and_groups_are_those_of_deepseek_v3(num_experts, top_k, num_groups, topk_groups):
    logits, bias = make_logits(50, num_experts), 0.3 * make_logits(num_experts, seed=1)
    options = {"top_k": top_k, "num_groups": num_groups, "topk_groups": topk_groups, "scale": 2.5}
    routing = route(logits, score="sigmoid", bias=bias, **options)
    assert_routed(routing, *oracle.gate_of_deepseek_v3(logits, bias, **options))
    assert np.unique(routing.topk_idx // (num_experts // num_groups), axis=1).shape[1] >= 1


def test_groups_of_negative_scores():
    """An expert outside of the best groups is not chosen, although the bias makes every other score lower than 0."""
    logits, bias = make_logits(20, 16), np.full(16, -5, np.float32)
    options = {"top_k": 4, "num_groups": 4, "topk_groups": 2, "scale": 1.0}
    routing = route(logits, score="sigmoid", bias=bias, **options)
    assert_routed(routing, *oracle.gate_of_deepseek_v3(logits, bias, **options))


def test_the_bias_chooses_but_does_not_weigh():
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 2.0])

    def weights(logits, bias):
        return route(logits, top_k=2, bias=bias, normalize=False).topk_weights

    assert route(logits, top_k=2, bias=bias).topk_idx.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights(logits, bias), jax.nn.softmax(logits)[:, [3, 0]], rtol=1e-6)
    assert not np.any(jax.grad(lambda bias: weights(logits, bias).sum())(bias))


def test_the_lower_index_goes_first_among_equal_scores():
    logits = jnp.array([[0, 1, 1, 0, 1, 0], [2, 2, 2, 2, 2, 2]], jnp.bfloat16)
    for score in ("softmax", "sigmoid"):
        assert route(logits, top_k=4, score=score).topk_idx.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    groups = {"num_groups": 3, "topk_groups": 2}
    assert route(logits, top_k=3, **groups).topk_idx.tolist() == [[1, 2, 0], [0, 1, 2]]


def test_scores_are_computed_in_float32():
    logits = make_logits(20, 64).astype(jnp.bfloat16)
    for name, actual in route(logits, top_k=4, score="sigmoid")._asdict().items():
        assert_same_bits(actual, getattr(route(logits.astype(np.float32), top_k=4, score="sigmoid"), name), name)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_and_load(score):
    logits = make_logits(3, 5, 8)
    routing = route(logits, top_k=2, score=score)
    rows = logits.reshape(-1, 8).astype(np.float64)
    scores = oracle.softmax(rows) if score == "softmax" else 1 / (1 + np.exp(-rows))
    load = np.bincount(oracle.largest(rows, 2).reshape(-1), minlength=8) / 30
    shares = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
    assert routing.topk_idx.shape == routing.topk_weights.shape == (3, 5, 2)
    np.testing.assert_allclose(routing.load, load, rtol=1e-6)
    np.testing.assert_allclose(routing.aux_loss, 8 * np.sum(load * shares), rtol=1e-5)
    np.testing.assert_allclose(routing.z_loss, np.mean(np.log(np.exp(rows).sum(axis=1)) ** 2), rtol=1e-5)


def test_a_balanced_load_has_loss_1():
    assert route(3 * jnp.eye(8), top_k=1).aux_loss == pytest.approx(1)
    assert route(3 * jnp.eye(8)[:1].repeat(8, axis=0), top_k=1).aux_loss > 2


def test_without_tokens():
    routing = route(jnp.zeros((0, 8)), top_k=2)
    assert routing.topk_idx.shape == (0, 2)
    assert [float(routing.aux_loss), float(routing.z_loss)] == [0, 0] and not np.any(routing.load)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_of_the_router_are_those_of_differences(score):
    logits = make_logits(4, 6)
    factors = make_logits(4, 3, seed=2)

    def total(logits):
        routing = route(logits, top_k=3, score=score, scale=1.5)
        return jnp.sum(routing.topk_weights * factors) + routing.aux_loss + 0.1 * routing.z_loss

    check_grads(total, (logits,), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-2)
    no_scores = jax.grad(total)(jnp.full((4, 6), -200.0))  # of which float32 makes sigmoids of 0
    assert np.all(np.isfinite(no_scores))


def test_the_loss_of_all_ranks_together():
    """The recipe of the docstring gives the loss of the tokens of all ranks; the mean of the losses is another."""
    mesh, logits = make_mesh((4,)), make_logits(4, 5, 8)
    all_groups = {"bias": np.zeros(8, np.float32), "num_groups": 4, "topk_groups": 4}

    def on_rank(logits):
        routing = route(logits, top_k=2, **all_groups)
        load = jax.lax.pmean(routing.load, "ep")
        mean_scores = jax.lax.pmean(jax.nn.softmax(logits).mean(axis=0), "ep")
        return (
            8 * jnp.sum(load * mean_scores),
            jax.lax.pmean(routing.aux_loss, "ep"),
            jax.lax.pmean(routing.z_loss, "ep"),
        )

    together, mean, z_loss = run_spmd(on_rank, mesh, logits)
    whole = route(logits.reshape(-1, 8), top_k=2)
    np.testing.assert_allclose(together, whole.aux_loss, rtol=1e-6)
    np.testing.assert_allclose(z_loss, whole.z_loss, rtol=1e-6)
    assert np.all(np.abs(mean - whole.aux_loss) > 1e-3)


ROUTE = [
    ({"logits": 1.0}, TypeError, ["a float", "array"]),
    ({"logits": jnp.zeros(())}, ValueError, ["[..., E]"]),
    ({"logits": jnp.zeros((4, 8), jnp.int32)}, TypeError, ["int32", "float32"]),
    ({"top_k": 9}, ValueError, [9, "1 to 8"]),
    ({"top_k": 2.0}, TypeError, ["2.0", "int"]),
    ({"score": "tanh"}, ValueError, ["tanh", "softmax", "sigmoid"]),
    ({"bias": jnp.zeros(7)}, ValueError, ["(7,)", 8]),
    ({"bias": jnp.zeros(8, jnp.int32)}, TypeError, ["int32"]),
    ({"bias": 0.5}, TypeError, ["a float", "array"]),
    ({"num_groups": 2}, ValueError, ["topk_groups", "None", "both"]),
    ({"topk_groups": 2}, ValueError, ["num_groups", "None", "both"]),
    ({"num_groups": 3, "topk_groups": 1}, ValueError, [3, 8]),
    ({"num_groups": 9, "topk_groups": 1}, ValueError, [9, "1 to 8"]),
    ({"topk_groups": 5, "num_groups": 4}, ValueError, [5, "1 to 4"]),
    ({"topk_groups": 1, "num_groups": 4, "top_k": 3}, ValueError, [3, "topk_groups=2"]),
    ({"normalize": 1}, TypeError, [1, "bool"]),
    ({"scale": "2"}, TypeError, ["'2'", "number"]),
]


@pytest.mark.parametrize(("changes", "error", "mentions"), ROUTE)
def test_errors_of_route(changes, error, mentions):
    good = {"logits": jnp.zeros((4, 8)), "top_k": 2}
    with pytest.raises(error, match=r"^moe\.route: ") as raised:
        ep.moe.route(**good | changes)
    assert_names(raised.value, next(iter(changes)), *mentions)


# --- mlp ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference_group():
    """reference_group(mesh, shape): a group of the reference backend, closed after the module's tests."""
    with contextlib.ExitStack() as groups:
        yield lambda mesh, shape=SHAPE: groups.enter_context(open_group(mesh, shape, backend="reference"))


def make_case(shape, num_ranks, routing="uneven"):
    """x, topk_idx, topk_weights, w_gate_up and w_down, with the ranks in front, and the cotangent of the output."""
    rng = np.random.default_rng(4)
    local, H = shape.num_experts // num_ranks, shape.hidden

    def weights(rows, columns):
        w = random_array(rng, (num_ranks, local, rows, columns), "float32") / np.sqrt(rows)
        return w.astype(np_dtype(shape.dtype))

    inputs = make_inputs(shape, num_ranks, routing)
    cotangent = random_array(rng, (num_ranks, shape.tokens, H), "float32")
    return *inputs, weights(H, 2 * INNER), weights(INNER, H), cotangent


# The names of the arrays that value_and_gradients returns.
RESULT_NAMES = ("output", "x", "topk_weights", "w_gate_up", "w_down")


def value_and_gradients(layer, case):
    """Of the sum of a layer's outputs times the cotangent: in x, topk_weights, w_gate_up and w_down."""
    x, topk_idx, topk_weights, *weights, cotangent = case

    def total(x, topk_weights, *weights):
        out = layer(x, topk_idx, topk_weights, *weights)
        return jnp.sum(out.reshape(cotangent.shape).astype(jnp.float32) * cotangent), out

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))
    (_, out), gradients = run(x, topk_weights, *weights)
    return to_numpy((out, *gradients))


def dense(case, kept=True, activation=jax.nn.silu):
    """The same of a dense layer in float32; choices that are not `kept` count as no expert's."""
    x, topk_idx, topk_weights, w_gate_up, w_down, cotangent = case
    tokens = (a.reshape(-1, a.shape[-1]) for a in (x, np.where(kept, topk_idx, -1), topk_weights, cotangent))
    experts = (w.reshape(-1, *w.shape[2:]) for w in (w_gate_up, w_down))
    results = dense_value_and_gradients(*tokens, *experts, activation=activation)
    shapes = (a.shape for a in (x, x, topk_weights, w_gate_up, w_down))
    return [a.reshape(shape) for a, shape in zip(to_numpy(results), shapes, strict=True)]


@partial(jax.jit, static_argnames="activation")
def dense_value_and_gradients(x, topk_idx, topk_weights, cotangent, w_gate_up, w_down, *, activation):
    def layer(x, topk_weights, w_gate_up, w_down):
        return oracle.dense_mlp(x, topk_idx, topk_weights, w_gate_up, w_down, activation)

    arrays = (a.astype(jnp.float32) for a in (x, topk_weights, w_gate_up, w_down))
    out, transpose = jax.vjp(layer, *arrays)
    return out, *transpose(cotangent)


def assert_close(actual, expected, tolerance):
    for name, a, b in zip(RESULT_NAMES, actual, expected, strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a.astype(np.float32) - b) <= tolerance * np.linalg.norm(b), name


def mlp_on(mesh, group, check_vma=True, **options):
    return spmd(lambda *args: ep.moe.mlp(*args, group=group, **options), mesh, check_vma=check_vma)


def check_against_dense(group, mesh, shape, routing="uneven", *, kept=True, **options):
    case = make_case(shape, mesh.size, routing)
    actual = value_and_gradients(mlp_on(mesh, group, **options), case)
    assert_close(actual, dense(case, kept, options.get("activation", jax.nn.silu)), TOLERANCE[shape.dtype])


@pytest.mark.parametrize("experts", CPU_EXPERTS)
def test_programs_that_forbid_promotion(reference_group, mesh, experts):
    """The router and the layer, with gradients, traced under jax_numpy_dtype_promotion and jax_numpy_rank_promotion."""
    x, _, _, *weights, _ = make_case(SHAPE, mesh.size)
    w_router, bias = np.ones((SHAPE.hidden, SHAPE.num_experts), x.dtype), np.ones(SHAPE.num_experts, jnp.bfloat16)
    mlp = partial(ep.moe.mlp, group=reference_group(mesh), experts=experts)

    def loss(x, *weights):
        options = {"score": "sigmoid", "num_groups": 4, "topk_groups": 2, "scale": 2.5}
        routing = ep.moe.route(x @ w_router, top_k=SHAPE.top_k, bias=jnp.asarray(bias), **options)
        return jnp.sum(mlp(x, routing.topk_idx, routing.topk_weights, *weights)) + routing.aux_loss

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(spmd(jax.grad(loss, (0, 1, 2)), mesh), x, *weights)


@pytest.mark.parametrize("experts", CPU_EXPERTS)
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 8), (4, 8), (4, 4)])
def test_the_layer_is_the_dense_one(reference_group, num_ranks, num_experts, experts):
    shape = dataclasses.replace(SHAPE, num_experts=num_experts, top_k=min(2, num_experts))
    mesh = make_mesh((num_ranks,))
    check_against_dense(reference_group(mesh, shape), mesh, shape, experts=experts)


@pytest.mark.parametrize(
    ("routing", "experts"),
    [
        ("nothing", "ragged_dot"),
        ("hot_expert", "einsum"),
        ("duplicates", "einsum"),
        ("duplicates", "ragged_dot"),
        ("out_of_range", "ragged_dot"),
    ],
)
def test_every_routing(reference_group, mesh, routing, experts):
    room = mesh.size * SHAPE.tokens * SHAPE.top_k  # enough for a token that names an expert twice
    check_against_dense(reference_group(mesh), mesh, SHAPE, routing, experts=experts, capacity=room)


@pytest.mark.parametrize(("experts", "check_vma"), [("einsum", True), ("ragged_dot", False)])
def test_bfloat16(reference_group, mesh, experts, check_vma):
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    check_against_dense(reference_group(mesh, shape), mesh, shape, experts=experts, check_vma=check_vma)


@pytest.mark.parametrize("options", [{"experts": "einsum"}, {"experts": "ragged_dot"}, {"layout": "token"}], ids=str)
def test_on_every_backend(make_group, mesh, options):
    check_against_dense(make_group(mesh, SHAPE), mesh, SHAPE, **options)


@pytest.mark.parametrize(
    "options", [{"alignment": 4}, {"capacity_factor": 1.5, "alignment": 4}, {"wire": "fp8"}], ids=str
)
def test_the_layout_token_is_the_layout_ragged(reference_group, mesh, monkeypatch, options):
    """The experts get the same rows, in buffers of the same size."""
    shape = dataclasses.replace(SHAPE, hidden=128)
    group, case = reference_group(mesh, shape), make_case(shape, mesh.size, "uniform")
    matmul, shapes, results = _layer.portable_matmul, [], []

    def recorded(rows, *args, **kwargs):
        shapes[-1].append(rows.shape)
        return matmul(rows, *args, **kwargs)

    monkeypatch.setattr(_layer, "portable_matmul", recorded)
    for layout in (None, "token"):
        shapes.append([])
        layer = mlp_on(mesh, group, experts="ragged_dot", layout=layout, **options)
        results.append(value_and_gradients(layer, case))
    assert_close(*results, 1e-5)
    assert shapes[0] == shapes[1] != []


@pytest.mark.parametrize(("experts", "capacity", "alignment"), [("einsum", 4, 1), ("ragged_dot", 9, 1), ("auto", 8, 4)])
def test_dropped_rows_count_as_zero(reference_group, mesh, experts, capacity, alignment):
    case = make_case(SHAPE, mesh.size, "uniform")
    layout = "expert" if experts == "einsum" else "ragged"
    where = oracle.route(case[1], num_experts=SHAPE.num_experts, layout=layout, capacity=capacity, alignment=alignment)
    assert where.num_dropped.sum() > 0
    room = {"capacity": capacity, "alignment": alignment}
    check_against_dense(reference_group(mesh), mesh, SHAPE, "uniform", kept=where.kept, experts=experts, **room)


def test_fp8_rows_are_dequantised_on_arrival(reference_group, mesh):
    shape = dataclasses.replace(SHAPE, hidden=128)
    group, case = reference_group(mesh, shape), make_case(shape, mesh.size)
    rounded = [oracle.dequantize(*oracle.quantize(case[0], "fp8"), np.float32), *case[1:]]
    actual = value_and_gradients(mlp_on(mesh, group, wire="fp8"), case)
    assert_close(actual, value_and_gradients(mlp_on(mesh, group), rounded), 1e-6)
    assert_same_bits(to_numpy(jax.jit(mlp_on(mesh, group, wire="fp8", dequantize=False))(*case[:-1])), actual[0])


def test_wire_formats_of_combine(reference_group, mesh, monkeypatch):
    shape = dataclasses.replace(SHAPE, hidden=128)
    group, case = reference_group(mesh, shape), make_case(shape, mesh.size)
    plain = value_and_gradients(mlp_on(mesh, group), case)
    formats = {"combine_wire": "fp8", "combine_grad_wire": "fp8_e5m2"}
    actual = value_and_gradients(mlp_on(mesh, group, **formats), case)
    monkeypatch.setattr(_layer, "combine", lambda *args, **_: ep.combine(*args, wire="fp8", grad_wire="fp8_e5m2"))
    for name, a, b, without in zip(
        RESULT_NAMES, actual, value_and_gradients(mlp_on(mesh, group), case), plain, strict=True
    ):
        assert_same_bits(a, b, name)
        assert 0 < np.linalg.norm(a - without) <= 0.1 * np.linalg.norm(without), name


def test_any_leading_dimensions(reference_group, mesh):
    group, (x, topk_idx, topk_weights, *weights, _) = reference_group(mesh), make_case(SHAPE, mesh.size)
    layer = jax.jit(mlp_on(mesh, group))
    expected = to_numpy(layer(x, topk_idx, topk_weights, *weights))
    tokens = [a.reshape(mesh.size, 2, 3, a.shape[-1]) for a in (x, topk_idx, topk_weights)]
    assert_same_bits(layer(*tokens, *weights), expected.reshape(tokens[0].shape))
    first = [a[:, 0] for a in (x, topk_idx, topk_weights)]
    np.testing.assert_allclose(layer(*first, *weights), expected[:, 0], rtol=1e-5, atol=1e-6)
    none = [a[:, :0] for a in (x, topk_idx, topk_weights)]
    assert layer(*none, *weights).shape == (mesh.size, 0, SHAPE.hidden)


def test_without_weights_every_choice_counts_1(reference_group, mesh):
    group, (x, topk_idx, topk_weights, *weights, _) = reference_group(mesh), make_case(SHAPE, mesh.size)
    layer = lambda x, ids, *weights: ep.moe.mlp(x, ids, None, *weights, group=group)  # noqa: E731
    expected = jax.jit(mlp_on(mesh, group))(x, topk_idx, np.ones_like(topk_weights), *weights)
    assert_same_bits(run_spmd(layer, mesh, x, topk_idx, *weights), to_numpy(expected))


def test_other_activations(reference_group, mesh):
    check_against_dense(reference_group(mesh), mesh, SHAPE, activation=jax.nn.gelu)


@pytest.mark.parametrize("experts", CPU_EXPERTS[1:])
def test_gradients_of_weights_are_summed_over_other_axes(reference_group, experts):
    """Two groups of two ranks: the weights are replicated over "data"."""
    mesh = make_mesh((2, 2), ("data", "ep"))
    group = reference_group(mesh)
    case = make_case(SHAPE, 4)
    x, topk_idx, topk_weights, w_gate_up, w_down, cotangent = case
    weights = [w.reshape(-1, *w.shape[2:]) for w in (w_gate_up, w_down)]
    tokens = P(("data", "ep"))
    layer = jax.shard_map(
        partial(ep.moe.mlp, group=group, experts=experts),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, P("ep"), P("ep")),
        out_specs=tokens,
    )
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, topk_idx, topk_weights)]
    actual = value_and_gradients(layer, [*flat, *weights, cotangent])
    expected = dense([*(a[None] for a in (*flat, *weights)), cotangent.reshape(1, -1, SHAPE.hidden)])
    assert_close(actual, [a[0] for a in expected], TOLERANCE["float32"])


def equations(jaxpr):
    """The names of all primitives in a jaxpr, and of its inner ones."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


COLLECTIVES = {"all_gather", "all_to_all", "psum", "psum_invariant", "psum_scatter", "reduce_scatter", "ppermute"}


def count(function, *args):
    """The collectives of the reference backend, and the matmuls of ragged groups."""
    names = [*equations(jax.make_jaxpr(function)(*args).jaxpr)]
    return sum(name in COLLECTIVES for name in names), sum(name.startswith("ragged_dot") for name in names)


def test_checkpoint_policies_save_what_is_named(reference_group, mesh):
    group, case = reference_group(mesh), make_case(SHAPE, mesh.size)
    x, topk_idx, topk_weights, *weights, cotangent = case

    def gradient(policy):
        layer = mlp_on(mesh, group, experts="ragged_dot")

        @partial(jax.checkpoint, policy=policy)
        def total(x, topk_weights, *weights):
            # The backward pass of the sine needs the layer's output.
            return jnp.sum(jnp.sin(layer(x, topk_idx, topk_weights, *weights)) * cotangent)

        return jax.grad(total, argnums=(0, 1, 2, 3))

    def measured(*names):
        return count(gradient(jax.checkpoint_policies.save_only_these_names(*names)), x, topk_weights, *weights)

    everything = dispatch, gate_up, down, output = (
        "jax_ep_dispatch",
        "jax_ep_moe_gate_up",
        "jax_ep_moe_down",
        "jax_ep_moe_output",
    )
    collectives, matmuls = measured(*everything)
    for saved, sends_again, more_matmuls in [
        ((), True, 2),
        ((dispatch,), True, 2),
        ((gate_up, down, output), True, 0),
        ((dispatch, down, output), False, 1),
        ((dispatch, gate_up, output), False, 1),
        ((dispatch, gate_up, down), True, 0),
    ]:
        found = measured(*saved)
        assert (found[0] > collectives, found[1]) == (sends_again, matmuls + more_matmuls), saved


def test_scan_over_layers_with_remat(reference_group, mesh):
    """Two layers with weights of their own; dense, one after the other."""
    group = reference_group(mesh)
    x, topk_idx, topk_weights, *weights, cotangent = make_case(SHAPE, mesh.size)
    stacked = [np.stack([w, w[:, ::-1]], axis=1) for w in weights]  # [R, layers, ...]

    def scanned(x, topk_idx, topk_weights, *weights):
        def block(x, w):
            return x + ep.moe.mlp(x, topk_idx, topk_weights, *w, group=group), None

        policy = jax.checkpoint_policies.save_only_these_names("jax_ep_dispatch", "jax_ep_moe_gate_up")
        return jax.lax.scan(jax.checkpoint(block, policy=policy), x, weights)[0]

    def unrolled(x, topk_idx, topk_weights, *weights):
        for i in range(2):
            tokens = (a.reshape(-1, a.shape[-1]) for a in (x, topk_idx, topk_weights))
            of_layer = (w[:, i].reshape(-1, *w.shape[3:]) for w in weights)
            x = x + oracle.dense_mlp(*tokens, *of_layer).reshape(x.shape)
        return x

    case = x, topk_idx, topk_weights, *stacked, cotangent
    assert_close(value_and_gradients(spmd(scanned, mesh), case), value_and_gradients(unrolled, case), 1e-5)


def test_vmap_over_weights(reference_group, mesh):
    """Two sets of weights, say of an ensemble, on the same tokens."""
    group = reference_group(mesh)
    x, topk_idx, topk_weights, *weights, _ = make_case(SHAPE, mesh.size)
    stacked = [np.stack([w, 2 * w], axis=1) for w in weights]
    layer = partial(ep.moe.mlp, group=group)
    actual = run_spmd(jax.vmap(layer, in_axes=(None, None, None, 0, 0)), mesh, x, topk_idx, topk_weights, *stacked)
    one_layer = jax.jit(mlp_on(mesh, group))
    for i, factor in enumerate((1, 2)):
        one = one_layer(x, topk_idx, topk_weights, *(factor * w for w in weights))
        np.testing.assert_allclose(actual[:, i], to_numpy(one), rtol=1e-5, atol=1e-5)


def test_auto_pads_where_rows_are_few(reference_group, mesh):
    tokens = _layer.FEW_ROWS // mesh.size
    shape = dataclasses.replace(SHAPE, tokens=tokens + 1)
    group, (x, ids, gates, *weights, _) = reference_group(mesh, shape), make_case(shape, mesh.size)

    def uses_ragged_groups(tokens, **options):
        args = *(a[:, :tokens] for a in (x, ids, gates)), *weights
        return count(mlp_on(mesh, group, **options), *args)[1] > 0

    assert not uses_ragged_groups(tokens)
    assert uses_ragged_groups(tokens + 1)
    assert uses_ragged_groups(tokens, capacity=64)
    assert uses_ragged_groups(tokens, alignment=8)
    assert not uses_ragged_groups(tokens + 1, experts="einsum")
    assert uses_ragged_groups(tokens, experts="ragged_dot")


def test_the_grouped_gemm_is_taken_where_all_devices_can_run_it(reference_group, mesh, monkeypatch):
    group, arrays = reference_group(mesh), make_case(SHAPE, mesh.size)[:-1]
    asked, taken = [], []

    def take(rows, w, group_sizes, implementation, copies, leaves_empty_copies):
        taken.append(implementation)
        return jax.lax.ragged_dot(rows, w, group_sizes)

    def answer(reason, *arguments):
        asked.append(arguments)
        return reason

    monkeypatch.setattr(_layer, "portable_matmul", take)
    monkeypatch.setattr(_layer, "no_grouped_reason", partial(answer, None))
    jax.eval_shape(mlp_on(mesh, group, experts="grouped"), *arrays)
    jax.eval_shape(mlp_on(mesh, group, capacity=64), *arrays)
    assert taken == ["grouped"] * 2 + ["ragged_dot"] * 2  # "auto", in a group without the grouped GEMM
    monkeypatch.setattr(group._impl, "has_grouped_gemm", True)
    jax.eval_shape(mlp_on(mesh, group, capacity=64), *arrays)
    assert taken[4:] == ["grouped"] * 2
    assert asked == [(group.dtype, (32, 48, 24), list(mesh.devices.flat)), (group.dtype, (32, 48, 24))]
    monkeypatch.setattr(_layer, "no_grouped_reason", partial(answer, "it rains"))
    with pytest.raises(ValueError, match=r"moe\.mlp: experts is 'grouped', but it rains; use experts='auto'"):
        jax.eval_shape(mlp_on(mesh, group, experts="grouped"), *arrays)
    jax.eval_shape(mlp_on(mesh, group, capacity=64), *arrays)
    assert taken[6:] == ["ragged_dot"] * 2


@pytest.mark.parametrize("alignment", [1, 4])
def test_row_expert(reference_group, mesh, layout, alignment):
    group, (x, topk_idx, *_) = reference_group(mesh), make_case(SHAPE, mesh.size)

    def found(x, topk_idx):
        recv = ep.dispatch(x, topk_idx, group=group, layout=layout, alignment=alignment)
        return recv.row_expert

    where = oracle.route(topk_idx, num_experts=SHAPE.num_experts, layout=layout, alignment=alignment)
    sizes, local = where.group_sizes, SHAPE.num_experts // mesh.size
    if layout == "expert":
        rows = np.arange(where.source.shape[2])
        expected = np.where(rows < sizes[..., None], np.arange(local)[None, :, None], -1)
    else:
        capacity = where.source.shape[1]
        expected = np.stack([np.append(np.arange(local).repeat(s), np.full(capacity - s.sum(), -1)) for s in sizes])
    assert_same_bits(run_spmd(found, mesh, x, topk_idx), expected.astype(np.int32))


def cast(dtype):
    return lambda array: array.astype(dtype)


MLP = [
    ({"x": 1.0}, TypeError, ["a float", "array"]),
    ({"x": lambda x: x[..., :16]}, ValueError, [16, "group.hidden", 32]),
    ({"x": cast(jnp.bfloat16)}, TypeError, ["bfloat16", "x.astype('float32')"]),
    ({"topk_idx": lambda ids: ids[:5]}, ValueError, ["(5, 2)", "(6,)"]),
    ({"topk_idx": lambda ids: ids[:, :1]}, ValueError, ["group.top_k", 2]),
    ({"topk_idx": lambda ids: ids * 0.5}, TypeError, ["float32", "swapped"]),
    ({"topk_weights": lambda w: w[:, 0]}, ValueError, ["(6,)", "leading"]),
    ({"topk_weights": cast(jnp.bfloat16)}, TypeError, ["bfloat16", "topk_weights.astype('float32')"]),
    ({"w_gate_up": lambda w: jnp.concatenate([w, w])}, ValueError, ["(4, 32, 48)", "E_local = 2", "in_specs", "'ep'"]),
    ({"w_gate_up": lambda w: w[0]}, ValueError, ["(32, 48)", "E_local"]),
    ({"w_gate_up": lambda w: w[:, :16]}, ValueError, ["(2, 16, 48)", "group.hidden", 32]),
    ({"w_gate_up": lambda w: w[:, :, :47]}, ValueError, [47, "2I", "even"]),
    ({"w_gate_up": cast(jnp.bfloat16)}, TypeError, ["bfloat16", "w_gate_up.astype('float32')"]),
    ({"w_gate_up": None}, TypeError, ["NoneType", "array"]),
    ({"w_gate_up": lambda w: w[:, :, :24]}, ValueError, ["(2, 32, 24)", "w_down has I = 24", "2I = 48"]),
    ({"w_down": lambda w: w[:1]}, ValueError, ["(1, 24, 32)", "E_local = 2", "in_specs"]),
    ({"w_down": lambda w: w[:, :12]}, ValueError, ["(2, 12, 32)", "I = 24"]),
    ({"w_down": lambda w: w.swapaxes(1, 2)}, ValueError, ["(2, 32, 24)", "I = 24"]),
    ({"w_down": cast(jnp.float16)}, TypeError, ["float16", "w_down.astype('float32')"]),
    ({"activation": "silu"}, TypeError, ["'silu'", "function", "jax.nn.silu"]),
    ({"activation": lambda gate: gate[..., :3]}, ValueError, ["3", "same shape"]),
    ({"activation": lambda gate: None}, ValueError, ["NoneType", "same shape"]),
    ({"balance": -1}, ValueError, [-1, "at least 0"]),
    ({"balance": True}, TypeError, ["True", "number"]),
    ({"experts": "dense"}, ValueError, ["dense", "auto", "grouped", "einsum", "ragged_dot", "tokamax"]),
    ({"layout": "expert"}, ValueError, ["layout is 'expert'", "'token'", "experts='einsum'"]),
    ({"layout": "token", "experts": "einsum"}, ValueError, ["layout is 'token'", "experts is 'einsum'"]),
    ({"capacty": 8}, TypeError, ["capacty", "capacity"]),
    ({"plan": 0.0}, TypeError, ["a float", "mlp makes its own plan", "balance=0.0"]),
    ({"scales_format": "ue8m0"}, ValueError, ["'ue8m0'", "'float32'", "dequantize=False"]),
    ({"capacity": 10, "alignment": 4}, ValueError, [10, 4, 12]),
    ({"wire": "fp4"}, ValueError, ["fp4", "fp8"]),
    ({"combine_wire": "fp8_e5m2"}, ValueError, ["fp8_e5m2", "'fp8_pow2'"]),
    ({"combine_grad_wire": "fp4"}, ValueError, ["fp4", "fp8_e5m2"]),
    ({"group": "ep"}, TypeError, ["str", "Group"]),
]


@pytest.mark.parametrize(("changes", "error", "mentions"), MLP)
def test_errors_of_mlp(reference_group, mesh, changes, error, mentions):
    names = "x", "topk_idx", "topk_weights", "w_gate_up", "w_down"
    group, case = reference_group(mesh), make_case(SHAPE, mesh.size)[:-1]

    def wrong(*arrays):
        good = dict(zip(names, arrays, strict=True)) | {"group": group}
        changed = {
            name: change(good[name]) if callable(change) and name in names else change
            for name, change in changes.items()
        }
        return ep.moe.mlp(**good | changed)

    with pytest.raises(error) as raised:
        jax.eval_shape(spmd(wrong, mesh), *case)
    assert_names(raised.value, next(iter(changes)), *mentions)
    assert re.match(r"moe\.mlp: |dispatch: (capacity|scales_format|wire)", str(raised.value))


def test_profilers_show_the_name(reference_group, mesh):
    lowered = jax.jit(mlp_on(mesh, reference_group(mesh))).lower(*make_case(SHAPE, mesh.size)[:-1])
    assert "jax_ep.moe.mlp/" in lowered.as_text(debug_info=True)


def test_outside_of_shard_map(reference_group, mesh):
    x, topk_idx, topk_weights, *weights, _ = (a[0] for a in make_case(SHAPE, mesh.size))
    with pytest.raises(ValueError, match=r"moe\.mlp: called outside jax\.shard_map"):
        ep.moe.mlp(x, topk_idx, topk_weights, *weights, group=reference_group(mesh))


def test_too_many_tokens(reference_group, mesh):
    group, (x, topk_idx, topk_weights, *weights, _) = reference_group(mesh), make_case(SHAPE, mesh.size)
    tokens = (np.stack([a, a], axis=1) for a in (x, topk_idx, topk_weights))
    with pytest.raises(ValueError, match=r"moe\.mlp: x has T = 12 rows.*max_tokens_per_rank=12"):
        jax.eval_shape(mlp_on(mesh, group), *tokens, *weights)
