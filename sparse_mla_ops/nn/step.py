from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepInputs(NamedTuple):
    """What the layers need to know about the T rows of one step, as tensors (a pytree).

    Passed explicitly through the model's forward, so that it is an input of the compiled or captured graph. Rows may
    mix prefill, decode and speculative rows of any requests, in any order.

    positions: [T] int64, place of the row's token in its sequence.
    slot_mapping: [T] int64, cache slot (block · BS + offset) that the row's key and latent are written to; −1 for none.
    req_id: [T] int32, row of `block_table` that the token belongs to.
    row_ends: [T] int32, number of tokens that the row may attend to: positions + 1.
    block_table: [S, MB] int32, blocks of each request in order; −1 where there is none.
    """

    positions: Tensor
    slot_mapping: Tensor
    req_id: Tensor
    row_ends: Tensor
    block_table: Tensor
