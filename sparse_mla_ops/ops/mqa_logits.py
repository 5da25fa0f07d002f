from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import FLOATS, FLOATS_OR_FP8, INTEGERS, check_dtype, check_same_device, check_shape
from sparse_mla_ops.ops._register import register_op


def _check(q: Tensor, k: Tensor, weights: Tensor, row_starts: Tensor, row_ends: Tensor, k_scale: Tensor | None) -> None:
    check_same_device(q=q, k=k, weights=weights, row_starts=row_starts, row_ends=row_ends, k_scale=k_scale)
    check_shape("q", q, "T I D", None, None, None)
    check_dtype("q", q, *FLOATS_OR_FP8)
    tokens, heads, head_dim = q.shape
    check_shape("k", k, "N D", None, head_dim)
    check_dtype("k", k, *FLOATS_OR_FP8)
    check_shape("weights", weights, "T I", tokens, heads)
    check_dtype("weights", weights, *FLOATS)
    for name, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        check_shape(name, bound, "T", tokens)
        check_dtype(name, bound, *INTEGERS)
    if k_scale is not None:
        check_shape("k_scale", k_scale, "N", k.shape[0])
        check_dtype("k_scale", k_scale, torch.float32)


def _empty_outputs(q: Tensor, k: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)


@register_op(rows="q")
def mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    k_scale: Tensor | None = None,
    clean_logits: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Indexer scores of each query against contiguous keys: k_scale[n] · Σ_i weights[t, i] · relu(q[t, i] · k[n]).

    Args:
        q: [T, I, D] fp32, bf16, fp16 or fp8. An fp8 query's scale is folded into weights (`indexer_q_rope_quant`).
        k: [N, D] fp32, bf16, fp16 or fp8.
        weights: [T, I] fp32, bf16 or fp16. May be negative: the ReLU is per head, before the weighted sum.
        row_starts, row_ends: [T] int32 or int64: row t scores columns row_starts[t] … row_ends[t] − 1, clamped to the
            keys there are.
        k_scale: [N] fp32, for fp8 keys. None is 1.
        clean_logits: True sets columns outside the window to −inf; False leaves them unspecified.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        logits [T, N] fp32, by absolute column.

    Raises:
        ValueError: a wrong shape, dtype or device. BackendUnavailable: no backend can run the call.
    """
    _check(q, k, weights, row_starts, row_ends, k_scale)
    return _empty_outputs(q, k)
