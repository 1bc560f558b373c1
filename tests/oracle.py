"""What jax_ep must return, in NumPy, for all ranks of an expert-parallel group at once.

Shares no code with jax_ep and is written for clarity: it states the contract a second time. The leading axis of every
array is the rank. Only `dense_moe`, whose gradients JAX takes, is JAX.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = np.float32(448)
E5M2, E5M2_MAX = ml_dtypes.float8_e5m2, np.float32(57344)
CHANNELS_PER_SCALE = 128


@dataclass(frozen=True)
class Route:
    """Where every row of the receive buffers came from; `rows` is [E_local, capacity] or [capacity]."""

    source: np.ndarray  # [R, *rows, 3]: source rank, token, k; -1 in rows that hold no token
    is_alignment: np.ndarray  # [R, *rows] bool: rows that only round a group up
    counts: np.ndarray  # [R, E_local] int32
    group_sizes: np.ndarray  # [R, E_local] int32
    num_dropped: np.ndarray  # [R] int32
    topk_shape: tuple[int, int, int]  # R, T, K

    @property
    def is_token(self) -> np.ndarray:
        """[R, *rows] bool: rows that hold a token."""
        return self.source[..., 0] >= 0

    @property
    def kept(self) -> np.ndarray:
        """[R, T, K] bool, by source: choices that found an expert and room there."""
        kept = np.zeros(self.topk_shape, bool)
        kept[tuple(self.source[self.is_token].T)] = True
        return kept

    def gather(self, values: np.ndarray) -> np.ndarray:
        """values [R, T, ...] of the sources, as rows [R, *rows, ...]; zero where there is no token."""
        rank, token, _ = np.moveaxis(self.source, -1, 0)
        rows = values[rank, token]
        rows[~self.is_token] = 0
        return rows

    def gather_choices(self, values: np.ndarray) -> np.ndarray:
        """values [R, T, K] of the sources, as rows [R, *rows]; zero where there is no token."""
        return np.where(self.is_token, values[tuple(np.moveaxis(self.source, -1, 0))], 0)


@dataclass(frozen=True)
class Dispatched:
    """What dispatch returns, x and scales zero in rows that hold no token."""

    x: np.ndarray
    weights: np.ndarray
    scales: np.ndarray | None
    route: Route


def default_capacity(num_ranks, tokens, top_k, experts_per_rank, layout, alignment=1) -> int:
    """Rows that are enough unless a token names one expert twice."""
    if layout == "expert":
        return num_ranks * tokens
    rows = num_ranks * tokens * min(top_k, experts_per_rank) + experts_per_rank * (alignment - 1)
    return round_up(rows, alignment)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def needed_capacity(topk_idx, num_experts, layout, alignment=1) -> int:
    """The least capacity, a multiple of alignment, at which no rank drops a row."""
    num_ranks = len(topk_idx)
    counts = np.array([np.sum(topk_idx == expert) for expert in range(num_experts)]).reshape(num_ranks, -1)
    aligned = round_up(counts, alignment)
    return int(aligned.max() if layout == "expert" else aligned.sum(axis=1).max())


def fill(need, room, start=0) -> np.ndarray:
    """What each keeps of need [N] if there is room for so many: the contract's words, as they are."""
    need = np.asarray(need)
    level = 0
    while level < need.max(initial=0) and np.minimum(need, level + 1).sum() <= room:
        level += 1
    kept = np.minimum(need, level)
    for i in range(start, start + len(need)):
        if kept.sum() < room and need[i % len(need)] > level:
            kept[i % len(need)] += 1
    return kept


