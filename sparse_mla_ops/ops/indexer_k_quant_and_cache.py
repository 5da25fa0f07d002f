from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.formats import index_cache_layout
from sparse_mla_ops.ops._checks import (
    FLOATS,
    INTEGERS,
    check_choice,
    check_dtype,
    check_index_cache_strides,
    check_row_count,
    check_same_device,
    check_shape,
)
from sparse_mla_ops.ops._register import register_op


def _check(
    k: Tensor, index_cache: Tensor, slot_mapping: Tensor, scale_format: str, fp8_dtype: torch.dtype | None
) -> None:
    check_same_device(k=k, index_cache=index_cache, slot_mapping=slot_mapping)
    check_shape("slot_mapping", slot_mapping, "T", None)
    check_dtype("slot_mapping", slot_mapping, *INTEGERS)
    check_index_cache_strides(index_cache)
    check_shape("k", k, "T D", None, index_cache_layout(index_cache, fp8_dtype).head_dim)
    check_dtype("k", k, *FLOATS)
    check_row_count("k", k, slot_mapping.shape[0], "slot_mapping")
    check_choice("scale_format", scale_format, "ue8m0", "fp32")


@register_op(rows="slot_mapping", mutates_args=("index_cache",))
def indexer_k_quant_and_cache(
    k: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    scale_format: str = "ue8m0",
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> None:
    """Write each token's indexer key into its slot of the paged indexer cache, quantised if the cache is fp8.

    An fp8 key has one scale, max(amax, 1e-4) / 448 (240 for e4m3fnuz), stored as fp32 behind the block's values.

    Args:
        k: [≥T, D] fp32, bf16 or fp16, after its norm and rotation. Rows beyond T are ignored.
        index_cache: [NB, BS, D] fp32, bf16 or fp16, or uint8 [NB, BS, D + 4] for fp8 keys, written in place. Layout:
            `sparse_mla_ops.formats`. The pitch between blocks is free.
        slot_mapping: [T] int32 or int64, distinct. A slot below 0 or ≥ NB·BS writes nothing.
        scale_format: "ue8m0" rounds the scale up to a power of two, "fp32" keeps it. Unused by unquantised caches.
        fp8_dtype: encoding of a uint8 cache (default e4m3fn).
        backend: run on this backend or fail; None takes the first that can.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
        The cache is untouched after either.
    """
    _check(k, index_cache, slot_mapping, scale_format, fp8_dtype)
