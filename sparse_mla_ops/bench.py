"""`python -m sparse_mla_ops bench`: how long the operators take, beside other libraries' kernels in the same run.

A figure from another run, machine or hour is not comparable: power and heat move every kernel by some per cent. So
everything that is compared is timed in turns, A B A B …, in one process, and medians are shown. On a GPU a sample is
one replay of a captured graph that holds several calls, each on a set of inputs of its own, so that neither the host
nor a lucky cache is measured. What a run prints is explained in `benchmarks.md`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import sparse_mla_ops
from sparse_mla_ops import arch, formats, ops, registry, tuned
from sparse_mla_ops.ops._register import forget_plans
from sparse_mla_ops.tuned import ShapeClass

KV_LORA_RANK, ROPE_DIM = 512, 64
BLOCK_SIZE = 64
TABLE_ROWS = 131072
SOFTMAX_SCALE = 192**-0.5
KV_SCALE = Q_SCALE = 0.02
SAMPLED_ROWS = 8
ROUNDS, PAUSE_S, SAMPLE_MS = 7, 0.03, 30
"""Turns of each contender, idle seconds before each (a chip that is never idle slows down), milliseconds of each."""

CallSet = Callable[[int], Tensor]
"""Runs a contender on input set i and returns its main output."""


# ----------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass
class Row:
    """One line of the results: a contender at a shape. None is what was not measured; `note` says why."""

    op: str
    shape: str
    contender: str
    """A backend of ours, or a peer."""
    kind: str
    """ours, peer, or baseline: ours on another cache."""
    timing: str
    """graph: replays on the device. host: eager calls, host time. cpu: calls on a CPU."""
    us: float | None = None
    spread_us: float | None = None
    tflops: float | None = None
    tb_per_s: float | None = None
    share_of_limit: float | None = None
    error: float | None = None
    over_ours: float | None = None
    calls: int | None = None
    samples: int | None = None
    note: str = ""
    device: str = ""


CSV_KEYS = tuple(field.name for field in dataclasses.fields(Row))


class Unavailable(RuntimeError):
    """A contender cannot run here; the message is what the results show."""


class Work(NamedTuple):
    """What a call has to do, whoever does it."""

    flops: float
    bytes: float


class Ceilings(NamedTuple):
    """What this machine reaches, measured at the start of the run."""

    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, work: Work) -> float:
        return 1e6 * max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s)


class Prepared(NamedTuple):
    """A contender that is ready to run. `error(run)`: relative error of what `run()` gives for input set 0."""

    call: CallSet
    error: Callable[[Callable[[], Tensor]], float]


class Contender(NamedTuple):
    name: str
    kind: str
    work: Work
    load: Callable[[], Prepared]
    """Raises whatever stands in the way."""


# ----------------------------------------------------------------------------------------------------------------------
# Shapes: what a call works on, and who competes


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _sample(rows: int) -> list[int]:
    """Up to 8 rows spread over all of them, first and last included."""
    count = min(SAMPLED_ROWS, rows)
    return sorted({round(i * (rows - 1) / max(1, count - 1)) for i in range(count)})


_KV_DTYPES: dict[str, torch.dtype | str] = {"bf16": torch.bfloat16, "fp8": arch.E4M3FN, "fp8_ds_mla": "fp8_ds_mla"}
"""What each kind of cache is made of, as `formats` takes it."""


def _row_bytes(cache: str, width: int) -> int:
    return {"bf16": 2 * width, "fp8": width, "fp8_ds_mla": formats.DS_MLA_BYTES}[cache]


def _calls(rows: int, heads: int) -> int:
    """Calls in one graph: many for short ones, so that the replay's own cost does not count."""
    return 20 if rows <= 256 else 4 if rows * heads <= 65536 else 2


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The worst relative L2 error of a last dimension. NaN anywhere is NaN."""
    actual, expected = actual.double(), expected.double()
    norms = expected.norm(dim=-1)
    return ((actual - expected).norm(dim=-1) / norms.clamp(min=1e-30)).max().item()


@dataclass(frozen=True)
class AttentionShape:
    """`sparse_mla_fwd` on random rows of one KV pool that is larger than the L2 cache."""

    phase: str
    rows: int
    heads: int
    width: int
    cache: str
    """bf16, fp8 (one scale) or fp8_ds_mla (656-byte rows)."""
    dots: str | None = None
    keys: int = 2048
    pool: int = 131072

    op = "sparse_mla_fwd"

    @property
    def name(self) -> str:
        dots = "" if self.dots is None else f"-dot_{self.dots}"
        return f"{self.phase}-{self.cache}{dots}-H{self.heads}-W{self.width}-T{self.rows}"

    @property
    def calls(self) -> int:
        return _calls(self.rows, self.heads)

    @property
    def work(self) -> Work:
        """Both products of each head with each selected row; each selected row read once for each row of the query."""
        pairs = self.rows * self.keys
        flops = 2.0 * pairs * self.heads * (self.width + KV_LORA_RANK)
        return Work(flops, float(pairs * _row_bytes(self.cache, self.width)))

    def contenders(self, device: torch.device, peers: Peers) -> Iterator[Contender]:
        inputs = functools.cache(lambda: AttentionInputs(self, device))
        yield from _ours(self, lambda: inputs().arguments, lambda: inputs().error, device)
        bf16 = dataclasses.replace(self, cache="bf16", dots=None)
        if self.cache == "bf16":
            yield Contender(f"flashmla-h{self.heads}", "peer", self.work, lambda: peers.flashmla(inputs(), self.heads))
            if self.heads < 64 and self.phase == "decode":
                yield Contender("flashmla-h64", "peer", self.work, lambda: peers.flashmla(inputs(), 64))
            if self.width == KV_LORA_RANK:
                yield Contender("vllm-triton", "peer", self.work, lambda: peers.vllm(inputs()))
        elif self.cache == "fp8_ds_mla":
            heads = 64 if self.heads <= 64 else 128
            yield Contender(f"flashmla-fp8-h{heads}", "peer", self.work, lambda: peers.flashmla_fp8(inputs(), heads))
        if self.cache != "bf16" and self.heads == 16:
            yield Contender("ours-on-bf16-cache", "baseline", bf16.work, lambda: _ours_unnamed(bf16, device))


class AttentionInputs:
    """Sets of inputs of one shape: the values are those of a seed, whatever the cache stores them as."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        generator, bf16 = _generator(device), torch.bfloat16
        self.shape, self.device = shape, device

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        rope_dim = shape.width - KV_LORA_RANK
        pool = normal(shape.pool // BLOCK_SIZE, BLOCK_SIZE, shape.width).to(bf16)
        kv_c, k_pe = pool.split((KV_LORA_RANK, rope_dim), dim=-1)
        scale = KV_SCALE if shape.cache == "fp8" else 1.0
        dtype = _KV_DTYPES[shape.cache]
        self.cache = pool if shape.cache == "bf16" else formats.pack_kv_cache(kv_c, k_pe, dtype, scale)
        self.kv_scale = torch.tensor([scale], device=device) if shape.cache == "fp8" else None
        self.q = [normal(shape.rows, shape.heads, shape.width).to(bf16) for _ in range(shape.calls)]
        self.indices = [
            torch.randint(shape.pool, (shape.rows, shape.keys), generator=generator, device=device, dtype=torch.int32)
            for _ in range(shape.calls)
        ]

    def arguments(self, i: int) -> dict[str, Any]:
        return {
            "q": self.q[i],
            "kv_cache": self.cache,
            "indices": self.indices[i],
            "softmax_scale": SOFTMAX_SCALE,
            "kv_lora_rank": KV_LORA_RANK,
            "kv_scale": self.kv_scale,
            "dot_precision": self.shape.dots,
            "phase": self.shape.phase,
        }

    def error(self, run: Callable[[], Tensor]) -> float:
        """Against fp64 on the dequantised inputs, worst (row, head) of a few rows. `run` may pad the heads."""
        out, rows = run(), _sample(self.shape.rows)
        layout = formats.kv_cache_layout(self.cache, KV_LORA_RANK, self.shape.width - KV_LORA_RANK)
        stored = self.cache.view(torch.uint8).flatten(0, 1)[self.indices[0][rows].long()]
        scale = None if self.kv_scale is None else self.kv_scale.reshape(())
        kv = formats.decode_kv_rows(stored, layout, scale).double()
        scores = torch.einsum("thw,tkw->thk", self.q[0][rows].double(), kv) * SOFTMAX_SCALE
        expected = torch.einsum("thk,tkl->thl", scores.softmax(-1), kv[..., :KV_LORA_RANK])
        return relative_error(out[rows, : self.shape.heads], expected)


@dataclass(frozen=True)
class WriteShape:
    """`fused_qk_rope_concat_and_cache_mla`, with q_nope as a batched matrix product leaves it: [H, T, L] in memory."""

    cache: str
    rows: int
    heads: int
    pool: int = 131072

    op = "fused_qk_rope_concat_and_cache_mla"

    @property
    def name(self) -> str:
        return f"write-{self.cache}-H{self.heads}-T{self.rows}"

    @property
    def calls(self) -> int:
        return _calls(self.rows, self.heads)

    @property
    def q_dtype(self) -> torch.dtype | None:
        """A cache of one scale goes with a query of its type; 656-byte rows are read with a bf16 query."""
        return arch.E4M3FN if self.cache == "fp8" else None

    @property
    def work(self) -> Work:
        """Query and KV read, finished query and cache row written. Positions, slots and angles are left out."""
        width = KV_LORA_RANK + ROPE_DIM
        row = _row_bytes(self.cache, width)
        query = self.heads * width * (2 + (1 if self.q_dtype else 2))
        return Work(0.0, float(self.rows * (query + 2 * width + row)))

    def contenders(self, device: torch.device, peers: Peers) -> Iterator[Contender]:
        inputs = functools.cache(lambda: WriteInputs(self, device))
        yield from _ours(self, lambda: inputs().arguments, lambda: inputs().error, device)
        yield Contender("aiter-triton", "peer", self.work, lambda: peers.aiter_write(inputs()))
        yield Contender("torch.compile", "peer", self.work, lambda: _split_path(inputs(), compiled=True))
        yield Contender("eager", "peer", self.work, lambda: _split_path(inputs(), compiled=False))


class WriteInputs:
    """Sets of inputs of one shape. Slots differ between sets, so that each set's rows can be looked at afterwards."""

    def __init__(self, shape: WriteShape, device: torch.device) -> None:
        generator, bf16 = _generator(device), torch.bfloat16
        self.shape, self.device = shape, device
        rows, heads, sets = shape.rows, shape.heads, range(shape.calls)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(bf16)

        self.q_nope = [normal(heads, rows, KV_LORA_RANK).transpose(0, 1) for _ in sets]
        self.q_pe = [normal(rows, heads, ROPE_DIM) for _ in sets]
        self.kv_c = [normal(rows, KV_LORA_RANK) for _ in sets]
        self.k_pe = [normal(rows, ROPE_DIM) for _ in sets]
        self.positions = [torch.randint(TABLE_ROWS, (rows,), generator=generator, device=device) for _ in sets]
        slots = torch.randperm(shape.pool, generator=generator, device=device)
        self.slots = [slots[i * rows : (i + 1) * rows] for i in sets]
        angles = torch.rand(TABLE_ROWS, ROPE_DIM // 2, generator=generator, device=device) * 6
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.cache = self._empty_cache(shape.pool // BLOCK_SIZE)
        per_tensor = shape.cache == "fp8"
        self.q_scale = torch.tensor([Q_SCALE], device=device) if per_tensor else None
        self.kv_scale = torch.tensor([KV_SCALE], device=device) if per_tensor else None

    def _empty_cache(self, blocks: int) -> Tensor:
        dtype = _KV_DTYPES[self.shape.cache]
        return formats.empty_kv_cache(blocks, BLOCK_SIZE, KV_LORA_RANK, ROPE_DIM, dtype, self.device)

    def arguments(self, i: int) -> dict[str, Any]:
        return {
            "q_nope": self.q_nope[i],
            "q_pe": self.q_pe[i],
            "kv_c": self.kv_c[i],
            "k_pe": self.k_pe[i],
            "positions": self.positions[i],
            "cos_sin_cache": self.table,
            "kv_cache": self.cache,
            "slot_mapping": self.slots[i],
            "is_neox": False,
            "q_scale": self.q_scale,
            "kv_scale": self.kv_scale,
            "q_dtype": self.shape.q_dtype,
        }

    def error(self, run: Callable[[], Tensor]) -> float:
        """Against the reference backend on a few rows: 0.0 only where query and cache rows have the same bits."""
        self.cache.view(torch.uint8).zero_()
        out, rows = run(), _sample(self.shape.rows)
        taken = ("q_nope", "q_pe", "kv_c", "k_pe", "positions")
        arguments = {key: x[rows] if key in taken else x for key, x in self.arguments(0).items()}
        arguments["kv_cache"] = self._empty_cache(1)
        arguments["slot_mapping"] = torch.arange(len(rows), device=self.device)
        expected = getattr(ops, self.shape.op)(**arguments, backend="reference")
        stored = self.cache.view(torch.uint8).flatten(0, 1)[self.slots[0][rows]]
        wanted = arguments["kv_cache"].view(torch.uint8).flatten(0, 1)[: len(rows)]
        query = out.view(torch.uint8)[rows]
        if torch.equal(query, expected.view(torch.uint8)) and torch.equal(stored, wanted):
            return 0.0
        layout = formats.kv_cache_layout(self.cache, KV_LORA_RANK, ROPE_DIM)
        decode = functools.partial(formats.decode_kv_rows, layout=layout)
        errors = (
            relative_error(query.view(out.dtype).float(), expected.float()),
            relative_error(decode(stored), decode(wanted)),
        )
        return math.nan if any(map(math.isnan, errors)) else max(errors)


Shape = AttentionShape | WriteShape


def _inputs(shape: Shape, device: torch.device) -> AttentionInputs | WriteInputs:
    return AttentionInputs(shape, device) if isinstance(shape, AttentionShape) else WriteInputs(shape, device)


GPU_SHAPES: tuple[Shape, ...] = (
    *(AttentionShape("decode", rows, 16, 512, "bf16") for rows in (2, 16, 64)),
    *(AttentionShape("decode", rows, 16, 512, "fp8", dots) for dots in ("bf16", "fp8") for rows in (2, 16, 64, 256)),
    *(AttentionShape("decode", rows, heads, 576, "fp8_ds_mla") for heads in (64, 16) for rows in (16, 64, 128)),
    *(AttentionShape("prefill", rows, 16, 512, "bf16") for rows in (4096, 16384)),
    *(AttentionShape("prefill", 4096, heads, 576, "bf16") for heads in (64, 128)),
    *(WriteShape(cache, rows, 16) for cache in ("bf16", "fp8", "fp8_ds_mla") for rows in (1, 16, 64)),
    *(WriteShape("bf16", rows, heads) for rows, heads in ((4096, 16), (16384, 16), (4096, 128))),
)

CPU_SHAPES: tuple[Shape, ...] = (
    AttentionShape("decode", 2, 4, 512, "bf16", keys=64, pool=1024),
    *(AttentionShape("decode", 2, 4, 512, "fp8", dots, keys=64, pool=1024) for dots in ("bf16", "fp8")),
    AttentionShape("decode", 2, 16, 576, "fp8_ds_mla", keys=64, pool=1024),
    AttentionShape("prefill", 16, 4, 576, "bf16", keys=64, pool=1024),
    *(WriteShape(cache, 2, 4, pool=1024) for cache in ("bf16", "fp8", "fp8_ds_mla")),
)
"""Small ones: they show that everything runs, not how fast."""

HOST_SHAPES: tuple[tuple[Shape, float], ...] = (
    (WriteShape("bf16", 16, 16), 30.0),
    (AttentionShape("decode", 16, 16, 512, "bf16"), 50.0),
)
"""Whose cost on the host is measured, and what it should stay under, in µs."""


# ----------------------------------------------------------------------------------------------------------------------
# Contenders: ours


def _main_output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _caller(shape: Shape, arguments: Callable[[int], dict[str, Any]], backend: str | None) -> CallSet:
    """The operator on a backend. It is called once, so that a refusal comes now, and short."""
    op = getattr(ops, shape.op)
    sets = [arguments(i) for i in range(shape.calls)]

    def call(i: int) -> Tensor:
        return _main_output(op(**sets[i], backend=backend))

    try:
        call(0)
    except registry.BackendUnavailable as refusal:
        reasons = refusal.reasons
        raise Unavailable(reasons[backend] if backend in reasons else str(reasons)) from None
    return call


def _ours(
    shape: Shape,
    arguments: Callable[[], Callable[[int], dict[str, Any]]],
    error: Callable[[], Callable[[Callable[[], Tensor]], float]],
    device: torch.device,
) -> Iterator[Contender]:
    """Every backend that may be taken on this device without being named. Inputs are made when the first one loads."""

    def load(name: str) -> Prepared:
        return Prepared(_caller(shape, arguments(), name), error())

    for backend in registry.BACKENDS:
        if device.type in backend.auto_device_types:
            yield Contender(backend.name, "ours", shape.work, functools.partial(load, backend.name))


def _ours_unnamed(shape: AttentionShape, device: torch.device) -> Prepared:
    """Ours on another cache, on the backend that is taken by itself: what a quantised cache is compared with."""
    inputs = AttentionInputs(shape, device)
    return Prepared(_caller(shape, inputs.arguments, None), inputs.error)


# ----------------------------------------------------------------------------------------------------------------------
# Contenders: peers


class Peers:
    """Kernels of other libraries. They are loaded from `folder`; nothing of them is part of this package.

    folder: holds `_flashmla_C.abi3.so` and `rocm_aiter_mla_sparse.py`, both out of a vLLM wheel.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def _file(self, name: str) -> Path:
        if self.folder is None:
            raise Unavailable(f"needs --peers DIR, a folder with {name}")
        path = self.folder / name
        if not path.is_file():
            raise Unavailable(f"{self.folder} has no {name}")
        return path

    def _flashmla_ops(self, device: torch.device) -> Any:
        path = self._file("_flashmla_C.abi3.so")
        if device.type != "cuda" or torch.version.hip is not None:
            raise Unavailable("FlashMLA runs on NVIDIA GPUs only")
        torch.ops.load_library(str(path))
        return torch.ops._flashmla_C

    def flashmla(self, inputs: AttentionInputs, heads: int) -> Prepared:
        """FlashMLA's sparse prefill kernel. Fewer heads than 64 may be padded: a batch of few rows then runs faster.
        The padding is not timed."""
        op = self._flashmla_ops(inputs.device).sparse_prefill_fwd
        queries = [_pad_heads(q, heads) for q in inputs.q]
        kv = inputs.cache.view(-1, 1, inputs.shape.width)

        def call(i: int) -> Tensor:
            indices = inputs.indices[i][:, None]
            return op(queries[i], kv, indices, SOFTMAX_SCALE, KV_LORA_RANK, None, None, None)[0]

        return Prepared(call, inputs.error)

    def flashmla_fp8(self, inputs: AttentionInputs, heads: int) -> Prepared:
        """FlashMLA's decode kernel over 656-byte rows. Its schedule is made by the first call and kept, as a server
        makes it once a step for all layers."""
        op = self._flashmla_ops(inputs.device).sparse_decode_fwd
        queries = [_pad_heads(q, heads)[:, None] for q in inputs.q]
        cache = inputs.cache.view(torch.float8_e4m3fn).unsqueeze(2)
        schedule: list[Any] = [None, None]

        def call(i: int) -> Tensor:
            out, _lse, *made = op(
                queries[i],
                cache,
                inputs.indices[i][:, None],
                None,
                None,
                *schedule,
                None,
                None,
                None,
                KV_LORA_RANK,
                SOFTMAX_SCALE,
                None,
                False,
            )
            if schedule[0] is None:
                schedule[:] = made
            return out[:, 0]

        call(0)
        return Prepared(call, inputs.error)

    @functools.cached_property
    def _vllm_module(self) -> Any:
        return _extract(self._file("rocm_aiter_mla_sparse.py"), _VLLM_ENTRIES)

    def vllm(self, inputs: AttentionInputs) -> Prepared:
        """vLLM's Triton kernels for ROCm, which are portable: one pass for prefill, split-K for decode."""
        module = self._vllm_module
        if inputs.device.type != "cuda":
            raise Unavailable("vLLM's kernels run on GPUs only")
        shape = inputs.shape
        kv = inputs.cache.view(-1, shape.width)
        starts = torch.arange(0, (shape.rows + 1) * shape.keys, shape.keys, dtype=torch.int32, device=inputs.device)
        splits = 1
        if shape.phase == "decode":
            splits = module.rocm_sparse_decode_bf16_num_splits(shape.rows, shape.heads, shape.keys)

        def call(i: int) -> Tensor:
            q, indices = inputs.q[i], inputs.indices[i].view(-1)
            parts = (KV_LORA_RANK, shape.width - KV_LORA_RANK)
            if splits > 1:
                run = module._rocm_sparse_attn_decode_ragged_bf16_triton
                return run(q, kv, indices, starts, SOFTMAX_SCALE, None, *parts, splits)
            out = q.new_empty(*q.shape[:2], KV_LORA_RANK)
            run = module._rocm_sparse_attn_prefill_ragged_triton
            return run(q, kv, indices, starts, SOFTMAX_SCALE, None, *parts, out)

        return Prepared(call, inputs.error)

    def aiter_write(self, inputs: WriteInputs) -> Prepared:
        """AITER's portable Triton kernel, from an AITER source tree on PYTHONPATH."""
        if inputs.device.type != "cuda":
            raise Unavailable("AITER runs on GPUs only")
        if inputs.shape.cache != "bf16" and torch.version.hip is None:
            raise Unavailable("its fp8 type is e4m3fnuz on every NVIDIA GPU, and it has no 656-byte rows")
        if inputs.shape.cache != "bf16":
            raise Unavailable("it scales no query, and it has no 656-byte rows")
        os.environ.setdefault("AITER_TRITON_ONLY", "1")  # without it the import wants a ROCm toolchain
        try:
            module = importlib.import_module("aiter.ops.triton.fusions.fused_kv_cache")
        except ImportError as error:
            raise Unavailable(f"needs an AITER source tree on PYTHONPATH: {error}") from None
        cos, sin = (half.contiguous() for half in inputs.table.chunk(2, dim=-1))
        cache = inputs.cache.view(-1, 1, KV_LORA_RANK + ROPE_DIM)
        scale = torch.ones(1, device=inputs.device)

        def call(i: int) -> Tensor:
            return _main_output(
                module.fused_qk_rope_cat_and_cache_mla(
                    inputs.q_nope[i],
                    inputs.q_pe[i],
                    inputs.kv_c[i].unsqueeze(1),
                    inputs.k_pe[i].unsqueeze(1),
                    cache,
                    inputs.slots[i],
                    inputs.positions[i],
                    cos,
                    sin,
                    scale,
                    False,
                )
            )

        return Prepared(call, inputs.error)


def _pad_heads(q: Tensor, heads: int) -> Tensor:
    return q if q.shape[1] == heads else torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1]))


