"""dispatch_layout: its counts on every platform, and the errors of its kernels.

On a machine with a GPU these tests run the CUDA kernel. They need one GPU only. Elsewhere an emulated GPU runs it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep as ep
from helpers import make_mesh
from jax_ep import _dispatch_layout, _native

NATIVE = _native.cuda if jax.default_backend() == "gpu" else _native.cpu
needs_native = pytest.mark.skipif(NATIVE is None, reason="the native extension for this platform is not built")
SIZES = [
    {"num_experts": 8, "num_ranks": 1, "num_nodes": 1},
    {"num_experts": 8, "num_ranks": 8, "num_nodes": 2},
    {"num_experts": 24, "num_ranks": 6, "num_nodes": 3},
    {"num_experts": 256, "num_ranks": 64, "num_nodes": 8},
]


def random_idx(num_experts, shape, seed=0):
    """Experts, among them some ids just outside [0, num_experts) on both sides and duplicates in a row."""
    return np.random.default_rng(seed).integers(-2, num_experts + 2, shape).astype(np.int32)


def expected_layout(topk_idx, *, num_experts, num_ranks, num_nodes):
    """The contract's words as plain loops."""
    per_expert = np.zeros(num_experts, np.int32)
    in_rank = np.zeros((len(topk_idx), num_ranks), bool)
    in_node = np.zeros((len(topk_idx), num_nodes), bool)
    for token, experts in enumerate(topk_idx):
        for expert in experts:
            if 0 <= expert < num_experts:
                per_expert[expert] += 1
                in_rank[token, expert * num_ranks // num_experts] = True
                in_node[token, expert * num_nodes // num_experts] = True
    return ep.DispatchLayout(in_rank.sum(0, dtype=np.int32), in_node.sum(0, dtype=np.int32), per_expert, in_rank)


def assert_layout(got, expected):
    for field in ep.DispatchLayout._fields:
        assert getattr(got, field).dtype == getattr(expected, field).dtype, field
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field), err_msg=field)


LAYOUTS = {"as installed": ep.dispatch_layout, "pure JAX": _dispatch_layout._pure_jax_layout}
if _native.emulated is not None and jax.default_backend() == "cpu":
    EMULATED = "jax_ep_emulated_dispatch_layout"
    jax.ffi.register_ffi_target(EMULATED, _native.emulated.targets()["jax_ep_dispatch_layout"], platform="cpu")
    LAYOUTS["emulated"] = partial(_dispatch_layout._native_layout, target=EMULATED)


@pytest.fixture(params=LAYOUTS)
def dispatch_layout(request):
    """ep.dispatch_layout; the pure JAX that replaces a kernel where no native extension is built; the CUDA kernel."""
    return LAYOUTS[request.param]


def test_the_kernel_is_what_runs():
    """Where this platform's extension is not built, pure JAX runs."""
    lowered = jax.jit(partial(ep.dispatch_layout, **SIZES[0])).lower(random_idx(8, (4, 2)))
    assert ("jax_ep_dispatch_layout" in lowered.compile().as_text()) == (NATIVE is not None)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (33, 8), (300, 2), (5, 0)], ids=str)
def test_counts(dispatch_layout, sizes, shape):
    topk_idx = random_idx(sizes["num_experts"], shape)
    expected = expected_layout(topk_idx, **sizes)
    assert_layout(dispatch_layout(topk_idx, **sizes), expected)
    assert_layout(jax.jit(lambda idx: dispatch_layout(idx, **sizes))(topk_idx), expected)


def test_one_node_by_default():
    topk_idx = random_idx(8, (20, 3))
    layout = ep.dispatch_layout(topk_idx, num_experts=8, num_ranks=4)
    assert_layout(layout, expected_layout(topk_idx, num_experts=8, num_ranks=4, num_nodes=1))


def test_dependent_calls_in_one_program(dispatch_layout):
    """Each call's ids come from the counts before it; on GPUs these are enough calls for XLA to capture in a graph."""
    sizes = {"num_experts": 8, "num_ranks": 4, "num_nodes": 2}

    @jax.jit
    def chain(topk_idx):
        layouts = []
        for _ in range(8):
            layouts.append(dispatch_layout(topk_idx, **sizes))
            topk_idx = (topk_idx + layouts[-1].num_tokens_per_rank[:3]) % 10 - 1
        return layouts

    topk_idx = random_idx(8, (40, 3))
    for _ in range(3):
        for layout in chain(topk_idx):
            assert_layout(layout, expected_layout(topk_idx, **sizes))
            topk_idx = (topk_idx + np.asarray(layout.num_tokens_per_rank)[:3]) % 10 - 1


def test_vmap(dispatch_layout):
    sizes = SIZES[2]
    topk_idx = random_idx(sizes["num_experts"], (2, 3, 17, 4))
    layouts = jax.vmap(jax.vmap(lambda idx: dispatch_layout(idx, **sizes)))(topk_idx)
    for i, j in np.ndindex(2, 3):
        one = jax.tree.map(lambda field, at=(i, j): field[at], layouts)
        assert_layout(one, expected_layout(topk_idx[i, j], **sizes))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", [True, False])
def test_shard_map(dispatch_layout, mesh, check_vma, replicated):
    """Inside shard_map each device sees its own tokens, and results vary over the mesh exactly if the ids do."""
    sizes, num_devices = SIZES[1], mesh.devices.size
    topk_idx = random_idx(8, (num_devices * 5, 3))
    spec = P() if replicated else P("ep")
    layouts = jax.shard_map(
        lambda idx: jax.tree.map(lambda field: field[None], dispatch_layout(idx, **sizes)),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )(topk_idx)
    parts = topk_idx[None] if replicated else topk_idx.reshape(num_devices, 5, 3)
    for rank, part in enumerate(parts):
        assert_layout(jax.tree.map(lambda field, at=rank: field[at], layouts), expected_layout(part, **sizes))


