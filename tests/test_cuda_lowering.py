"""What the CUDA backend gives to XLA, seen where there is no GPU: programs are lowered for CUDA and not run."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from helpers import without_gpus
from jax_ep._constants import Cast

TOKENS, HIDDEN, TOP_K, EXPERTS = 8, 128, 2, 8


@pytest.fixture
def dtype():
    return jnp.bfloat16


@pytest.fixture
def group(monkeypatch, mesh, dtype):
    """A group of the CUDA backend whose native half does nothing."""
    without_gpus(monkeypatch)
    with ep.Group(
        mesh, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=TOKENS, dtype=dtype
    ) as group:
        yield group


def lowered(group, body, *shapes, check_vma=True):
    """The StableHLO, for CUDA, of `body` mapped over the group's mesh; shapes are per device."""
    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)
    arguments = [
        jax.ShapeDtypeStruct(
            (shape[0] * group.num_ranks, *shape[1:]), dtype, sharding=jax.NamedSharding(group.mesh, P("ep"))
        )
        for shape, dtype in shapes
    ]
    return jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    return re.findall(r"custom_call @(jax_ep_\w+)", text)


def hashes(text, op):
    """Of all calls of `op`, in the order of the text."""
    return re.findall(rf"custom_call @jax_ep_{op}\(.*?hash = (\d+)", text)


X = ((TOKENS, HIDDEN), jnp.bfloat16)
IDS = ((TOKENS, TOP_K), jnp.int32)
WEIGHTS = ((TOKENS, TOP_K), jnp.float32)
COLLECTIVE = re.compile(r"all_gather|all_to_all|all_reduce|reduce_scatter|collective_permute")


def layer(group, layout, x, topk_idx, topk_weights, **options):
    recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, **options)
    return ep.combine(ep.dequantize(recv), recv)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", [{}, {"wire": "fp8", "dequantize": False}, {"wire": "fp8_pow2"}], ids=str)
def test_a_layer_is_two_calls(group, layout, options, check_vma):
    text = lowered(group, partial(layer, group, layout, **options), X, IDS, WEIGHTS, check_vma=check_vma)
    assert calls(text) == ["jax_ep_dispatch", "jax_ep_combine"]
    assert not COLLECTIVE.search(text)


@pytest.mark.parametrize("check_vma", [True, False])
def test_its_gradient_is_two_more(group, layout, check_vma):
    def body(x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            return jnp.sum(layer(group, layout, x, topk_idx, topk_weights).astype(jnp.float32))

        value, gradients = jax.value_and_grad(loss, (0, 1))(x, topk_weights)
        return value[None], gradients

    text = lowered(group, body, X, IDS, WEIGHTS, check_vma=check_vma)
    assert calls(text) == ["jax_ep_dispatch", "jax_ep_combine", "jax_ep_combine_back", "jax_ep_dispatch_back"]
    assert not COLLECTIVE.search(text)


def test_a_checkpoint_policy_keeps_what_arrived(group, layout):
    """Without one, the backward pass dispatches again."""

    def body(policy, x, topk_idx, topk_weights):
        @partial(jax.checkpoint, policy=policy)
        def loss(x):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
            return jnp.sum(ep.combine(jnp.tanh(recv.x), recv).astype(jnp.float32))

        value, gradient = jax.value_and_grad(loss)(x)
        return value[None], gradient

    policies = {None: 2, jax.checkpoint_policies.save_only_these_names("jax_ep_dispatch"): 1}
    for policy, dispatches in policies.items():
        assert calls(lowered(group, partial(body, policy), X, IDS, WEIGHTS)).count("jax_ep_dispatch") == dispatches


def test_a_start_and_a_done_are_calls_of_their_own(group, layout):
    def body(x, topk_idx, topk_weights):
        recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout=layout))
        return ep.combine_done(ep.combine_start(recv.x, recv))

    text = lowered(group, body, X, IDS, WEIGHTS)
    split_phase = [f"jax_ep_{op}_{part}" for op in ("dispatch", "combine") for part in ("start", "done")]
    assert [call for call in calls(text) if call != "jax_ep_room"] == split_phase
    has_effect = [name for line in text.splitlines() if "has_side_effect = true" in line for name in calls(line)]
    assert has_effect == split_phase


