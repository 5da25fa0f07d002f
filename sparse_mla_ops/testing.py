"""What tests of the operators share: cases, tolerances, comparisons and compile checks.

For this package's own tests, and for anyone who adds a backend or compiles a model around the operators:

- `CASES`: every operator in several variants, each able to make valid arguments of any T in three memory layouts;
- `outcome`, `assert_same_bits`, `relative_error_per_row`, `assert_accurate`: comparing results, exactly or within
  `TOLERANCES`;
- `assert_fake_matches_real`: what an operator promises to the compiler is what it does;
- `compile_and_count`, `cache_copies`, `assert_no_cache_copy`: what torch.compile made of a function.

Needs nothing but torch. Letters are those of `sparse_mla_ops.ops`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from sparse_mla_ops import formats, ops, registry
from sparse_mla_ops.arch import E4M3FN, E4M3FNUZ
from sparse_mla_ops.ops import _register

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT32, INT64 = torch.int32, torch.int64

LAYOUTS = ("compact", "sliced", "permuted")
"""How the activations of a case lie in memory (caches have layouts of their own, see `slab` in the builders).

compact: contiguous. sliced: slices of wider buffers, as of a fused projection; integer vectors have a stride of 2.
permuted: dense, with the first two dimensions swapped in memory, as q_nope is, a transposed bmm result. Only this one
finds a fake whose outputs copy the strides of an input.
"""

# Sizes of all cases. No two that meet in one tensor are equal, so that swapped dimensions show; none is a tile size.
HEADS, KV_LORA_RANK, ROPE_DIM = 3, 24, 8
NUM_BLOCKS, BLOCK_SIZE = 5, 8
TOP_K = 11
INDEX_HEADS, INDEX_HEAD_DIM = 4, 16
REQUESTS, BLOCKS_PER_REQUEST = 2, 3
MAX_LEN = BLOCKS_PER_REQUEST * BLOCK_SIZE - 1
TABLE_ROWS = 32
# The sizes of released models, for backends that take no others.
RELEASED_MLA: dict[str, Any] = {"heads": 16, "rank": 512, "rope_dim": 64}
RELEASED_INDEXER: dict[str, Any] = {"heads": 32, "head_dim": 128}


# ----------------------------------------------------------------------------------------------------------------------
# Making arguments


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """x with the same values, in the memory layout `layout`."""
    if layout == "compact" or x.dim() == 0:
        return x.contiguous()
    if layout == "permuted":
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x.contiguous()
    if x.dim() == 1:
        view = x.new_zeros(2 * len(x) + 1)[1::2]
    else:
        # 8 elements keep slices of 16-bit rows aligned to 16 bytes, as slices of projections are.
        wide = x.new_zeros((x.shape[0] + 1, *x.shape[1:-1], x.shape[-1] + 8))
        view = wide[1:, ..., 8:]
    return view.copy_(x)


def _in_slab(cache: Tensor, row_gap: int) -> Tensor:
    """`cache` as one layer of a slab [NB, layers, BS, row + gap], so that neither pitch follows from its shape."""
    num_blocks, block_size, row = cache.shape
    slab = cache.new_zeros(num_blocks, 3, block_size, row + row_gap)
    return slab[:, 1, :, :row].copy_(cache)


class _CacheFormat(NamedTuple):
    dtype: torch.dtype | str
    """As `formats.pack_kv_cache` and `formats.pack_index_cache` take it."""
    fp8_dtype: torch.dtype | None = None
    """The operators' argument of that name; None where the tensor's dtype says it all."""


_KV_FORMATS = {
    "fp32": _CacheFormat(FP32),
    "bf16": _CacheFormat(BF16),
    "fp16": _CacheFormat(FP16),
    "e4m3fn": _CacheFormat(E4M3FN),
    "e4m3fnuz": _CacheFormat(E4M3FNUZ),
    "uint8-e4m3fn": _CacheFormat(E4M3FN, E4M3FN),
    "uint8-e4m3fnuz": _CacheFormat(E4M3FNUZ, E4M3FNUZ),
    "rows656-e4m3fn": _CacheFormat("fp8_ds_mla", E4M3FN),
    "rows656-e4m3fnuz": _CacheFormat("fp8_ds_mla", E4M3FNUZ),
}
_INDEX_FORMATS = {
    "fp32": _CacheFormat(FP32),
    "bf16": _CacheFormat(BF16),
    "fp16": _CacheFormat(FP16),
    "e4m3fn": _CacheFormat(E4M3FN, E4M3FN),
    "e4m3fnuz": _CacheFormat(E4M3FNUZ, E4M3FNUZ),
}


class _Inputs:
    """Makes the tensors of one case, from one seeded CPU generator: every device gets the same values."""

    def __init__(self, tokens: int, layout: str, device: torch.device | str, seed: int) -> None:
        self.tokens, self.layout, self.device = tokens, layout, device
        self.generator = torch.Generator().manual_seed(seed)

    def place(self, x: Tensor) -> Tensor:
        return _lay_out(x.to(self.device), self.layout)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.place(self._normal(*shape).to(dtype))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform in low … high, both included."""
        return self.place(torch.randint(low, high + 1, shape, generator=self.generator).to(dtype))

    def scale(self, value: float) -> Tensor:
        return torch.tensor([value], device=self.device)

    def rope_table(self, rope_dim: int, dtype: torch.dtype = FP32) -> Tensor:
        angles = torch.rand(TABLE_ROWS, rope_dim // 2, generator=self.generator) * 6
        return self.place(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype))

    def positions(self, dtype: torch.dtype) -> Tensor:
        """One step outside the table on either side, which the operators clamp."""
        return self.integers(-1, TABLE_ROWS, self.tokens, dtype=dtype)

    def slots(self, dtype: torch.dtype) -> Tensor:
        """[T] distinct slots in random order, with a hole of either kind; once the cache is full, all are holes."""
        rows = NUM_BLOCKS * BLOCK_SIZE
        slots = torch.full((self.tokens,), -1)
        slots[:rows] = torch.randperm(rows, generator=self.generator)[: self.tokens]
        slots[1:2] = -1
        slots[3:4] = rows
        return self.place(slots.to(dtype))

    def block_table(self, dtype: torch.dtype) -> Tensor:
        """[S, MB] block ids; the last block of the last request is not allocated."""
        blocks = torch.randperm(NUM_BLOCKS, generator=self.generator).repeat(2)[: REQUESTS * BLOCKS_PER_REQUEST]
        blocks[-1] = -1
        return self.place(blocks.view(REQUESTS, BLOCKS_PER_REQUEST).to(dtype))

    def requests(self, dtype: torch.dtype) -> Tensor:
        """[T] request of each row; one is out of range, as in a padded batch."""
        request = torch.randint(0, REQUESTS, (self.tokens,), generator=self.generator)
        request[3:4] = REQUESTS
        return self.place(request.to(dtype))

    def row_ends(self, dtype: torch.dtype) -> Tensor:
        """[T] ends from 0 to a little beyond MAX_LEN; one row is empty."""
        ends = torch.randint(0, MAX_LEN + 3, (self.tokens,), generator=self.generator)
        ends[1:2] = 0
        return self.place(ends.to(dtype))

    def kv_cache(self, name: str, rank: int, rope_dim: int, slab: bool) -> dict[str, Any]:
        """The arguments that describe a filled KV cache of format `name`: the cache, its encoding and its scale."""
        dtype, fp8_dtype = _KV_FORMATS[name]
        values = self._normal(NUM_BLOCKS, BLOCK_SIZE, rank), self._normal(NUM_BLOCKS, BLOCK_SIZE, rope_dim)
        per_tensor = isinstance(dtype, torch.dtype) and dtype in formats.FP8_MAX
        cache = formats.pack_kv_cache(*values, dtype, 0.25 if per_tensor else 1.0, fp8_dtype)
        if fp8_dtype is not None:
            cache = cache.view(torch.uint8)
        cache = cache.to(self.device)
        return {
            "kv_cache": _in_slab(cache, row_gap=16) if slab else cache,
            "kv_scale": self.scale(0.25) if per_tensor else None,
            "fp8_dtype": fp8_dtype,
        }

    def index_cache(self, name: str, head_dim: int, slab: bool) -> dict[str, Any]:
        """The arguments that describe a filled indexer cache of format `name`."""
        dtype, fp8_dtype = _INDEX_FORMATS[name]
        assert isinstance(dtype, torch.dtype)  # for the type checker: there is no named indexer format
        cache = formats.pack_index_cache(self._normal(NUM_BLOCKS, BLOCK_SIZE, head_dim), dtype).to(self.device)
        return {"index_cache": _in_slab(cache, row_gap=0) if slab else cache, "fp8_dtype": fp8_dtype}


