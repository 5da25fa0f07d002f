"""GLM-5, 5.1 and 5.2 in transformers: `GlmMoeDsaForCausalLM`.

From 5.2 on, layers share token indices: a "shared" layer has no indexer and takes those of the layer before.
"""

from sparse_mla_ops.nn.families.family import Family

FAMILY = Family(
    model_type="glm_moe_dsa",
    attention="GlmMoeDsaAttention",
    is_neox=False,
    index_is_neox=False,
    passes_topk=True,
)
