"""balance, replicate and dispatch(plan=): bit for bit against the oracle, and a layer along a plan as a dense layer.

A test compiles one program per group, and runs it with all routings.
"""

import dataclasses
import math
import os
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import assert_dispatched, assert_same_bits, make_mesh, open_group, run_spmd, spmd, to_numpy
from jax_ep._balance import with_copies
from jax_ep.moe import _layer
from shapes import Shape
from test_errors import assert_names
from test_moe import equations

HIDDEN, TOKENS = 16, 6

# Options of XLA: these programs take much longer to compile than to run.
QUICK = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int = 4
    local: int = 2
    top_k: int = 2
    replicas: int = 2
    tolerance: float = 0.0
    layout: str = "ragged"
    alignment: int = 1

    @property
    def num_experts(self):
        return self.num_ranks * self.local

    @property
    def shape(self):
        return Shape(self.name, self.num_experts, self.top_k, HIDDEN, TOKENS, "float32")

    @property
    def capacity(self):
        """The default of a dispatch along a plan, as the contract has it."""
        if self.layout == "expert":
            return self.num_ranks * TOKENS
        if self.replicas == self.local:
            rows = oracle.limit(TOKENS * self.top_k, self.tolerance)
        else:
            rows = self.num_ranks * TOKENS * min(self.top_k, self.local)
        return oracle.round_up(rows + (self.local + self.replicas) * (self.alignment - 1), self.alignment)

    def expected(self, x, topk_idx, topk_weights):
        """The plan, and what dispatch along it returns."""
        plan = oracle.balance(topk_idx, num_experts=self.num_experts, num_slots=self.replicas, tolerance=self.tolerance)
        options = {"layout": self.layout, "capacity": self.capacity, "alignment": self.alignment}
        num_slots = self.num_ranks * (self.local + self.replicas)
        return plan, oracle.dispatch(x, plan.topk_slot, topk_weights, num_experts=num_slots, **options)


CASES = {
    case.name: case
    for case in [
        Case("aligned", alignment=4),
        Case("expert", layout="expert"),
        Case("one_expert_per_rank", local=1, top_k=3, replicas=1),
        Case("one_rank", num_ranks=1, local=4, replicas=4),
        Case("few_slots", local=3, replicas=1, alignment=2),
        Case("no_slots", replicas=0),
        Case("tolerance", local=3, replicas=3, tolerance=0.25),
    ]
}
ROUTINGS = ["uniform", "skewed", "one_hot", "one_rank", "even", "holes", "duplicates", "nothing"]


@cache
def make_case(routing, case):
    """x, topk_idx, topk_weights and w of all ranks. Weights are powers of two, so that products are exact."""
    rng = np.random.default_rng(ROUTINGS.index(routing))
    R, E, K = case.num_ranks, case.num_experts, case.top_k
    popularity = 1.5 * rng.normal(size=E) if routing in ("skewed", "holes") else np.zeros(E)
    topk_idx = np.argsort(-(rng.gumbel(size=(R, TOKENS, E)) + popularity), axis=-1)[..., :K]
    if routing == "one_hot":
        topk_idx[topk_idx == E // 2] = topk_idx[..., :1].repeat(K, -1)[topk_idx == E // 2]
        topk_idx[..., 0] = E // 2
    elif routing == "one_rank":  # the other ranks have no rows at all
        topk_idx = (np.arange(K) + rng.integers(K, size=(R, TOKENS, 1))) % min(K, case.local) + E - case.local
    elif routing == "even":  # every expert has as many rows as any other if they can be shared out evenly
        topk_idx = np.arange(R * TOKENS * K).reshape(R, TOKENS, K) % E
    elif routing == "holes":
        outside = np.array([-1, -(2**31), E, E + 1, 2**31 - 1])
        topk_idx = np.where(rng.random(topk_idx.shape) < 0.4, rng.choice(outside, topk_idx.shape), topk_idx)
        topk_idx[0] = -1
    elif routing == "duplicates":
        topk_idx[:, ::2] = topk_idx[:, ::2, :1]
    elif routing == "nothing":
        topk_idx[:] = E
    x = rng.standard_normal((R, TOKENS, HIDDEN), np.float32)
    topk_weights = np.exp2(rng.integers(-2, 3, topk_idx.shape)).astype(np.float32)
    w = rng.standard_normal((R, case.local, HIDDEN, HIDDEN), np.float32) / np.float32(math.sqrt(HIDDEN))
    return x, topk_idx.astype(np.int32), topk_weights, w


def routings_of(case):
    """With fewer slots than experts, the default capacity is for tokens that name no expert twice."""
    repeats = case.num_experts < case.top_k or case.replicas < case.local
    return [routing for routing in ROUTINGS if not (repeats and routing in ("duplicates", "one_hot", "one_rank"))]


def dense(x, topk_idx, topk_weights, w):
    """Every expert on every token: [R, T, H]."""
    w = w.reshape(-1, HIDDEN, HIDDEN)
    named = jax.nn.one_hot(topk_idx, len(w))  # ids that name no expert have no one
    return jnp.einsum("rth,ehi,rtke,rtk->rti", x, w, named, topk_weights, precision="highest")


def experts(case, rows, w, group_sizes):
    if case.layout == "expert":
        return jnp.einsum("ech,ehi->eci", rows, w, precision="highest")
    return jax.lax.ragged_dot(rows, w, group_sizes, precision="highest")


def layer(group, case, x, topk_idx, topk_weights, w):
    plan = ep.balance(topk_idx, group=group, tolerance=case.tolerance)
    options = {"layout": case.layout, "alignment": case.alignment, "zero_pad": True, "plan": plan}
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **options)
    return ep.combine(experts(case, recv.x, ep.replicate(w, plan), recv.group_sizes), recv)