# ----------------------------------------------------------------------------------------------------------------------
# One builder per operator. Keyword arguments are what its variants vary.


def _rotary_embedding(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    rope_dim: int = ROPE_DIM,
    is_neox: bool = False,
    table_dtype: torch.dtype = FP32,
    integers: torch.dtype = INT32,
    padding: int = 0,
) -> dict[str, Any]:
    return {
        "q_pe": make.normal(make.tokens, heads, rope_dim, dtype=dtype),
        "k_pe": make.normal(make.tokens + padding, rope_dim, dtype=dtype),
        "positions": make.positions(integers),
        "cos_sin_cache": make.rope_table(rope_dim, table_dtype),
        "is_neox": is_neox,
    }


def _concat_mla_q(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    rank: int = KV_LORA_RANK,
    rope_dim: int = ROPE_DIM,
    q_dtype: torch.dtype | None = None,
    q_scale: float | None = None,
) -> dict[str, Any]:
    return {
        "q_nope": make.normal(make.tokens, heads, rank, dtype=dtype),
        "q_pe": make.normal(make.tokens, heads, rope_dim, dtype=dtype),
        "q_scale": None if q_scale is None else make.scale(q_scale),
        "q_dtype": q_dtype,
    }


def _concat_and_cache_mla(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    rank: int = KV_LORA_RANK,
    rope_dim: int = ROPE_DIM,
    cache: str = "bf16",
    slab: bool = False,
    integers: torch.dtype = INT32,
    padding: int = 0,
) -> dict[str, Any]:
    return {
        "kv_c": make.normal(make.tokens + padding, rank, dtype=dtype),
        "k_pe": make.normal(make.tokens + padding, rope_dim, dtype=dtype),
        "slot_mapping": make.slots(integers),
        **make.kv_cache(cache, rank, rope_dim, slab),
    }