def test_a_done_returns_the_memory_that_its_start_was_given(group, layout):
    """And has the start's operands, or XLA might use their memory again while they are read."""

    def body(x, topk_idx, topk_weights):
        recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout=layout))
        return ep.combine_done(ep.combine_start(recv.x, recv))

    lines = lowered(group, body, X, IDS, WEIGHTS).splitlines()
    for op, operands, results in ("dispatch", 5, 11), ("combine", 5, 1):
        (done,) = (line for line in lines if f"@jax_ep_{op}_done" in line)
        aliases = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", done)
        # The first operand and the first result are those of the program's order.
        assert aliases == [(str(1 + i), str(1 + operands + i)) for i in range(results)]


def chains(text):
    """The calls of a program, each with the number of the call whose token it takes, None if that is a constant."""
    found, defined = [], {}  # value -> its line, and the number of the next call: the newest, as functions repeat names
    for line in text.splitlines():
        if definition := re.match(r"\s*(%\w+)(?::\d+)? =", line):
            defined[definition[1]] = line, len(found)
        if call := re.search(r"custom_call @(jax_ep_(?!room)\w+)\((%\w+)(#0)?", line):
            op, token, is_first_result = call.groups()
            made_by, number = defined[token]
            assert calls(made_by) if is_first_result else "constant" in made_by
            found.append((op, number if is_first_result else None))
    return found


def test_calls_are_ordered_by_data(group, layout):
    """XLA orders two calls only if one uses a result of the other."""

    def body(x, topk_idx, topk_weights):
        def loss(x):
            recvs = [ep.dispatch(scale * x, topk_idx, group=group, layout=layout) for scale in (1, 2)]
            pending = [ep.combine_start(recv.x, recv) for recv in recvs]
            return sum(jnp.sum(ep.combine_done(each).astype(jnp.float32)) for each in pending)

        return jax.grad(loss)(x)

    found = chains(lowered(group, body, X, IDS, WEIGHTS))
    split_phase = [f"{op}_{half}" for op in ("combine", "combine_back") for half in ("start", "done")]
    ops = (["dispatch", *split_phase, "dispatch_back"]) * 2
    assert sorted(call for call, _ in found) == sorted(f"jax_ep_{op}" for op in ops)
    assert [before for _, before in found] == [None, *range(len(found) - 1)]


def test_calls_of_two_groups_are_ordered(group, mesh):
    """Each may take all SMs: in another order on another GPU, they would wait for each other."""
    shape = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
    with ep.Group(mesh, **shape) as other:

        def body(x, topk_idx):
            return [ep.dispatch(x, topk_idx, group=of, layout="ragged").x for of in (group, other, group)]

        found = chains(lowered(group, body, X, IDS))
    assert [before for _, before in found] == [None, 0, 1]


def test_inner_functions_are_ordered_by_themselves(group, layout):
    """They may run any number of times, so each has its own chain."""

    def body(x, topk_idx, topk_weights):
        def twice(x, _=None):
            for scale in (1, 2):
                x += ep.dispatch(scale * x, topk_idx, group=group, layout=layout).x.sum()
            return x, None

        x, _ = twice(x)
        x, _ = jax.lax.scan(twice, x, length=3)
        return twice(x)[0] + jax.vmap(lambda scale: twice(scale * x)[0])(jnp.ones(2, x.dtype)).sum(0)

    found = [before for _, before in chains(lowered(group, body, X, IDS, WEIGHTS, check_vma=False))]
    outer, in_scan, in_vmap = 4, 2, 2  # calls; vmap makes a loop of each call
    assert len(found) == outer + in_scan + in_vmap
    assert found.count(None) == 1 + 1 + in_vmap
    assert len({before for before in found if before is not None}) == outer - 1 + in_scan - 1


def test_what_nobody_needs_is_not_run_for_the_order(group, layout):
    """A checkpoint's backward pass runs the dispatches again, whose rows it needs, and not the combine between them."""

    def body(x, topk_idx, topk_weights):
        @jax.checkpoint
        def loss(x):
            recv = ep.dispatch(x, topk_idx, group=group, layout=layout)
            linear = jnp.sum(ep.combine(recv.x, recv).astype(jnp.float32))
            other = ep.dispatch(2 * x, topk_idx, group=group, layout=layout)
            return linear + jnp.sum(other.x.astype(jnp.float32) ** 2)

        value, gradient = jax.value_and_grad(loss)(x)
        return value[None], gradient

    found = calls(lowered(group, body, X, IDS, WEIGHTS))
    assert found.count("jax_ep_dispatch") == 4 and found.count("jax_ep_combine") == 1


