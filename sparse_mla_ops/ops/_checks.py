"""Checks that operators share. Each raises ValueError with what was expected, what came and, if not plain, what to do.

They look at metadata only, so they hold under tracing as well; nothing here reads a tensor's values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla_ops.formats import FLOAT_DTYPES, FP8_MAX

INTEGERS = (torch.int32, torch.int64)
FLOATS = FLOAT_DTYPES
FLOATS_OR_FP8 = (*FLOAT_DTYPES, *FP8_MAX)


def check_shape(name: str, tensor: Tensor, letters: str, *sizes: int | None) -> None:
    """`tensor` has one dimension per word of `letters` and the given sizes; None leaves a size free."""
    if tensor.dim() == len(sizes):
        for have, want in zip(tensor.shape, sizes):
            if want is not None and have != want:
                break
        else:
            return
    known = ", ".join(f"{letter}={size}" for letter, size in zip(letters.split(), sizes) if size is not None)
    expected = f"[{', '.join(letters.split())}]" + (f" with {known}" if known else "")
    raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")


def check_row_count(name: str, tensor: Tensor, rows: int, given_by: str) -> None:
    """`tensor` has at least `rows` rows; more are ignored (graph padding)."""
    if tensor.shape[0] < rows:
        raise ValueError(
            f"{name}: expected at least T={rows} rows, as many as {given_by}, got {tuple(tensor.shape)}; "
            "extra rows are ignored, missing ones are not made up"
        )


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {expected}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_same_device(**tensors: Tensor | None) -> None:
    """All tensors are on the device of the first one."""
    first = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name}: expected on {device} as {first} is, got {tensor.device}; move it there")


def check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_choice(name: str, value: str | None, *choices: str | None) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(repr(choice) for choice in choices)}, got {value!r}")


def check_scale(name: str, scale: Tensor | None) -> None:
    """A scale is one fp32 value on the device; that it is finite and positive is checked where it is made."""
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(
            f"{name}: expected a one-element float32 tensor, got {tuple(scale.shape)} {scale.dtype}; "
            "scales are tensors so that a new value recompiles nothing"
        )


def check_rope_table(cos_sin_cache: Tensor) -> None:
    check_shape("cos_sin_cache", cos_sin_cache, "P R", None, None)
    check_dtype("cos_sin_cache", cos_sin_cache, *FLOATS)
    if cos_sin_cache.shape[1] % 2:
        raise ValueError(
            f"cos_sin_cache: expected an even width R (R/2 cosines, then R/2 sines), got {tuple(cos_sin_cache.shape)}"
        )
    check_positive("cos_sin_cache rows P", cos_sin_cache.shape[0])


def check_cache_strides(name: str, cache: Tensor) -> None:
    """[NB, BS, row] with elements of a row side by side. The pitch of blocks and of rows is free."""
    check_shape(name, cache, "NB BS row", None, None, None)
    check_positive(f"{name} blocks NB", cache.shape[0])
    check_positive(f"{name} block size BS", cache.shape[1])
    if any(size > 1 and stride == 0 for size, stride in zip(cache.shape, cache.stride())):
        raise ValueError(
            f"{name}: expected a place for every row, got strides {cache.stride()}: an expanded tensor repeats one; "
            "allocate the cache in full"
        )
    if cache.stride(2) != 1:
        raise ValueError(
            f"{name}: expected rows with stride 1 in the last dimension, got strides {cache.stride()}; "
            "a cache is written in place, so it is never copied to another layout"
        )


def check_index_cache_strides(index_cache: Tensor) -> None:
    """A quantised indexer cache keeps the scales of a block behind its values, so a block has no gaps."""
    check_cache_strides("index_cache", index_cache)
    if index_cache.dtype == torch.uint8 and index_cache.stride(1) != index_cache.shape[2]:
        raise ValueError(
            f"index_cache: expected blocks without gaps, stride(1) == {index_cache.shape[2]}, "
            f"got strides {index_cache.stride()}; only the pitch between blocks is free"
        )


def check_target_dtype(name: str, dtype: torch.dtype | None, source: torch.dtype) -> None:
    """The dtype a query is produced in: None or its own dtype, or fp8."""
    if dtype is not None and dtype != source and dtype not in FP8_MAX:
        raise ValueError(f"{name}: expected None, {source} (the input's own dtype) or an fp8 dtype, got {dtype}")
