"""The reference backend against plain Python loops and values worked out by hand.

It is the oracle for every other backend, so here it has to answer to something slower and more obvious than itself: one
loop per operator, in Python floats, with caches as lists of rows. How a row is stored is taken from `formats`, which
test_formats.py checks byte by byte; what is tested here is which rows are read and written, and the arithmetic.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparse_mla_ops
from sparse_mla_ops import formats
from sparse_mla_ops.backends import reference

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
INF, NAN, LN3, LN4 = math.inf, math.nan, math.log(3), math.log(4)
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

encodings = pytest.mark.parametrize("encoding", [FN, FNUZ], ids=["e4m3fn", "e4m3fnuz"])
rope_styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
dtypes = pytest.mark.parametrize("dtype", formats.FLOAT_DTYPES, ids=["fp32", "bf16", "fp16"])
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25, deadline=None)
many = settings(max_examples=150, deadline=None)


# ----------------------------------------------------------------------------------------------------------------------
# Data


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*shape: int, seed: int = 0, largest: int = 3) -> Tensor:
    """Small whole numbers in fp32: sums of their products are exact, in any order and in fp8 too."""
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def as_bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(-1).view(torch.uint8).tolist())


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bytes: tells −0 from +0, and lets a NaN equal itself."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert as_bytes(actual) == as_bytes(expected)


def assert_equal(actual: Tensor, expected: Any) -> None:
    """Equal numbers; `expected` may be nested lists."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Largest relative L2 error over (row, head). A row that must be 0 counts as wrong by its own size."""
    error = (actual.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    return (error / torch.where(size == 0, 1.0, size)).max().item()


def every_other(x: Tensor) -> Tensor:
    """The same values with stride 2 in the last dimension, and other values in between."""
    return torch.stack((x, torch.ones_like(x)), -1)[..., 0]


def permuted(x: Tensor) -> Tensor:
    """The same values, dense, with the first and the last dimension swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


index_types = pytest.mark.parametrize(
    "index",
    [
        lambda values: torch.tensor(values, dtype=torch.int32),
        lambda values: torch.tensor(values, dtype=torch.int64),
        lambda values: every_other(torch.tensor(values, dtype=torch.int32)),
        lambda values: every_other(torch.tensor(values, dtype=torch.int64)),
    ],
    ids=["int32", "int64", "int32_strided", "int64_strided"],
)


# ----------------------------------------------------------------------------------------------------------------------
# Caches


class KVCase(NamedTuple):
    """A KV layout: the tensor's dtype, the encoding of raw bytes, and what a row holds."""

    name: str
    dtype: torch.dtype
    fp8_dtype: torch.dtype | None = None
    kv_lora_rank: int = 12
    rope_dim: int = 4

    @property
    def is_ds_mla(self) -> bool:
        return self.kv_lora_rank == 512

    @property
    def width(self) -> int:
        return 656 if self.is_ds_mla else self.kv_lora_rank + self.rope_dim

    def empty(self, num_blocks: int, block_size: int) -> Tensor:
        return torch.zeros(num_blocks, block_size, self.width, dtype=self.dtype)

    def layout(self, cache: Tensor) -> formats.KVLayout:
        return formats.kv_cache_layout(cache, self.kv_lora_rank, self.rope_dim, self.fp8_dtype)

    def pack(self, rows: Tensor, kv_scale: float = 1.0) -> Tensor:
        """A cache that holds rows [NB, BS, L + R]."""
        cache = self.empty(rows.shape[0], rows.shape[1])
        kv_c, k_pe = rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]
        return formats.encode_kv_rows(kv_c, k_pe, self.layout(cache), scalar(kv_scale)).view(self.dtype)

    def real_rows(self, cache: Tensor, kv_scale: float = 1.0) -> list[list[float]]:
        """The real values of each slot."""
        parts = formats.unpack_kv_cache(cache, self.kv_lora_rank, self.rope_dim, kv_scale, self.fp8_dtype)
        return torch.cat(parts, -1).flatten(0, 1).tolist()


KV_CASES = [
    KVCase("fp32", torch.float32),
    KVCase("bf16", torch.bfloat16),
    KVCase("fp16", torch.float16),
    KVCase("e4m3fn", FN),
    KVCase("e4m3fnuz", FNUZ),
    KVCase("uint8", torch.uint8),
    KVCase("uint8_as_e4m3fnuz", torch.uint8, FNUZ),
    KVCase("ds_mla", torch.uint8, kv_lora_rank=512, rope_dim=64),
    KVCase("ds_mla_e4m3fnuz", torch.uint8, FNUZ, kv_lora_rank=512, rope_dim=64),
]
KV_CASES += [case._replace(name=f"{case.name}_no_rope", rope_dim=0) for case in KV_CASES]
FP32_KV, BF16_KV, FN_KV, DS_MLA_KV = KV_CASES[0], KV_CASES[1], KV_CASES[3], KV_CASES[7]


def kv_cases(*cases: KVCase) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


class IndexCase(NamedTuple):
    """An indexer cache layout: `dtype` of the stored keys; fp8 keys lie in a uint8 tensor with their scales."""

    name: str
    dtype: torch.dtype
    scale_format: str = "ue8m0"

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        return self.dtype if self.dtype in formats.FP8_MAX else None

    def pack(self, k: Tensor) -> Tensor:
        return formats.pack_index_cache(k, self.dtype, self.scale_format)

    def real_rows(self, cache: Tensor) -> list[list[float]]:
        return formats.unpack_index_cache(cache, self.fp8_dtype).flatten(0, 1).tolist()


INDEX_CASES = [
    IndexCase("fp32", torch.float32),
    IndexCase("bf16", torch.bfloat16),
    IndexCase("fp16", torch.float16),
    IndexCase("e4m3fn", FN),
    IndexCase("e4m3fnuz", FNUZ),
    IndexCase("e4m3fn_fp32_scale", FN, "fp32"),
    IndexCase("e4m3fnuz_fp32_scale", FNUZ, "fp32"),
]
# Whole numbers are kept exactly by these: a power-of-two scale moves the exponent only.
EXACT_INDEX_CASES = INDEX_CASES[:5]


def index_cases(*cases: IndexCase) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


PITCHES = ("contiguous", "slab", "slab_with_gaps")


