"""Draws docs/balance.svg, and writes the table of docs/balance.md.

    python scripts/balance_page.py           # draws the picture
    python scripts/balance_page.py --table   # also runs the reference backend on 8 virtual CPU devices (some seconds)

The table is between two comments of the page. Its caption names the date, the commit and the command.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

import jax_ep as ep  # noqa: E402
from jax_ep import _placement  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "balance.md", ROOT / "docs" / "balance.svg"
BLOCK = re.compile(r"(<!-- the table of scripts/balance_page.py -->\n).*?(<!-- end of the table -->)", re.DOTALL)

# --- the picture ----------------------------------------------------------------------------------------------------

NEEDS = np.array([7, 4, 1, 2, 5, 3, 1, 1], np.int32)  # rows of each expert
RANKS = 4
ROW = 15  # pixels
STYLE = """<style>
  .page { fill: #ffffff } .text { fill: #24292f } .note { fill: #57606a }
  .home0 { fill: #1f6fd1 } .home1 { fill: #6e7781 } .home2 { fill: #c2570c } .home3 { fill: #3f8624 }
  .label { fill: #ffffff; font-weight: 600 } .limit { stroke: #cf222e; stroke-dasharray: 5 3 } .red { fill: #cf222e }
  .room { fill: none; stroke: #57606a; stroke-dasharray: 3 3 }
  .step { fill: #24292f; font-weight: 600 } .copy { fill: none; stroke: #24292f; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #e6edf3 } .note { fill: #9198a1 }
    .step { fill: #e6edf3 } .limit { stroke: #ff7b72 } .red { fill: #ff7b72 } .room { stroke: #9198a1 }
    .copy { stroke: #e6edf3 }
  }
</style>"""


def pieces_of(
    placement: _placement.BalancedPlacement,
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int, int]]]:
    """Returns the (expert, rows) that each rank computes, home experts first; and the (donor, receiver, rows)."""
    local = len(NEEDS) // RANKS
    kept = NEEDS.copy()
    copies: list[list[tuple[int, int]]] = [[] for _ in range(RANKS)]
    moves = []
    for rank, source in enumerate(placement.source.tolist()):
        if source < 0:
            continue
        begin, end = placement.begin[rank], placement.end[rank]
        moves.append((source, rank, int(end - begin)))
        for number, start in zip(placement.queue[source], placement.start[source], strict=True):
            expert = source * local + int(number)
            rows = int(min(end, start + NEEDS[expert]) - max(begin, start))
            if rows > 0:
                copies[rank].append((expert, rows))
                kept[expert] -= rows
    homes = [[(e, int(kept[e])) for e in range(rank * local, rank * local + local)] for rank in range(RANKS)]
    return [home + copy for home, copy in zip(homes, copies, strict=True)], moves


def bars(x: int, base: int, ranks: list[list[tuple[int, int]]]) -> list[str]:
    """Draws the rows of each rank as a bar. A copy of another rank's expert has a frame."""
    local, parts = len(NEEDS) // RANKS, []
    for rank, pieces in enumerate(ranks):
        left, top = x + 58 * rank, base
        parts.append(f'<text class="note" x="{left + 22}" y="{base + 18}" text-anchor="middle">rank {rank}</text>')
        for expert, rows in pieces:
            if not rows:
                continue
            height = ROW * rows
            top -= height
            home = expert // local
            parts.append(f'<rect class="home{home}" x="{left}" y="{top}" width="44" height="{height - 1}" rx="2"/>')
            if home != rank:
                parts.append(
                    f'<rect class="copy" x="{left + 1}" y="{top + 1}" width="42" height="{height - 3}" rx="2"/>'
                )
            parts.append(
                f'<text class="label" x="{left + 22}" y="{top + height / 2 + 4}" text-anchor="middle" '
                f'font-size="11">e{expert}: {rows}</text>'
            )
    return parts


def example() -> _placement.BalancedPlacement:
    return jax.tree.map(np.asarray, _placement.place_balanced(jnp.asarray(NEEDS), num_ranks=RANKS, num_slots=2))


def draw() -> str:
    """Returns the picture: the loads, the axis on which excess and room meet, and the balanced loads."""
    placement = example()
    local = len(NEEDS) // RANKS
    before = [[(e, int(NEEDS[e])) for e in range(rank * local, rank * local + local)] for rank in range(RANKS)]
    after, moves = pieces_of(placement)
    limit = -(-int(NEEDS.sum()) // RANKS)
    base = 260
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 320" font-family="system-ui, -apple-system, '
        '\'Segoe UI\', Helvetica, Arial, sans-serif" font-size="12" role="img" aria-labelledby="title">',
        '<title id="title">Four ranks with unequal loads; their excess and room on an axis; the same ranks with equal '
        "loads</title>",
        STYLE,
        '<rect class="page" width="880" height="320" rx="10"/>',
    ]
    for x, heading in ((135, "rows at home"), (440, "excess meets room"), (745, "rows with the plan")):
        parts.append(f'<text class="step" x="{x}" y="32" text-anchor="middle" font-size="14">{heading}</text>')
    level = base - ROW * limit
    for x, ranks in ((20, before), (630, after)):
        parts += bars(x, base, ranks)
        parts.append(f'<line class="limit" x1="{x - 6}" y1="{level}" x2="{x + 226}" y2="{level}"/>')
    parts.append(f'<text class="red" x="252" y="{level + 4}">limit {limit}</text>')

    # The axis: donors above, receivers below.
    load = NEEDS.reshape(RANKS, local).sum(axis=1)
    unit, left = 34, 322
    start = left
    for rank in sorted(np.flatnonzero(load > limit), key=lambda rank: -load[rank]):
        width = unit * int(load[rank] - limit)
        parts.append(f'<rect class="home{rank}" x="{start}" y="90" width="{width - 2}" height="30" rx="3"/>')
        parts.append(
            f'<text class="label" x="{start + width / 2}" y="109" text-anchor="middle">rank {rank}: '
            f"{load[rank] - limit}</text>"
        )
        start += width
    start = left
    for rank in sorted(np.flatnonzero(load < limit), key=lambda rank: load[rank]):
        width = unit * int(limit - load[rank])
        source = int(placement.source[rank])
        parts.append(f'<rect class="room" x="{start}" y="140" width="{width - 2}" height="30" rx="3"/>')
        parts.append(
            f'<text class="text" x="{start + width / 2}" y="159" text-anchor="middle">rank {rank}: '
            f"{limit - load[rank]}</text>"
        )
        parts.append(
            f'<text class="note" x="{start + width / 2}" y="188" text-anchor="middle" font-size="11">from rank '
            f"{source}</text>"
        )
        start += width
    parts.append(f'<text class="note" x="{left}" y="82">excess of donors</text>')
    parts.append(f'<text class="note" x="{left}" y="134" font-size="11">room of receivers</text>')
    donors = [(source, to, rows) for source, to, rows in moves if load[to] > limit]
    for number, (source, to, rows) in enumerate(donors):
        texts = (
            f"Rank {source} also gives {rows} of its rows to rank {to},",
            "which gives as many more of its own away.",
        )
        y = 216 + 34 * number
        for line, text in enumerate(texts):
            parts.append(f'<text class="text" x="440" y="{y + 16 * line}" text-anchor="middle">{text}</text>')
    parts.append(
        '<text class="note" x="440" y="304" text-anchor="middle">e0: 4 are four rows of expert 0. The color is the '
        "expert's home rank. A frame marks rows that a copy of the expert computes.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


# --- the table ------------------------------------------------------------------------------------------------------

R, E, K, T, DRAWS = 8, 256, 8, 512, 5
FACTOR = 1.25
EXPERT_BYTES = 3 * 7168 * 2048 * 2  # of DeepSeek-V3, bfloat16
SKEWS: list[float | str] = [0.0, 0.5, 1.0, 1.5, "hot"]


def draw_ids(skew: float | str, seed: int) -> np.ndarray:
    """Returns distinct experts of lognormal popularity, [R * T, K]. With "hot", every token names one expert."""
    rng = np.random.default_rng(seed)
    popularity = rng.normal(size=E) * (0.0 if skew == "hot" else float(skew))
    if skew == "hot":
        popularity[rng.integers(E)] = np.inf
    scores = popularity + rng.gumbel(size=(R * T, E))
    return np.argsort(-scores, axis=1)[:, :K].astype(np.int32)


def run_all() -> list[list[str]]:
    """Runs the routings and returns the cells of the table."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
    sizes = {"num_experts": E, "top_k": K, "hidden": 8, "max_tokens_per_rank": T, "dtype": "float32"}
    split = PartitionSpec("ep")
    with (
        ep.Group(mesh, **sizes, backend="reference") as plain,
        ep.Group(mesh, **sizes, backend="reference", replicas=E // R) as group,
    ):

        def on_rank(ids: jax.Array) -> tuple[jax.Array, ...]:
            x = jnp.ones((T, 8), jnp.float32)
            plan = ep.balance(ids, group=group)
            balanced = ep.dispatch(x, ids, group=group, plan=plan)
            dropping = ep.dispatch(x, ids, group=plain, capacity_factor=FACTOR)
            worst = ep.dispatch(x, ids, group=plain)
            numbers = [jnp.sum(recv.counts) for recv in (balanced, dropping, worst)]
            numbers += [balanced.num_dropped, dropping.num_dropped, worst.num_dropped]
            numbers += [jnp.sum(plan.slot_expert >= 0), jnp.int32(balanced.x.shape[0]), jnp.int32(worst.x.shape[0])]
            return tuple(number.astype(jnp.int32)[None] for number in numbers)

        run = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=split, out_specs=split))
        rows = []
        for skew in SKEWS:
            found = [[np.asarray(a) for a in run(draw_ids(skew, seed))] for seed in range(DRAWS)]
            rows.append(cells_of(skew, found))
    return rows


def cells_of(skew: float | str, found: list[list[np.ndarray]]) -> list[str]:
    balanced, _, worst, lost, dropped, never, copies, buffer, worst_buffer = (
        np.stack(of_draws) for of_draws in zip(*found, strict=True)
    )
    assert not lost.any() and not never.any() and (worst.sum(axis=1) == balanced.sum(axis=1)).all()
    mean = worst.mean(axis=1)
    return [
        "one hot expert" if skew == "hot" else f"lognormal, sigma {skew}",
        f"{(worst.max(axis=1) / mean).max():.2f}",
        f"{(balanced.max(axis=1) / mean).max():.2f}",
        f"{100 * dropped.sum(axis=1).max() / (R * T * K):.1f} %",
        f"{copies.mean():.1f} / {copies.max()}",
        f"{copies.max() * EXPERT_BYTES / 1e6:.0f} MB",
        f"{worst_buffer.max()}",
        f"{buffer.max()}",
    ]


def table() -> str:
    headings = [
        "routing", "busiest rank / mean", "with the plan", f"dropped at capacity {FACTOR}",
        "copies per rank: mean / most", "bytes of the most", "default buffer, rows", "with the plan, rows",
    ]  # fmt: skip
    rows = run_all()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    caption = (
        f"*Reference backend, {R} virtual CPU devices, commit {commit} ({datetime.date.today()}, jax "
        f"{jax.__version__}), `python scripts/balance_page.py --table`. {T} tokens per rank, top {K} of {E} experts; "
        f"the worst of {DRAWS} routings (mean copies: the mean). Bytes are those of DeepSeek-V3's experts, in "
        "bfloat16. Rows are counted, not timed.*"
    )
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return caption + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="also write the table")
    options = parser.parse_args()
    PICTURE.write_text(draw())
    if options.table:
        written, found = BLOCK.subn(lambda match: f"{match[1]}\n{table()}{match[2]}", PAGE.read_text())
        if not found:
            print(f"{PAGE} has no place for the table", file=sys.stderr)
            return 1
        PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
