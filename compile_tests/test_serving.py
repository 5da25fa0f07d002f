"""What a server does with a fused model: chunks, mixed batches, speculation, forks, reuse of blocks.

The oracle is always the same: the whole sequence computed anew, by transformers or in one prefill step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_mla_ops.nn import CacheFull, PagedCache, StepInputs, fuse_model, fused_layers, generate, paged_cache
from sparse_mla_ops.nn import step_logits as step_logits_with_grad

ModelMaker = Callable[..., Any]
FAMILIES = ["deepseek_v32", "glm_moe_dsa"]

step_logits = torch.no_grad()(step_logits_with_grad)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model: Any, cache: PagedCache, rows: dict[int, list[int]], phase: str = "prefill") -> dict[int, Tensor]:
    """One step that appends `rows` (request → tokens); logits of each request's rows."""
    step = cache.step({request: len(tokens) for request, tokens in rows.items()})
    tokens = torch.tensor([token for tokens in rows.values() for token in tokens])
    logits = step_logits(model, tokens, step, torch.arange(len(tokens)), phase)
    return dict(zip(rows, logits.split([len(tokens) for tokens in rows.values()])))


def cached_rows(model: Any, cache: PagedCache, request: int) -> list[Tensor]:
    """What each layer's caches hold for the tokens of `request`, in order."""
    sequence = cache._sequences[request]
    slots = [
        sequence.blocks[i // cache.block_size] * cache.block_size + i % cache.block_size for i in range(sequence.length)
    ]
    buffers = [layer.kv_cache for layer in fused_layers(model).values()]
    buffers += [layer.indexer.index_cache for layer in fused_layers(model).values() if layer.indexer is not None]
    return [buffer.flatten(0, 1)[slots] for buffer in buffers]


class Oracle:
    """A second copy of the model, on which every sequence is computed anew in one step."""

    def __init__(self, tiny_model: ModelMaker, family: str, max_len: int = 128) -> None:
        self.model = tiny_model(family)
        fuse_model(self.model, num_blocks=max_len, block_size=1, max_len=max_len)

    def compute(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits of every token, and the rows that the caches then hold."""
        cache = paged_cache(self.model, max_requests=1)
        request = cache.add()
        logits = run(self.model, cache, {request: tokens})[request]
        return logits, cached_rows(self.model, cache, request)


# ----------------------------------------------------------------------------------------------------------------------
# Chunked prefill and mixed batches


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_any_chunk_size_gives_the_same_tokens(tiny_model: ModelMaker, family: str, block_size: int):
    model = tiny_model(family)
    fuse_model(model, num_blocks=-(-512 // block_size), block_size=block_size, max_len=128)
    prompts = [random_tokens(length, seed=length) for length in (50, 7, 90, 1)]
    expected = generate(model, prompts, 10)
    for max_step_tokens in (1, 3, 16, 49, 1000):
        assert generate(model, prompts, 10, max_step_tokens=max_step_tokens) == expected, max_step_tokens


def test_chunks_bound_the_rows_of_a_step_and_decode_rows_never_wait(
    tiny_model: ModelMaker, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_model()
    fuse_model(model, num_blocks=32, block_size=8, max_len=128)
    steps: list[tuple[StepInputs, str]] = []

    def record(model: Any, input_ids: Tensor, step: StepInputs, logit_rows: Tensor, phase: str) -> Tensor:
        steps.append((step, phase))
        return step_logits(model, input_ids, step, logit_rows, phase)

    monkeypatch.setattr("sparse_mla_ops.nn.generation.step_logits", record)
    generate(model, [random_tokens(3), random_tokens(40)], 8, max_step_tokens=8)
    assert [len(step.positions) for step, _ in steps[:6]] == [8] * 6
    assert [(step.req_id == 0).sum().item() for step, _ in steps] == [3, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0][
        : len(steps)
    ]
    assert [phase for _, phase in steps] == ["prefill"] * 6 + ["decode"] * (len(steps) - 6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decode_first", [True, False], ids=["decode-first", "prefill-first"])
def test_decode_and_prefill_rows_share_a_step(tiny_model: ModelMaker, family: str, decode_first: bool):
    model = tiny_model(family)
    fuse_model(model, num_blocks=32, block_size=4, max_len=64)
    oracle = Oracle(tiny_model, family)
    old, new = random_tokens(30, 1), random_tokens(25, 2)
    cache = paged_cache(model, max_requests=2)
    decoding, prefilling = cache.add(), cache.add()
    run(model, cache, {decoding: old[:-1]})
    rows = {decoding: old[-1:], prefilling: new}
    if not decode_first:
        rows = dict(reversed(rows.items()))
    logits = run(model, cache, rows)
    torch.testing.assert_close(logits[decoding], oracle.compute(old)[0][-1:], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[prefilling], oracle.compute(new)[0], rtol=0, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# Speculative rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("accepted", ["all", "none", "some"])
def test_speculation_gives_the_tokens_of_plain_decoding(tiny_model: ModelMaker, family: str, rows: int, accepted: str):
    """Draft tokens are right up to a point of our choice; the rejected rest is rolled back with `truncate`."""
    model = tiny_model(family)
    fuse_model(model, num_blocks=64, block_size=4, max_len=96)
    prompts, total = [random_tokens(21, 3), random_tokens(34, 4)], 17
    plain = generate(model, prompts, total)

    cache = paged_cache(model, max_requests=2)
    requests = [cache.add() for _ in prompts]
    logits = run(model, cache, dict(zip(requests, prompts)))
    produced = [[logits[request][-1].argmax().item()] for request in requests]
    right = {"all": rows - 1, "none": 0, "some": (rows - 1) // 2}[accepted]
    while min(map(len, produced)) < total - rows:
        drafts = {}
        for index, request in enumerate(requests):
            done = len(produced[index])
            guess = plain[index][done : done + rows - 1]
            guess = guess[:right] + [(token + 1) % 128 for token in guess[right:]]
            drafts[request] = produced[index][-1:] + guess
        logits = run(model, cache, drafts, phase="decode")
        for index, request in enumerate(requests):
            verified = logits[request].argmax(-1).tolist()
            agreed = 0
            while agreed < rows - 1 and verified[agreed] == drafts[request][agreed + 1]:
                agreed += 1
            assert agreed == right
            produced[index] += verified[: agreed + 1]
            cache.truncate(request, cache.length(request) - (rows - 1 - agreed))
    for index, tokens in enumerate(produced):
        assert tokens == plain[index][: len(tokens)]


def test_speculative_row_ends_leave_out_the_rows_behind():
    cache = PagedCache(num_blocks=8, block_size=4, max_len=16, max_requests=2)
    first, second = cache.add(), cache.add()
    cache.step({first: 3, second: 6})
    step = cache.step({first: 2, second: 4})
    assert step.row_ends.tolist() == [4, 5, 7, 8, 9, 10]
    assert step.positions.tolist() == [3, 4, 6, 7, 8, 9]


# ----------------------------------------------------------------------------------------------------------------------
# Blocks that come and go


def test_positions_are_not_slots(tiny_model: ModelMaker):
    """Blocks handed out in any order: the tokens stay the same, and the slots are not the positions."""
    model = tiny_model()
    fuse_model(model, num_blocks=12, block_size=8, max_len=64)
    tokens = random_tokens(45, 5)
    cache = paged_cache(model, max_requests=4)
    others = [cache.add() for _ in range(3)]
    run(model, cache, {request: random_tokens(24, request) for request in others})
    for request in (others[1], others[0], others[2]):
        cache.free(request)
    request = cache.add()
    step = cache.step({request: len(tokens)})
    assert step.block_table[step.req_id[0]][:6].tolist() != sorted(step.block_table[step.req_id[0]][:6].tolist())
    assert step.slot_mapping.tolist() != step.positions.tolist()
    logits = step_logits(model, torch.tensor(tokens), step, torch.arange(len(tokens)), "prefill")
    torch.testing.assert_close(logits, Oracle(tiny_model, "deepseek_v32").compute(tokens)[0], rtol=0, atol=1e-4)


def test_fork_shares_blocks_until_one_sequence_writes(tiny_model: ModelMaker):
    model = tiny_model()
    fuse_model(model, num_blocks=16, block_size=8, max_len=64)
    oracle = Oracle(tiny_model, "deepseek_v32")
    cache = paged_cache(model, max_requests=3)
    prefix = random_tokens(21, 6)
    parent = cache.add()
    run(model, cache, {parent: prefix})
    held = 16 - cache.free_blocks
    children = [cache.fork(parent), cache.fork(parent)]
    assert 16 - cache.free_blocks == held  # nothing is copied yet
    endings = {parent: [1, 2, 3, 4], children[0]: [5, 6], children[1]: [7]}
    logits = run(model, cache, endings)
    # Three sequences write into the shared third block: two take a copy and one keeps it. The parent takes a fourth.
    assert 16 - cache.free_blocks == held + 2 + 1
    for request, ending in endings.items():
        expected, rows = oracle.compute(prefix + ending)
        torch.testing.assert_close(logits[request], expected[len(prefix) :], rtol=0, atol=1e-4)
        torch.testing.assert_close(cached_rows(model, cache, request), rows, rtol=0, atol=1e-4)
    for request in (parent, *children):
        cache.free(request)
    assert cache.free_blocks == 16


def test_truncate_into_a_shared_block_does_not_write_over_the_other_sequence(tiny_model: ModelMaker):
    model = tiny_model()
    fuse_model(model, num_blocks=16, block_size=8, max_len=64)
    oracle = Oracle(tiny_model, "deepseek_v32")
    cache = paged_cache(model, max_requests=2)
    prefix = random_tokens(16, 7)  # two full blocks
    parent = cache.add()
    run(model, cache, {parent: prefix})
    child = cache.fork(parent)
    cache.truncate(child, 11)
    logits = run(model, cache, {child: [9, 9]})[child]
    torch.testing.assert_close(logits, oracle.compute([*prefix[:11], 9, 9])[0][11:], rtol=0, atol=1e-4)
    torch.testing.assert_close(cached_rows(model, cache, parent), oracle.compute(prefix)[1], rtol=0, atol=1e-4)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "step", "step", "step", "fork", "free", "truncate"]),
        st.integers(0, 7),
        st.integers(1, 9),
    ),
    min_size=6,
    max_size=14,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_schedules_match_recomputation(tiny_model: ModelMaker, family: str, actions: list[tuple[str, int, int]]):
    """Random schedules of add, step, fork, free and truncate: same logits, same tokens, same cache contents."""
    model, oracle = tiny_model(family), Oracle(tiny_model, family, max_len=32)
    fuse_model(model, num_blocks=14, block_size=4, max_len=32)
    cache = paged_cache(model, max_requests=4)
    live: dict[int, list[int]] = {}
    for number, (action, which, count) in enumerate([("add", 0, 1), *actions]):
        request = list(live)[which % len(live)] if live else None
        free_blocks = cache.free_blocks
        try:
            if action == "add":
                live[cache.add()] = []
            elif request is None:
                continue
            elif action == "fork":
                live[cache.fork(request)] = list(live[request])
            elif action == "free":
                cache.free(request)
                del live[request]
            elif action == "truncate":
                length = max(0, len(live[request]) - count)
                cache.truncate(request, length)
                live[request] = live[request][:length]
            else:  # as many of the live requests as `which` says, so that batches change size
                stepping = {
                    request: random_tokens(1 + (count + place) % 6, seed=100 * number + place)
                    for place, request in enumerate(list(live)[: 1 + which % len(live)])
                }
                logits = run(model, cache, stepping)
                for request, tokens in stepping.items():
                    live[request] += tokens
                    expected = oracle.compute(live[request])[0][-len(tokens) :]
                    torch.testing.assert_close(logits[request], expected, rtol=0, atol=1e-4)
                    assert logits[request].argmax(-1).tolist() == expected.argmax(-1).tolist()
        except (CacheFull, ValueError):
            assert cache.free_blocks == free_blocks
        assert {request: cache.length(request) for request in cache.requests} == {
            request: len(tokens) for request, tokens in live.items()
        }
    for request, tokens in live.items():
        if tokens:
            torch.testing.assert_close(cached_rows(model, cache, request), oracle.compute(tokens)[1], rtol=0, atol=1e-4)
        cache.free(request)
    assert cache.free_blocks == 14


# ----------------------------------------------------------------------------------------------------------------------
# Compiled


def test_batches_of_1_to_64_stay_within_the_compile_budget(tiny_model: ModelMaker):
    """Size 1 specialises in torch.compile, so a decode step compiles twice: for one row, and for any other number."""
    model = tiny_model()
    fuse_model(model, num_blocks=128, block_size=4, max_len=64)
    cache = paged_cache(model, max_requests=64)
    requests = [cache.add() for _ in range(64)]
    run(model, cache, {request: [request] for request in requests})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step_logits_with_grad, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for batch in (5, 6, 7, 1, 2, 9, 33, 64):
            step = cache.step(dict.fromkeys(requests[:batch], 1))
            tokens = torch.arange(batch)
            logits = compiled(model, tokens, step, torch.arange(batch), "decode")
            torch.testing.assert_close(logits, step_logits(model, tokens, step, torch.arange(batch), "decode"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