@pytest.fixture(scope="module")
def program(make_group):
    """program(function, case, **settings): function(group, case, ...) compiled for the case's group, once."""
    programs = {}

    def compiled(function, case, backend="given", **settings):
        key = function, case.name, backend, tuple(settings.items())
        if key not in programs:
            mesh = make_mesh((case.num_ranks,))
            settings = {"replicas": case.replicas} | settings
            group = make_group(mesh, case.shape, **settings | ({} if backend == "given" else {"backend": backend}))
            programs[key] = jax.jit(spmd(partial(function, group, case), mesh), compiler_options=QUICK)
        return lambda *arrays: to_numpy(programs[key](*arrays))

    return compiled


# --- values ---------------------------------------------------------------------------------------------------------


def every_operation(group, case, x, topk_idx, topk_weights, w):
    plan = ep.balance(topk_idx, group=group, tolerance=case.tolerance)
    options = {"layout": case.layout, "alignment": case.alignment, "zero_pad": True, "plan": plan}
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **options)
    w = ep.replicate({"w": w, "rank": jnp.arange(case.local) + 10 * jax.lax.axis_index("ep")}, plan)
    like = ep.dispatch_like(x[:, :3], recv)
    y = experts(case, recv.x, w["w"], recv.group_sizes)
    out = ep.combine(y, recv)
    # Behind the others, as XLA may start any number of calls before it ends the first.
    (x, y), (recv, like, out) = jax.lax.optimization_barrier(((x, y), (recv, like, out)))
    done = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, **options))
    done_out = ep.combine_done(ep.combine_start(y, done))
    return (plan.slot_expert, plan.num_rows, plan.home_rows), w, recv, (done.x, done.counts), like, out, done_out


@pytest.mark.parametrize("name", CASES)
def test_values(program, name):
    case = CASES[name]
    run = program(every_operation, case)
    for routing in routings_of(case):
        x, topk_idx, topk_weights, w = inputs = make_case(routing, case)
        plan, copied, recv, done, like, out, done_out = run(*inputs)
        expected_plan, expected = case.expected(x, topk_idx, topk_weights)
        for found, attribute in zip(plan, ("slot_expert", "num_rows", "home_rows"), strict=True):
            assert_same_bits(found, getattr(expected_plan, attribute), f"{routing}: {attribute}")
        assert_dispatched(recv, expected, zero_pad=True)
        assert not recv.num_dropped.any()
        np.testing.assert_array_equal(recv.counts.sum(axis=1), expected_plan.num_rows)
        assert_same_bits(done[0], recv.x)
        assert_same_bits(done[1], recv.counts)
        holds_token = expected.route.is_token
        assert_same_bits(like[holds_token], recv.x[holds_token][:, :3])
        assert_same_bits(copied["w"], oracle.replicate(w, expected_plan.slot_expert))
        numbers = np.arange(case.local, dtype=np.int32) + 10 * np.arange(case.num_ranks, dtype=np.int32)[:, None]
        assert_same_bits(copied["rank"], oracle.replicate(numbers, expected_plan.slot_expert))
        np.testing.assert_allclose(out, dense(*inputs), rtol=1e-4, atol=1e-4)
        assert_same_bits(done_out, out)
        promise(case, topk_idx, expected_plan)


