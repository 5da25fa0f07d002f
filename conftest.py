"""Fixtures of both test folders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_deepseek() -> Callable[..., Any]:
    """Makes random DeepSeek-V3.2 models with the real structure: 16 index heads, since with few of them ReLU gives
    exact zeros and so ties; top-k well below the contexts that tests use, so that selection matters."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        torch.manual_seed(seed)
        settings = {
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
        model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**{**settings, **overrides}))
        return model.to(dtype).eval()

    return make
