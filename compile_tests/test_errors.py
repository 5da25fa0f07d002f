"""What every operator says about wrong arguments: which argument, what was expected, what came. Nothing is written.

One table, `ERRORS`; each row changes valid arguments in one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparse_mla_ops import registry, testing
from sparse_mla_ops.testing import OpCase

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def spell(change: Any) -> str:
    if isinstance(change, Tensor):
        return f"{change.dtype}{list(change.shape)}"
    return getattr(change, "__name__", str(change))


class Error(NamedTuple):
    op: str
    variant: str
    changes: dict[str, Any]
    """Argument → its new value, or a function of the valid one."""
    message: str
    """Regular expression that the message holds."""
    exception: type[Exception] = ValueError

    def __str__(self) -> str:
        return "-".join((self.op, self.variant, *(f"{name}={spell(change)}" for name, change in self.changes.items())))

    def arguments(self) -> dict[str, Any]:
        arguments = OpCase(self.op, self.variant).arguments()
        for name, change in self.changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return arguments


def change(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    function.__name__ = name
    return function


# Ways to spoil a tensor. Their names stand in the test ids.
on_meta = change("on_meta", lambda x: x.to("meta"))
without_last_dim = change("without_last_dim", lambda x: x[..., 0])
one_row_less = change("one_row_less", lambda x: x[:-1])
one_column_less = change("one_column_less", lambda x: x[..., :-1])
without_heads = change("without_heads", lambda x: x[:, :0])
without_columns = change("without_columns", lambda x: x[..., :0])
without_rows = change("without_rows", lambda x: x[:0])
as_double = change("as_double", lambda x: x.double())
as_float = change("as_float", lambda x: x.float())
as_half = change("as_half", lambda x: x.half())
as_fp8 = change("as_fp8", lambda x: x.to(E4M3FN))
as_bytes = change("as_bytes", lambda x: x.view(torch.uint8))
last_dim_strided = change("last_dim_strided", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2])
rows_with_gaps = change("rows_with_gaps", lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]])
one_block_repeated = change("one_block_repeated", lambda x: x[:1].expand(x.shape))
blocks_without_tokens = change("blocks_without_tokens", lambda x: x[:, :0])
first_block = change("first_block", lambda x: x[0])
two_heads = change("two_heads", lambda x: x[:, :2])
six_columns = change("six_columns", lambda x: x[..., :6])
as_column = change("as_column", lambda x: x[:, None])
as_row = change("as_row", lambda x: x[None])
as_matrix = change("as_matrix", lambda x: x.view(5, 11))
flattened = change("flattened", lambda x: x.flatten())


def rows_of_bytes(width: int) -> Callable[[Tensor], Tensor]:
    return change(f"rows_of_{width}_bytes", lambda x: x.new_zeros((*x.shape[:2], width), dtype=torch.uint8))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def errors(op: str, variant: str, *rows: tuple[str, Any, str]) -> list[Error]:
    """One error per row: an argument, its change, and the message."""
    return [Error(op, variant, {name: change}, message) for name, change, message in rows]


def device_errors(op: str, variant: str, first: str, *others: str) -> list[Error]:
    """Each of `others` on another device than `first`."""
    return [
        Error(op, variant, {name: on_meta}, rf"{name}: expected on cpu as {first} is, got meta; move it there")
        for name in others
    ]


def integer_errors(op: str, variant: str, *names: str) -> list[Error]:
    """Floats where integers are due: an index that went through arithmetic."""
    return [
        Error(op, variant, {name: as_float}, rf"{name}: expected dtype int32 or int64, got float32") for name in names
    ]


CACHES = ("kv_cache", "index_cache")
FLOATS = "float32 or bfloat16 or float16"
FLOATS_OR_FP8 = rf"{FLOATS} or float8_e4m3fn or float8_e4m3fnuz"
SHAPE_5 = r"with T=5, got \(4,\)"


def rotation_errors(op: str, variant: str) -> list[Error]:
    """What `rotary_embedding` says, and the fused operator in its place."""
    return [
        *errors(
            op,
            variant,
            ("q_pe", without_last_dim, r"q_pe: expected shape \[T, H, R\] with T=5, R=8, got \(5, 3\)"),
            ("q_pe", one_column_less, r"q_pe: expected shape \[T, H, R\] with T=5, R=8, got \(5, 3, 7\)"),
            ("q_pe", one_row_less, r"q_pe: expected shape \[T, H, R\] with T=5, R=8, got \(4, 3, 8\)"),
            ("q_pe", as_double, rf"q_pe: expected dtype {FLOATS}, got float64"),
            ("k_pe", as_half, r"k_pe: expected dtype bfloat16, got float16"),
            ("k_pe", without_last_dim, r"k_pe: expected shape \[T, R\] with R=8, got \(5,\)"),
            ("k_pe", one_row_less, r"k_pe: expected at least T=5 rows, as many as positions, got \(4, 8\)"),
            ("positions", as_column, r"positions: expected shape \[T\], got \(5, 1\)"),
            ("cos_sin_cache", one_column_less, r"cos_sin_cache: expected an even width R .*got \(32, 7\)"),
            ("cos_sin_cache", six_columns, r"q_pe: expected shape .*R=6, got \(5, 3, 8\)"),
            ("cos_sin_cache", without_last_dim, r"cos_sin_cache: expected shape \[P, R\], got \(32,\)"),
            ("cos_sin_cache", as_double, rf"cos_sin_cache: expected dtype {FLOATS}, got float64"),
            ("cos_sin_cache", without_rows, r"cos_sin_cache rows P: expected at least 1, got 0"),
        ),
        *integer_errors(op, variant, "positions"),
    ]


def query_errors(op: str, variant: str) -> list[Error]:
    """What `concat_mla_q` says, and the fused operator in its place."""
    return [
        *errors(
            op,
            variant,
            ("q_nope", without_last_dim, r"q_nope: expected shape \[T, H, L\], got \(5, 3\)"),
            ("q_nope", as_double, rf"q_nope: expected dtype {FLOATS}, got float64"),
            ("q_nope", as_fp8, rf"q_nope: expected dtype {FLOATS}, got float8_e4m3fn"),
            ("q_nope", as_half, r"q_pe: expected dtype float16, got bfloat16"),
            ("q_nope", two_heads, r"q_pe: expected shape \[T, H, R\] with T=5, H=2, got \(5, 3, 8\)"),
        ),
        Error(op, variant, {"q_scale": 0.5}, r"q_scale", RuntimeError),
        *errors(
            op,
            variant,
            ("q_scale", ones(3), r"q_scale: expected a one-element float32 tensor, got \(3,\)"),
            ("q_scale", ones(1, dtype=torch.float64), r"q_scale: expected a one-element .*\(1,\) torch.float64"),
            ("q_dtype", torch.float32, r"q_dtype: expected None, torch.bfloat16 .*got torch.float32"),
            ("q_dtype", torch.float8_e5m2, r"q_dtype: expected None.*got torch.float8_e5m2"),
        ),
    ]


def kv_write_errors(op: str) -> list[Error]:
    """What `concat_and_cache_mla` says, and the fused operator in its place."""
    bf16, fp8 = "bf16", {"concat_and_cache_mla": "e4m3fn"}.get(op, "e4m3fn-q8")
    raw = {"concat_and_cache_mla": "uint8-e4m3fn"}.get(op, "uint8-e4m3fnuz-q8")
    rows656 = {"concat_and_cache_mla": "rows656"}.get(op, "rows656-neox")
    return [
        *errors(
            op,
            bf16,
            ("kv_c", without_last_dim, r"kv_c: expected shape \[T, L\], got \(5,\)"),
            ("kv_c", as_half, r"(k_pe: expected dtype float16, got bfloat16)"),
            ("kv_c", as_double, rf"kv_c: expected dtype {FLOATS}, got float64"),
            ("kv_c", one_row_less, r"kv_c: expected at least T=5 rows, as many as slot_mapping, got \(4, 24\)"),
            ("kv_cache", first_block, r"kv_cache: expected shape \[NB, BS, row\], got \(8, 32\)"),
            ("kv_cache", one_column_less, r"kv_cache: expected rows of W = L \+ R = 32, got \(5, 8, 31\)"),
            ("kv_cache", without_rows, r"kv_cache blocks NB: expected at least 1, got 0"),
            ("kv_cache", blocks_without_tokens, r"kv_cache block size BS: expected at least 1, got 0"),
            ("kv_cache", as_double, r"kv_cache: expected fp32, bf16, fp16, an fp8 dtype or uint8, got torch.float64"),
            ("kv_cache", last_dim_strided, r"kv_cache: expected rows with stride 1 .*got strides \(512, 64, 2\)"),
            ("kv_cache", one_block_repeated, r"kv_cache: expected a place for every row, got strides \(0, 32, 1\)"),
            ("slot_mapping", as_column, r"slot_mapping: expected shape \[T\].*, got \(5, 1\)"),
        ),
        *errors(
            op,
            raw,
            (
                "kv_cache",
                rows_of_bytes(660),
                r"kv_cache: expected rows of .*656 bytes \(fp8_ds_mla\), got \(5, 8, 660\)",
            ),
            ("kv_cache", rows_of_bytes(656), r"kv_cache: rows of 656 bytes hold a latent of 512 .*24.*8"),
        ),
        *errors(
            op,
            rows656,
            ("kv_cache", rows_of_bytes(660), r"kv_cache: expected rows of .*656 bytes .*got \(5, 8, 660\)"),
        ),
        *errors(
            op,
            raw,
            ("fp8_dtype", torch.float8_e5m2, r"fp8_dtype: expected torch.float8_e4m3fn or .*got torch.float8_e5m2"),
        ),
        *errors(
            op,
            fp8,
            ("fp8_dtype", E4M3FNUZ, r"fp8_dtype: kv_cache is torch.float8_e4m3fn.*fp8_dtype=torch.float8_e4m3fnuz"),
        ),
        *errors(
            op,
            bf16,
            ("fp8_dtype", E4M3FN, r"fp8_dtype: kv_cache is torch.bfloat16.*fp8_dtype=torch.float8_e4m3fn"),
        ),
        *errors(
            op,
            fp8,
            ("kv_scale", ones(2), r"kv_scale: expected a one-element float32 tensor, got \(2,\)"),
            ("kv_scale", ones(1, dtype=torch.float16), r"kv_scale: expected a one-element .*torch.float16"),
        ),
        *integer_errors(op, bf16, "slot_mapping"),
    ]


def index_cache_errors(op: str) -> list[Error]:
    """What operators say about an indexer cache."""
    return [
        *errors(
            op,
            "bf16",
            ("index_cache", first_block, r"index_cache: expected shape \[NB, BS, row\], got \(8, 16\)"),
            ("index_cache", last_dim_strided, r"index_cache: expected rows with stride 1 .*\(256, 32, 2\)"),
            ("index_cache", one_block_repeated, r"index_cache: expected a place for every row, got strides \(0, "),
            ("index_cache", without_rows, r"index_cache blocks NB: expected at least 1, got 0"),
            ("index_cache", blocks_without_tokens, r"index_cache block size BS: expected at least 1, got 0"),
            ("index_cache", as_double, r"index_cache: expected fp32, bf16 or fp16 .*got torch.float64"),
            ("index_cache", as_fp8, r"index_cache: expected fp32, bf16 or fp16 .*uint8.*got torch.float8_e4m3fn"),
            ("fp8_dtype", E4M3FN, r"fp8_dtype: index_cache is torch.bfloat16.*fp8_dtype=torch.float8_e4m3fn"),
        ),
        *errors(
            op,
            "e4m3fn",
            (
                "index_cache",
                rows_with_gaps,
                r"index_cache: expected blocks without gaps, stride\(1\) == 20, got strides",
            ),
            ("index_cache", one_column_less, r"index_cache: expected blocks without gaps, stride\(1\) == 19, got"),
            ("index_cache", rows_of_bytes(4), r"index_cache: expected .*uint8 \[NB, BS, D \+ 4\].*got torch.uint8"),
            ("fp8_dtype", torch.float8_e5m2, r"fp8_dtype: expected torch.float8_e4m3fn or .*float8_e5m2"),
        ),
    ]


def head_dim_errors(op: str, key: str) -> list[Error]:
    """`key` has another head dim than the indexer cache."""
    return [
        Error(op, "bf16", {"index_cache": one_column_less}, rf"{key}: expected shape .*D=15, got \("),
        Error(op, "e4m3fn", {"index_cache": rows_of_bytes(24)}, rf"{key}: expected shape .*D=20, got \("),
    ]


def scoring_errors(op: str) -> list[Error]:
    """What the operators that score paged keys say."""
    return [
        *device_errors(op, "bf16", "q", "index_cache", "weights", "row_ends", "block_table", "req_id"),
        *index_cache_errors(op),
        *head_dim_errors(op, "q"),
        *errors(
            op,
            "bf16",
            ("q", without_last_dim, r"q: expected shape \[T, I, D\] with D=16, got \(5, 4\)"),
            ("q", as_double, rf"q: expected dtype {FLOATS_OR_FP8}, got float64"),
            ("weights", one_column_less, r"weights: expected shape \[T, I\] with T=5, I=4, got \(5, 3\)"),
            ("weights", as_fp8, rf"weights: expected dtype {FLOATS}, got float8_e4m3fn"),
            ("row_ends", one_row_less, rf"row_ends: expected shape \[T\] {SHAPE_5}"),
            ("req_id", one_row_less, rf"req_id: expected shape \[T\] {SHAPE_5}"),
            ("block_table", without_last_dim, r"block_table: expected shape \[S, MB\], got \(2,\)"),
            ("max_len", 0, r"max_len: expected at least 1, got 0"),
        ),
        *integer_errors(op, "bf16", "row_ends", "req_id", "block_table"),
    ]


FUSED = "fused_qk_rope_concat_and_cache_mla"
BF16_CACHE_FP8_DOT = r"kv_cache: expected an fp8 cache for an fp8 query or dot_precision='fp8', got torch.bfloat16"

ERRORS: tuple[Error, ...] = (
    *device_errors("rotary_embedding", "bf16", "q_pe", "k_pe", "positions", "cos_sin_cache"),
    *rotation_errors("rotary_embedding", "bf16"),
    *errors(
        "rotary_embedding",
        "bf16",
        ("k_pe", one_column_less, r"k_pe: expected shape \[T, R\] with R=8, got \(5, 7\)"),
    ),
    *device_errors("concat_mla_q", "e4m3fn", "q_nope", "q_pe", "q_scale"),
    *query_errors("concat_mla_q", "bf16"),
    *errors(
        "concat_mla_q",
        "bf16",
        ("q_pe", one_row_less, r"q_pe: expected shape \[T, H, R\] with T=5, H=3, got \(4, 3, 8\)"),
        ("q_pe", without_last_dim, r"q_pe: expected shape \[T, H, R\] with T=5, H=3, got \(5, 3\)"),
    ),
    *device_errors("concat_and_cache_mla", "e4m3fn", "kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_scale"),
    *kv_write_errors("concat_and_cache_mla"),
    *errors(
        "concat_and_cache_mla",
        "bf16",
        ("k_pe", without_last_dim, r"k_pe: expected shape \[T, R\], got \(5,\)"),
        ("k_pe", one_row_less, r"k_pe: expected at least T=5 rows, as many as slot_mapping"),
    ),
    *device_errors(FUSED, "e4m3fn-q8", "q_pe", "k_pe", "positions", "cos_sin_cache"),
    *device_errors(FUSED, "e4m3fn-q8", "q_nope", "q_scale"),
    *device_errors(FUSED, "e4m3fn-q8", "kv_c", "slot_mapping", "kv_cache", "kv_scale"),
    *rotation_errors(FUSED, "bf16"),
    *query_errors(FUSED, "bf16"),
    *kv_write_errors(FUSED),
    *errors(
        FUSED,
        "bf16",
        ("slot_mapping", one_row_less, r"slot_mapping: expected shape \[T\] with T=5, got \(4,\)"),
    ),
    Error(
        FUSED,
        "bf16",
        {"kv_c": one_column_less, "kv_cache": one_column_less},
        r"kv_c: expected shape \[T, L\] with L=24, got \(5, 23\)",
    ),
    *device_errors("sparse_mla_fwd", "e4m3fn-q8-lse", "q", "kv_cache", "indices", "q_scale", "kv_scale"),
    *device_errors("sparse_mla_fwd", "bf16-int64-lengths-sink-lse", "q", "topk_length", "attn_sink"),
    *device_errors("sparse_mla_fwd", "bf16-flat", "q", "indptr"),
    *integer_errors("sparse_mla_fwd", "bf16-int64-lengths-sink-lse", "indices", "topk_length"),
    *integer_errors("sparse_mla_fwd", "bf16-flat", "indptr"),
    *errors(
        "sparse_mla_fwd",
        "bf16",
        ("q", without_last_dim, r"q: expected shape \[T, H, W\], got \(5, 3\)"),
        ("q", as_double, rf"q: expected dtype {FLOATS_OR_FP8}, got float64"),
        ("q", without_heads, r"q heads H: expected at least 1, got 0"),
        ("q", one_column_less, r"kv_cache: expected rows of W = L \+ R = 31, got \(5, 8, 32\)"),
        ("kv_lora_rank", 33, r"q: expected rows of W ≥ L = 33, got \(5, 3, 32\)"),
        ("kv_lora_rank", 0, r"kv_lora_rank: expected at least 1, got 0"),
        ("softmax_scale", 0.0, r"softmax_scale: expected a positive finite number, got 0.0"),
        ("softmax_scale", -0.1, r"softmax_scale: expected a positive finite number, got -0.1"),
        ("softmax_scale", math.inf, r"softmax_scale: expected a positive finite number, got inf"),
        ("softmax_scale", math.nan, r"softmax_scale: expected a positive finite number, got nan"),
        ("kv_cache", last_dim_strided, r"kv_cache: expected rows with stride 1 in the last"),
        ("kv_cache", first_block, r"kv_cache: expected shape \[NB, BS, row\], got \(8, 32\)"),
        ("kv_cache", without_rows, r"kv_cache blocks NB: expected at least 1, got 0"),
        ("kv_cache", as_double, r"kv_cache: expected fp32, .* or uint8, got torch.float64"),
        ("indices", one_row_less, r"indices: expected shape \[T, K\] with T=5, got \(4, 11\)"),
        ("indices", flattened, r"indices: expected shape \[T, K\] with T=5, got \(55,\)"),
        ("indices", without_columns, r"indices width K: expected at least 1, got 0"),
        ("max_topk", 11, r"max_topk: it bounds the rows of flat indices; pass indptr too"),
        ("topk_length", ones(4, dtype=torch.int32), r"topk_length: expected shape \[T\] with T=5, got \(4,\)"),
        ("attn_sink", ones(4), r"attn_sink: expected shape \[H\] with H=3, got \(4,\)"),
        ("attn_sink", ones(3, dtype=torch.bfloat16), r"attn_sink: expected dtype float32, got bfloat16"),
        ("q_scale", ones(3), r"q_scale: expected a one-element float32 tensor, got \(3,\)"),
        ("phase", "mixed", r"phase: expected 'decode' or 'prefill', got 'mixed'"),
        ("dot_precision", "fp8", BF16_CACHE_FP8_DOT),
        ("q", as_fp8, BF16_CACHE_FP8_DOT),
    ),
    *errors(
        "sparse_mla_fwd",
        "rows656",
        ("kv_cache", rows_of_bytes(660), r"kv_cache: expected rows of .*656 bytes .*got \(5, 8, 660\)"),
        ("kv_lora_rank", 448, r"kv_cache: rows of 656 bytes hold a latent of 512 .*448"),
    ),
    *errors(
        "sparse_mla_fwd",
        "e4m3fn",
        ("fp8_dtype", E4M3FNUZ, r"fp8_dtype: kv_cache is torch.float8_e4m3fn.*e4m3fnuz"),
        ("kv_scale", ones(1, dtype=torch.int32), r"kv_scale: expected a one-element .*torch.int32"),
        ("dot_precision", "fp16", r"dot_precision: expected None or 'bf16' or 'fp8', got 'fp16'"),
    ),
    *errors(
        "sparse_mla_fwd",
        "bf16-flat",
        ("indices", as_matrix, r"indices: expected shape \[nnz\], got \(5, 11\)"),
        ("indptr", one_row_less, r"indptr: expected shape \[T\+1\] with T\+1=6, got \(5,\)"),
        ("max_topk", None, r"max_topk: expected a bound on the length of a row.*got None"),
        ("max_topk", 0, r"max_topk: expected at least 1, got 0"),
        ("topk_length", ones(5, dtype=torch.int32), r"topk_length: flat indices have their lengths in indptr"),
    ),
    *device_errors("indexer_k_quant_and_cache", "e4m3fn", "k", "index_cache", "slot_mapping"),
    *integer_errors("indexer_k_quant_and_cache", "bf16", "slot_mapping"),
    *index_cache_errors("indexer_k_quant_and_cache"),
    *head_dim_errors("indexer_k_quant_and_cache", "k"),
    *errors(
        "indexer_k_quant_and_cache",
        "bf16",
        ("k", without_last_dim, r"k: expected shape \[T, D\] with D=16, got \(5,\)"),
        ("k", as_fp8, rf"k: expected dtype {FLOATS}, got float8_e4m3fn"),
        ("k", one_row_less, r"k: expected at least T=5 rows, as many as slot_mapping, got \(4, 16\)"),
        ("slot_mapping", as_row, r"slot_mapping: expected shape \[T\], got \(1, 5\)"),
    ),
    *errors(
        "indexer_k_quant_and_cache",
        "e4m3fn",
        ("scale_format", "e8m0", r"scale_format: expected 'ue8m0' or 'fp32', got 'e8m0'"),
    ),
    *device_errors("indexer_q_rope_quant", "bf16", "q", "positions", "cos_sin_cache", "weights"),
    Error("indexer_q_rope_quant", "bf16", {"q": without_heads}, r"q heads I: expected at least 1, got 0"),
    Error("indexer_q_rope_quant", "bf16", {"q": without_columns}, r"q head dim D: expected at least 1, got 0"),
    *integer_errors("indexer_q_rope_quant", "bf16", "positions"),
    *errors(
        "indexer_q_rope_quant",
        "bf16",
        ("q", without_last_dim, r"q: expected shape \[T, I, D\], got \(5, 4\)"),
        ("q", as_fp8, rf"q: expected dtype {FLOATS}, got float8_e4m3fn"),
        ("positions", one_row_less, rf"positions: expected shape \[T\] {SHAPE_5}"),
        ("weights", one_column_less, r"weights: expected shape \[T, I\] with T=5, I=4, got \(5, 3\)"),
        ("weights", as_double, rf"weights: expected dtype {FLOATS}, got float64"),
        ("cos_sin_cache", one_column_less, r"cos_sin_cache: expected an even width R .*\(32, 7\)"),
        ("cos_sin_cache", ones(32, 18), r"cos_sin_cache: expected R ≤ D = 16.*got \(32, 18\)"),
        ("q_dtype", torch.float16, r"q_dtype: expected None, torch.bfloat16 .*got torch.float16"),
    ),
    *device_errors("gather_indexer_k_cache", "bf16", "index_cache", "block_table", "cu_seq_lens"),
    *integer_errors("gather_indexer_k_cache", "bf16", "block_table", "cu_seq_lens"),
    *index_cache_errors("gather_indexer_k_cache"),
    *errors(
        "gather_indexer_k_cache",
        "bf16",
        ("block_table", without_last_dim, r"block_table: expected shape \[S, MB\], got \(2,\)"),
        ("cu_seq_lens", one_row_less, r"cu_seq_lens: expected shape \[S\+1\] with S\+1=3, got \(2,\)"),
        ("rows", -1, r"rows: expected at least 0, got -1"),
    ),
    *device_errors("mqa_logits", "e4m3fn", "q", "k", "weights", "row_starts", "row_ends", "k_scale"),
    *integer_errors("mqa_logits", "bf16", "row_starts", "row_ends"),
    *errors(
        "mqa_logits",
        "bf16",
        ("q", without_last_dim, r"q: expected shape \[T, I, D\], got \(5, 4\)"),
        ("q", as_double, rf"q: expected dtype {FLOATS_OR_FP8}, got float64"),
        ("k", one_column_less, r"k: expected shape \[N, D\] with D=16, got \(23, 15\)"),
        ("k", as_bytes, r"k: expected shape \[N, D\] with D=16, got \(23, 32\)"),
    ),
    *errors(
        "mqa_logits",
        "e4m3fn",
        ("k", as_bytes, rf"k: expected dtype {FLOATS_OR_FP8}, got uint8"),
    ),
    *errors(
        "mqa_logits",
        "bf16",
        ("weights", one_row_less, r"weights: expected shape \[T, I\] with T=5, I=4, got \(4, 4\)"),
        ("weights", as_double, rf"weights: expected dtype {FLOATS}, got float64"),
        ("row_starts", one_row_less, rf"row_starts: expected shape \[T\] {SHAPE_5}"),
        ("row_ends", one_row_less, rf"row_ends: expected shape \[T\] {SHAPE_5}"),
    ),
    *errors(
        "mqa_logits",
        "e4m3fn",
        ("k_scale", one_row_less, r"k_scale: expected shape \[N\] with N=23, got \(22,\)"),
        ("k_scale", as_half, r"k_scale: expected dtype float32, got float16"),
    ),
    *scoring_errors("paged_mqa_logits"),
    *device_errors("top_k_per_row", "fp32", "logits", "row_starts", "row_ends"),
    *integer_errors("top_k_per_row", "fp32", "row_starts", "row_ends"),
    *errors(
        "top_k_per_row",
        "fp32",
        ("logits", without_last_dim, r"logits: expected shape \[T, N\], got \(5,\)"),
        ("logits", as_half, r"logits: expected dtype float32, got float16"),
        ("row_starts", one_row_less, rf"row_starts: expected shape \[T\] {SHAPE_5}"),
        ("row_ends", one_row_less, rf"row_ends: expected shape \[T\] {SHAPE_5}"),
        ("k", 0, r"k: expected at least 1, got 0"),
    ),
    *device_errors("convert_req_index_to_global_index", "int32", "token_indices", "req_id", "block_table"),
    *integer_errors("convert_req_index_to_global_index", "int32", "req_id", "block_table", "token_indices"),
    *errors(
        "convert_req_index_to_global_index",
        "int32",
        ("req_id", one_row_less, rf"req_id: expected shape \[T\] {SHAPE_5}"),
        ("block_table", without_last_dim, r"block_table: expected shape \[S, MB\], got \(2,\)"),
        ("token_indices", flattened, r"token_indices: expected shape \[T, K\], got \(55,\)"),
        ("token_indices", without_columns, r"token_indices width K: expected at least 1, got 0"),
        ("block_size", 0, r"block_size: expected at least 1, got 0"),
    ),
    *scoring_errors("sparse_attn_indexer"),
    *errors(
        "sparse_attn_indexer",
        "bf16",
        ("k", 0, r"k: expected at least 1, got 0"),
        ("logits_budget_bytes", 0, r"logits_budget_bytes: expected at least 1, got 0"),
    ),
    *(
        Error(case.op, case.variant, {"backend": "cutlass"}, r"backend: unknown backend 'cutlass'; this version has: ")
        for case in testing.PLAIN_CASES
    ),
)


def by_id(error: Error) -> str:
    return str(error)


def test_table_reaches_every_operator() -> None:
    assert {error.op for error in ERRORS} == set(registry.op_names())


@pytest.mark.parametrize("error", ERRORS, ids=by_id)
def test_wrong_argument_is_named_and_nothing_is_written(error: Error) -> None:
    arguments = error.arguments()
    before = testing.copy_arguments({name: x for name, x in arguments.items() if name in CACHES and not x.is_meta})
    with pytest.raises(error.exception, match=error.message):
        OpCase(error.op, error.variant).function(**arguments)
    for name, cache in before.items():
        assert testing.same_bits(arguments[name], cache), f"{name} was written"


# What is no ValueError is refused by PyTorch's dispatcher, from the schema.
@pytest.mark.parametrize("error", [error for error in ERRORS if error.exception is ValueError], ids=by_id)
def test_explain_refuses_what_the_operator_refuses(error: Error) -> None:
    with pytest.raises(ValueError, match=error.message):
        registry.explain(error.op, **error.arguments())


# The message has to survive Dynamo, which wraps the exception of a fake in its own. The same function raises it
# whatever the check, so a few of each operator will do.
COMPILED = tuple(error for op in registry.op_names() for error in [e for e in ERRORS if e.op == op][::7])


@pytest.mark.parametrize("error", COMPILED, ids=by_id)
def test_message_survives_compilation(error: Error) -> None:
    arguments = error.arguments()
    before = testing.copy_arguments({name: x for name, x in arguments.items() if name in CACHES and not x.is_meta})
    with pytest.raises(Exception, match=error.message):
        testing.compile_and_count(
            OpCase(error.op, error.variant).function, [arguments], backend="aot_eager", fullgraph=True
        )
    for name, cache in before.items():
        assert testing.same_bits(arguments[name], cache), f"{name} was written"


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("case", testing.PLAIN_CASES, ids=str)
def test_unknown_backend_is_an_error_whatever_the_rows(case: OpCase, tokens: int) -> None:
    with pytest.raises(ValueError, match="backend: unknown backend 'cutlass'"):
        case.function(**case.arguments(tokens), backend="cutlass")


@pytest.mark.parametrize(
    "case", testing.cases_of(*(op for op in registry.op_names() if testing.mutated_arguments(op))), ids=str
)
def test_cache_is_untouched_when_no_backend_can_run(case: OpCase) -> None:
    arguments = case.arguments()
    before = testing.copy_arguments(arguments)
    with (
        testing.backends_replaced(),
        pytest.raises(registry.BackendUnavailable, match=f"{case.op}: no backend can run"),
    ):
        case.function(**arguments)
    for name in testing.mutated_arguments(case.op):
        assert testing.same_bits(arguments[name], before[name])
