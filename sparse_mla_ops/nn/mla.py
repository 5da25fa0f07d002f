"""One MLA layer on paged caches: the layer's own projections and norms around the operators of this package.

`MLASpec` is the protocol: whoever can fill it in has a layer that `FusedSparseMLA` runs. `fuse_model` fills it in for
the model families that it knows; `examples/wrap_my_layer.py` does so for a layer of one's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from sparse_mla_ops import formats, ops
from sparse_mla_ops.nn.step import StepInputs


@dataclass(frozen=True)
class IndexerSpec:
    """The parts of an indexer. Modules are used as they are; letters as in `sparse_mla_ops.ops`.

    The first R values of queries and keys are rotated, R being the width of the layer's rope table.
    """

    wq_b: nn.Module
    """normed q_c [T, q_lora_rank] → [T, I·D]"""
    wk: nn.Module
    """hidden [T, hidden] → [T, D]"""
    k_norm: nn.Module
    weights_proj: nn.Linear
    """hidden → head weights [T, I], in the dtype of its own weight"""
    num_heads: int
    head_dim: int
    topk: int
    softmax_scale: float
    is_neox: bool
    """Pairing of the indexer's rotation, which differs from MLA's in DeepSeek-V3.2."""


@dataclass(frozen=True)
class MLASpec:
    """The parts of an MLA layer. Modules are used as they are.

    Letters as in `sparse_mla_ops.ops`; P and V are the widths of a head's query without position and of its value.
    """

    q_b_proj: nn.Module
    """normed q_c → [T, H·(P + R)], per head P values without position, then R with"""
    kv_a_proj_with_mqa: nn.Module
    """hidden → [T, L + R]"""
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    """Its weight [H·(P + V), L] is read, never called: W_UK and W_UV are views of it. No bias."""
    o_proj: nn.Module
    """[T, H·V] → hidden"""
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """R; 0 for a layer without rope, whose rope table is then [P, 0]."""
    v_head_dim: int
    kv_lora_rank: int
    softmax_scale: float
    """Of the layer before absorption, (P + R)^-0.5 in the released models."""
    is_neox: bool
    indexer: IndexerSpec | None = None
    """None: the layer attends to token indices that are given to it (top-k shared between layers)."""
    q_a_proj: nn.Module | None = None
    """hidden → [T, q_lora_rank]; None: q_b_proj and the indexer take the hidden states themselves."""
    q_a_layernorm: nn.Module | None = None
    """None: q_c is not normed."""
    attn_sink: Tensor | None = None
    """[H] fp32 logits, natural log, of a sink that takes part of the attention."""

    def check(self) -> None:
        """Raise ValueError where parts are missing or do not fit each other."""
        optional = ("indexer", "q_a_proj", "q_a_layernorm", "attn_sink")
        _check_parts("MLASpec", self, optional)
        if self.indexer is not None:
            _check_parts("IndexerSpec", self.indexer, ())
            if self.indexer.head_dim < self.qk_rope_head_dim:
                raise ValueError(
                    f"IndexerSpec.head_dim: expected at least R={self.qk_rope_head_dim}, the values of a head that are "
                    f"rotated, got {self.indexer.head_dim}"
                )
        weight = getattr(self.kv_b_proj, "weight", None)
        shape = (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        if not isinstance(weight, Tensor) or weight.dtype not in formats.FLOAT_DTYPES or tuple(weight.shape) != shape:
            got = f"{tuple(weight.shape)} {weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(
                f"MLASpec.kv_b_proj: expected a weight [H·(P + V), L] = {shape} of fp32, bf16 or fp16, got {got}; "
                "it is absorbed into queries and outputs, so a quantised one must be dequantised before"
            )
        if getattr(self.kv_b_proj, "bias", None) is not None:
            raise ValueError("MLASpec.kv_b_proj: expected no bias, got one; absorption has no place for it")
        if self.attn_sink is not None and (
            tuple(self.attn_sink.shape) != (self.num_heads,) or self.attn_sink.dtype != torch.float32
        ):
            raise ValueError(
                f"MLASpec.attn_sink: expected [H] = ({self.num_heads},) float32, "
                f"got {tuple(self.attn_sink.shape)} {self.attn_sink.dtype}"
            )


def _check_parts(owner: str, spec: MLASpec | IndexerSpec, optional: tuple[str, ...]) -> None:
    missing = [f.name for f in fields(spec) if f.name not in optional and getattr(spec, f.name) is None]
    if missing:
        raise ValueError(f"{owner}: expected every part of the layer, got None for {', '.join(missing)}")


@dataclass(frozen=True)
class CacheSpec:
    """The caches of one layer.

    num_blocks, block_size: NB and BS. max_len: most tokens of one sequence, the width of the indexer's logits.
    kv_dtype: fp32, bf16, fp16, an fp8 dtype, or "fp8_ds_mla" for 656-byte rows. index_dtype: the same but for the last.
    kv_scale: of a per-tensor fp8 cache, real = stored · kv_scale; one scale covers kv_c and k_pe.
    """

    num_blocks: int
    block_size: int
    max_len: int
    kv_dtype: torch.dtype | str
    index_dtype: torch.dtype
    kv_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        check_scale_value("kv_scale", self.kv_scale)


def check_scale_value(name: str, value: float) -> None:
    """Scales are validated here, where they are made: operators never read one on the host."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite value above 0 (real = stored · scale), got {value}")


