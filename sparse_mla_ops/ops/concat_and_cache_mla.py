from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.formats import kv_cache_layout
from sparse_mla_ops.ops._checks import (
    FLOATS,
    INTEGERS,
    check_cache_strides,
    check_dtype,
    check_row_count,
    check_same_device,
    check_scale,
    check_shape,
)
from sparse_mla_ops.ops._register import register_op


def check(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    fp8_dtype: torch.dtype | None,
) -> None:
    check_same_device(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping, kv_scale=kv_scale)
    check_shape("slot_mapping", slot_mapping, "T", None)
    check_dtype("slot_mapping", slot_mapping, *INTEGERS)
    check_shape("kv_c", kv_c, "T L", None, None)
    check_dtype("kv_c", kv_c, *FLOATS)
    check_shape("k_pe", k_pe, "T R", None, None)
    check_dtype("k_pe", k_pe, kv_c.dtype)
    check_row_count("kv_c", kv_c, slot_mapping.shape[0], "slot_mapping")
    check_row_count("k_pe", k_pe, slot_mapping.shape[0], "slot_mapping")
    check_cache_strides("kv_cache", kv_cache)
    kv_cache_layout(kv_cache, kv_c.shape[1], k_pe.shape[1], fp8_dtype)
    check_scale("kv_scale", kv_scale)


@register_op(rows="slot_mapping", mutates_args=("kv_cache",))
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> None:
    """Write [kv_c | k_pe] of each token into its slot of the paged KV cache.

    Args:
        kv_c: [≥T, L] fp32, bf16 or fp16: the latent, after its norm. Rows beyond T are ignored.
        k_pe: [≥T, R], dtype of kv_c, already rotated; R may be 0.
        kv_cache: [NB, BS, row], written in place. Layouts: `sparse_mla_ops.formats`. Any block and row pitch.
        slot_mapping: [T] int32 or int64, distinct; token t goes to kv_cache[slot // BS, slot % BS]. A slot below 0 or
            past the end (≥ NB·BS) writes nothing.
        kv_scale: one fp32 value, real = stored · kv_scale, for latent and rope part alike. None is 1; unused by
            unquantised caches and by 656-byte rows, which carry their own scales.
        fp8_dtype: encoding of a uint8 cache (default e4m3fn); an fp8 tensor says it itself.
        backend: run on this backend or fail; None takes the first that can.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
        The cache is untouched after either.
    """
    check(kv_c, k_pe, kv_cache, slot_mapping, kv_scale, fp8_dtype)