def with_pitch(cache: Tensor, pitch: str) -> tuple[Tensor, Tensor]:
    """(all memory, the cache in it): contiguous, layer 1 of a slab of 3, or that with gaps between rows as well.

    What lies around the cache is bytes 0xFF: NaN, in every dtype but e4m3fnuz.
    """
    num_blocks, block_size, width = cache.shape
    layers, gap = (1 if pitch == "contiguous" else 3), (5 if pitch == "slab_with_gaps" else 0)
    memory = cache.new_empty(num_blocks, layers, block_size, width + gap)
    memory.view(torch.uint8).fill_(0xFF)
    view = memory[:, layers // 2, :, :width]
    view.copy_(cache)
    return memory, view


def after_writes(memory: Tensor, writes: dict[int, bytes]) -> bytes:
    """The bytes that `memory` should hold after `writes` (address → bytes), and nothing else, was done to it."""
    expected = bytearray(as_bytes(memory))
    for address, data in writes.items():
        expected[address : address + len(data)] = data
    return bytes(expected)


def row_address(cache: Tensor, slot: int) -> int:
    """Where the row of a slot begins, in bytes from the start of the memory that `cache` is a view of."""
    block, offset = divmod(slot, cache.shape[1])
    return (cache.storage_offset() + block * cache.stride(0) + offset * cache.stride(1)) * cache.element_size()


@st.composite
def slot_lists(draw: st.DrawFn, slots: int) -> list[int]:
    """Distinct slots in any order, with holes anywhere: negative ones and ones past the end."""
    holes = st.sampled_from([-1, -2, INT_MIN, slots, slots + 1, INT_MAX])
    entries = draw(st.lists(st.integers(0, slots - 1) | holes, min_size=1, max_size=2 * slots))
    return [entry for i, entry in enumerate(entries) if not (0 <= entry < slots and entry in entries[:i])]


# ----------------------------------------------------------------------------------------------------------------------
# Rotation


def rotate_by_loops(x: list[float], position: int, table: list[list[float]], is_neox: bool) -> list[float]:
    """One row; every fp32 operation rounded by itself. The caller rounds to the input's dtype."""
    row = table[min(max(position, 0), len(table) - 1)]
    half = len(x) // 2
    result = list(x)
    for i in range(half):
        cos, sin = row[i], row[half + i]
        first, second = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
        result[first] = fp32(fp32(x[first] * cos) - fp32(x[second] * sin))
        result[second] = fp32(fp32(x[second] * cos) + fp32(x[first] * sin))
    return result


@rope_styles
@index_types
@dtypes
def test_rotary_embedding_matches_loops_bit_for_bit(dtype, index, is_neox):
    positions = [3, 0, 6, 3, -1, 7, INT_MAX]
    q_pe, k_pe, table = randn(7, 3, 6, dtype=dtype), randn(7, 6, seed=1, dtype=dtype), randn(7, 6, seed=2, dtype=dtype)
    q_out, k_out = sparse_mla_ops.rotary_embedding(q_pe, k_pe, index(positions), table, is_neox)
    for t, position in enumerate(positions):
        for h in range(3):
            expected = rotate_by_loops(q_pe[t, h].tolist(), position, table.tolist(), is_neox)
            assert_same_bits(q_out[t, h], torch.tensor(expected).to(dtype))
        expected = rotate_by_loops(k_pe[t].tolist(), position, table.tolist(), is_neox)
        assert_same_bits(k_out[t], torch.tensor(expected).to(dtype))


@pytest.mark.parametrize(
    ("is_neox", "once", "twice"),
    [(True, [-3, 2, 1, 4], [-1, 2, -3, 4]), (False, [-2, 1, 3, 4], [-1, -2, 3, 4])],
    ids=["neox", "interleaved"],
)
def test_rotary_embedding_of_a_known_row(is_neox, once, twice):
    x, table, position = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([[0.0, 1.0, 1.0, 0.0]]), int32([0])
    q, k = sparse_mla_ops.rotary_embedding(x.view(1, 1, 4), x.view(1, 4), position, table, is_neox)
    assert q.flatten().tolist() == k.flatten().tolist() == once
    q, k = sparse_mla_ops.rotary_embedding(q, k, position, table, is_neox)
    assert q.flatten().tolist() == k.flatten().tolist() == twice


@rope_styles
def test_rotary_embedding_clamps_positions_to_the_table(is_neox):
    q_pe, k_pe, table = randn(4, 2, 6), randn(4, 6, seed=1), randn(5, 6, seed=2)
    outside = sparse_mla_ops.rotary_embedding(q_pe, k_pe, int32([-1, INT_MIN, 5, INT_MAX]), table, is_neox)
    clamped = sparse_mla_ops.rotary_embedding(q_pe, k_pe, int32([0, 0, 4, 4]), table, is_neox)
    for actual, expected in zip(outside, clamped):
        assert_same_bits(actual, expected)


def test_rotary_embedding_ignores_key_rows_beyond_the_positions():
    q_pe, k_pe, table = randn(2, 2, 4), randn(5, 4, seed=1), randn(3, 4, seed=2)
    k_pe[2:] = NAN
    _, k_out = sparse_mla_ops.rotary_embedding(q_pe, k_pe, int32([1, 2]), table, True)
    _, expected = sparse_mla_ops.rotary_embedding(q_pe, k_pe[:2], int32([1, 2]), table, True)
    assert_same_bits(k_out, expected)


@rope_styles
def test_rotary_embedding_of_no_rope_dims_is_empty(is_neox):
    q_out, k_out = sparse_mla_ops.rotary_embedding(
        torch.empty(2, 3, 0), torch.empty(2, 0), int32([0, 1]), torch.empty(4, 0), is_neox
    )
    assert q_out.shape == (2, 3, 0)
    assert k_out.shape == (2, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Query


@dtypes
@pytest.mark.parametrize("rope_dim", [4, 0])
def test_concat_mla_q_joins_and_ignores_the_scale_of_an_unquantised_query(dtype, rope_dim):
    q_nope, q_pe = randn(3, 2, 12, dtype=dtype), randn(3, 2, rope_dim, seed=1, dtype=dtype)
    for q_dtype in (None, dtype):
        q = sparse_mla_ops.concat_mla_q(q_nope, q_pe, scalar(0.5), q_dtype)
        assert_same_bits(q[..., :12], q_nope)
        assert_same_bits(q[..., 12:], q_pe)


@encodings
@dtypes
@pytest.mark.parametrize("q_scale", [None, 0.3], ids=["no_scale", "scale"])
def test_concat_mla_q_stores_quotients_in_fp8(dtype, encoding, q_scale):
    q_nope, q_pe = randn(3, 2, 12, dtype=dtype) * 300, randn(3, 2, 4, seed=1, dtype=dtype)
    q = sparse_mla_ops.concat_mla_q(q_nope, q_pe, None if q_scale is None else scalar(q_scale), encoding)
    divisor = 1.0 if q_scale is None else fp32(q_scale)
    for t in range(3):
        for h in range(2):
            row = [fp32(value / divisor) for value in q_nope[t, h].tolist() + q_pe[t, h].tolist()]
            assert_same_bits(q[t, h], formats.to_fp8(torch.tensor(row), encoding))
    assert q.float().abs().max() == formats.FP8_MAX[encoding]  # so the data did reach saturation


def test_concat_mla_q_takes_the_transposed_result_of_a_bmm():
    q, w_uk = randn(2, 5, 8), randn(2, 8, 12, seed=1)
    q_nope, q_pe = torch.bmm(q, w_uk).transpose(0, 1), randn(5, 2, 9, seed=2)[..., 3:7]
    assert not q_nope.is_contiguous()
    joined = sparse_mla_ops.concat_mla_q(q_nope, q_pe)
    assert joined.is_contiguous()
    for t in range(5):
        for h in range(2):
            assert joined[t, h].tolist() == q_nope[t, h].tolist() + q_pe[t, h].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# KV cache write


def kv_writes(
    case: KVCase, cache: Tensor, kv_c: Tensor, k_pe: Tensor, slots: list[int], kv_scale: float = 1.0
) -> dict[int, bytes]:
    """Address → bytes, for the tokens whose slot is in the cache."""
    writes = {}
    for token, slot in enumerate(slots):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            row = formats.encode_kv_rows(kv_c[token], k_pe[token], case.layout(cache), scalar(kv_scale))
            writes[row_address(cache, slot)] = as_bytes(row)
    return writes


@kv_cases(*KV_CASES)
@pytest.mark.parametrize("pitch", PITCHES)
@few
@given(slots=slot_lists(6), seed=seeds)
def test_concat_and_cache_mla_writes_its_slots_and_nothing_else(case, pitch, slots, seed):
    memory, cache = with_pitch(case.empty(2, 3), pitch)
    tokens = len(slots)
    kv_c, k_pe = randn(tokens, case.kv_lora_rank, seed=seed), randn(tokens, case.rope_dim, seed=seed + 1)
    expected = after_writes(memory, kv_writes(case, cache, kv_c, k_pe, slots, 0.3))
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, cache, int32(slots), scalar(0.3), case.fp8_dtype)
    assert as_bytes(memory) == expected


@dtypes
@kv_cases(BF16_KV, FN_KV, DS_MLA_KV)
def test_concat_and_cache_mla_takes_every_input_dtype(case, dtype):
    cache = case.empty(1, 4)
    kv_c, k_pe = randn(3, case.kv_lora_rank, dtype=dtype), randn(3, case.rope_dim, seed=1, dtype=dtype)
    expected = after_writes(cache, kv_writes(case, cache, kv_c, k_pe, [2, 0, 3]))
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, cache, int32([2, 0, 3]))
    assert as_bytes(cache) == expected


@index_types
@pytest.mark.parametrize(
    "slots",
    [
        [0, 1, -1, -1],  # −1 is a legal negative index of the last row
        [-1, -1, 5, 4],  # holes first: no valid row has been seen yet
        [-1, 0, -1, 2],
        [0, -1, -1, -1],  # slot 0, where a careless kernel sends the holes
        [-1, INT_MIN, 6, INT_MAX],  # nothing but holes
        [6, 5, 7, 0],
    ],
    ids=["padding_behind", "padding_ahead", "between", "slot_0_is_taken", "all_holes", "past_the_end"],
)
def test_concat_and_cache_mla_leaves_the_cache_alone_where_a_slot_is_a_hole(index, slots):
    cache = randn(2, 3, 16, seed=9)
    kv_c, k_pe = randn(4, 12), randn(4, 4, seed=1)
    expected = after_writes(cache, kv_writes(FP32_KV, cache, kv_c, k_pe, slots))
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, cache, index(slots))
    assert as_bytes(cache) == expected


@pytest.mark.parametrize("slot", [2**32, 2**40 + 1, -(2**40)], ids=["2^32", "above_2^40", "below_-2^40"])
def test_concat_and_cache_mla_does_not_wrap_a_slot_to_32_bits(slot):
    cache = randn(2, 3, 16, seed=9)
    before = as_bytes(cache)
    sparse_mla_ops.concat_and_cache_mla(randn(1, 12), randn(1, 4), cache, torch.tensor([slot]))
    assert as_bytes(cache) == before


def test_concat_and_cache_mla_ignores_rows_beyond_the_slots():
    cache = torch.zeros(2, 3, 16)
    kv_c, k_pe = randn(7, 12), randn(5, 4, seed=1)
    kv_c[2:], k_pe[2:] = NAN, NAN
    expected = after_writes(cache, kv_writes(FP32_KV, cache, kv_c, k_pe, [4, 1]))
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, cache, int32([4, 1]))
    assert as_bytes(cache) == expected


@kv_cases(BF16_KV, FN_KV, DS_MLA_KV)
def test_concat_and_cache_mla_takes_parts_of_wider_rows(case):
    # kv_c and k_pe are columns of projections, so their rows lie at pitches of their own.
    kv_c = randn(4, case.kv_lora_rank + 7)[:, 3:-4]
    k_pe = randn(4, case.rope_dim + 2, seed=1)[:, 1:-1]
    cache = case.empty(2, 3)
    expected = after_writes(cache, kv_writes(case, cache, kv_c, k_pe, [5, 0, -1, 2]))
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, cache, int32([5, 0, -1, 2]))
    assert as_bytes(cache) == expected


@kv_cases(BF16_KV, DS_MLA_KV)
def test_concat_and_cache_mla_ignores_the_scale_of_a_cache_that_has_none(case):
    plain, scaled = case.empty(1, 2), case.empty(1, 2)
    kv_c, k_pe = randn(2, case.kv_lora_rank), randn(2, case.rope_dim, seed=1)
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, plain, int32([0, 1]))
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, scaled, int32([0, 1]), scalar(7.0))
    assert_same_bits(scaled, plain)


def test_concat_and_cache_mla_scales_the_rope_part_like_the_latent():
    cache = torch.zeros(1, 1, 16, dtype=FN)
    sparse_mla_ops.concat_and_cache_mla(
        torch.full((1, 12), 3.0), torch.full((1, 4), 5.0), cache, int32([0]), scalar(0.5)
    )
    assert cache.float().flatten().tolist() == [6.0] * 12 + [10.0] * 4


SCALE_SHAPES = pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1)], ids=str)