def promise(case, topk_idx, plan):
    """What the contract promises of every plan."""
    R, home = case.num_ranks, plan.home_rows
    most = oracle.limit(-(-int(home.sum()) // R), case.tolerance)
    assert plan.num_rows.sum() == home.sum() == np.sum((topk_idx >= 0) & (topk_idx < case.num_experts))
    assert plan.num_rows.max() <= max(home.max(), most)
    if case.replicas == case.local:
        assert plan.num_rows.max() <= most
    if home.max() <= most or not case.replicas:
        assert (plan.slot_expert < 0).all()
    for rank, copies in enumerate(plan.slot_expert):
        homes = {int(expert) // case.local for expert in copies if expert >= 0}
        assert len(homes) <= 1 and rank not in homes


# --- gradients, and the bits of sums --------------------------------------------------------------------------------


def value_and_gradients(group, case, x, topk_idx, topk_weights, w, cotangent):
    out, transpose = jax.vjp(lambda x, weights, w: layer(group, case, x, topk_idx, weights, w), x, topk_weights, w)
    return out, *transpose(cotangent)


@pytest.mark.parametrize("name", ["aligned", "expert"])
def test_gradients(program, name):
    """As those of a dense layer; and as on the reference backend, bit for bit, where the order of sums is promised."""
    case = CASES[name]
    run, reference = (program(value_and_gradients, case, backend) for backend in ("given", "reference"))
    cotangent = np.random.default_rng(1).standard_normal((case.num_ranks, TOKENS, HIDDEN), np.float32)
    for routing in routings_of(case):
        x, topk_idx, topk_weights, w = inputs = make_case(routing, case)
        found = run(*inputs, cotangent)
        out, transpose = dense_vjp(x, topk_idx, topk_weights, w)
        for one, other in zip(found, (out, *transpose(cotangent)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=routing)
        same = reference(*inputs, cotangent)
        np.testing.assert_allclose(found[2], same[2], rtol=1e-5, atol=1e-5)  # sums over channels, in another order
        if "JAX_EP_NODE_SIZE" not in os.environ:  # over a network, sums have another order
            for i in (0, 1, 3):
                assert_same_bits(found[i], same[i], f"{routing}: {i}")


@jax.jit
def dense_vjp(x, topk_idx, topk_weights, w):
    return jax.vjp(lambda x, weights, w: dense(x, topk_idx, weights, w), x, topk_weights, w)


def test_gradients_of_copies_are_summed_in_float32():
    """Every rank has a copy of one expert of rank 0. A sum in bfloat16 would lose the small gradients."""
    case = Case("copies", num_ranks=4)
    mesh = make_mesh((4,))
    topk_idx = np.zeros((4, TOKENS, 2), np.int32)

    def gradient(topk_idx, w, cotangent):
        plan = ep.balance(topk_idx, group=group)
        _, transpose = jax.vjp(lambda w: ep.replicate(w, plan), w)
        return plan.slot_expert, transpose(cotangent)[0]

    cotangent = np.zeros((4, 4, 1), jnp.bfloat16)
    cotangent[:, :, 0] = [[256, 5, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, -256, 0]]
    with open_group(mesh, case.shape, backend="reference", replicas=2) as group:
        slots, w = run_spmd(gradient, mesh, topk_idx, np.zeros((4, 2, 1), jnp.bfloat16), cotangent)
    assert slots.tolist() == [[-1, -1], [0, -1], [0, -1], [0, -1]]
    assert w[:, :, 0].tolist() == [[2, 5], [0, 0], [0, 0], [0, 0]]


# --- calls without a plan in a group with replicas ------------------------------------------------------------------


def without_plan(group, case, x, topk_idx, topk_weights, w, capacity=None):
    """A layer in three ways, with its gradients."""
    options = {"layout": case.layout, "alignment": case.alignment, "zero_pad": True, "capacity": capacity}

    def outputs(x, topk_weights, w):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, **options)
        return ep.combine(experts(case, recv.x, w, recv.group_sizes), recv), recv

    out, transpose, recv = jax.vjp(outputs, x, topk_weights, w, has_aux=True)
    like = ep.dispatch_like(x[:, :3], recv)
    gradients = transpose(out)
    (x, w), rest = jax.lax.optimization_barrier(((x, w), (recv, like, out, gradients)))
    done = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, **options))
    y = experts(case, done.x, w, done.group_sizes)
    return *rest, ep.combine_done(ep.combine_start(y, done))


@pytest.mark.parametrize(("name", "capacity"), [("aligned", None), ("expert", 8)])
def test_without_a_plan(program, name, capacity):
    """Results have an entry per home expert, and are those of a group without replicas."""
    case = CASES[name]
    inputs = x, topk_idx, topk_weights, w = make_case("skewed", case)
    function = WITHOUT_PLAN[capacity]
    recv, like, out, gradients, done = program(function, case)(*inputs)
    # If rows do not fit, the source rank that gets what is left over is the one of the slot's number, not the expert's.
    local, per_rank = case.local, case.local + case.replicas
    slots = np.where(
        (topk_idx >= 0) & (topk_idx < case.num_experts), topk_idx // local * per_rank + topk_idx % local, -1
    )
    room = capacity or oracle.default_capacity(4, TOKENS, case.top_k, local, case.layout, case.alignment)
    expected = oracle.dispatch(
        x, slots, topk_weights, num_experts=4 * per_rank, layout=case.layout, alignment=case.alignment, capacity=room
    )
    route = expected.route
    assert recv.num_dropped.any() == bool(capacity)
    assert_same_bits(recv.counts, route.counts[:, :local])
    assert_same_bits(recv.group_sizes, route.group_sizes[:, :local])
    assert_same_bits(recv.num_dropped, route.num_dropped)
    home = np.s_[:, :local] if case.layout == "expert" else np.s_[:]
    assert_same_bits(recv.x, expected.x[home])
    assert_same_bits(recv.weights, expected.weights[home])
    holds_token = route.is_token[home]
    assert_same_bits(like[holds_token], expected.x[home][holds_token][:, :3])
    assert_same_bits(done, out)
    kept = np.where(route.kept, topk_weights, 0)
    expected_out, transpose = dense_vjp(x, topk_idx, kept, w)
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-4)
    x_gradient, weights_gradient, w_gradient = transpose(out)
    for one, other in zip(gradients, (x_gradient, weights_gradient * route.kept, w_gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


WITHOUT_PLAN = {capacity: partial(without_plan, capacity=capacity) for capacity in (None, 8)}


def test_all_to_all(program):
    """all_to_all knows home experts only."""
    case = CASES["aligned"]
    x, topk_idx, _, _ = make_case("skewed", case)
    splits = np.array([np.bincount(ids[:, 0], minlength=case.num_experts) for ids in topk_idx], np.int32)
    back, arrived, blocks = program(there_and_back, case)(x, splits)
    expected, expected_splits = oracle.all_to_all(x, splits)
    assert_same_bits(arrived, expected_splits)
    for rank, source in np.ndindex(4, 4):
        num_rows = expected_splits[rank, source].sum()
        assert_same_bits(blocks[rank, source, :num_rows], expected[rank, source, :num_rows])
    assert_same_bits(back, x)


def there_and_back(group, case, x, splits):
    recv = ep.all_to_all(x, splits, group=group)
    return ep.all_to_all_back(recv.x, splits, group=group), recv.splits, recv.x


# --- the layer, and transformations ---------------------------------------------------------------------------------

INNER = 8


@pytest.fixture(scope="module")
def on_reference():
    """on_reference(function, case, *arrays, **settings): function(group, case, ...) on a group of plain JAX."""

    def run(function, case, *arrays, **settings):
        mesh = make_mesh((case.num_ranks,))
        with open_group(mesh, case.shape, **{"backend": "reference", "replicas": case.replicas} | settings) as group:
            return to_numpy(jax.jit(spmd(partial(function, group, case), mesh), compiler_options=QUICK)(*arrays))

    return run


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ({"balance": 0.0, "experts": "ragged_dot"}, 2),
        ({"balance": 0.25, "experts": "einsum"}, 2),
        ({"balance": 0.0, "experts": "ragged_dot"}, 0),
        ({"balance": 0.0, "layout": "token"}, 2),
    ],
    ids=str,
)
def test_mlp(on_reference, options, replicas):
    case = CASES["expert"]
    x, topk_idx, topk_weights, _ = make_case("skewed", case)
    rng = np.random.default_rng(1)
    w_gate_up = rng.standard_normal((4, case.local, HIDDEN, 2 * INNER), np.float32) / 4
    w_down = rng.standard_normal((4, case.local, INNER, HIDDEN), np.float32) / 3
    function = partial(mlp_and_gradients, options=options)
    arrays = x, topk_idx, topk_weights, w_gate_up, w_down
    with jax.default_matmul_precision("highest"):
        out, *gradients = on_reference(function, case, *arrays, replicas=replicas)

    def dense_mlp(x, topk_weights, w_gate_up, w_down):
        weights = (w.reshape(-1, *w.shape[2:]) for w in (w_gate_up, w_down))
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, topk_idx, topk_weights))
        return oracle.dense_mlp(*flat, *weights).reshape(x.shape)

    expected, transpose = jax.vjp(jax.jit(dense_mlp), x, topk_weights, w_gate_up, w_down)
    for one, other in zip((out, *gradients), (expected, *transpose(expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def mlp_and_gradients(group, case, x, topk_idx, topk_weights, w_gate_up, w_down, *, options):
    def mlp(x, topk_weights, *weights):
        return ep.moe.mlp(x, topk_idx, topk_weights, *weights, group=group, **options)

    out, transpose = jax.vjp(mlp, x, topk_weights, w_gate_up, w_down)
    return out, *transpose(out)


def scanned(layer, ids, x, w):
    """Two layers, each with ids of its own, with or without shard_map around them."""

    def step(x, ids):
        return x + layer(x, ids, w), None

    return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), x, ids)[0]


def test_scan_and_remat(on_reference):
    case = CASES["aligned"]
    x, topk_idx, topk_weights, w = make_case("skewed", case)
    both_ids = topk_idx, (topk_idx * 3 + 1) % case.num_experts

    def balanced(group, case, x, topk_weights, w, *both_ids):
        def of_group(x, ids, w):
            return layer(group, case, x, ids, topk_weights, w)

        out, transpose = jax.vjp(partial(scanned, of_group, jnp.stack(both_ids)), x, w)
        return out, *transpose(out)

    def of_dense(x, ids, w):
        return dense(x, ids, topk_weights, w)

    found = on_reference(balanced, case, x, topk_weights, w, *both_ids)
    expected, transpose = jax.vjp(jax.jit(partial(scanned, of_dense, jnp.stack(both_ids))), x, w)
    for one, other in zip(found, (expected, *transpose(expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_a_checkpoint_policy_keeps_or_repeats_the_copies():
    case, mesh = CASES["aligned"], make_mesh((4,))
    _, topk_idx, _, w = make_case("one_hot", case)

    def num_exchanges(policy):
        def gradient(topk_idx, w):
            plan = ep.balance(topk_idx, group=group)
            kept = jax.checkpoint(lambda w: jnp.sin(ep.replicate(w, plan)).sum(), policy=policy)
            return jax.grad(kept)(w)

        return [*equations(jax.make_jaxpr(spmd(gradient, mesh))(topk_idx, w).jaxpr)].count("all_to_all")

    save = jax.checkpoint_policies.save_only_these_names
    with open_group(mesh, case.shape, backend="reference", replicas=case.replicas) as group:
        assert num_exchanges(save("jax_ep_replicate")) == 2
        assert num_exchanges(save()) == 3


def batch(group, case, topk_weights, w, xs, ids):
    return jax.vmap(lambda x, ids: layer(group, case, x, ids, topk_weights, w))(xs, ids)


def test_vmap(on_reference):
    """The plans of the two elements copy different experts."""
    case = CASES["aligned"]
    x, topk_idx, topk_weights, w = make_case("skewed", case)
    xs, ids = np.stack([x, 2 * x], axis=1), np.stack([topk_idx, case.num_experts - 1 - topk_idx], axis=1)
    found = on_reference(batch, case, topk_weights, w, xs, ids)
    for i in range(2):
        np.testing.assert_allclose(found[:, i], dense(xs[:, i], ids[:, i], topk_weights, w), rtol=1e-4, atol=1e-4)


def test_gradient_of_a_vmap_with_copies_apart():
    """All elements share the weights: what goes straight to them counts once, and the copies of each element count."""
    case, mesh = CASES["aligned"], make_mesh((4,))
    _, topk_idx, _, w = make_case("skewed", case)
    ids = np.stack([topk_idx, case.num_experts - 1 - topk_idx], axis=1)
    with open_group(mesh, case.shape, backend="reference", replicas=case.replicas) as group:

        def loss(w, ids):
            plan = ep.balance(ids, group=group)
            home, copies = with_copies(w, plan)
            copies = jnp.where((plan.slot_expert >= 0)[:, None, None], copies, 0)
            return jnp.sum(home * home) + 3 * jnp.sum(copies * copies)

        def gradients(ids, w):
            together = jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, ids)))(w)
            one_by_one = sum(jax.grad(loss)(w, ids[i]) for i in range(2))
            return together, one_by_one, jax.grad(loss)(w, ids[0])

        together, one_by_one, of_first = run_spmd(gradients, mesh, ids, w)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-5)
    assert np.abs(of_first - 2 * w).max() > 0.1  # some experts have copies


