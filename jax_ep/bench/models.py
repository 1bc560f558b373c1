"""The sizes of known models' MoE layers, for tests, benchmarks and documents."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model's MoE layers, from its public configuration."""

    name: str
    hidden: int  # channels of a token
    num_experts: int  # routed experts in all
    top_k: int  # experts per token
    intermediate: int | None  # channels inside an expert; None: not known

    def __str__(self) -> str:
        return self.name


MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v3", hidden=7168, num_experts=256, top_k=8, intermediate=2048),
        Model("kimi-k3", hidden=3584, num_experts=896, top_k=16, intermediate=None),
        Model("deepseek-v4-flash", hidden=4096, num_experts=256, top_k=6, intermediate=None),
        Model("glm-5.2", hidden=6144, num_experts=256, top_k=8, intermediate=None),
        Model("qwen3-235b", hidden=4096, num_experts=128, top_k=8, intermediate=1536),
        Model("qwen3-30b", hidden=2048, num_experts=128, top_k=8, intermediate=768),
        Model("gpt-oss-120b", hidden=2880, num_experts=128, top_k=4, intermediate=2880),
        Model("mixtral-8x7b", hidden=4096, num_experts=8, top_k=2, intermediate=14336),
    )
}
