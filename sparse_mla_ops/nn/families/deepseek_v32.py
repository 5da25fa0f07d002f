"""DeepSeek-V3.2 in transformers: `DeepseekV32ForCausalLM`."""

from sparse_mla_ops.nn.families.family import Family

FAMILY = Family(
    model_type="deepseek_v32",
    attention="DeepseekV32Attention",
    is_neox=False,
    index_is_neox=True,  # unlike MLA's own rotation
    passes_topk=False,
)
