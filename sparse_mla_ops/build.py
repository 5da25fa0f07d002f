"""Compile, with no GPU, every kernel that the Triton launcher can choose, and report what each one costs.

`python -m sparse_mla_ops build`. The launcher's own functions run on meta tensors of the sizes of released models, for
one architecture after another; each launch is specialised as Triton would specialise it there, compiled down to machine
code, and read for registers, spills, shared memory (LDS) and matrix instructions. So a kernel that does not fit, or
that stops using the matrix units, is found on any machine.

Occupancy. On all these architectures a multiprocessor (CU, SM) has four SIMDs, each with 512 registers per lane, given
out by 8, accumulation registers included. So:

    warps per SIMD = min(most that it holds, 512 // (registers rounded up to 8))
    programs per multiprocessor = min(4 · warps per SIMD // num_warps, shared memory // that of one program,
                                      most that it holds)
    waves per SIMD = programs per multiprocessor · num_warps / 4

"Spill" is memory per lane that holds what did not fit the registers: scratch on AMD, the stack on NVIDIA, which these
kernels use for nothing else.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fnmatch
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from sparse_mla_ops import arch as archs
from sparse_mla_ops import formats, ops, tuned
from sparse_mla_ops.backends import triton as launcher

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Target:
    """One architecture, and what bounds the programs on a multiprocessor of it."""

    gpu: GPUTarget
    multiprocessors: int
    """Of a common product: what is split, and into how many parts, depends on it."""
    shared_limit: int
    """Bytes of shared memory that one program may have."""
    shared_total: int
    """Bytes per multiprocessor."""
    shared_reserved: int
    """Bytes that each program takes besides its own."""
    warps_per_simd: int
    programs: int
    """Per multiprocessor."""


TARGETS: dict[str, Target] = {
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 304, 64 * KIB, 64 * KIB, 0, 8, 32),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 256, 160 * KIB, 160 * KIB, 0, 8, 32),
    "sm80": Target(GPUTarget("cuda", 80, 32), 108, 163 * KIB, 164 * KIB, KIB, 16, 32),
    "sm89": Target(GPUTarget("cuda", 89, 32), 142, 99 * KIB, 100 * KIB, KIB, 12, 24),
    "sm90": Target(GPUTarget("cuda", 90, 32), 132, 227 * KIB, 228 * KIB, KIB, 16, 32),
    "sm120": Target(GPUTarget("cuda", 120, 32), 188, 99 * KIB, 100 * KIB, KIB, 12, 24),
}


class BuildError(RuntimeError):
    """Nothing can be built, whatever the kernel."""


# ----------------------------------------------------------------------------------------------------------------------
# Which calls


class Call(NamedTuple):
    """One call of an operator, on meta tensors."""

    op: str
    name: str
    arguments: dict[str, Any]


# Query heads that tensor parallelism leaves of 64 and 128, and the rope widths of the released models.
HEADS = (16, 8, 32, 64, 128)
ROPE_DIMS = (64, 0)
LATENT, TOP_K = 512, 2048
INDEX_HEADS, INDEX_HEAD_DIM = (64, 32), 128
NUM_BLOCKS, BLOCK_SIZE, TABLE_ROWS, REQUESTS = 1024, 64, 163840, 64
# A cache beyond 2 GiB, or in such a slab, is addressed by other instructions on AMD.
LARGE_NUM_BLOCKS = 2**17

_SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    archs.E4M3FN: "e4m3fn",
    archs.E4M3FNUZ: "e4m3fnuz",
}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _scale() -> Tensor:
    return _meta(1, dtype=torch.float32)


def _encodings(arch: str) -> tuple[torch.dtype, ...]:
    """The fp8 encodings of `arch`. Where it has none, one all the same, to say why it is refused."""
    return archs.fp8_support(arch).stored or (archs.E4M3FN,)


def _query_parts(tokens: int, heads: int, rope: int) -> dict[str, Any]:
    """As a model makes them: q_nope is a transposed bmm result, q_pe a slice of a projection."""
    return {
        "q_nope": _meta(heads, tokens, LATENT).transpose(0, 1),
        "q_pe": _meta(tokens, heads, 128 + rope)[:, :, 128:],
    }


def _kv_parts(tokens: int, rope: int) -> dict[str, Any]:
    return {"kv_c": _meta(tokens, LATENT), "k_pe": _meta(tokens, LATENT + rope)[:, LATENT:]}


def _rotation(tokens: int, rope: int, is_neox: bool) -> dict[str, Any]:
    table = _meta(TABLE_ROWS, rope, dtype=torch.float32)
    return {"positions": _int32(tokens), "cos_sin_cache": table, "is_neox": is_neox}


class CacheKind(NamedTuple):
    """One kind of KV cache."""

    name: str
    dtype: torch.dtype
    """Of the latent as it is stored."""
    rows656: bool
    arguments: dict[str, Any]
    """What an operator has to be told beside the cache."""

    def make(self, rope: int, blocks: int = NUM_BLOCKS) -> Tensor:
        if self.rows656:
            return _meta(blocks, BLOCK_SIZE, formats.DS_MLA_BYTES, dtype=torch.uint8)
        return _meta(blocks, BLOCK_SIZE, LATENT + rope, dtype=self.dtype)


def _cache_kinds(arch: str, *unquantized: torch.dtype) -> Iterator[CacheKind]:
    for dtype in unquantized:
        yield CacheKind(_SHORT[dtype], dtype, False, {})
    for encoding in _encodings(arch):
        yield CacheKind(_SHORT[encoding], encoding, False, {"kv_scale": _scale()})
        yield CacheKind(f"rows656-{_SHORT[encoding]}", encoding, True, {"fp8_dtype": encoding})


def _write_calls(arch: str) -> Iterator[Call]:
    for tokens, heads, is_neox in itertools.product((4, 4096), HEADS, (False, True)):
        pair = {"q_pe": _query_parts(tokens, heads, 64)["q_pe"], "k_pe": _kv_parts(tokens, 64)["k_pe"]}
        name = f"h{heads}-t{tokens}" + "-neox" * is_neox
        yield Call("rotary_embedding", name, pair | _rotation(tokens, 64, is_neox))
    queries: dict[torch.dtype, dict[str, Any]] = {torch.bfloat16: {}}
    queries |= {encoding: {"q_dtype": encoding, "q_scale": _scale()} for encoding in _encodings(arch)}
    for tokens, rope in itertools.product((4, 4096), ROPE_DIMS):
        size = f"r{rope}-t{tokens}"
        for (q_dtype, target), heads in itertools.product(queries.items(), HEADS):
            query = _query_parts(tokens, heads, rope) | target
            yield Call("concat_mla_q", f"q-{_SHORT[q_dtype]}-h{heads}-{size}", query)
        for kind in _cache_kinds(arch, torch.bfloat16):
            write = {"kv_cache": kind.make(rope), "slot_mapping": _int32(tokens), **_kv_parts(tokens, rope)}
            write |= kind.arguments
            yield Call("concat_and_cache_mla", f"{kind.name}-{size}", write)
            for (q_dtype, target), heads in itertools.product(queries.items(), HEADS):
                if q_dtype != torch.bfloat16 and (q_dtype != kind.dtype or kind.rows656):
                    continue  # the query is fp8 where attention multiplies it with the cache as it is
                for is_neox in (False, True) if rope else (False,):
                    name = f"{kind.name}-q-{_SHORT[q_dtype]}-h{heads}-{size}" + "-neox" * is_neox
                    query = _query_parts(tokens, heads, rope) | target
                    rotation = _rotation(tokens, rope, is_neox)
                    yield Call("fused_qk_rope_concat_and_cache_mla", name, {**query, **write, **rotation})


def _attention_kinds(arch: str) -> Iterator[tuple[str, torch.dtype, dict[str, Any], CacheKind]]:
    """(name, the query's dtype, arguments, cache): which types meet in attention."""
    for kind in _cache_kinds(arch, *formats.FLOAT_DTYPES):
        if kind.dtype in formats.FLOAT_DTYPES:
            yield kind.name, kind.dtype, {}, kind
            continue
        for dot, precision in (("dot16", "bf16"), ("dot8", "fp8")):
            arguments = kind.arguments | {"dot_precision": precision}
            yield f"{kind.name}-{dot}", torch.bfloat16, arguments, kind
            yield f"{kind.name}-q8-{dot}", kind.dtype, arguments | {"q_scale": _scale()}, kind


def _attention_calls(arch: str) -> Iterator[Call]:
    """Few rows, which split K into several parts or into one, and many, which fill the device by themselves."""
    multiprocessors = TARGETS[arch].multiprocessors
    for rope, (label, q_dtype, extra, kind), heads in itertools.product(ROPE_DIMS, _attention_kinds(arch), HEADS):
        for tokens in (4, 1, 16, 64, multiprocessors * 3 // 2, 4096):
            name = f"{label}-h{heads}-r{rope}-t{tokens}"
            plain = {
                "q": _meta(tokens, heads, LATENT + rope, dtype=q_dtype),
                "kv_cache": kind.make(rope),
                "indices": _int32(tokens, TOP_K),
                "softmax_scale": 0.1,
                "kv_lora_rank": LATENT,
                **extra,
            }
            yield Call("sparse_mla_fwd", name, plain)
            if rope == 0 or tokens not in (4, 4096) or q_dtype in formats.FP8_MAX or heads not in (16, 32, 64):
                continue
            yield Call("sparse_mla_fwd", f"{name}-large", plain | {"kv_cache": kind.make(rope, LARGE_NUM_BLOCKS)})
            cache = kind.make(rope)
            options = {
                "kv_cache": cache.new_empty(NUM_BLOCKS, 3, *cache.shape[1:])[:, 1],  # one layer of a slab
                "topk_length": _int32(tokens),
                "attn_sink": _meta(heads, dtype=torch.float32),
                "return_lse": True,
            }
            yield Call("sparse_mla_fwd", f"{name}-options", plain | options)
            flat = {"indices": _int32(tokens * TOP_K), "indptr": _int32(tokens + 1), "max_topk": TOP_K}
            yield Call("sparse_mla_fwd", f"{name}-flat", plain | flat)


def _index_caches(arch: str) -> Iterator[tuple[str, torch.dtype, Tensor, torch.dtype | None]]:
    """(name, dtype of queries and keys, cache, fp8_dtype) of each kind of indexer cache."""
    yield "bf16", torch.bfloat16, _meta(NUM_BLOCKS, BLOCK_SIZE, INDEX_HEAD_DIM), None
    for encoding in _encodings(arch):
        row = INDEX_HEAD_DIM + formats.INDEX_SCALE_BYTES
        yield _SHORT[encoding], encoding, _meta(NUM_BLOCKS, BLOCK_SIZE, row, dtype=torch.uint8), encoding


def _indexer_calls(arch: str) -> Iterator[Call]:
    blocks = TABLE_ROWS // BLOCK_SIZE
    for tokens, (label, dtype, cache, fp8_dtype) in itertools.product((4, 4096), _index_caches(arch)):
        paged = {"index_cache": cache, "fp8_dtype": fp8_dtype}
        requests = {"block_table": _int32(REQUESTS, blocks), "req_id": _int32(tokens)}
        for scale_format in ("ue8m0", "fp32")[: 1 if fp8_dtype is None else 2]:
            key = {"k": _meta(tokens, INDEX_HEAD_DIM), "slot_mapping": _int32(tokens), "scale_format": scale_format}
            yield Call("indexer_k_quant_and_cache", f"{label}-{scale_format}-t{tokens}", key | paged)
        rows = tokens * 16
        gather = {"block_table": _int32(REQUESTS, blocks), "cu_seq_lens": _int32(REQUESTS + 1), "rows": rows}
        yield Call("gather_indexer_k_cache", f"{label}-t{tokens}", gather | paged)
        for heads in INDEX_HEADS:
            name = f"{label}-h{heads}-t{tokens}"
            weights = _meta(tokens, heads, dtype=torch.float32)
            for rope, is_neox in ((64, True), (64, False), (0, False)):
                query = {"q": _meta(tokens, heads, INDEX_HEAD_DIM), "weights": weights, "softmax_scale": 0.1}
                query |= {"q_dtype": fp8_dtype} | _rotation(tokens, rope, is_neox)
                yield Call("indexer_q_rope_quant", f"{name}-r{rope}" + "-neox" * is_neox, query)
            query = {"q": _meta(tokens, heads, INDEX_HEAD_DIM, dtype=dtype), "weights": weights}
            query["row_ends"] = _int32(tokens)
            scale = None if fp8_dtype is None else _meta(rows, dtype=torch.float32)
            for clean in (True, False):
                key = {"k": _meta(rows, INDEX_HEAD_DIM, dtype=dtype), "k_scale": scale, "row_starts": _int32(tokens)}
                suffix = "" if clean else "-unclean"
                yield Call("mqa_logits", name + suffix, {**query, **key, "clean_logits": clean})
                max_len = {"max_len": TABLE_ROWS, "clean_logits": clean}
                yield Call("paged_mqa_logits", name + suffix, {**query, **paged, **requests, **max_len})
            select = {"k": TOP_K, "max_len": TABLE_ROWS}
            yield Call("sparse_attn_indexer", name, {**query, **paged, **requests, **select})
    for tokens, columns in itertools.product((4, 4096), (8192, TABLE_ROWS)):
        windows = {"row_starts": _int32(tokens), "row_ends": _int32(tokens), "k": TOP_K}
        logits = _meta(tokens, columns, dtype=torch.float32)
        yield Call("top_k_per_row", f"n{columns}-t{tokens}", {"logits": logits, **windows})
    for tokens in (4, 4096):
        request = {"req_id": _int32(tokens), "block_table": _int32(REQUESTS, blocks), "block_size": BLOCK_SIZE}
        call = request | {"token_indices": _int32(tokens, TOP_K)}
        yield Call("convert_req_index_to_global_index", f"t{tokens}", call)


def calls(arch: str) -> Iterator[Call]:
    """The calls whose launches are built for `arch`, the plainest ones first."""
    yield from _write_calls(arch)
    yield from _attention_calls(arch)
    yield from _indexer_calls(arch)


# ----------------------------------------------------------------------------------------------------------------------
# Which kernels these calls launch


@dataclasses.dataclass(frozen=True)
class Specialisation:
    """One kernel as the launcher would have it compiled. Several calls may share it; it has the name of the first."""

    op: str
    name: str
    arch: str
    kernel: str
    """"module:function"."""
    shape_classes: tuple[str, ...]
    """Whose settings these calls take: "operator/class", as `tuned.json` has them; empty where nothing is tuned."""
    settings: dict[str, Any]
    """Block sizes, warps and stages, for readers."""
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal machine code."""
        parts = self.signature, self.constants, self.attributes, self.options
        return (self.arch, self.kernel, *(repr(sorted(part.items())) for part in parts))


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A call that the launcher refuses on an architecture."""

    op: str
    name: str
    arch: str
    reason: str


def specialise(launch: launcher.Launch, call: Call, arch: str, shape_classes: tuple[str, ...] = ()) -> Specialisation:
    """What Triton would compile for `launch` on `arch`, by its own rules for divisibility, ones and pointer ranges."""
    backend = make_backend(TARGETS[arch].gpu)
    kernel = launch.kernel
    keywords = {**launch.options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, extra = bind(**launch.arguments, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialisation, extra)
    blocks = {name: value for name, value in launch.arguments.items() if name.startswith("BLOCK_")}
    return Specialisation(
        op=call.op,
        name=call.name,
        arch=arch,
        kernel=f"{kernel.__module__}:{kernel.__name__}",
        shape_classes=shape_classes,
        settings=blocks | launch.options,
        signature=signature,
        constants=constants,
        attributes=attributes,
        options=dict(options.__dict__),
    )


def launches_of(call: Call, arch: str) -> list[Specialisation] | Skipped:
    """What `call` would launch on `arch`, or why it would not."""
    contract = inspect.unwrap(getattr(ops, call.op))
    bound = inspect.signature(contract).bind(**call.arguments)
    bound.apply_defaults()
    *arguments, _ = bound.args
    outputs = contract(*bound.args)
    if not hasattr(launcher, call.op):
        return Skipped(call.op, call.name, arch, "the triton backend does not implement it")
    filled = () if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,)
    device = launcher.Device(arch, TARGETS[arch].multiprocessors)
    with launcher.pretend_device(device), launcher.record_launches() as launches, tuned.watch() as asked:
        why_not = getattr(launcher, f"why_not_{call.op}", None)
        if why_not is not None and (reason := why_not(*arguments)):
            return Skipped(call.op, call.name, arch, reason)
        getattr(launcher, call.op)(*filled, *arguments)
    # Settings may be asked for on the way to a decision: the last ones are those that are taken.
    shape_classes = tuple(f"{key.kernel}/{key.name}" for key in asked[-1:])
    return [specialise(launch, call, arch, shape_classes) for launch in launches]


def specialisations(
    arch: str, op_names: Iterable[str] | None = None, only: Sequence[str] = ("*",)
) -> tuple[list[Specialisation], list[Skipped]]:
    """The distinct kernels that the launcher can choose on `arch`, and the calls that it refuses.

    op_names: of these operators only. only: of calls whose name, or "op/name", matches one of these shell patterns.
    """
    if launcher.INTERPRETED:
        raise BuildError(
            "TRITON_INTERPRET was set when triton was imported: kernels are then functions of the interpreter, and "
            "cannot be compiled. Unset it."
        )
    if arch not in TARGETS:
        raise BuildError(f"unknown architecture {arch!r}; expected one of {', '.join(TARGETS)}")
    wanted = None if op_names is None else set(op_names)
    found: dict[tuple[str, ...], Specialisation] = {}
    skipped: list[Skipped] = []
    for call in calls(arch):
        if wanted is not None and call.op not in wanted:
            continue
        names = call.name, f"{call.op}/{call.name}"
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in only):
            continue
        launches = launches_of(call, arch)
        if isinstance(launches, Skipped):
            skipped.append(launches)
            continue
        for launch in launches:
            known = found.setdefault(launch.key, launch)
            classes = tuple(dict.fromkeys(known.shape_classes + launch.shape_classes))
            found[launch.key] = dataclasses.replace(known, shape_classes=classes)
    return list(found.values()), skipped


# ----------------------------------------------------------------------------------------------------------------------
# What a compiled kernel is made of


class Dot(NamedTuple):
    """One product of tiles in Triton's intermediate representation."""

    lhs: str
    """Element type of the left operand, as MLIR writes it: "bf16", "f8E4M3FN", "f8E4M3FNUZ", …"""
    rhs: str
    layout: str
    """Kind of layout of the result: "amd_mfma", "nvidia_mma", …; "blocked" runs on no matrix unit. Empty before layouts
    are chosen, that is in `ttir`."""

    @property
    def on_matrix_unit(self) -> bool:
        return "mma" in self.layout or "mfma" in self.layout

    def __str__(self) -> str:
        types = self.lhs if self.lhs == self.rhs else f"{self.lhs}·{self.rhs}"
        return types if self.on_matrix_unit or not self.layout else f"{types} without matrix unit"


_LAYOUT = re.compile(r"^(#\w+) = #(?:\w+\.)*(\w+)<", re.MULTILINE)
# Each side of a scaled product may be followed by the tile of its scales.
_DOT = re.compile(r"= (?:tt\.dot|tt\.dot_scaled|ttng\.warp_group_dot) .* : (.*) \* (.*) -> (.*)")
_TILE = re.compile(r"(?:tensor|memdesc)<(?:\d+x)+(\w+)(?:, (#\w+))?")


def dots(ir: str) -> tuple[Dot, ...]:
    """The products in the text of `asm["ttir"]` or `asm["ttgir"]`, in their order.

    Instruction names do not tell the encodings of fp8 apart, and the compiler may convert fp8 operands to 16 or 32 bits
    without a word where the matrix unit does not take them: compare `ttgir`, where that is done, with `ttir`.
    """
    layouts = dict(_LAYOUT.findall(ir))
    found = []
    for sides in _DOT.findall(ir):
        (lhs, _), (rhs, _), (_, layout) = (_TILE.findall(side)[0] for side in sides)
        found.append(Dot(lhs, rhs, layouts.get(layout, "")))
    return tuple(found)


def upcast_dots(asked: Iterable[Dot], compiled: Iterable[Dot]) -> tuple[Dot, ...]:
    """The fp8 products in `asked` (of ttir) of which `compiled` (of ttgir) has fewer: their operands were converted.

    It may have more of them, as the compiler takes loops apart.
    """
    there = collections.Counter((dot.lhs, dot.rhs) for dot in compiled)
    wanted = collections.Counter(asked)
    return tuple(
        dot
        for dot, count in wanted.items()
        if (dot.lhs.startswith("f8") or dot.rhs.startswith("f8")) and there[dot.lhs, dot.rhs] < count
    )


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one program takes, per lane where nothing else is said."""

    registers: int
    """All that count towards occupancy: on AMD vector registers, accumulation registers included."""
    accumulation_registers: int
    """AMD: of `registers`, those that only matrix instructions and copies can use."""
    scalar_registers: int
    """AMD: per wave."""
    spill_bytes: int


_MATRIX = {
    "hip": re.compile(r"\bv_s?mfmac?_\w+"),
    "cuda": re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w.:]+"),
}


def matrix_instructions(assembly: str, backend: str) -> dict[str, int]:
    """Matrix instructions in AMD assembly (backend "hip") or PTX ("cuda"): mnemonic → how often it stands there."""
    return dict(sorted(collections.Counter(_MATRIX[backend].findall(assembly)).items()))


def _amd_resources(assembly: str) -> Resources:
    def field(name: str) -> int:
        (value,) = re.findall(rf"^[\s-]*{re.escape(name)}:\s+(\d+)", assembly, re.MULTILINE)
        return int(value)

    spilled = max(field(".private_segment_fixed_size"), 4 * field(".vgpr_spill_count"))
    return Resources(field(".vgpr_count"), field(".agpr_count"), field(".sgpr_count"), spilled)


def _nvidia_resources(cubin: bytes, ptx: str, capability: int) -> Resources:
    """Read from the binary; where that is not possible, by assembling again and reading what the assembler says."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        try:
            tool = triton.knobs.nvidia.cuobjdump.path
            said = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
            registers, stack, local = (int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "STACK", "LOCAL"))
            return Resources(registers, 0, 0, stack + local)
        except (OSError, RuntimeError, subprocess.CalledProcessError, IndexError):
            from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

            text = Path(folder, "kernel.ptx")
            text.write_text(ptx)
            name = f"--gpu-name={sm_arch_from_capability(capability)}"
            command = [get_ptxas(capability).path, "-v", name, text, "-o", binary]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            registers = int(re.findall(r"Used (\d+) registers", said)[0])
            return Resources(registers, 0, 0, int(re.findall(r"(\d+) bytes stack frame", said)[0]))


