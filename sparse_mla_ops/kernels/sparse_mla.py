"""Sparse MLA: each query row attends to its own selection of cache rows. Prefill and decode, every cache layout.

One tile of the latent serves as keys and as values, so that one of the two products takes its transpose. Instructions
of NVIDIA's that read matrix operands from shared memory transpose elements of 16 bits, none of 8. fp8 values may
therefore be moved in pairs of neighbours, and unpacked in registers, just before they are multiplied, into even and odd
columns: two parts of a tile, each with columns of the query and an accumulator of its own.
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
    unsigned,
)

# Numbers that change with the step: their divisibility would only make more variants of one kernel.
UNSPECIALIZED = ("num_heads", "num_keys", "num_indices", "num_slots", "block_size", "keys_per_split", "num_splits")

# Factors that keep what the scales of 656-byte rows (2^-8 for latents near 1) are multiplied into in the middle of
# fp16's range: weights, or the latents themselves, which are finite up to 4094 then.
WEIGHT_GAIN = tl.constexpr(256.0)
LATENT_GAIN = tl.constexpr(16.0)
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
def _query_operand(
    q,
    divisor,
    NORMALIZE: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
    fp8_max: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """A tile of the query in the type it is multiplied in; with fp8_max, rounded to `fp8` first."""
    if NORMALIZE and fp8_max > 0:
        return to_fp8(q.to(tl.float32) / divisor[:, None], fp8, fp8_max, EMULATED).to(dtype)
    elif NORMALIZE:
        return cast(q.to(tl.float32) / divisor[:, None], dtype, EMULATED)
    else:
        return cast(q, dtype, EMULATED)


@triton.jit
def _weight_operand(p, dtype: tl.constexpr, fp8_max: tl.constexpr, pv_fp8: tl.constexpr, EMULATED: tl.constexpr):
    """The softmax weights in the type they are multiplied in: fp16 next to fp8 keys whose values are not."""
    if pv_fp8:
        return to_fp8(p * fp8_max, dtype, fp8_max, EMULATED)
    elif fp8_max > 0:
        return p.to(tl.float16)
    else:
        return cast(p, dtype, EMULATED)


@triton.jit
def _share_and_lse(m, total, sink):
    """(factor of the weighted values, lse) from the largest score m and the sum of exp(score − m), natural logarithms.

    A row without a valid index has total 0: a finite factor of values that are 0, and lse −inf. The sink takes its part
    of the values and leaves lse alone: −inf takes nothing, +inf everything.
    """
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = m + tl.log(total)
    share = 1.0 / total
    if sink is not None:
        share *= tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(sink - tl.where(empty, 0.0, lse))))
    return share, tl.where(empty, float("-inf"), lse)


@triton.jit
def _unpack(pairs, part: tl.constexpr, fp8: tl.constexpr, EMULATED: tl.constexpr):
    """The lower (part 0) or the upper (1) e4m3fn values of pairs, in fp16: exact.

    One byte permutation for four values and one conversion for two. Compilers make four times as many instructions of
    shifts and masks.
    """
    if EMULATED:
        return ((pairs >> (8 * part)) & 255).to(tl.uint8).to(fp8, bitcast=True).to(tl.float16)
    else:
        half: tl.constexpr = "high" if part == 1 else "low"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $1, 0, 0x3120; mov.b32 {low, high}, sorted; "
            "cvt.rn.f16x2.e4m3x2 $0, " + half + "; }",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _part(
    tile, part: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr, PAIRS: tl.constexpr, EMULATED: tl.constexpr
):
    """A part of a tile of keys, as it is multiplied: of pairs the even or the odd columns, of others all."""
    if PAIRS:
        return _unpack(tile, part, fp8, EMULATED)
    else:
        return tile.to(dtype)


@triton.jit
def _query_parts(tile, rows: tl.constexpr, columns: tl.constexpr, PAIRS: tl.constexpr, EMULATED: tl.constexpr):
    """A tile of the query [rows, columns] as a tuple of operands for the parts of a tile of keys."""
    if PAIRS:
        if not EMULATED:
            # Hide where it comes from: next to a query that was fp8 the compiler lays out keys as if they were, too.
            tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tl.float16, is_pure=False, pack=2)
        return tl.split(tl.reshape(tile, [rows, columns // 2, 2]))
    else:
        return (tile,)


@triton.jit
def _load_query_groups(
    q_row, stride_w, head_ok, L: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, GROUPS: tl.constexpr
):
    """The latent part of the query as GROUPS tiles [BLOCK_H, BLOCK_G], as stored."""
    tiles = ()
    for g in tl.static_range(GROUPS):
        column = g * BLOCK_G + tl.arange(0, BLOCK_G)
        tile = tl.load(q_row + column[None, :] * stride_w, mask=head_ok[:, None] & (column < L)[None, :], other=0.0)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _load_slots(row_indices, entry, last, stride):
    """The slots of a row's keys; past the last any. Without a mask: a load with one takes more instructions."""
    return tl.load(row_indices + tl.minimum(entry, last - 1) * stride)


