"""Every operator in plain PyTorch: the oracle for the other backends, and what runs on a CPU.

Arithmetic is fp32 and rounds where the contracts say. Like every backend it is safe to capture: no value is read on the
host, no mask changes a shape, and the chunks that bound memory depend on tensor shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparse_mla_ops import formats
from sparse_mla_ops.formats import IndexLayout

WORKSPACE_ELEMENTS = 1 << 24
"""Most fp32 elements of one intermediate (64 MiB); rows are processed in chunks of this size."""


def _chunks(rows: int, elements_per_row: int) -> Iterator[slice]:
    step = max(1, WORKSPACE_ELEMENTS // max(1, elements_per_row))
    return (slice(start, start + step) for start in range(0, rows, step))


def _scalar(scale: Tensor | None) -> Tensor | None:
    """A one-element scale of any shape as one that broadcasts against everything."""
    return None if scale is None else scale.reshape(())


# ----------------------------------------------------------------------------------------------------------------------
# Paged rows. A slot is an address block · BS + offset; anything outside 0 … N − 1 is a hole.


def _split(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(valid, block, offset) of each slot; holes point at slot 0, to be masked by the caller."""
    num_blocks, block_size = cache.shape[:2]
    slots = slots.long()
    valid = (slots >= 0) & (slots < num_blocks * block_size)
    slots = torch.where(valid, slots, 0)
    return valid, slots // block_size, slots % block_size


def _write_rows(field: Tensor, rows: Tensor, slots: Tensor) -> None:
    """field[slot] = row for every valid slot. field: uint8 view [NB, BS, bytes] of a cache; rows: uint8 [T, bytes].

    A mask would make the shape depend on data, and a hole redirected to some slot would overwrite it. So a row with a
    hole repeats the write of one that has none; if all are holes, slot 0 gets the bytes that it already holds.
    """
    valid, block, offset = _split(slots, field)
    donor = valid.int().argmax()
    source = torch.where(valid, torch.arange(len(slots), device=slots.device), donor)
    block, offset = block[source], offset[source]
    field.index_put_((block, offset), torch.where(valid.any(), rows[source], field[block, offset]))


def _request_slots(block_table: Tensor, request: Tensor, token: Tensor, block_size: int) -> Tensor:
    """Slots of `token` of `request` (broadcast together), int64; −1 where either or the block id is out of range."""
    requests, blocks_per_request = block_table.shape
    request, token = torch.broadcast_tensors(request.long(), token.long())
    column = token.clamp(min=0) // block_size
    valid = (request >= 0) & (request < requests) & (token >= 0) & (column < blocks_per_request)
    if requests == 0 or blocks_per_request == 0:
        return torch.full_like(token, -1)
    block = block_table[torch.where(valid, request, 0), torch.where(valid, column, 0)].long()
    # An id so large that its product wraps is out of range too.
    valid &= (block >= 0) & (block < torch.iinfo(torch.int64).max // block_size)
    return torch.where(valid, block * block_size + token % block_size, -1)


# ----------------------------------------------------------------------------------------------------------------------
# Query and cache write


def _rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> Tensor:
    """x [T, R] or [T, heads, R] → rotated, rounded to x's dtype."""
    table = cos_sin_cache[positions.long().clamp(0, cos_sin_cache.shape[0] - 1)].float()
    if x.dim() == 3:
        table = table.unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1) if is_neox else (x[..., 0::2].float(), x[..., 1::2].float())
    halves = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(halves, dim=-1) if is_neox else torch.stack(halves, dim=-1).flatten(-2)
    return rotated.to(x.dtype)


def rotary_embedding(
    q_out: Tensor, k_out: Tensor, q_pe: Tensor, k_pe: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    q_out.copy_(_rotate(q_pe, positions, cos_sin_cache, is_neox))
    k_out.copy_(_rotate(k_pe[: len(positions)], positions, cos_sin_cache, is_neox))


def concat_mla_q(
    out: Tensor, q_nope: Tensor, q_pe: Tensor, q_scale: Tensor | None, q_dtype: torch.dtype | None
) -> None:
    q = torch.cat((q_nope, q_pe), dim=-1)
    out.copy_(formats.quantize(q, _scalar(q_scale), out.dtype) if out.dtype in formats.FP8_MAX else q)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    fp8_dtype: torch.dtype | None,
) -> None:
    tokens = len(slot_mapping)
    layout = formats.kv_cache_layout(kv_cache, kv_c.shape[1], k_pe.shape[1], fp8_dtype)
    rows = formats.encode_kv_rows(kv_c[:tokens], k_pe[:tokens], layout, _scalar(kv_scale))
    _write_rows(kv_cache.view(torch.uint8), rows, slot_mapping)


