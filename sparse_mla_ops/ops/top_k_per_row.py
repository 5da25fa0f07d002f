from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import INTEGERS, check_dtype, check_positive, check_same_device, check_shape
from sparse_mla_ops.ops._register import register_op


def _check(logits: Tensor, row_starts: Tensor, row_ends: Tensor, k: int) -> None:
    check_same_device(logits=logits, row_starts=row_starts, row_ends=row_ends)
    check_shape("logits", logits, "T N", None, None)
    check_dtype("logits", logits, torch.float32)
    for name, bound in (("row_starts", row_starts), ("row_ends", row_ends)):
        check_shape(name, bound, "T", logits.shape[0])
        check_dtype(name, bound, *INTEGERS)
    check_positive("k", k)


def _empty_outputs(logits: Tensor, k: int) -> Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


@register_op(rows="logits")
def top_k_per_row(logits: Tensor, row_starts: Tensor, row_ends: Tensor, k: int, backend: str | None = None) -> Tensor:
    """The columns of the k largest logits in each row's window.

    Args:
        logits: [T, N] fp32, any strides. Nothing outside a row's window is read, so it need not be clean.
        row_starts, row_ends: [T] int32 or int64: row t chooses among columns row_starts[t] … row_ends[t] − 1, clamped
            to the columns there are.
        k: how many, ≥ 1; may exceed N.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        indices [T, k] int32, relative to row_starts[t], in no particular order; −1 fills up rows that have fewer. At
        the cut, equal logits go to the lowest index. NaN is never chosen; −inf inside the window may be.

    Raises:
        ValueError: a wrong shape, dtype or device. BackendUnavailable: no backend can run the call.
    """
    _check(logits, row_starts, row_ends, k)
    return _empty_outputs(logits, k)
