"""DeepSeek-V3.2 in transformers (5.17 and newer): `DeepseekV32ForCausalLM`."""

from __future__ import annotations

from typing import Any

from sparse_mla_ops.nn.mla import IndexerSpec, MLASpec

MODEL_TYPE = "deepseek_v32"
ATTENTION = "DeepseekV32Attention"


def mla_spec(attention: Any) -> MLASpec:
    indexer = attention.indexer
    return MLASpec(
        q_a_proj=attention.q_a_proj,
        q_a_layernorm=attention.q_a_layernorm,
        q_b_proj=attention.q_b_proj,
        kv_a_proj_with_mqa=attention.kv_a_proj_with_mqa,
        kv_a_layernorm=attention.kv_a_layernorm,
        kv_b_proj=attention.kv_b_proj,
        o_proj=attention.o_proj,
        num_heads=attention.num_heads,
        qk_nope_head_dim=attention.qk_nope_head_dim,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        v_head_dim=attention.v_head_dim,
        kv_lora_rank=attention.kv_lora_rank,
        softmax_scale=attention.scaling,  # (P + R)^-0.5, times mscale² for yarn
        is_neox=False,  # MLA's rotation is interleaved …
        indexer=IndexerSpec(
            wq_b=indexer.wq_b,
            wk=indexer.wk,
            k_norm=indexer.k_norm,
            weights_proj=indexer.weights_proj,
            num_heads=indexer.n_heads,
            head_dim=indexer.head_dim,
            topk=indexer.index_topk,
            softmax_scale=indexer.softmax_scale,
            is_neox=True,  # … and the indexer's is not
        ),
    )