def test_effects_of_split_phase_calls_can_be_exported(group, layout):
    """jax.export serializes an effect only if it equals a new one of its class."""

    def body(x, topk_idx, topk_weights):
        recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout=layout))
        return ep.combine_done(ep.combine_start(recv.x, recv))

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
    arguments = [
        jax.ShapeDtypeStruct((shape[0] * group.num_ranks, *shape[1:]), dtype) for shape, dtype in (X, IDS, WEIGHTS)
    ]
    effects = jax.jit(mapped).trace(*arguments).jaxpr.effects
    assert effects and all(effect == type(effect)() for effect in effects)


def test_gradients_of_split_phase_calls(group, layout):
    def body(x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout=layout))
            return jnp.sum(ep.combine_done(ep.combine_start(recv.x, recv)).astype(jnp.float32))

        value, gradients = jax.value_and_grad(loss, (0, 1))(x, topk_weights)
        return value[None], gradients

    text = lowered(group, body, X, IDS, WEIGHTS)
    ops = ("dispatch", "combine", "combine_back", "dispatch_back")
    expected = [f"jax_ep_{op}_{part}" for op in ops for part in ("start", "done")]
    assert [call for call in calls(text) if call != "jax_ep_room"] == expected


def test_split_phase_calls_pad_where_they_are_differentiated(group):
    """With zero_pad=None, as whole calls do. The start has the attribute."""

    def loss(x, topk_idx, topk_weights):
        recv = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, group=group, layout="ragged"))
        return jnp.sum(recv.x.astype(jnp.float32))

    for body, pads in ((lambda *inputs: loss(*inputs)[None], "false"), (jax.grad(loss), "true")):
        text = lowered(group, body, X, IDS, WEIGHTS)
        assert re.findall(r"@jax_ep_dispatch_start.*zero_pad = (\w+)", text) == [pads]


def test_other_operations_are_one_call_each(group, layout):
    def body(x, topk_idx, y, splits):
        recv = ep.dispatch(x, topk_idx, group=group, layout=layout)
        like = ep.dispatch_like(x[:, :3], recv)
        sent = ep.all_to_all(x, splits, group=group, wire="fp8", dequantize=False)
        back = ep.all_to_all_back(y, splits, group=group)
        return like.sum()[None], sent.scales.sum()[None], back

    y = ((group.num_ranks, TOKENS, HIDDEN), jnp.bfloat16)
    text = lowered(group, body, X, IDS, y, ((EXPERTS,), jnp.int32))
    assert sorted(calls(text)) == [
        f"jax_ep_{op}" for op in ("all_to_all", "all_to_all_back", "dispatch", "dispatch_like")
    ]