def share_room(need, *, layout, capacity, alignment, first_expert) -> np.ndarray:
    """The rows that one rank keeps of need [E_local, R], per local expert and source rank."""
    of_expert = need.sum(axis=1)
    if layout == "expert":
        counts = np.minimum(of_expert, capacity)
    else:
        tiles = fill(-(-of_expert // alignment), capacity // alignment)
        counts = np.minimum(of_expert, tiles * alignment)
    num_ranks = need.shape[1]
    starts = [0 if layout == "token" else (first_expert + expert) % num_ranks for expert in range(len(need))]
    return np.array([fill(need[expert], count, starts[expert]) for expert, count in enumerate(counts)]).reshape(
        need.shape
    )


def route(topk_idx, *, num_experts, layout, capacity=None, alignment=1) -> Route:
    """The places of all rows: by local expert, source rank, source token, k. Too little room is shared fairly."""
    num_ranks, tokens, top_k = topk_idx.shape
    experts_per_rank = num_experts // num_ranks
    if capacity is None:
        capacity = default_capacity(num_ranks, tokens, top_k, experts_per_rank, layout, alignment)
    rows = (experts_per_rank, capacity) if layout == "expert" else (capacity,)
    source = np.full((num_ranks, *rows, 3), -1)
    is_alignment = np.zeros((num_ranks, *rows), bool)
    counts = np.zeros((num_ranks, experts_per_rank), np.int32)
    group_sizes = np.zeros_like(counts)
    num_dropped = np.zeros(num_ranks, np.int32)
    for rank in range(num_ranks):
        first_expert = rank * experts_per_rank
        # argwhere lists source rank, token, k in just the order that rows keep.
        wanted = [np.argwhere(topk_idx == first_expert + expert) for expert in range(experts_per_rank)]
        need = np.array([np.bincount(rows[:, 0], minlength=num_ranks) for rows in wanted])
        kept = share_room(need, layout=layout, capacity=capacity, alignment=alignment, first_expert=first_expert)
        num_dropped[rank] = need.sum() - kept.sum()
        start = 0
        for expert in range(experts_per_rank):
            sources = [wanted[expert][wanted[expert][:, 0] == r][: kept[expert, r]] for r in range(num_ranks)]
            held = np.concatenate(sources)
            count = counts[rank, expert] = len(held)
            if layout == "expert":
                group_sizes[rank, expert] = count
                source[rank, expert, :count] = held
            else:
                size = group_sizes[rank, expert] = round_up(count, alignment)
                source[rank, start : start + count] = held
                is_alignment[rank, start + count : start + size] = True
                start += size
    return Route(source, is_alignment, counts, group_sizes, num_dropped, topk_idx.shape)


def arriving(x, wire, dequantize_to):
    """The rows of all tokens in the form in which they arrive, and their scales or None."""
    rows, scales = x if isinstance(x, tuple) else (x, None)
    if wire is not None:
        rows, scales = quantize(x, wire)
    return (rows, scales) if dequantize_to is None else (dequantize(rows, scales, dequantize_to), None)


def dispatch(x, topk_idx, topk_weights, *, wire=None, dequantize_to=None, **layout) -> Dispatched:
    """x is [R, T, H] or already quantised, (x_fp8 [R, T, H], scales [R, T, ceil(H/128)]); `layout` as for `route`."""
    where = route(topk_idx, **layout)
    if topk_weights is None:
        topk_weights = np.ones(topk_idx.shape, np.float32)
    payload, scales = arriving(x, wire, dequantize_to)
    return Dispatched(
        x=where.gather(payload),
        weights=where.gather_choices(topk_weights),
        scales=None if scales is None else where.gather(scales),
        route=where,
    )


@dataclass(frozen=True)
class TokenRows:
    """What dispatch returns in the layout "token", zero in rows that hold no token."""

    x: np.ndarray  # [R, capacity, H]
    scales: np.ndarray | None
    topk_idx: np.ndarray  # [R, capacity, K] int32
    weights: np.ndarray  # [R, capacity, K] float32
    counts: np.ndarray  # [R, E_local] int32
    num_rows: np.ndarray  # [R] int32
    num_dropped: np.ndarray  # [R] int32
    source: np.ndarray  # [R, capacity, 2]: source rank, token; -1 in rows that hold no token
    kept: np.ndarray  # [R, T, K] bool, by source: choices that found an expert and room there

    @property
    def is_token(self) -> np.ndarray:
        """[R, capacity] bool: rows that hold a token."""
        return self.source[..., 0] >= 0


def dispatch_tokens(
    x, topk_idx, topk_weights, *, num_experts, capacity=None, wire=None, dequantize_to=None
) -> TokenRows:
    """dispatch in the layout "token". x is [R, T, H] or already quantised, (x_fp8, scales)."""
    num_ranks, tokens, top_k = topk_idx.shape
    local = num_experts // num_ranks
    capacity = num_ranks * tokens if capacity is None else capacity
    if topk_weights is None:
        topk_weights = np.ones(topk_idx.shape, np.float32)
    payload, scales = arriving(x, wire, dequantize_to)
    source = np.full((num_ranks, capacity, 2), -1)
    ids = np.full((num_ranks, capacity, top_k), -1, np.int32)
    weights = np.zeros((num_ranks, capacity, top_k), np.float32)
    counts = np.zeros((num_ranks, local), np.int32)
    num_dropped = np.zeros(num_ranks, np.int32)
    kept = np.zeros(topk_idx.shape, bool)
    for rank in range(num_ranks):
        is_here = (topk_idx >= rank * local) & (topk_idx < (rank + 1) * local)
        wanted = np.argwhere(is_here.any(axis=2))  # source rank, token
        need = np.bincount(wanted[:, 0], minlength=num_ranks)
        room = fill(need, capacity)
        held = np.concatenate([wanted[wanted[:, 0] == r][: room[r]] for r in range(num_ranks)])
        num_dropped[rank] = len(wanted) - len(held)
        for row, (r, token) in enumerate(held):
            source[rank, row] = r, token
            for k in np.flatnonzero(is_here[r, token]):
                expert = topk_idx[r, token, k] - rank * local
                ids[rank, row, k], weights[rank, row, k] = expert, topk_weights[r, token, k]
                counts[rank, expert] += 1
                kept[r, token, k] = True
    is_token = source[..., 0] >= 0

    def gather(values):
        rows = np.zeros((num_ranks, capacity, values.shape[-1]), values.dtype)
        rows[is_token] = values[tuple(source[is_token].T)]
        return rows

    return TokenRows(
        x=gather(payload),
        scales=None if scales is None else gather(scales),
        topk_idx=ids,
        weights=weights,
        counts=counts,
        num_rows=is_token.sum(axis=1, dtype=np.int32),
        num_dropped=num_dropped,
        source=source,
        kept=kept,
    )


def quantize(x, wire) -> tuple[np.ndarray, np.ndarray]:
    """fp8 of x [..., H] with one float32 scale per 128 channels (32 with "mxfp8"), every step rounded to float32.

    The last scale is that of the channels that are left.

    A block that holds a NaN or infinity becomes NaN: its bytes are 0x7f and its scale is NumPy's NaN.
    """
    hidden = x.shape[-1]
    block = 32 if wire == "mxfp8" else CHANNELS_PER_SCALE
    blocks = np.zeros((*x.shape[:-1], -(-hidden // block) * block), np.float32)
    blocks[..., :hidden] = x
    blocks = blocks.reshape(*x.shape[:-1], -1, block)
    is_finite = np.isfinite(blocks).all(axis=-1)
    blocks = np.where(is_finite[..., None], blocks, np.float32(0))
    amax = np.maximum(np.abs(blocks).max(axis=-1), np.float32(1e-4))
    scale = amax * (np.float32(1) / FP8_MAX)
    dtype, largest = (E5M2, E5M2_MAX) if wire == "fp8_e5m2" else (FP8, FP8_MAX)
    if wire == "fp8":
        scaled = blocks * (FP8_MAX / amax)[..., None]
    elif wire == "fp8_e5m2":
        scale = scale * (FP8_MAX / E5M2_MAX)
        scaled = blocks * (E5M2_MAX / amax)[..., None]
    else:
        mantissa, exponent = np.frexp(scale)
        exponent -= mantissa == 0.5  # a power of two already
        scale = np.ldexp(np.float32(1), exponent)
        scaled = blocks / scale[..., None]
    assert scaled.dtype == scale.dtype == np.float32
    x_fp8 = np.clip(scaled, -largest, largest).astype(dtype)
    x_fp8.view(np.uint8)[~is_finite] = 0x7F
    return x_fp8.reshape(*x.shape[:-1], -1)[..., :hidden], np.where(is_finite, scale, np.float32(np.nan))


def dequantize(x_fp8, scales, dtype) -> np.ndarray:
    """Every NaN of the result has the bits of NumPy's NaN of that dtype."""
    hidden = x_fp8.shape[-1]
    block = CHANNELS_PER_SCALE if scales.shape[-1] == -(-hidden // CHANNELS_PER_SCALE) else 32
    with np.errstate(invalid="ignore", over="ignore"):  # 0 * infinity; float16 overflows to infinity
        values = (x_fp8.astype(np.float32) * np.repeat(scales, block, axis=-1)[..., :hidden]).astype(dtype)
    values[np.isnan(values)] = np.nan
    return values


def combine(y, weights, where: Route) -> tuple[np.ndarray, np.ndarray]:
    """The sum for every token and the sum of its terms' absolute values, both [R, T, H] float64.

    y [R, *rows, H]; weights [R, *rows], or None for the unweighted combine.
    """
    rank, token, _ = where.source[where.is_token].T
    terms = y[where.is_token].astype(np.float64)
    if weights is not None:
        terms *= weights[where.is_token].astype(np.float64)[:, None]
    total = np.zeros((*where.topk_shape[:2], y.shape[-1]))
    magnitude = np.zeros_like(total)
    np.add.at(total, (rank, token), terms)
    np.add.at(magnitude, (rank, token), np.abs(terms))
    return total, magnitude


def rank_sums(x, topk_idx, topk_weights, num_experts, dtype=None) -> np.ndarray:
    """What each rank sends back of the tokens whose rows its experts leave as they are: [rank, R, T, H].

    Added in float32 in the order of k and rounded to `dtype`, or to x's dtype. Weights must be powers of two: else the
    last bit depends on whether products are rounded before they are added.
    """
    num_ranks = len(x)
    owner = np.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx // (num_experts // num_ranks), -1)
    total = np.zeros((num_ranks, *x.shape), np.float32)
    for k in range(topk_idx.shape[-1]):
        is_there = owner[..., k] == np.arange(num_ranks)[:, None, None]
        total += np.where(is_there, topk_weights[..., k], np.float32(0))[..., None] * x.astype(np.float32)
    return total.astype(x.dtype if dtype is None else dtype)


def through_wire(x, wire) -> np.ndarray:
    """float32 x [..., H] as it arrives: cast and converted back."""
    return dequantize(*quantize(x, wire), np.float32)


def sum_over_wire(parts, wire) -> np.ndarray:
    """float32 sums [R, T, H] of float32 parts [rank, R, T, H] in the order of ranks; a rank's own part is not cast."""
    arrived = through_wire(parts, wire)
    total = np.zeros(parts.shape[1:], np.float32)
    for source in range(len(parts)):
        for rank in range(len(parts)):
            total[source] += (parts if rank == source else arrived)[rank, source]
    return total


def sum_over_ranks(parts, node_size) -> np.ndarray:
    """What the sources make of parts [rank, R, T, H]: [R, T, H], added in float32.

    In the order of ranks; but those of another node are added there, in the same order, and rounded to parts' dtype.
    """
    num_ranks = len(parts)
    total = np.zeros(parts.shape[1:], np.float32)
    for source in range(num_ranks):
        for first in range(0, num_ranks, node_size):
            of_node = parts[first : first + node_size, source].astype(np.float32)
            if source // node_size != first // node_size:
                of_node = of_node.sum(axis=0, keepdims=True, initial=np.float32(0)).astype(parts.dtype)
            for part in of_node:
                total[source] += part.astype(np.float32)
    return total.astype(parts.dtype)


@dataclass(frozen=True)
class Plan:
    """What balance must return. A slot is rank * (E_local + B) + i, with the home experts before the copies."""

    slot_expert: np.ndarray  # [R, B] int32
    num_rows: np.ndarray  # [R] int32
    home_rows: np.ndarray  # [R] int32
    topk_slot: np.ndarray  # [R, T, K] int32


def limit(rows: int, tolerance: float) -> int:
    return rows + rows * round(4096 * tolerance) // 4096


def moves(needs, num_ranks, num_slots, tolerance=0.0) -> list[tuple[int, int, int, int, int]]:
    """Deals the rows of each donor, one expert at a time: (donor, receiver, expert, rows, the first row's number)."""
    home = np.asarray(needs, np.int64).reshape(num_ranks, -1)
    load = home.sum(1)
    most = limit(-(-int(load.sum()) // num_ranks), tolerance)
    donors = sorted((r for r in range(num_ranks) if load[r] > most), key=lambda r: (-load[r], r))
    rooms = sorted(
        ((most - load[r], r) for r in range(num_ranks) if load[r] < most), key=lambda room: (-room[0], room[1])
    )
    moved, slots = [], {}

    def deal(line, donor, to, rows):
        while rows:
            expert, left = line[0]
            taken = min(rows, left)
            taken_experts = slots.setdefault(to, [])
            if taken and (expert in taken_experts or len(taken_experts) < num_slots):
                if expert not in taken_experts:
                    taken_experts.append(expert)
                moved.append((donor, to, expert, taken, int(home.reshape(-1)[expert]) - left))
            line[0][1] -= taken  # what finds no slot stays at home, and no other rank gets it
            rows -= taken
            if not line[0][1]:
                line.pop(0)

    carry = 0
    for number, donor in enumerate(donors):
        order = sorted(range(home.shape[1]), key=lambda e: (-home[donor][e], e))
        line = [[donor * home.shape[1] + e, int(home[donor][e])] for e in order]  # what the donor has left
        to_give = load[donor] - most + carry
        while rooms and rooms[0][0] <= to_give:
            room, to = rooms.pop(0)
            deal(line, donor, to, room)
            to_give -= room
        carry = to_give
        if number + 1 < len(donors):
            deal(line, donor, donors[number + 1], carry)
        elif carry:  # the next receiver has more room than is left
            deal(line, donor, rooms.pop(0)[1], carry)
    after = load.copy()
    for donor, to, _, rows, _ in moved:
        after[donor] -= rows
        after[to] += rows
    return moved if after.max() <= load.max() else []


def balance(topk_idx, *, num_experts, num_slots, tolerance=0.0) -> Plan:
    """The plan for topk_idx [R, T, K]. The rows of an expert are in the order of source rank, token, k."""
    num_ranks = len(topk_idx)
    local = num_experts // num_ranks
    rows = [np.argwhere(topk_idx == expert) for expert in range(num_experts)]
    needs = np.array([len(of_expert) for of_expert in rows])
    topk_slot = np.full(topk_idx.shape, -1, np.int32)
    for expert, of_expert in enumerate(rows):
        topk_slot[tuple(of_expert.T)] = expert // local * (local + num_slots) + expert % local
    slot_expert = np.full((num_ranks, num_slots), -1, np.int32)
    num_rows = needs.reshape(num_ranks, -1).sum(1)
    for donor, to, expert, count, first in moves(needs, num_ranks, num_slots, tolerance):
        held = list(slot_expert[to])
        slot = held.index(expert) if expert in held else held.index(-1)
        slot_expert[to, slot] = expert
        topk_slot[tuple(rows[expert][first : first + count].T)] = to * (local + num_slots) + local + slot
        num_rows[donor] -= count
        num_rows[to] += count
    home_rows = needs.reshape(num_ranks, -1).sum(1)
    return Plan(slot_expert, num_rows.astype(np.int32), home_rows.astype(np.int32), topk_slot)


def replicate(w, slot_expert) -> np.ndarray:
    """w [R, E_local, ...] and slot_expert [R, B] -> [R, E_local + B, ...]: empty slots are zero."""
    everyone = w.reshape(-1, *w.shape[2:])
    copies = np.where((slot_expert >= 0).reshape(*slot_expert.shape, *[1] * (w.ndim - 2)), everyone[slot_expert], 0)
    return np.concatenate([w, copies.astype(w.dtype)], axis=1)


def all_to_all(x, splits) -> tuple[np.ndarray, np.ndarray]:
    """x [R, M, H] sorted by expert, splits [R, E] -> blocks [R, R, M, H], zero where nothing came, [R, R, E_local]."""
    num_ranks = len(x)
    by_rank = splits.reshape(num_ranks, num_ranks, -1)
    blocks = np.zeros((num_ranks, *x.shape), x.dtype)
    for source in range(num_ranks):
        start = 0
        for target, n in enumerate(by_rank[source].sum(axis=-1)):
            blocks[target, source, :n] = x[source, start : start + n]
            start += n
    return blocks, by_rank.swapaxes(0, 1)


def all_to_all_back(y, splits) -> np.ndarray:
    """y [R, R, M, H] and the senders' splits [R, E] -> [R, M, H], zero beyond what had been sent."""
    num_ranks = len(y)
    back = np.zeros(y.shape[1:], y.dtype)
    for source in range(num_ranks):
        start = 0
        for target, n in enumerate(splits[source].reshape(num_ranks, -1).sum(axis=-1)):
            back[source, start : start + n] = y[target, source, :n]
            start += n
    return back


def dense_moe(x, topk_idx, topk_weights, experts) -> jax.Array:
    """Every expert on every token, in float32, for JAX to differentiate.

    x [tokens, H], topk_idx and topk_weights [tokens, K], experts [E, H, H]; expert e computes tanh(x @ experts[e]).
    """
    x, experts = x.astype(jnp.float32), experts.astype(jnp.float32)
    outputs = jnp.tanh(jnp.einsum("th,ehf->tef", x, experts, precision="highest"))
    # one_hot of an id outside [0, E) is a row of zeros: no expert.
    gates = jnp.einsum("tk,tke->te", topk_weights, jax.nn.one_hot(topk_idx, len(experts)), precision="highest")
    return jnp.einsum("te,tef->tf", gates, outputs, precision="highest")


def dense_mlp(x, topk_idx, topk_weights, w_gate_up, w_down, activation=jax.nn.silu) -> jax.Array:
    """As `dense_moe`, for gated MLPs: w_gate_up [E, H, 2I], gate first, and w_down [E, I, H]."""
    x, w_gate_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate_up, w_down))
    inner = w_down.shape[1]
    gate = jnp.einsum("th,ehi->tei", x, w_gate_up[:, :, :inner], precision="highest")
    up = jnp.einsum("th,ehi->tei", x, w_gate_up[:, :, inner:], precision="highest")
    outputs = jnp.einsum("tei,eih->teh", activation(gate) * up, w_down, precision="highest")
    gates = jnp.einsum("tk,tke->te", topk_weights, jax.nn.one_hot(topk_idx, len(w_down)), precision="highest")
    return jnp.einsum("te,teh->th", gates, outputs, precision="highest")


def softmax(logits) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def largest(values, k) -> np.ndarray:
    """The indices of the k largest values of each row, the largest first; of equal ones, the lower index first."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def gate_of_mixtral(logits, top_k) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights: softmax over all experts, the largest, divided by their sum."""
    scores = softmax(logits)
    ids = largest(scores, top_k)
    weights = np.take_along_axis(scores, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def gate_of_gpt_oss(logits, top_k) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights: the largest logits, and the softmax over these alone."""
    ids = largest(logits, top_k)
    return ids, softmax(np.take_along_axis(logits, ids, axis=-1))


def gate_of_deepseek_v3(logits, bias, *, top_k, num_groups, topk_groups, scale) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights, token by token, as in `Gate` of the model's published inference code."""
    ids = np.zeros((len(logits), top_k), np.int64)
    weights = np.zeros((len(logits), top_k))
    for token, row in enumerate(logits.astype(np.float64)):
        original = 1 / (1 + np.exp(-row))
        groups = (original + bias).reshape(num_groups, -1)
        best = largest(np.sort(groups, axis=1)[:, -2:].sum(axis=1), topk_groups)
        allowed = np.full_like(groups, -np.inf)
        allowed[best] = groups[best]
        ids[token] = largest(allowed.reshape(-1), top_k)
        chosen = original[ids[token]]
        weights[token] = chosen / chosen.sum() * scale
    return ids, weights