_VLLM_ENTRIES = (
    "_rocm_sparse_attn_prefill_ragged_triton",
    "_rocm_sparse_attn_decode_ragged_bf16_triton",
    "rocm_sparse_decode_bf16_num_splits",
)


def _extract(path: Path, entries: Sequence[str]) -> Any:
    """Functions of a module that cannot be imported whole, with the functions and constants that they use.

    Triton reads the source of a kernel from its file, so what is taken goes into a file, outside of `path`'s folder.
    """
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    if missing := [name for name in entries if name not in defined]:
        raise Unavailable(f"{path.name} of this version has no {', '.join(missing)}")
    wanted, taken = list(entries), set[str]()
    while wanted:
        name = wanted.pop()
        if name in defined and name not in taken:
            taken.add(name)
            wanted += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    head = "import functools\nimport math\n\nimport torch\nimport triton\nimport triton.language as tl\n\n"
    head += "_ON_GFX950 = False\n\n\n"
    bodies = {id(node): ast.unparse(node) for name, node in defined.items() if name in taken}
    folder = tempfile.TemporaryDirectory(prefix="peer-")
    source = Path(folder.name) / "extracted.py"
    source.write_text(head + "\n\n\n".join(bodies.values()) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("_peer_extracted", source)
    assert spec is not None  # the path ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["_folder"] = folder  # is removed when the module goes
    return module


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def plain_split_path(
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
) -> Tensor:
    """What a model does without the fused operator, in plain PyTorch: rotate, concatenate, quantise, scatter. It knows
    neither holes nor strided caches nor the half-split rotation."""
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    q = torch.cat((q_nope, _rotate_pairs(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))), dim=-1)
    if q_dtype is not None:
        q = formats.quantize(q, q_scale, q_dtype)
    k_pe = _rotate_pairs(k_pe, cos, sin)
    layout = formats.kv_cache_layout(kv_cache, kv_c.shape[1], k_pe.shape[1])
    if layout.quantized:
        scale = None if kv_scale is None else kv_scale.reshape(())
        rows, cache = formats.encode_kv_rows(kv_c, k_pe, layout, scale), kv_cache.view(torch.uint8)
    else:
        rows, cache = torch.cat((kv_c, k_pe), dim=-1), kv_cache
    cache.view(-1, cache.shape[-1])[slot_mapping] = rows
    return q


