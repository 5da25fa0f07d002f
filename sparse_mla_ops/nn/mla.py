"""One MLA layer on paged caches: the layer's own projections and norms around the operators of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparse_mla_ops import formats, ops
from sparse_mla_ops.nn.step import StepInputs


@dataclass(frozen=True)
class IndexerSpec:
    """The parts of an indexer. Modules are used as they are; letters as in `sparse_mla_ops.ops`."""

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
    """The parts of an MLA layer. Modules are used as they are; letters as in `sparse_mla_ops.ops`."""

    q_a_proj: nn.Module
    """hidden [T, hidden] → [T, q_lora_rank]"""
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    """normed q_c → [T, H·(P + R)], per head P values without position, then R with"""
    kv_a_proj_with_mqa: nn.Module
    """hidden → [T, L + R]"""
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    """Its weight [H·(P + V), L] is read, never called: W_UK and W_UV are views of it."""
    o_proj: nn.Module
    """[T, H·V] → hidden"""
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    softmax_scale: float
    is_neox: bool
    indexer: IndexerSpec


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

    Fuse after moving or casting the model: `.to(dtype)` would cast the caches and scales as well.
    """

    kv_cache: Tensor
    kv_scale: Tensor
    q_scale: Tensor
    cos_sin_cache: Tensor

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
            cos_sin_cache: [P, R] fp32 rope table, P ≥ cache.max_len.
            q_dtype: dtype of the finished query: None (as computed), or an fp8 dtype where the attention backend takes
                it.
            q_scale: divisor of an fp8 query.
            fused: one operator for rotation, concatenation and cache write, or three.
        """
        super().__init__()
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
        self.indexer = SparseIndexer(spec.indexer, cache, cos_sin_cache)

    def attend(self, hidden: Tensor, step: StepInputs, phase: str) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden] → (output [T, hidden], token indices [T, topk]).

        phase: "decode" if every row is a decode or speculative row, else "prefill"; see `sparse_mla_fwd`.
        """
        q_c = self.q_a_layernorm(self.q_a_proj(hidden))
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
        q = self.write_and_finish_query(q_nope, q_pe, kv_c, k_pe, step)

        token_indices = self.indexer(hidden, q_c, step)
        indices = ops.convert_req_index_to_global_index(
            step.req_id, step.block_table, token_indices, self.cache_spec.block_size
        )
        latent, _ = ops.sparse_mla_fwd(
            q,
            self.kv_cache,
            indices,
            self.softmax_scale,
            self.kv_lora_rank,
            q_scale=self.q_scale,
            kv_scale=self.kv_scale,
            phase=phase,
        )
        values = torch.bmm(latent.to(hidden.dtype).transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(values.flatten(1)), token_indices

    def write_and_finish_query(
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

    def forward(self, hidden_states: Tensor, step_inputs: StepInputs, phase: str = "prefill") -> tuple[Tensor, Tensor]:
        """hidden_states [..., hidden] with T rows in all → the same shape, and token indices [T, topk]."""
        out, token_indices = self.attend(hidden_states.flatten(0, -2), step_inputs, phase)
        return out.view(hidden_states.shape), token_indices
