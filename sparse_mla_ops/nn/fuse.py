"""Replace the attention of a Hugging Face model by `FusedSparseMLA`, and put it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparse_mla_ops import formats, registry
from sparse_mla_ops.nn.families import FAMILIES, Family
from sparse_mla_ops.nn.mla import CacheSpec, FusedSparseMLA
from sparse_mla_ops.nn.step import StepInputs

STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Rope types whose table does not depend on the sequence at hand."""


class UnsupportedModel(ValueError):
    """`fuse_model` was given a model that it cannot fuse. The model is unchanged."""


class FusedAttention(FusedSparseMLA):
    """`FusedSparseMLA` with the calling convention of an attention module of transformers.

    `step_inputs` and `phase` reach it as extra keyword arguments of the model's forward. Masks, position embeddings and
    caches of the model are not used: the step inputs say all that they say.
    """

    _original: tuple[nn.Module]  # in a tuple, so that it is no submodule: its parameters are ours already
    _passes_topk: bool

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        step_inputs: StepInputs | None = None,
        phase: str = "prefill",
        prev_topk_indices: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None] | tuple[Tensor, None, Tensor]:
        if step_inputs is None:
            raise ValueError(
                "step_inputs: a fused model reads paged caches and needs the step's inputs, got none; call "
                "sparse_mla_ops.nn.generate or step_logits, or pass step_inputs=PagedCache.step(...) to the model"
            )
        out, token_indices = super().forward(hidden_states, step_inputs, phase, prev_topk_indices)
        return (out, None, token_indices) if self._passes_topk else (out, None)


@dataclass(frozen=True)
class FusionReport:
    """What `fuse_model` did.

    fused: names of the layers that were replaced. left_alone: names of other attention layers, and why.
    write_path: "fused", or "split" with the reason. cache: the caches in words. accuracy: what to expect of them.
    backends: the backend that each operator of a layer ran on, in one trial step of a padding row.
    """

    fused: tuple[str, ...]
    left_alone: dict[str, str]
    write_path: str
    cache: str
    accuracy: str
    backends: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} layers fused: {', '.join(self.fused)}"]
        lines += [f"left alone: {name}: {why}" for name, why in self.left_alone.items()]
        lines += [f"cache write: {self.write_path}", f"cache: {self.cache}", f"accuracy: {self.accuracy}", "backends:"]
        return "\n".join([*lines, *(f"  {op}: {backend}" for op, backend in self.backends.items())])


def fuse_model(
    model: nn.Module,
    *,
    num_blocks: int,
    max_len: int,
    block_size: int = 64,
    kv_dtype: torch.dtype | str | None = None,
    index_dtype: torch.dtype | None = None,
    kv_scale: float | Mapping[str, float] = 1.0,
    q_dtype: torch.dtype | None = None,
    q_scale: float = 1.0,
    fused: bool = True,
) -> FusionReport:
    """Replace every MLA layer of a transformers model by one on paged caches, in place.

    Parameters stay where they are and keep their names. Norm epsilons, scaling, top-k sharing and the rope table are
    the model's own. Move and cast the model before, compile it after.

    Args:
        model: a `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM`.
        num_blocks, block_size: NB and BS of each layer's caches; NB·BS tokens in all.
        max_len: most tokens of one sequence, at most the model's max_position_embeddings.
        kv_dtype: of the KV cache: None for the model's dtype, fp32, bf16, fp16, an fp8 dtype, or "fp8_ds_mla" for
            656-byte rows (kv_lora_rank 512).
        index_dtype: of the indexer cache: None for the model's dtype, fp32, bf16, fp16 or an fp8 dtype.
        kv_scale: scale of a per-tensor fp8 KV cache, for kv_c and k_pe alike: one value for all layers, or one per
            layer by name, as `calibrate` returns them.
        q_dtype, q_scale: see `FusedSparseMLA`.
        fused: False to rotate, join and write in three steps.

    Returns:
        A report; print it.

    Raises:
        UnsupportedModel: no family matches, the model is fused already, a layer lacks parts, or its rope table depends
            on the sequence.
        ValueError: an argument that the caches cannot have. BackendUnavailable: an operator has no backend here.
        The model is unchanged after any of them.
    """
    family, attentions = find_attention(model)
    specs = {name: _spec(family, name, attention) for name, attention in attentions.items()}
    weight = next(iter(specs.values())).kv_b_proj.weight
    cos_sin_cache = _rope_table(model, max_len, weight.device)
    replacements: dict[str, FusedAttention] = {}
    for name, spec in specs.items():
        cache = CacheSpec(
            num_blocks=num_blocks,
            block_size=block_size,
            max_len=max_len,
            kv_dtype=kv_dtype or weight.dtype,
            index_dtype=index_dtype or weight.dtype,
            kv_scale=_scale_of(kv_scale, name),
        )
        replacement = FusedAttention(spec, cache, cos_sin_cache, q_dtype=q_dtype, q_scale=q_scale, fused=fused)
        replacement._original = (attentions[name],)
        replacement._passes_topk = family.passes_topk
        replacements[name] = replacement.train(attentions[name].training)
    first = next(iter(replacements.values()))
    backends = _try_padding_row(first)
    left_alone = {
        name: f"a {type(module).__name__}, not a {family.attention}"
        for name, module in model.named_modules()
        if name.endswith("self_attn") and name not in replacements
    }
    for name, replacement in replacements.items():
        _replace(model, name, replacement)
    return FusionReport(
        fused=tuple(replacements),
        left_alone=left_alone,
        write_path="fused" if fused else "split, because fused=False was passed",
        cache=_describe(first),
        accuracy=_expected_accuracy(first, weight.dtype),
        backends=backends,
    )