def fused_qk_rope_concat_and_cache_mla(
    out: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    q_dtype: torch.dtype | None,
    fp8_dtype: torch.dtype | None,
) -> None:
    q_pe = _rotate(q_pe, positions, cos_sin_cache, is_neox)
    k_pe = _rotate(k_pe[: len(positions)], positions, cos_sin_cache, is_neox)
    concat_mla_q(out, q_nope, q_pe, q_scale, q_dtype)
    concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_scale, fp8_dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def _quantized_query(q: Tensor, dtype: torch.dtype) -> Tensor:
    """q rounded through fp8 with one scale per row and head, as a kernel does per tile when it multiplies in fp8."""
    scale = q.abs().amax(-1, keepdim=True).clamp(min=formats.AMAX_FLOOR) / formats.FP8_MAX[dtype]
    return formats.dequantize(formats.quantize(q, scale, dtype), scale)


def sparse_mla_fwd(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    indptr: Tensor | None,
    max_topk: int | None,
    topk_length: Tensor | None,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    attn_sink: Tensor | None,
    dot_precision: str | None,
    phase: str,
    return_lse: bool,
    fp8_dtype: torch.dtype | None,
) -> None:
    layout = formats.kv_cache_layout(kv_cache, kv_lora_rank, q.shape[2] - kv_lora_rank, fp8_dtype)
    selected = _selected_slots(indices, indptr, max_topk, topk_length)
    if q.dtype in formats.FP8_MAX:
        q = formats.dequantize(q, _scalar(q_scale))
    elif dot_precision == "fp8":
        q = _quantized_query(q.float(), layout.dtype)
    cache_bytes = kv_cache.view(torch.uint8)
    for rows in _chunks(len(q), selected.shape[1] * (q.shape[2] + q.shape[1])):
        valid, block, offset = _split(selected[rows], kv_cache)
        kv = formats.decode_kv_rows(cache_bytes[block, offset], layout, _scalar(kv_scale))
        # A hole's row is read (from slot 0) but must not count, also if it holds NaN: 0 · NaN is NaN.
        kv = torch.where(valid.unsqueeze(-1), kv, 0.0)
        scores = torch.einsum("thw,tkw->thk", q[rows].float(), kv) * softmax_scale
        scores = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
        log_sum = scores.logsumexp(-1)
        empty = log_sum == float("-inf")
        probabilities = (scores - torch.where(empty, 0.0, log_sum).unsqueeze(-1)).exp()
        result = torch.einsum("thk,tkl->thl", probabilities, kv[..., :kv_lora_rank])
        if attn_sink is not None:
            # exp(lse) / (exp(lse) + exp(sink)), without overflow; an empty row is 0 whatever the sink.
            share = torch.where(empty, 0.0, torch.sigmoid(log_sum - attn_sink))
            result = result * share.unsqueeze(-1)
        out[rows] = result.to(out.dtype)
        if return_lse:
            lse[rows] = log_sum


def _selected_slots(indices: Tensor, indptr: Tensor | None, max_topk: int | None, topk_length: Tensor | None) -> Tensor:
    """[T, K] int64 slots of each row, −1 where the row has ended."""
    if indptr is not None:
        assert max_topk is not None  # the contract pairs them
        entry = indptr[:-1, None].long() + torch.arange(max_topk, device=indices.device)
        if len(indices) == 0:
            return torch.full_like(entry, -1)
        inside = (entry >= 0) & (entry < indptr[1:, None]) & (entry < len(indices))
        return torch.where(inside, indices[torch.where(inside, entry, 0)].long(), -1)
    if topk_length is not None:
        column = torch.arange(indices.shape[1], device=indices.device)
        return torch.where(column < topk_length[:, None], indices.long(), -1)
    return indices.long()


# ----------------------------------------------------------------------------------------------------------------------
# Indexer


def indexer_k_quant_and_cache(
    k: Tensor, index_cache: Tensor, slot_mapping: Tensor, scale_format: str, fp8_dtype: torch.dtype | None
) -> None:
    k = k[: len(slot_mapping)]
    layout = formats.index_cache_layout(index_cache, fp8_dtype)
    if not layout.quantized:
        _write_rows(index_cache.view(torch.uint8), k.to(layout.dtype).contiguous().view(torch.uint8), slot_mapping)
        return
    scale = formats.index_scales(k, layout.dtype, scale_format).unsqueeze(-1)
    values, scales = formats.index_cache_fields(index_cache)
    _write_rows(values, formats.quantize(k, scale, layout.dtype).contiguous().view(torch.uint8), slot_mapping)
    _write_rows(scales, scale.contiguous().view(torch.uint8), slot_mapping)


def indexer_q_rope_quant(
    q_out: Tensor,
    weights_out: Tensor,
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    softmax_scale: float,
    is_neox: bool,
    q_dtype: torch.dtype | None,
) -> None:
    rope_dim = cos_sin_cache.shape[1]
    rotated = _rotate(q[..., :rope_dim], positions, cos_sin_cache, is_neox)
    q = torch.cat((rotated, q[..., rope_dim:]), dim=-1)
    folded = weights.float() * (softmax_scale * q.shape[1] ** -0.5)
    if q_out.dtype in formats.FP8_MAX:
        scale = formats.index_scales(q, q_out.dtype, "ue8m0")
        q, folded = formats.quantize(q, scale.unsqueeze(-1), q_out.dtype), folded * scale
    q_out.copy_(q)
    weights_out.copy_(folded)