@SCALE_SHAPES
def test_scales_may_have_any_one_element_shape(shape):
    scale = torch.full(shape, 0.5)
    cache, q_nope, q_pe = torch.zeros(1, 3, 16, dtype=FN), whole(3, 2, 12, seed=1), whole(3, 2, 4, seed=2)
    kv_c, k_pe = whole(3, 12, seed=3), whole(3, 4, seed=4)
    sparse_mla_ops.concat_and_cache_mla(kv_c, k_pe, cache, int32([2, 0, 1]), scale)
    assert_equal(cache[0, [2, 0, 1]].float(), torch.cat((kv_c, k_pe), -1) * 2)
    q = sparse_mla_ops.concat_mla_q(q_nope, q_pe, scale, FN)
    assert_equal(q.float(), torch.cat((q_nope, q_pe), -1) * 2)
    indices = int32([[0, 1], [1, 2], [2, -1]])
    out, _ = sparse_mla_ops.sparse_mla_fwd(q, cache, indices, 0.1, 12, q_scale=scale, kv_scale=scale)
    expected, _ = sparse_mla_ops.sparse_mla_fwd(q, cache, indices, 0.1, 12, q_scale=scalar(0.5), kv_scale=scalar(0.5))
    assert_same_bits(out, expected)


def test_rows_past_2_gib_are_written_and_read():
    # 2 GiB of address space of which a few pages are touched: block 1 begins where a 32-bit offset wraps.
    memory = torch.empty(2**31 + 4096, dtype=torch.uint8)
    cache = memory.as_strided((2, 2, 16), (2**31, 16, 1))
    sparse_mla_ops.concat_and_cache_mla(torch.full((1, 12), 2.0), torch.ones(1, 4), cache, int32([3]))
    expected = formats.to_fp8(torch.tensor([2.0] * 12 + [1.0] * 4), FN)
    assert as_bytes(memory[2**31 + 16 : 2**31 + 32]) == as_bytes(expected)
    out, _ = sparse_mla_ops.sparse_mla_fwd(torch.ones(1, 1, 16), cache, int32([[3]]), 1.0, 12)
    assert out.flatten().tolist() == [2.0] * 12


# ----------------------------------------------------------------------------------------------------------------------
# Fused


class FusedInputs(NamedTuple):
    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    slot_mapping: Tensor


def fused_inputs(case: KVCase, dtype: torch.dtype = torch.bfloat16) -> FusedInputs:
    """5 tokens with holes among their slots, positions outside the table, and key rows beyond them."""
    rank, rope = case.kv_lora_rank, case.rope_dim
    kv_c, k_pe = randn(8, rank, seed=3, dtype=dtype), randn(7, rope, seed=4, dtype=dtype)
    kv_c[5:], k_pe[5:] = NAN, NAN
    return FusedInputs(
        q_nope=randn(3, 5, rank, seed=1, dtype=dtype).transpose(0, 1),
        q_pe=randn(5, 3, rope, seed=2, dtype=dtype),
        kv_c=kv_c,
        k_pe=k_pe,
        positions=int32([4, 0, -3, 9, 100]),
        cos_sin_cache=randn(10, rope, seed=5),
        slot_mapping=int32([3, -1, 0, 6, 5]),
    )


def fused(inputs: FusedInputs, cache: Tensor, is_neox: bool, *args: Any) -> Tensor:
    q_nope, q_pe, kv_c, k_pe, positions, table, slots = inputs
    return sparse_mla_ops.fused_qk_rope_concat_and_cache_mla(
        q_nope, q_pe, kv_c, k_pe, positions, table, cache, slots, is_neox, *args
    )


@kv_cases(*KV_CASES)
@rope_styles
@pytest.mark.parametrize("q_dtype", [None, FN, FNUZ], ids=["q_unquantised", "q_e4m3fn", "q_e4m3fnuz"])
@dtypes
def test_fused_equals_split_bit_for_bit(case, is_neox, q_dtype, dtype):
    inputs, q_scale, kv_scale = fused_inputs(case, dtype), scalar(0.3), scalar(0.7)
    fused_memory, fused_cache = with_pitch(case.empty(2, 3), "slab")
    split_memory, split_cache = with_pitch(case.empty(2, 3), "slab")
    q = fused(inputs, fused_cache, is_neox, q_scale, kv_scale, q_dtype, case.fp8_dtype)

    q_pe, k_pe = sparse_mla_ops.rotary_embedding(
        inputs.q_pe, inputs.k_pe, inputs.positions, inputs.cos_sin_cache, is_neox
    )
    expected = sparse_mla_ops.concat_mla_q(inputs.q_nope, q_pe, q_scale, q_dtype)
    sparse_mla_ops.concat_and_cache_mla(inputs.kv_c, k_pe, split_cache, inputs.slot_mapping, kv_scale, case.fp8_dtype)
    assert_same_bits(q, expected)
    assert_same_bits(fused_memory, split_memory)


def test_fused_writes_what_loops_write():
    # One case end to end, so that fused and split cannot be wrong together.
    inputs, cache = fused_inputs(FP32_KV, torch.float32), torch.zeros(2, 3, 16)
    table = inputs.cos_sin_cache.tolist()
    q = fused(inputs, cache, False)
    expected = [[0.0] * 16 for _ in range(6)]
    for t, (position, slot) in enumerate(zip(inputs.positions.tolist(), inputs.slot_mapping.tolist())):
        for h in range(3):
            q_pe = rotate_by_loops(inputs.q_pe[t, h].tolist(), position, table, False)
            assert q[t, h].tolist() == inputs.q_nope[t, h].tolist() + q_pe
        if 0 <= slot < 6:
            expected[slot] = inputs.kv_c[t].tolist() + rotate_by_loops(inputs.k_pe[t].tolist(), position, table, False)
    assert cache.flatten(0, 1).tolist() == expected


def test_fused_produces_the_query_also_where_nothing_is_written():
    inputs = fused_inputs(BF16_KV)
    everything, nothing = torch.zeros(2, 3, 16, dtype=torch.bfloat16), torch.zeros(2, 3, 16, dtype=torch.bfloat16)
    expected = fused(inputs._replace(slot_mapping=int32([0, 1, 2, 3, 4])), everything, True)
    q = fused(inputs._replace(slot_mapping=int32([-1, INT_MIN, 6, 7, INT_MAX])), nothing, True)
    assert_same_bits(q, expected)
    assert not any(as_bytes(nothing))


def test_fused_takes_positions_for_the_rotation_and_slots_for_the_address():
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])  # position p turns by p · 90°
    q_pe, k_pe = torch.tensor([1.0, 2.0]).expand(3, 1, 2), torch.tensor([3.0, 4.0]).expand(3, 2)
    kv_c, cache = torch.tensor([[7.0], [8.0], [9.0]]), torch.zeros(3, 4, 3)
    q = sparse_mla_ops.fused_qk_rope_concat_and_cache_mla(
        torch.zeros(3, 1, 1), q_pe, kv_c, k_pe, int32([2, 2, 2]), table, cache, int32([7, 8, 9]), True
    )
    assert q.flatten(1).tolist() == [[0.0, -1.0, -2.0]] * 3
    rows = cache.flatten(0, 1).tolist()
    assert rows[7:10] == [[7.0, -3.0, -4.0], [8.0, -3.0, -4.0], [9.0, -3.0, -4.0]]
    assert not any(any(row) for row in rows[:7] + rows[10:])


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def attention_by_loops(
    q: Tensor,
    rows: list[list[float]],
    indices: list[list[int]],
    softmax_scale: float,
    kv_lora_rank: int,
    sinks: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, L], lse [T, H]) in double: softmax over the rows that exist, one head at a time."""
    out, lse = [], []
    for heads, selected in zip(q.tolist(), indices):
        valid = [rows[slot] for slot in selected if 0 <= slot < len(rows)]
        for h, query in enumerate(heads):
            if not valid:
                out.append([0.0] * kv_lora_rank)
                lse.append(-INF)
                continue
            scores = [softmax_scale * sum(a * b for a, b in zip(query, row)) for row in valid]
            largest = max(scores)
            weights = [math.exp(score - largest) for score in scores]
            lse.append(largest + math.log(sum(weights)))
            denominator = sum(weights) + (math.exp(sinks[h] - largest) if sinks else 0.0)
            out.append([sum(w * row[d] for w, row in zip(weights, valid)) / denominator for d in range(kv_lora_rank)])
    tokens, heads, _ = q.shape
    return (
        torch.tensor(out, dtype=torch.float64).view(tokens, heads, kv_lora_rank),
        torch.tensor(lse, dtype=torch.float64).view(tokens, heads),
    )


def attend(q: Tensor, cache: Tensor, indices: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """sparse_mla_fwd with its lse; indices may be nested lists."""
    indices = indices if isinstance(indices, Tensor) else int32(indices)
    return sparse_mla_ops.sparse_mla_fwd(q, cache, indices, *args, return_lse=True, **kwargs)


def assert_close_to_loops(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], bound: float = 1e-5) -> None:
    """Outputs per row and head within `bound`, and the lse, which is fp32 whatever the output's dtype."""
    (out, lse), (expected_out, expected_lse) = actual, expected
    assert relative_l2(out, expected_out) <= bound
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


SELECTIONS = [
    [0, 1, 2, 3, 4, 5],
    [-1, -1, 7, -1, 2, 0],  # holes ahead of and between valid ones
    [3, INT_MIN, 8, 9, INT_MAX, -7],  # every kind of hole; 8 and 9 are past the end
    [5, 5, 5, 1, -1, -1],  # duplicates
    [-1, INT_MIN, 8, 9, INT_MAX, -2],  # nothing at all
]
"""Rows over a cache of 8 slots."""


