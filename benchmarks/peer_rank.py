"""One rank of one case of benchmarks/peers.py. Rank 0 prints a JSON object with `pair_us` and `checked`.

peers.py starts it with `jax-ep launch`. A case is a class, whose dispatch() and combine() are timed. The constructor
runs one dispatch. Its rows, dequantized to bfloat16, are the input of every combine. expected() is what combine must
then return.
"""

from __future__ import annotations

import abc
import json
import os
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist

PAIRS = (20, 60)  # the numbers of pairs in the two CUDA graphs
REPLAYS = 20
BLOCK = 128  # channels per scale of a row in fp8
RTOL, ATOL = 0.1, 0.05  # rounding to e4m3 changes a normal value by at most 1/16 of it


class Case(abc.ABC):
    """The inputs of one rank, T rows of bfloat16 and the experts of each, and the calls to time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.ranks, self.tokens = dist.get_rank(), settings["ranks"], settings["tokens"]
        self.num_sms = settings["num_sms"] or torch.cuda.get_device_properties("cuda").multi_processor_count
        self.experts, self.hidden = settings["experts"], settings["hidden"]
        random = torch.Generator(device="cuda").manual_seed(self.rank)
        scores = torch.rand(self.tokens, self.experts, generator=random, device="cuda")
        self.topk_idx = scores.topk(settings["top_k"], sorted=False).indices
        self.topk_weights = torch.full(self.topk_idx.shape, 1 / settings["top_k"], device="cuda")
        self.x = torch.randn(self.tokens, self.hidden, generator=random, device="cuda").bfloat16()
        rank_of_expert = self.topk_idx // (self.experts // self.ranks)
        mask_per_rank = [(rank_of_expert == rank).any(dim=1) for rank in range(self.ranks)]
        self.is_token_in_rank = torch.stack(mask_per_rank, dim=1)  # [T, ranks]

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """Sends the rows to the ranks of their experts."""

    @abc.abstractmethod
    def combine(self) -> torch.Tensor:
        """Sends the rows of the first dispatch back, and returns [T, hidden], or one row per row sent."""

    def expected(self) -> torch.Tensor:
        """The right result of combine(). By default, x times the number of ranks that have an expert of the token."""
        return self.is_token_in_rank.sum(dim=1, keepdim=True) * self.x.float()

    def check(self, combined: torch.Tensor) -> None:
        torch.testing.assert_close(combined.float(), self.expected(), rtol=RTOL, atol=ATOL)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows in fp8 and their scales, [T, hidden / 128]."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2).clamp(1e-4) / 448
    return (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def dequantize(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows.float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1).bfloat16()


class DeepEpV1(Case):
    """The normal mode. Its first dispatch computes the routing; the others take it from the handle."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import deep_ep

        super().__init__(settings)
        self.quantized = quantize(self.x)
        deep_ep.Buffer.set_num_sms(self.num_sms)  # must be even
        self.buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 30)
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(self.topk_idx, self.experts)
        rows, _, _, _, self.handle, _ = self.buffer.dispatch(
            self.quantized,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.topk_idx,
            topk_weights=self.topk_weights,
        )
        self.y = dequantize(*rows)

    def dispatch(self) -> Any:
        return self.buffer.dispatch(self.quantized, handle=self.handle)

    def combine(self) -> torch.Tensor:
        return self.buffer.combine(self.y, self.handle)[0]


