from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import (
    FLOATS,
    INTEGERS,
    check_dtype,
    check_positive,
    check_rope_table,
    check_same_device,
    check_shape,
    check_target_dtype,
)
from sparse_mla_ops.ops._register import register_op


def _check(q: Tensor, positions: Tensor, cos_sin_cache: Tensor, weights: Tensor, q_dtype: torch.dtype | None) -> None:
    check_same_device(q=q, positions=positions, cos_sin_cache=cos_sin_cache, weights=weights)
    check_shape("q", q, "T I D", None, None, None)
    check_dtype("q", q, *FLOATS)
    check_positive("q heads I", q.shape[1])
    check_positive("q head dim D", q.shape[2])
    check_shape("positions", positions, "T", q.shape[0])
    check_dtype("positions", positions, *INTEGERS)
    check_rope_table(cos_sin_cache)
    if cos_sin_cache.shape[1] > q.shape[2]:
        raise ValueError(
            f"cos_sin_cache: expected R ≤ D = {q.shape[2]}, as the first R values of a head are rotated, "
            f"got {tuple(cos_sin_cache.shape)}"
        )
    check_shape("weights", weights, "T I", q.shape[0], q.shape[1])
    check_dtype("weights", weights, *FLOATS)
    check_target_dtype("q_dtype", q_dtype, q.dtype)


def _empty_outputs(q: Tensor, weights: Tensor, q_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=q_dtype or q.dtype), weights.new_empty(weights.shape, dtype=torch.float32)


@register_op(rows="q")
def indexer_q_rope_quant(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    softmax_scale: float,
    is_neox: bool,
    q_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the indexer's queries, quantise them if asked, and fold every scale into the head weights.

    The first R values of each head are rotated (fp32, rounded to q's dtype). An fp8 query has one scale per token and
    head, max(amax, 1e-4) / 448 (240 for e4m3fnuz) rounded up to a power of two, and
    weights_out = weights · softmax_scale · I^-0.5 · scale, so that `mqa_logits` needs no query scale.

    Args:
        q: [T, I, D] fp32, bf16 or fp16.
        positions: [T] int32 or int64. Clamped to 0 … P − 1.
        cos_sin_cache: [P, R], R even and ≤ D; R may be 0.
        weights: [T, I] fp32, bf16 or fp16: the layer's head weights, not yet scaled.
        softmax_scale: D^-0.5 in the released models.
        is_neox: pairing of the rotation; the indexer's own flag (True in DeepSeek-V3.2, False in GLM-5.x), not MLA's.
        q_dtype: None (dtype of q, no scale), or an fp8 dtype.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        q [T, I, D] in q_dtype and weights [T, I] fp32, both contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device. BackendUnavailable: no backend can run the call.
    """
    _check(q, positions, cos_sin_cache, weights, q_dtype)
    return _empty_outputs(q, weights, q_dtype)
