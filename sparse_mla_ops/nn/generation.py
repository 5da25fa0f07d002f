"""Greedy generation over the paged caches of a fused model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparse_mla_ops.nn.cache import CacheFull, PagedCache
from sparse_mla_ops.nn.fuse import fused_layers
from sparse_mla_ops.nn.step import StepInputs

# A mask of the model's own is never built: with the mapping given and empty, its mask code is skipped. The keys are the
# layer types of transformers 5.17 and of newer versions.
_NO_MASK = {"deepseek_sparse_attention": None, "indexed_attention": None}


def paged_cache(model: nn.Module, *, max_requests: int) -> PagedCache:
    """An empty PagedCache over the fused model's caches.

    It owns the model's blocks: of two at a time, each would hand out the blocks of the other.
    """
    layers = list(fused_layers(model).values())
    if not layers:
        raise ValueError("paged_cache: expected a fused model; call sparse_mla_ops.nn.fuse_model(model, ...) first")
    spec = layers[0].cache_spec
    buffers = [layer.kv_cache for layer in layers]
    buffers += [layer.indexer.index_cache for layer in layers if layer.indexer is not None]
    return PagedCache(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_len=spec.max_len,
        max_requests=max_requests,
        device=buffers[0].device,
        buffers=buffers,
    )


def step_logits(model: nn.Module, input_ids: Tensor, step: StepInputs, logit_rows: Tensor, phase: str) -> Tensor:
    """One step of a fused model: logits [rows, vocabulary] of the rows in `logit_rows`.

    Args:
        model: a fused causal language model.
        input_ids: [T] token ids, one per row of the step.
        step: from `PagedCache.step`.
        logit_rows: [rows] int64, the rows whose logits are wanted: each sequence's last one, or all when speculating.
        phase: "decode" if every row is a decode or speculative row, else "prefill".

    This is the function to compile: `torch.compile(step_logits, fullgraph=True, dynamic=True)`.
    """
    output = model(
        input_ids=input_ids.unsqueeze(0),
        attention_mask=_NO_MASK,
        position_ids=step.positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logit_rows,
        step_inputs=step,
        phase=phase,
    )
    return output.logits.squeeze(0)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    compile: bool | str | Callable[..., Any] = False,
    max_step_tokens: int | None = None,
    eos_token_id: int | Collection[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Generate greedily for a batch of prompts of any lengths.

    Args:
        model: a fused causal language model (`fuse_model`).
        prompts: token ids of each prompt, at least one each.
        max_new_tokens: most tokens to generate per prompt.
        compile: True to compile the step with Inductor, or a backend of torch.compile (name or callable). Either way in
            one graph and with dynamic shapes; compiled code is kept for later calls.
        max_step_tokens: most rows of one step. Long prompts are then prefilled in chunks, side by side with the decode
            rows of sequences that are further on. None runs all prompts in the first step.
        eos_token_id: token or tokens that end a sequence; it is kept as the last token. None never ends early.
        on_token: called with (index of the prompt, token) for every token as it comes.

    Returns:
        The new tokens of each prompt, in order.

    Raises:
        ValueError: a model that is not fused, an empty prompt, or one that is too long for the cache's max_len.
        CacheFull: blocks ran out; its `generated` holds what was generated so far.
    """
    cache = paged_cache(model, max_requests=max(1, len(prompts)))
    _check_request(prompts, max_new_tokens, max_step_tokens, cache.max_len)
    ends = set() if eos_token_id is None else {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    step_fn = step_logits
    if compile:
        backend = "inductor" if compile is True else compile
        step_fn = torch.compile(step_logits, fullgraph=True, dynamic=True, backend=backend)

    generated: list[list[int]] = [[] for _ in prompts]
    requests = [cache.add() for _ in prompts]
    pending = {index: list(prompt) for index, prompt in enumerate(prompts)}  # tokens that are not in the cache yet
    while pending:
        chunks = _schedule(pending, max_step_tokens)
        try:
            step = cache.step({requests[index]: len(tokens) for index, tokens in chunks.items()})
        except CacheFull as error:
            error.generated = generated
            raise
        device = step.positions.device
        input_ids = torch.tensor([token for tokens in chunks.values() for token in tokens], device=device)
        last_rows = torch.tensor([len(tokens) for tokens in chunks.values()], device=device).cumsum(0) - 1
        phase = "decode" if all(generated[index] for index in chunks) else "prefill"
        new_tokens = step_fn(model, input_ids, step, last_rows, phase).argmax(-1).tolist()
        for (index, tokens), token in zip(chunks.items(), new_tokens):
            pending[index] = pending[index][len(tokens) :]
            if pending[index]:
                continue  # in the middle of its prompt: what comes next is known
            generated[index].append(token)
            if on_token is not None:
                on_token(index, token)
            if token in ends or len(generated[index]) == max_new_tokens:
                cache.free(requests[index])
                del pending[index]
            else:
                pending[index] = [token]
    return generated


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts: expected one or more prompts of at least one token each")


def _check_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, max_step_tokens: int | None, max_len: int
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if max_step_tokens is not None and max_step_tokens < 1:
        raise ValueError(f"max_step_tokens: expected at least 1, got {max_step_tokens}")
    check_prompts(prompts)
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens - 1  # the last token is never fed back
    if longest > max_len:
        raise ValueError(
            f"prompts: the longest and {max_new_tokens} new tokens need max_len ≥ {longest}, got {max_len}; "
            "fuse the model with a larger max_len, or generate fewer tokens"
        )


def _schedule(pending: dict[int, list[int]], max_step_tokens: int | None) -> dict[int, list[int]]:
    """The tokens that go into the next step, by prompt: shortest rests first, so that decode rows never wait."""
    if max_step_tokens is None:
        return dict(pending)
    chunks: dict[int, list[int]] = {}
    room = max_step_tokens
    for index in sorted(pending, key=lambda index: len(pending[index])):
        if room > 0:
            chunks[index] = pending[index][:room]
            room -= len(chunks[index])
    return chunks