def _split_path(inputs: WriteInputs, *, compiled: bool) -> Prepared:
    if compiled and inputs.device.type != "cuda":
        raise Unavailable("compiled on a GPU only: on a CPU it would time the C++ compiler's choices")
    path: Callable[..., Tensor] = plain_split_path
    if compiled:
        torch.compiler.reset()  # each shape is compiled for itself; without this the limit on recompiles is reached
        path = torch.compile(plain_split_path, fullgraph=True, dynamic=False)
    sets = [inputs.arguments(i) for i in range(inputs.shape.calls)]
    return Prepared(lambda i: path(**sets[i]), inputs.error)


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


class Runner(NamedTuple):
    """A contender that can be timed: `sample` gives µs a call, one figure for each timed run; `first` runs once and
    gives the output of set 0."""

    sample: Callable[[], list[float]]
    first: Callable[[], Tensor]
    call: CallSet
    """Kept because it keeps the inputs alive: a captured graph goes on reading their memory."""


def _graph_runner(call: CallSet, calls: int) -> Runner:
    """Calls on all sets of inputs in one graph. Their outputs are kept, so that no two calls write the same memory."""
    from triton.testing import do_bench

    for i in range(calls):  # compiles
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(i) for i in range(calls)]

    def sample() -> list[float]:
        times = do_bench(graph.replay, warmup=5, rep=SAMPLE_MS, return_mode="all")
        return [1e3 * ms / calls for ms in times]

    def first() -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return outputs[0]

    return Runner(sample, first, call)


