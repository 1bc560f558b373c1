"""examples/parallelism.py: expert parallelism beside other parallelism equals a dense layer, gradients included."""

import re

import jax
import pytest

import parallelism
from test_examples import finish, start

# The ranks do not divide 13 tokens: a recipe that takes replicated tokens must split them all the same.
CASES = [*((name, 16) for name in parallelism.RECIPES), ("replicated_by_share", 13), ("replicated_by_expert", 13)]


@pytest.mark.parametrize(("recipe", "tokens"), CASES)
def test_a_recipe_equals_the_dense_layer(backend, mesh, recipe, tokens):
    devices = list(mesh.devices.flat)
    found = parallelism.relative_errors(recipe, devices, tokens=tokens, hidden=16, inner=8, backend=backend)
    assert max(found) < 1e-5


def test_a_recipe_over_two_axes(backend, mesh, monkeypatch):
    both = jax.sharding.PartitionSpec(("major", "minor"))
    recipe = parallelism.RECIPES["replicated_by_share"]
    recipe = recipe._replace(axes=lambda n: {"major": 2, "minor": n // 2}, group_axis=both[0], w13=both, w2=both)
    monkeypatch.setitem(parallelism.RECIPES, "two_axes", recipe)
    devices = list(mesh.devices.flat)
    assert max(parallelism.relative_errors("two_axes", devices, tokens=13, hidden=16, inner=8, backend=backend)) < 1e-5


def test_no_rank_dispatches_more_than_its_share(monkeypatch, mesh):
    """The group has no room for more."""
    most = []
    dispatch = parallelism.ep.dispatch

    def watched(x, *args, **options):
        most.append(len(x))
        return dispatch(x, *args, **options)

    monkeypatch.setattr(parallelism.ep, "dispatch", watched)
    for recipe in ("ep_fsdp", "ep_tp", "replicated_by_share"):
        parallelism.relative_errors(recipe, list(mesh.devices.flat), tokens=16, hidden=16, inner=8, backend="reference")
    assert set(most) == {16 // mesh.size}


def test_by_expert_sends_no_row(mesh):
    """One sum goes over the ranks. All other collectives are of one rank each, along the axis of size 1."""
    text = compiled_by_expert(mesh)
    pattern = (
        r" (all-reduce|all-gather|all-to-all|collective-permute)\(.*?"
        r"(?:replica_groups|source_target_pairs)=(mesh\S+ \{[^}]*\}|\S+),"
    )
    over_ranks = [op for op, groups in re.findall(pattern, text) if not is_of_one_rank_each(groups, mesh.size)]
    assert over_ranks == ["all-reduce"]


def is_of_one_rank_each(groups, num_ranks):
    """Whether HLO's `groups` are {{0},{1},...}, [num_ranks,1]<=[num_ranks], or those along the axis "one" of a mesh."""
    if groups.startswith("mesh"):
        return groups.endswith(" {'one'}")
    return re.fullmatch(r"\{(\{\d+\},?)+\}", groups) or groups == f"[{num_ranks},1]<=[{num_ranks}]"


def compiled_by_expert(mesh):
    """The program of replicated_by_expert on the ranks of `mesh`, with a group that sends nothing."""
    recipe = parallelism.RECIPES["replicated_by_expert"]
    ranks = mesh.size
    whole = jax.sharding.Mesh(mesh.devices.reshape(ranks, 1), ("ep", "one"))
    shapes = ((8, 16), "float32"), ((8, 2), "int32"), ((8, 2), "float32"), ((2 * ranks, 16, 16), "float32")
    operands = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((2 * ranks, 8, 16), "float32"))]
    settings = {"num_experts": 2 * ranks, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8, "dtype": "float32"}
    with parallelism.ep.Group(whole, "one", backend="reference", **settings) as group:
        layer = jax.shard_map(
            lambda *args: recipe.layer(*args, group=group),
            mesh=whole,
            in_specs=(recipe.tokens, recipe.tokens, recipe.tokens, recipe.w13, recipe.w2),
            out_specs=recipe.tokens,
        )
        return jax.jit(layer).lower(*operands).compile().as_text()


def test_the_example_runs():
    done = finish(start("parallelism.py", num_devices=2))
    assert done.returncode == 0, done.stderr
    found = [float(number) for number in re.findall(r"[\d.]+e[-+]\d+", done.stdout)]
    assert len(found) == 2 * len(parallelism.RECIPES)
    assert max(found) < 1e-5
