"""Portable Triton: one launch per operator (two for split-K attention), on any GPU that Triton compiles for.

Grids and block sizes follow from tensor shapes, dtypes and the device alone; what may be tuned comes from `tuned.json`.
fp8 products are carried out in fp16 on sm90, exactly: its small matrix instructions have no fp8.
Latents of 656-byte rows are multiplied in fp16 with a factor of 16 where tiles are converted whole: beyond 4094 they
overflow.
On CPU tensors the kernels run only in Triton's interpreter (TRITON_INTERPRET=1 before the first import), for tests.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_mla_ops import arch, formats, tuned
from sparse_mla_ops.kernels.cache_write import qk_rope_concat_cache_kernel, rotary_embedding_kernel
from sparse_mla_ops.kernels.common import DS_MLA, DS_MLA_GROUP, FP8, PLAIN
from sparse_mla_ops.kernels.sparse_mla import combine_splits_kernel, sparse_mla_kernel

Replay = Callable[[Tensor, tuple[Tensor, ...], list[int | None]], None]
"""As in `sparse_mla_ops.registry`, which backends do not import."""

INTERPRETED = not isinstance(sparse_mla_kernel, triton.runtime.JITFunction)

_TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}
_KV_FORMATS = {"plain": PLAIN.value, "fp8": FP8.value, "fp8_ds_mla": DS_MLA.value}
_PDL_ARCHS = ("sm90", "sm100", "sm103", "sm120", "sm121")
"""Where a kernel may be launched before the one ahead of it has ended (programmatic dependent launch)."""
MAX_LATENT = 512
"""Widest latent whose accumulator fits the registers of a program."""


# ----------------------------------------------------------------------------------------------------------------------
# The device


class Device(NamedTuple):
    """What launches depend on."""

    arch: str
    multiprocessors: int


_pretended: Device | None = None


@contextlib.contextmanager
def pretend_device(device: Device) -> Iterator[None]:
    """Within the block, launches are chosen as on `device`: to compile for GPUs that are not here."""
    global _pretended
    _pretended = device
    try:
        yield
    finally:
        _pretended = None


def _device(tensor: Tensor) -> Device:
    return _pretended or _real_device(tensor.device)


@functools.cache
def _real_device(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device("cpu", 4)
    return Device(arch.arch_name(device), torch.cuda.get_device_properties(device).multi_processor_count)


# ----------------------------------------------------------------------------------------------------------------------
# Launches


class Launch(NamedTuple):
    """One launch: the kernel, its grid, its arguments by name, and compiler options."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, Any]


_recorded: list[Launch] | None = None


class _Made(threading.local):
    """(launch, compiled kernel) of each launch since the current operator began, per thread."""

    def __init__(self) -> None:
        self.launches: list[tuple[Launch, Any]] = []


_made = _Made()


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Within the block, launches are collected in the yielded list instead of made."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    arguments: dict[str, Any],
    options: dict[str, Any],
    fp8_view: torch.dtype | None = None,
) -> None:
    """Launch `kernel`. fp8_view: the type in which it sees `cache`, where that is a tensor of raw bytes.

    What every kernel takes is added here: PDL, launched early where the architecture can, and EMULATED.
    """
    anything = next(value for value in arguments.values() if isinstance(value, Tensor))
    early = _device(anything).arch in _PDL_ARCHS and not INTERPRETED
    arguments = {**arguments, "PDL": early, "EMULATED": INTERPRETED}
    if early:
        options = {**options, "launch_pdl": True}
    seen = arguments
    if fp8_view is not None and arguments["cache"].dtype == torch.uint8:
        seen = {**arguments, "cache": arguments["cache"].view(fp8_view)}
    launch = Launch(kernel, (*grid, 1), seen, options)
    if _recorded is not None:
        _recorded.append(launch)
    else:
        compiled = kernel[launch.grid](**seen, **options)
        _made.launches.append((launch._replace(arguments=arguments), compiled))


class _Repeated(NamedTuple):
    """A launch to be made again. Triton's own call finds out anew which compiled kernel fits: most of its time."""

    run: Callable[..., None]
    """The compiled kernel on its grid."""
    values: tuple[Any, ...]
    """Arguments in order, None where a tensor goes."""
    tensors: tuple[tuple[int, int], ...]
    """(position among the arguments, position among the call's tensors)."""