def test_gradients_of_empty_copies_are_zero_where_rows_may_be_dropped(monkeypatch):
    """The grouped GEMM may leave them unwritten only if each copy has rows."""
    case, asked = CASES["aligned"], []

    def matmul(rows, w, group_sizes, *, implementation, copies, leaves_empty_copies):
        asked.append((copies is not None, leaves_empty_copies))
        return jnp.zeros((len(rows), w.shape[2]), rows.dtype)

    monkeypatch.setattr(_layer, "portable_matmul", matmul)
    monkeypatch.setattr(_layer, "no_grouped_reason", lambda *_: None)
    x, topk_idx, topk_weights, _ = make_case("skewed", case)
    weights = np.zeros((4, case.local, HIDDEN, 16), np.float32), np.zeros((4, case.local, 8, HIDDEN), np.float32)
    mesh = make_mesh((4,))
    for replicas, options in ((case.local, {}), (case.local, {"capacity_factor": 4.0}), (1, {})):
        with open_group(mesh, case.shape, backend="reference", replicas=replicas) as group:
            layer = partial(ep.moe.mlp, group=group, balance=0.0, experts="grouped", **options)
            jax.eval_shape(spmd(layer, mesh), x, topk_idx, topk_weights, *weights)
    assert asked == [(True, True)] * 2 + [(True, False)] * 4