@triton.jit
def _locate(slot, listed, cache, num_slots, block_size, stride_block, stride_row, DENSE_CACHE: tl.constexpr):
    """(pointers to the rows of a block of keys, which of them are there). What is not there may point anywhere."""
    valid = is_slot(slot, num_slots) & listed
    if DENSE_CACHE:
        # As unsigned numbers: their product in 64 bits is one instruction. A stride of 1 is a constant without a type.
        stride_row += tl.zeros([1], tl.int32)
        offset = unsigned(slot).to(tl.int64) * unsigned(stride_row).to(tl.int64)
    else:
        offset = row_offset(slot, num_slots, block_size, stride_block, stride_row)
    return cache + offset, valid


@triton.jit
def _load_rows(
    row,
    valid,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    VECTOR: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """(latent, rope, scales) of a block of keys as stored, each a tuple.

    latent: GROUPS tiles [BLOCK_N, BLOCK_G]. rope: a tile [BLOCK_N, BLOCK_R], none if R is 0. scales: four vectors for
    656-byte rows, 1 for a hole; none for others. PAIRS: tiles of fp8 values are half as wide, two values an element.
    """
    latent = ()
    rope = ()
    scales = ()
    if PAIRS:
        stored = row.to(tl.pointer_type(tl.uint16))
        PER: tl.constexpr = 2
    else:
        stored = row
        PER: tl.constexpr = 1
    column = tl.arange(0, BLOCK_G // PER)
    if VECTOR < 16:
        column = tl.max_contiguous(column, VECTOR)
    for g in tl.static_range(GROUPS):
        at = g * BLOCK_G // PER + column
        wanted = valid[:, None] & (at < L // PER)[None, :]
        latent = latent + (tl.load(stored[:, None] + at[None, :], mask=wanted, other=0.0),)
    if KV_FORMAT == DS_MLA:
        scale = row + DS_MLA_SCALES_AT
        if PAIRS:  # scales in pairs, too: half as many small copies to shared memory
            ones: tl.constexpr = 0x3F8000003F800000  # two of 1.0
            for i in tl.static_range(DS_MLA_GROUPS // 2):
                both = tl.load(scale.to(tl.pointer_type(tl.uint64)) + i, mask=valid, other=ones)
                scales = scales + (both.to(tl.uint32).to(tl.float32, bitcast=True),)
                scales = scales + ((both >> 32).to(tl.uint32).to(tl.float32, bitcast=True),)
        else:
            for i in tl.static_range(DS_MLA_GROUPS):
                scales = scales + (tl.load(scale.to(tl.pointer_type(tl.float32)) + i, mask=valid, other=1.0),)
    if R > 0:
        if KV_FORMAT == DS_MLA:
            stored = (row + DS_MLA_ROPE_AT).to(tl.pointer_type(tl.bfloat16))
            first: tl.constexpr = 0
            ROPE_PER: tl.constexpr = 1
        else:
            first: tl.constexpr = L // PER
            ROPE_PER: tl.constexpr = PER
        column = tl.arange(0, BLOCK_R // ROPE_PER)
        wanted = valid[:, None] & (column < R // ROPE_PER)[None, :]
        rope = (tl.load(stored[:, None] + (first + column)[None, :], mask=wanted, other=0.0),)
    return latent, rope, scales


@triton.jit
def _convert(tile, unit, dtype: tl.constexpr):
    """fp8 → 16 bits, once for good.

    `unit` is 1, but the compiler does not know: of a bare conversion it makes one per product, of bytes that it has
    first brought into the layout of that product's operand.
    """
    return tile.to(dtype) * (unit + tl.zeros([1, 1], tl.float32)).to(dtype)


@triton.jit
def _convert_tiles(
    tiles, scales, unit, dtype: tl.constexpr, KV_FORMAT: tl.constexpr, BLOCK_G: tl.constexpr, GROUPS: tl.constexpr
):
    """fp8 tiles as 16-bit operands of both products; those of 656-byte rows with their scales, times LATENT_GAIN."""
    converted = ()
    for g in tl.static_range(GROUPS):
        if KV_FORMAT == DS_MLA:
            tile = tiles[g].to(dtype) * (scales[g * BLOCK_G // DS_MLA_GROUP] * LATENT_GAIN).to(dtype)[:, None]
        else:
            tile = _convert(tiles[g], unit, dtype)
        converted = converted + (tile,)
    return converted


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
    unit,
    q_stride_t,
    q_stride_h,
    q_stride_w,
    cache_stride_block,
    cache_stride_row,
    index_stride_t,
    index_stride_k,
    length_stride,
    sink_stride,
    num_heads,
    num_keys,
    num_indices,
    num_slots,
    block_size,
    keys_per_split,
    num_splits,
    L: tl.constexpr,
    R: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    VECTOR: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROPE_TYPE: tl.constexpr,
    Q_FP8_MAX: tl.constexpr,
    PV_FP8: tl.constexpr,
    NORMALIZE_Q: tl.constexpr,
    DENSE_CACHE: tl.constexpr,
    SPLIT_SUM: tl.constexpr,
    CONVERT: tl.constexpr,
    SLOTS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Program (t · head blocks + head block, split): BLOCK_H heads of row t over keys split · keys_per_split …

    The latent is handled as GROUPS tiles of BLOCK_G columns. What is None is left out.
    out: [T, H, L], and lse_out [T, H]; or with num_splits > 1 fp32 partial results [T, H, num_splits, PITCH], each L
    normalised values and then their lse. cache: elements of the stored type; for 656-byte rows its fp8 view, strides in
    bytes.
    attn_sink: only where there is one split; else it joins when the splits do. unit: 1.0.
    DOT_TYPE: type in which the latent is multiplied. ROPE_TYPE: the same of the rope part.
    Q_FP8_MAX: 0, or round q to the cache's fp8, whose largest value this is. PV_FP8: multiply p · v in fp8 as well.
    NORMALIZE_Q: divide each row of q by a number so that it fits the type it is rounded to.
    DENSE_CACHE: slots at one pitch.
    SPLIT_SUM: sum each group's scores on its own: a short chain of small matrix instructions each, instead of one long.
    VECTOR: latent values that a thread loads at once, at most 16 bytes of them. With 8 of fp8, stores of the converted
    ones (16 bytes) use all banks of shared memory at once; with 16 they use every other one.
    CONVERT: where fp8 tiles are multiplied at 16 bits, 3 moves values in pairs and converts them for each product
    (e4m3fn to fp16, on NVIDIA; rows and the end of their latent at multiples of 8 bytes); 2 converts tiles once;
    1 converts them once for the second product; 0 leaves it to each product. Scales of 656-byte rows go into what is
    converted with 2, else into scores and weights.
    SLOTS_FIRST: load the next slots before the rows of this step, not after them.
    PDL: see `launch_early`.
    """
    if PDL:
        launch_early()
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    pid = tl.program_id(0)
    t = (pid // head_blocks).to(tl.int64)
    split = tl.program_id(1)
    head = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    SCALE_NOW: tl.constexpr = KV_FORMAT == DS_MLA and CONVERT == 2
    SCALE_LATER: tl.constexpr = KV_FORMAT == DS_MLA and CONVERT != 2
    PAIRS: tl.constexpr = CONVERT == 3
    PARTS: tl.constexpr = 2 if PAIRS else 1
    ROPE_PAIRS: tl.constexpr = PAIRS and KV_FORMAT != DS_MLA
    ROPE_PARTS: tl.constexpr = 2 if ROPE_PAIRS else 1
    rope = tl.arange(0, BLOCK_R)
    key = tl.arange(0, BLOCK_N)

    # The row's own list of keys.
    if indptr is not None:
        begin = tl.load(indptr + t * length_stride).to(tl.int64)
        end = tl.minimum(tl.load(indptr + (t + 1) * length_stride).to(tl.int64), num_indices)
        count = tl.maximum(tl.minimum(end - begin, num_keys), 0).to(tl.int32)
        # Entries that lie before the buffer are holes.
        skipped = tl.minimum(-tl.minimum(begin, 0), num_keys).to(tl.int32)
        row_indices = indices + begin * index_stride_k
    else:
        skipped = 0
        count = num_keys
        if topk_length is not None:
            count = tl.minimum(tl.load(topk_length + t * length_stride).to(tl.int32), num_keys)
        row_indices = indices + t * index_stride_t

    # The query as it is: what scales it is folded into the scores.
    q_row = q + t * q_stride_t + head.to(tl.int64)[:, None] * q_stride_h
    q_groups = _load_query_groups(q_row, q_stride_w, head_ok, L, BLOCK_H, BLOCK_G, GROUPS)
    score_scale = tl.zeros([BLOCK_H], tl.float32) + softmax_scale * LOG2_E
    if q_scale is not None:
        score_scale *= tl.load(q_scale)
    if R > 0:
        q_rope_row = q_row + (L + rope[None, :]) * q_stride_w
        q_rope = tl.load(q_rope_row, mask=head_ok[:, None] & (rope < R)[None, :], other=0.0)
    divisor = tl.full([BLOCK_H], 1.0, tl.float32)
    if NORMALIZE_Q:
        largest = tl.zeros([BLOCK_H], tl.float32)
        for g in tl.static_range(GROUPS):
            largest = tl.maximum(largest, amax(q_groups[g].to(tl.float32), 1))
        if R > 0 and KV_FORMAT != DS_MLA:
            largest = tl.maximum(largest, amax(q_rope.to(tl.float32), 1))
        if Q_FP8_MAX > 0:
            divisor = tl.maximum(largest, AMAX_FLOOR) / Q_FP8_MAX
        else:
            divisor = round_up_to_power_of_two(tl.maximum(largest, 1e-30))
        score_scale *= divisor
    stored: tl.constexpr = cache.dtype.element_ty
    q_latent = ()
    for g in tl.static_range(GROUPS):
        q_group = _query_operand(q_groups[g], divisor, NORMALIZE_Q, DOT_TYPE, stored, Q_FP8_MAX, EMULATED)
        q_latent = q_latent + _query_parts(q_group, BLOCK_H, BLOCK_G, PAIRS, EMULATED)
    if R > 0:
        # The keys of 656-byte rows are bf16 here, in the model's own range; the divisor is a power of two then.
        rope_fp8_max: tl.constexpr = 0.0 if KV_FORMAT == DS_MLA else Q_FP8_MAX
        if SCALE_NOW:
            q_rope = q_rope.to(tl.float32) * LATENT_GAIN
        q_rope = _query_operand(q_rope, divisor, NORMALIZE_Q, ROPE_TYPE, stored, rope_fp8_max, EMULATED)
        q_rope = _query_parts(q_rope, BLOCK_H, BLOCK_R, ROPE_PAIRS, EMULATED)
    if SCALE_NOW:
        value_scale = 1.0 / LATENT_GAIN
    elif kv_scale is not None:
        value_scale = tl.load(kv_scale)
    else:
        value_scale = 1.0
    score_scale *= value_scale

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = ()
    for _ in tl.static_range(GROUPS * PARTS):
        acc = acc + (tl.zeros([BLOCK_H, BLOCK_G // PARTS], tl.float32),)
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, count)
    first = tl.maximum(first, skipped)
    # Slots are loaded one step ahead, so that a gather need not wait for them.
    slot = tl.load(row_indices + (first + key) * index_stride_k, mask=first + key < last, other=-1)
    for start in range(first, last, BLOCK_N):
        entry = start + key
        row, valid = _locate(
            slot, entry < last, cache, num_slots, block_size, cache_stride_block, cache_stride_row, DENSE_CACHE
        )
        if SLOTS_FIRST:
            slot = _load_slots(row_indices, entry + BLOCK_N, last, index_stride_k)
        kv, k_rope, scales = _load_rows(row, valid, L, R, BLOCK_G, GROUPS, BLOCK_R, VECTOR, KV_FORMAT, PAIRS)
        if not SLOTS_FIRST:
            slot = _load_slots(row_indices, entry + BLOCK_N, last, index_stride_k)
        if CONVERT == 2:
            kv = _convert_tiles(kv, scales, unit, DOT_TYPE, KV_FORMAT, BLOCK_G, GROUPS)

        scores = zero
        for g in tl.static_range(GROUPS):
            group_scores = zero
            for i in tl.static_range(PARTS):
                q_part = q_latent[g * PARTS + i]
                keys = _part(kv[g], i, DOT_TYPE, stored, PAIRS, EMULATED)
                if SCALE_LATER:
                    group_scores = _dot(q_part, tl.trans(keys), group_scores, EMULATED)
                elif SPLIT_SUM:
                    scores += _dot(q_part, tl.trans(keys), zero, EMULATED)
                else:
                    scores = _dot(q_part, tl.trans(keys), scores, EMULATED)
            if SCALE_LATER:
                scores += group_scores * scales[g * BLOCK_G // DS_MLA_GROUP][None, :]
        if R > 0:
            for i in tl.static_range(ROPE_PARTS):
                keys = _part(k_rope[0], i, ROPE_TYPE, stored, ROPE_PAIRS, EMULATED)
                scores = _dot(q_rope[i], tl.trans(keys), scores, EMULATED)
        scores = tl.where(valid[None, :], scores, float("-inf"))

        new_m = tl.maximum(m, tl.max(scores, 1) * score_scale)
        safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # only holes so far
        alpha = tl.exp2(m - safe_m)
        p = tl.exp2(scores * score_scale[:, None] - safe_m[:, None])
        total = total * alpha + tl.sum(p, 1)
        m = new_m
        operand = _weight_operand(p, DOT_TYPE, Q_FP8_MAX, PV_FP8, EMULATED)
        new_acc = ()
        for g in tl.static_range(GROUPS):
            weights = operand
            if SCALE_LATER:
                scale = (scales[g * BLOCK_G // DS_MLA_GROUP] * WEIGHT_GAIN).to(operand.dtype)
                weights = operand * scale[None, :]
            for i in tl.static_range(PARTS):
                if CONVERT == 1:
                    values = _convert(kv[g], unit, weights.dtype)
                else:
                    values = _part(kv[g], i, weights.dtype, stored, PAIRS, EMULATED)
                new_acc = new_acc + (_dot(weights, values, acc[g * PARTS + i] * alpha[:, None], EMULATED),)
        acc = new_acc

    if attn_sink is not None:
        share, lse = _share_and_lse(m * LN_2, total, tl.load(attn_sink + head * sink_stride, mask=head_ok, other=0.0))
    else:
        share, lse = _share_and_lse(m * LN_2, total, None)
    if PV_FP8:
        share *= 1.0 / Q_FP8_MAX
    if SCALE_LATER:
        share *= 1.0 / WEIGHT_GAIN
    share *= value_scale
    cell = (t * num_heads + head) * num_splits + split
    for g in tl.static_range(GROUPS):
        column = g * BLOCK_G + tl.arange(0, BLOCK_G)
        if PAIRS:
            result = tl.interleave(acc[2 * g], acc[2 * g + 1])
        else:
            result = acc[g]
        result *= share[:, None]
        tl.store(
            out + cell[:, None] * PITCH + column[None, :],
            cast(result, out.dtype.element_ty, EMULATED),
            mask=head_ok[:, None] & (column < L)[None, :],
        )
    if PITCH > L:
        tl.store(out + cell * PITCH + L, lse, mask=head_ok)
    if lse_out is not None:
        tl.store(lse_out + cell, lse, mask=head_ok)


@triton.jit(do_not_specialize=("num_heads", "num_splits"))
def combine_splits_kernel(
    out,
    lse_out,
    partial,
    attn_sink,
    sink_stride,
    num_heads,
    num_splits,
    L: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Program (t · H + h, c): columns c · BLOCK_L … of one (row, head), its splits joined in their fixed order."""
    if PDL:
        launch_early()
    cell = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    split = tl.arange(0, BLOCK_S)
    row = partial + (cell * num_splits + split) * PITCH
    lse = tl.load(row + L, mask=split < num_splits, other=float("-inf"))
    values = tl.load(
        row[:, None] + column[None, :],
        mask=(split < num_splits)[:, None] & (column < L)[None, :],
        other=0.0,
    )
    m = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(m == float("-inf"), 0.0, m))
    total = tl.sum(weight, 0)
    if attn_sink is not None:
        share, lse = _share_and_lse(m, total, tl.load(attn_sink + (cell % num_heads) * sink_stride))
    else:
        share, lse = _share_and_lse(m, total, None)
    result = tl.sum(values * weight[:, None], 0) * share
    tl.store(out + cell * L + column, cast(result, out.dtype.element_ty, EMULATED), mask=column < L)
    if lse_out is not None:
        tl.store(lse_out + cell, lse, mask=tl.program_id(1) == 0)
