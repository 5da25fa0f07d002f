"""Scales of per-tensor fp8 KV caches, from what a model computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparse_mla_ops import formats
from sparse_mla_ops.nn.fuse import find_attention
from sparse_mla_ops.nn.generation import check_prompts


@torch.no_grad()
def calibrate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    margin: float = 1.0,
) -> dict[str, float]:
    """KV-cache scales of each layer of a model that is not fused yet: amax / 448 (240 for e4m3fnuz), times `margin`.

    One scale has to cover the whole row, so amax is taken over the normed latents *and* the rope parts. A rotation
    keeps the length of a pair of values, which bounds both of them at every position: that counts for k_pe.

    Args:
        model: as for `fuse_model`, which takes the result as `kv_scale`.
        prompts: token ids that are like those to come; each is run through the model once.
        fp8_dtype: encoding that the cache will have.
        margin: factor for values beyond the prompts'. Stores saturate; a scale too large only loses small values.

    Returns:
        Scale by layer name.
    """
    if fp8_dtype not in formats.FP8_MAX:
        raise ValueError(f"fp8_dtype: expected torch.float8_e4m3fn or torch.float8_e4m3fnuz, got {fp8_dtype}")
    check_prompts(prompts)
    family, attentions = find_attention(model)
    largest: dict[str, Tensor] = {}

    def observe(name: str, values: Tensor) -> None:
        amax = values.abs().amax().float()
        largest[name] = torch.maximum(largest[name], amax) if name in largest else amax

    hooks = []
    for name, attention in attentions.items():
        spec = family.mla_spec(attention)

        def observe_latent(_: nn.Module, __: Any, kv_c: Tensor, name: str = name) -> None:
            observe(name, kv_c)

        def observe_rope(
            _: nn.Module, __: Any, latent_and_rope: Tensor, name: str = name, rank: int = spec.kv_lora_rank
        ) -> None:
            k_pe = latent_and_rope[..., rank:].float()
            pairs = k_pe.unflatten(-1, (2, -1)).movedim(-2, -1) if family.is_neox else k_pe.unflatten(-1, (-1, 2))
            observe(name, pairs.norm(dim=-1))

        hooks.append(spec.kv_a_layernorm.register_forward_hook(observe_latent))
        hooks.append(spec.kv_a_proj_with_mqa.register_forward_hook(observe_rope))
    device = next(model.parameters()).device
    try:
        for prompt in prompts:
            model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    limit = formats.FP8_MAX[fp8_dtype]
    return {name: max(amax.item(), formats.AMAX_FLOOR) / limit * margin for name, amax in largest.items()}