def _cpu_runner(call: CallSet, calls: int) -> Runner:
    sets = itertools.cycle(range(calls))
    timer = Timer("call(next(sets))", globals={"call": call, "sets": sets, "next": next})

    def sample() -> list[float]:
        return [1e6 * seconds for seconds in timer.blocked_autorange(min_run_time=0.002).times]

    return Runner(sample, lambda: call(0), call)


def make_runner(call: CallSet, calls: int, device: torch.device) -> Runner:
    return _graph_runner(call, calls) if device.type == "cuda" else _cpu_runner(call, calls)


def sample_in_turns(runners: dict[str, Runner], rounds: int, pause_s: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            time.sleep(pause_s)
            samples[name] += runner.sample()
    return samples


def _spread(samples: Sequence[float]) -> float:
    """Interquartile range."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    return high - low


def measure_ceilings(device: torch.device) -> Ceilings:
    """A copy, counting bytes read plus bytes written, and a matrix product of random bf16 values."""
    small = device.type == "cpu"
    source = torch.randn(1 << (23 if small else 28), device=device)
    target = torch.empty_like(source)
    n = 512 if small else 8192
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    runners = {
        # By a kernel: in a graph, `copy_` becomes a node for the copy engines, which are slower.
        "copy": make_runner(lambda i: torch.neg(source, out=target), 1, device),
        "matmul": make_runner(lambda i: a @ b, 1, device),
    }
    samples = sample_in_turns(runners, *((1, 0.0) if small else (5, PAUSE_S)))
    seconds = {name: 1e-6 * statistics.median(times) for name, times in samples.items()}
    return Ceilings(2 * source.nbytes / seconds["copy"], 2 * n**3 / seconds["matmul"])


def _reason(error: BaseException) -> str:
    """The first line of an error, short enough for a table."""
    text = str(error).strip() or type(error).__name__
    prefix = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
    return (prefix + text.splitlines()[0])[:200]


def measure_shape(shape: Shape, device: torch.device, peers: Peers, ceilings: Ceilings) -> list[Row]:
    """Rows of all contenders at one shape, ours first."""
    timing = "graph" if device.type == "cuda" else "cpu"
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    errors: dict[str, Callable[[Callable[[], Tensor]], float]] = {}
    works: dict[str, Work] = {}
    for contender in shape.contenders(device, peers):
        name = contender.name
        row = rows[name] = Row(shape.op, shape.name, name, contender.kind, timing, device=device_name(device))
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Triton prints the code of what it cannot compile
                prepared = contender.load()
                runners[name] = make_runner(prepared.call, shape.calls, device)
        except Exception as error:
            row.note = _reason(error)
            continue
        errors[name], works[name] = prepared.error, contender.work
    rounds, pause_s = (ROUNDS, PAUSE_S) if device.type == "cuda" else (3, 0.0)
    for name, samples in sample_in_turns(runners, rounds, pause_s).items():
        row, work = rows[name], works[name]
        row.us, row.spread_us = statistics.median(samples), _spread(samples)
        row.calls, row.samples = shape.calls if timing == "graph" else 1, len(samples)
        row.tflops = work.flops / row.us * 1e-6 if work.flops else None
        row.tb_per_s = work.bytes / row.us * 1e-6
        row.share_of_limit = ceilings.floor_us(work) / row.us
        try:
            row.error = errors[name](runners[name].first)
        except Exception as error:
            row.note = f"accuracy: {_reason(error)}"
    _add_best_of(rows, "flashmla-h", "flashmla-best")
    ours = [row for row in rows.values() if row.kind == "ours"]
    # The first of the table that can run is what is taken when no backend is named.
    base = next((row.us for row in ours if row.us), None)
    for row in rows.values():
        row.over_ours = row.us / base if row.us and base else None
    return list(rows.values())


def _add_best_of(rows: dict[str, Row], prefix: str, name: str) -> None:
    tried = [row for row in rows.values() if row.contender.startswith(prefix) and row.us]
    if len(tried) > 1:
        best = min(tried, key=lambda row: row.us or math.inf)
        rows[name] = dataclasses.replace(best, contender=name, note=f"is {best.contender}")


@contextlib.contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Keep this thread on one core. None: where it may run now."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure_host(shape: Shape, target_us: float, device: torch.device) -> Row:
    """What an eager call costs the host, on the core where it costs least: others may share theirs with a neighbour.

    The device is idle before each burst, and a burst is too short to fill its queue, where the host would wait.
    """
    row = Row(shape.op, f"host-{shape.name}", "default", "ours", "host", device=device_name(device))
    burst, bursts = 10, 50
    cores: list[int | None] = [*sorted(os.sched_getaffinity(0))[:16]] if hasattr(os, "sched_setaffinity") else [None]
    found: list[list[float]] = []
    try:
        call = _caller(shape, _inputs(shape, device).arguments, None)
        for core in cores:
            samples = []
            with _on_core(core):
                for _ in range(bursts + 5):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for i in range(burst):
                        call(i % shape.calls)
                    samples.append((time.perf_counter() - start) / burst * 1e6)
            found.append(samples[5:])
    except Exception as error:
        row.note = _reason(error)
        return row
    samples = min(found, key=statistics.median)
    row.us, row.spread_us = statistics.median(samples), _spread(samples)
    row.calls, row.samples = burst, len(samples)
    slowest = max(statistics.median(of_core) for of_core in found)
    row.note = f"eager call, host time; target ≤ {target_us:g} µs; slowest of {len(cores)} cores {slowest:.1f} µs"
    return row


# ----------------------------------------------------------------------------------------------------------------------
# Output


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{shown.splitlines()[0].strip()}, CUDA {torch.version.cuda}"


def header(device: torch.device) -> str:
    try:
        triton_version = importlib.import_module("triton").__version__
    except ImportError:
        triton_version = "none"
    lines = [
        f"# device {device_name(device)} ({arch.arch_name(device)}), driver {_driver(device)}",
        f"# torch {torch.__version__}, triton {triton_version}, sparse_mla_ops {sparse_mla_ops.__version__}, "
        f"{datetime.date.today().isoformat()}",
    ]
    if device.type == "cpu":
        lines.append(
            "# no GPU here: small shapes on the reference backend, timed on the host. They show that the benchmark "
            "runs, not how fast anything is."
        )
    return "\n".join(lines)


_TABLE = f"{'shape':<34} {'contender':<19}" + "".join(
    f" {title:>{width}}"
    for title, width in (
        ("µs", 9),
        ("±IQR", 7),
        ("TFLOP/s", 7),
        ("TB/s", 5),
        ("limit", 5),
        ("error", 7),
        ("/ours", 6),
    )
)


def _cell(value: float | None, width: int, form: str) -> str:
    return f" {'–' if value is None else format(value, form):>{width}}"


def format_row(row: Row) -> str:
    """One line of the table; one that was not measured is its reason."""
    start = f"{row.shape:<34} {row.contender:<19}"
    if row.us is None:
        return f"{start} not measured: {row.note}"
    error = " bitwise".rjust(8) if row.error == 0.0 else _cell(row.error, 7, ".1e")
    return (
        start
        + _cell(row.us, 9, ".2f" if row.us < 1000 else ".0f")
        + _cell(row.spread_us, 7, ".2f")
        + _cell(row.tflops, 7, ".1f")
        + _cell(row.tb_per_s, 5, ".2f")
        + _cell(row.share_of_limit, 5, ".2f")
        + error
        + _cell(row.over_ours, 6, ".2f")
        + (f"  {row.note}" if row.note else "")
    )


class Progress:
    """A bar if tqdm is installed and someone watches, else a line to stderr for each step. `show` prints results."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            self.bar = importlib.import_module("tqdm").tqdm(total=total, file=sys.stderr, leave=False)

    def start(self, what: str) -> None:
        self.done += 1
        if self.bar is None:
            print(f"[{self.done}/{self.total}] {what}", file=sys.stderr, flush=True)
        else:
            self.bar.set_description(what)
            self.bar.update()

    def show(self, text: str) -> None:
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text, file=sys.stdout)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_KEYS)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def _matplotlib_figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise SystemExit(
            "bench: --plot needs matplotlib, which is not installed: pip install 'sparse_mla_ops[bench]'"
        ) from error