def unfuse_model(model: nn.Module) -> None:
    """Put the original attention modules back and drop the caches. Parameters are the same objects throughout."""
    fused = fused_layers(model)
    if not fused:
        raise UnsupportedModel("unfuse_model: this model has no fused layers; fuse_model makes them")
    for name, layer in fused.items():
        _replace(model, name, layer._original[0])


def fused_layers(model: nn.Module) -> dict[str, FusedAttention]:
    """The fused layers of a model by name, in order; empty if it is not fused."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FusedAttention)}


def find_attention(model: Any) -> tuple[Family, dict[str, nn.Module]]:
    """The family of a model that is not fused, and its MLA layers by name. Raises UnsupportedModel."""
    if fused_layers(model):
        raise UnsupportedModel("this model is fused already; call unfuse_model first")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    family = next((family for family in FAMILIES if family.model_type == model_type), None)
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise UnsupportedModel(
            f"expected a transformers model of type {known}, got {type(model).__name__} of type {model_type!r}; "
            "another family needs a file in sparse_mla_ops/nn/families, a layer of your own an MLASpec"
        )
    attentions = {name: module for name, module in model.named_modules() if type(module).__name__ == family.attention}
    if not attentions:
        raise UnsupportedModel(f"expected {family.attention} layers in a model of type {model_type}, found none")
    return family, attentions


def _spec(family: Family, name: str, attention: nn.Module) -> Any:
    try:
        spec = family.mla_spec(attention)
        spec.check()
    except (AttributeError, ValueError) as error:
        raise UnsupportedModel(f"{name}: this {family.attention} cannot be fused: {error}") from error
    return spec


def _scale_of(kv_scale: float | Mapping[str, float], name: str) -> float:
    if not isinstance(kv_scale, Mapping):
        return kv_scale
    if name not in kv_scale:
        raise ValueError(f"kv_scale: expected a scale for every layer, got none for {name}; calibrate gives them all")
    return kv_scale[name]


@torch.no_grad()
def _rope_table(model: Any, max_len: int, device: torch.device) -> Tensor:
    """[max_len, R] fp32 from the model's own rotary embedding: R/2 cosines, then R/2 sines."""
    config = model.config
    limit = config.max_position_embeddings
    if max_len > limit:
        raise ValueError(f"max_len: expected at most max_position_embeddings={limit} of the model, got {max_len}")
    rotary = model.model.rotary_emb
    if rotary.rope_type not in STATIC_ROPE_TYPES:
        raise UnsupportedModel(
            f"expected a rope type of {', '.join(STATIC_ROPE_TYPES)}, got {rotary.rope_type!r}, whose table depends on "
            "the sequence"
        )
    positions = torch.arange(max_len, device=device)[None]
    cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), position_ids=positions)
    half = config.qk_rope_head_dim // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous()


@torch.no_grad()
def _try_padding_row(layer: Any) -> dict[str, str]:
    """Run one padding row, which writes nothing, through the layer: what refuses to run does so now, by name."""
    weight = layer.kv_b_proj.weight
    blocks = -(-layer.cache_spec.max_len // layer.cache_spec.block_size)
    step = StepInputs(
        positions=torch.zeros(1, dtype=torch.int64),
        slot_mapping=torch.full((1,), -1, dtype=torch.int64),
        req_id=torch.zeros(1, dtype=torch.int32),
        row_ends=torch.zeros(1, dtype=torch.int32),
        block_table=torch.full((1, blocks), -1, dtype=torch.int32),
    )
    step = StepInputs(*(tensor.to(weight.device) for tensor in step))
    hidden_size = layer.kv_a_proj_with_mqa.weight.shape[1]
    with registry.record_choices() as choices:
        layer(torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device), step_inputs=step)
    return choices


def _describe(layer: Any) -> str:
    kv, index, spec = layer.kv_cache, layer.indexer.index_cache, layer.cache_spec
    bytes_per_token = kv.shape[2] * kv.element_size() + index.shape[2] * index.element_size()
    kv_dtype, index_dtype = (str(dtype).removeprefix("torch.") for dtype in (spec.kv_dtype, spec.index_dtype))
    return (
        f"{spec.num_blocks} blocks of {spec.block_size} tokens, KV {kv_dtype}, indexer {index_dtype}, "
        f"{bytes_per_token} bytes per token and layer"
    )


def _expected_accuracy(layer: FusedAttention, dtype: torch.dtype) -> str:
    """In words. e4m3 keeps 3 fraction bits: a stored value is off by at most 1/16, evenly spread 2.6 % (rms)."""
    kv_dtype = layer.cache_spec.kv_dtype
    if kv_dtype == "fp8_ds_mla":
        kv = "latents within 6.25 % of each value (2.6 % rms), scaled per 128; rope parts bf16"
    elif kv_dtype in formats.FP8_MAX:
        kv = (
            "latents and rope parts within 6.25 % of each value (2.6 % rms), as far as kv_scale covers the largest and "
            "does not flush the smallest; calibrate gives it"
        )
    else:
        kv = "latents and rope parts as the model computes them" if kv_dtype == dtype else f"rows rounded to {kv_dtype}"
    index = layer.cache_spec.index_dtype
    selection = (
        "fp8 scores may select other tokens near the cut" if index in formats.FP8_MAX else "selection unquantised"
    )
    return f"{kv}; {selection}"


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