def test_donated_weights_with_slots_are_used_in_place():
    """Of arrays [E_local + B, ...], the copies are written behind the home experts, which stay where they are."""
    case, mesh = CASES["aligned"], make_mesh((4,))
    _, topk_idx, _, w = make_case("one_hot", case)
    with_slots = np.concatenate([w, np.full((4, case.replicas, HIDDEN, HIDDEN), np.nan, np.float32)], axis=1)

    def replicated(topk_idx, w):
        plan = ep.balance(topk_idx, group=group)
        return ep.replicate(w, plan), jax.grad(lambda w: jnp.sum(ep.replicate(w, plan)))(w)

    with open_group(mesh, case.shape, backend="reference", replicas=case.replicas) as group:
        copies = jax.jit(spmd(lambda ids, w: replicated(ids, w)[0], mesh), donate_argnums=1)
        compiled = copies.lower(topk_idx, with_slots).compile()
        found, gradient = run_spmd(replicated, mesh, topk_idx, with_slots)
        _, of_home = run_spmd(replicated, mesh, topk_idx, w)
    plan = oracle.balance(topk_idx, num_experts=case.num_experts, num_slots=case.replicas)
    assert (plan.slot_expert >= 0).any()
    assert_same_bits(found, oracle.replicate(w, plan.slot_expert))
    assert_same_bits(gradient[:, : case.local], of_home)
    assert not gradient[:, case.local :].any()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == with_slots[0].nbytes
    assert memory.output_size_in_bytes <= with_slots[0].nbytes + 64
    exchanged = (2 * case.num_ranks + case.replicas) * w[
        0, 0
    ].nbytes  # one expert to and from each rank, and the copies
    assert memory.temp_size_in_bytes < exchanged + w[0].nbytes