def _fused_qk_rope_concat_and_cache_mla(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    rank: int = KV_LORA_RANK,
    rope_dim: int = ROPE_DIM,
    is_neox: bool = False,
    q_dtype: torch.dtype | None = None,
    q_scale: float | None = None,
    cache: str = "bf16",
    slab: bool = False,
    integers: torch.dtype = INT32,
    padding: int = 0,
) -> dict[str, Any]:
    query = _concat_mla_q(
        make, dtype=dtype, heads=heads, rank=rank, rope_dim=rope_dim, q_dtype=q_dtype, q_scale=q_scale
    )
    write = _concat_and_cache_mla(
        make, dtype=dtype, rank=rank, rope_dim=rope_dim, cache=cache, slab=slab, integers=integers, padding=padding
    )
    table, positions = make.rope_table(rope_dim), make.positions(integers)
    return {**query, **write, "positions": positions, "cos_sin_cache": table, "is_neox": is_neox}


def _sparse_mla_fwd(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    rank: int = KV_LORA_RANK,
    rope_dim: int = ROPE_DIM,
    top_k: int = TOP_K,
    cache: str = "bf16",
    slab: bool = False,
    integers: torch.dtype = INT32,
    flat: bool = False,
    lengths: bool = False,
    sink: bool = False,
    q_scale: float | None = None,
    dot_precision: str | None = None,
    phase: str = "prefill",
    return_lse: bool = False,
) -> dict[str, Any]:
    """Indices hold holes of both kinds and duplicates; one row has no valid index at all."""
    tokens, rows = make.tokens, NUM_BLOCKS * BLOCK_SIZE
    arguments: dict[str, Any] = {
        "q": make.normal(tokens, heads, rank + rope_dim, dtype=dtype),
        "indices": make.integers(-4, rows + 4, tokens, top_k, dtype=integers),
        "softmax_scale": (rank + rope_dim) ** -0.5,
        "kv_lora_rank": rank,
        "q_scale": None if q_scale is None else make.scale(q_scale),
        "attn_sink": make.normal(heads, dtype=FP32) if sink else None,
        "dot_precision": dot_precision,
        "phase": phase,
        "return_lse": return_lse,
        **make.kv_cache(cache, rank, rope_dim, slab),
    }
    arguments["indices"][2:3] = -1
    if lengths:
        arguments["topk_length"] = make.integers(0, top_k, tokens, dtype=integers)
    if flat:
        # The buffer is longer than what its rows use, as one allocated for the largest step is.
        arguments["indices"] = make.integers(-4, rows + 4, tokens * top_k, dtype=integers)
        ends = torch.randint(0, top_k + 1, (tokens,), generator=make.generator).cumsum(0)
        arguments["indptr"] = make.place(torch.cat((torch.zeros(1), ends)).to(integers))
        arguments["max_topk"] = top_k
    return arguments


def _indexer_k_quant_and_cache(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    head_dim: int = INDEX_HEAD_DIM,
    cache: str = "bf16",
    slab: bool = False,
    scale_format: str = "ue8m0",
    integers: torch.dtype = INT32,
    padding: int = 0,
) -> dict[str, Any]:
    return {
        "k": make.normal(make.tokens + padding, head_dim, dtype=dtype),
        "slot_mapping": make.slots(integers),
        "scale_format": scale_format,
        **make.index_cache(cache, head_dim, slab),
    }


def _indexer_q_rope_quant(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = INDEX_HEADS,
    head_dim: int = INDEX_HEAD_DIM,
    rope_dim: int = ROPE_DIM,
    is_neox: bool = True,
    weights_dtype: torch.dtype = FP32,
    q_dtype: torch.dtype | None = None,
    integers: torch.dtype = INT32,
) -> dict[str, Any]:
    return {
        "q": make.normal(make.tokens, heads, head_dim, dtype=dtype),
        "positions": make.positions(integers),
        "cos_sin_cache": make.rope_table(rope_dim),
        "weights": make.normal(make.tokens, heads, dtype=weights_dtype),
        "softmax_scale": head_dim**-0.5,
        "is_neox": is_neox,
        "q_dtype": q_dtype,
    }