@kv_cases(*KV_CASES)
@pytest.mark.parametrize("pitch", PITCHES)
def test_sparse_mla_fwd_matches_loops_in_every_layout(case, pitch):
    width = case.kv_lora_rank + case.rope_dim
    cache = case.pack(randn(2, 4, width), kv_scale=0.3)
    q = randn(len(SELECTIONS), 2, width, seed=1)
    scale, kv_scale = width**-0.5, scalar(0.3)
    expected = attention_by_loops(q, case.real_rows(cache, 0.3), SELECTIONS, scale, case.kv_lora_rank)
    _, cache = with_pitch(cache, pitch)
    out, lse = attend(q, cache, SELECTIONS, scale, case.kv_lora_rank, kv_scale=kv_scale, fp8_dtype=case.fp8_dtype)
    assert_close_to_loops((out, lse), expected)
    assert_equal(out[4], torch.zeros(2, case.kv_lora_rank))
    assert lse[4].tolist() == [-INF, -INF]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sparse_mla_fwd_computes_a_16_bit_query_in_fp32_and_rounds_the_result(dtype):
    cache, q = randn(2, 4, 16, dtype=dtype), randn(len(SELECTIONS), 2, 16, seed=1, dtype=dtype)
    out, lse = attend(q, cache, SELECTIONS, 0.25, 12)
    expected = attention_by_loops(q, cache.flatten(0, 1).tolist(), SELECTIONS, 0.25, 12)
    assert out.dtype == dtype
    assert_close_to_loops((out, lse), expected, bound=torch.finfo(dtype).eps)


@encodings
@kv_cases(FN_KV, KV_CASES[4], DS_MLA_KV)
@pytest.mark.parametrize("q_scale", [None, 0.37], ids=["no_scale", "scale"])
@pytest.mark.parametrize("dot_precision", [None, "bf16", "fp8"])
def test_sparse_mla_fwd_dequantises_an_fp8_query_by_its_scale(case, encoding, q_scale, dot_precision):
    # Query and cache may have different encodings: each tensor says its own.
    width = case.kv_lora_rank + case.rope_dim
    cache = case.pack(randn(2, 4, width))
    q = formats.to_fp8(randn(len(SELECTIONS), 2, width, seed=1) * 3, encoding)
    real = q.double() * (q_scale or 1.0)
    expected = attention_by_loops(real, case.real_rows(cache), SELECTIONS, 0.1, case.kv_lora_rank)
    out, lse = attend(
        q,
        cache,
        SELECTIONS,
        0.1,
        case.kv_lora_rank,
        q_scale=None if q_scale is None else scalar(q_scale),
        dot_precision=dot_precision,
    )
    assert out.dtype == torch.bfloat16
    assert_close_to_loops((out, lse), expected, bound=torch.finfo(torch.bfloat16).eps)


@kv_cases(FN_KV, KV_CASES[4], DS_MLA_KV)
def test_dot_precision_fp8_rounds_the_query_and_stays_within_the_tolerance(case):
    width = case.kv_lora_rank + case.rope_dim
    cache, q = case.pack(randn(2, 4, width)), randn(len(SELECTIONS), 2, width, seed=1)
    expected, _ = attention_by_loops(q, case.real_rows(cache), SELECTIONS, width**-0.5, case.kv_lora_rank)
    exact, _ = attend(q, cache, SELECTIONS, width**-0.5, case.kv_lora_rank, dot_precision="bf16")
    out, _ = attend(q, cache, SELECTIONS, width**-0.5, case.kv_lora_rank, dot_precision="fp8")
    assert relative_l2(exact, expected) <= 1e-5
    assert 1e-5 < relative_l2(out, expected) <= 0.06


def test_dot_precision_fp8_is_exact_for_a_query_that_fp8_holds():
    # Whole numbers up to 7 with an amax of 448 / 64 have scale 1 / 64, and need 3 bits. Their sizes differ by head.
    cache, q = FN_KV.pack(whole(2, 4, 16)), whole(len(SELECTIONS), 2, 16, seed=1, largest=7)
    q[..., 0] = 7.0
    q[:, 1] *= 1024
    for precision in ("bf16", "fp8"):
        actual = attend(q, cache, SELECTIONS, 2.0**-10, 12, dot_precision=precision)
        expected = attention_by_loops(q, FN_KV.real_rows(cache), SELECTIONS, 2.0**-10, 12)
        assert_close_to_loops(actual, expected)


