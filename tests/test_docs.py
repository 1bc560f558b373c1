"""The documents agree with the tree."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_ep as ep
import oracle
from helpers import load_program, make_mesh, open_group
from jax_ep import doctor
from jax_ep.bench.models import MODELS
from shapes import SMALL, make_inputs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for pattern in ("*.md", "docs/*.md", "ffi/*.md") for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_readmes_layer_runs_when_pasted(num_devices, tmp_path):
    (layer,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    done = subprocess.run([sys.executable], input=layer, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{(64 * num_devices, 128)}\n"


def test_the_page_of_meshes_runs(tmp_path):
    """All its code, in order."""
    pytest.importorskip("flatbuffers", reason="the page serializes an exported program")
    code = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "meshes.md").read_text(), re.DOTALL))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run([sys.executable], input=code, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_models_is_the_benchs():
    page = (ROOT / "docs" / "measurements.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+|not known) \|$", page, re.MULTILINE)
    sizes = map(dataclasses.astuple, MODELS.values())
    assert rows == [tuple(str(size or "not known") for size in row) for row in sizes]


def test_the_programs_of_the_layers_page_run(tmp_path):
    """All blocks of code of the page, one after the other."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "moe.md").read_text(), re.DOTALL))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run([sys.executable], input=program, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(64, 128)\n"


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_programs_of_the_page_of_balance_run(num_devices, tmp_path):
    program = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "balance.md").read_text(), re.DOTALL))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    done = subprocess.run([sys.executable], input=program, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_picture_of_balance_is_what_the_script_draws():
    balance_page = load_program("scripts/balance_page.py")
    assert balance_page.draw() == (ROOT / "docs" / "balance.svg").read_text()
    ranks, moves = balance_page.pieces_of(balance_page.example())
    assert [sum(rows for _, rows in pieces) for pieces in ranks] == [6, 6, 6, 6]
    assert sorted(moves) == [(0, 2, 1), (0, 3, 4), (2, 1, 3)]  # the text of the picture


def test_the_example_of_num_dropped_runs():
    """Over two axes of which both split the tokens, with rows dropped: all devices return the same sum."""
    text = (ROOT / "docs" / "sharp_bits.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "recv.num_dropped" in code]
    mesh = make_mesh((2, 2), ("data", "ep"))
    group = open_group(mesh, SMALL, backend="reference")
    inputs = make_inputs(SMALL, mesh.size)
    inputs.topk_idx[...] %= SMALL.num_experts // 2  # all of them are the first rank's
    names = {"mesh": mesh, "group": group, "ep": ep, "jax": jax, "jnp": jnp, "partial": functools.partial}
    names |= {"P": jax.sharding.PartitionSpec} | {k: v.reshape(-1, v.shape[-1]) for k, v in inputs._asdict().items()}
    exec(example, names)
    capacity = int(1.25 * SMALL.tokens * SMALL.top_k)
    groups_idx = inputs.topk_idx.reshape(2, 2, SMALL.tokens, SMALL.top_k)
    routes = [oracle.route(i, num_experts=16, layout="ragged", capacity=capacity) for i in groups_idx]
    expected = sum(route.num_dropped.sum() for route in routes)
    assert expected > 0
    assert names["num_dropped"] == expected
    assert names["share"] == pytest.approx(expected / inputs.topk_idx.size)


def test_the_recipe_of_overlap_is_the_benchmarks_text():
    recipe = re.search(r"^def overlapped.*?(?=^```)", (ROOT / "docs" / "overlap.md").read_text(), re.DOTALL | re.M)[0]
    assert recipe in (ROOT / "benchmarks" / "overlap.py").read_text()


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "docs/experiments.md"])
def test_what_ran_on_gpus_is_claimed(document):
    """A paragraph that says what GPUs did has a claim, which scripts/native_hash.py checks, or is a generated table."""
    text = re.sub(
        r"<!-- table: .*?<!-- end of table -->|```.*?```|^#.*?$", "", (ROOT / document).read_text(), flags=re.S | re.M
    )
    for paragraph in re.split(r"\n(?:\n|(?=- ))", text):
        assert not re.search(r"\d x (NVIDIA )?[HAB]\d00", paragraph) or "<!-- claim: " in paragraph, paragraph


def test_the_plan_of_the_folders_names_what_there_is():
    plan = re.search(
        r"^## Where things go$(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
    )[1]
    paths = re.findall(r"`([\w./]+/[\w./]*)`", plan)
    assert len(paths) > 30
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    here = ROOT / document
    for target in re.findall(r"\]\(([^)]+)\)", here.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = here.parent / path if path else here
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_version_to_cite_is_the_packages():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_native_readme_lists_every_file():
    text = (ROOT / "ffi" / "README.md").read_text()
    named = set(re.findall(r"`(?:\w+/)*(\w+\.[\w*]+)`", text))
    files = [path for path in (ROOT / "ffi").rglob("*.*") if not {"emulator", "nvshmem"} & set(path.parts)]
    assert len(files) > 40
    for file in files:
        assert {file.name, f"{file.stem}.*"} & named or file.name == "README.md", file


NATIVE_NAMES = {  # document -> how it says that a native file has a name: the pattern's groups are the names, the file
    "ffi/README.md": r"(?P<file>`\w[\w/]*\.\w+`): (?P<names>`[\w:]+`(?:, `[\w:]+`)*)",
    "CONTRIBUTING.md": r"(?P<names>`\w+`(?:(?:, | and )`\w+`)*) in (?P<file>`ffi/[\w/]+\.\w+`)",
    "docs/network.md": r"(?P<names>`[\w:]+`) \((?P<file>`\w+\.\w+`)\)",
}


@pytest.mark.parametrize("document", NATIVE_NAMES)
def test_native_names_are_in_the_files_where_a_document_says(document):
    found = list(re.finditer(NATIVE_NAMES[document], (ROOT / document).read_text()))
    assert len(found) >= 5
    for match in found:
        path = match["file"].strip("`").removeprefix("ffi/")
        file = next(there for folder in ("ffi", "ffi/cuda") if (there := ROOT / folder / path).exists())
        for name in re.findall(r"\w+", match["names"]):
            assert re.search(rf"\b{name}\b", file.read_text()), (name, path)


def anchors(document):
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_api_page_has_all_public_names():
    page = (ROOT / "docs" / "api.md").read_text()
    names = [*ep.__all__, *(f"moe.{name}" for name in ep.moe.__all__)]
    assert sorted(re.findall(r"^::: jax_ep\.([\w.]+)$", page, re.MULTILINE)) == sorted(names)


def test_the_doctors_page_has_each_section_of_its_output():
    """Once in the output that it shows, once as a heading."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    shown = re.search(r"```text\n\$ .*?\n(.*?)```", page, re.DOTALL)[1]
    sections = re.findall(r"^\S.*$", doctor.report(doctor.examine(doctor.Sizes())), re.MULTILINE)
    assert re.findall(r"^\S.*$", shown, re.MULTILINE) == sections
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == sections
