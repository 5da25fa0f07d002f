"""Byte layouts of the KV cache and of the indexer cache, packed and unpacked in pure PyTorch.

A cache is a sequence of NB blocks of BS tokens. Token `slot` lives at `cache[slot // BS, slot % BS]`; the pitch between
blocks and between rows is the tensor's own stride, so a cache may be a slice of a larger slab.

KV cache, by shape and dtype (L = kv_lora_rank, R = rope dim, W = L + R):

=============  ================================  ==================================================================
layout         tensor                            one token
=============  ================================  ==================================================================
plain          [NB, BS, W] fp32, bf16 or fp16    L latent values, then R rope values
fp8            [NB, BS, W] e4m3fn or e4m3fnuz,   the same, each stored as value / kv_scale
               or uint8 with `fp8_dtype`
fp8_ds_mla     [NB, BS, 656] uint8               bytes 0..511: 512 fp8 latent values; 512..527: 4 fp32 scales, scale j
                                                 for values 128j..128j+127; 528..655: 64 bf16 rope values, 0 if R = 0
=============  ================================  ==================================================================

Indexer cache (D = index head dim):

=============  ================================  ==================================================================
plain          [NB, BS, D] fp32, bf16 or fp16    D values
fp8            [NB, BS, D + 4] uint8             per *block*: BS·D fp8 values, then BS fp32 scales, one per token
=============  ================================  ==================================================================

The 656-byte row and the 132-byte indexer row (D = 128) are the ones of FlashMLA, DeepGEMM and vLLM. In every layout
`real = stored * scale`, and stores saturate at the largest finite value (448 for e4m3fn, 240 for e4m3fnuz).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AMAX_FLOOR = 1e-4
"""Smallest amax (indexer) or scale (656-byte rows), so that a row of zeros gets a scale that is not 0."""

DS_MLA_LATENT, DS_MLA_GROUP, DS_MLA_ROPE = 512, 128, 64
DS_MLA_SCALES_AT = DS_MLA_LATENT
DS_MLA_ROPE_AT = DS_MLA_SCALES_AT + 4 * (DS_MLA_LATENT // DS_MLA_GROUP)
DS_MLA_BYTES = DS_MLA_ROPE_AT + 2 * DS_MLA_ROPE
INDEX_SCALE_BYTES = 4


class KVLayout(NamedTuple):
    """How the bytes of a KV cache are to be read. `kind` is "plain", "fp8" or "fp8_ds_mla" (see the module's table)."""

    kind: str
    dtype: torch.dtype
    """Type of the stored latent values; for the fp8 kinds also the encoding."""
    kv_lora_rank: int
    rope_dim: int

    @property
    def quantized(self) -> bool:
        return self.kind != "plain"


class IndexLayout(NamedTuple):
    """How the bytes of an indexer cache are to be read. `quantized` rows carry one fp32 scale per token."""

    dtype: torch.dtype
    head_dim: int

    @property
    def quantized(self) -> bool:
        return self.dtype in FP8_MAX


# ----------------------------------------------------------------------------------------------------------------------
# Which layout a tensor has


def fp8_encoding(name: str, cache: Tensor, fp8_dtype: torch.dtype | None) -> torch.dtype | None:
    """The fp8 encoding of `cache`, or None if it is not quantised.

    The tensor's own dtype decides; `fp8_dtype` says it for raw bytes (uint8) only, where None means e4m3fn.
    """
    if fp8_dtype is not None and fp8_dtype not in FP8_MAX:
        raise ValueError(f"fp8_dtype: expected torch.float8_e4m3fn or torch.float8_e4m3fnuz, got {fp8_dtype}")
    if cache.dtype == torch.uint8:
        return fp8_dtype or torch.float8_e4m3fn
    if fp8_dtype is not None and fp8_dtype != cache.dtype:
        raise ValueError(
            f"fp8_dtype: {name} is {cache.dtype}, which says how it is stored, but fp8_dtype={fp8_dtype}; "
            "leave fp8_dtype out (it is for uint8 caches)"
        )
    return cache.dtype if cache.dtype in FP8_MAX else None


def kv_cache_layout(
    kv_cache: Tensor, kv_lora_rank: int, rope_dim: int, fp8_dtype: torch.dtype | None = None
) -> KVLayout:
    """The layout of a KV cache [NB, BS, row] that holds latents of `kv_lora_rank` and rope parts of `rope_dim`.

    Raises ValueError for a dtype or a row width that is none of the known layouts.
    """
    width = kv_cache.shape[-1]
    encoding = fp8_encoding("kv_cache", kv_cache, fp8_dtype)
    if encoding is None:
        if kv_cache.dtype not in FLOAT_DTYPES:
            raise ValueError(f"kv_cache: expected fp32, bf16, fp16, an fp8 dtype or uint8, got {kv_cache.dtype}")
        encoding, kind = kv_cache.dtype, "plain"
    elif kv_cache.dtype == torch.uint8 and width == DS_MLA_BYTES:
        if kv_lora_rank != DS_MLA_LATENT or rope_dim not in (0, DS_MLA_ROPE):
            raise ValueError(
                f"kv_cache: rows of {DS_MLA_BYTES} bytes hold a latent of {DS_MLA_LATENT} and a rope part of "
                f"{DS_MLA_ROPE} or 0, got L={kv_lora_rank}, R={rope_dim}; use a cache [NB, BS, L + R] of an fp8 dtype"
            )
        return KVLayout("fp8_ds_mla", encoding, kv_lora_rank, rope_dim)
    else:
        kind = "fp8"
    if width != kv_lora_rank + rope_dim:
        known = f"W = L + R = {kv_lora_rank + rope_dim}"
        if kv_cache.dtype == torch.uint8:
            known += f", or {DS_MLA_BYTES} bytes (fp8_ds_mla)"
        raise ValueError(f"kv_cache: expected rows of {known}, got {tuple(kv_cache.shape)} {kv_cache.dtype}")
    return KVLayout(kind, encoding, kv_lora_rank, rope_dim)


def index_cache_layout(index_cache: Tensor, fp8_dtype: torch.dtype | None = None) -> IndexLayout:
    """The layout of an indexer cache: [NB, BS, D] unquantised, or [NB, BS, D + 4] uint8."""
    encoding = fp8_encoding("index_cache", index_cache, fp8_dtype)
    head_dim = index_cache.shape[-1] - (INDEX_SCALE_BYTES if index_cache.dtype == torch.uint8 else 0)
    if encoding is not None and index_cache.dtype == torch.uint8 and head_dim > 0:
        return IndexLayout(encoding, head_dim)
    if index_cache.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"index_cache: expected fp32, bf16 or fp16 [NB, BS, D], or uint8 [NB, BS, D + 4] for fp8 keys, "
            f"got {index_cache.dtype} {tuple(index_cache.shape)}"
        )
    return IndexLayout(index_cache.dtype, head_dim)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 → fp8, round to nearest even, saturating. NaN stays NaN."""
    limit = FP8_MAX[dtype]
    return x.float().clamp(-limit, limit).to(dtype)


def quantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x / scale as fp8: IEEE division in fp32, then `to_fp8`. `scale` broadcasts against x; None means 1."""
    x = x.float()
    return to_fp8(x if scale is None else x / scale, dtype)