class SparseIndexer(nn.Module):
    """Writes the indexer key of every row, then selects the tokens that each row attends to."""

    index_cache: Tensor
    cos_sin_cache: Tensor

    def __init__(
        self, spec: IndexerSpec, cache: CacheSpec, cos_sin_cache: Tensor, logits_budget_bytes: int = 512 * 2**20
    ) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm, self.weights_proj = spec.wq_b, spec.wk, spec.k_norm, spec.weights_proj
        self.num_heads, self.head_dim = spec.num_heads, spec.head_dim
        self.softmax_scale, self.is_neox = spec.softmax_scale, spec.is_neox
        self.topk = min(spec.topk, cache.max_len)
        self.max_len = cache.max_len
        self.logits_budget_bytes = logits_budget_bytes
        self.fp8_dtype = cache.index_dtype if cache.index_dtype in formats.FP8_MAX else None
        index_cache = formats.empty_index_cache(
            cache.num_blocks, cache.block_size, spec.head_dim, cache.index_dtype, cos_sin_cache.device
        )
        self.register_buffer("index_cache", index_cache, persistent=False)
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)

    def forward(self, hidden: Tensor, q_c: Tensor, step: StepInputs) -> Tensor:
        """hidden [T, hidden], q_c [T, q_lora_rank] → token indices [T, topk] int32, relative to the request."""
        rope_dim = self.cos_sin_cache.shape[1]
        k = self.k_norm(self.wk(hidden))
        if rope_dim:
            # The operator rotates queries and keys together; here the single key head is all there is to rotate.
            k_pe = k[:, :rope_dim]
            _, k_pe = ops.rotary_embedding(k_pe.unsqueeze(1), k_pe, step.positions, self.cos_sin_cache, self.is_neox)
            k = torch.cat((k_pe, k[:, rope_dim:]), dim=-1)
        ops.indexer_k_quant_and_cache(k, self.index_cache, step.slot_mapping, fp8_dtype=self.fp8_dtype)

        q, weights = ops.indexer_q_rope_quant(
            self.wq_b(q_c).unflatten(-1, (self.num_heads, self.head_dim)),
            step.positions,
            self.cos_sin_cache,
            self.weights_proj(hidden.to(self.weights_proj.weight.dtype)),
            self.softmax_scale,
            self.is_neox,
            q_dtype=self.fp8_dtype,
        )
        return ops.sparse_attn_indexer(
            q,
            self.index_cache,
            weights,
            step.row_ends,
            step.block_table,
            step.req_id,
            self.topk,
            self.max_len,
            self.logits_budget_bytes,
            fp8_dtype=self.fp8_dtype,
        )


