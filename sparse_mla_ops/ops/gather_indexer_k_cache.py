from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.formats import index_cache_layout
from sparse_mla_ops.ops._checks import (
    INTEGERS,
    check_dtype,
    check_index_cache_strides,
    check_same_device,
    check_shape,
)
from sparse_mla_ops.ops._register import register_op


def _check(
    index_cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, rows: int, fp8_dtype: torch.dtype | None
) -> None:
    check_same_device(index_cache=index_cache, block_table=block_table, cu_seq_lens=cu_seq_lens)
    check_index_cache_strides(index_cache)
    index_cache_layout(index_cache, fp8_dtype)
    check_shape("block_table", block_table, "S MB", None, None)
    check_dtype("block_table", block_table, *INTEGERS)
    check_shape("cu_seq_lens", cu_seq_lens, "S+1", block_table.shape[0] + 1)
    check_dtype("cu_seq_lens", cu_seq_lens, *INTEGERS)
    if rows < 0:
        raise ValueError(f"rows: expected at least 0, got {rows}")


def _empty_outputs(index_cache: Tensor, rows: int, fp8_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    layout = index_cache_layout(index_cache, fp8_dtype)
    k = index_cache.new_empty((rows, layout.head_dim), dtype=layout.dtype)
    return k, index_cache.new_empty((rows if layout.quantized else 0,), dtype=torch.float32)


@register_op(rows="rows")
def gather_indexer_k_cache(
    index_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    rows: int,
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the indexer keys of whole sequences, one after the other, for `mqa_logits`. Nothing is dequantised.

    Args:
        index_cache: as in `indexer_k_quant_and_cache`.
        block_table: [S, MB] int32 or int64: block_table[s, i] holds tokens i·BS … i·BS + BS − 1 of request s.
        cu_seq_lens: [S + 1] int32 or int64, ascending from 0: request s fills rows cu_seq_lens[s] … cu_seq_lens[s + 1].
        rows: number of rows to produce, an upper bound of cu_seq_lens[S].
        fp8_dtype: encoding of a uint8 cache (default e4m3fn), and the dtype of the keys returned.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        k [rows, D] in the cache's dtype, and k_scale [rows] fp32, shape [0] for an unquantised cache. Rows past
        cu_seq_lens[S], past the block table's end, or whose block id is out of range are 0, with scale 0.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
    """
    _check(index_cache, block_table, cu_seq_lens, rows, fp8_dtype)
    return _empty_outputs(index_cache, rows, fp8_dtype)
