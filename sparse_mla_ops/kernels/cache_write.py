"""Rotation, query concatenation and KV-cache write: one kernel for the fused operator and for its parts.

Launch these with `enable_fp_fusion=False`: a rotation contracted to FMA rounds differently from the split path.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla_ops.kernels.common import (
    AMAX_FLOOR,
    DS_MLA,
    DS_MLA_GROUP,
    DS_MLA_GROUPS,
    DS_MLA_ROPE_AT,
    DS_MLA_SCALES_AT,
    amax,
    cast,
    is_slot,
    launch_early,
    round_up_to_power_of_two,
    row_offset,
    to_fp8,
)


@triton.jit
def _load_rope_pairs(base, stride, half: tl.constexpr, HALF: tl.constexpr, IS_NEOX: tl.constexpr, mask):
    """(first, second) of each pair, in the input's dtype. base: pointers to rows [..., 1]; mask: of rows [..., 1]."""
    pair = tl.arange(0, HALF)
    ok = mask & (pair < half)
    if IS_NEOX:
        first, second = pair, pair + half
    else:
        first, second = 2 * pair, 2 * pair + 1
    return (
        tl.load(base + first * stride, mask=ok, other=0.0),
        tl.load(base + second * stride, mask=ok, other=0.0),
    )


@triton.jit
def _rotate(first, second, cos, sin, EMULATED: tl.constexpr):
    """Both halves of rotated pairs, rounded to the input's dtype."""
    dtype: tl.constexpr = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    return cast(x * cos - y * sin, dtype, EMULATED), cast(y * cos + x * sin, dtype, EMULATED)


