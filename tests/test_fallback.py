"""The backend "collectives": what it saves, and where routing makes it take many rounds."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import ROOT, assert_combined, assert_dispatched, open_group, run_spmd
from jax_ep import _backends
from jax_ep._backends.collectives import LEAST_ROUND
from shapes import Shape, make_inputs

sys.path.append(str(ROOT / "benchmarks"))

import fallback


@pytest.mark.skipif(jax.default_backend() != "cpu" or len(jax.devices()) < 8, reason="the bound is for 8 CPU devices")
@pytest.mark.parametrize("program", ["layer", "gradients"])
def test_memory_is_less_than_a_third_of_the_references(largest_mesh, program):
    sizes = fallback.Sizes()
    memory = {}
    for backend in fallback.BACKENDS:
        with fallback.open_group(backend, largest_mesh, sizes) as group:
            executable, _ = fallback.compile_program(fallback.programs(group, sizes)[program], largest_mesh, sizes)
            memory[backend] = executable.memory_analysis().temp_size_in_bytes
    assert memory["collectives"] < memory["reference"] / 3


@pytest.mark.parametrize("routing", ["uniform", "hot_expert", "duplicates", "uneven"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_rounds_and_layers(largest_mesh, layout, routing, dtype):
    """Routings with full rounds, rounds that some ranks have nothing in, and tokens with all K rows on one rank."""
    shape = Shape("rounds", num_experts=16, top_k=8, hidden=16, tokens=3 * LEAST_ROUND + 5, dtype=dtype)
    x, topk_idx, topk_weights = inputs = make_inputs(shape, largest_mesh.size, routing)

    def layer(x, topk_idx, topk_weights):
        recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout)
        return recv, ep.combine(recv.x, recv, out_dtype="float32")

    with open_group(largest_mesh, shape, backend="collectives") as group:
        recv, out = run_spmd(layer, largest_mesh, *inputs)
    expected = oracle.dispatch(x, topk_idx, topk_weights, num_experts=shape.num_experts, layout=layout)
    assert_dispatched(recv, expected, zero_pad=True)
    assert_combined(out, expected.x, expected.weights, expected.route, dtype=dtype)


def test_gradients_are_the_references(largest_mesh):
    shape = Shape("rounds", num_experts=16, top_k=4, hidden=16, tokens=LEAST_ROUND + 5, dtype="float32")
    inputs = make_inputs(shape, largest_mesh.size, "duplicates")

    def gradients(group, x, topk_idx, topk_weights):
        def loss(x, topk_weights):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout="ragged", capacity=300)
            return jnp.sum(jnp.sin(ep.combine(jnp.tanh(recv.x), recv)))

        return jax.grad(loss, argnums=(0, 1))(x, topk_weights)

    results = []
    for backend in fallback.BACKENDS:
        with open_group(largest_mesh, shape, backend=backend) as group:
            results.append(run_spmd(lambda *args, group=group: gradients(group, *args), largest_mesh, *inputs))
    for actual, expected in zip(*results, strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "reference"), ("tpu", "collectives")])
def test_auto_without_gpus(platform, expected):
    """CPUs take the backend that defines the results, other accelerators the one that needs less memory."""
    device = type("Device", (), {"platform": platform, "process_index": 0})()
    mesh = type("Mesh", (), {"devices": np.array([device]), "shape": {"ep": 1}})()
    assert _backends.choose("auto", mesh, "ep").backend == expected
