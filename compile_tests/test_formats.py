"""Cache layouts against byte maps and fp8 tables written out in plain Python.

The oracles here share nothing with `sparse_mla_ops.formats`: they decode fp8 from its bit fields, round by looking for
the nearest entry of a table, and place bytes with `struct` at addresses spelled out from the layout's description.
Other tests rely on `formats`; this file is why they may.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_mla_ops import formats

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LARGEST = {FN: 448.0, FNUZ: 240.0}

encodings = pytest.mark.parametrize("encoding", [FN, FNUZ], ids=["e4m3fn", "e4m3fnuz"])
scale_formats = pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
# The data of a whole cache is drawn by seed: hypothesis is slow at drawing thousands of floats.
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=20, deadline=None)
many = settings(max_examples=200, deadline=None)


# ----------------------------------------------------------------------------------------------------------------------
# Oracles


def fp32(x: float) -> float:
    """x rounded to fp32. What one operation of two fp32 values gives in double rounds correctly to fp32 through it."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def next_fp32(x: float, direction: int) -> float:
    """The fp32 neighbour of a positive fp32 x, above (+1) or below (−1)."""
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", x))[0] + direction))[0]


def decode_fp8(byte: int, encoding: torch.dtype) -> float:
    """The value of a byte s eeee mmm: bias 7 and NaN at s1111111 in e4m3fn, bias 8 and NaN at 0x80 in e4m3fnuz."""
    if encoding == FN:
        bias, is_nan = 7, byte & 0x7F == 0x7F
    else:
        bias, is_nan = 8, byte == 0x80
    if is_nan:
        return math.nan
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    magnitude = math.ldexp(mantissa, -2 - bias) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 3 - bias)
    return -magnitude if byte & 0x80 else magnitude


MAGNITUDES = {
    encoding: [value for byte in range(0x80) if not math.isnan(value := decode_fp8(byte, encoding))]
    for encoding in LARGEST
}
"""Finite values of the positive bytes; a value's index is its byte."""


def encode_fp8(x: float, encoding: torch.dtype) -> int:
    """The byte nearest to a finite x, ties to the even byte, saturating."""
    table, magnitude = MAGNITUDES[encoding], min(abs(x), LARGEST[encoding])
    byte = bisect.bisect_left(table, magnitude)
    if table[byte] != magnitude:
        below, above = magnitude - table[byte - 1], table[byte] - magnitude
        if below < above or (below == above and byte % 2 == 1):
            byte -= 1
    if byte == 0 and encoding == FNUZ:
        return 0  # it has no −0: that byte is NaN
    return byte | (0x80 if math.copysign(1.0, x) < 0 else 0)


def power_of_two_above(x: float) -> float:
    """The smallest power of two ≥ x."""
    mantissa, exponent = math.frexp(x)  # x = mantissa · 2^exponent, 0.5 ≤ mantissa < 1
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def bf16_bytes(x: float) -> bytes:
    """x as bf16: the upper half of its fp32 bits, rounded to nearest even. For finite x."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def ds_mla_row(latent: list[float], rope: list[float], encoding: torch.dtype) -> bytes:
    """One 656-byte row: 512 fp8 values, 4 fp32 scales, 64 bf16 values."""
    row = bytearray(656)
    for group in range(4):
        values = latent[128 * group : 128 * group + 128]
        amax = max(abs(value) for value in values)
        scale = power_of_two_above(max(fp32(amax / LARGEST[encoding]), fp32(1e-4)))
        struct.pack_into("<f", row, 512 + 4 * group, scale)
        for i, value in enumerate(values):
            row[128 * group + i] = encode_fp8(fp32(value / scale), encoding)
    for i, value in enumerate(rope):
        row[528 + 2 * i : 528 + 2 * i + 2] = bf16_bytes(value)
    return bytes(row)


def index_block(keys: list[list[float]], encoding: torch.dtype, scale_format: str) -> bytes:
    """One block of an fp8 indexer cache: all values first, then one fp32 scale per token."""
    block_size, head_dim = len(keys), len(keys[0])
    block = bytearray(block_size * (head_dim + 4))
    for token, key in enumerate(keys):
        amax = max(max(abs(value) for value in key), fp32(1e-4))
        scale = fp32(amax / LARGEST[encoding])
        if scale_format == "ue8m0":
            scale = power_of_two_above(scale)
        for d, value in enumerate(key):
            block[token * head_dim + d] = encode_fp8(fp32(value / scale), encoding)
        struct.pack_into("<f", block, block_size * head_dim + 4 * token, scale)
    return bytes(block)


# ----------------------------------------------------------------------------------------------------------------------
# Data and small helpers


def random_values(seed: int, *shape: int) -> Tensor:
    """fp32 values of very different sizes within a row, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 8, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
    return values * (torch.rand(shape, generator=generator) > 0.05)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bytes: tells −0 from +0, and lets a NaN equal itself."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