def _gather_indexer_k_cache(
    make: _Inputs,
    *,
    head_dim: int = INDEX_HEAD_DIM,
    cache: str = "bf16",
    slab: bool = False,
    integers: torch.dtype = INT32,
) -> dict[str, Any]:
    """The sequences end one row before the result does."""
    cu_seq_lens = torch.tensor([0, make.tokens // 2, max(make.tokens - 1, 0)])
    return {
        "block_table": make.block_table(integers),
        "cu_seq_lens": make.place(cu_seq_lens.to(integers)),
        "rows": make.tokens,
        **make.index_cache(cache, head_dim, slab),
    }


def _indexer_query(
    make: _Inputs, dtype: torch.dtype, heads: int, head_dim: int, weights_dtype: torch.dtype, integers: torch.dtype
) -> dict[str, Any]:
    """What both kinds of logits take: queries, head weights of either sign, and where each row ends."""
    return {
        "q": make.normal(make.tokens, heads, head_dim, dtype=dtype),
        "weights": make.normal(make.tokens, heads, dtype=weights_dtype),
        "row_ends": make.row_ends(integers),
    }


def _mqa_logits(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = INDEX_HEADS,
    head_dim: int = INDEX_HEAD_DIM,
    weights_dtype: torch.dtype = FP32,
    scaled: bool = False,
    clean_logits: bool = True,
    integers: torch.dtype = INT32,
) -> dict[str, Any]:
    return {
        **_indexer_query(make, dtype, heads, head_dim, weights_dtype, integers),
        "k": make.normal(MAX_LEN, head_dim, dtype=dtype),
        "k_scale": make.normal(MAX_LEN, dtype=FP32).abs() if scaled else None,
        "row_starts": make.integers(-1, 7, make.tokens, dtype=integers),
        "clean_logits": clean_logits,
    }


def _paged_mqa_logits(
    make: _Inputs,
    *,
    dtype: torch.dtype = BF16,
    heads: int = INDEX_HEADS,
    head_dim: int = INDEX_HEAD_DIM,
    weights_dtype: torch.dtype = FP32,
    cache: str = "bf16",
    slab: bool = False,
    clean_logits: bool = True,
    integers: torch.dtype = INT32,
) -> dict[str, Any]:
    return {
        **_indexer_query(make, dtype, heads, head_dim, weights_dtype, integers),
        "block_table": make.block_table(integers),
        "req_id": make.requests(integers),
        "max_len": MAX_LEN,
        "clean_logits": clean_logits,
        **make.index_cache(cache, head_dim, slab),
    }


def _top_k_per_row(
    make: _Inputs, *, k: int = TOP_K, columns: int = MAX_LEN, ties: bool = False, integers: torch.dtype = INT32
) -> dict[str, Any]:
    """The logits hold a NaN and a −inf; with `ties`, two values only."""
    logits = make.normal(make.tokens, columns, dtype=FP32)
    if ties:
        logits.sign_()
    logits[:, 4], logits[:, 5] = float("nan"), float("-inf")
    return {
        "logits": logits,
        "row_starts": make.integers(-1, 7, make.tokens, dtype=integers),
        "row_ends": make.row_ends(integers),
        "k": k,
    }


def _convert_req_index_to_global_index(
    make: _Inputs, *, integers: torch.dtype = INT32, table_integers: torch.dtype = INT32
) -> dict[str, Any]:
    """Token indices reach beyond the block table on either side."""
    return {
        "req_id": make.requests(integers),
        "block_table": make.block_table(table_integers),
        "token_indices": make.integers(-2, BLOCKS_PER_REQUEST * BLOCK_SIZE + 1, make.tokens, TOP_K, dtype=integers),
        "block_size": BLOCK_SIZE,
    }


def _sparse_attn_indexer(
    make: _Inputs, *, k: int = TOP_K, logits_budget_bytes: int | None = None, **paged: Any
) -> dict[str, Any]:
    arguments = {**_paged_mqa_logits(make, **paged), "k": k}
    del arguments["clean_logits"]
    if logits_budget_bytes is not None:
        arguments["logits_budget_bytes"] = logits_budget_bytes
    return arguments


_BUILDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "rotary_embedding": _rotary_embedding,
    "concat_mla_q": _concat_mla_q,
    "concat_and_cache_mla": _concat_and_cache_mla,
    "fused_qk_rope_concat_and_cache_mla": _fused_qk_rope_concat_and_cache_mla,
    "sparse_mla_fwd": _sparse_mla_fwd,
    "indexer_k_quant_and_cache": _indexer_k_quant_and_cache,
    "indexer_q_rope_quant": _indexer_q_rope_quant,
    "gather_indexer_k_cache": _gather_indexer_k_cache,
    "mqa_logits": _mqa_logits,
    "paged_mqa_logits": _paged_mqa_logits,
    "top_k_per_row": _top_k_per_row,
    "convert_req_index_to_global_index": _convert_req_index_to_global_index,
    "sparse_attn_indexer": _sparse_attn_indexer,
}

# Per operator: variant → what its builder gets. The first variant of each is the plain one.
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "rotary_embedding": {
        "bf16": {},
        "fp32-neox": {"dtype": FP32, "is_neox": True},
        "fp16-table16-int64": {"dtype": FP16, "table_dtype": FP16, "integers": INT64},
        "bf16-r0": {"rope_dim": 0},
        "bf16-padded": {"padding": 2},
    },
    "concat_mla_q": {
        "bf16": {},
        "fp32": {"dtype": FP32},
        "fp16": {"dtype": FP16},
        "bf16-r0": {"rope_dim": 0},
        "e4m3fn": {"q_dtype": E4M3FN, "q_scale": 0.125},
        "e4m3fnuz": {"dtype": FP32, "q_dtype": E4M3FNUZ, "q_scale": 0.3},
        "e4m3fn-unscaled": {"q_dtype": E4M3FN},
        "bf16-released": RELEASED_MLA,
    },
    "concat_and_cache_mla": {
        "bf16": {},
        "fp32": {"dtype": FP32, "cache": "fp32"},
        "fp16-int64": {"dtype": FP16, "cache": "fp16", "integers": INT64},
        "bf16-r0": {"rope_dim": 0},
        "bf16-padded": {"padding": 2},
        "bf16-slab": {"slab": True},
        "e4m3fn": {"cache": "e4m3fn"},
        "e4m3fn-slab": {"cache": "e4m3fn", "slab": True},
        "e4m3fnuz": {"dtype": FP32, "cache": "e4m3fnuz"},
        "uint8-e4m3fn": {"cache": "uint8-e4m3fn"},
        "uint8-e4m3fnuz": {"cache": "uint8-e4m3fnuz"},
        "rows656": {"rank": 512, "rope_dim": 64, "cache": "rows656-e4m3fn"},
        "rows656-slab": {"rank": 512, "rope_dim": 64, "cache": "rows656-e4m3fn", "slab": True},
        "rows656-fnuz-r0": {"dtype": FP32, "rank": 512, "rope_dim": 0, "cache": "rows656-e4m3fnuz"},
    },
    "fused_qk_rope_concat_and_cache_mla": {
        "bf16": {},
        "fp32-neox": {"dtype": FP32, "is_neox": True, "cache": "fp32"},
        "fp16-int64": {"dtype": FP16, "cache": "fp16", "integers": INT64},
        "bf16-r0": {"rope_dim": 0},
        "bf16-padded": {"padding": 2},
        "bf16-slab": {"slab": True},
        "e4m3fn-q8": {"q_dtype": E4M3FN, "q_scale": 0.125, "cache": "e4m3fn"},
        "uint8-e4m3fnuz-q8": {"q_dtype": E4M3FNUZ, "q_scale": 0.125, "cache": "uint8-e4m3fnuz"},
        "rows656-neox": {**RELEASED_MLA, "cache": "rows656-e4m3fn", "is_neox": True},
        "bf16-released": RELEASED_MLA,
    },
    "sparse_mla_fwd": {
        "bf16": {},
        "fp32-lse": {"dtype": FP32, "cache": "fp32", "return_lse": True},
        "fp16-decode": {"dtype": FP16, "cache": "fp16", "phase": "decode"},
        "bf16-int64-lengths-sink-lse": {"integers": INT64, "lengths": True, "sink": True, "return_lse": True},
        "bf16-flat": {"flat": True},
        "fp32-flat-int64-sink": {"dtype": FP32, "cache": "fp32", "flat": True, "integers": INT64, "sink": True},
        "bf16-r0": {"rope_dim": 0},
        "bf16-one-wide": {"rank": 1, "rope_dim": 0},
        "bf16-slab": {"slab": True},
        "e4m3fn": {"cache": "e4m3fn"},
        "e4m3fn-q8-lse": {"dtype": E4M3FN, "q_scale": 0.5, "cache": "e4m3fn", "return_lse": True},
        "e4m3fnuz-q8-slab": {"dtype": E4M3FNUZ, "q_scale": 0.5, "cache": "e4m3fnuz", "slab": True},
        "uint8-e4m3fn": {"cache": "uint8-e4m3fn"},
        "uint8-e4m3fnuz": {"cache": "uint8-e4m3fnuz"},
        "rows656": {"rank": 512, "rope_dim": 64, "cache": "rows656-e4m3fn"},
        "rows656-slab-fp8dots": {**RELEASED_MLA, "cache": "rows656-e4m3fn", "slab": True, "dot_precision": "fp8"},
        "rows656-fnuz-r0": {"rank": 512, "rope_dim": 0, "cache": "rows656-e4m3fnuz"},
        "bf16-released": {**RELEASED_MLA, "top_k": 64, "return_lse": True},
        "e4m3fn-released-r0": {"heads": 16, "rank": 512, "rope_dim": 0, "cache": "e4m3fn", "top_k": 64},
    },
    "indexer_k_quant_and_cache": {
        "bf16": {},
        "fp32": {"dtype": FP32, "cache": "fp32"},
        "fp16-slab": {"dtype": FP16, "cache": "fp16", "slab": True},
        "bf16-padded-int64": {"padding": 2, "integers": INT64},
        "e4m3fn": {"cache": "e4m3fn"},
        "e4m3fn-fp32scale-slab": {"cache": "e4m3fn", "scale_format": "fp32", "slab": True},
        "e4m3fnuz": {"dtype": FP32, "cache": "e4m3fnuz"},
        "e4m3fn-released": {"cache": "e4m3fn", "head_dim": 128},
    },
    "indexer_q_rope_quant": {
        "bf16": {},
        "fp32-interleaved": {"dtype": FP32, "is_neox": False},
        "fp16-int64": {"dtype": FP16, "weights_dtype": FP16, "integers": INT64},
        "bf16-r0": {"rope_dim": 0},
        "bf16-all-rope": {"rope_dim": INDEX_HEAD_DIM},
        "e4m3fn": {"q_dtype": E4M3FN, "weights_dtype": BF16},
        "e4m3fnuz-interleaved": {"dtype": FP32, "q_dtype": E4M3FNUZ, "is_neox": False},
        "e4m3fn-released": {**RELEASED_INDEXER, "rope_dim": 64, "q_dtype": E4M3FN},
    },
    "gather_indexer_k_cache": {
        "bf16": {},
        "fp32-int64": {"cache": "fp32", "integers": INT64},
        "fp16-slab": {"cache": "fp16", "slab": True},
        "e4m3fn": {"cache": "e4m3fn"},
        "e4m3fnuz-slab": {"cache": "e4m3fnuz", "slab": True},
        "e4m3fn-released": {"cache": "e4m3fn", "head_dim": 128},
    },
    "mqa_logits": {
        "bf16": {},
        "fp32-unclean": {"dtype": FP32, "clean_logits": False},
        "fp16-int64": {"dtype": FP16, "weights_dtype": FP16, "integers": INT64},
        "e4m3fn": {"dtype": E4M3FN, "scaled": True},
        "e4m3fnuz-unclean": {"dtype": E4M3FNUZ, "scaled": True, "weights_dtype": BF16, "clean_logits": False},
        "e4m3fn-released": {**RELEASED_INDEXER, "dtype": E4M3FN, "scaled": True},
    },
    "paged_mqa_logits": {
        "bf16": {},
        "fp32-unclean": {"dtype": FP32, "cache": "fp32", "clean_logits": False},
        "fp16-int64-slab": {"dtype": FP16, "cache": "fp16", "integers": INT64, "slab": True},
        "e4m3fn": {"dtype": E4M3FN, "cache": "e4m3fn"},
        "e4m3fnuz-slab-unclean": {"dtype": E4M3FNUZ, "cache": "e4m3fnuz", "slab": True, "clean_logits": False},
        "e4m3fn-q16": {"cache": "e4m3fn", "weights_dtype": BF16},
        "e4m3fn-released": {**RELEASED_INDEXER, "dtype": E4M3FN, "cache": "e4m3fn"},
    },
    "top_k_per_row": {
        "fp32": {},
        "fp32-int64": {"integers": INT64},
        "fp32-ties": {"ties": True},
        "fp32-k-beyond-columns": {"k": MAX_LEN + 4},
    },
    "convert_req_index_to_global_index": {
        "int32": {},
        "int64": {"integers": INT64, "table_integers": INT64},
        "int64-table32": {"integers": INT64},
    },
    "sparse_attn_indexer": {
        "bf16": {},
        "fp32-one-row-at-a-time": {"dtype": FP32, "cache": "fp32", "logits_budget_bytes": 1},
        "fp16-int64-slab": {"dtype": FP16, "cache": "fp16", "integers": INT64, "slab": True},
        "e4m3fn": {"dtype": E4M3FN, "cache": "e4m3fn"},
        "e4m3fnuz-k-beyond-len": {"dtype": E4M3FNUZ, "cache": "e4m3fnuz", "k": MAX_LEN + 4},
        "e4m3fn-released": {**RELEASED_INDEXER, "dtype": E4M3FN, "cache": "e4m3fn"},
    },
}