@many
@given(
    indices=st.lists(
        st.lists(st.integers(-3, 9) | st.sampled_from([INT_MIN, INT_MAX]), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    seed=seeds,
    with_sink=st.booleans(),
)
def test_sparse_mla_fwd_matches_loops_on_random_selections(indices, seed, with_sink):
    cache, q = randn(3, 2, 6, seed=seed), randn(len(indices), 3, 6, seed=seed + 1)
    sink = randn(3, seed=seed + 2) if with_sink else None
    actual = attend(q, cache, indices, 0.5, 4, attn_sink=sink)
    rows, sinks = cache.flatten(0, 1).tolist(), sink.tolist() if with_sink else None
    # Of 4 values a sum may nearly cancel, and then 1e-5 of it is asking too much.
    assert_close_to_loops(actual, attention_by_loops(q, rows, indices, 0.5, 4, sinks), bound=1e-4)


def two_values() -> tuple[Tensor, Tensor]:
    """A query whose scores are 0 and ln 3 over the values (1, 0) and (0, 1)."""
    return torch.tensor([[[0.0, LN3]]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])


def test_scores_0_and_ln_3_give_weights_1_and_3_of_4_and_lse_ln_4():
    out, lse = attend(*two_values(), [[0, 1]], 1.0, 2)
    torch.testing.assert_close(out, torch.tensor([[[0.25, 0.75]]]))
    torch.testing.assert_close(lse, torch.tensor([[1.386294]]))


def test_softmax_scale_multiplies_the_scores():
    out, lse = attend(*two_values(), [[0, 1]], 2.0, 2)  # scores 0 and ln 9
    torch.testing.assert_close(out, torch.tensor([[[0.1, 0.9]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(10)]]))


def test_sink_of_ln_4_halves_the_output_and_leaves_the_lse():
    # The sink is a logit as it is: a softmax scale other than 1 must not touch it.
    q, cache = two_values()
    out, lse = attend(q / 2, cache, [[0, 1]], 2.0, 2, attn_sink=torch.tensor([LN4]))
    torch.testing.assert_close(out, torch.tensor([[[0.125, 0.375]]]))
    torch.testing.assert_close(lse, torch.tensor([[LN4]]))


def test_duplicates_count_twice():
    out, lse = attend(*two_values(), [[0, 0, 0, 1]], 1.0, 2)  # 3 · 1 against 3
    torch.testing.assert_close(out, torch.tensor([[[0.5, 0.5]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(6)]]))


def test_sink_of_minus_infinity_changes_nothing():
    cache, q = randn(2, 4, 16), randn(len(SELECTIONS), 2, 16, seed=1)
    plain = attend(q, cache, SELECTIONS, 0.25, 12)
    for actual, expected in zip(attend(q, cache, SELECTIONS, 0.25, 12, attn_sink=torch.full((2,), -INF)), plain):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("sink", [1e4, 3e38, INF], ids=["1e4", "near_the_largest_fp32", "inf"])
def test_huge_sink_gives_zero_in_its_head_only(sink):
    cache, q = randn(2, 4, 16), randn(len(SELECTIONS), 2, 16, seed=1)
    plain, plain_lse = attend(q, cache, SELECTIONS, 0.25, 12)
    out, lse = attend(q, cache, SELECTIONS, 0.25, 12, attn_sink=torch.tensor([sink, -INF]))
    assert_equal(out[:, 0], torch.zeros(len(SELECTIONS), 12))
    assert_same_bits(out[:, 1], plain[:, 1])
    assert_same_bits(lse, plain_lse)


@pytest.mark.parametrize("sink", [-INF, -1e30, 0.0, 1e30, INF], ids=str)
def test_row_without_a_valid_index_is_zero_whatever_the_sink(sink):
    out, lse = attend(randn(1, 2, 16), randn(2, 4, 16), [[-1, 8]], 0.25, 12, attn_sink=torch.full((2,), sink))
    assert_equal(out, torch.zeros(1, 2, 12))
    assert lse.tolist() == [[-INF, -INF]]


def test_large_scores_do_not_overflow():
    q, cache = torch.tensor([[[1e4, 0.0]]]), torch.tensor([[[1.0, 2.0], [-1.0, 5.0]]])
    out, lse = attend(q, cache, [[1, 0]], 1.0, 2, attn_sink=torch.tensor([9e3]))
    assert_equal(out, [[[1.0, 2.0]]])
    assert_equal(lse, [[1e4]])


def test_lse_has_shape_0_unless_asked_for():
    out, lse = sparse_mla_ops.sparse_mla_fwd(randn(2, 3, 16), randn(2, 4, 16), int32([[0], [1]]), 0.25, 12)
    assert out.shape == (2, 3, 12)
    assert (lse.shape, lse.dtype) == ((0,), torch.float32)


@kv_cases(*(case for case in KV_CASES if case.rope_dim))
def test_rows_that_are_not_selected_do_not_count_even_if_nan(case):
    # Slots 0 and 7 are where a hole ends up if it is clamped, set to 0, or taken as a negative index.
    width = case.kv_lora_rank + case.rope_dim
    rows = randn(2, 4, width)
    clean = case.pack(rows)
    rows[0, 0], rows[0, 3], rows[1, 3] = NAN, NAN, NAN
    poisoned = case.pack(rows)
    indices = [[1, 2, -1, 4], [-1, -1, -1, 5], [8, 6, INT_MAX, INT_MIN], [-1, 8, -1, 8]]
    q = randn(4, 2, width, seed=1)
    expected = attend(q, clean, indices, 0.1, case.kv_lora_rank, fp8_dtype=case.fp8_dtype)
    for actual, wanted in zip(attend(q, poisoned, indices, 0.1, case.kv_lora_rank, fp8_dtype=case.fp8_dtype), expected):
        assert_same_bits(actual, wanted)
        assert not actual.isnan().any()


@index_types
def test_topk_length_ends_a_row(index):
    indices = [[1, -1, 3, 0], [2, 4, 5, 6], [7, 1, 0, 2], [3, 3, 3, 3], [5, 6, 7, 0]]
    lengths = [2, 3, 0, 9, -1]
    cut = [row[: max(0, length)] for row, length in zip(indices, lengths)]
    cache, q = randn(2, 4, 16), randn(5, 2, 16, seed=1)
    actual = attend(q, cache, index(indices), 0.25, 12, topk_length=index(lengths))
    assert_close_to_loops(actual, attention_by_loops(q, FP32_KV.real_rows(cache), cut, 0.25, 12))


@index_types
@pytest.mark.parametrize("max_topk", [2, 4, 9])
def test_flat_indices_match_loops(index, max_topk):
    rows = [[3, -1, 5, 5], [], [0], [8, INT_MIN], [7, 1, 2]]
    indptr = [0, 4, 4, 5, 7, 10]
    flat = [slot for row in rows for slot in row] + [0, 1, 2, 3]  # an over-allocated buffer: the end is no one's
    cache, q = randn(2, 4, 16), randn(5, 2, 16, seed=1)
    actual = attend(q, cache, index(flat), 0.25, 12, indptr=index(indptr), max_topk=max_topk)
    cut = [row[:max_topk] for row in rows]
    assert_close_to_loops(actual, attention_by_loops(q, FP32_KV.real_rows(cache), cut, 0.25, 12))


def test_flat_indices_may_be_empty():
    out, lse = attend(randn(2, 3, 16), randn(2, 4, 16), int32([]), 0.25, 12, indptr=int32([0, 0, 0]), max_topk=4)
    assert_equal(out, torch.zeros(2, 3, 12))
    assert_equal(lse, torch.full((2, 3), -INF))


def test_flat_indices_do_not_read_past_the_buffer():
    # An indptr that promises more than the buffer holds, as a stale one does.
    cache, q = randn(2, 4, 16), randn(2, 2, 16, seed=1)
    actual = attend(q, cache, int32([3, 5, 1]), 0.25, 12, indptr=int32([0, 2, 40]), max_topk=50)
    assert_close_to_loops(actual, attention_by_loops(q, FP32_KV.real_rows(cache), [[3, 5], [1]], 0.25, 12))


def test_indices_beyond_32_bits_are_holes():
    cache, q = randn(2, 4, 16), randn(1, 2, 16, seed=1)
    indices = torch.tensor([[2**32, 2**40 + 3, 2, -(2**40), 2**63 - 1]])
    expected, _ = attend(q, cache, [[2]], 0.25, 12)
    out, _ = attend(q, cache, indices, 0.25, 12)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("heads", [1, 11, 12, 128])
def test_every_head_attends_by_itself(heads):
    cache, q = randn(2, 4, 16), randn(2, heads, 16, seed=1)
    actual = attend(q, cache, SELECTIONS[:2], 0.25, 12, phase="decode")
    assert_close_to_loops(actual, attention_by_loops(q, FP32_KV.real_rows(cache), SELECTIONS[:2], 0.25, 12))


# ----------------------------------------------------------------------------------------------------------------------
# Indexer cache write and gather


def index_writes(case: IndexCase, cache: Tensor, k: Tensor, slots: list[int]) -> dict[int, bytes]:
    """Address → bytes of the keys, and of the scales behind a block's values."""
    num_blocks, block_size, row = cache.shape
    writes = {}
    for token, slot in enumerate(slots):
        if not 0 <= slot < num_blocks * block_size:
            continue
        block, offset = divmod(slot, block_size)
        data = as_bytes(case.pack(k[token].view(1, 1, -1)))  # a block of one token: its values, then its scale
        if case.fp8_dtype is None:
            writes[row_address(cache, slot)] = data
        else:
            start, head_dim = row_address(cache, block * block_size), row - 4
            writes[start + offset * head_dim] = data[:head_dim]
            writes[start + block_size * head_dim + 4 * offset] = data[head_dim:]
    return writes


@pytest.mark.parametrize(
    ("case", "pitch"),
    [
        pytest.param(case, pitch, id=f"{case.name}-{pitch}")
        for case in INDEX_CASES
        for pitch in PITCHES
        if not (case.fp8_dtype and pitch == "slab_with_gaps")  # a quantised block has no gaps: its scales end it
    ],
)
@few
@given(slots=slot_lists(6), seed=seeds)
def test_indexer_k_quant_and_cache_writes_its_slots_and_nothing_else(case, pitch, slots, seed):
    memory, cache = with_pitch(case.pack(torch.zeros(2, 3, 10)), pitch)
    k = randn(len(slots) + 2, 10, seed=seed)
    k[len(slots) :] = NAN  # rows beyond the slots
    expected = after_writes(memory, index_writes(case, cache, k, slots))
    sparse_mla_ops.indexer_k_quant_and_cache(k, cache, int32(slots), case.scale_format, case.fp8_dtype)
    assert as_bytes(memory) == expected


@dtypes
@index_types
def test_indexer_k_quant_and_cache_takes_every_input_type(index, dtype):
    case = IndexCase("e4m3fn", FN)
    cache = case.pack(torch.zeros(2, 3, 128))
    k = randn(4, 128 + 3, dtype=dtype)[:, 2:-1]
    slots = [5, -1, 0, 6]
    expected = after_writes(cache, index_writes(case, cache, k, slots))
    sparse_mla_ops.indexer_k_quant_and_cache(k, cache, index(slots))
    assert as_bytes(cache) == expected


def gather_by_loops(
    rows: list[list[float]], block_size: int, block_table: list[list[int]], seq_lens: list[int], count: int
) -> list[list[float]]:
    """Real keys of whole sequences, one after the other, zeros where there is none."""
    zero = [0.0] * len(rows[0])
    gathered = []
    for blocks, length in zip(block_table, seq_lens):
        for token in range(length):
            block = blocks[token // block_size] if token // block_size < len(blocks) else -1
            slot = block * block_size + token % block_size
            gathered.append(rows[slot] if block >= 0 and slot < len(rows) else zero)
    return (gathered + [zero] * count)[:count]


def ends_of(lengths: list[int]) -> list[int]:
    """[0, cumulative sums of the lengths]."""
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@index_cases(*INDEX_CASES)
@index_types
def test_gather_indexer_k_cache_matches_loops(case, index):
    cache = case.pack(randn(6, 4, 10))
    block_table = [
        [5, 0, 3],
        [-1, -1, -1],  # a padded request without tokens
        [1, -1, 2],  # a block that was never allocated
        [2, 6, INT_MAX],  # past the cache's end
        [4, 4, 4],
    ]
    seq_lens = [9, 0, 12, 10, 14]  # the last one is longer than its row of the table
    rows = sum(seq_lens) + 3
    expected = gather_by_loops(case.real_rows(cache), 4, block_table, seq_lens, rows)
    _, cache = with_pitch(cache, "slab")
    k, k_scale = sparse_mla_ops.gather_indexer_k_cache(
        cache, index(block_table), index(ends_of(seq_lens)), rows, case.fp8_dtype
    )
    assert k.dtype == case.dtype
    missing = torch.tensor([not any(row) for row in expected])
    assert_equal(k[missing].float(), torch.zeros(missing.sum(), 10))  # the key itself, not only its scale
    if case.fp8_dtype is None:
        assert k_scale.shape == (0,)
        assert_equal(k.float(), expected)
    else:
        assert_equal(k.float() * k_scale[:, None], expected)
        assert_equal(k_scale[missing], torch.zeros(missing.sum()))


def test_gather_indexer_k_cache_does_not_read_nan_into_missing_rows():
    cache = torch.full((2, 2, 8), NAN)
    k, _ = sparse_mla_ops.gather_indexer_k_cache(cache, int32([[-1, 2]]), int32([0, 4]), 6)
    assert_equal(k, torch.zeros(6, 8))


def test_gather_indexer_k_cache_of_no_request_is_zero():
    block_table = torch.empty(0, 3, dtype=torch.int32)
    k, _ = sparse_mla_ops.gather_indexer_k_cache(randn(2, 2, 8), block_table, int32([0]), 3)
    assert_equal(k, torch.zeros(3, 8))


# ----------------------------------------------------------------------------------------------------------------------
# Indexer query


@rope_styles
@dtypes
@pytest.mark.parametrize("q_dtype", [None, FN, FNUZ], ids=["q_unquantised", "q_e4m3fn", "q_e4m3fnuz"])
def test_indexer_q_rope_quant_matches_loops(dtype, is_neox, q_dtype):
    positions = [2, -1, 9]
    q, table, weights = randn(3, 4, 10, dtype=dtype), randn(5, 6, seed=1), randn(3, 4, seed=2, dtype=dtype)
    q[1, 2] = 0  # a head of zeros has a scale too
    q_out, weights_out = sparse_mla_ops.indexer_q_rope_quant(
        q, int32(positions), table, weights, 10**-0.5, is_neox, q_dtype
    )
    assert q_out.dtype == (q_dtype or dtype)
    for t, position in enumerate(positions):
        for i in range(4):
            head = q[t, i].tolist()
            rotated = rotate_by_loops(head[:6], position, table.tolist(), is_neox) + head[6:]
            rounded = torch.tensor(rotated).to(dtype)  # quantisation sees what the unquantised query would hold
            weight = weights[t, i].item() * 10**-0.5 * 4**-0.5
            if q_dtype is None:
                assert_same_bits(q_out[t, i], rounded)
            else:
                scale = formats.index_scales(rounded, q_dtype, "ue8m0")
                assert_same_bits(q_out[t, i], formats.quantize(rounded, scale, q_dtype))
                weight *= scale.item()
            assert weights_out[t, i].item() == pytest.approx(weight, rel=1e-6, abs=0)


def test_indexer_q_rope_quant_folds_every_scale_into_the_weights():
    # amax 448 · 2^-3 has the scale 2^-3; softmax_scale 0.5 and 4 heads give 0.25.
    q = torch.full((1, 4, 8), 56.0, dtype=torch.bfloat16)
    q_out, weights = sparse_mla_ops.indexer_q_rope_quant(
        q, int32([0]), torch.empty(1, 0), torch.tensor([[8.0, -16.0, 0.0, 32.0]]), 0.5, True, FN
    )
    assert_equal(q_out.float(), torch.full((1, 4, 8), 448.0))
    assert weights.tolist() == [[0.25, -0.5, 0.0, 1.0]]


def test_indexer_q_rope_quant_leaves_the_dims_behind_the_rope_part():
    q = randn(2, 3, 10)
    q_out, _ = sparse_mla_ops.indexer_q_rope_quant(q, int32([1, 2]), randn(4, 4, seed=1), randn(2, 3), 1.0, True)
    assert_same_bits(q_out[..., 4:], q[..., 4:])
    assert not q_out[..., :4].equal(q[..., :4])


# ----------------------------------------------------------------------------------------------------------------------
# Indexer scores


def score_by_loops(heads: list[list[float]], weights: list[float], key: list[float]) -> float:
    """Σ_i weight_i · relu(q_i · key), in double."""
    total = 0.0
    for query, weight in zip(heads, weights):
        dot = sum(a * b for a, b in zip(query, key))
        if dot > 0:
            total += weight * dot
    return total


@index_types
@pytest.mark.parametrize("k_dtype", [torch.float32, torch.bfloat16, FN, FNUZ], ids=["fp32", "bf16", "fn", "fnuz"])
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, FN, FNUZ], ids=["fp32", "fp16", "fn", "fnuz"])
def test_mqa_logits_matches_loops(q_dtype, k_dtype, index):
    starts, ends = [0, 2, 5, -3, 4, 7], [9, 5, 5, 2, 100, 3]  # also empty, before the first and past the last key
    q, k, weights = whole(6, 4, 10), whole(9, 10, seed=1), whole(6, 4, seed=2)
    k_scale = torch.exp2(whole(9, seed=3)) if k_dtype in formats.FP8_MAX else None
    logits = sparse_mla_ops.mqa_logits(
        q.to(q_dtype), k.to(k_dtype), weights.to(torch.bfloat16), index(starts), index(ends), k_scale
    )
    for t in range(6):
        for n in range(9):
            expected = -INF
            if starts[t] <= n < ends[t]:
                expected = score_by_loops(q[t].tolist(), weights[t].tolist(), k[n].tolist())
                expected *= 1.0 if k_scale is None else k_scale[n].item()
            assert logits[t, n].item() == expected


def test_mqa_logits_is_close_to_loops_on_real_numbers():
    q, k, weights = randn(3, 8, 64), randn(20, 64, seed=1), randn(3, 8, seed=2)
    logits = sparse_mla_ops.mqa_logits(q, k, weights, int32([0] * 3), int32([20] * 3))
    expected = [[score_by_loops(q[t].tolist(), weights[t].tolist(), key) for key in k.tolist()] for t in range(3)]
    torch.testing.assert_close(logits.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-4)


def test_mqa_logits_cuts_each_head_at_0_before_the_weighted_sum():
    q, k = torch.tensor([[[-5.0], [2.0]]]), torch.tensor([[1.0]])
    for weights, expected in [([1.0, 1.0], 2.0), ([1.0, -3.0], -6.0), ([-3.0, 0.0], 0.0)]:
        logits = sparse_mla_ops.mqa_logits(q, k, torch.tensor([weights]), int32([0]), int32([1]))
        assert logits.item() == expected


@pytest.mark.parametrize("clean_logits", [True, False], ids=["clean", "not_clean"])
def test_mqa_logits_window_does_not_depend_on_keys_outside(clean_logits):
    q, k, weights = whole(2, 4, 10), whole(9, 10, seed=1), whole(2, 4, seed=2)
    starts, ends = int32([2, 3]), int32([5, 4])
    expected = sparse_mla_ops.mqa_logits(q, k, weights, starts, ends)
    k[:2], k[5:] = NAN, INF
    logits = sparse_mla_ops.mqa_logits(q, k, weights, starts, ends, clean_logits=clean_logits)
    assert_same_bits(logits[0, 2:5], expected[0, 2:5])
    assert_same_bits(logits[1, 3:4], expected[1, 3:4])
    if clean_logits:
        assert_same_bits(logits, expected)


@index_types
@index_cases(*EXACT_INDEX_CASES)
@pytest.mark.parametrize("pitch", ["contiguous", "slab"])
def test_paged_mqa_logits_matches_loops(case, index, pitch):
    keys, block_size, max_len = whole(4, 3, 10), 3, 10
    block_table = [[2, 0, 3], [1, -1, 4], [-1, -1, -1]]
    # Rows of different requests interleaved; padded rows: no tokens, and requests that the table does not have.
    req_id, row_ends = [1, 0, 2, 0, 3, -1, 1, INT_MAX, 0], [9, 9, 0, 4, 5, 5, -2, 9, 100]
    q, weights = whole(9, 4, 10, seed=1), whole(9, 4, seed=2)
    _, cache = with_pitch(case.pack(keys), pitch)
    logits = sparse_mla_ops.paged_mqa_logits(
        q, cache, weights, index(row_ends), index(block_table), index(req_id), max_len, fp8_dtype=case.fp8_dtype
    )
    for t in range(9):
        blocks = block_table[req_id[t]] if 0 <= req_id[t] < 3 else []
        for token in range(max_len):
            block = blocks[token // block_size] if token // block_size < len(blocks) else -1
            expected = -INF
            if token < row_ends[t] and 0 <= block < 4:
                key = keys[block, token % block_size].tolist()
                expected = score_by_loops(q[t].tolist(), weights[t].tolist(), key)
            assert logits[t, token].item() == expected


class PagedStep(NamedTuple):
    """What paged_mqa_logits and sparse_attn_indexer have in common."""

    q: Tensor
    index_cache: Tensor
    weights: Tensor
    row_ends: Tensor
    block_table: Tensor
    req_id: Tensor


def paged_step(case: IndexCase, seq_lens: list[int], req_id: list[int], row_ends: list[int], seed: int) -> PagedStep:
    """Requests over scattered blocks of 4 tokens, 3 blocks each; whole numbers, so that every score is exact."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(3 * len(seq_lens) + 2, generator=generator).tolist()
    block_table = [[free.pop() if 4 * i < length else -1 for i in range(3)] for length in seq_lens]
    rows = len(req_id)
    return PagedStep(
        q=whole(rows, 4, 10, seed=seed),
        index_cache=case.pack(whole(3 * len(seq_lens) + 2, 4, 10, seed=seed + 1)),
        weights=whole(rows, 4, seed=seed + 2),
        row_ends=int32(row_ends),
        block_table=int32(block_table),
        req_id=int32(req_id),
    )


@index_cases(*EXACT_INDEX_CASES)
@few
@given(seed=seeds, seq_lens=st.lists(st.integers(0, 12), min_size=1, max_size=4), data=st.data())
def test_paged_mqa_logits_equals_gather_then_mqa_logits(case, seed, seq_lens, data):
    req_id = data.draw(st.lists(st.integers(0, len(seq_lens) - 1), min_size=1, max_size=6))
    row_ends = [data.draw(st.integers(0, seq_lens[request])) for request in req_id]
    step = paged_step(case, seq_lens, req_id, row_ends, seed)
    paged = sparse_mla_ops.paged_mqa_logits(*step, 12, fp8_dtype=case.fp8_dtype)

    bounds = ends_of(seq_lens)
    k, k_scale = sparse_mla_ops.gather_indexer_k_cache(
        step.index_cache, step.block_table, int32(bounds), bounds[-1] + 2, case.fp8_dtype
    )
    starts = [bounds[request] for request in req_id]
    gathered = sparse_mla_ops.mqa_logits(
        step.q,
        k,
        step.weights,
        int32(starts),
        int32([start + end for start, end in zip(starts, row_ends)]),
        k_scale if case.fp8_dtype else None,
    )
    for t, (start, end) in enumerate(zip(starts, row_ends)):
        assert_equal(paged[t, :end], gathered[t, start : start + end])
        assert paged[t, end:].tolist() == [-INF] * (12 - end)


def test_paged_mqa_logits_does_not_depend_on_keys_of_others():
    # Slot 0, the block of another request and the tokens behind the row's end are NaN.
    keys = whole(3, 4, 10)
    expected = sparse_mla_ops.paged_mqa_logits(
        whole(1, 4, 10, seed=1), keys, whole(1, 4, seed=2), int32([3]), int32([[1, -1]]), int32([0]), 8
    )
    poisoned = torch.full_like(keys, NAN)
    poisoned[1, :3] = keys[1, :3]
    logits = sparse_mla_ops.paged_mqa_logits(
        whole(1, 4, 10, seed=1), poisoned, whole(1, 4, seed=2), int32([3]), int32([[1, -1]]), int32([0]), 8
    )
    assert_same_bits(logits, expected)


# ----------------------------------------------------------------------------------------------------------------------
# Top-k


def top_k_by_sorting(logits: list[float], start: int, end: int, k: int) -> list[int]:
    """The indices of one row, ascending, −1 first. Python's −0.0 == 0.0, so zeros tie as they should."""
    window = [column for column in range(max(start, 0), min(end, len(logits))) if not math.isnan(logits[column])]
    window.sort(key=lambda column: (-logits[column], column))
    chosen = [column - start for column in window[:k]]
    return sorted(chosen + [-1] * (k - len(chosen)))


def assert_top_k(logits: Tensor, starts: list[int], ends: list[int], k: int, index: Callable = int32) -> None:
    actual = sparse_mla_ops.top_k_per_row(logits, index(starts), index(ends), k)
    assert (actual.dtype, actual.shape) == (torch.int32, (len(logits), k))
    expected = [top_k_by_sorting(row, start, end, k) for row, start, end in zip(logits.tolist(), starts, ends)]
    assert actual.sort(dim=1).values.tolist() == expected


@many
@given(data=st.data(), width=st.integers(1, 12), rows=st.integers(1, 3), k=st.integers(1, 14))
def test_top_k_per_row_matches_sorting(data, width, rows, k):
    # Few distinct values, so that ties at the cut are the rule.
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), INF, -INF, NAN, -NAN, 3e38, -3e38])
    row = st.lists(values | st.floats(width=32), min_size=width, max_size=width)
    bounds = st.lists(st.integers(-3, width + 3), min_size=rows, max_size=rows)
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    assert_top_k(logits, data.draw(bounds), data.draw(bounds), k)