def test_integers_and_no_gradient():
    """A pytree with integers can be differentiated."""
    case, mesh = CASES["aligned"], make_mesh((4,))
    _, topk_idx, _, w = make_case("one_hot", case)

    def gradient(topk_idx, w):
        plan = ep.balance(topk_idx, group=group)

        def loss(tree):
            copied = ep.replicate(tree, plan)
            return jnp.sum(copied["w"] * copied["number"][:, None, None])

        number = jnp.arange(1, case.local + 1, dtype=jnp.int8)
        return jax.grad(loss, allow_int=True)({"w": w, "number": number})["w"]

    with open_group(mesh, case.shape, backend="reference", replicas=case.replicas) as group:
        found = run_spmd(gradient, mesh, topk_idx, w)
    plan = oracle.balance(topk_idx, num_experts=case.num_experts, num_slots=case.replicas)
    for expert, of_expert in enumerate(found.reshape(-1, HIDDEN, HIDDEN)):
        assert (of_expert == (1 + np.sum(plan.slot_expert == expert)) * (expert % case.local + 1)).all()


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors_mesh():
    return make_mesh((4,))


@pytest.fixture(scope="module")
def group(errors_mesh):
    with open_group(errors_mesh, CASES["aligned"].shape, backend="reference", replicas=2) as group:
        yield group


@pytest.fixture(scope="module")
def other_group(errors_mesh):
    with open_group(errors_mesh, CASES["aligned"].shape, backend="reference") as group:
        yield group


def balanced(group, ids, **options):
    return ep.balance(ids, group=group, **options)


def copied(group, ids, w):
    return ep.replicate(w, balanced(group, ids))


def dispatched(group, ids, **options):
    return ep.dispatch(jnp.zeros((len(ids), HIDDEN)), ids, group=group, **options)