@dataclass(frozen=True)
class OpCase:
    """One operator in one variant: a recipe for valid arguments of any number of rows."""

    op: str
    variant: str

    def __str__(self) -> str:
        return f"{self.op}-{self.variant}"

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        return getattr(ops, self.op)

    @property
    def overload(self) -> Any:
        """The registered operator, `torch.ops.sparse_mla_ops.<op>.default`."""
        return getattr(torch.ops.sparse_mla_ops, self.op).default

    def arguments(
        self, tokens: int = 5, layout: str = "compact", device: torch.device | str = "cpu", seed: int = 0
    ) -> dict[str, Any]:
        """Fresh keyword arguments for T = `tokens`; equal calls give equal values.

        Sizes other than T do not depend on `tokens`, nor do the contents of the caches.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
        return _BUILDERS[self.op](_Inputs(tokens, layout, device, seed), **_VARIANTS[self.op][self.variant])


CASES: tuple[OpCase, ...] = tuple(OpCase(op, variant) for op, variants in _VARIANTS.items() for variant in variants)
"""Every operator in all its variants."""

PLAIN_CASES: tuple[OpCase, ...] = tuple(OpCase(op, next(iter(variants))) for op, variants in _VARIANTS.items())
"""One case per operator, for checks whose outcome a variant does not change or that are slow."""


def cases_of(*names: str) -> tuple[OpCase, ...]:
    """The cases of the operators `names`."""
    return tuple(case for case in CASES if case.op in names)


def mutated_arguments(op: str) -> tuple[str, ...]:
    """The arguments that operator `op` writes, by its schema."""
    schema = getattr(torch.ops.sparse_mla_ops, op).default._schema
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def copy_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments on copied storages: strides, offsets and what surrounds a view stay as they are."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        fresh = torch.empty(0, dtype=value.dtype, device=value.device)
        return fresh.set_(value.untyped_storage().clone(), value.storage_offset(), value.shape, value.stride())

    return {name: copy(value) for name, value in arguments.items()}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of what an operator takes or returns."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


# ----------------------------------------------------------------------------------------------------------------------
# Running and comparing


def outcome(op: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Call `op`; all that the call leaves behind, see `outcome_of`."""
    return outcome_of(op(**arguments), arguments)