@index_types
def test_top_k_per_row_counts_from_the_start_of_the_window(index):
    logits = randn(6, 20)
    starts, ends = [0, 5, 12, -4, 18, 9], [20, 9, 12, 3, 99, 2]
    assert_top_k(logits, starts, ends, 4, index)


def test_top_k_per_row_gives_ties_at_the_cut_to_the_lowest_index():
    logits = torch.tensor([[1.0, 5.0, 1.0, 1.0, 7.0, 1.0, 1.0]])
    assert_top_k(logits, [0], [7], 4)
    actual = sparse_mla_ops.top_k_per_row(logits, int32([0]), int32([7]), 4)
    assert sorted(actual[0].tolist()) == [0, 1, 2, 4]


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]], ids=["plus_first", "minus_first"])
def test_top_k_per_row_treats_both_zeros_as_equal(zeros):
    logits = torch.tensor([[-1.0, *zeros, -2.0]])
    assert sparse_mla_ops.top_k_per_row(logits, int32([0]), int32([4]), 1).tolist() == [[1]]


def test_top_k_per_row_never_chooses_nan():
    logits = torch.tensor([[NAN, 1.0, -NAN, -INF, NAN], [NAN] * 5])
    actual = sparse_mla_ops.top_k_per_row(logits, int32([0, 0]), int32([5, 5]), 3)
    assert sorted(actual[0].tolist()) == [-1, 1, 3]
    assert actual[1].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("outside", [NAN, INF, 3e38, -INF], ids=str)