def _replayable(function: Callable[..., None]) -> Callable[..., Replay | None]:
    """Have an operator's function return a `Replay` of the launches that it made."""

    @functools.wraps(function)
    def call(*args: Any) -> Replay | None:
        _made.launches = []
        function(*args)
        made, _made.launches = _made.launches, []
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if _recorded is not None or INTERPRETED or len({id(tensor) for tensor in tensors}) < len(tensors):
            return None  # one tensor in two places: which one a launch took could not be told
        place = {id(arg): i for i, arg in enumerate(args) if isinstance(arg, Tensor)}
        scratch: list[tuple[torch.Size, torch.dtype]] = []
        repeated = []
        for launch, compiled in made:
            values = [launch.arguments[name] for name in launch.kernel.arg_names]
            goes_to = []
            for i, value in enumerate(values):
                if isinstance(value, Tensor):
                    if id(value) not in place:
                        place[id(value)] = len(args) + len(scratch)
                        scratch.append((value.shape, value.dtype))
                    goes_to.append((i, place[id(value)]))
                    values[i] = None
            repeated.append(_Repeated(compiled[launch.grid], tuple(values), tuple(goes_to)))
        current_stream, device = triton.runtime.driver.active.get_current_stream, tensors[0].get_device()

        def replay(like: Tensor, outputs: tuple[Tensor, ...], addresses: list[int | None]) -> None:
            own = [like.new_empty(shape, dtype=dtype) for shape, dtype in scratch]
            # Addresses, as the launcher asks the driver about that of a tensor. `addresses` has one more, of `backend`.
            given: list[int | None] = [output.data_ptr() for output in outputs]
            given += addresses[:-1]
            given += [tensor.data_ptr() for tensor in own]
            stream = current_stream(device)
            for run, fixed, goes_to in repeated:
                values = list(fixed)
                for i, source in goes_to:
                    values[i] = given[source]
                run(*values, stream=stream)

        return replay

    return call


# ----------------------------------------------------------------------------------------------------------------------
# What cannot run


def _why_not_here(tensor: Tensor) -> str | None:
    if tensor.device.type == "cpu" and not INTERPRETED and _pretended is None:
        return "runs on CPU tensors only in Triton's interpreter: set TRITON_INTERPRET=1 before the first import"
    return None