SLOTS_OF = "first dimension must be E_local = 2, the experts of this rank, or E_local + B = 4"
ERRORS = [
    (lambda g, o, ids: balanced(g, ids, tolerance=-0.5), ValueError, ["balance: tolerance", -0.5, "at least 0"]),
    (lambda g, o, ids: balanced(g, ids, tolerance=float("nan")), ValueError, ["tolerance is nan", "finite"]),
    (lambda g, o, ids: balanced(g, ids, tolerance=float("inf")), ValueError, ["tolerance is inf", "finite"]),
    (lambda g, o, ids: balanced(g, ids, tolerance="0.1"), TypeError, ["tolerance", "a str", "number"]),
    (
        lambda g, o, ids: balanced(g, ids, tolerance=jnp.float32(0)),
        TypeError,
        ["an array", "number known when tracing"],
    ),
    (lambda g, o, ids: balanced(g, ids.astype("int16")), TypeError, ["topk_idx", "int16", "topk_idx.astype('int32')"]),
    (lambda g, o, ids: balanced(g, ids[:, :1]), ValueError, ["topk_idx", "(6, 1)", "group.top_k", 2]),
    (
        lambda g, o, ids: balanced(g, jnp.tile(ids, (2, 1))),
        ValueError,
        ["topk_idx has T", 12, "max_tokens_per_rank", 6],
    ),
    (lambda g, o, ids: balanced("ep", ids), TypeError, ["balance: group", "str", "jax_ep.Group"]),
    (lambda g, o, ids: ep.replicate(ids, "plan"), TypeError, ["replicate: plan", "a str", "the result of balance"]),
    (
        lambda g, o, ids: copied(g, ids, jnp.zeros((8, 3))),
        ValueError,
        ["w has shape (8, 3)", SLOTS_OF, "'ep'", "in_specs"],
    ),
    (lambda g, o, ids: copied(g, ids, {"a": [jnp.zeros(())]}), ValueError, ["w['a'][0] has shape ()", SLOTS_OF]),
    (lambda g, o, ids: copied(g, ids, {"a": 1.0}), TypeError, ["w['a']", "a float", "array"]),
    (lambda g, o, ids: dispatched(g, ids, plan=1), TypeError, ["dispatch: plan", "an int", "the result of balance"]),
    (
        lambda g, o, ids: dispatched(g, ids, plan=balanced(o, ids)),
        ValueError,
        ["another group", "replicas=0", "replicas=2"],
    ),
    (
        lambda g, o, ids: dispatched(o, ids, plan=balanced(g, ids)),
        ValueError,
        ["another group", "replicas=0", "replicas=2"],
    ),
    (lambda g, o, ids: dispatched(g, ids[:5], plan=balanced(g, ids)), ValueError, ["(6, 2)", "(5, 2)", "topk_idx"]),
]


@pytest.mark.parametrize(("call", "error", "mentions"), ERRORS)
def test_errors(group, other_group, errors_mesh, call, error, mentions):
    ids = make_case("uniform", CASES["aligned"])[1]
    with pytest.raises(error) as raised:
        run_spmd(lambda ids: jax.tree.leaves(call(group, other_group, ids)), errors_mesh, ids)
    for mention in mentions:
        assert str(mention) in str(raised.value)


def test_outside_of_shard_map(group):
    ids = make_case("uniform", CASES["aligned"])[1]
    with pytest.raises(ValueError) as raised:
        ep.balance(ids[0], group=group)
    assert_names(raised.value, "balance", "outside jax.shard_map", "mesh=group.mesh")


@pytest.mark.parametrize("replicas", [-1, 3])
def test_replicas_must_fit(errors_mesh, replicas):
    with pytest.raises(ValueError, match=rf"replicas is {replicas}; it must be 0 to 2, the number of experts per rank"):
        open_group(errors_mesh, CASES["aligned"].shape, backend="reference", replicas=replicas)


@pytest.mark.parametrize("replicas", [1.5, True, None])
def test_replicas_must_be_a_number(errors_mesh, replicas):
    with pytest.raises(TypeError, match=rf"replicas is {replicas}, an? .*; it must be an int"):
        open_group(errors_mesh, CASES["aligned"].shape, backend="reference", replicas=replicas)


def test_a_closed_group(errors_mesh):
    ids = make_case("uniform", CASES["aligned"])[1]
    group = open_group(errors_mesh, CASES["aligned"].shape, backend="reference", replicas=2)
    group.close()
    with pytest.raises(ValueError, match="balance: group is closed"):
        run_spmd(lambda ids: ep.balance(ids, group=group).slot_expert, errors_mesh, ids)


# --- the kernel -------------------------------------------------------------------------------------------------------

