"""Sparse MLA: each query row attends to its own selection of cache rows. Prefill and decode, every cache layout.

One tile of the latent serves as keys and as values. In the score tile heads stand in rows and keys in columns, or the
other way round (KEYS_IN_ROWS): Hopper's warp-group instructions take 64 rows at least, and both operands from shared
memory, so that with few heads they need the keys in rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla_ops.kernels.common import (
    AMAX_FLOOR,
    DS_MLA,
    DS_MLA_GROUP,
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
def _per_head(x, KEYS_IN_ROWS: tl.constexpr):
    """A vector over heads, to go with a score tile or with an accumulator."""
    return x[None, :] if KEYS_IN_ROWS else x[:, None]


@triton.jit
def _per_key(x, KEYS_IN_ROWS: tl.constexpr):
    """A vector over keys, to go with a score tile."""
    return x[:, None] if KEYS_IN_ROWS else x[None, :]


@triton.jit
def _query_times_keys(q, keys, acc, KEYS_IN_ROWS: tl.constexpr, EMULATED: tl.constexpr):
    """Scores of keys [BLOCK_N, columns] for a query [BLOCK_H, columns], or its transpose with KEYS_IN_ROWS."""
    if KEYS_IN_ROWS:
        return _dot(keys, q, acc, EMULATED)
    else:
        return _dot(q, tl.trans(keys), acc, EMULATED)


@triton.jit
def _weights_times_values(weights, values, acc, KEYS_IN_ROWS: tl.constexpr, EMULATED: tl.constexpr):
    if KEYS_IN_ROWS:
        return _dot(tl.trans(values), weights, acc, EMULATED)
    else:
        return _dot(weights, values, acc, EMULATED)


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
):
    """(latent, rope, scales) of a block of keys as stored, each a tuple.

    latent: GROUPS tiles [BLOCK_N, BLOCK_G]. rope: a tile [BLOCK_N, BLOCK_R], none if R is 0. scales: those of 656-byte
    rows, a vector for each latent tile, 1 for a hole; none for other rows.
    """
    latent = ()
    rope = ()
    scales = ()
    column = tl.arange(0, BLOCK_G)
    if VECTOR < 16:
        column = tl.max_contiguous(column, VECTOR)
    for g in tl.static_range(GROUPS):
        wanted = valid[:, None] & (g * BLOCK_G + column < L)[None, :]
        latent = latent + (tl.load(row[:, None] + (g * BLOCK_G + column)[None, :], mask=wanted, other=0.0),)
    if KV_FORMAT == DS_MLA:
        first = (row + DS_MLA_SCALES_AT).to(tl.pointer_type(tl.float32))
        for g in tl.static_range(GROUPS):
            scales = scales + (tl.load(first + g * BLOCK_G // DS_MLA_GROUP, mask=valid, other=1.0),)
    if R > 0:
        column = tl.arange(0, BLOCK_R)
        if KV_FORMAT == DS_MLA:
            row = (row + DS_MLA_ROPE_AT).to(tl.pointer_type(tl.bfloat16))
        else:
            row = row + L
        rope = (tl.load(row[:, None] + column[None, :], mask=valid[:, None] & (column < R)[None, :], other=0.0),)
    return latent, rope, scales


@triton.jit
def _convert(tile, unit, dtype: tl.constexpr):
    """fp8 → 16 bits, once for good.

    `unit` is 1, but the compiler does not know: of a bare conversion it makes one per product, of bytes that it has
    first brought into the layout of that product's operand. None: it may.
    """
    if unit is None:
        return tile.to(dtype)
    else:
        return tile.to(dtype) * (unit + tl.zeros([1, 1], tl.float32)).to(dtype)


@triton.jit
def _convert_tiles(tiles, scales, unit, dtype: tl.constexpr, KV_FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """fp8 tiles as 16-bit operands of both products; those of 656-byte rows with their scales, times LATENT_GAIN."""
    converted = ()
    for g in tl.static_range(GROUPS):
        if KV_FORMAT == DS_MLA:
            tile = tiles[g].to(dtype) * (scales[g] * LATENT_GAIN).to(dtype)[:, None]
        else:
            tile = _convert(tiles[g], unit, dtype)
        converted = converted + (tile,)
    return converted


@triton.jit
def _zero_tiles(rows: tl.constexpr, columns: tl.constexpr, dtype: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS tiles of zeros, each rows × columns."""
    tiles = ()
    for _ in tl.static_range(GROUPS):
        tiles = tiles + (tl.zeros([rows, columns], dtype),)
    return tiles


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
    KEYS_IN_ROWS: tl.constexpr,
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
    KEYS_IN_ROWS: keys in rows of the score tile, columns of the latent in rows of the accumulators.
    SPLIT_SUM: sum each group's scores on its own: a short chain of small matrix instructions each, instead of one long.
    VECTOR: latent values that a thread loads at once, at most 16 bytes of them. With 8 of fp8, stores of the converted
    ones (16 bytes) use all banks of shared memory at once; with 16 they use every other one.
    CONVERT: where fp8 tiles are multiplied at 16 bits, 3 loads them one step ahead into registers, and converts them
    once, after the step before theirs; 2 converts them once; 1 converts them once for the second product; 0 leaves it
    to each product. Scales of 656-byte rows go into what is converted with 2 and 3, else into scores and weights.
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
    SCALE_LATER: tl.constexpr = KV_FORMAT == DS_MLA and CONVERT < 2
    SCALE_NOW: tl.constexpr = KV_FORMAT == DS_MLA and CONVERT >= 2
    KEY_AXIS: tl.constexpr = 0 if KEYS_IN_ROWS else 1
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
        q_latent = q_latent + (tl.trans(q_group) if KEYS_IN_ROWS else q_group,)
    if R > 0:
        # The keys of 656-byte rows are bf16 here, in the model's own range; the divisor is a power of two then.
        rope_fp8_max: tl.constexpr = 0.0 if KV_FORMAT == DS_MLA else Q_FP8_MAX
        if SCALE_NOW:
            q_rope = q_rope.to(tl.float32) * LATENT_GAIN
        q_rope = _query_operand(q_rope, divisor, NORMALIZE_Q, ROPE_TYPE, stored, rope_fp8_max, EMULATED)
        if KEYS_IN_ROWS:
            q_rope = tl.trans(q_rope)
    if SCALE_NOW:
        value_scale = 1.0 / LATENT_GAIN
    elif kv_scale is not None:
        value_scale = tl.load(kv_scale)
    else:
        value_scale = 1.0
    score_scale *= value_scale

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_N, BLOCK_H] if KEYS_IN_ROWS else [BLOCK_H, BLOCK_N], tl.float32)
    # With keys in rows their sum goes across warps: it is taken after the loop.
    total = zero if KEYS_IN_ROWS else tl.zeros([BLOCK_H], tl.float32)
    acc = _zero_tiles(BLOCK_G if KEYS_IN_ROWS else BLOCK_H, BLOCK_H if KEYS_IN_ROWS else BLOCK_G, tl.float32, GROUPS)
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, count)
    first = tl.maximum(first, skipped)
    # Slots are loaded one step ahead, so that a gather need not wait for them.
    slot = tl.load(row_indices + (first + key) * index_stride_k, mask=first + key < last, other=-1)
    AHEAD: tl.constexpr = BLOCK_N if CONVERT == 3 else 0
    if CONVERT == 3:
        row, next_valid = _locate(
            slot, first + key < last, cache, num_slots, block_size, cache_stride_block, cache_stride_row, DENSE_CACHE
        )
        latent, rope_part, scales = _load_rows(row, next_valid, L, R, BLOCK_G, GROUPS, BLOCK_R, VECTOR, KV_FORMAT)
        next_kv = _convert_tiles(latent, scales, None, DOT_TYPE, KV_FORMAT, GROUPS)
        if R > 0:
            next_rope = rope_part[0].to(ROPE_TYPE)
        entry = first + BLOCK_N + key
        slot = tl.load(row_indices + entry * index_stride_k, mask=entry < last, other=-1)
    for start in range(first, last, BLOCK_N):
        entry = start + AHEAD + key
        row, loaded = _locate(
            slot, entry < last, cache, num_slots, block_size, cache_stride_block, cache_stride_row, DENSE_CACHE
        )
        if SLOTS_FIRST:
            slot = _load_slots(row_indices, entry + BLOCK_N, last, index_stride_k)
        latent, rope_part, scales = _load_rows(row, loaded, L, R, BLOCK_G, GROUPS, BLOCK_R, VECTOR, KV_FORMAT)
        if not SLOTS_FIRST:
            slot = _load_slots(row_indices, entry + BLOCK_N, last, index_stride_k)
        if CONVERT == 3:
            # Tiles that the loop carries go to shared memory as they are, once, for both products.
            kv = next_kv
            valid = next_valid
            next_valid = loaded
            if R > 0:
                k_rope = next_rope
        else:
            kv = latent
            valid = loaded
            if CONVERT == 2:
                kv = _convert_tiles(latent, scales, unit, DOT_TYPE, KV_FORMAT, GROUPS)
            if R > 0:
                k_rope = rope_part[0].to(ROPE_TYPE)

        scores = zero
        for g in tl.static_range(GROUPS):
            keys = kv[g].to(DOT_TYPE)
            if SCALE_LATER:
                part = _query_times_keys(q_latent[g], keys, zero, KEYS_IN_ROWS, EMULATED)
                scores += part * _per_key(scales[g], KEYS_IN_ROWS)
            elif SPLIT_SUM:
                scores += _query_times_keys(q_latent[g], keys, zero, KEYS_IN_ROWS, EMULATED)
            else:
                scores = _query_times_keys(q_latent[g], keys, scores, KEYS_IN_ROWS, EMULATED)
        if R > 0:
            scores = _query_times_keys(q_rope, k_rope, scores, KEYS_IN_ROWS, EMULATED)
        scores = tl.where(_per_key(valid, KEYS_IN_ROWS), scores, float("-inf"))

        new_m = tl.maximum(m, tl.max(scores, KEY_AXIS) * score_scale)
        safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # only holes so far
        alpha = tl.exp2(m - safe_m)
        p = tl.exp2(scores * _per_head(score_scale, KEYS_IN_ROWS) - _per_head(safe_m, KEYS_IN_ROWS))
        if KEYS_IN_ROWS:
            total = total * alpha[None, :] + p
        else:
            total = total * alpha + tl.sum(p, 1)
        m = new_m
        new_acc = ()
        for g in tl.static_range(GROUPS):
            weights = p
            if SCALE_LATER:
                weights = p * _per_key(scales[g] * WEIGHT_GAIN, KEYS_IN_ROWS)
            weights = _weight_operand(weights, DOT_TYPE, Q_FP8_MAX, PV_FP8, EMULATED)
            if CONVERT == 1:
                values = _convert(kv[g], unit, weights.dtype)
            else:
                values = kv[g].to(weights.dtype)
            scaled_acc = acc[g] * _per_head(alpha, KEYS_IN_ROWS)
            new_acc = new_acc + (_weights_times_values(weights, values, scaled_acc, KEYS_IN_ROWS, EMULATED),)
        acc = new_acc
        if CONVERT == 3:
            # In a branch, or the compiler converts before the second product, where the loads have not arrived, and
            # keeps the converted tiles in twice the registers.
            if start + BLOCK_N < last:
                next_kv = _convert_tiles(latent, scales, None, DOT_TYPE, KV_FORMAT, GROUPS)
                if R > 0:
                    next_rope = rope_part[0].to(ROPE_TYPE)
            else:
                next_kv = _zero_tiles(BLOCK_N, BLOCK_G, DOT_TYPE, GROUPS)
                if R > 0:
                    next_rope = tl.zeros([BLOCK_N, BLOCK_R], ROPE_TYPE)

    if KEYS_IN_ROWS:
        total = tl.sum(total, 0)
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
        result = acc[g] * _per_head(share, KEYS_IN_ROWS)
        if KEYS_IN_ROWS:
            result = tl.trans(result)
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