def _why_not_columns(**tensors: Tensor) -> str | None:
    """Rows are addressed in 64 bits; the columns of an activation, which lie side by side, in 32."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) * tensor.shape[-1] >= 2**31:
            return f"columns of {name} lie 2^31 elements or more apart, strides {tensor.stride()}; make it contiguous"
    return None


def _why_not_fp8(tensor: Tensor, *dtypes: torch.dtype | None) -> str | None:
    device = _device(tensor)
    for dtype in dtypes:
        if dtype in formats.FP8_MAX and dtype not in arch.fp8_support(device.arch).stored:
            return f"{device.arch} does not store {dtype}"
    return None


def _rows_begin_at_multiples(kv_cache: Tensor, of: int) -> bool:
    """Of `of` bytes, in a cache whose elements are bytes."""
    return all(n % of == 0 for n in (kv_cache.stride(0), kv_cache.stride(1), kv_cache.data_ptr()))


def _why_not_kv_cache(kv_cache: Tensor, layout: formats.KVLayout) -> str | None:
    if layout.kind == "fp8_ds_mla" and not _rows_begin_at_multiples(kv_cache, 4):
        return "656-byte rows must begin at multiples of 4 bytes, for their fp32 scales"
    return _why_not_fp8(kv_cache, layout.dtype)


def why_not_rotary_embedding(q_pe: Tensor, k_pe: Tensor, *_: Any) -> str | None:
    return _why_not_here(q_pe) or _why_not_columns(q_pe=q_pe, k_pe=k_pe)


def why_not_concat_mla_q(
    q_nope: Tensor, q_pe: Tensor, q_scale: Tensor | None, q_dtype: torch.dtype | None
) -> str | None:
    return _why_not_here(q_nope) or _why_not_columns(q_nope=q_nope, q_pe=q_pe) or _why_not_fp8(q_nope, q_dtype)


def why_not_concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    fp8_dtype: torch.dtype | None,
) -> str | None:
    layout = formats.kv_cache_layout(kv_cache, kv_c.shape[1], k_pe.shape[1], fp8_dtype)
    return _why_not_here(kv_c) or _why_not_columns(kv_c=kv_c, k_pe=k_pe) or _why_not_kv_cache(kv_cache, layout)


def why_not_fused_qk_rope_concat_and_cache_mla(
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
) -> str | None:
    return why_not_concat_mla_q(q_nope, q_pe, q_scale, q_dtype) or why_not_concat_and_cache_mla(
        kv_c, k_pe, kv_cache, slot_mapping, kv_scale, fp8_dtype
    )


def why_not_sparse_mla_fwd(
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
) -> str | None:
    layout = formats.kv_cache_layout(kv_cache, kv_lora_rank, q.shape[2] - kv_lora_rank, fp8_dtype)
    if reason := (
        _why_not_here(q)
        or _why_not_columns(q=q, indices=indices)
        or _why_not_kv_cache(kv_cache, layout)
        or _why_not_fp8(q, q.dtype)
    ):
        return reason
    if kv_lora_rank > MAX_LATENT:
        return f"latents wider than {MAX_LATENT} do not fit a program's registers, got {kv_lora_rank}"
    if dot_precision == "fp8" or (dot_precision is None and q.dtype in formats.FP8_MAX):
        device = _device(q)
        if layout.kind == "fp8_ds_mla":
            return "656-byte rows have four scales each and are multiplied at 16 bits; ask for dot_precision='bf16'"
        if q.dtype in formats.FP8_MAX and q.dtype != layout.dtype:
            return f"fp8 dots need one encoding, got a query of {q.dtype} and a cache of {layout.dtype}"
        if layout.dtype not in arch.fp8_support(device.arch).multiplied and not INTERPRETED:
            return f"the matrix units of {device.arch} do not multiply {layout.dtype}; ask for dot_precision='bf16'"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Query and cache write


def _power_of_two(n: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(n))


def _strides(name: str, tensor: Tensor | None, dims: str) -> dict[str, int]:
    """Stride arguments `<name>_stride_<dim>` of a kernel; 0 for a tensor that is left out."""
    return {f"{name}_stride_{dim}": 0 if tensor is None else tensor.stride(i) for i, dim in enumerate(dims)}


def _write(
    *,
    rows: int,
    latent: int,
    rope: int,
    out: Tensor | None = None,
    q_nope: Tensor | None = None,
    q_pe: Tensor | None = None,
    kv_c: Tensor | None = None,
    k_pe: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    kv_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    is_neox: bool = True,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    fp8_dtype: torch.dtype | None = None,
) -> None:
    """Launch the kernel with the parts that are given."""
    anything = out if out is not None else kv_cache
    assert anything is not None  # one of the two is there
    q_max = 0.0 if out is None else formats.FP8_MAX.get(out.dtype, 0.0)
    shape_class = ("few-rows" if rows < 1024 else "many-rows") + ("-fp8" if q_max > 0 else "")
    settings = tuned.settings(_device(anything).arch, "cache_write", shape_class)
    block_heads = settings["BLOCK_H"]
    heads = 0 if out is None else out.shape[1]
    query_programs = triton.cdiv(heads, block_heads)
    cache, kv_kind, kv_max, stored = kv_cache, "plain", 0.0, None
    if cache is not None:
        layout = formats.kv_cache_layout(cache, latent, rope, fp8_dtype)
        kv_kind, kv_max, stored = layout.kind, formats.FP8_MAX.get(layout.dtype, 0.0), layout.dtype
    _launch(
        qk_rope_concat_cache_kernel,
        (rows, query_programs + (cache is not None)),
        {
            "out": out,
            "q_nope": q_nope,
            "q_pe": q_pe,
            "kv_c": kv_c,
            "k_pe": k_pe,
            "positions": positions,
            "cos_sin": cos_sin_cache,
            "cache": cache,
            "slots": slot_mapping,
            "q_scale": q_scale if q_max > 0 else None,
            "kv_scale": kv_scale if kv_kind == "fp8" else None,
            **_strides("q_nope", q_nope, "thl"),
            **_strides("q_pe", q_pe, "thr"),
            **_strides("kv_c", kv_c, "tl"),
            **_strides("k_pe", k_pe, "tr"),
            **_strides("position", positions, "t"),
            **_strides("slot", slot_mapping, "t"),
            **_strides("table", cos_sin_cache, "pr"),
            "cache_stride_block": 0 if cache is None else cache.stride(0),
            "cache_stride_row": 0 if cache is None else cache.stride(1),
            "num_heads": heads,
            "table_rows": 0 if cos_sin_cache is None else cos_sin_cache.shape[0],
            "num_slots": 0 if cache is None else cache.shape[0] * cache.shape[1],
            "block_size": 0 if cache is None else cache.shape[1],
            "L": latent,
            "R": rope,
            "BLOCK_L": _power_of_two(latent),
            "HALF": _power_of_two(rope // 2),
            "BLOCK_H": block_heads,
            "QUERY_PROGRAMS": query_programs,
            "IS_NEOX": is_neox,
            "Q_FP8_MAX": q_max,
            "KV_FP8_MAX": kv_max,
            "KV_FORMAT": _KV_FORMATS[kv_kind],
        },
        {"num_warps": settings["num_warps"], "enable_fp_fusion": False},
        fp8_view=stored,
    )


@_replayable
def rotary_embedding(
    q_out: Tensor, k_out: Tensor, q_pe: Tensor, k_pe: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    rows, heads, rope = q_pe.shape
    if rope == 0:
        return
    block_heads = min(32, _power_of_two(heads))
    query_programs = triton.cdiv(heads, block_heads)
    _launch(
        rotary_embedding_kernel,
        (rows, query_programs + 1),
        {
            "q_out": q_out,
            "k_out": k_out,
            "q_pe": q_pe,
            "k_pe": k_pe,
            "positions": positions,
            "cos_sin": cos_sin_cache,
            **_strides("q", q_pe, "thr"),
            **_strides("k", k_pe, "tr"),
            **_strides("position", positions, "t"),
            **_strides("table", cos_sin_cache, "pr"),
            "num_heads": heads,
            "table_rows": cos_sin_cache.shape[0],
            "R": rope,
            "HALF": _power_of_two(rope // 2),
            "BLOCK_H": block_heads,
            "QUERY_PROGRAMS": query_programs,
            "IS_NEOX": is_neox,
        },
        {"num_warps": 4, "enable_fp_fusion": False},
    )


@_replayable
def concat_mla_q(
    out: Tensor, q_nope: Tensor, q_pe: Tensor, q_scale: Tensor | None, q_dtype: torch.dtype | None
) -> None:
    _write(
        out=out,
        q_nope=q_nope,
        q_pe=q_pe,
        q_scale=q_scale,
        rows=q_nope.shape[0],
        latent=q_nope.shape[2],
        rope=q_pe.shape[2],
    )


@_replayable
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    fp8_dtype: torch.dtype | None,
) -> None:
    _write(
        kv_c=kv_c,
        k_pe=k_pe,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        kv_scale=kv_scale,
        fp8_dtype=fp8_dtype,
        rows=slot_mapping.shape[0],
        latent=kv_c.shape[1],
        rope=k_pe.shape[1],
    )


@_replayable
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
    _write(
        out=out,
        q_nope=q_nope,
        q_pe=q_pe,
        kv_c=kv_c,
        k_pe=k_pe,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        is_neox=is_neox,
        q_scale=q_scale,
        kv_scale=kv_scale,
        fp8_dtype=fp8_dtype,
        rows=positions.shape[0],
        latent=q_nope.shape[2],
        rope=q_pe.shape[2],
    )


# ----------------------------------------------------------------------------------------------------------------------
# Attention


class _Dots(NamedTuple):
    """In which types a call multiplies."""

    name: str
    """Of the class of settings."""
    latent: torch.dtype
    rope: torch.dtype
    normalize_q: bool
    """Whether the kernel scales each row of the query to fit `latent`."""
    q_fp8_max: float
    """Largest value of the fp8 type that the query is rounded to; 0 if it is not."""
    pv_fp8: bool


def _dots(q: Tensor, kv_cache: Tensor, layout: formats.KVLayout, dot_precision: str | None, arch_name: str) -> _Dots:
    if not layout.quantized:
        dtype = layout.dtype if layout.dtype == q.dtype else torch.float32
        return _Dots("fp32" if dtype == torch.float32 else "16bit", dtype, dtype, False, 0.0, False)
    # Settings may rely on rows that begin, and whose latent ends, at multiples of 16 bytes.
    aligned = layout.kv_lora_rank % 16 == 0 and _rows_begin_at_multiples(kv_cache, 16)
    suffix = "" if aligned else "_unaligned"
    if dot_precision == "fp8" or (dot_precision is None and q.dtype in formats.FP8_MAX):
        normalize, fp8_max = q.dtype not in formats.FP8_MAX, formats.FP8_MAX[layout.dtype]
        if arch_name == "sm90":
            # The query is rounded to fp8, and the same products are taken in fp16, where they are exact: Hopper's small
            # matrix instructions have no fp8, and its large ones, which need 64 rows, are slower with these gathers.
            return _Dots("fp8" + suffix, torch.float16, torch.float16, normalize, fp8_max, False)
        # NVIDIA's matrix units take no V of 8 bits as it is stored, AMD's do.
        return _Dots("fp8dot", layout.dtype, layout.dtype, normalize, fp8_max, arch_name.startswith("gfx"))
    # fp8 → fp16 is exact and one instruction for two values; bf16 and fp32 queries are scaled to fit it.
    normalize = q.dtype in (torch.bfloat16, torch.float32)
    if layout.kind == "fp8_ds_mla":
        return _Dots("ds_mla" + suffix, torch.float16, torch.bfloat16, normalize, 0.0, False)
    return _Dots("fp8" + suffix, torch.float16, torch.float16, normalize, 0.0, False)


def _block_heads(heads: int, dots: str, arch_name: str) -> int:
    """Heads per program.

    fp32: tiles of more than 16 do not fit everywhere, nor use matrix units. fp8 on Hopper: programs of 16 heads that
    read the same rows, all but the first from L2, are faster than one of more.
    """
    if heads <= 16 or dots == "fp32" or (arch_name == "sm90" and dots.startswith("fp8")):
        return 16
    return 32 if heads <= 32 else 64


def plan_splits(rows: int, heads: int, keys: int, device: Device, dots: str) -> tuple[dict[str, Any], int, int]:
    """(settings, splits, keys per split) of a call: a function of T, H, K and the device only.

    Settings depend on how much of the device the call would fill unsplit: all of it ("whole", which is not split), less
    ("split"), or an eighth at most ("few").
    """
    block_heads = _block_heads(heads, dots, device.arch)
    programs = rows * triton.cdiv(heads, block_heads)
    if programs * 8 <= device.multiprocessors:
        kind = "few"
    elif programs < device.multiprocessors:
        kind = "split"
    else:
        kind = "whole"
    settings = tuned.settings(device.arch, "sparse_mla_fwd", f"{dots}-h{block_heads}-{kind}")
    splits = 1
    if kind != "whole":
        wanted = settings["programs_per_sm"] * device.multiprocessors // programs
        splits = max(1, min(wanted, keys // settings["min_keys"]))
    block_keys = settings["BLOCK_N"]
    if dots == "fp8dot" and block_keys < 32:  # one matrix instruction of fp8 takes 32 keys of weights and values
        block_keys = 32
        settings = {**settings, "BLOCK_N": block_keys}
    keys_per_split = triton.cdiv(triton.cdiv(keys, splits), block_keys) * block_keys
    return settings, triton.cdiv(keys, keys_per_split), keys_per_split


@_replayable
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
    rows, heads, width = q.shape
    rope = width - kv_lora_rank
    device = _device(q)
    layout = formats.kv_cache_layout(kv_cache, kv_lora_rank, rope, fp8_dtype)
    num_blocks, block_size = kv_cache.shape[:2]
    dots = _dots(q, kv_cache, layout, dot_precision, device.arch)
    keys = indices.shape[1] if max_topk is None else max_topk
    settings, splits, keys_per_split = plan_splits(rows, heads, keys, device, dots.name)
    wanted_lse = lse if return_lse else None
    target, pitch = out, kv_lora_rank
    if splits > 1:  # one buffer for values and lse: an allocation costs host time
        pitch = triton.cdiv(kv_lora_rank + 1, 16) * 16
        target = q.new_empty((rows, heads, splits, pitch), dtype=torch.float32)
    lengths = topk_length if indptr is None else indptr
    sink_stride = 0 if attn_sink is None else attn_sink.stride(0)
    block_heads = _block_heads(heads, dots.name, device.arch)
    convert = settings["CONVERT"] if layout.quantized and not dots.pv_fp8 else 0
    if dots.latent in formats.FP8_MAX:
        convert = min(convert, 1)  # the first product takes the keys as they are
    # The depth of one matrix instruction, of which pairs take two.
    least = 32 if dots.latent in formats.FP8_MAX or convert == 3 else 16
    block_latent = _power_of_two(kv_lora_rank, least=least)
    block_group = min(block_latent, settings["BLOCK_G"])
    if layout.kind == "fp8_ds_mla":
        block_group = min(block_group, DS_MLA_GROUP.value)
    _launch(
        sparse_mla_kernel,
        (rows * triton.cdiv(heads, block_heads), splits),
        {
            "out": target,
            "lse_out": wanted_lse if splits == 1 else None,
            "q": q,
            "cache": kv_cache,
            "indices": indices,
            "indptr": indptr,
            "topk_length": topk_length,
            "q_scale": q_scale if q.dtype in formats.FP8_MAX else None,
            "kv_scale": kv_scale if layout.kind == "fp8" else None,
            "attn_sink": attn_sink if splits == 1 else None,
            "softmax_scale": softmax_scale,
            "unit": 1.0,
            **_strides("q", q, "thw"),
            "cache_stride_block": kv_cache.stride(0),
            "cache_stride_row": kv_cache.stride(1),
            "index_stride_t": 0 if indptr is not None else indices.stride(0),
            "index_stride_k": indices.stride(-1),
            "length_stride": 0 if lengths is None else lengths.stride(0),
            "sink_stride": sink_stride,
            "num_heads": heads,
            "num_keys": keys,
            "num_indices": indices.shape[0],
            "num_slots": num_blocks * block_size,
            "block_size": block_size,
            "keys_per_split": keys_per_split,
            "num_splits": splits,
            "L": kv_lora_rank,
            "R": rope,
            "PITCH": pitch,
            "BLOCK_H": block_heads,
            "BLOCK_N": settings["BLOCK_N"],
            "BLOCK_G": block_group,
            "GROUPS": block_latent // block_group,
            "BLOCK_R": _power_of_two(rope, least=least),
            "VECTOR": settings["VECTOR"],
            "KV_FORMAT": _KV_FORMATS[layout.kind],
            "DOT_TYPE": _TRITON_TYPES[dots.latent],
            "ROPE_TYPE": _TRITON_TYPES[dots.rope],
            "Q_FP8_MAX": dots.q_fp8_max,
            "PV_FP8": dots.pv_fp8,
            "NORMALIZE_Q": dots.normalize_q,
            "SPLIT_SUM": block_heads < 64,  # warp-group instructions need no such help
            "CONVERT": convert,
            "SLOTS_FIRST": bool(settings["SLOTS_FIRST"]),
            "DENSE_CACHE": kv_cache.stride(0) == block_size * kv_cache.stride(1),
        },
        {"num_warps": settings["num_warps"], "num_stages": settings["num_stages"], "enable_fp_fusion": True},
        fp8_view=layout.dtype,
    )
    if splits > 1:
        # A warp joins so many columns that it has enough to do: threads add up columns of their own, nothing crosses.
        block_columns = min(block_latent, 512 if splits <= 2 else 256 if splits <= 8 else 128)
        _launch(
            combine_splits_kernel,
            (rows * heads, triton.cdiv(kv_lora_rank, block_columns)),
            {
                "out": out,
                "lse_out": wanted_lse,
                "partial": target,
                "attn_sink": attn_sink,
                "sink_stride": sink_stride,
                "num_heads": heads,
                "num_splits": splits,
                "L": kv_lora_rank,
                "PITCH": pitch,
                "BLOCK_L": block_columns,
                "BLOCK_S": _power_of_two(splits),
            },
            {"num_warps": 4 if splits > 32 else max(1, block_columns // 256), "enable_fp_fusion": True},
        )