def outcome_of(result: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a call left behind: the outputs in its `result`, and each tensor argument as it is afterwards.

    Cells of the outputs that the contract leaves unspecified are set to 0.
    """
    outputs = tensors_of(result)
    _blank_unspecified(outputs, arguments)
    named = {f"output {i}": output for i, output in enumerate(outputs)}
    return named | {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _blank_unspecified(outputs: Sequence[Tensor], arguments: Mapping[str, Any]) -> None:
    """clean_logits=False says nothing about columns outside the window."""
    if arguments.get("clean_logits", True):
        return
    for logits in outputs:
        column = torch.arange(logits.shape[1], device=logits.device)
        outside = column >= arguments["row_ends"][:, None]
        if "row_starts" in arguments:
            outside |= column < arguments["row_starts"][:, None]
        logits.masked_fill_(outside, 0)


def run_backend(name: str, op: str, arguments: Mapping[str, Any]) -> Any:
    """Call backend `name`'s own function for `op`, past the dispatcher, and return the outputs.

    The outputs hold NaN or −2 beforehand, so that a cell which the function leaves out shows.
    """
    contract = inspect.unwrap(getattr(ops, op))
    bound = inspect.signature(contract).bind(**arguments)
    bound.apply_defaults()
    outputs = contract(*bound.args)
    for output in tensors_of(outputs):
        output.fill_(float("nan") if output.is_floating_point() else -2)
    module = importlib.import_module(next(backend.module for backend in registry.BACKENDS if backend.name == name))
    getattr(module, op)(*tensors_of(outputs), *bound.args[:-1])
    return outputs


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit; NaN equals the same NaN, and −0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # A clone, as `contiguous` keeps odd strides of dimensions of size 1, which cannot be viewed as bytes.
    a_bytes, b_bytes = (x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a_bytes, b_bytes)


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Both hold the same names (see `outcome`) and, by name, tensors of the same bits."""
    assert list(actual) == list(expected), f"expected {list(expected)}, got {list(actual)}"
    for name, have in actual.items():
        want = expected[name]
        if not same_bits(have, want):
            differ = (
                f"{int((have != want).sum())} of {want.numel()} values differ"
                if have.shape == want.shape and have.dtype == want.dtype
                else f"got {tuple(have.shape)} {have.dtype}, expected {tuple(want.shape)} {want.dtype}"
            )
            raise AssertionError(f"{name}: not the same bits; {differ}")


class Tolerance(NamedTuple):
    """Bounds of the relative L2 error against fp64 on dequantised inputs."""

    per_row: float
    """Of the worst (row, head)."""
    overall: float
    """Of the whole tensor."""


TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(per_row=1e-5, overall=1e-5),
    "bf16": Tolerance(per_row=0.005, overall=0.005),
    "fp8": Tolerance(per_row=0.06, overall=0.05),
}
""""fp32": fp32 dots and results. "bf16": dots or results of 16 bits, fp16 included. "fp8": fp8 dots."""