class DeepEpV1LowLatency(Case):
    """The low-latency mode. Dispatch casts, and combine multiplies by the weights."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import deep_ep

        super().__init__(settings)
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.tokens, self.hidden, self.ranks, self.experts)
        local_experts = self.experts // self.ranks
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=local_experts
        )
        (rows, scales), _, self.handle, _, _ = self.dispatch()
        self.y = dequantize(rows.flatten(0, 1), scales.flatten(0, 1)).view(*rows.shape)
        self.combine()  # each call switches between two buffers, so the next dispatch uses the first one again

    def dispatch(self) -> Any:
        return self.buffer.low_latency_dispatch(self.x, self.topk_idx, self.tokens, self.experts, use_fp8=True)

    def combine(self) -> torch.Tensor:
        return self.buffer.low_latency_combine(self.y, self.topk_idx, self.topk_weights, self.handle)[0]

    def expected(self) -> torch.Tensor:
        return self.x.float()  # the weights of a token have the sum 1


class DeepEpV2(Case):
    """ElasticBuffer, without synchronization with the host."""

    do_expand = False

    def __init__(self, settings: dict[str, Any]) -> None:
        import deep_ep

        super().__init__(settings)
        self.quantized = quantize(self.x)
        self.buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=self.tokens,
            hidden=self.hidden,
            num_topk=self.topk_idx.shape[1],
            num_allocated_qps=1,  # there is no network
            explicitly_destroy=True,
        )
        self.topk_idx = self.topk_idx.to(deep_ep.topk_idx_t)
        rows, _, _, self.handle, _ = self.dispatch()
        self.y = dequantize(*rows)

    def dispatch(self) -> Any:
        return self.buffer.dispatch(
            x=self.quantized,
            topk_idx=self.topk_idx,
            topk_weights=self.topk_weights,
            num_experts=self.experts,
            num_max_tokens_per_rank=self.tokens,
            num_sms=self.num_sms,
            do_expand=self.do_expand,
            do_cpu_sync=False,
        )

    def combine(self) -> torch.Tensor:
        return self.buffer.combine(x=self.y, handle=self.handle, num_sms=self.num_sms)[0]


class DeepEpV2Expanded(DeepEpV2):
    do_expand = True

    def expected(self) -> torch.Tensor:
        return self.topk_idx.shape[1] * self.x.float()


class Nccl(Case):
    """all_to_all_single of the rows that each rank gets, which are sorted before the timing."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.token_of_row = torch.cat([column.nonzero()[:, 0] for column in self.is_token_in_rank.unbind(1)])
        self.sent = self.is_token_in_rank.sum(dim=0).tolist()
        counts: list[Any] = [None] * self.ranks
        dist.all_gather_object(counts, self.sent)
        self.received = [of_source[self.rank] for of_source in counts]
        rows, scales = quantize(self.x)
        bytes_of_rows = torch.cat([rows.view(torch.uint8), scales.view(torch.uint8)], dim=1)
        self.rows = bytes_of_rows[self.token_of_row].contiguous()
        self.arrived = self.rows.new_empty(sum(self.received), self.rows.shape[1])
        self.returned = self.x.new_empty(sum(self.sent), self.hidden)
        self.dispatch()
        rows, scales = self.arrived.split([self.hidden, self.hidden // BLOCK * 4], dim=1)
        self.y = dequantize(rows.contiguous().view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32))

    def dispatch(self) -> Any:
        dist.all_to_all_single(self.arrived, self.rows, self.received, self.sent)

    def combine(self) -> torch.Tensor:
        dist.all_to_all_single(self.returned, self.y, self.sent, self.received)
        return self.returned

    def expected(self) -> torch.Tensor:
        return self.x[self.token_of_row].float()


CASES = {
    "v1": DeepEpV1,
    "v1-low-latency": DeepEpV1LowLatency,
    "v2": DeepEpV2,
    "v2-expanded": DeepEpV2Expanded,
    "nccl": Nccl,
}


def graph_of(case: Case, num_pairs: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Captures pairs of a dispatch and a combine. Also returns the result of the last combine."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_pairs):
            case.dispatch()
            combined = case.combine()
    return graph, combined


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Returns the median time of a replay. Before each replay, the ranks meet at a barrier; the first two warm up."""
    times = []
    for _ in range(2 + REPLAYS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


def pair_us(case: Case) -> float:
    """Returns the time of 60 pairs less that of 20, divided by 40. What a replay costs once does not count."""
    for _ in range(3):
        case.dispatch()
        case.check(case.combine())
    torch.cuda.synchronize()
    replays = []
    for num_pairs in PAIRS:
        graph, combined = graph_of(case, num_pairs)
        replays.append(replay_us(graph))
        combined.fill_(torch.nan)
        graph.replay()
        case.check(combined)
    return (replays[1] - replays[0]) / (PAIRS[1] - PAIRS[0])


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, address = int(os.environ["SLURM_PROCID"]), os.environ["JAX_COORDINATOR_ADDRESS"]  # from `jax-ep launch`
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://{address}", rank=rank, world_size=settings["ranks"], device_id=device
    )
    case = CASES[settings["case"]](settings)
    times: list[Any] = [None] * settings["ranks"]
    dist.all_gather_object(times, pair_us(case))
    dist.barrier()
    if rank == 0:
        print(json.dumps({"pair_us": max(times), "checked": True}), flush=True)
    os._exit(0)  # without the libraries' destructors, which may wait for each other


if __name__ == "__main__":
    main()