def dequantize(x: Tensor, scale: Tensor | None) -> Tensor:
    """stored * scale in fp32. `scale` broadcasts against x; None means 1."""
    x = x.float()
    return x if scale is None else x * scale


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) for positive normal fp32 x, exactly: a mantissa that is not zero carries into the exponent."""
    mantissa = (1 << 23) - 1
    return ((x.float().view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude along the last dimension, in fp32. NaN does not count: it is stored as NaN under any scale.
    Infinity counts as the largest finite value, so that it saturates and leaves the scale finite."""
    magnitude = x.float().abs()
    return torch.where(magnitude.isnan(), 0.0, magnitude).amax(-1).clamp(max=torch.finfo(torch.float32).max)


def ds_mla_scales(latent: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of 656-byte rows: [..., 512] → [..., 4] fp32, 2^ceil(log2(max(amax / 448, 1e-4))) per group of 128.

    The form of FlashMLA's quantiser and of vLLM's fused writer. e4m3fnuz divides by 240 instead of 448.
    """
    amax = _amax(latent.unflatten(-1, (-1, DS_MLA_GROUP)))
    return round_up_to_power_of_two((amax / FP8_MAX[dtype]).clamp(min=AMAX_FLOOR))


def index_scales(x: Tensor, dtype: torch.dtype, scale_format: str) -> Tensor:
    """Scales of indexer queries and keys: [..., D] → [...] fp32, max(amax, 1e-4) / 448 (240 for e4m3fnuz).

    "ue8m0" rounds it up to a power of two; "fp32" keeps it.
    """
    scale = _amax(x).clamp(min=AMAX_FLOOR) / FP8_MAX[dtype]
    return round_up_to_power_of_two(scale) if scale_format == "ue8m0" else scale


# ----------------------------------------------------------------------------------------------------------------------
# Rows as bytes


def encode_kv_rows(kv_c: Tensor, k_pe: Tensor, layout: KVLayout, kv_scale: Tensor | None = None) -> Tensor:
    """Rows of a KV cache as bytes: kv_c [..., L], k_pe [..., R] → uint8 [..., row bytes].

    kv_scale: one fp32 value, used by the "fp8" layout only.
    """
    if layout.kind == "fp8_ds_mla":
        scales = ds_mla_scales(kv_c, layout.dtype)
        groups = kv_c.float().unflatten(-1, (-1, DS_MLA_GROUP))
        latent = quantize(groups, scales.unsqueeze(-1), layout.dtype).flatten(-2)
        rope = k_pe if layout.rope_dim else kv_c.new_zeros((*kv_c.shape[:-1], DS_MLA_ROPE))
        parts = (latent, scales, rope.to(torch.bfloat16).contiguous())
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
    row = torch.cat((kv_c, k_pe), dim=-1)
    stored = quantize(row, kv_scale, layout.dtype) if layout.kind == "fp8" else row.to(layout.dtype)
    return stored.view(torch.uint8)


def decode_kv_rows(rows: Tensor, layout: KVLayout, kv_scale: Tensor | None = None) -> Tensor:
    """The inverse of `encode_kv_rows`: uint8 [..., row bytes] (contiguous) → fp32 [..., L + R]."""
    if layout.kind == "fp8_ds_mla":
        latent = rows[..., :DS_MLA_SCALES_AT].view(layout.dtype).unflatten(-1, (-1, DS_MLA_GROUP))
        scales = rows[..., DS_MLA_SCALES_AT:DS_MLA_ROPE_AT].contiguous().view(torch.float32)
        rope = rows[..., DS_MLA_ROPE_AT:].contiguous().view(torch.bfloat16)[..., : layout.rope_dim]
        return torch.cat((dequantize(latent, scales.unsqueeze(-1)).flatten(-2), rope.float()), dim=-1)
    stored = rows.view(layout.dtype)
    return dequantize(stored, kv_scale) if layout.kind == "fp8" else stored.float()


def index_cache_fields(index_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a quantised indexer cache: value bytes [NB, BS, D] and scale bytes [NB, BS, 4], both uint8.

    Needs tokens that follow each other without gaps inside a block; the pitch between blocks is free.
    """
    num_blocks, block_size, row = index_cache.shape
    blocks = index_cache.view(num_blocks, block_size * row)
    values_end = block_size * (row - INDEX_SCALE_BYTES)
    return blocks[:, :values_end].unflatten(1, (block_size, -1)), blocks[:, values_end:].unflatten(1, (block_size, -1))


# ----------------------------------------------------------------------------------------------------------------------
# Whole caches


def pack_kv_cache(
    kv_c: Tensor, k_pe: Tensor, dtype: torch.dtype | str, kv_scale: float = 1.0, fp8_dtype: torch.dtype | None = None
) -> Tensor:
    """A KV cache holding kv_c [NB, BS, L] and k_pe [NB, BS, R].

    dtype: fp32, bf16, fp16 or an fp8 dtype for [NB, BS, L + R]; "fp8_ds_mla" for 656-byte rows, whose encoding is
    `fp8_dtype` (default e4m3fn). kv_scale is used by fp8 dtypes only.
    """
    num_blocks, block_size, kv_lora_rank = kv_c.shape
    cache = empty_kv_cache(num_blocks, block_size, kv_lora_rank, k_pe.shape[2], dtype, kv_c.device)
    layout = kv_cache_layout(cache, kv_lora_rank, k_pe.shape[2], fp8_dtype)
    scale = torch.tensor(kv_scale, dtype=torch.float32, device=kv_c.device)
    return encode_kv_rows(kv_c, k_pe, layout, scale).view(cache.dtype)


def unpack_kv_cache(
    kv_cache: Tensor, kv_lora_rank: int, rope_dim: int, kv_scale: float = 1.0, fp8_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The real values of a KV cache in fp32: kv_c [NB, BS, L] and k_pe [NB, BS, R]."""
    layout = kv_cache_layout(kv_cache, kv_lora_rank, rope_dim, fp8_dtype)
    scale = torch.tensor(kv_scale, dtype=torch.float32, device=kv_cache.device)
    rows = decode_kv_rows(kv_cache.contiguous().view(torch.uint8), layout, scale)
    return rows[..., :kv_lora_rank], rows[..., kv_lora_rank:]


def pack_index_cache(k: Tensor, dtype: torch.dtype, scale_format: str = "ue8m0") -> Tensor:
    """An indexer cache holding k [NB, BS, D]; an fp8 dtype gives the uint8 [NB, BS, D + 4] layout."""
    if dtype not in FP8_MAX:
        return k.to(dtype).contiguous()
    num_blocks, block_size, head_dim = k.shape
    cache = empty_index_cache(num_blocks, block_size, head_dim, dtype, k.device)
    values, scales = index_cache_fields(cache)
    scale = index_scales(k, dtype, scale_format)
    values.copy_(quantize(k, scale.unsqueeze(-1), dtype).view(torch.uint8))
    scales.copy_(scale.unsqueeze(-1).view(torch.uint8))
    return cache


def unpack_index_cache(index_cache: Tensor, fp8_dtype: torch.dtype | None = None) -> Tensor:
    """The real keys of an indexer cache in fp32: [NB, BS, D]."""
    layout = index_cache_layout(index_cache, fp8_dtype)
    if not layout.quantized:
        return index_cache.float()
    values, scales = index_cache_fields(index_cache)
    return dequantize(values.contiguous().view(layout.dtype), scales.contiguous().view(torch.float32))


def empty_kv_cache(
    num_blocks: int,
    block_size: int,
    kv_lora_rank: int,
    rope_dim: int,
    dtype: torch.dtype | str,
    device: torch.device | str | None = None,
) -> Tensor:
    """A zeroed KV cache; dtype as in `pack_kv_cache`."""
    if dtype == "fp8_ds_mla":
        cache = torch.zeros(num_blocks, block_size, DS_MLA_BYTES, dtype=torch.uint8, device=device)
    elif isinstance(dtype, torch.dtype) and (dtype in FLOAT_DTYPES or dtype in FP8_MAX):
        cache = torch.zeros(num_blocks, block_size, kv_lora_rank + rope_dim, dtype=dtype, device=device)
    else:
        raise ValueError(f'kv dtype: expected fp32, bf16, fp16, an fp8 dtype or "fp8_ds_mla", got {dtype!r}')
    kv_cache_layout(cache, kv_lora_rank, rope_dim)
    return cache


def empty_index_cache(
    num_blocks: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """A zeroed indexer cache; an fp8 dtype gives the uint8 [NB, BS, D + 4] layout."""
    if dtype in FP8_MAX:
        width, dtype = head_dim + INDEX_SCALE_BYTES, torch.uint8
    elif dtype in FLOAT_DTYPES:
        width = head_dim
    else:
        raise ValueError(f"index dtype: expected fp32, bf16, fp16 or an fp8 dtype, got {dtype!r}")
    return torch.zeros(num_blocks, block_size, width, dtype=dtype, device=device)