def test_top_k_per_row_sees_nothing_outside_the_window(outside):
    logits = torch.full((3, 12), outside)
    logits[0, 3:7] = torch.tensor([2.0, 1.0, 4.0, 3.0])
    logits[1, 3:7] = -INF  # even −inf inside comes before anything outside
    actual = sparse_mla_ops.top_k_per_row(logits, int32([3, 3, 3]), int32([7, 7, 3]), 5)
    assert [sorted(row) for row in actual.tolist()] == [[-1, 0, 1, 2, 3], [-1, 0, 1, 2, 3], [-1] * 5]


def test_top_k_per_row_may_ask_for_more_than_there_are_columns():
    assert_top_k(randn(2, 3), [0, 1], [3, 3], 8)
    none = sparse_mla_ops.top_k_per_row(torch.empty(2, 0), int32([0, 0]), int32([0, 4]), 3)
    assert none.tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("base", [1.0, -1.0, 2.0**-126, -3e38], ids=["1", "-1", "smallest_normal", "-3e38"])
def test_top_k_per_row_tells_near_ties_apart(base):
    # The upper 22 bits agree, and more values than one histogram bin is likely to hold fall together.
    generator = torch.Generator().manual_seed(0)
    low_bits = torch.randint(0, 1 << 10, (2, 3000), generator=generator, dtype=torch.int32)
    logits = ((torch.tensor(base).view(torch.int32) & ~0x3FF) | low_bits).view(torch.float32)
    assert_top_k(logits, [0, 17], [3000, 2900], 2048)


def test_top_k_per_row_of_all_equal_logits_is_the_first_k():
    actual = sparse_mla_ops.top_k_per_row(torch.zeros(1, 5000), int32([7]), int32([4990]), 2048)
    assert sorted(actual[0].tolist()) == list(range(2048))


# ----------------------------------------------------------------------------------------------------------------------
# Index conversion


def convert_by_loops(request: int, token: int, block_table: list[list[int]], block_size: int) -> int:
    if token < 0 or not 0 <= request < len(block_table):
        return -1
    column, offset = divmod(token, block_size)
    if column >= len(block_table[request]) or block_table[request][column] < 0:
        return -1
    slot = block_table[request][column] * block_size + offset
    return slot if slot <= INT_MAX else -1


@many
@given(data=st.data(), requests=st.integers(0, 3), columns=st.integers(0, 3), block_size=st.sampled_from([1, 2, 3, 64]))
def test_convert_req_index_matches_loops(data, requests, columns, block_size):
    blocks = st.integers(-2, 20) | st.sampled_from([INT_MIN, INT_MAX, INT_MAX // 64, INT_MAX // 64 + 1])
    row = st.lists(blocks, min_size=columns, max_size=columns)
    block_table = data.draw(st.lists(row, min_size=requests, max_size=requests))
    ids = st.integers(-2, requests + 1) | st.sampled_from([INT_MIN, INT_MAX])
    req_id = data.draw(st.lists(ids, min_size=1, max_size=4))
    tokens = st.integers(-2, block_size * (columns + 1)) | st.sampled_from([INT_MIN, INT_MAX])
    indices = data.draw(st.lists(st.lists(tokens, min_size=3, max_size=3), min_size=len(req_id), max_size=len(req_id)))
    table = int32(block_table).reshape(requests, columns)
    slots = sparse_mla_ops.convert_req_index_to_global_index(int32(req_id), table, int32(indices), block_size)
    assert slots.dtype == torch.int32
    assert slots.tolist() == [
        [convert_by_loops(request, token, block_table, block_size) for token in row]
        for request, row in zip(req_id, indices)
    ]


@index_types
def test_convert_req_index_keeps_holes_where_they_are(index):
    block_table = [[7, 3], [5, -1], [0, 2]]
    req_id = [1, 0, 3, -1, 2]
    tokens = [[0, -1, 3, 4], [-1, 7, 8, 0], [0, 1, 2, 3], [0, 1, 2, 3], [INT_MAX, INT_MIN, 5, 1]]
    slots = sparse_mla_ops.convert_req_index_to_global_index(index(req_id), index(block_table), index(tokens), 4)
    assert slots.tolist() == [[20, -1, 23, -1], [-1, 15, -1, 28], [-1] * 4, [-1] * 4, [-1, -1, 9, 1]]


@pytest.mark.parametrize(
    ("block", "token", "expected"),
    [
        (2**27 - 1, 15, INT_MAX),
        (2**27, 0, -1),
        (2**28 + 1, 3, -1),  # 2^32 + 19: the low 32 bits look like slot 19
        (2**60 + 1, 3, -1),  # and of 2^64 + 19, the low 64 bits
        (2**63 - 1, 0, -1),
    ],
    ids=["largest_int32", "2^31", "wraps_32_bits", "wraps_64_bits", "largest_int64"],
)
def test_convert_req_index_gives_a_hole_for_a_slot_that_int32_cannot_hold(block, token, expected):
    slots = sparse_mla_ops.convert_req_index_to_global_index(int32([0]), torch.tensor([[block]]), int32([[token]]), 16)
    assert slots.tolist() == [[expected]]


@pytest.mark.parametrize("token", [2**32, 2**32 + 1, -(2**40), 2**63 - 1], ids=str)
def test_convert_req_index_does_not_wrap_a_token_to_32_bits(token):
    slots = sparse_mla_ops.convert_req_index_to_global_index(int32([0]), int32([[5]]), torch.tensor([[token]]), 16)
    assert slots.tolist() == [[-1]]


# ----------------------------------------------------------------------------------------------------------------------
# Score and select


def indexer_by_parts(case: IndexCase, step: PagedStep, k: int, max_len: int) -> Tensor:
    logits = sparse_mla_ops.paged_mqa_logits(*step, max_len, fp8_dtype=case.fp8_dtype)
    return sparse_mla_ops.top_k_per_row(logits, torch.zeros_like(step.row_ends), step.row_ends, k)


@index_cases(*EXACT_INDEX_CASES)
@pytest.mark.parametrize("budget", [1, 48, 4 * 12 * 2 + 3, 2**30], ids=lambda budget: f"{budget}_bytes")
@pytest.mark.parametrize("k", [3, 20])
def test_sparse_attn_indexer_equals_its_parts_within_any_budget(case, budget, k, monkeypatch):
    step = paged_step(case, [12, 0, 7], [0, 2, 1, 0, 3, -1, 2], [9, 7, 0, 12, 5, 5, 99], seed=3)
    expected = indexer_by_parts(case, step, k, 12)

    alive = []
    paged_mqa_logits = reference.paged_mqa_logits

    def spy(logits: Tensor, *args: Any) -> None:
        alive.append(logits.numel() * logits.element_size())
        paged_mqa_logits(logits, *args)

    monkeypatch.setattr(reference, "paged_mqa_logits", spy)
    chosen = sparse_mla_ops.sparse_attn_indexer(*step, k, 12, budget, fp8_dtype=case.fp8_dtype)
    assert chosen.sort(dim=1).values.tolist() == expected.sort(dim=1).values.tolist()
    assert max(alive) <= max(budget, 48)  # one row of 12 logits is always allowed


def test_sparse_attn_indexer_gives_equal_scores_to_the_lowest_token():
    # All weights 0: every score is exactly 0, as happens with few heads behind a ReLU.
    step = paged_step(INDEX_CASES[0], [12], [0], [11], seed=5)
    chosen = sparse_mla_ops.sparse_attn_indexer(*step._replace(weights=torch.zeros(1, 4)), 5, 12)
    assert sorted(chosen[0].tolist()) == [0, 1, 2, 3, 4]


def speculative_ends(seq_len: int, next_n: int) -> list[int]:
    """Row j of a request with seq_len tokens, next_n of them new, sees tokens up to itself."""
    return [seq_len - next_n + j + 1 for j in range(next_n)]


def test_speculative_row_ends_of_known_requests():
    ends = speculative_ends(5, 2) + speculative_ends(1, 2)
    assert ends == [4, 5, 0, 1]
    step = paged_step(INDEX_CASES[0], [5, 1], [0, 0, 1, 1], ends, seed=4)
    chosen = sparse_mla_ops.sparse_attn_indexer(*step, 6, 12).sort(dim=1).values
    assert chosen.tolist() == [
        [-1, -1, 0, 1, 2, 3],
        [-1, 0, 1, 2, 3, 4],
        [-1] * 6,
        [-1, -1, -1, -1, -1, 0],
    ]


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5, 8])
def test_speculative_rows_see_all_tokens_up_to_their_own(next_n):
    seq_lens = [12, 3]  # the second is shorter than most next_n: its first rows end at or below 0
    ends = [end for length in seq_lens for end in speculative_ends(length, next_n)]
    req_id = [request for request in range(2) for _ in range(next_n)]
    step = paged_step(INDEX_CASES[0], seq_lens, req_id, ends, seed=6)
    chosen = sparse_mla_ops.sparse_attn_indexer(*step, 12, 12)
    for row, end in zip(chosen.tolist(), ends):
        assert sorted(row) == [-1] * (12 - max(end, 0)) + list(range(end))


