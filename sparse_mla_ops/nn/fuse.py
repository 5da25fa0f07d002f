"""Replace the attention of a Hugging Face model by `FusedSparseMLA`, and put it back."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sparse_mla_ops import registry
from sparse_mla_ops.nn.families import FAMILIES
from sparse_mla_ops.nn.mla import CacheSpec, FusedSparseMLA
from sparse_mla_ops.nn.step import StepInputs

STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Rope types whose table does not depend on the sequence at hand."""


class UnsupportedModel(ValueError):
    """`fuse_model` was given a model that it cannot fuse. The model is unchanged."""


class FusedAttention(FusedSparseMLA):
    """`FusedSparseMLA` with the calling convention of a Hugging Face attention module.

    `step_inputs` and `phase` reach it as extra keyword arguments of the model's forward. Masks, position embeddings and
    caches of the model are not used: the step inputs say all that they say.
    """

    _original: tuple[nn.Module]  # in a tuple, so that it is no submodule: its parameters are ours already

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, step_inputs: StepInputs | None = None, phase: str = "prefill", **_: Any
    ) -> tuple[Tensor, None]:
        if step_inputs is None:
            raise ValueError(
                "step_inputs: a fused model reads paged caches and needs the step's inputs, got none; call "
                "sparse_mla_ops.nn.generate or step_logits, or pass step_inputs=PagedCache.step(...) to the model"
            )
        return super().forward(hidden_states, step_inputs, phase)[0], None


@dataclass(frozen=True)
class FusionReport:
    """What `fuse_model` did.

    fused: names of the layers that were replaced. left_alone: names of attention layers that were not, and why.
    write_path: "fused", or "split" with the reason. cache: the caches in words. backends: the backend that each
    operator of a layer ran on, in one trial step of a padding row.
    """

    fused: tuple[str, ...]
    left_alone: dict[str, str]
    write_path: str
    cache: str
    backends: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} layers fused: {', '.join(self.fused)}"]
        lines += [f"left alone: {name}: {why}" for name, why in self.left_alone.items()]
        lines += [f"cache write: {self.write_path}", f"cache: {self.cache}", "backends:"]
        return "\n".join([*lines, *(f"  {op}: {backend}" for op, backend in self.backends.items())])


def fuse_model(
    model: nn.Module,
    *,
    num_blocks: int,
    max_len: int,
    block_size: int = 64,
    kv_dtype: torch.dtype | str | None = None,
    index_dtype: torch.dtype | None = None,
    kv_scale: float = 1.0,
    q_dtype: torch.dtype | None = None,
    q_scale: float = 1.0,
    fused: bool = True,
) -> FusionReport:
    """Replace every MLA layer of a DeepSeek-V3.2 model of transformers by one on paged caches, in place.

    Parameters stay where they are and keep their names. Norm epsilons, scaling and the rope table are the model's own.
    Move and cast the model before, compile it after.

    Args:
        model: a `DeepseekV32ForCausalLM`.
        num_blocks, block_size: NB and BS of each layer's caches; NB·BS tokens in all.
        max_len: most tokens of one sequence, at most the model's max_position_embeddings.
        kv_dtype: of the KV cache: None for the model's dtype, fp32, bf16, fp16, an fp8 dtype, or "fp8_ds_mla" for
            656-byte rows (kv_lora_rank 512).
        index_dtype: of the indexer cache: None for the model's dtype, fp32, bf16, fp16 or an fp8 dtype.
        kv_scale: scale of a per-tensor fp8 KV cache, for kv_c and k_pe alike.
        q_dtype, q_scale: see `FusedSparseMLA`.
        fused: False to rotate, join and write in three steps.

    Returns:
        A report; print it.

    Raises:
        UnsupportedModel: no family matches, the model is fused already, or its rope table depends on the sequence.
        ValueError: an argument that the caches cannot have. BackendUnavailable: an operator has no backend here.
        The model is unchanged after any of them.
    """
    family = _family(model)
    attentions = {name: module for name, module in model.named_modules() if type(module).__name__ == family.ATTENTION}
    first = next(iter(attentions.values()))
    weight = first.kv_b_proj.weight
    cache = CacheSpec(
        num_blocks=num_blocks,
        block_size=block_size,
        max_len=max_len,
        kv_dtype=kv_dtype or weight.dtype,
        index_dtype=index_dtype or weight.dtype,
        kv_scale=kv_scale,
    )
    cos_sin_cache = _rope_table(model, max_len, weight.device)
    replacements: dict[str, FusedAttention] = {}
    for name, attention in attentions.items():
        replacement = FusedAttention(
            family.mla_spec(attention), cache, cos_sin_cache, q_dtype=q_dtype, q_scale=q_scale, fused=fused
        )
        replacement._original = (attention,)
        replacements[name] = replacement.train(attention.training)
    backends = _try_padding_row(next(iter(replacements.values())))
    for name, replacement in replacements.items():
        _replace(model, name, replacement)
    return FusionReport(
        fused=tuple(replacements),
        left_alone={},
        write_path="fused" if fused else "split, because fused=False was passed",
        cache=_describe(next(iter(replacements.values()))),
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


def _family(model: Any) -> ModuleType:
    if fused_layers(model):
        raise UnsupportedModel("fuse_model: this model is fused already; call unfuse_model first to change its caches")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for family in FAMILIES:
        if model_type == family.MODEL_TYPE:
            if any(type(module).__name__ == family.ATTENTION for module in model.modules()):
                return family
            raise UnsupportedModel(
                f"fuse_model: expected {family.ATTENTION} layers in this {model_type} model, found none"
            )
    known = ", ".join(family.MODEL_TYPE for family in FAMILIES)
    raise UnsupportedModel(
        f"fuse_model: expected a transformers model of type {known}, got {type(model).__name__} of type "
        f"{model_type!r}; another family needs a module in sparse_mla_ops/nn/families"
    )


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
            f"fuse_model: expected a rope type of {', '.join(STATIC_ROPE_TYPES)}, got {rotary.rope_type!r}, "
            "whose table depends on the sequence"
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
    hidden_size = layer.q_a_proj.weight.shape[1]
    with registry.record_choices() as choices:
        layer(torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device), step_inputs=step)
    return choices


def _describe(layer: FusedAttention) -> str:
    kv, index, spec = layer.kv_cache, layer.indexer.index_cache, layer.cache_spec
    bytes_per_token = kv.shape[2] * kv.element_size() + index.shape[2] * index.element_size()
    kv_dtype, index_dtype = (str(dtype).removeprefix("torch.") for dtype in (spec.kv_dtype, spec.index_dtype))
    return (
        f"{spec.num_blocks} blocks of {spec.block_size} tokens, KV {kv_dtype}, indexer {index_dtype}, "
        f"{bytes_per_token} bytes per token and layer"
    )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