def programs_per_multiprocessor(arch: str, registers: int, shared: int, num_warps: int) -> int:
    """How many programs a multiprocessor of `arch` holds at once, by the formula at the top of this module."""
    target = TARGETS[arch]
    if shared > target.shared_limit:
        return 0
    warps = min(target.warps_per_simd, 512 // max(8, -(-registers // 8) * 8))
    by_shared = target.shared_total // max(1, shared + target.shared_reserved)
    return min(4 * warps // num_warps, by_shared, target.programs)


# ----------------------------------------------------------------------------------------------------------------------
# Building


@dataclasses.dataclass(frozen=True)
class Built:
    """One kernel, compiled for one architecture, or `error`."""

    op: str
    name: str
    arch: str
    kernel: str
    shape_classes: tuple[str, ...]
    settings: dict[str, Any]
    seconds: float
    error: str | None = None
    resources: Resources = Resources(0, 0, 0, 0)
    shared_bytes: int = 0
    shared_limit: int = 0
    matrix_instructions: dict[str, int] = dataclasses.field(default_factory=dict)
    dots_asked: tuple[Dot, ...] = ()
    """Before layouts are chosen: what the source multiplies."""
    dots: tuple[Dot, ...] = ()
    """After: what the machine code multiplies. A loop may be unrolled in part, so there may be more of them."""
    programs_per_multiprocessor: int = 0
    waves_per_simd: float = 0.0

    @property
    def fits(self) -> bool:
        return self.error is None and self.shared_bytes <= self.shared_limit

    @property
    def upcast(self) -> tuple[Dot, ...]:
        """Kinds of fp8 products of which the source asks for more than the machine code has."""
        return upcast_dots(self.dots_asked, self.dots)

    @property
    def notes(self) -> list[str]:
        """What is wrong, or slow."""
        if self.error is not None:
            return [f"FAILED: {self.error}"]
        notes = []
        if not self.fits:
            notes.append(f"OVER THE LIMIT of {self.shared_limit} bytes of shared memory")
        if self.resources.spill_bytes:
            notes.append(f"spills {self.resources.spill_bytes} bytes")
        notes += [f"{dot} product converted" for dot in self.upcast]
        if any(not dot.on_matrix_unit for dot in self.dots):
            notes.append("multiplies without matrix unit")
        return notes


def compile_kernel(kernel: Any, signature: Any, constants: Any, attributes: Any, arch: str, options: Any = None) -> Any:
    """Triton's compiled form of `kernel` for `arch`, whatever GPU is or is not here."""
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=TARGETS[arch].gpu, options=options
    )


def _identity(what: Specialisation) -> dict[str, Any]:
    """The fields that a result takes over from what was to be built."""
    same = {name: getattr(what, name) for name in ("op", "name", "arch", "shape_classes", "settings")}
    return same | {"kernel": what.kernel.partition(":")[2]}


def build_one(what: Specialisation) -> Built:
    """Compile `what` and read it. A failure to compile is a result."""
    start = time.perf_counter()
    target = TARGETS[what.arch]
    try:
        module, _, function = what.kernel.partition(":")
        kernel = getattr(importlib.import_module(module), function)
        compiled = compile_kernel(kernel, what.signature, what.constants, what.attributes, what.arch, what.options)
        if target.gpu.backend == "hip":
            assembly = compiled.asm["amdgcn"]
            resources = _amd_resources(assembly)
        else:
            assembly = compiled.asm["ptx"]
            resources = _nvidia_resources(compiled.asm["cubin"], assembly, target.gpu.arch)
    except Exception as error:  # whatever a compiler raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        return Built(**_identity(what), seconds=time.perf_counter() - start, error=reason)
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    programs = programs_per_multiprocessor(what.arch, resources.registers, shared, num_warps)
    return Built(
        **_identity(what),
        seconds=time.perf_counter() - start,
        resources=resources,
        shared_bytes=shared,
        shared_limit=target.shared_limit,
        matrix_instructions=matrix_instructions(assembly, target.gpu.backend),
        dots_asked=dots(compiled.asm["ttir"]),
        dots=dots(compiled.asm["ttgir"]),
        programs_per_multiprocessor=programs,
        waves_per_simd=programs * num_warps / 4,
    )


def build_all(
    work: Sequence[Specialisation], jobs: int = 1, on_done: Callable[[Built], None] | None = None
) -> list[Built]:
    """`build_one` of each of `work`, in `jobs` processes, in the order of `work`.

    Other processes, as a compiler may end its own. Nobody can say then which kernel it was: those that are left are
    built one at a time, until that one is found.
    """
    done: dict[int, Built] = {}

    def keep(i: int, built: Built) -> None:
        done[i] = built
        if on_done is not None:
            on_done(built)

    while len(done) < len(work):
        left = [i for i in range(len(work)) if i not in done]
        broken = False
        with ProcessPoolExecutor(min(jobs, len(left)), mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(build_one, work[i]): i for i in left}
            for future in as_completed(futures):
                try:
                    keep(futures[future], future.result())
                except BrokenProcessPool:
                    broken = True
        if broken and jobs == 1:
            culprit = next(i for i in left if i not in done)
            keep(culprit, Built(**_identity(work[culprit]), seconds=0.0, error="the compiler ended its process"))
        jobs = 1 if broken else jobs
    return [done[i] for i in range(len(work))]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was built, and what was not because the launcher would refuse the call."""

    built: tuple[Built, ...]
    skipped: tuple[Skipped, ...]

    @property
    def failures(self) -> tuple[Built, ...]:
        """The kernels that do not compile, or need more shared memory than a program may have."""
        return tuple(built for built in self.built if not built.fits)

    def to_json(self) -> dict[str, Any]:
        built = [
            dataclasses.asdict(one)
            | {name: [dot._asdict() for dot in getattr(one, name)] for name in ("dots", "dots_asked", "upcast")}
            | {"fits": one.fits, "notes": one.notes}
            for one in self.built
        ]
        return {"built": built, "skipped": [dataclasses.asdict(one) for one in self.skipped]}


def build(
    arch_names: Sequence[str] = tuple(TARGETS),
    op_names: Iterable[str] | None = None,
    only: Sequence[str] = ("*",),
    jobs: int = 1,
) -> Report:
    """Build for each of `arch_names`; the other arguments are those of `specialisations` and `build_all`."""
    work: list[Specialisation] = []
    skipped: list[Skipped] = []
    for arch in arch_names:
        found, refused = specialisations(arch, op_names, only)
        work += found
        skipped += refused
    with _progress(len(work)) as advance:
        built = build_all(work, jobs, advance)
    return Report(tuple(built), tuple(skipped))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Built], None] | None]:
    """A bar on a terminal, if tqdm is installed, which this package does not require."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(total=total, unit="kernel", disable=None, leave=False) as bar:

        def advance(built: Built) -> None:
            bar.set_postfix_str(f"{built.arch} {built.op} {built.name}", refresh=False)
            bar.update()

        yield advance


# ----------------------------------------------------------------------------------------------------------------------
# For readers


def _settings_text(settings: Mapping[str, Any]) -> str:
    short = {"num_warps": "w", "num_stages": "s"}
    blocks = [f"{name.removeprefix('BLOCK_')}{value}" for name, value in settings.items() if name.startswith("BLOCK_")]
    return " ".join(blocks + [f"{short[name]}{settings[name]}" for name in short if name in settings])


def _row(one: Built) -> tuple[str, ...]:
    head = one.op, one.name, one.arch, one.kernel.removesuffix("_kernel"), _settings_text(one.settings)
    if one.error is not None:
        return (*head, *[""] * 7, "; ".join(one.notes))
    taken = one.resources
    registers = str(taken.registers)
    if one.arch.startswith("gfx"):
        vector = taken.registers - taken.accumulation_registers
        registers = f"{vector}v+{taken.accumulation_registers}a {taken.scalar_registers}s"
    kinds: collections.Counter[str] = collections.Counter()
    for mnemonic, count in one.matrix_instructions.items():
        kinds[re.split(r"_f32|\.mma_async|\.sync", mnemonic)[0]] += count
    return (
        *head,
        registers,
        str(taken.spill_bytes or "–"),
        f"{one.shared_bytes / KIB:.0f}/{one.shared_limit // KIB}",
        " + ".join(f"{count} {kind}" for kind, count in kinds.items()) or "–",
        ", ".join(dict.fromkeys(map(str, one.dots))) or "–",
        str(one.programs_per_multiprocessor),
        f"{one.waves_per_simd:g}",
        "; ".join(one.notes),
    )


HEADER = ["op", "specialisation", "arch", "kernel", "settings", "registers", "spill", "shared KiB"]
HEADER += ["matrix", "operands", "programs", "waves", "notes"]


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def table(report: Report) -> str:
    """The report as text. Settings: block sizes by their letter, w warps, s stages."""
    parts = [_align([HEADER, *map(_row, report.built)])]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in report.skipped:
        groups.setdefault((one.arch, one.op, one.reason), []).append(one.name)
    if groups:
        rows = [
            (arch, op, f"{len(names)}: {', '.join(names[:2])}{' …' if len(names) > 2 else ''}", reason)
            for (arch, op, reason), names in groups.items()
        ]
        parts.append(_align([("skipped on", "op", "calls", "why"), *rows]))
    seconds = sum(one.seconds for one in report.built)
    spilling = sum(one.resources.spill_bytes > 0 for one in report.built)
    end = [
        f"{len(report.built)} kernels, {seconds:.0f} s of compilation: {spilling} spill, {len(report.failures)} do not "
        "compile or do not fit",
        *(f"  {one.arch} {one.op}/{one.name} {one.kernel}: {'; '.join(one.notes)}" for one in report.failures),
    ]
    return "\n\n".join([*parts, "\n".join(end)])


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: all kernels compile and fit. 1: some do not. 2: nothing could be built."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla_ops build",
        description="Compile every kernel that the Triton launcher can choose, with no GPU, and print what each costs.",
    )
    every = ",".join(TARGETS)
    parser.add_argument("--arch", type=_names, default=list(TARGETS), help=f"architectures (default: {every})")
    parser.add_argument("--op", type=_names, default=None, help="operators (default: all)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help='calls whose name, or "op/name", matches this shell pattern, as "bf16-h16-*"; may be repeated',
    )
    parser.add_argument("--list", action="store_true", help="compile nothing, say what would be compiled")
    parser.add_argument("--json", metavar="FILE", help='write the result there as JSON too; "-" for standard output')
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(argv)
    known = set(ops.__all__)
    if unknown := set(options.op or ()) - known:
        parser.error(
            f"--op: unknown operator {', '.join(sorted(unknown))}; expected some of {', '.join(sorted(known))}"
        )
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    only = options.only or ["*"]
    try:
        if options.list:
            return _list(options.arch, options.op, only, options.json)
        report = build(options.arch, options.op, only, options.jobs)
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 2
    if not report.built and not report.skipped:
        print("build: no call has such a name; see --list", file=sys.stderr)
        return 2
    _write_json(options.json, report.to_json())
    if options.json != "-":
        print(table(report))
    return 1 if report.failures else 0


def _list(arch_names: Sequence[str], op_names: Sequence[str] | None, only: Sequence[str], file: str | None) -> int:
    found = [one for arch in arch_names for one in specialisations(arch, op_names, only)[0]]
    _write_json(file, [_identity(one) for one in found])
    if file != "-":
        for one in found:
            kernel, settings = one.kernel.partition(":")[2], _settings_text(one.settings)
            print(f"{one.arch} {one.op}/{one.name} {kernel} {settings} {' '.join(one.shape_classes)}")
    return 0


def _write_json(file: str | None, value: Any) -> None:
    if file is None:
        return
    text = json.dumps(value, indent=1, ensure_ascii=False, default=str)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")
