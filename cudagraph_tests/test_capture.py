"""Every operator in a captured CUDA or HIP graph: replay on changed inputs equals eager, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla_ops import registry, testing
from sparse_mla_ops.testing import CASES, OpCase

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graph capture needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def cublas_is_set_up() -> None:
    """A process's first matrix product creates a handle, which no capture allows; PyTorch's, not ours."""
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    torch.cuda.synchronize()


BACKENDS = tuple(backend.name for backend in registry.BACKENDS)


def write_over(arguments: dict[str, Any], values: dict[str, Any]) -> None:
    """Change `arguments` in place to `values`, as a server changes the inputs of its graph between steps."""
    for name, target in arguments.items():
        if isinstance(target, Tensor):
            target.copy_(values[name])


def capture_or_skip(case: OpCase, backend: str, arguments: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    explanation = registry.explain(case.op, **arguments, backend=backend)
    if explanation.backend is None:
        pytest.skip(explanation.reasons[backend])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.function(**arguments, backend=backend)
    return graph, testing.tensors_of(outputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_on_changed_inputs_equals_eager(case: OpCase, tokens: int, backend: str):
    """Captured without a warm-up; other work allocates before each replay, so that a stale pointer shows."""
    arguments = case.arguments(tokens=tokens, device="cuda")
    graph, outputs = capture_or_skip(case, backend, arguments)
    for seed in (1, 2):
        changed = case.arguments(tokens=tokens, device="cuda", seed=seed)
        expected = testing.outcome(lambda **kwargs: case.function(**kwargs, backend=backend), changed)
        write_over(arguments, case.arguments(tokens=tokens, device="cuda", seed=seed))
        for output in outputs:
            output.view(torch.uint8).fill_(0xAB)
        garbage = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(4)]
        graph.replay()
        del garbage
        actual = testing.outcome(lambda **_: tuple(outputs), arguments)
        testing.assert_same_bits(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rows_capture_as_nothing(case: OpCase, backend: str):
    arguments = case.arguments(tokens=0, device="cuda")
    before = testing.copy_arguments(arguments)
    graph, outputs = capture_or_skip(case, backend, arguments)
    graph.replay()
    assert all(output.numel() == 0 for output in outputs)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    testing.assert_same_bits(tensors, {name: before[name] for name in tensors})
