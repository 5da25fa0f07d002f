"""`MLASpec`, `calibrate` and what both refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparse_mla_ops import formats
from sparse_mla_ops.nn import (
    CacheSpec,
    FusedSparseMLA,
    IndexerSpec,
    MLASpec,
    StepInputs,
    UnsupportedModel,
    calibrate,
    fuse_model,
    fused_layers,
    paged_cache,
    step_logits,
)

ModelMaker = Callable[..., Any]
CACHE = CacheSpec(num_blocks=2, block_size=4, max_len=8, kv_dtype=torch.float32, index_dtype=torch.float32)
HEADS, NOPE, ROPE, VALUE, LATENT, HIDDEN = 2, 6, 4, 5, 8, 16


def linear(inputs: int, outputs: int, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **{"bias": False, **options})


def make_spec(**changes: Any) -> MLASpec:
    spec = MLASpec(
        q_b_proj=linear(HIDDEN, HEADS * (NOPE + ROPE)),
        kv_a_proj_with_mqa=linear(HIDDEN, LATENT + ROPE),
        kv_a_layernorm=nn.RMSNorm(LATENT),
        kv_b_proj=linear(LATENT, HEADS * (NOPE + VALUE)),
        o_proj=linear(HEADS * VALUE, HIDDEN),
        num_heads=HEADS,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        kv_lora_rank=LATENT,
        softmax_scale=0.3,
        is_neox=False,
    )
    return dataclasses.replace(spec, **changes)


def make_indexer(**changes: Any) -> IndexerSpec:
    indexer = IndexerSpec(
        wq_b=linear(HIDDEN, 16 * 8),
        wk=linear(HIDDEN, 8),
        k_norm=nn.LayerNorm(8),
        weights_proj=linear(HIDDEN, 16),
        num_heads=16,
        head_dim=8,
        topk=2,
        softmax_scale=1.0,
        is_neox=True,
    )
    return dataclasses.replace(indexer, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"kv_a_layernorm": None}, "got None for kv_a_layernorm", id="missing-norm"),
        pytest.param({"o_proj": None, "q_b_proj": None}, "got None for q_b_proj, o_proj", id="missing-projections"),
        pytest.param({"indexer": make_indexer(wk=None)}, "IndexerSpec: .* got None for wk", id="missing-index-key"),
        pytest.param({"indexer": make_indexer(head_dim=2)}, "at least R=4, .* got 2", id="index-head-below-rope"),
        pytest.param({"num_heads": 3}, r"\[H·\(P \+ V\), L\] = \(33, 8\) .* got \(22, 8\)", id="head-count"),
        pytest.param(
            {"kv_b_proj": linear(LATENT, HEADS * (NOPE + VALUE)).to(torch.float8_e4m3fn)},
            "got .* torch.float8_e4m3fn; .* dequantised before",
            id="quantised-weight",
        ),
        pytest.param({"kv_b_proj": nn.Identity()}, "kv_b_proj: .* got NoneType", id="no-weight"),
        pytest.param({"kv_b_proj": linear(LATENT, 22, bias=True)}, "expected no bias, got one", id="bias"),
        pytest.param({"attn_sink": torch.zeros(3)}, r"expected \[H\] = \(2,\) .* got \(3,\)", id="sink-heads"),
        pytest.param({"attn_sink": torch.zeros(2).half()}, "float32, got .* torch.float16", id="sink-dtype"),
    ],
)
def test_spec_that_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        FusedSparseMLA(make_spec(**changes), CACHE, torch.zeros(8, ROPE))


@pytest.mark.parametrize(("rows", "width"), [(7, ROPE), (8, 2), (8, 0)])
def test_rope_table_that_does_not_fit_is_refused(rows: int, width: int):
    with pytest.raises(ValueError, match=rf"P ≥ max_len=8 and R=4, got \({rows}, {width}\)"):
        FusedSparseMLA(make_spec(), CACHE, torch.zeros(rows, width))


def test_layer_without_indexer_asks_for_indices():
    layer = FusedSparseMLA(make_spec(), CACHE, torch.zeros(8, ROPE))
    row = torch.zeros(1, dtype=torch.int64)
    step = StepInputs(row, row, row, row + 1, torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="this layer has no indexer; pass the indices of the layer before"):
        layer(torch.zeros(1, HIDDEN), step)
    out, indices = layer(torch.zeros(1, HIDDEN), step, token_indices=torch.zeros(1, 1, dtype=torch.int32))
    assert out.shape == (1, HIDDEN)
    assert indices.tolist() == [[0]]


def test_parameter_sinks_stay_parameters():
    sink = nn.Parameter(torch.zeros(HEADS))
    layer = FusedSparseMLA(make_spec(attn_sink=sink), CACHE, torch.zeros(8, ROPE))
    assert dict(layer.named_parameters())["attn_sink"] is sink
    layer = FusedSparseMLA(make_spec(attn_sink=sink.detach()), CACHE, torch.zeros(8, ROPE))
    assert "attn_sink" in dict(layer.named_buffers())
    assert "attn_sink" not in layer.state_dict()


def test_fuse_names_the_layer_that_lacks_a_part(tiny_model: ModelMaker):
    model = tiny_model()
    del model.model.layers[1].self_attn.kv_a_layernorm
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.self_attn: .* no attribute 'kv_a_layernorm'"):
        fuse_model(model, num_blocks=4, max_len=64)
    assert not fused_layers(model)


# ----------------------------------------------------------------------------------------------------------------------
# calibrate


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(128, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def fused_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    cache = paged_cache(model, max_requests=1)
    step = cache.step({cache.add(): len(prompt)})
    return step_logits(model, torch.tensor(prompt), step, torch.arange(len(prompt)), "prefill")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("fp8_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_calibrated_scales_cover_latents_and_rope_parts(tiny_model: ModelMaker, family: str, fp8_dtype: torch.dtype):
    """The unquantised cache of the same prompt holds the values: the largest of a row's, rope part included, fits."""
    model, prompts = tiny_model(family), prompts_of(50, 20)
    # Rope parts far larger than latents: a scale from the latents alone would saturate them.
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[32:] *= 20
    scales = calibrate(model, prompts, fp8_dtype=fp8_dtype)
    fuse_model(model, num_blocks=8, block_size=16, max_len=64)
    largest = dict.fromkeys(scales, 0.0)
    for prompt in prompts:
        for layer in fused_layers(model).values():
            layer.kv_cache.zero_()
        fused_logits(model, prompt)
        for name, layer in fused_layers(model).items():
            largest[name] = max(largest[name], layer.kv_cache.abs().max().item())
    for name, scale in scales.items():
        limit = formats.FP8_MAX[fp8_dtype]
        assert largest[name] <= scale * limit * (1 + 1e-5)
        assert scale * limit <= largest[name] * 2**0.5 * (1 + 1e-5)  # and the bound on pairs is not a loose one


