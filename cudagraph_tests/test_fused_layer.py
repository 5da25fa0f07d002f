"""A fused model whose decode step is captured: by `mode="reduce-overhead"` without a skipped region, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_mla_ops import use_backend
from sparse_mla_ops.nn import fuse_model, generate, paged_cache, step_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graph capture needs a GPU")

FAMILIES = ["deepseek_v32", "glm_moe_dsa"]


@pytest.fixture(autouse=True)
def named_backend() -> Any:
    """On a GPU the reference, which fills what triton does not have yet, runs only when it is named."""
    with use_backend("triton", "reference"):
        yield


@pytest.fixture
def capturable_model(tiny_model: Callable[..., Any]) -> Callable[..., Any]:
    def make(family: str) -> Any:
        model = tiny_model(family).cuda()
        # In fp32 the default, "grouped_mm", reads the expert counts on the host.
        model.set_experts_implementation("batched_mm")
        return model

    return make


def decode_steps(model: Any, fn: Callable[..., torch.Tensor], steps: int) -> list[torch.Tensor]:
    """Prefill three sequences, then decode; logits of each decode step."""
    cache = paged_cache(model, max_requests=3)
    requests = [cache.add() for _ in range(3)]
    prompts = torch.arange(90, device="cuda").view(3, 30)
    step = cache.step(dict.fromkeys(requests, 30))
    step_logits(model, prompts.flatten(), step, torch.tensor([29, 59, 89], device="cuda"), "prefill")
    logits = []
    for number in range(steps):
        step = cache.step(dict.fromkeys(requests, 1))
        tokens = torch.tensor([3, 50, 7], device="cuda") + number
        logits.append(fn(model, tokens, step, torch.arange(3, device="cuda"), "decode").clone())
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_reduce_overhead_skips_no_region(capturable_model: Callable[..., Any], family: str):
    model = capturable_model(family)
    fuse_model(model, num_blocks=32, block_size=8, max_len=64)
    expected = decode_steps(model, step_logits, 6)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step_logits, mode="reduce-overhead", fullgraph=True)
    actual = decode_steps(model, compiled, 6)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None
    assert manager.new_graph_id().id > 0, "no region was recorded"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_captured_decode_step_replays_on_changed_step_inputs(capturable_model: Callable[..., Any], family: str):
    model = capturable_model(family)
    fuse_model(model, num_blocks=32, block_size=8, max_len=64, kv_dtype=torch.float8_e4m3fn, kv_scale=0.05)
    expected = decode_steps(model, step_logits, 5)
    static: dict[str, Any] = {}

    def replayed(model: Any, tokens: torch.Tensor, step: Any, rows: torch.Tensor, phase: str) -> torch.Tensor:
        if not static:
            static["inputs"] = (tokens.clone(), type(step)(*(tensor.clone() for tensor in step)), rows.clone())
            step_logits(model, *static["inputs"], phase)  # cuBLAS sets itself up outside a capture
            static["graph"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(static["graph"]):
                static["logits"] = step_logits(model, *static["inputs"], phase)
        held_tokens, held_step, held_rows = static["inputs"]
        held_tokens.copy_(tokens)
        held_rows.copy_(rows)
        for held, tensor in zip(held_step, step):
            held.copy_(tensor)
        static["graph"].replay()
        return static["logits"]

    torch.testing.assert_close(decode_steps(model, replayed, 5), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_the_gpu_match_transformers(tiny_model: Callable[..., Any], family: str):
    model = tiny_model(family).cuda()
    prompt = list(range(40))
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt], device="cuda"),
            attention_mask=torch.ones(1, 40, dtype=torch.long, device="cuda"),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 40:].tolist()
    fuse_model(model, num_blocks=32, block_size=8, max_len=64)
    assert generate(model, [prompt], 16) == [tokens]