class FusedSparseMLA(nn.Module):
    """Sparse MLA of one layer over its paged caches, prefill and decode alike.

    The caches are module buffers: graphs that mutate them can then be captured. With `fused`, one operator rotates,
    joins the query and writes the cache of the whole batch; without, three operators do so in steps. Results are equal
    bit for bit. The query leaves the layer's own dtype only if `q_dtype` says so.

    Build it after moving or casting the layer: `.to(dtype)` would cast the caches and scales as well.
    """

    kv_cache: Tensor
    kv_scale: Tensor
    q_scale: Tensor
    cos_sin_cache: Tensor
    attn_sink: Tensor | None

    def __init__(
        self,
        spec: MLASpec,
        cache: CacheSpec,
        cos_sin_cache: Tensor,
        *,
        q_dtype: torch.dtype | None = None,
        q_scale: float = 1.0,
        fused: bool = True,
    ) -> None:
        """
        Args:
            spec: the layer's parts.
            cache: the caches to create, on the device of cos_sin_cache.
            cos_sin_cache: [P, R] fp32 rope table, P ≥ cache.max_len; [P, 0] for a layer without rope.
            q_dtype: dtype of the finished query: None (as computed), or an fp8 dtype where the attention backend
                takes it.
            q_scale: divisor of an fp8 query.
            fused: one operator for rotation, concatenation and cache write, or three.
        """
        super().__init__()
        spec.check()
        if cos_sin_cache.shape[0] < cache.max_len or cos_sin_cache.shape[1] != spec.qk_rope_head_dim:
            raise ValueError(
                f"cos_sin_cache: expected [P, R] with P ≥ max_len={cache.max_len} and R={spec.qk_rope_head_dim}, "
                f"got {tuple(cos_sin_cache.shape)}"
            )
        check_scale_value("q_scale", q_scale)
        self.q_a_proj, self.q_a_layernorm, self.q_b_proj = spec.q_a_proj, spec.q_a_layernorm, spec.q_b_proj
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = spec.kv_a_proj_with_mqa, spec.kv_a_layernorm
        self.kv_b_proj, self.o_proj = spec.kv_b_proj, spec.o_proj
        self.num_heads, self.kv_lora_rank = spec.num_heads, spec.kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self.v_head_dim = spec.v_head_dim
        self.softmax_scale, self.is_neox = spec.softmax_scale, spec.is_neox
        self.cache_spec = cache
        self.q_dtype = q_dtype
        self.fused = fused

        device = cos_sin_cache.device
        kv_cache = formats.empty_kv_cache(
            cache.num_blocks, cache.block_size, spec.kv_lora_rank, spec.qk_rope_head_dim, cache.kv_dtype, device
        )
        self.register_buffer("kv_cache", kv_cache, persistent=False)
        self.register_buffer("kv_scale", torch.tensor([cache.kv_scale], device=device), persistent=False)
        self.register_buffer("q_scale", torch.tensor([q_scale], device=device), persistent=False)
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)
        if isinstance(spec.attn_sink, nn.Parameter):
            self.attn_sink = spec.attn_sink
        else:
            self.register_buffer("attn_sink", spec.attn_sink, persistent=False)
        self.indexer = None if spec.indexer is None else SparseIndexer(spec.indexer, cache, cos_sin_cache)

    def forward(
        self,
        hidden_states: Tensor,
        step_inputs: StepInputs,
        phase: str = "prefill",
        token_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            hidden_states: [..., hidden] with T rows in all.
            step_inputs: of these rows.
            phase: "decode" if every row is a decode or speculative row, else "prefill"; see `sparse_mla_fwd`.
            token_indices: [T, K], for a layer without an indexer: what another layer returned.

        Returns:
            The output, shaped as hidden_states, and the token indices [T, K] int32 that were attended to.
        """
        hidden = hidden_states.flatten(0, -2)
        q_c = hidden if self.q_a_proj is None else self.q_a_proj(hidden)
        if self.q_a_layernorm is not None:
            q_c = self.q_a_layernorm(q_c)
        q_nope, q_pe = (
            self.q_b_proj(q_c)
            .unflatten(-1, (self.num_heads, -1))
            .split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        )
        kv_c, k_pe = self.kv_a_proj_with_mqa(hidden).split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        kv_c = self.kv_a_layernorm(kv_c)
        w_uk, w_uv = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(
            (self.qk_nope_head_dim, self.v_head_dim), dim=1
        )
        q_nope = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        q = self._write_and_finish_query(q_nope, q_pe, kv_c, k_pe, step_inputs)

        if self.indexer is not None:
            token_indices = self.indexer(hidden, q_c, step_inputs)
        elif token_indices is None:
            raise ValueError("token_indices: this layer has no indexer; pass the indices of the layer before, got None")
        indices = ops.convert_req_index_to_global_index(
            step_inputs.req_id, step_inputs.block_table, token_indices, self.cache_spec.block_size
        )
        latent, _ = ops.sparse_mla_fwd(
            q,
            self.kv_cache,
            indices,
            self.softmax_scale,
            self.kv_lora_rank,
            q_scale=self.q_scale,
            kv_scale=self.kv_scale,
            attn_sink=self.attn_sink,
            phase=phase,
        )
        values = torch.bmm(latent.to(hidden.dtype).transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(values.flatten(1)).view(hidden_states.shape), token_indices

    def _write_and_finish_query(
        self, q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, step: StepInputs
    ) -> Tensor:
        """Rotate, write the KV row of every token, and return the query [T, H, L + R] in q_dtype."""
        if self.fused:
            return ops.fused_qk_rope_concat_and_cache_mla(
                q_nope,
                q_pe,
                kv_c,
                k_pe,
                step.positions,
                self.cos_sin_cache,
                self.kv_cache,
                step.slot_mapping,
                self.is_neox,
                q_scale=self.q_scale,
                kv_scale=self.kv_scale,
                q_dtype=self.q_dtype,
            )
        q_pe, k_pe = ops.rotary_embedding(q_pe, k_pe, step.positions, self.cos_sin_cache, self.is_neox)
        ops.concat_and_cache_mla(kv_c, k_pe, self.kv_cache, step.slot_mapping, kv_scale=self.kv_scale)
        return ops.concat_mla_q(q_nope, q_pe, q_scale=self.q_scale, q_dtype=self.q_dtype)
