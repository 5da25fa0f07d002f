"""Which cache blocks hold which sequence. The bytes themselves are buffers of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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

    Sequences may share blocks (`fork`). A block that is shared is copied when one of its sequences is about to write
    into it; only the last, partly filled one ever is.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        max_requests: int,
        device: torch.device | str | None = None,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            num_blocks, block_size: NB and BS of the layers' caches.
            max_len: most tokens of one sequence. `block_table` has MB = ceil(max_len / BS) columns.
            max_requests: most sequences at a time, S: the rows of `block_table`, whose shape never changes.
            device: of the step inputs.
            buffers: the caches [NB, …] of all layers, in which shared blocks are copied; `fork` needs them.
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
        for buffer in buffers:
            if buffer.shape[0] != num_blocks:
                raise ValueError(f"buffers: expected [NB={num_blocks}, …], got {tuple(buffer.shape)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_len = max_len
        self.max_requests = max_requests
        self._device = device
        self._buffers = tuple(buffers)
        self._next_request = 0
        self.reset()

    def reset(self) -> None:
        """Close every sequence. Request ids go on counting, so an id from before stays unknown."""
        self._free_blocks = list(reversed(range(self.num_blocks)))
        self._free_rows = list(reversed(range(self.max_requests)))
        self._holders = [0] * self.num_blocks  # how many sequences hold each block
        self._sequences: dict[int, _Sequence] = {}
        columns = -(-self.max_len // self.block_size)
        self._block_table = torch.full((self.max_requests, columns), -1, dtype=torch.int32)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free_blocks)

    @property
    def requests(self) -> tuple[int, ...]:
        """Ids of the open sequences, oldest first."""
        return tuple(self._sequences)

    def length(self, request: int) -> int:
        """Number of tokens that `request` holds."""
        return self._sequence(request).length

    def add(self) -> int:
        """Open an empty sequence and return its request id. Ids are never used twice."""
        return self._open(length=0, blocks=[])

    def fork(self, request: int) -> int:
        """Open a sequence that begins with all tokens of `request`, sharing its blocks, and return its id."""
        source = self._sequence(request)
        if not self._buffers:
            raise ValueError("fork: shared blocks are copied on write, which needs the caches; pass buffers=[...]")
        return self._open(length=source.length, blocks=list(source.blocks))

    def free(self, request: int) -> None:
        """Close a sequence and give back the blocks that no other one holds."""
        sequence = self._sequence(request)
        del self._sequences[request]
        self._drop_blocks(sequence, keep=0)
        self._free_rows.append(sequence.row)

    def truncate(self, request: int, length: int) -> None:
        """Keep only the first `length` tokens: what a rejected speculation rolls back to."""
        sequence = self._sequence(request)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"truncate: request {request}: expected a length of 0 to {sequence.length}, got {length}")
        self._drop_blocks(sequence, keep=-(-length // self.block_size))
        sequence.length = length

    def step(self, new_tokens: Mapping[int, int]) -> StepInputs:
        """Grow each request by so many tokens and return the step's inputs, one row per new token.

        Rows come in the order of `new_tokens`, the tokens of one request side by side. Raises CacheFull when blocks run
        out, ValueError for a request past max_len and for a count below 1, KeyError for an unknown request.
        """
        copies, additions = self._plan(new_tokens)
        needed = len(copies) + sum(additions.values())
        if needed > len(self._free_blocks):
            raise CacheFull(
                f"step: {needed} more blocks of {self.block_size} tokens are needed and {len(self._free_blocks)} are "
                "free; nothing was allocated: free a request and try again, or fuse the model with more blocks"
            )

        moved = []
        for request in copies:
            sequence = self._sequences[request]
            shared = sequence.blocks[-1]
            self._drop_blocks(sequence, keep=len(sequence.blocks) - 1)
            moved.append((shared, self._take_block(sequence)))
        self._copy_blocks(moved)

        positions, slots, rows = [], [], []
        for request, count in new_tokens.items():
            sequence = self._sequences[request]
            for _ in range(additions[request]):
                self._take_block(sequence)
            position = torch.arange(sequence.length, sequence.length + count)
            block = torch.tensor(sequence.blocks)[position // self.block_size]
            positions.append(position)
            slots.append(block * self.block_size + position % self.block_size)
            rows.append(torch.full((count,), sequence.row, dtype=torch.int32))
            sequence.length += count
        position = torch.cat(positions)
        inputs = (position, torch.cat(slots), torch.cat(rows), (position + 1).int(), self._block_table.clone())
        return StepInputs(*(tensor.to(self._device) for tensor in inputs))

    def _plan(self, new_tokens: Mapping[int, int]) -> tuple[list[int], dict[int, int]]:
        """What a step needs: the requests whose last block is copied first, and how many new blocks each takes."""
        if not new_tokens:
            raise ValueError("step: expected at least one request with new tokens, got none")
        copies: list[int] = []
        additions: dict[int, int] = {}
        holders = dict(enumerate(self._holders))
        for request, count in new_tokens.items():
            sequence = self._sequence(request)
            if count < 1:
                raise ValueError(f"step: request {request}: expected at least 1 new token, got {count}")
            length = sequence.length + count
            if length > self.max_len:
                raise ValueError(
                    f"step: request {request} would hold {length} tokens, more than max_len={self.max_len}; "
                    "free it, or build the cache and fuse the model with a larger max_len"
                )
            additions[request] = -(-length // self.block_size) - len(sequence.blocks)
            partly_filled = sequence.length % self.block_size != 0
            if partly_filled and holders[sequence.blocks[-1]] > 1:
                holders[sequence.blocks[-1]] -= 1  # of several that write, the last one keeps the block
                copies.append(request)
        return copies, additions

    def _open(self, length: int, blocks: list[int]) -> int:
        if not self._free_rows:
            raise CacheFull(
                f"all {self.max_requests} request rows are in use; free a request, or build the cache with a larger "
                "max_requests"
            )
        request, self._next_request = self._next_request, self._next_request + 1
        sequence = _Sequence(self._free_rows.pop(), length, blocks)
        self._sequences[request] = sequence
        for column, block in enumerate(blocks):
            self._holders[block] += 1
            self._block_table[sequence.row, column] = block
        return request

    def _take_block(self, sequence: _Sequence) -> int:
        block = self._free_blocks.pop()
        self._holders[block] = 1
        self._block_table[sequence.row, len(sequence.blocks)] = block
        sequence.blocks.append(block)
        return block

    def _drop_blocks(self, sequence: _Sequence, keep: int) -> None:
        self._block_table[sequence.row, keep:] = -1
        while len(sequence.blocks) > keep:
            block = sequence.blocks.pop()
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free_blocks.append(block)

    def _copy_blocks(self, moved: Sequence[tuple[int, int]]) -> None:
        if not moved:
            return
        for buffer in self._buffers:
            source, target = torch.tensor(moved, device=buffer.device).unbind(1)
            block_bytes = buffer.view(torch.uint8)  # fp8 tensors cannot be indexed everywhere
            block_bytes[target] = block_bytes[source]

    def _sequence(self, request: int) -> _Sequence:
        if request not in self._sequences:
            raise KeyError(f"unknown request {request}: never added, or freed already; open are {self.requests}")
        return self._sequences[request]
