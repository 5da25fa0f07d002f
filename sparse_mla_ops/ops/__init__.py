"""The operators: one file each, which holds the whole contract (docstring, checks, outputs, registration).

Letters: T query rows, H local query heads, L kv_lora_rank, R rope dim, W = L + R, K top-k width, NB blocks, BS block
size, N = NB·BS cache rows, S requests, MB blocks per request, I index heads, D index head dim, P rope table rows.

What holds for every operator: integer tensors may be int32 or int64 and strided; addresses are computed in 64 bits;
input strides are honoured; outputs are fresh and contiguous; nothing is read back to the host and no launch shape
depends on data, so a call can be captured in a graph; the same call gives the same bits. There is no backward: one
that reaches an operator gets autograd's warning and no gradient.
"""

from sparse_mla_ops.ops.concat_and_cache_mla import concat_and_cache_mla
from sparse_mla_ops.ops.concat_mla_q import concat_mla_q
from sparse_mla_ops.ops.convert_req_index_to_global_index import convert_req_index_to_global_index
from sparse_mla_ops.ops.fused_qk_rope_concat_and_cache_mla import fused_qk_rope_concat_and_cache_mla
from sparse_mla_ops.ops.gather_indexer_k_cache import gather_indexer_k_cache
from sparse_mla_ops.ops.indexer_k_quant_and_cache import indexer_k_quant_and_cache
from sparse_mla_ops.ops.indexer_q_rope_quant import indexer_q_rope_quant
from sparse_mla_ops.ops.mqa_logits import mqa_logits
from sparse_mla_ops.ops.paged_mqa_logits import paged_mqa_logits
from sparse_mla_ops.ops.rotary_embedding import rotary_embedding
from sparse_mla_ops.ops.sparse_attn_indexer import sparse_attn_indexer
from sparse_mla_ops.ops.sparse_mla_fwd import sparse_mla_fwd
from sparse_mla_ops.ops.top_k_per_row import top_k_per_row

__all__ = [
    "concat_and_cache_mla",
    "concat_mla_q",
    "convert_req_index_to_global_index",
    "fused_qk_rope_concat_and_cache_mla",
    "gather_indexer_k_cache",
    "indexer_k_quant_and_cache",
    "indexer_q_rope_quant",
    "mqa_logits",
    "paged_mqa_logits",
    "rotary_embedding",
    "sparse_attn_indexer",
    "sparse_mla_fwd",
    "top_k_per_row",
]
