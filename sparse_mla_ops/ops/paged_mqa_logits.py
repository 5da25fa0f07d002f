from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.formats import index_cache_layout
from sparse_mla_ops.ops._checks import (
    FLOATS,
    FLOATS_OR_FP8,
    INTEGERS,
    check_dtype,
    check_index_cache_strides,
    check_positive,
    check_same_device,
    check_shape,
)
from sparse_mla_ops.ops._register import register_op


def check(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    row_ends: Tensor,
    block_table: Tensor,
    req_id: Tensor,
    max_len: int,
    fp8_dtype: torch.dtype | None,
) -> None:
    check_same_device(
        q=q, index_cache=index_cache, weights=weights, row_ends=row_ends, block_table=block_table, req_id=req_id
    )
    check_index_cache_strides(index_cache)
    check_shape("q", q, "T I D", None, None, index_cache_layout(index_cache, fp8_dtype).head_dim)
    check_dtype("q", q, *FLOATS_OR_FP8)
    check_shape("weights", weights, "T I", q.shape[0], q.shape[1])
    check_dtype("weights", weights, *FLOATS)
    check_shape("block_table", block_table, "S MB", None, None)
    check_dtype("block_table", block_table, *INTEGERS)
    for name, per_row in (("row_ends", row_ends), ("req_id", req_id)):
        check_shape(name, per_row, "T", q.shape[0])
        check_dtype(name, per_row, *INTEGERS)
    check_positive("max_len", max_len)


def _empty_outputs(q: Tensor, max_len: int) -> Tensor:
    return q.new_empty((q.shape[0], max_len), dtype=torch.float32)


@register_op(rows="q")
def paged_mqa_logits(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    row_ends: Tensor,
    block_table: Tensor,
    req_id: Tensor,
    max_len: int,
    clean_logits: bool = True,
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Indexer scores of each query against the paged keys of its own request. The formula is that of `mqa_logits`.

    Args:
        q: [T, I, D] fp32, bf16, fp16 or fp8. An fp8 query's scale is folded into weights (`indexer_q_rope_quant`).
        index_cache: [NB, BS, D] unquantised or uint8 [NB, BS, D + 4], as in `indexer_k_quant_and_cache`.
        weights: [T, I] fp32, bf16 or fp16.
        row_ends: [T] int32 or int64: row t scores tokens 0 … row_ends[t] − 1 of its request. This is the causal mask:
            row j of a request with L tokens and n new rows ends at L − n + j + 1.
        block_table: [S, MB] int32 or int64.
        req_id: [T] int32 or int64: row t belongs to block_table[req_id[t]].
        max_len: width of the result, a constant of the step: MB·BS, or less if no request is longer.
        clean_logits: True sets columns from row_ends on to −inf; False leaves them unspecified.
        fp8_dtype: encoding of a uint8 cache (default e4m3fn).
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        logits [T, max_len] fp32. Tokens whose request, block-table column or block id is out of range score −inf.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
    """
    check(q, index_cache, weights, row_ends, block_table, req_id, max_len, fp8_dtype)
    return _empty_outputs(q, max_len)
