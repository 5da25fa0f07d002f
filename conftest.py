"""Fixtures of both test folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's kernels then run on CPU tensors. Before their first import, and in this process only: tests that compile
    # for GPUs that are not here do so in processes of their own.
    os.environ["TRITON_INTERPRET"] = "1"

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {}),
    # Three layers, of which the middle one reads the token indices of the first.
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """Makes random models with the real structure of a family: 16 index heads, since with few of them ReLU gives exact
    zeros and so ties; top-k well below the contexts that tests use, so that selection matters."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

    def make(family: str = "deepseek_v32", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        config, model, settings = FAMILIES[family]
        torch.manual_seed(seed)
        config = getattr(transformers, config)(**{**COMMON, **settings, **overrides})
        return getattr(transformers, model)(config).to(dtype).eval()

    return make
