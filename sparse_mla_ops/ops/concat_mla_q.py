from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import (
    FLOATS,
    check_dtype,
    check_same_device,
    check_scale,
    check_shape,
    check_target_dtype,
)
from sparse_mla_ops.ops._register import register_op


def check(q_nope: Tensor, q_pe: Tensor, q_scale: Tensor | None, q_dtype: torch.dtype | None) -> None:
    check_same_device(q_nope=q_nope, q_pe=q_pe, q_scale=q_scale)
    check_shape("q_nope", q_nope, "T H L", None, None, None)
    check_dtype("q_nope", q_nope, *FLOATS)
    check_shape("q_pe", q_pe, "T H R", q_nope.shape[0], q_nope.shape[1], None)
    check_dtype("q_pe", q_pe, q_nope.dtype)
    check_scale("q_scale", q_scale)
    check_target_dtype("q_dtype", q_dtype, q_nope.dtype)


def _empty_outputs(q_nope: Tensor, q_pe: Tensor, q_dtype: torch.dtype | None) -> Tensor:
    tokens, heads, rank = q_nope.shape
    return q_nope.new_empty((tokens, heads, rank + q_pe.shape[2]), dtype=q_dtype or q_nope.dtype)


@register_op(rows="q_nope")
def concat_mla_q(
    q_nope: Tensor,
    q_pe: Tensor,
    q_scale: Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Join the absorbed query and its rotated rope part into the query of MLA, optionally as fp8.

    Args:
        q_nope: [T, H, L] fp32, bf16 or fp16, any strides (it is a transposed bmm result in practice).
        q_pe: [T, H, R], dtype of q_nope, already rotated; R may be 0.
        q_scale: one fp32 value, a divisor: stored = round(q / q_scale), saturating. None is 1; unused unless q_dtype
            is fp8.
        q_dtype: None (dtype of q_nope), or an fp8 dtype.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        q [T, H, L + R], contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device. BackendUnavailable: no backend can run the call.
    """
    check(q_nope, q_pe, q_scale, q_dtype)
    return _empty_outputs(q_nope, q_pe, q_dtype)