def test_quantized_input(group, layout):
    def body(x, scales, topk_idx):
        recv = ep.dispatch((x, scales), topk_idx, group=group, layout=layout, dequantize=False)
        return recv.scales

    text = lowered(group, body, ((TOKENS, HIDDEN), jnp.float8_e4m3fn), ((TOKENS, HIDDEN // 128), jnp.float32), IDS)
    assert calls(text) == ["jax_ep_dispatch"]


@pytest.mark.parametrize(
    ("dtype", "wire"), [("bfloat16", "fp8"), ("float16", "fp8"), ("float32", "fp8"), ("bfloat16", "mxfp8")]
)
@pytest.mark.parametrize("is_split", [False, True])
def test_kernels_cast_bfloat16_only(group, layout, dtype, wire, is_split):
    """XLA casts other dtypes, and casts to MXFP8: a split-phase call once, in its start."""

    def body(x, topk_idx, topk_weights):
        options = {"group": group, "layout": layout, "wire": wire, "dequantize": True}
        if is_split:
            return ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, **options)).x
        return ep.dispatch(x, topk_idx, topk_weights, **options).x

    text = lowered(group, body, (X[0], jnp.dtype(dtype)), IDS, WEIGHTS)
    in_kernel = (dtype, wire) == ("bfloat16", "fp8")
    kernel = "dispatch_start" if is_split else "dispatch"
    (settings,) = re.findall(rf"@jax_ep_{kernel}\(.*cast = (\d+) : i64.*dequantize = (\w+)", text)
    assert settings == (("1", "true") if in_kernel else ("0", "false"))
    casts = re.findall(r"stablehlo.convert .*-> tensor<[\dx]*f8E4M3FN>", text)
    assert len(casts) == (0 if in_kernel else 1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_kernels_cast_cotangents_of_bfloat16_only(group, layout, dtype):
    """XLA casts the cotangent of combine's result in other dtypes, and sends packed rows."""

    def text_of(grad_wire):
        def body(x, topk_idx, topk_weights):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
            out, transpose = jax.vjp(lambda y: ep.combine(y, recv, grad_wire=grad_wire), recv.x)
            return transpose(out)

        return lowered(group, body, (X[0], dtype), IDS, WEIGHTS)

    back = "combine_back" if dtype == jnp.bfloat16 else "dispatch_like"
    text = text_of("fp8_e5m2")
    assert calls(text) == ["jax_ep_dispatch", "jax_ep_combine", f"jax_ep_{back}"]
    casts = re.findall(r"custom_call @jax_ep_combine_back\(.*?cast = (\d+)", text)
    assert casts == ([str(int(Cast.E5M2))] if dtype == jnp.bfloat16 else [])
    hashes_of_wires = [hashes(text_of(wire), back) for wire in ("fp8", "fp8_pow2", "fp8_e5m2")]
    assert len({hash_ for (hash_,) in hashes_of_wires}) == 3  # all ranks must agree on the format


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_kernels_of_all_to_all_cast_bfloat16_only(group, dtype):
    def body(x, splits):
        return ep.all_to_all(x, splits, group=group, wire="fp8").x

    text = lowered(group, body, (X[0], dtype), ((EXPERTS,), jnp.int32))
    (settings,) = re.findall(r"@jax_ep_all_to_all\(.*cast = (\d+) : i64.*dequantize = (\w+)", text)
    assert settings == (("1", "true") if dtype == jnp.bfloat16 else ("0", "false"))


def test_a_cotangent_that_goes_nowhere_is_not_sent(group, layout):
    """The rows' cotangent would go to a quantised x, which is a constant; the weights have none."""

    def body(x, scales, topk_idx, topk_weights):
        def loss(topk_weights):
            recv = ep.dispatch((x, scales), topk_idx, topk_weights, group=group, layout=layout)
            return jnp.sum(recv.x.astype(jnp.float32))

        value, gradient = jax.value_and_grad(loss)(topk_weights)
        return value[None], gradient

    quantised = ((TOKENS, HIDDEN), jnp.float8_e4m3fn), ((TOKENS, HIDDEN // 128), jnp.float32)
    assert calls(lowered(group, body, *quantised, IDS, WEIGHTS)) == ["jax_ep_dispatch"]


def test_what_ranks_must_agree_on_is_in_the_hash(group):
    def hash_of(x=X, ids=IDS, **options):
        def body(x, topk_idx):
            options_here = {"layout": "ragged", "capacity": 64} | options
            return ep.dispatch(x, topk_idx, group=group, **options_here).counts

        (hash_,) = hashes(lowered(group, body, x, ids), "dispatch")
        return hash_

    def hash_of_all_to_all(wire):
        def body(x, splits):
            return ep.all_to_all(x, splits, group=group, wire=wire).splits

        (hash_,) = hashes(lowered(group, body, X, ((EXPERTS,), jnp.int32)), "all_to_all")
        return hash_

    def hash_of_balance(tolerance):
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
        with ep.Group(group.mesh, **sizes, replicas=1) as balanced:

            def body(ids):
                return ep.balance(ids, group=balanced, tolerance=tolerance).slots

            (hash_,) = hashes(lowered(balanced, body, IDS), "balance")
        return hash_

    def hashes_of_layer(out=None, back=None):
        """Of combine, and of the operations in its gradient and in that of dispatch."""

        def body(x, topk_idx):
            def layer(x):
                recv = ep.dispatch(x, topk_idx, group=group, grad_wire=back)
                return ep.combine(recv.x, recv, wire=out, grad_wire=back)

            result, transpose = jax.vjp(layer, x)
            return result, transpose(result)

        text = lowered(group, body, X, IDS)
        return [
            hash_ for op in ("combine", "dispatch_like", "combine_back", "dispatch_back") for hash_ in hashes(text, op)
        ]

    usual = hash_of()
    assert hash_of() == usual
    all_bf16, all_fp8, all_e5m2 = (
        hashes_of_layer(*wires) for wires in ((None, None), ("fp8", "fp8"), ("fp8_pow2", "fp8_e5m2"))
    )
    assert len(all_bf16) == 3
    assert len({*all_bf16, *all_fp8, *all_e5m2}) == 9
    different = [{"layout": "expert"}, {"capacity": 72}, {"alignment": 8}, {"wire": "fp8"}]
    assert len({usual, *(hash_of(**options) for options in different)}) == 1 + len(different)
    assert hash_of(((TOKENS - 1, HIDDEN), jnp.bfloat16), ((TOKENS - 1, TOP_K), jnp.int32)) != usual
    assert len({hash_of_all_to_all(wire) for wire in (None, "fp8", "fp8_pow2")}) == 3
    assert len({hash_of_balance(tolerance) for tolerance in (0.0, 0.25)}) == 2


def every_operation_twice(group, x, topk_idx, topk_weights, splits):
    """Each operation twice with equal shapes, and all gradients."""

    def once(x, topk_weights):
        settings = {"group": group, "layout": "ragged"}
        recv = ep.dispatch(x, topk_idx, topk_weights, **settings)
        done = ep.dispatch_done(ep.dispatch_start(x, topk_idx, topk_weights, **settings))
        out = ep.combine(recv.x + ep.dispatch_like(x, recv), recv)
        out += ep.combine_done(ep.combine_start(done.x, done))
        out += ep.all_to_all_back(ep.all_to_all(x, splits, group=group).x, splits, group=group)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = [jax.grad(once, (0, 1))(scale * x, topk_weights) for scale in (1, 2)]
    return jax.tree.map(jnp.add, *gradients)


def test_no_two_calls_of_a_program_have_the_same_hash(group):
    """Or ranks that run them in different order would take the rows of one for those of the other."""
    body = partial(every_operation_twice, group)
    text = lowered(group, body, X, IDS, WEIGHTS, ((EXPERTS,), jnp.int32))
    ops = {op.removeprefix("jax_ep_") for op in calls(text) if not op.endswith(("_done", "_room"))}
    assert len(ops) == 11
    found = [hash_ for op in ops for hash_ in hashes(text, op)]
    assert len(found) == len(set(found)) == 2 * 14


def test_calls_of_programs_with_other_names_have_other_hashes(group):
    """Or ranks that run a training step and an evaluation in different order would mix up their rows."""

    def train(x, topk_idx):
        return ep.dispatch(x, topk_idx, group=group, layout="ragged").x

    def evaluate(x, topk_idx):
        return ep.dispatch(x, topk_idx, group=group, layout="ragged").x

    def of(program):
        (hash_,) = hashes(lowered(group, program, X, IDS), "dispatch")
        return hash_

    assert of(train) == of(train) != of(evaluate)


def test_calls_of_loops_have_hashes_of_their_own(group):
    """The loops do not need one another's results: XLA may run either first."""

    def body(x, topk_idx):
        def loop(scale):
            def step(x, _):
                return x + ep.dispatch(scale * x, topk_idx, group=group, layout="ragged").x.sum(), None

            return jax.lax.scan(step, x, length=3)[0]

        return loop(1) + loop(2)

    first, second = hashes(lowered(group, body, X, IDS), "dispatch")
    assert first != second


def test_a_program_that_is_lowered_again_has_the_same_text(group):
    """Also in another process, as it was exported or came from the compilation cache."""
    texts = set()
    for _ in range(2):
        jax.clear_caches()
        body = partial(every_operation_twice, group)
        texts.add(lowered(group, body, X, IDS, WEIGHTS, ((EXPERTS,), jnp.int32)))
    assert len(texts) == 1
