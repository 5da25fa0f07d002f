"""Which cache blocks hold which sequence. The bytes themselves are buffers of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sparse_mla_ops.nn.step import StepInputs


class CacheFull(RuntimeError):
    """Blocks or request rows have run out. Nothing was changed: free a request, then go on.

    generated: where `generate` raises it, the tokens generated so far, one list per prompt.
    """

    generated: list[list[int]] | None = None


@dataclass
class _Sequence:
    row: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedCache:
    """Allocates blocks for growing sequences and builds the inputs of each step.

    Every method either succeeds or raises and leaves the state as it was. The state lives on the host; what a step
    needs of it is copied into that step's `StepInputs`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        max_requests: int,
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            num_blocks, block_size: NB and BS of the layers' caches.
            max_len: most tokens of one sequence. `block_table` has MB = ceil(max_len / BS) columns.
            max_requests: most sequences at a time, S: the rows of `block_table`, whose shape never changes.
            device: of the step inputs.
        """
        sizes = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_len": max_len,
            "max_requests": max_requests,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"PagedCache: {name}: expected at least 1, got {value}")
        self.block_size = block_size
        self.max_len = max_len
        self._device = device
        self._free_blocks = list(reversed(range(num_blocks)))
        self._free_rows = list(reversed(range(max_requests)))
        self._sequences: dict[int, _Sequence] = {}
        self._next_request = 0
        self._block_table = torch.full((max_requests, -(-max_len // block_size)), -1, dtype=torch.int32)

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    def length(self, request: int) -> int:
        """Number of tokens that `request` holds."""
        return self._sequence(request).length

    def add(self) -> int:
        """Open an empty sequence and return its request id. Ids are never used twice."""
        if not self._free_rows:
            raise CacheFull(
                f"add: all {len(self._sequences)} request rows are in use; free a request, or build the cache with a "
                "larger max_requests"
            )
        request, self._next_request = self._next_request, self._next_request + 1
        self._sequences[request] = _Sequence(self._free_rows.pop())
        return request

    def free(self, request: int) -> None:
        """Close a sequence and give its blocks back."""
        sequence = self._sequence(request)
        del self._sequences[request]
        self._block_table[sequence.row] = -1
        self._free_blocks.extend(reversed(sequence.blocks))
        self._free_rows.append(sequence.row)

    def step(self, new_tokens: Mapping[int, int]) -> StepInputs:
        """Grow each request by so many tokens and return the step's inputs, one row per new token.

        Rows come in the order of `new_tokens`, the tokens of one request side by side. Raises CacheFull when blocks run
        out, ValueError for a request past max_len and for a count below 1, KeyError for an unknown request.
        """
        sequences = [self._sequence(request) for request in new_tokens]
        needed = []
        for (request, count), sequence in zip(new_tokens.items(), sequences):
            if count < 1:
                raise ValueError(f"step: request {request}: expected at least 1 new token, got {count}")
            length = sequence.length + count
            if length > self.max_len:
                raise ValueError(
                    f"step: request {request} would hold {length} tokens, more than max_len={self.max_len}; "
                    "free it, or build the cache and fuse the model with a larger max_len"
                )
            needed.append(-(-length // self.block_size) - len(sequence.blocks))
        if sum(needed) > len(self._free_blocks):
            raise CacheFull(
                f"step: {sum(needed)} more blocks of {self.block_size} tokens are needed and {len(self._free_blocks)} "
                "are free; nothing was allocated: free a request and try again, or fuse the model with more blocks"
            )

        positions, slots, rows = [], [], []
        for count, sequence, blocks in zip(new_tokens.values(), sequences, needed):
            for _ in range(blocks):
                self._block_table[sequence.row, len(sequence.blocks)] = self._free_blocks[-1]
                sequence.blocks.append(self._free_blocks.pop())
            position = torch.arange(sequence.length, sequence.length + count)
            block = torch.tensor(sequence.blocks)[position // self.block_size]
            positions.append(position)
            slots.append(block * self.block_size + position % self.block_size)
            rows.append(torch.full((count,), sequence.row, dtype=torch.int32))
            sequence.length += count
        position = torch.cat(positions)
        inputs = (position, torch.cat(slots), torch.cat(rows), (position + 1).int(), self._block_table.clone())
        return StepInputs(*(tensor.to(self._device) for tensor in inputs))

    def _sequence(self, request: int) -> _Sequence:
        if request not in self._sequences:
            raise KeyError(f"unknown request {request}: never added, or freed already; live: {list(self._sequences)}")
        return self._sequences[request]
