from __future__ import annotations

import math

import torch
from torch import Tensor

from sparse_mla_ops.formats import FP8_MAX, kv_cache_layout
from sparse_mla_ops.ops._checks import (
    FLOATS_OR_FP8,
    INTEGERS,
    check_cache_strides,
    check_choice,
    check_dtype,
    check_positive,
    check_same_device,
    check_scale,
    check_shape,
)
from sparse_mla_ops.ops._register import register_op


def _check(
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
    fp8_dtype: torch.dtype | None,
) -> None:
    check_same_device(
        q=q,
        kv_cache=kv_cache,
        indices=indices,
        indptr=indptr,
        topk_length=topk_length,
        q_scale=q_scale,
        kv_scale=kv_scale,
        attn_sink=attn_sink,
    )
    check_shape("q", q, "T H W", None, None, None)
    check_dtype("q", q, *FLOATS_OR_FP8)
    tokens, heads, width = q.shape
    check_positive("q heads H", heads)
    check_positive("kv_lora_rank", kv_lora_rank)
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected a positive finite number, got {softmax_scale}")
    if width < kv_lora_rank:
        raise ValueError(f"q: expected rows of W ≥ L = {kv_lora_rank}, got {tuple(q.shape)}")
    check_cache_strides("kv_cache", kv_cache)
    layout = kv_cache_layout(kv_cache, kv_lora_rank, width - kv_lora_rank, fp8_dtype)

    check_dtype("indices", indices, *INTEGERS)
    if indptr is None:
        check_shape("indices", indices, "T K", tokens, None)
        check_positive("indices width K", indices.shape[1])
        if max_topk is not None:
            raise ValueError("max_topk: it bounds the rows of flat indices; pass indptr too, or leave it out")
    else:
        check_shape("indices", indices, "nnz", None)
        check_shape("indptr", indptr, "T+1", tokens + 1)
        check_dtype("indptr", indptr, *INTEGERS)
        if max_topk is None:
            raise ValueError("max_topk: expected a bound on the length of a row, as indices are flat; got None")
        check_positive("max_topk", max_topk)
        if topk_length is not None:
            raise ValueError("topk_length: flat indices have their lengths in indptr; leave topk_length out")
    if topk_length is not None:
        check_shape("topk_length", topk_length, "T", tokens)
        check_dtype("topk_length", topk_length, *INTEGERS)

    check_scale("q_scale", q_scale)
    check_scale("kv_scale", kv_scale)
    if attn_sink is not None:
        check_shape("attn_sink", attn_sink, "H", heads)
        check_dtype("attn_sink", attn_sink, torch.float32)
    check_choice("phase", phase, "decode", "prefill")
    check_choice("dot_precision", dot_precision, None, "bf16", "fp8")
    if not layout.quantized and (dot_precision == "fp8" or q.dtype in FP8_MAX):
        raise ValueError(
            f"kv_cache: expected an fp8 cache for an fp8 query or dot_precision='fp8', got {kv_cache.dtype}; "
            f"use a 16-bit query and dot_precision='bf16'"
        )


def _empty_outputs(q: Tensor, kv_lora_rank: int, return_lse: bool) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    dtype = torch.bfloat16 if q.dtype in FP8_MAX else q.dtype
    out = q.new_empty((tokens, heads, kv_lora_rank), dtype=dtype)
    return out, q.new_empty((tokens, heads) if return_lse else (0,), dtype=torch.float32)


@register_op(rows="q")
def sparse_mla_fwd(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    indptr: Tensor | None = None,
    max_topk: int | None = None,
    topk_length: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    attn_sink: Tensor | None = None,
    dot_precision: str | None = None,
    phase: str = "prefill",
    return_lse: bool = False,
    fp8_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention of each query over its own selected rows of the cache.

    Per row t and head h, over the valid j in indices[t]: s_j = softmax_scale · q · kv_j, lse = ln Σ exp(s_j) and
    out = Σ softmax(s)_j · kv_j[:L]. There is no causal mask: the selection is the mask.

    Args:
        q: [T, H, W], W = L + R: fp32, bf16, fp16, or fp8 (real = stored · q_scale).
        kv_cache: [NB, BS, row]. Layouts: `sparse_mla_ops.formats`. Any block and row pitch.
        indices: [T, K] int32 or int64 cache slots (block · BS + offset), K ≥ 1. Any negative value and any value
            ≥ NB·BS is a hole, anywhere in the row. Duplicates count twice. Or flat [nnz], see indptr.
        softmax_scale: of the model, (P + R)^-0.5 before absorption; not W^-0.5. Positive.
        kv_lora_rank: L, the width of the output; the first L values of a row are its value.
        indptr: [T + 1] int32 or int64, for flat indices: row t owns indices[indptr[t] : indptr[t + 1]].
        max_topk: with indptr only: bound on a row's length, which sizes the work; entries beyond it are not read.
        topk_length: [T] int32 or int64, with 2-D indices only: just the first topk_length[t] entries of row t count.
        q_scale: one fp32 value for an fp8 query. None is 1.
        kv_scale: one fp32 value for a per-tensor fp8 cache. None is 1.
        attn_sink: [H] fp32, a natural-log logit, not scaled: adds exp(sink) to the denominator. −inf changes nothing,
            a huge one gives 0.
        dot_precision: "bf16" multiplies at 16 bits (fp32 for an fp32 query), "fp8" quantises the query per tile if it
            is not fp8 already and multiplies q · k in fp8; needs an fp8 cache. None follows the query's dtype.
        phase: "decode" promises that every row is a decode or speculative row, and only forbids prefill kernels. A
            mixed batch is "prefill".
        return_lse: also return the log-sum-exp.
        fp8_dtype: encoding of a uint8 cache (default e4m3fn); an fp8 tensor says it itself.
        backend: run on this backend or fail; None takes the first that can.

    Returns:
        out [T, H, L] in q's dtype (bf16 for an fp8 query), and lse [T, H] fp32, natural log, without the sink; shape
        [0] unless return_lse. A row without a valid index gives out 0 and lse −inf.

    Raises:
        ValueError: a wrong shape, dtype, device or cache layout. BackendUnavailable: no backend can run the call.
    """
    _check(
        q,
        kv_cache,
        indices,
        softmax_scale,
        kv_lora_rank,
        indptr,
        max_topk,
        topk_length,
        q_scale,
        kv_scale,
        attn_sink,
        dot_precision,
        phase,
        fp8_dtype,
    )
    return _empty_outputs(q, kv_lora_rank, return_lse)