def write_plot(path: Path, rows: Sequence[Row], ceilings: Ceilings) -> None:
    """A bar for each row that was measured on the device, on a logarithmic axis, one panel for each operator."""
    rows = [row for row in rows if row.us is not None and row.timing != "host"]
    names = list(dict.fromkeys(row.op for row in rows))
    heights = [1.2 + 0.2 * sum(row.op == name for row in rows) for name in names]
    figure = _matplotlib_figure()(figsize=(10, max(2.0, sum(heights))), layout="constrained")
    panels = figure.subplots(max(1, len(names)), 1, squeeze=False, height_ratios=heights or None)[:, 0]
    figure.suptitle(
        f"{rows[0].device if rows else ''}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    for panel, name in zip(panels, names):
        of_op = [row for row in rows if row.op == name]
        labels = [f"{row.shape}  {row.contender}" for row in of_op]
        colors = ["tab:blue" if row.kind == "ours" else "tab:gray" for row in of_op]
        panel.barh(range(len(of_op)), [row.us for row in of_op], color=colors)
        limits = [(row.us or 0.0) * (row.share_of_limit or 0.0) for row in of_op]
        panel.plot(limits, range(len(of_op)), "k|")
        panel.set_yticks(range(len(of_op)), labels, fontsize=7)
        panel.invert_yaxis()
        panel.set(xscale="log", xlabel="µs a call;  | is the floor", title=name)
    figure.savefig(path)


# ----------------------------------------------------------------------------------------------------------------------
# Tuning


Settings = dict[str, int]

GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "sparse_mla_fwd": {
        "BLOCK_N": (16, 32, 64, 128),
        "BLOCK_G": (64, 128, 256, 512),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "CONVERT": (0, 1, 2, 3),
        "VECTOR": (8, 16),
        "SLOTS_FIRST": (0, 1),
        "programs_per_sm": (1, 2, 3),
        "min_keys": (64, 128, 256),
    },
    "cache_write": {"BLOCK_H": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8)},
}
SPLIT_ONLY = ("programs_per_sm", "min_keys")
CONVERTED_ONLY = ("CONVERT", "VECTOR")
"""Settings of classes whose fp8 tiles are multiplied at 16 bits."""
GIVE_UP_AT = 1.5
"""A candidate this much slower than the best so far at one shape is not tried at the others."""
FINALISTS = 4
MAX_ERROR = 0.06
"""Of fp8 products, the coarsest: settings that exceed it do not compute the operator."""