def _relative_error(actual: Tensor, expected: Tensor, dim: int | None) -> Tensor:
    difference, norm = (torch.linalg.vector_norm(x, dim=dim) for x in (actual - expected, expected))
    return torch.where(difference == 0, 0.0, difference / norm)


def relative_error_per_row(actual: Tensor, expected: Tensor) -> Tensor:
    """‖actual − expected‖ / ‖expected‖ over the last dimension, in fp64: [T, H, L] → [T, H].

    A row that should be zero and is not has an infinite error.
    """
    return _relative_error(actual.double(), expected.double(), dim=-1)


def assert_accurate(actual: Tensor, expected: Tensor, precision: str) -> None:
    """`actual` is within TOLERANCES[precision] of `expected`, per row and overall, and not finite where that is not.

    expected: the fp64 result on dequantised inputs.
    """
    tolerance = TOLERANCES[precision]
    assert actual.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    actual, expected = actual.double(), expected.double()
    special = ~expected.isfinite()
    torch.testing.assert_close(
        torch.where(special, actual, 0.0), torch.where(special, expected, 0.0), rtol=0, atol=0, equal_nan=True
    )
    assert bool(actual[~special].isfinite().all()), "a value is not finite where the expected one is"
    if actual.numel() == 0:
        return
    actual, expected = (torch.where(special, 0.0, x) for x in (actual, expected))
    per_row = relative_error_per_row(actual, expected)
    overall = float(_relative_error(actual.flatten(), expected.flatten(), dim=None))
    worst = tuple(int(i) for i in torch.unravel_index(per_row.argmax(), per_row.shape))
    error = float(per_row[worst])
    cosine = float(torch.nn.functional.cosine_similarity(actual[worst], expected[worst], dim=-1))
    if not (error <= tolerance.per_row and overall <= tolerance.overall):
        raise AssertionError(
            f"relative L2 error {error:.3g} in row {worst} (cosine {cosine:.6f}) and {overall:.3g} overall; "
            f"{precision} allows {tolerance.per_row:g} and {tolerance.overall:g}"
        )


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def assert_fake_matches_real(op: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """What `op` does to fake tensors is what it does to real ones, and its outputs are fresh.

    Shape, stride, dtype and device agree output by output; every output is contiguous; none shares a storage with
    another output or with an argument. `arguments` are left as they are.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = copy_arguments(arguments)
    mode = FakeTensorMode()
    faked = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    real = tensors_of(op(**arguments))
    with mode:
        fake = tensors_of(op(**faked))
    assert len(fake) == len(real), f"{len(real)} outputs, but {len(fake)} fake ones"
    for i, (is_, promised) in enumerate(zip(real, fake)):
        for what in ("shape", "dtype", "device", "stride"):
            have, want = getattr(is_, what), getattr(promised, what)
            have, want = (have(), want()) if callable(have) else (have, want)
            assert have == want, f"output {i}: {what} is {have}, the fake promises {want}"
        assert is_.is_contiguous(), f"output {i}: not contiguous, strides {is_.stride()} for {tuple(is_.shape)}"
    for kind, inputs, outputs in (("real", arguments, real), ("fake", faked, fake)):
        taken = {_storage_id(x): name for name, x in inputs.items() if isinstance(x, Tensor)}
        for i, output in enumerate(outputs):
            owner = taken.setdefault(_storage_id(output), f"output {i}")
            assert owner == f"output {i}", f"{kind} output {i} shares its storage with {owner}"


# ----------------------------------------------------------------------------------------------------------------------
# What torch.compile made of a function

Call = tuple[Any, ...] | Mapping[str, Any]
"""The positional or the keyword arguments of one call."""


def _call(fn: Callable[..., Any], arguments: Call) -> Any:
    return fn(**arguments) if isinstance(arguments, Mapping) else fn(*arguments)


@dataclass(frozen=True)
class CompileReport:
    """What `compile_and_count` saw."""

    results: tuple[Any, ...]
    """What each call returned."""
    compiles_per_call: tuple[int, ...]
    """Graphs compiled during each call. The first call's are unavoidable, the others' are recompiles."""
    graph_breaks: tuple[str, ...]
    """Reason of each graph break."""
    code: tuple[str, ...]
    """Inductor's output code, one text per compiled graph; empty for other backends."""

    @property
    def compiles(self) -> int:
        return sum(self.compiles_per_call)


def compile_and_count(
    fn: Callable[..., Any],
    calls: Sequence[Call],
    *,
    backend: str = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> CompileReport:
    """Compile `fn` with nothing remembered of earlier compilations, make the `calls` in turn, and report.

    fullgraph: raise at a graph break instead of counting it.
    """
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.utils import run_and_get_code

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fn, backend=counter, fullgraph=fullgraph, dynamic=dynamic)
    results: list[Any] = []
    compiles: list[int] = []

    def make_calls() -> None:
        for arguments in calls:
            before = counter.frame_count
            results.append(_call(compiled, arguments))
            compiles.append(int(counter.frame_count - before))

    counters.clear()
    # A graph that comes out of a cache brings no code along.
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        _, code = run_and_get_code(make_calls)
    breaks = tuple(reason for reason, count in counters["graph_break"].items() for _ in range(count))
    return CompileReport(tuple(results), tuple(compiles), breaks, tuple(code))


# `buf0 = empty_strided_cpu((5, 8, 32), (256, 32, 1), torch.bfloat16)`, and the like on other devices.
_ALLOCATION = re.compile(r"\bempty_strided\w*\(\s*\(([^()]*)\),\s*\([^()]*\),[^()]*?torch\.(\w+)")
_CLONE = re.compile(r"\baten\.clone\b")


def _may_be_as_large(sizes: str, itemsize: int, cache: Tensor) -> bool:
    """Whether an allocation of `sizes` ("5, 8, s77") may hold the whole of `cache` or of its storage.

    Sizes that are not numbers are known at run time only: they count as whatever fits the cache's own shape.
    """
    dims = [size.strip() for size in sizes.split(",") if size.strip()]
    if all(dim.isdigit() for dim in dims):
        size_bytes = itemsize
        for dim in dims:
            size_bytes *= int(dim)
        return size_bytes in (cache.numel() * cache.element_size(), cache.untyped_storage().nbytes())
    return len(dims) == cache.dim() and all(
        not dim.isdigit() or int(dim) == size for dim, size in zip(dims, cache.shape)
    )


def cache_copies(code: str, cache: Tensor) -> list[str]:
    """The lines of Inductor's output code that may copy `cache`: buffers of its size in bytes, and calls of clone.

    A buffer may have that size for another reason; give the cache a size of its own to tell them apart.
    """
    found = []
    for line in code.splitlines():
        allocations = _ALLOCATION.findall(line)
        if _CLONE.search(line.partition("#")[0]) or any(
            _may_be_as_large(sizes, getattr(torch, dtype).itemsize, cache) for sizes, dtype in allocations
        ):
            found.append(line.strip())
    return found


def assert_no_cache_copy(fn: Callable[..., Any], args: Call, caches: Sequence[Tensor]) -> CompileReport:
    """Compile `fn` with Inductor, call it once on `args`, and find no copy of any of `caches` in the code."""
    report = compile_and_count(fn, [args], fullgraph=True)
    assert report.code, "Inductor gave no output code to look at"
    for cache in caches:
        copies = [line for code in report.code for line in cache_copies(code, cache)]
        assert not copies, f"a cache {tuple(cache.shape)} {cache.dtype} is copied:\n" + "\n".join(copies)
    return report


# ----------------------------------------------------------------------------------------------------------------------
# Backends that exist in a test only


@contextlib.contextmanager
def backends_replaced(
    *table: tuple[registry.Backend, ModuleType | None],
    order: tuple[str, ...] | None = None,
    aiter_sparse_mla: bool = False,
) -> Iterator[None]:
    """Within the block the registry knows just the backends of `table`, each with its module or None to import it.

    order, aiter_sparse_mla: the policy in force, by default all backends as they stand in the table. What the registry
    remembers of imports and of choices already logged is put aside.
    """
    backends = tuple(backend for backend, _ in table)
    modules = {backend.module: module for backend, module in table if module is not None}
    policy = registry.Policy(order or tuple(backend.name for backend in backends), aiter_sparse_mla)
    registry._load.cache_clear()
    _register.forget_plans()
    try:
        with (
            mock.patch.object(registry, "BACKENDS", backends),
            mock.patch.object(registry, "_policy", policy),
            mock.patch.object(registry, "_logged", set()),
            mock.patch.dict(sys.modules, modules),
        ):
            yield
    finally:
        registry._load.cache_clear()
        _register.forget_plans()