def as_bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


def cycle_of_finite_bytes(encoding: torch.dtype, count: int) -> bytes:
    """Every byte that is not NaN, over and over."""
    finite = [byte for byte in range(256) if not math.isnan(decode_fp8(byte, encoding))]
    return bytes(finite[i % len(finite)] for i in range(count))


def in_slab(cache: Tensor) -> tuple[Tensor, Tensor]:
    """(slab, view): `cache` as layer 1 of a slab of 3, so that its blocks lie three blocks apart."""
    slab = cache.new_empty(cache.shape[0], 3, *cache.shape[1:])
    slab.view(torch.uint8).fill_(0xA5)
    view = slab[:, 1]
    view.copy_(cache)
    return slab, view


class KVCase(NamedTuple):
    """A KV layout as a user names it: the dtype given to `pack_kv_cache`, and whether the tensor is then raw bytes."""

    name: str
    dtype: torch.dtype | str
    fp8_dtype: torch.dtype | None = None
    raw: bool = False
    kv_lora_rank: int = 12
    rope_dim: int = 4

    def pack(self, kv_c: Tensor, k_pe: Tensor, kv_scale: float = 1.0) -> Tensor:
        dtype = self.fp8_dtype if self.raw else self.dtype
        fp8_dtype = self.fp8_dtype if self.dtype == "fp8_ds_mla" else None
        cache = formats.pack_kv_cache(kv_c, k_pe, dtype, kv_scale, fp8_dtype)
        return cache.view(torch.uint8) if self.raw else cache

    def unpack(self, cache: Tensor, kv_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return formats.unpack_kv_cache(cache, self.kv_lora_rank, self.rope_dim, kv_scale, self.fp8_dtype)

    def values(self, seed: int, num_blocks: int = 2, block_size: int = 3) -> tuple[Tensor, Tensor]:
        row = random_values(seed, num_blocks, block_size, self.kv_lora_rank + self.rope_dim)
        return row[..., : self.kv_lora_rank], row[..., self.kv_lora_rank :]


UNQUANTISED = [KVCase("fp32", torch.float32), KVCase("bf16", torch.bfloat16), KVCase("fp16", torch.float16)]
PER_TENSOR_FP8 = [
    KVCase("e4m3fn", FN),
    KVCase("e4m3fnuz", FNUZ),
    KVCase("uint8_as_e4m3fn", torch.uint8, FN, raw=True),
    KVCase("uint8_as_e4m3fnuz", torch.uint8, FNUZ, raw=True),
]
NO_ROPE = [case._replace(name=f"{case.name}_no_rope", rope_dim=0) for case in UNQUANTISED + PER_TENSOR_FP8]
DS_MLA = [
    KVCase("ds_mla_e4m3fn", "fp8_ds_mla", FN, kv_lora_rank=512, rope_dim=64),
    KVCase("ds_mla_e4m3fnuz", "fp8_ds_mla", FNUZ, kv_lora_rank=512, rope_dim=64),
    KVCase("ds_mla_e4m3fn_no_rope", "fp8_ds_mla", FN, kv_lora_rank=512, rope_dim=0),
    KVCase("ds_mla_e4m3fnuz_no_rope", "fp8_ds_mla", FNUZ, kv_lora_rank=512, rope_dim=0),
]
ALL_KV = UNQUANTISED + PER_TENSOR_FP8 + NO_ROPE + DS_MLA


def kv_cases(cases: list[KVCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


# ----------------------------------------------------------------------------------------------------------------------
# fp8 numbers


@encodings
def test_dequantize_reads_every_byte_of_the_encoding(encoding):
    stored = torch.arange(256, dtype=torch.uint8).view(encoding)
    expected = torch.tensor([decode_fp8(byte, encoding) for byte in range(256)])
    torch.testing.assert_close(formats.dequantize(stored, None), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("byte", "encoding", "value"),
    [(0x38, FN, 1.0), (0x38, FNUZ, 0.5), (0x7E, FN, 448.0), (0x7F, FNUZ, 240.0), (0x01, FN, 2.0**-9)],
    ids=["0x38_fn", "0x38_fnuz", "largest_fn", "largest_fnuz", "smallest_fn"],
)
def test_known_byte_has_known_value_both_ways(byte, encoding, value):
    stored = torch.tensor([byte], dtype=torch.uint8)
    assert formats.dequantize(stored.view(encoding), None).item() == value
    assert formats.to_fp8(torch.tensor([value]), encoding).view(torch.uint8).item() == byte


def test_byte_0x80_is_minus_zero_in_e4m3fn_and_nan_in_e4m3fnuz():
    stored = torch.tensor([0x80], dtype=torch.uint8)
    minus_zero = formats.dequantize(stored.view(FN), None).item()
    assert minus_zero == 0
    assert math.copysign(1.0, minus_zero) == -1.0
    assert math.isnan(formats.dequantize(stored.view(FNUZ), None).item())


@encodings
def test_to_fp8_rounds_to_nearest_even_around_every_midpoint(encoding):
    table = MAGNITUDES[encoding]
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(table)]  # exact in fp32
    around = [next_fp32(x, direction) for x in midpoints for direction in (-1, 1)]
    values = [sign * x for sign in (1.0, -1.0) for x in table + midpoints + around]
    stored = formats.to_fp8(torch.tensor(values), encoding).view(torch.uint8).tolist()
    assert stored == [encode_fp8(x, encoding) for x in values]


@encodings
def test_to_fp8_does_not_round_twice(encoding):
    # Just above the middle of 1 and 1.125. By way of bf16 or fp16 it would fall on the middle and then go down to even.
    x = torch.tensor([1.0625 + 2.0**-12, -1.0625 - 2.0**-12])
    assert formats.to_fp8(x, encoding).float().tolist() == [1.125, -1.125]


@encodings
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_to_fp8_saturates_at_the_largest_finite_value(encoding, source):
    largest = LARGEST[encoding]
    x = torch.tensor([largest, largest + 8, 1e4, math.inf, -largest - 8, -1e4, -math.inf], dtype=source)
    assert formats.to_fp8(x, encoding).float().tolist() == [largest] * 4 + [-largest] * 3


@encodings
def test_to_fp8_keeps_nan(encoding):
    assert formats.to_fp8(torch.tensor([math.nan, -math.nan, 1.0]), encoding).float().isnan().tolist() == [1, 1, 0]


@encodings
@pytest.mark.parametrize("x", [-0.0, -1e-30, -(2.0**-12)], ids=["minus_zero", "tiny", "below_half_the_smallest"])
def test_to_fp8_of_a_vanishing_negative_is_a_zero(x, encoding):
    # In e4m3fnuz the byte with only the sign bit set is NaN, so the sign of a zero has to go.
    expected = {FN: 0x80, FNUZ: 0x00}[encoding]
    assert formats.to_fp8(torch.tensor([x]), encoding).view(torch.uint8).item() == expected


@encodings
@many
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    scale=st.floats(2.0**-10, 2.0**10, width=32),
)
# The quotient is the middle of two bytes (of e4m3fn, then of e4m3fnuz); x · (1 / 7) in fp32 lies above it.
@example(values=[0.0888671875, 0.04443359375], scale=7.0)
def test_quantize_divides_by_the_scale_then_rounds_once(encoding, values, scale):
    stored = formats.quantize(torch.tensor(values), torch.tensor(scale), encoding)
    expected = [encode_fp8(fp32(value / scale), encoding) for value in values]
    assert stored.view(torch.uint8).tolist() == expected
    real = [fp32(decode_fp8(byte, encoding) * scale) for byte in expected]
    assert_same_bits(formats.dequantize(stored, torch.tensor(scale)), torch.tensor(real))


@encodings
def test_quantize_without_scale_is_scale_one(encoding):
    x = random_values(0, 64)
    assert_same_bits(formats.quantize(x, None, encoding), formats.quantize(x, torch.tensor(1.0), encoding))


@many
@given(st.floats(2.0**-126, 2.0**126, width=32))
@example(1.0)
@example(next_fp32(1.0, 1))
@example(next_fp32(1.0, -1))
@example(2.0**-126)
@example(2.0**126)
def test_round_up_to_power_of_two_is_exact(x):
    assert formats.round_up_to_power_of_two(torch.tensor([x])).item() == power_of_two_above(x)


def test_round_up_to_power_of_two_is_exact_around_every_power():
    powers = [math.ldexp(1.0, exponent) for exponent in range(-125, 127)]
    x = torch.tensor([[next_fp32(power, -1), power, next_fp32(power, 1)] for power in powers])
    assert formats.round_up_to_power_of_two(x).tolist() == [[power, power, 2 * power] for power in powers]


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic scales


@pytest.mark.parametrize(
    ("amax", "encoding", "scale"),
    [
        (0.0, FN, 2.0**-13),
        (1.0, FN, 2.0**-8),
        (3.0, FN, 2.0**-7),
        (448.0, FN, 1.0),
        (449.0, FN, 2.0),
        (0.0, FNUZ, 2.0**-13),
        (1.0, FNUZ, 2.0**-7),
        (240.0, FNUZ, 1.0),
        (241.0, FNUZ, 2.0),
    ],
)
def test_ds_mla_scale_of_a_known_amax(amax, encoding, scale):
    latent = torch.zeros(512)
    latent[128 + 5] = -amax  # group 1 only: the others keep the scale of zeros
    assert formats.ds_mla_scales(latent, encoding).tolist() == [2.0**-13, scale, 2.0**-13, 2.0**-13]


@pytest.mark.parametrize(
    ("amax", "encoding", "power_of_two", "raw"),
    [
        (0.0, FN, 2.0**-22, 1e-4 / 448),
        (1e-5, FN, 2.0**-22, 1e-4 / 448),
        (1.0, FN, 2.0**-8, 1 / 448),
        (448.0, FN, 1.0, 1.0),
        (449.0, FN, 2.0, 449 / 448),
        (0.0, FNUZ, 2.0**-21, 1e-4 / 240),
        (240.0, FNUZ, 1.0, 1.0),
        (241.0, FNUZ, 2.0, 241 / 240),
    ],
)
def test_index_scale_of_a_known_amax(amax, encoding, power_of_two, raw):
    key = torch.zeros(1, 8)
    key[0, 3] = -amax
    assert formats.index_scales(key, encoding, "ue8m0").tolist() == [power_of_two]
    torch.testing.assert_close(formats.index_scales(key, encoding, "fp32"), torch.tensor([raw]), rtol=1e-7, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# KV cache


@kv_cases(UNQUANTISED + NO_ROPE[:3])
@few
@given(seed=seeds, num_blocks=st.integers(1, 3), block_size=st.integers(1, 5))
def test_unquantised_cache_holds_the_values_rounded_to_its_dtype(case, seed, num_blocks, block_size):
    kv_c, k_pe = case.values(seed, num_blocks, block_size)
    # A scale means nothing for an unquantised cache, on either side.
    cache = case.pack(kv_c, k_pe, kv_scale=0.5)
    assert_same_bits(cache, torch.cat((kv_c, k_pe), -1).to(case.dtype))
    latent, rope = case.unpack(cache, kv_scale=3.0)
    assert_same_bits(latent, kv_c.to(case.dtype).float())
    assert_same_bits(rope, k_pe.to(case.dtype).float())


@kv_cases(PER_TENSOR_FP8 + NO_ROPE[3:])
@few
@given(seed=seeds, kv_scale=st.floats(2.0**-6, 2.0**6, width=32))
def test_fp8_cache_holds_the_quotients_of_latent_and_rope_alike(case, seed, kv_scale):
    encoding = case.fp8_dtype or case.dtype
    kv_c, k_pe = case.values(seed)
    cache = case.pack(kv_c, k_pe, kv_scale)
    assert cache.dtype == case.dtype
    stored = [encode_fp8(fp32(value / kv_scale), encoding) for value in torch.cat((kv_c, k_pe), -1).flatten().tolist()]
    assert as_bytes(cache) == bytes(stored)
    real = torch.tensor([fp32(decode_fp8(byte, encoding) * kv_scale) for byte in stored]).view(cache.shape)
    latent, rope = case.unpack(cache, kv_scale)
    assert_same_bits(latent, real[..., : case.kv_lora_rank])
    assert_same_bits(rope, real[..., case.kv_lora_rank :])


@kv_cases(DS_MLA)
@few
@given(seed=seeds)
def test_656_byte_row_follows_the_byte_map(case, seed):
    kv_c, k_pe = case.values(seed, num_blocks=1, block_size=2)
    cache = case.pack(kv_c, k_pe)
    assert cache.shape == (1, 2, 656)
    for token in range(2):
        expected = ds_mla_row(kv_c[0, token].tolist(), k_pe[0, token].tolist(), case.fp8_dtype)
        assert as_bytes(cache[0, token]) == expected


@kv_cases(DS_MLA)
def test_656_byte_row_is_read_by_the_byte_map(case):
    # A row that no writer of ours makes: scales that are not powers of two.
    row = bytearray(cycle_of_finite_bytes(case.fp8_dtype, 512)) + bytearray(144)
    struct.pack_into("<4f", row, 512, 0.3, 1.0, 7.5, 2.0**-13)
    for i in range(64):
        row[528 + 2 * i : 528 + 2 * i + 2] = bf16_bytes(i - 31.5)
    cache = torch.frombuffer(row, dtype=torch.uint8).view(1, 1, 656)
    scales = struct.unpack_from("<4f", row, 512)
    latent = [fp32(decode_fp8(row[i], case.fp8_dtype) * scales[i // 128]) for i in range(512)]
    actual_latent, actual_rope = case.unpack(cache)
    assert actual_latent.flatten().tolist() == latent
    assert actual_rope.flatten().tolist() == [i - 31.5 for i in range(case.rope_dim)]


@encodings
def test_656_byte_row_without_rope_has_a_zero_rope_part(encoding):
    latent = torch.full((1, 1, 512), 3.0)
    row = formats.pack_kv_cache(latent, torch.empty(1, 1, 0), "fp8_ds_mla", fp8_dtype=encoding)
    assert as_bytes(row)[528:] == bytes(128)


@kv_cases(ALL_KV)
@few
@given(seed=seeds)
def test_packing_again_changes_no_value(case, seed):
    kv_scale = 0.75
    once = case.unpack(case.pack(*case.values(seed), kv_scale), kv_scale)
    twice = case.unpack(case.pack(*once, kv_scale), kv_scale)
    for first, second in zip(once, twice):
        assert_same_bits(second, first)


@kv_cases(PER_TENSOR_FP8)
def test_fp8_cache_keeps_every_finite_byte(case):
    encoding = case.fp8_dtype or case.dtype
    data = torch.tensor(list(cycle_of_finite_bytes(encoding, 256)), dtype=torch.uint8).view(4, 4, 16)
    cache = data if case.raw else data.view(encoding)
    # 0.3 has no exact reciprocal: division and multiplication must still meet again.
    assert_same_bits(case.pack(*case.unpack(cache, 0.3), 0.3), cache)


@kv_cases(ALL_KV)
def test_kv_cache_keeps_zeros_exactly(case):
    kv_c, k_pe = torch.zeros(2, 3, case.kv_lora_rank), torch.zeros(2, 3, case.rope_dim)
    cache = case.pack(kv_c, k_pe, kv_scale=0.5)
    latent, rope = case.unpack(cache, kv_scale=0.5)
    assert_same_bits(latent, kv_c)
    assert_same_bits(rope, k_pe)
    if case.dtype == "fp8_ds_mla":
        assert as_bytes(cache[0, 0]) == bytes(512) + struct.pack("<f", 2.0**-13) * 4 + bytes(128)


@kv_cases(ALL_KV)
def test_kv_cache_keeps_nan_where_it_was(case):
    kv_c, k_pe = case.values(seed=1)
    kv_c[0, 1, 5] = math.nan
    if case.rope_dim:
        k_pe[1, 2, 3] = math.nan
    latent, rope = case.unpack(case.pack(kv_c, k_pe))
    assert latent[0, 1, 5].isnan()
    assert not latent[1].isnan().any()
    assert_same_bits(rope.isnan(), k_pe.isnan())


@kv_cases(ALL_KV)
def test_kv_cache_is_read_from_a_slab(case):
    kv_c, k_pe = case.values(seed=2)
    cache = case.pack(kv_c, k_pe)
    _, view = in_slab(cache)
    assert not view.is_contiguous()
    for from_view, from_cache in zip(case.unpack(view), case.unpack(cache)):
        assert_same_bits(from_view, from_cache)


# ----------------------------------------------------------------------------------------------------------------------
# Indexer cache


@pytest.mark.parametrize("dtype", formats.FLOAT_DTYPES, ids=["fp32", "bf16", "fp16"])
@few
@given(seed=seeds)
def test_unquantised_index_cache_holds_the_values_rounded_to_its_dtype(dtype, seed):
    k = random_values(seed, 2, 3, 20)
    cache = formats.pack_index_cache(k, dtype)
    assert_same_bits(cache, k.to(dtype))
    assert_same_bits(formats.unpack_index_cache(cache), k.to(dtype).float())


@encodings
@scale_formats
@pytest.mark.parametrize("head_dim", [128, 6], ids=["D128", "D6_scales_not_aligned"])
@few
@given(seed=seeds, block_size=st.sampled_from([1, 3, 16]))
def test_index_block_follows_the_byte_map(encoding, scale_format, head_dim, seed, block_size):
    k = random_values(seed, 2, block_size, head_dim)
    cache = formats.pack_index_cache(k, encoding, scale_format)
    assert cache.dtype == torch.uint8
    assert cache.shape == (2, block_size, head_dim + 4)
    for block in range(2):
        assert as_bytes(cache[block]) == index_block(k[block].tolist(), encoding, scale_format)


@encodings
def test_index_block_is_read_by_the_byte_map(encoding):
    block_size, head_dim = 3, 128
    block = bytearray(cycle_of_finite_bytes(encoding, block_size * head_dim)) + bytearray(4 * block_size)
    scales = [0.3, 2.0, 1e-3]
    struct.pack_into("<3f", block, block_size * head_dim, *scales)
    cache = torch.frombuffer(block, dtype=torch.uint8).view(1, block_size, head_dim + 4)
    for token, key in enumerate(formats.unpack_index_cache(cache, encoding)[0].tolist()):
        scale = fp32(scales[token])
        assert key == [fp32(decode_fp8(block[token * head_dim + d], encoding) * scale) for d in range(head_dim)]


@encodings
@scale_formats
@few
@given(seed=seeds)
def test_index_cache_is_within_half_a_step_of_the_keys(encoding, scale_format, seed):
    k = random_values(seed, 2, 4, 128)
    back = formats.unpack_index_cache(formats.pack_index_cache(k, encoding, scale_format), encoding)
    # 3 mantissa bits: 2^-4 of a normal value; subnormal steps are 2^-9 (2^-10 for e4m3fnuz) of the scale, and the scale
    # is at most 2 · amax / largest.
    step = k.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST[encoding] * 2.0**-8
    assert ((back - k).abs() <= k.abs() * 2.0**-4 * (1 + 1e-6) + step / 2).all()


@encodings
@scale_formats
def test_index_cache_keeps_zeros_exactly(encoding, scale_format):
    k = torch.zeros(2, 3, 128)
    cache = formats.pack_index_cache(k, encoding, scale_format)
    assert as_bytes(cache[1])[: 3 * 128] == bytes(3 * 128)
    assert_same_bits(formats.unpack_index_cache(cache, encoding), k)


@encodings
@scale_formats
def test_index_cache_keeps_nan_in_its_own_token(encoding, scale_format):
    k = random_values(3, 1, 3, 128)
    k[0, 1, 7] = math.nan
    back = formats.unpack_index_cache(formats.pack_index_cache(k, encoding, scale_format), encoding)
    assert back[0, 1, 7].isnan()
    assert not back[0, 0].isnan().any()
    assert not back[0, 2].isnan().any()


@encodings
def test_index_cache_is_read_from_a_slab(encoding):
    cache = formats.pack_index_cache(random_values(4, 2, 3, 128), encoding)
    _, view = in_slab(cache)
    assert not view.is_contiguous()
    assert_same_bits(formats.unpack_index_cache(view, encoding), formats.unpack_index_cache(cache, encoding))


def test_index_cache_fields_are_views_of_the_slab_and_reach_no_other_layer():
    slab, view = in_slab(torch.zeros(2, 3, 132, dtype=torch.uint8))
    values, scales = formats.index_cache_fields(view)
    values.fill_(1)
    scales.fill_(2)
    for block in range(2):
        assert as_bytes(slab[block, 1]) == b"\x01" * (3 * 128) + b"\x02" * (3 * 4)
        assert as_bytes(slab[block, 0]) == as_bytes(slab[block, 2]) == b"\xa5" * (3 * 132)


# ----------------------------------------------------------------------------------------------------------------------
# Which layout a tensor has


def cache_of(dtype: torch.dtype, width: int) -> Tensor:
    return torch.zeros(2, 4, width, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "width", "fp8_dtype", "rank", "rope", "kind", "encoding"),
    [
        (torch.bfloat16, 576, None, 512, 64, "plain", torch.bfloat16),
        (torch.float16, 512, None, 512, 0, "plain", torch.float16),
        (torch.float32, 656, None, 592, 64, "plain", torch.float32),
        (FN, 576, None, 512, 64, "fp8", FN),
        (FNUZ, 576, None, 512, 64, "fp8", FNUZ),
        (FNUZ, 576, FNUZ, 512, 64, "fp8", FNUZ),
        (torch.uint8, 576, None, 512, 64, "fp8", FN),
        (torch.uint8, 512, FNUZ, 512, 0, "fp8", FNUZ),
        (torch.uint8, 656, None, 512, 64, "fp8_ds_mla", FN),
        (torch.uint8, 656, FNUZ, 512, 0, "fp8_ds_mla", FNUZ),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_kv_cache_layout_of_a_known_row(dtype, width, fp8_dtype, rank, rope, kind, encoding):
    layout = formats.kv_cache_layout(cache_of(dtype, width), rank, rope, fp8_dtype)
    assert layout == formats.KVLayout(kind, encoding, rank, rope)
    assert layout.quantized == (kind != "plain")


@pytest.mark.parametrize(
    ("dtype", "width", "rank", "rope", "says"),
    [
        (torch.uint8, 660, 512, 64, ["576", "656", "(2, 4, 660)", "uint8"]),
        (torch.uint8, 576, 512, 0, ["512", "656", "(2, 4, 576)", "uint8"]),
        (torch.bfloat16, 656, 512, 64, ["576", "(2, 4, 656)", "bfloat16"]),
        (FN, 656, 512, 64, ["576", "(2, 4, 656)", "float8_e4m3fn"]),
        (torch.uint8, 656, 512, 32, ["512", "64", "L=512", "R=32"]),
        (torch.uint8, 656, 256, 64, ["512", "64", "L=256", "R=64"]),
        (torch.uint8, 656, 592, 64, ["512", "64", "L=592", "R=64"]),
        (torch.int8, 576, 512, 64, ["bf16", "fp8", "int8"]),
        (torch.float8_e5m2, 576, 512, 64, ["bf16", "fp8", "float8_e5m2"]),
    ],
    ids=[
        "660_bytes",
        "rope_not_said",
        "bf16_656",
        "fp8_656",
        "ds_mla_R32",
        "ds_mla_L256",
        "ds_mla_L592",
        "int8",
        "e5m2",
    ],
)
def test_kv_cache_layout_refuses_what_it_does_not_know(dtype, width, rank, rope, says):
    with pytest.raises(ValueError, match=r"^kv_cache: ") as error:
        formats.kv_cache_layout(cache_of(dtype, width), rank, rope)
    for expected_or_actual in says:
        assert expected_or_actual in str(error.value)


@pytest.mark.parametrize(
    "layout_of",
    [
        lambda cache, fp8_dtype: formats.kv_cache_layout(cache, 512, 64, fp8_dtype),
        lambda cache, fp8_dtype: formats.index_cache_layout(cache, fp8_dtype),
    ],
    ids=["kv_cache", "index_cache"],
)
@pytest.mark.parametrize(
    ("dtype", "fp8_dtype", "says"),
    [
        (torch.uint8, torch.bfloat16, ["float8_e4m3fn", "float8_e4m3fnuz", "torch.bfloat16"]),
        (torch.uint8, torch.float8_e5m2, ["float8_e4m3fn", "float8_e4m3fnuz", "torch.float8_e5m2"]),
        (torch.bfloat16, FN, ["torch.bfloat16", "float8_e4m3fn"]),
        (FN, FNUZ, ["torch.float8_e4m3fn,", "fp8_dtype=torch.float8_e4m3fnuz"]),
    ],
    ids=["bf16_encoding", "e5m2_encoding", "bf16_cache", "other_encoding"],
)
def test_fp8_dtype_that_contradicts_the_cache_is_refused(layout_of, dtype, fp8_dtype, says):
    with pytest.raises(ValueError, match=r"^fp8_dtype: ") as error:
        layout_of(cache_of(dtype, 576), fp8_dtype)
    for expected_or_actual in says:
        assert expected_or_actual in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "width", "fp8_dtype", "stored", "head_dim"),
    [
        (torch.bfloat16, 128, None, torch.bfloat16, 128),
        (torch.float32, 132, None, torch.float32, 132),
        (torch.uint8, 132, None, FN, 128),
        (torch.uint8, 132, FN, FN, 128),
        (torch.uint8, 68, FNUZ, FNUZ, 64),
    ],
    ids=["bf16", "fp32", "uint8", "uint8_as_e4m3fn", "uint8_as_e4m3fnuz"],
)
def test_index_cache_layout_of_a_known_row(dtype, width, fp8_dtype, stored, head_dim):
    layout = formats.index_cache_layout(cache_of(dtype, width), fp8_dtype)
    assert layout == formats.IndexLayout(stored, head_dim)
    assert layout.quantized == (dtype == torch.uint8)


@pytest.mark.parametrize("dtype", [FN, FNUZ, torch.int8], ids=["e4m3fn", "e4m3fnuz", "int8"])
def test_index_cache_layout_refuses_other_dtypes(dtype):
    # An fp8 tensor has no room for the scales.
    with pytest.raises(ValueError, match=r"index_cache: expected .*uint8 \[NB, BS, D \+ 4\].*got " + str(dtype)):
        formats.index_cache_layout(cache_of(dtype, 132))


# ----------------------------------------------------------------------------------------------------------------------
# New caches


@pytest.mark.parametrize(
    ("dtype", "width", "stored"),
    [
        (torch.float32, 576, torch.float32),
        (torch.bfloat16, 576, torch.bfloat16),
        (torch.float16, 576, torch.float16),
        (FN, 576, FN),
        (FNUZ, 576, FNUZ),
        ("fp8_ds_mla", 656, torch.uint8),
    ],
    ids=str,
)
def test_empty_kv_cache_is_zero_and_of_the_layout_asked_for(dtype, width, stored):
    cache = formats.empty_kv_cache(3, 4, 512, 64, dtype)
    assert cache.dtype == stored
    assert cache.shape == (3, 4, width)
    assert not any(as_bytes(cache))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint8, "fp8"], ids=str)
def test_empty_kv_cache_refuses_a_dtype_that_names_no_layout(dtype):
    with pytest.raises(ValueError, match=f"kv dtype: expected .*fp8_ds_mla.*got .*{dtype}"):
        formats.empty_kv_cache(3, 4, 512, 64, dtype)


def test_empty_kv_cache_refuses_a_rank_that_656_byte_rows_cannot_hold():
    with pytest.raises(ValueError, match="L=256, R=64"):
        formats.empty_kv_cache(3, 4, 256, 64, "fp8_ds_mla")


@pytest.mark.parametrize(
    ("dtype", "width", "stored"),
    [(torch.bfloat16, 128, torch.bfloat16), (FN, 132, torch.uint8), (FNUZ, 132, torch.uint8)],
    ids=str,
)
def test_empty_index_cache_is_zero_and_of_the_layout_asked_for(dtype, width, stored):
    cache = formats.empty_index_cache(3, 4, 128, dtype)
    assert cache.dtype == stored
    assert cache.shape == (3, 4, width)
    assert not any(as_bytes(cache))


def test_empty_index_cache_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"index dtype: expected .*got torch.uint8"):
        formats.empty_index_cache(3, 4, 128, torch.uint8)
