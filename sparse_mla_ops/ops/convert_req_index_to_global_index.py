from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import INTEGERS, check_dtype, check_positive, check_same_device, check_shape
from sparse_mla_ops.ops._register import register_op


def _check(req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int) -> None:
    check_same_device(token_indices=token_indices, req_id=req_id, block_table=block_table)
    check_shape("token_indices", token_indices, "T K", None, None)
    check_shape("req_id", req_id, "T", token_indices.shape[0])
    check_shape("block_table", block_table, "S MB", None, None)
    for name, tensor in (("token_indices", token_indices), ("req_id", req_id), ("block_table", block_table)):
        check_dtype(name, tensor, *INTEGERS)
    check_positive("token_indices width K", token_indices.shape[1])
    check_positive("block_size", block_size)


def _empty_outputs(token_indices: Tensor) -> Tensor:
    return token_indices.new_empty(token_indices.shape, dtype=torch.int32)


@register_op(rows="req_id")
def convert_req_index_to_global_index(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, backend: str | None = None
) -> Tensor:
    """Turn positions within a request into cache slots: block_table[req_id[t], i // BS] · BS + i % BS.

    Args:
        req_id: [T] int32 or int64.
        block_table: [S, MB] int32 or int64.
        token_indices: [T, K] int32 or int64, relative to the request; negative is a hole. K ≥ 1.
        block_size: BS of the cache.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        slots [T, K] int32. −1, at the same place, for holes, for request rows and block-table columns out of range, for
        negative block ids, and for slots that int32 cannot hold.

    Raises:
        ValueError: a wrong shape, dtype or device. BackendUnavailable: no backend can run the call.
    """
    _check(req_id, block_table, token_indices, block_size)
    return _empty_outputs(token_indices)
