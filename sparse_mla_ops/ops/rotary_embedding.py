from __future__ import annotations

from torch import Tensor

from sparse_mla_ops.ops._checks import (
    FLOATS,
    INTEGERS,
    check_dtype,
    check_rope_table,
    check_row_count,
    check_same_device,
    check_shape,
)
from sparse_mla_ops.ops._register import register_op


def check(q_pe: Tensor, k_pe: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> None:
    check_same_device(q_pe=q_pe, k_pe=k_pe, positions=positions, cos_sin_cache=cos_sin_cache)
    check_rope_table(cos_sin_cache)
    check_shape("positions", positions, "T", None)
    check_dtype("positions", positions, *INTEGERS)
    rope_dim = cos_sin_cache.shape[1]
    check_shape("q_pe", q_pe, "T H R", positions.shape[0], None, rope_dim)
    check_dtype("q_pe", q_pe, *FLOATS)
    check_shape("k_pe", k_pe, "T R", None, rope_dim)
    check_row_count("k_pe", k_pe, positions.shape[0], "positions")
    check_dtype("k_pe", k_pe, q_pe.dtype)


def _empty_outputs(q_pe: Tensor, k_pe: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return q_pe.new_empty(q_pe.shape), k_pe.new_empty((positions.shape[0], k_pe.shape[1]))


@register_op(rows="positions")
def rotary_embedding(
    q_pe: Tensor, k_pe: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate the rope parts of queries and keys.

    With c, s the cosine and sine of a pair (x, y): (x·c − y·s, y·c + x·s). Rotated in fp32 without contraction to FMA,
    then rounded to the input's dtype. Elements stay where they are: nothing is de-interleaved.

    Args:
        q_pe: [T, H, R] fp32, bf16 or fp16, any strides.
        k_pe: [≥T, R], dtype of q_pe. Rows beyond T are ignored.
        positions: [T] int32 or int64. Clamped to 0 … P − 1: nothing is read outside the table.
        cos_sin_cache: [P, R], R even: R/2 cosines, then R/2 sines.
        is_neox: True pairs element i with i + R/2; False (interleaved, GPT-J) pairs 2i with 2i + 1.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        q_pe [T, H, R] and k_pe [T, R], rotated, contiguous, in the input's dtype.

    Raises:
        ValueError: a wrong shape, dtype or device. BackendUnavailable: no backend can run the call.
    """
    check(q_pe, k_pe, positions, cos_sin_cache)
    return _empty_outputs(q_pe, k_pe, positions)