def candidates(shape_class: ShapeClass, current: Settings) -> list[Settings]:
    """The whole grid, the current settings first, then what differs from them in one setting, in two, … So a search
    that runs out of time has seen the neighbourhood."""
    grid = {
        key: values
        for key, values in GRIDS[shape_class.kernel].items()
        if (key not in SPLIT_ONLY or shape_class.name.endswith(("-few", "-split")))
        and (key not in CONVERTED_ONLY or shape_class.name.startswith(("fp8-", "ds_mla-")))
    }
    current = {key: current[key] for key in grid}
    every = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    others = [candidate for candidate in every if candidate != current]
    others.sort(key=lambda candidate: sum(candidate[key] != current[key] for key in grid))
    return [current, *others]


@contextlib.contextmanager
def settings_as(shape_class: ShapeClass, settings: Settings) -> Iterator[None]:
    """Within the block, kernels of `shape_class` are launched with `settings`."""
    forget_plans()  # known calls are repeated with the settings that they were first made with
    try:
        with tuned.watch({shape_class: settings}):
            yield
    finally:
        forget_plans()


def class_of(shape: Shape, device: torch.device) -> ShapeClass | None:
    """The class whose settings the Triton backend uses for a shape; nothing is launched. None: it refuses the shape."""
    triton_backend = importlib.import_module("sparse_mla_ops.backends.triton")
    inputs = _inputs(shape, device)
    with tuned.watch() as asked, triton_backend.record_launches():
        try:
            getattr(ops, shape.op)(**inputs.arguments(0), backend="triton")
        except registry.BackendUnavailable:
            return None
    return next((found for found in asked if found.kernel in GRIDS), None)


