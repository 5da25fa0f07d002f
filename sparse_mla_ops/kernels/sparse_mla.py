"""Sparse MLA: each query row attends to its own selection of cache rows. Prefill and decode, every cache layout.

Heads stand in rows and keys in columns of the score tile. One tile of the latent serves as keys and as values.
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
    round_up_to_power_of_two,
    row_offset,
    to_fp8,
)

# Numbers that change with the step: their divisibility would only make more variants of one kernel.
UNSPECIALIZED = ("num_heads", "num_keys", "num_indices", "num_slots", "block_size", "keys_per_split", "num_splits")

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, acc, EMULATED: tl.constexpr):
    """a · b + acc in fp32. EMULATED: the interpreter's product of 16-bit types is wrong, so it multiplies in fp32."""
    if EMULATED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _to_dot_type(x, dtype: tl.constexpr, fp8_max: tl.constexpr, EMULATED: tl.constexpr):
    if fp8_max > 0:
        return to_fp8(x, dtype, fp8_max, EMULATED)
    else:
        return x.to(dtype)


@triton.jit
def _share_and_lse(m, total, sink, HAS_SINK: tl.constexpr):
    """(factor of the weighted values, lse) from the largest score m and the sum of exp(score − m), natural logarithms.

    A row without a valid index has total 0: a finite factor of values that are 0, and lse −inf. The sink takes its part
    of the values and leaves lse alone: −inf takes nothing, +inf everything.
    """
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = m + tl.log(total)
    share = 1.0 / total
    if HAS_SINK:
        share *= tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(sink - tl.where(empty, 0.0, lse))))
    return share, tl.where(empty, float("-inf"), lse)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sparse_mla_kernel(
    out,
    lse_out,
    q,
    cache,
    indices,
    indptr,
    topk_length,
    q_scale,
    kv_scale,
    attn_sink,
    softmax_scale,
    q_stride_t,
    q_stride_h,
    q_stride_w,
    cache_stride_block,
    cache_stride_row,
    index_stride_t,
    index_stride_k,
    length_stride,
    num_heads,
    num_keys,
    num_indices,
    num_slots,
    block_size,
    keys_per_split,
    num_splits,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROPE_TYPE: tl.constexpr,
    QK_FP8_MAX: tl.constexpr,
    PV_FP8: tl.constexpr,
    NORMALIZE_Q: tl.constexpr,
    DENSE_CACHE: tl.constexpr,
    IS_FLAT: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    HAS_KV_SCALE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Program (t · head blocks + head block, split): BLOCK_H heads of row t over keys split · keys_per_split …

    out: [T, H, L], or with num_splits > 1 fp32 partial results [T, H, num_splits, L], each normalised, with lse_out
    their lse [T, H, num_splits]. cache: elements of the stored type; for 656-byte rows its fp8 view, strides in bytes.
    DOT_TYPE: type in which the latent is multiplied. ROPE_TYPE: the same of the rope part.
    HAS_SINK: only where there is one split; else it joins when the splits do.
    QK_FP8_MAX: 0, or multiply q · k in the cache's fp8, whose largest value this is. PV_FP8: p · v in fp8 as well.
    NORMALIZE_Q: divide each row of q by a power of two so that it fits fp16. DENSE_CACHE: slots at one pitch.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    pid = tl.program_id(0)
    t = (pid // head_blocks).to(tl.int64)
    split = tl.program_id(1)
    head = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    latent = tl.arange(0, BLOCK_L)
    rope = tl.arange(0, BLOCK_R)
    key = tl.arange(0, BLOCK_N)

    # The row's own list of keys.
    if IS_FLAT:
        begin = tl.load(indptr + t * length_stride).to(tl.int64)
        end = tl.minimum(tl.load(indptr + (t + 1) * length_stride).to(tl.int64), num_indices)
        count = tl.maximum(tl.minimum(end - begin, num_keys), 0).to(tl.int32)
        before = tl.minimum(begin, 0)  # entries that lie before the buffer are holes
        row_indices = indices + begin * index_stride_k
    else:
        before = 0
        count = num_keys
        if HAS_LENGTH:
            count = tl.minimum(tl.load(topk_length + t * length_stride).to(tl.int32), num_keys)
        row_indices = indices + t * index_stride_t

    # The query, multiplied by nothing yet: what scales it is folded into the scores.
    q_row = q + t * q_stride_t + head.to(tl.int64)[:, None] * q_stride_h
    q_latent = tl.load(q_row + latent[None, :] * q_stride_w, mask=head_ok[:, None] & (latent < L)[None, :], other=0.0)
    score_scale = tl.zeros([BLOCK_H], tl.float32) + softmax_scale * LOG2_E
    rope_scale = score_scale
    if HAS_Q_SCALE:
        score_scale *= tl.load(q_scale)
        rope_scale = score_scale
    if R > 0:
        q_rope_row = q_row + (L + rope[None, :]) * q_stride_w
        q_rope = tl.load(q_rope_row, mask=head_ok[:, None] & (rope < R)[None, :], other=0.0)
    if NORMALIZE_Q:
        largest = amax(q_latent.to(tl.float32), 1)
        if R > 0 and KV_FORMAT != DS_MLA:
            largest = tl.maximum(largest, amax(q_rope.to(tl.float32), 1))
        if QK_FP8_MAX > 0:
            unit = tl.maximum(largest, AMAX_FLOOR) / QK_FP8_MAX
        else:
            unit = round_up_to_power_of_two(tl.maximum(largest, 1e-30))
        q_latent = _to_dot_type(q_latent.to(tl.float32) / unit[:, None], DOT_TYPE, QK_FP8_MAX, EMULATED)
        if R > 0 and KV_FORMAT != DS_MLA:
            q_rope = _to_dot_type(q_rope.to(tl.float32) / unit[:, None], ROPE_TYPE, QK_FP8_MAX, EMULATED)
        score_scale *= unit
        if KV_FORMAT != DS_MLA:
            rope_scale = score_scale
    q_latent = q_latent.to(DOT_TYPE)
    if R > 0:
        q_rope = q_rope.to(ROPE_TYPE)
    value_scale = 1.0
    if HAS_KV_SCALE:
        value_scale = tl.load(kv_scale)
        score_scale *= value_scale
        rope_scale *= value_scale

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, count)
    for start in range(first, last, BLOCK_N):
        entry = start + key
        slot = tl.load(row_indices + entry * index_stride_k, mask=(entry < last) & (entry + before >= 0), other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        slot = tl.where(valid, slot, 0)
        if DENSE_CACHE:
            row = cache + slot.to(tl.int64) * cache_stride_row
        else:
            row = cache + row_offset(slot, block_size, cache_stride_block, cache_stride_row)
        kv = tl.load(row[:, None] + latent[None, :], mask=valid[:, None] & (latent < L)[None, :], other=0.0)
        if R > 0:
            if KV_FORMAT == DS_MLA:
                rope_row = (row + DS_MLA_ROPE_AT).to(tl.pointer_type(tl.bfloat16))
            else:
                rope_row = row + L
            k_rope = tl.load(rope_row[:, None] + rope[None, :], mask=valid[:, None] & (rope < R)[None, :], other=0.0)
            k_rope = k_rope.to(ROPE_TYPE)

        zero = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if KV_FORMAT == DS_MLA:
            group = tl.arange(0, DS_MLA_GROUPS)
            scale_row = (row + DS_MLA_SCALES_AT).to(tl.pointer_type(tl.float32))
            scales = tl.load(scale_row[:, None] + group[None, :], mask=valid[:, None], other=0.0)
            grouped = tl.reshape(kv.to(tl.float16), [BLOCK_N, DS_MLA_GROUPS, DS_MLA_GROUP])
            kv = tl.reshape(grouped * scales.to(tl.float16)[:, :, None], [BLOCK_N, BLOCK_L]).to(DOT_TYPE)
            scores = _dot(q_latent, tl.trans(kv), zero, EMULATED) * score_scale[:, None]
            if R > 0:
                scores += _dot(q_rope, tl.trans(k_rope), zero, EMULATED) * rope_scale[:, None]
        else:
            scores = _dot(q_latent, tl.trans(kv.to(DOT_TYPE)), zero, EMULATED)
            if R > 0:
                scores = _dot(q_rope, tl.trans(k_rope), scores, EMULATED)
            scores *= score_scale[:, None]
        scores = tl.where(valid[None, :], scores, float("-inf"))

        new_m = tl.maximum(m, tl.max(scores, 1))
        safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # only holes so far
        alpha = tl.exp2(m - safe_m)
        p = tl.exp2(scores - safe_m[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc *= alpha[:, None]
        if PV_FP8:
            acc = _dot(to_fp8(p * QK_FP8_MAX, DOT_TYPE, QK_FP8_MAX, EMULATED), kv, acc, EMULATED)
        elif QK_FP8_MAX > 0:
            acc = _dot(p.to(tl.float16), kv.to(tl.float16), acc, EMULATED)
        else:
            acc = _dot(cast(p, DOT_TYPE, EMULATED), kv.to(DOT_TYPE), acc, EMULATED)
        m = new_m

    if PV_FP8:
        acc *= 1.0 / QK_FP8_MAX
    if HAS_KV_SCALE:
        acc *= value_scale
    sink = m
    if HAS_SINK:
        sink = tl.load(attn_sink + head, mask=head_ok, other=0.0)
    share, lse = _share_and_lse(m * LN_2, total, sink, HAS_SINK)
    acc *= share[:, None]
    cell = (t * num_heads + head) * num_splits + split
    tl.store(
        out + cell[:, None] * L + latent[None, :],
        cast(acc, out.dtype.element_ty, EMULATED),
        mask=head_ok[:, None] & (latent < L)[None, :],
    )
    if WRITE_LSE:
        tl.store(lse_out + cell, lse, mask=head_ok)


@triton.jit(do_not_specialize=("num_heads", "num_splits"))
def combine_splits_kernel(
    out,
    lse_out,
    partial,
    partial_lse,
    attn_sink,
    num_heads,
    num_splits,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINK: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Program (t · H + h, c): columns c · BLOCK_L … of one (row, head), its splits joined in their fixed order."""
    cell = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    split = tl.arange(0, BLOCK_S)
    lse = tl.load(partial_lse + cell * num_splits + split, mask=split < num_splits, other=float("-inf"))
    m = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(m == float("-inf"), 0.0, m))
    total = tl.sum(weight, 0)
    values = tl.load(
        partial + (cell * num_splits + split)[:, None] * L + column[None, :],
        mask=(split < num_splits)[:, None] & (column < L)[None, :],
        other=0.0,
    )
    sink = m
    if HAS_SINK:
        sink = tl.load(attn_sink + cell % num_heads)
    share, lse = _share_and_lse(m, total, sink, HAS_SINK)
    result = tl.sum(values * weight[:, None], 0) * share
    tl.store(out + cell * L + column, cast(result, out.dtype.element_ty, EMULATED), mask=column < L)
    if WRITE_LSE:
        tl.store(lse_out + cell, lse, mask=tl.program_id(1) == 0)
