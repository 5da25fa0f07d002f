from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import check_positive
from sparse_mla_ops.ops._register import register_op
from sparse_mla_ops.ops.paged_mqa_logits import check as check_logits


def _empty_outputs(q: Tensor, k: int) -> Tensor:
    return q.new_empty((q.shape[0], k), dtype=torch.int32)


@register_op(rows="q")
def sparse_attn_indexer(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    row_ends: Tensor,
    block_table: Tensor,
    req_id: Tensor,
    k: int,
    max_len: int,
    logits_budget_bytes: int = 512 * 2**20,
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Score and select: `paged_mqa_logits`, then `top_k_per_row`, never holding more logits than the budget.

    Args:
        q, index_cache, weights, row_ends, block_table, req_id, max_len, fp8_dtype: as in `paged_mqa_logits`.
        k: how many tokens to keep per row, ≥ 1.
        logits_budget_bytes: most bytes of logits (fp32, max_len per row) alive at a time; one row is always allowed.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        token indices [T, k] int32, relative to the request, −1 filled, in no particular order. At the cut, equal scores
        go to the lowest index.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
    """
    check_logits(q, index_cache, weights, row_ends, block_table, req_id, max_len, fp8_dtype)
    check_positive("k", k)
    check_positive("logits_budget_bytes", logits_budget_bytes)
    return _empty_outputs(q, k)