class Tuner:
    """The search for the settings of one class, over all the shapes that fall into it."""

    def __init__(self, shape_class: ShapeClass, shapes: Sequence[Shape], device: torch.device) -> None:
        self.shape_class, self.shapes, self.device = shape_class, shapes, device
        self.inputs = [_inputs(shape, device) for shape in shapes]
        self.current: Settings = {
            key: tuned.settings(*shape_class)[key] for key in candidates(shape_class, tuned.settings(*shape_class))[0]
        }

    def _runner(self, at: int, settings: Settings) -> Runner:
        shape = self.shapes[at]
        with settings_as(self.shape_class, settings), contextlib.redirect_stdout(io.StringIO()):
            return make_runner(_caller(shape, self.inputs[at].arguments, "triton"), shape.calls, self.device)

    def _try(self, settings: Settings, best_us: list[float]) -> list[float]:
        """Times at the shapes, as many as it took to see that the settings are slow. Raises if they cannot be used."""
        times: list[float] = []
        for at in range(len(self.shapes)):
            runner = self._runner(at, settings)
            times.append(statistics.median(runner.sample()))
            if times[-1] > GIVE_UP_AT * best_us[at]:
                break
            if not self.inputs[at].error(runner.first) <= MAX_ERROR:  # also NaN
                raise ArithmeticError("wrong results")
            best_us[at] = min(best_us[at], times[-1])
        return times

    def search(self, seconds: float, say: Callable[[str], None]) -> Settings:
        """The best settings found in about `seconds`; the current ones unless others are faster by over 1 %."""
        started, best_us = time.monotonic(), [math.inf] * len(self.shapes)
        every = candidates(self.shape_class, self.current)
        found: list[tuple[float, Settings]] = []
        tried = refused = given_up = 0
        for settings in every:
            if tried and time.monotonic() - started > seconds:
                break
            tried += 1
            try:
                times = self._try(settings, best_us)
            except Exception:  # mostly out of shared memory or registers
                refused += 1
                continue
            if len(times) < len(self.shapes):
                given_up += 1
            else:
                found.append((statistics.geometric_mean(times), settings))
        say(
            f"{self.shape_class.name}: tried {tried} of {len(every)} candidates in "
            f"{time.monotonic() - started:.0f} s ({refused} could not run, {given_up} were given up as slow)"
        )
        found.sort(key=lambda pair: pair[0])
        finalists = [settings for _, settings in found[:FINALISTS]]
        if self.current not in finalists:
            finalists.append(self.current)
        return self._final(finalists, say)

    def _final(self, finalists: Sequence[Settings], say: Callable[[str], None]) -> Settings:
        """Among the finalists, in turns, since the search itself ran them minutes apart."""
        medians: list[list[float]] = [[] for _ in finalists]
        for at in range(len(self.shapes)):
            runners = {str(n): self._runner(at, settings) for n, settings in enumerate(finalists)}
            for n, samples in sample_in_turns(runners, ROUNDS, PAUSE_S).items():
                medians[int(n)].append(statistics.median(samples))
        before = finalists.index(self.current)
        means = [statistics.geometric_mean(times) for times in medians]
        best = min(range(len(finalists)), key=means.__getitem__)
        if means[best] > 0.99 * means[before]:
            best = before
        for at, shape in enumerate(self.shapes):
            say(f"  {shape.name}: {medians[before][at]:.2f} µs → {medians[best][at]:.2f} µs")
        say(f"  before {json.dumps(self.current)}, {means[before]:.2f} µs (geometric mean)")
        say(f"  after  {json.dumps(finalists[best])}, {means[best]:.2f} µs")
        return finalists[best]