def test_explicit_axes():
    """Outside of shard_map, the ids may be sharded over explicit axes: the counts are those of all tokens."""
    sizes, mesh = SIZES[1], make_mesh((4,))
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,))
    topk_idx = random_idx(8, (20, 3))
    with jax.set_mesh(mesh):
        placed = jax.device_put(topk_idx, jax.sharding.NamedSharding(mesh, P("ep")))
        layout = jax.jit(partial(ep.dispatch_layout, **sizes))(placed)
    assert_layout(layout, expected_layout(topk_idx, **sizes))


def test_inside_scan_and_grad(dispatch_layout):
    """A loss may contain the counts of a router's choice. They are integers: no gradient goes through them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)

    def loss(counts_of, logits):
        def layer(total, logits):
            weights, topk_idx = jax.lax.top_k(jax.nn.softmax(logits), 2)
            return total + jnp.sum(weights * counts_of(topk_idx)[topk_idx]), None

        return jax.lax.scan(layer, jnp.float32(0), logits)[0]

    def counts(topk_idx):
        return dispatch_layout(topk_idx, num_experts=8, num_ranks=4, num_nodes=1).num_tokens_per_expert

    def counts_of_bincount(topk_idx):
        return jnp.bincount(topk_idx.reshape(-1), length=8)

    value, gradient = jax.jit(jax.value_and_grad(partial(loss, counts)))(logits)
    expected_value, expected_gradient = jax.jit(jax.value_and_grad(partial(loss, counts_of_bincount)))(logits)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert jnp.any(gradient != 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_idx": jnp.zeros((4,), jnp.int32)}, ValueError, r"topk_idx has shape \(4,\).*\[T, K\]"),
        ({"topk_idx": jnp.zeros((4, 2), jnp.float32)}, TypeError, "topk_idx has dtype float32.*int32"),
        ({"topk_idx": [[1, 2]]}, TypeError, "topk_idx is a list.*array"),
        ({"num_experts": 10}, ValueError, "num_experts is 10.*multiple of num_ranks = 4, e.g. 12"),
        ({"num_experts": 2**31}, ValueError, "num_experts is 2147483648.*1 to 2147483647"),
        ({"num_experts": 8.0}, TypeError, r"num_experts is 8\.0, a float.*int"),
        ({"num_ranks": 0}, ValueError, "num_ranks is 0.*at least 1"),
        ({"num_ranks": True}, TypeError, "num_ranks is True, a bool.*int"),
        ({"num_nodes": 3}, ValueError, "num_ranks is 4.*multiple of num_nodes = 3, e.g. 6"),
        ({"num_nodes": -1}, ValueError, "num_nodes is -1.*at least 1"),
    ],
)
def test_errors_while_tracing(change, error, message):
    arguments = {"topk_idx": jnp.zeros((4, 2), jnp.int32), "num_experts": 8, "num_ranks": 4} | change
    with pytest.raises(error, match=f"^dispatch_layout: {message}"):
        ep.dispatch_layout(arguments.pop("topk_idx"), **arguments)


def call_target(topk_idx, shapes, **attributes):
    """Calls the FFI target as jax_ep itself never would."""
    results = [
        jax.ShapeDtypeStruct(shape, jnp.bool_ if name == "is_token_in_rank" else jnp.int32)
        for name, shape in shapes.items()
    ]
    attributes = {name: np.int32(value) for name, value in attributes.items()}
    return jax.block_until_ready(jax.ffi.ffi_call("jax_ep_dispatch_layout", results)(topk_idx, **attributes))


@needs_native
@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        ({"num_tokens_per_rank": (5,)}, {}, r"num_tokens_per_rank has shape \[5\] but must have \[4\]"),
        ({"num_tokens_per_expert": (7,)}, {}, r"num_tokens_per_expert has shape \[7\] but must have \[8\]"),
        ({"is_token_in_rank": (6, 5)}, {}, r"is_token_in_rank has shape \[6, 5\] but must have \[6, 4\]"),
        ({"num_tokens_per_node": (2, 1)}, {}, "rank"),
        ({}, {"num_nodes": 3}, "num_nodes = 3 must divide num_ranks = 4"),
        ({}, {"num_ranks": 0}, "num_ranks = 0 must divide num_experts = 8, and both be positive"),
    ],
)
def test_errors_of_the_handler(shapes, attributes, message):
    shapes = {
        "num_tokens_per_rank": (4,),
        "num_tokens_per_node": (2,),
        "num_tokens_per_expert": (8,),
        "is_token_in_rank": (6, 4),
    } | shapes
    attributes = {"num_experts": 8, "num_ranks": 4, "num_nodes": 2} | attributes
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_target(jnp.zeros((6, 3), jnp.int32), shapes, **attributes)


def test_too_many_experts_for_the_cuda_kernel():
    kernel = LAYOUTS["as installed"] if jax.default_backend() == "gpu" and NATIVE else LAYOUTS.get("emulated")
    if kernel is None:
        pytest.skip("needs the CUDA extension and a GPU, or the emulated one")
    with pytest.raises(jax.errors.JaxRuntimeError, match="num_experts / num_ranks = 20000 must be at most 12288"):
        jax.block_until_ready(kernel(jnp.zeros((1, 1), jnp.int32), num_experts=20000, num_ranks=1, num_nodes=1))
