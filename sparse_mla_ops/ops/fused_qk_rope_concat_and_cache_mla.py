from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.ops._checks import check_same_device, check_shape
from sparse_mla_ops.ops._register import register_op
from sparse_mla_ops.ops.concat_and_cache_mla import check as check_cache_write
from sparse_mla_ops.ops.concat_mla_q import _empty_outputs
from sparse_mla_ops.ops.concat_mla_q import check as check_query
from sparse_mla_ops.ops.rotary_embedding import check as check_rotation


@register_op(rows="positions", mutates_args=("kv_cache",))
def fused_qk_rope_concat_and_cache_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """`rotary_embedding`, `concat_mla_q` and `concat_and_cache_mla` in one: the finished query out, the KV row written.

    Equal bit for bit to the three in a row on one backend: rotate in fp32 without contraction to FMA, round to the
    input's dtype, then divide by the scale (IEEE, fp32) and round to nearest even. The row of q is produced for every
    token, also where the slot writes nothing.

    Args:
        q_nope: [T, H, L] fp32, bf16 or fp16, any strides: the absorbed query (q · W_UK).
        q_pe: [T, H, R], dtype of q_nope, not yet rotated; R may be 0.
        kv_c: [≥T, L], same dtype: the latent, after its norm. Rows beyond T are ignored.
        k_pe: [≥T, R], same dtype, not yet rotated.
        positions: [T] int32 or int64. Clamped to 0 … P − 1. They are not slots: never derive one from the other.
        cos_sin_cache: [P, R], R even: R/2 cosines, then R/2 sines.
        kv_cache: [NB, BS, row], written in place; see `concat_and_cache_mla`.
        slot_mapping: [T] int32 or int64, distinct. Below 0 or ≥ NB·BS: nothing is written.
        is_neox: pairing of the rotation; see `rotary_embedding`.
        q_scale, q_dtype: the query's; see `concat_mla_q`.
        kv_scale, fp8_dtype: the cache's; see `concat_and_cache_mla`.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        q [T, H, L + R], contiguous, in q_dtype or the input's dtype.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
        The cache is untouched after either.
    """
    check_rotation(q_pe, k_pe, positions, cos_sin_cache)
    check_query(q_nope, q_pe, q_scale, q_dtype)
    check_cache_write(kv_c, k_pe, kv_cache, slot_mapping, kv_scale, fp8_dtype)
    check_same_device(q_pe=q_pe, q_nope=q_nope, kv_c=kv_c)
    check_shape("slot_mapping", slot_mapping, "T", positions.shape[0])
    check_shape("kv_c", kv_c, "T L", None, q_nope.shape[2])
    return _empty_outputs(q_nope, q_pe, q_dtype)