def format_tuned(table: dict[str, Any]) -> str:
    """tuned.json with one class a line, so that a diff reads well."""

    def block(items: dict[str, Any], depth: int) -> str:
        if depth == 3:
            return json.dumps(items)
        inner = ",\n".join(f"{'  ' * (depth + 1)}{json.dumps(k)}: {block(v, depth + 1)}" for k, v in items.items())
        return "{\n" + inner + "\n" + "  " * depth + "}"

    return block(table, 0) + "\n"


def tune(shapes: Sequence[Shape], only: str, seconds: float, device: torch.device, path: Path) -> int:
    """Search the classes of `shapes` whose name holds `only`; write what is found into tuned.json, class by class."""
    classes: dict[ShapeClass, list[Shape]] = {}
    for shape in shapes:
        if (found := class_of(shape, device)) is not None:
            classes.setdefault(found, []).append(shape)
    chosen = {found: of for found, of in classes.items() if only in found.name}
    if not chosen:
        known = ", ".join(found.name for found in classes)
        print(f"bench: no class of settings has {only!r} in its name; there are: {known}", file=sys.stderr)
        return 2
    progress = Progress(len(chosen))
    for found, of in chosen.items():
        progress.start(f"{found.kernel} {found.name}: {', '.join(shape.name for shape in of)}")
        try:
            best = Tuner(found, of, device).search(seconds, progress.show)
        except Exception as error:
            progress.show(f"{found.name}: not tuned: {_reason(error)}")
            continue
        table = json.loads(path.read_text(encoding="utf-8"))
        section = table.setdefault(found.arch, {}).setdefault(found.kernel, {})
        section[found.name] = {**section.get(found.name, {}), **best}  # settings outside the grid stay
        path.write_text(format_tuned(table), encoding="utf-8")
        gc.collect()
        torch.cuda.empty_cache()
    progress.close()
    tuned.reread()
    forget_plans()
    print(f"wrote {path}")
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparse_mla_ops bench", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="op", help="operators to run; default: all that have shapes")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with the kernels to compare with")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows (needs matplotlib)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only shapes (with --tune: classes) named so")
    parser.add_argument("--tune", action="store_true", help="search block sizes on this GPU and write tuned.json")
    parser.add_argument("--tune-seconds", type=float, default=120.0, metavar="N", help="search time for one class")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the benchmark with command-line arguments; the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    known = list(dict.fromkeys(shape.op for shape in shapes))
    if unknown := [op for op in options.ops if op not in known]:
        parser.error(f"no shapes for {', '.join(unknown)}; there are some for {', '.join(known)}")
    chosen = options.ops or known
    shapes = tuple(shape for shape in shapes if shape.op in chosen)
    if options.plot is not None:
        _matplotlib_figure()  # a missing library is said before the run, not after
    print(header(device), flush=True)
    if options.tune:
        if device.type != "cuda":
            print("bench: --tune needs a GPU: block sizes are measured", file=sys.stderr)
            return 1
        path = Path(str(resources.files("sparse_mla_ops").joinpath("tuned.json")))
        return tune(shapes, options.only, options.tune_seconds, device, path)

    hosts = HOST_SHAPES if device.type == "cuda" else ()
    hosts = tuple(pair for pair in hosts if pair[0].op in chosen and options.only in f"host-{pair[0].name}")
    selected = [shape for shape in shapes if options.only in shape.name]
    if not selected and not hosts:
        names = ", ".join(shape.name for shape in shapes)
        parser.error(f"no shape has {options.only!r} in its name; there are: {names}")
    ceilings = measure_ceilings(device)
    print(f"# ceilings: copy {ceilings.bytes_per_s / 1e12:.3f} TB/s, bf16 matmul", end=" ")
    print(f"{ceilings.flops_per_s / 1e12:.3f} TFLOP/s")
    rows: list[Row] = []
    peers = Peers(options.peers)
    progress = Progress(len(selected) + len(hosts))

    def add(new: Sequence[Row]) -> None:
        if not rows or rows[-1].op != new[0].op:
            progress.show(f"\n{new[0].op}\n{_TABLE}")
        rows.extend(new)
        progress.show("\n".join(format_row(row) for row in new))
        if options.csv is not None:
            write_csv(options.csv, rows)  # each time: a run that is cut short leaves what it has

    try:
        for op in chosen:
            for shape in selected:
                if shape.op == op:
                    progress.start(shape.name)
                    add(measure_shape(shape, device, peers, ceilings))
                    if device.type == "cuda":
                        gc.collect()  # graphs hold memory
                        torch.cuda.empty_cache()
            for shape, target_us in hosts:
                if shape.op == op:
                    progress.start(f"host-{shape.name}")
                    add([measure_host(shape, target_us, device)])
    finally:
        progress.close()
    if options.plot is not None:
        write_plot(options.plot, rows, ceilings)
    return 0
