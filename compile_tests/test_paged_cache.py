"""Block allocation and step inputs, with no model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla_ops.nn import CacheFull, PagedCache


def make_cache(**overrides: int) -> PagedCache:
    return PagedCache(**{"num_blocks": 6, "block_size": 4, "max_len": 12, "max_requests": 3, **overrides})


def test_step_gives_one_row_per_new_token():
    cache = make_cache()
    first, second = cache.add(), cache.add()
    step = cache.step({first: 5, second: 2})
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert step.row_ends.tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert step.req_id.tolist() == [0] * 5 + [1] * 2
    assert step.block_table.tolist() == [[0, 1, -1], [2, -1, -1], [-1, -1, -1]]
    assert step.slot_mapping.tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert [step.positions.dtype, step.slot_mapping.dtype] == [torch.int64] * 2
    assert [step.req_id.dtype, step.row_ends.dtype, step.block_table.dtype] == [torch.int32] * 3


def test_step_continues_where_the_sequence_ended_and_fills_its_last_block():
    cache = make_cache()
    request = cache.add()
    cache.step({request: 3})
    step = cache.step({request: 2})
    assert step.positions.tolist() == [3, 4]
    assert step.slot_mapping.tolist() == [3, 4]
    assert cache.length(request) == 5


def test_step_inputs_of_an_earlier_step_do_not_change():
    cache = make_cache()
    request = cache.add()
    step = cache.step({request: 4})
    before = step.block_table.clone()
    cache.step({request: 1})
    torch.testing.assert_close(step.block_table, before, rtol=0, atol=0)


def test_free_makes_blocks_and_row_available_again():
    cache = make_cache(num_blocks=2, max_requests=1)
    request = cache.add()
    cache.step({request: 8})
    cache.free(request)
    assert cache.free_blocks == 2
    again = cache.add()
    assert again != request  # an id is never used twice, so a stale one is caught
    assert cache.step({again: 1}).positions.tolist() == [0]
    with pytest.raises(KeyError, match=f"unknown request {request}"):
        cache.length(request)


def snapshot(cache: PagedCache, requests: list[int]) -> tuple[object, ...]:
    return cache.free_blocks, [cache.length(request) for request in requests], cache._block_table.tolist()


@pytest.mark.parametrize(
    ("new_tokens", "error", "message"),
    [
        pytest.param(
            {0: 1, 1: 12}, CacheFull, "4 more blocks of 4 tokens are needed and 2 are free", id="blocks-run-out"
        ),
        pytest.param({0: 5}, ValueError, "would hold 13 tokens, more than max_len=12", id="past-max-len"),
        pytest.param({0: 0}, ValueError, "expected at least 1 new token, got 0", id="no-token"),
        pytest.param({0: 1, 7: 1}, KeyError, "unknown request 7", id="foreign-request"),
    ],
)
def test_step_that_cannot_be_made_changes_nothing(new_tokens: dict[int, int], error: type[Exception], message: str):
    cache = make_cache(num_blocks=4)
    requests = [cache.add(), cache.add()]
    cache.step({requests[0]: 8})
    before = snapshot(cache, requests)
    with pytest.raises(error, match=message):
        cache.step(new_tokens)
    assert snapshot(cache, requests) == before
    cache.step({requests[0]: 4})  # and the caller can go on


def test_add_beyond_max_requests_is_refused():
    cache = make_cache(max_requests=1)
    cache.add()
    with pytest.raises(CacheFull, match="all 1 request rows are in use"):
        cache.add()


def test_free_twice_is_refused():
    cache = make_cache()
    request = cache.add()
    cache.free(request)
    with pytest.raises(KeyError, match="freed already"):
        cache.free(request)


def test_reset_closes_everything_and_old_ids_stay_unknown():
    cache = make_cache()
    requests = [cache.add(), cache.add()]
    cache.step(dict.fromkeys(requests, 5))
    cache.reset()
    assert (cache.free_blocks, cache.requests) == (6, ())
    with pytest.raises(KeyError, match="unknown request 0"):
        cache.step({requests[0]: 1})
    again = cache.add()
    assert again not in requests
    assert cache.step({again: 2}).block_table.tolist() == [[0, -1, -1], [-1, -1, -1], [-1, -1, -1]]


def test_fork_needs_the_buffers_to_copy_in():
    cache = make_cache()
    request = cache.add()
    with pytest.raises(ValueError, match="pass buffers="):
        cache.fork(request)
    with pytest.raises(ValueError, match=r"expected \[NB=6, …\], got \(5, 4\)"):
        make_cache_with_buffers(torch.zeros(5, 4))


def make_cache_with_buffers(*buffers: torch.Tensor) -> PagedCache:
    return PagedCache(num_blocks=6, block_size=4, max_len=12, max_requests=3, buffers=buffers)


def test_fork_beyond_the_request_rows_changes_nothing():
    cache = make_cache_with_buffers(torch.zeros(6, 4))
    requests = [cache.add() for _ in range(3)]
    cache.step({requests[0]: 6})
    before = snapshot(cache, requests)
    with pytest.raises(CacheFull, match="all 3 request rows are in use"):
        cache.fork(requests[0])
    assert snapshot(cache, requests) == before


def test_step_that_lacks_a_block_for_a_copy_changes_nothing():
    buffer = torch.arange(24.0).view(6, 4)
    cache = make_cache_with_buffers(buffer)
    parent = cache.add()
    cache.step({parent: 10})  # three blocks, the third half full
    child, other = cache.fork(parent), cache.add()
    cache.step({other: 12})
    assert cache.free_blocks == 0
    before, bytes_before = snapshot(cache, [parent, child, other]), buffer.clone()
    with pytest.raises(CacheFull, match="1 more blocks of 4 tokens are needed and 0 are free"):
        cache.step({child: 1})
    assert snapshot(cache, [parent, child, other]) == before
    torch.testing.assert_close(buffer, bytes_before, rtol=0, atol=0)
    cache.free(other)
    step = cache.step({child: 1})
    copied = step.block_table[step.req_id[0], 2].item()
    torch.testing.assert_close(buffer[copied], bytes_before[2], rtol=0, atol=0)


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_outside_the_sequence_is_refused(length: int):
    cache = make_cache()
    request = cache.add()
    cache.step({request: 5})
    with pytest.raises(ValueError, match=f"expected a length of 0 to 5, got {length}"):
        cache.truncate(request, length)
    assert cache.length(request) == 5


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_len", "max_requests"])
def test_sizes_below_one_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        make_cache(**{name: 0})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "step", "free"]), st.integers(0, 3), st.integers(1, 9)), max_size=30))
def test_schedules_give_every_token_a_slot_of_its_own(schedule: list[tuple[str, int, int]]):
    """Against a dict of slot → (request, position), kept by hand."""
    cache = make_cache(num_blocks=7, max_requests=4, max_len=16)
    owner: dict[int, tuple[int, int]] = {}
    live: list[int] = []
    for action, which, count in schedule:
        if action == "add" and len(live) < 4:
            live.append(cache.add())
        elif live and action == "free":
            request = live.pop(which % len(live))
            cache.free(request)
            owner = {slot: token for slot, token in owner.items() if token[0] != request}
        elif live and action == "step":
            request = live[which % len(live)]
            length = cache.length(request)
            try:
                step = cache.step({request: count})
            except (CacheFull, ValueError):
                assert cache.length(request) == length
                continue
            for slot, position in zip(step.slot_mapping.tolist(), step.positions.tolist()):
                assert slot not in owner
                owner[slot] = (request, position)
            row = step.block_table[step.req_id[0]]
            for slot, (holder, position) in owner.items():
                if holder == request:
                    assert slot == row[position // 4] * 4 + position % 4
    blocks = {slot // 4 for slot in owner}
    assert cache.free_blocks == 7 - len(blocks)