def test_margin_multiplies_the_scales(tiny_model: ModelMaker):
    model = tiny_model()
    plain, wide = calibrate(model, prompts_of(30)), calibrate(model, prompts_of(30), margin=2.0)
    assert wide == pytest.approx({name: 2 * scale for name, scale in plain.items()})


@pytest.mark.parametrize("index_topk", [64, 12], ids=["all-tokens", "selected-tokens"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_calibrated_fp8_cache_keeps_logits_close_to_fp32(tiny_model: ModelMaker, family: str, index_topk: int):
    """Each stored value is off by 2.6 % (rms) of itself, and so are the logits of most rows, about. Of most: where a
    small error sends a row to another expert, or to other tokens, its logits change by more."""
    model, (prompt,) = tiny_model(family, index_topk=index_topk), prompts_of(60)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    scales = calibrate(model, [prompt])
    errors = {}
    for name, kv_scale in (("calibrated", scales), ("far too small", 1e-4)):
        model = tiny_model(family, index_topk=index_topk)
        report = fuse_model(
            model, num_blocks=4, block_size=16, max_len=64, kv_dtype=torch.float8_e4m3fn, kv_scale=kv_scale
        )
        rows = (fused_logits(model, prompt) - expected).norm(dim=-1) / expected.norm(dim=-1)
        errors[name] = rows.median().item()
    assert "calibrate gives it" in report.accuracy
    assert errors["calibrated"] < 0.06
    assert errors["far too small"] > 0.2


def test_calibrate_leaves_no_hooks_behind(tiny_model: ModelMaker):
    model = tiny_model()
    calibrate(model, prompts_of(5))
    assert not any(module._forward_hooks for module in model.modules())


def test_calibrate_refuses_what_it_cannot_use(tiny_model: ModelMaker):
    model = tiny_model()
    with pytest.raises(ValueError, match="fp8_dtype: expected"):
        calibrate(model, prompts_of(5), fp8_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="prompts: expected one or more"):
        calibrate(model, [])
    with pytest.raises(ValueError, match=r"kv_scale: .* got none for model\.layers\.1\.self_attn"):
        fuse_model(model, num_blocks=4, max_len=64, kv_scale={"model.layers.0.self_attn": 0.1})
    fuse_model(model, num_blocks=4, max_len=64)
    with pytest.raises(UnsupportedModel, match="fused already"):
        calibrate(model, prompts_of(5))