def _read_keys(index_cache: Tensor, layout: IndexLayout, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys [..., D] as stored and their scales [...], 0 for holes. `slots` [...]: any shape."""
    valid, block, offset = _split(slots, index_cache)
    if not layout.quantized:
        return torch.where(valid.unsqueeze(-1), index_cache[block, offset], 0), None
    values, scales = formats.index_cache_fields(index_cache)
    k = torch.where(valid.unsqueeze(-1), values[block, offset], 0).view(layout.dtype)
    return k, torch.where(valid, scales[block, offset].view(torch.float32).squeeze(-1), 0.0)


def gather_indexer_k_cache(
    k_out: Tensor,
    scale_out: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    rows: int,
    fp8_dtype: torch.dtype | None,
) -> None:
    row = torch.arange(rows, device=index_cache.device)
    ends = cu_seq_lens[1:].long().contiguous()
    request = torch.searchsorted(ends, row, right=True)  # == S for rows past the last sequence, which is out of range
    token = row - cu_seq_lens.long()[request.clamp(max=len(cu_seq_lens) - 1)]
    slots = _request_slots(block_table, request, token, index_cache.shape[1])
    k, scale = _read_keys(index_cache, formats.index_cache_layout(index_cache, fp8_dtype), slots)
    k_out.copy_(k)
    if scale is not None:
        scale_out.copy_(scale)


def _scores(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None) -> Tensor:
    """q [T, I, D], k [N, D] or [T, N, D], weights [T, I], k_scale [N] or [T, N] → [T, N]."""
    dots = torch.matmul(q.float(), k.float().transpose(-1, -2)).relu()
    scores = torch.matmul(weights.float().unsqueeze(1), dots).squeeze(1)
    return scores if k_scale is None else scores * k_scale


def mqa_logits(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    k_scale: Tensor | None,
    clean_logits: bool,
) -> None:
    column = torch.arange(len(k), device=q.device)
    for rows in _chunks(len(q), q.shape[1] * len(k)):
        inside = (column >= row_starts[rows, None]) & (column < row_ends[rows, None])
        out[rows] = _scores(q[rows], k, weights[rows], k_scale).masked_fill(~inside, float("-inf"))


def paged_mqa_logits(
    out: Tensor,
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    row_ends: Tensor,
    block_table: Tensor,
    req_id: Tensor,
    max_len: int,
    clean_logits: bool,
    fp8_dtype: torch.dtype | None,
) -> None:
    layout = formats.index_cache_layout(index_cache, fp8_dtype)
    token = torch.arange(max_len, device=q.device)
    for rows in _chunks(len(q), max_len * (q.shape[1] + layout.head_dim)):
        slots = _request_slots(block_table, req_id[rows, None], token, index_cache.shape[1])
        k, k_scale = _read_keys(index_cache, layout, slots)
        inside = _split(slots, index_cache)[0] & (token < row_ends[rows, None])
        out[rows] = _scores(q[rows], k, weights[rows], k_scale).masked_fill(~inside, float("-inf"))


def _sort_keys(logits: Tensor, valid: Tensor) -> Tensor:
    """int64 keys in the order of the logits, with everything that is not valid below −inf."""
    bits = (logits + 0.0).view(torch.int32)  # −0.0 + 0.0 is +0.0: the zeros tie
    return torch.where(valid, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long(), torch.iinfo(torch.int64).min)


def top_k_per_row(out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor, k: int) -> None:
    width = logits.shape[1]
    column = torch.arange(width, device=logits.device)
    starts = row_starts.long().clamp(min=0)[:, None]
    valid = (column >= starts) & (column < row_ends[:, None]) & ~logits.isnan()
    order = _sort_keys(logits, valid).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.where(valid.gather(1, order), order - row_starts[:, None], -1)
    out[:, : chosen.shape[1]] = chosen.int()
    out[:, chosen.shape[1] :] = -1


def convert_req_index_to_global_index(
    out: Tensor, req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int
) -> None:
    slots = _request_slots(block_table, req_id[:, None], token_indices, block_size)
    out.copy_(torch.where(slots <= torch.iinfo(torch.int32).max, slots, -1))


def sparse_attn_indexer(
    out: Tensor,
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    row_ends: Tensor,
    block_table: Tensor,
    req_id: Tensor,
    k: int,
    max_len: int,
    logits_budget_bytes: int,
    fp8_dtype: torch.dtype | None,
) -> None:
    step = max(1, logits_budget_bytes // (4 * max_len))
    starts = torch.zeros_like(row_ends)
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        logits = q.new_empty((len(q[rows]), max_len), dtype=torch.float32)
        paged_mqa_logits(
            logits,
            q[rows],
            index_cache,
            weights[rows],
            row_ends[rows],
            block_table,
            req_id[rows],
            max_len,
            True,
            fp8_dtype,
        )
        top_k_per_row(out[rows], logits, starts[rows], row_ends[rows], k)