# Of the first, several blocks count the pairs; of the second, not all warps have room for counters.
LARGE = {
    "tokens": (Shape("many_tokens", 160, 4, HIDDEN, 1200, "float32"), 40),
    "experts": (Shape("many_experts", 2048, 8, HIDDEN, 40, "float32"), 3),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_plan_of_many_pairs(kernel_backend, adversary, name):
    shape, replicas = LARGE[name]
    mesh = make_mesh(4)
    tolerances = (0.0, 0.125)
    with open_group(mesh, shape, backend=kernel_backend, replicas=replicas) as group:

        def plans(topk_idx):
            return [ep.balance(topk_idx, group=group, tolerance=tolerance) for tolerance in tolerances]

        program = jax.jit(spmd(plans, mesh))
        rng = np.random.default_rng(adversary)
        counted = {"home_rows": 0, "planned_rows": 0, "copies": 0}
        for share in (0.0, 0.5):
            topk_idx = rng.integers(-1, shape.num_experts + 1, (4, shape.tokens, shape.top_k), dtype=np.int32)
            popular = rng.integers(0, shape.num_experts // 8, topk_idx.shape, dtype=np.int32)
            topk_idx = np.where(rng.random(topk_idx.shape) < share, popular, topk_idx)
            for plan, tolerance in zip(to_numpy(program(topk_idx)), tolerances, strict=True):
                expected = oracle.balance(
                    topk_idx, num_experts=shape.num_experts, num_slots=replicas, tolerance=tolerance
                )
                for attribute in ("slot_expert", "num_rows", "home_rows", "topk_slot"):
                    assert_same_bits(getattr(plan, attribute), getattr(expected, attribute), attribute)
                assert (plan.slots == expected.slot_expert).all()  # every rank knows all of them
                counted["home_rows"] += expected.home_rows
                counted["planned_rows"] += expected.num_rows
                counted["copies"] += (expected.slot_expert >= 0).sum(axis=1)
        stats = group.stats()
        here = list(stats.ranks)
        assert (stats.operations["balance"] == 4).all()
        for name, number in counted.items():
            np.testing.assert_array_equal(getattr(stats, name), number[here], name)


def test_more_experts_than_the_kernel_plans(kernel_backend):
    shape = Shape("too_many_experts", 4098, 2, HIDDEN, TOKENS, "float32")
    with pytest.raises(ep.Error, match="Group: a group with replicas has at most 4096 experts, not 4098"):
        open_group(make_mesh(2), shape, backend=kernel_backend, replicas=1)


def added_copies(g, slot_expert, local):
    """g [R, E_local + B, ...] -> [R, E_local, ...]: float32 sums, in the order of slots, then ranks."""
    total = g[:, :local].astype(np.float32)
    for slot in range(slot_expert.shape[1]):
        for rank, expert in enumerate(slot_expert[:, slot]):
            if expert >= 0:
                total[expert // local, expert % local] += g[rank, local + slot].astype(np.float32)
    return total.astype(g.dtype)


def test_copies_of_experts_that_take_many_rows(kernel_backend, adversary):
    """An expert takes more rows of the arena than there are, and its last row is shorter."""
    case, mesh = Case("many_rows", local=3, replicas=3), make_mesh((4,))
    rng = np.random.default_rng(adversary)
    weights = {
        "bfloat16": rng.standard_normal((4, 3, 25, 8)).astype(jnp.bfloat16),
        "float16": rng.standard_normal((4, 3, 136)).astype(np.float16),
        "float32": rng.standard_normal((4, 6, 13, 8)).astype(np.float32),  # with slots
    }
    numbers = rng.integers(-128, 127, (4, 3, 48)).astype(np.int8)
    cotangents = {name: rng.standard_normal((4, 6, *w.shape[2:])).astype(w.dtype) for name, w in weights.items()}

    def there_and_back(topk_idx, weights, numbers, cotangents):
        plan = ep.balance(topk_idx, group=group)
        copied, transpose = jax.vjp(lambda weights: ep.replicate(weights, plan), weights)
        apart, transpose_apart = jax.vjp(lambda w: with_copies(w, plan), weights["bfloat16"])
        g = cotangents["bfloat16"]
        copies = jnp.where((plan.slot_expert >= 0)[:, None, None], apart[1], 0)
        of_apart = jnp.concatenate([apart[0], copies]), transpose_apart((g[:3], g[3:]))[0]
        return copied, ep.replicate(numbers, plan), transpose(cotangents)[0], of_apart

    with open_group(mesh, case.shape, backend=kernel_backend, replicas=3) as group:
        program = jax.jit(spmd(there_and_back, mesh))
        for routing in ("one_rank", "skewed", "even"):
            topk_idx = make_case(routing, case)[1]
            slots = oracle.balance(topk_idx, num_experts=12, num_slots=3).slot_expert
            found = to_numpy(program(topk_idx, weights, numbers, cotangents))
            copied, copied_numbers, gradients, (apart, gradient_apart) = found
            assert_same_bits(copied_numbers, oracle.replicate(numbers, slots))
            assert_same_bits(apart, copied["bfloat16"], f"{routing}: copies apart")
            assert_same_bits(gradient_apart, gradients["bfloat16"], f"{routing}: gradient of copies apart")
            for name, w in weights.items():
                assert_same_bits(copied[name], oracle.replicate(w[:, :3], slots), f"{routing}: {name}")
                expected = added_copies(cotangents[name], slots, 3)
                if w.shape[1] == 6:
                    expected = np.concatenate([expected, np.zeros_like(expected)], axis=1)
                assert_same_bits(gradients[name], expected, f"{routing}: gradient of {name}")
        if not group._impl._has_network:
            operations = group.stats().operations
            assert (operations["replicate"] == 3 * 5).all() and (operations["replicate (backward)"] == 3 * 4).all()