@triton.jit
def _load_angles(position, cos_sin, stride_p, stride_r, table_rows, half: tl.constexpr, HALF: tl.constexpr):
    """(cos, sin) [HALF] fp32 of a position, which is clamped to the table."""
    position = tl.minimum(tl.maximum(position.to(tl.int64), 0), table_rows - 1)
    pair = tl.arange(0, HALF)
    row = cos_sin + position * stride_p
    cos = tl.load(row + pair * stride_r, mask=pair < half, other=0.0)
    sin = tl.load(row + (pair + half) * stride_r, mask=pair < half, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _store_rope_pairs(base, first, second, half: tl.constexpr, HALF: tl.constexpr, IS_NEOX: tl.constexpr, mask):
    """Store pairs to contiguous rows, where they came from."""
    if IS_NEOX:
        pair = tl.arange(0, HALF)
        ok = mask & (pair < half)
        tl.store(base + pair, first, mask=ok)
        tl.store(base + pair + half, second, mask=ok)
    else:
        element = tl.arange(0, 2 * HALF)
        tl.store(base + element, tl.interleave(first, second), mask=mask & (element < 2 * half))


@triton.jit
def _store_type(x, scale, dtype: tl.constexpr, fp8_max: tl.constexpr, EMULATED: tl.constexpr):
    """x / scale as fp8, or x in the type that is stored where that is no fp8 type."""
    if fp8_max > 0:
        x = x.to(tl.float32)
        return to_fp8(tl.div_rn(x, scale + tl.zeros_like(x)), dtype, fp8_max, EMULATED)
    else:
        return cast(x, dtype, EMULATED)


@triton.jit(do_not_specialize=("num_heads", "table_rows", "num_slots", "block_size"))
def qk_rope_concat_cache_kernel(
    out,
    q_nope,
    q_pe,
    kv_c,
    k_pe,
    positions,
    cos_sin,
    cache,
    slots,
    q_scale,
    kv_scale,
    q_nope_stride_t,
    q_nope_stride_h,
    q_nope_stride_l,
    q_pe_stride_t,
    q_pe_stride_h,
    q_pe_stride_r,
    kv_c_stride_t,
    kv_c_stride_l,
    k_pe_stride_t,
    k_pe_stride_r,
    position_stride_t,
    slot_stride_t,
    table_stride_p,
    table_stride_r,
    cache_stride_block,
    cache_stride_row,
    num_heads,
    table_rows,
    num_slots,
    block_size,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    IS_NEOX: tl.constexpr,
    Q_FP8_MAX: tl.constexpr,
    KV_FP8_MAX: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    PDL: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Program (t, g): heads g·BLOCK_H … of token t's query for g < QUERY_PROGRAMS, else its row of the cache.

    Parts that are None are left out: the query (`out`), the cache, the rotation (`cos_sin`), scales.
    out: [T, H, L + R] contiguous. cache: elements of the stored type; for 656-byte rows its fp8 view, strides in bytes.
    Q_FP8_MAX, KV_FP8_MAX: largest value of the fp8 target, 0 for others.
    """
    if PDL:
        launch_early()
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    half: tl.constexpr = R // 2
    latent = tl.arange(0, BLOCK_L)
    # What does not depend on anything is loaded first, so that angles wait for the position and nothing else does.
    if cos_sin is not None and R > 0:
        position = tl.load(positions + t * position_stride_t)
    if out is not None:
        if group < QUERY_PROGRAMS:
            q_divisor = 1.0
            if q_scale is not None:
                q_divisor = tl.load(q_scale)
            q_type: tl.constexpr = out.dtype.element_ty
            head = group * BLOCK_H + tl.arange(0, BLOCK_H)
            ok = (head < num_heads)[:, None]
            head = head.to(tl.int64)[:, None]
            target = out + (t * num_heads + head) * (L + R)
            nope = tl.load(
                q_nope + t * q_nope_stride_t + head * q_nope_stride_h + latent[None, :] * q_nope_stride_l,
                mask=ok & (latent < L)[None, :],
                other=0.0,
            )
            if R > 0:
                base = q_pe + t * q_pe_stride_t + head * q_pe_stride_h
                first, second = _load_rope_pairs(base, q_pe_stride_r, half, HALF, IS_NEOX, ok)
                if cos_sin is not None:
                    cos, sin = _load_angles(position, cos_sin, table_stride_p, table_stride_r, table_rows, half, HALF)
            tl.store(
                target + latent[None, :],
                _store_type(nope, q_divisor, q_type, Q_FP8_MAX, EMULATED),
                mask=ok & (latent < L)[None, :],
            )
            if R > 0:
                if cos_sin is not None:
                    first, second = _rotate(first, second, cos[None, :], sin[None, :], EMULATED)
                first = _store_type(first, q_divisor, q_type, Q_FP8_MAX, EMULATED)
                second = _store_type(second, q_divisor, q_type, Q_FP8_MAX, EMULATED)
                _store_rope_pairs(target + L, first, second, half, HALF, IS_NEOX, ok)
    if cache is not None:
        if group == QUERY_PROGRAMS:
            # A block of one slot: the interpreter cannot broadcast a scalar of int1, which the mask would be.
            slot = tl.load(slots + t * slot_stride_t + tl.arange(0, 1)).to(tl.int64)
            source = kv_c + t * kv_c_stride_t
            if KV_FORMAT == DS_MLA:
                part = tl.arange(0, DS_MLA_GROUPS)
                column = part[:, None] * DS_MLA_GROUP + tl.arange(0, DS_MLA_GROUP)[None, :]
                values = tl.load(source + column * kv_c_stride_l)
            else:
                values = tl.load(source + latent * kv_c_stride_l, mask=latent < L, other=0.0)
            kv_divisor = 1.0
            if kv_scale is not None:
                kv_divisor = tl.load(kv_scale)
            if R > 0:
                always = tl.arange(0, 1) >= 0
                k_first, k_second = _load_rope_pairs(
                    k_pe + t * k_pe_stride_t, k_pe_stride_r, half, HALF, IS_NEOX, always
                )
                if cos_sin is not None:
                    cos, sin = _load_angles(position, cos_sin, table_stride_p, table_stride_r, table_rows, half, HALF)
            slot_ok = is_slot(slot, num_slots)
            row = cache + row_offset(slot, num_slots, block_size, cache_stride_block, cache_stride_row)
            kv_type: tl.constexpr = cache.dtype.element_ty
            if KV_FORMAT == DS_MLA:
                values = values.to(tl.float32)
                scales = tl.div_rn(amax(values, 1), KV_FP8_MAX + tl.zeros([DS_MLA_GROUPS], tl.float32))
                scales = round_up_to_power_of_two(tl.maximum(scales, AMAX_FLOOR))
                stored = to_fp8(
                    tl.div_rn(values, scales[:, None] + tl.zeros_like(values)), kv_type, KV_FP8_MAX, EMULATED
                )
                tl.store(row[:, None] + column, stored, mask=slot_ok[:, None])
                tl.store((row + DS_MLA_SCALES_AT).to(tl.pointer_type(tl.float32)) + part, scales, mask=slot_ok)
                rope = (row + DS_MLA_ROPE_AT).to(tl.pointer_type(tl.bfloat16))
                if R == 0:
                    tl.store(rope + tl.arange(0, 64), tl.zeros([64], tl.bfloat16), mask=slot_ok)
            else:
                tl.store(
                    row + latent,
                    _store_type(values, kv_divisor, kv_type, KV_FP8_MAX, EMULATED),
                    mask=slot_ok & (latent < L),
                )
            if R > 0:
                if cos_sin is not None:
                    k_first, k_second = _rotate(k_first, k_second, cos, sin, EMULATED)
                if KV_FORMAT == DS_MLA:
                    _store_rope_pairs(
                        rope,
                        cast(k_first, tl.bfloat16, EMULATED),
                        cast(k_second, tl.bfloat16, EMULATED),
                        half,
                        HALF,
                        IS_NEOX,
                        slot_ok,
                    )
                else:
                    k_first = _store_type(k_first, kv_divisor, kv_type, KV_FP8_MAX, EMULATED)
                    k_second = _store_type(k_second, kv_divisor, kv_type, KV_FP8_MAX, EMULATED)
                    _store_rope_pairs(row + L, k_first, k_second, half, HALF, IS_NEOX, slot_ok)


@triton.jit(do_not_specialize=("num_heads", "table_rows"))
def rotary_embedding_kernel(
    q_out,
    k_out,
    q_pe,
    k_pe,
    positions,
    cos_sin,
    q_stride_t,
    q_stride_h,
    q_stride_r,
    k_stride_t,
    k_stride_r,
    position_stride_t,
    table_stride_p,
    table_stride_r,
    num_heads,
    table_rows,
    R: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    IS_NEOX: tl.constexpr,
    PDL: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Program (t, g): heads g·BLOCK_H … of token t for g < QUERY_PROGRAMS, else its key. Outputs are contiguous."""
    if PDL:
        launch_early()
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    half: tl.constexpr = R // 2
    position = tl.load(positions + t * position_stride_t)
    cos, sin = _load_angles(position, cos_sin, table_stride_p, table_stride_r, table_rows, half, HALF)
    if group < QUERY_PROGRAMS:
        head = group * BLOCK_H + tl.arange(0, BLOCK_H)
        ok = (head < num_heads)[:, None]
        head = head.to(tl.int64)[:, None]
        base = q_pe + t * q_stride_t + head * q_stride_h
        first, second = _load_rope_pairs(base, q_stride_r, half, HALF, IS_NEOX, ok)
        first, second = _rotate(first, second, cos[None, :], sin[None, :], EMULATED)
        _store_rope_pairs(q_out + (t * num_heads + head) * R, first, second, half, HALF, IS_NEOX, ok)
    else:
        always = tl.arange(0, 1) >= 0
        k_first, k_second = _load_rope_pairs(k_pe + t * k_stride_t, k_stride_r, half, HALF, IS_NEOX, always)
        k_first, k_second = _rotate(k_first, k_second, cos, sin, EMULATED)
        _store_rope_pairs(k_out + t * R, k_first, k_second, half, HALF, IS_NEOX, always)
