"""Kernels may be launched before the one ahead of them has ended; they must still see all that it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla_ops import formats, ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the order of kernels on a stream needs a GPU")

TOKENS, HEADS, LATENT, ROPE, STEPS, SLOTS = 4, 16, 512, 64, 12, 4096


class Decode:
    """Steps of decoding that depend on one another: each attends to the rows that it and the ones before it wrote.

    The inputs of a step are copied into buffers that all steps share, so that a step which starts too early reads the
    inputs of the one before, and one which reads too late those of the one after.
    """

    def __init__(self, cache_dtype: torch.dtype | str) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16)

        self.inputs = [
            {
                "q_nope": normal(TOKENS, HEADS, LATENT),
                "q_pe": normal(TOKENS, HEADS, ROPE),
                "kv_c": normal(TOKENS, LATENT),
                "k_pe": normal(TOKENS, ROPE),
                "positions": torch.arange(TOKENS, device="cuda") + step,
                "slot_mapping": torch.arange(TOKENS, device="cuda") * STEPS + step,
            }
            for step in range(STEPS)
        ]
        self.buffers = {name: torch.zeros_like(value) for name, value in self.inputs[0].items()}
        angles = torch.rand(SLOTS, ROPE // 2, generator=generator, device="cuda")
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.cache = formats.empty_kv_cache(SLOTS // 64, 64, LATENT, ROPE, cache_dtype, torch.device("cuda"))
        self.indices = torch.arange(TOKENS * STEPS, device="cuda", dtype=torch.int32).expand(TOKENS, -1).contiguous()

    def fill(self, step: int) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(self.inputs[step][name])

    def write(self) -> Tensor:
        return ops.fused_qk_rope_concat_and_cache_mla(
            **self.buffers, cos_sin_cache=self.table, kv_cache=self.cache, is_neox=False
        )

    def attend(self, q: Tensor) -> Tensor:
        return ops.sparse_mla_fwd(q, self.cache, self.indices, 0.07, LATENT, phase="decode")[0]

    def all_steps(self, between: Callable[[], Any] = lambda: None) -> list[Tensor]:
        self.cache.view(torch.uint8).zero_()
        outputs = []
        for step in range(STEPS):
            self.fill(step)
            outputs.append(self.attend(self.write()))
            between()
        return outputs

    def expected(self) -> list[Tensor]:
        """Each step has ended before the next one begins."""
        return self.all_steps(between=torch.cuda.synchronize)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, wanted in zip(actual, expected, strict=True):
        assert torch.equal(one, wanted)


CACHES = [torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla"]


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
def test_steps_see_what_the_ones_before_wrote(cache_dtype: torch.dtype | str):
    decode = Decode(cache_dtype)
    expected = decode.expected()
    for _ in range(5):
        assert_same(decode.all_steps(), expected)


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
def test_captured_steps_see_what_the_ones_before_wrote(cache_dtype: torch.dtype | str):
    decode = Decode(cache_dtype)
    expected = decode.expected()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = decode.all_steps()
    for _ in range(5):
        graph.replay()
        assert_same(outputs, expected)


def test_an_operator_may_be_captured_where_streams_fork_and_join():
    """Its kernel comes first on a stream that waits for an event, and another stream waits for it."""
    decode = Decode(torch.bfloat16)
    expected = decode.expected()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    outputs = []
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        decode.cache.zero_()
        for step in range(STEPS):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                decode.fill(step)
            main.wait_stream(side)
            q = decode.write()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                outputs.append(decode.attend(q))
            main.wait_stream(side)
    for _ in range(5):
        graph.replay()
        assert_same(outputs, expected)