# ----------------------------------------------------------------------------------------------------------------------
# What holds for every operator


def call(op: str, variant: str = "", **arguments: Any) -> Any:
    """One call as a parameter of a test."""
    return pytest.param((op, arguments), id=f"{op}-{variant}" if variant else op)


def calls() -> Iterator[Any]:
    """A call of every operator, with every kind of cache. Whole numbers where sums have to be exact."""
    positions, slots, table = int32([2, 0, 5]), int32([4, -1, 1]), randn(6, 4, seed=1)
    q_nope, q_pe, k_pe = whole(3, 2, 12, seed=2), whole(3, 2, 4, seed=3), whole(3, 4, seed=4)
    yield call("rotary_embedding", q_pe=q_pe, k_pe=k_pe, positions=positions, cos_sin_cache=table, is_neox=True)
    yield call("concat_mla_q", q_nope=q_nope, q_pe=q_pe)
    yield call("concat_mla_q", "fp8", q_nope=q_nope, q_pe=q_pe, q_scale=scalar(0.3), q_dtype=FN)
    for case in (BF16_KV, FN_KV, DS_MLA_KV):
        rank, rope = case.kv_lora_rank, case.rope_dim
        tokens = {"kv_c": randn(3, rank, seed=5), "k_pe": randn(3, rope, seed=6), "slot_mapping": slots}
        yield call("concat_and_cache_mla", case.name, kv_cache=case.empty(2, 3), **tokens)
        yield call(
            "fused_qk_rope_concat_and_cache_mla",
            case.name,
            q_nope=randn(3, 2, rank, seed=2),
            q_pe=randn(3, 2, rope, seed=3),
            positions=positions,
            cos_sin_cache=randn(6, rope, seed=1),
            kv_cache=case.empty(2, 3),
            is_neox=False,
            **tokens,
        )
        yield call(
            "sparse_mla_fwd",
            case.name,
            q=whole(3, 2, rank + rope, seed=7),
            kv_cache=case.pack(randn(2, 3, rank + rope, seed=8)),
            indices=int32([[0, 3, -1], [5, 6, 1], [2, 2, 4]]),
            softmax_scale=0.1,
            kv_lora_rank=rank,
            topk_length=int32([3, 2, 1]),
            attn_sink=randn(2, seed=9),
            return_lse=True,
        )
    yield call(
        "sparse_mla_fwd",
        "flat",
        q=whole(3, 2, 16, seed=7),
        kv_cache=randn(2, 3, 16, seed=8),
        indices=int32([0, 3, -1, 5, 2]),
        softmax_scale=0.1,
        kv_lora_rank=12,
        indptr=int32([0, 3, 3, 5]),
        max_topk=3,
        return_lse=True,
    )
    for case in (INDEX_CASES[1], INDEX_CASES[3]):
        index_cache, block_table = case.pack(whole(6, 4, 10, seed=11)), int32([[3, 0, 5], [1, 4, 2]])
        paged = {
            "q": whole(3, 4, 10, seed=10),
            "index_cache": index_cache,
            "weights": whole(3, 4, seed=12),
            "row_ends": int32([7, 3, 9]),
            "block_table": block_table,
            "req_id": int32([1, 0, 1]),
            "max_len": 12,
        }
        yield call("paged_mqa_logits", case.name, **paged)
        yield call("sparse_attn_indexer", case.name, k=5, **paged)
        yield call(
            "gather_indexer_k_cache",
            case.name,
            index_cache=index_cache,
            block_table=block_table,
            cu_seq_lens=int32([0, 9, 14]),
            rows=15,
        )
        yield call(
            "indexer_k_quant_and_cache",
            case.name,
            k=randn(3, 10, seed=13),
            index_cache=case.pack(torch.zeros(2, 3, 10)),
            slot_mapping=slots,
        )
    yield call(
        "indexer_q_rope_quant",
        q=randn(3, 4, 10, seed=14),
        positions=positions,
        cos_sin_cache=table,
        weights=randn(3, 4, seed=15),
        softmax_scale=0.5,
        is_neox=True,
        q_dtype=FN,
    )
    windows = {"row_starts": int32([0, 2, 1]), "row_ends": int32([9, 5, 4])}
    yield call(
        "mqa_logits",
        q=whole(3, 4, 10, seed=16),
        k=whole(9, 10, seed=17),
        weights=whole(3, 4, seed=18),
        k_scale=torch.exp2(whole(9, seed=19)),
        **windows,
    )
    yield call("top_k_per_row", logits=randn(3, 9, seed=20), k=4, **windows)
    yield call(
        "convert_req_index_to_global_index",
        req_id=int32([1, 0, 2]),
        block_table=int32([[3, 0], [1, 4]]),
        token_indices=int32([[0, 5, -1], [7, 8, 1], [0, 1, 2]]),
        block_size=4,
    )


CALLS = list(calls())
CACHES = ("kv_cache", "index_cache")
WRITTEN = {
    "concat_and_cache_mla": "kv_cache",
    "fused_qk_rope_concat_and_cache_mla": "kv_cache",
    "indexer_k_quant_and_cache": "index_cache",
}
every_call = pytest.mark.parametrize("call", CALLS)


def run(op: str, arguments: dict[str, Any]) -> list[Tensor]:
    """The outputs of the operator."""
    outputs = getattr(sparse_mla_ops, op)(**arguments)
    return [] if outputs is None else list(outputs) if isinstance(outputs, tuple) else [outputs]


def copied(
    arguments: dict[str, Any], change: Callable[[str, Tensor], Tensor] = lambda _, value: value
) -> dict[str, Any]:
    """Copies of the arguments, with `change(name, tensor)` in place of each tensor."""
    return {
        name: change(name, value.clone()) if isinstance(value, Tensor) else value for name, value in arguments.items()
    }


def run_on(op: str, arguments: dict[str, Any]) -> list[Tensor]:
    """The outputs, and the cache if the operator writes one."""
    return run(op, arguments) + [arguments[WRITTEN[op]] for _ in range(op in WRITTEN)]


def test_every_operator_is_called():
    assert {parameter.values[0][0] for parameter in CALLS} == set(sparse_mla_ops.ops.__all__)


@every_call
def test_integers_may_be_int64(call):
    op, arguments = call
    wide = copied(arguments, lambda _, value: value.long() if value.dtype == torch.int32 else value)
    for actual, expected in zip(run_on(op, wide), run_on(op, copied(arguments)), strict=True):
        assert_same_bits(actual, expected)


@every_call
@pytest.mark.parametrize("restride", [every_other, permuted])
def test_strides_do_not_change_the_result(call, restride):
    def other_strides(name: str, value: Tensor) -> Tensor:
        if name in CACHES:
            return with_pitch(value, "slab")[1]
        return restride(value) if value.dim() else value

    op, arguments = call
    strided = copied(arguments, other_strides)
    for actual, expected in zip(run_on(op, strided), run_on(op, copied(arguments)), strict=True):
        assert_same_bits(actual, expected)


@every_call
def test_only_a_cache_that_is_written_changes(call):
    op, arguments = call
    used = copied(arguments)
    run(op, used)
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    different = [name for name in tensors if as_bytes(used[name]) != as_bytes(arguments[name])]
    assert different == [name for name in tensors if name == WRITTEN.get(op)]


@every_call
def test_outputs_are_fresh_and_contiguous(call):
    op, arguments = call
    used = copied(arguments)
    inputs = {value.untyped_storage().data_ptr() for value in used.values() if isinstance(value, Tensor)}
    for output in run(op, used):
        assert output.is_contiguous()
        assert output.untyped_storage().data_ptr() not in inputs


@every_call
def test_chunks_do_not_change_the_result(call, monkeypatch):
    op, arguments = call
    expected = run_on(op, copied(arguments))
    monkeypatch.setattr(reference, "WORKSPACE_ELEMENTS", 1)  # one row at a time
    for actual, wanted in zip(run_on(op, copied(arguments)), expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=1e-6, atol=1e-6)
