"""Block sizes, warps and stages of the Triton kernels: measured, from `tuned.json`, or a default that fits anywhere.

`tuned.json` maps architecture → operator → shape class → settings. `python -m sparse_mla_ops bench --tune` writes it.
Nothing is tuned when a kernel is called: a first call may be inside a graph capture.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    # BLOCK_H heads per program.
    "cache_write": {"BLOCK_H": 4, "num_warps": 4},
    # BLOCK_N keys per step of the loop, BLOCK_G latent columns per tile (at most 128 for 656-byte rows), CONVERT how
    # fp8 tiles are converted (see the kernel). A call that is split aims at programs_per_sm programs on each
    # multiprocessor, and gives no split fewer than min_keys keys.
    "sparse_mla_fwd": {
        "BLOCK_N": 16,
        "BLOCK_G": 128,
        "CONVERT": 2,
        "num_warps": 4,
        "num_stages": 1,
        "programs_per_sm": 1,
        "min_keys": 64,
    },
}


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(resources.files("sparse_mla_ops").joinpath("tuned.json").read_text(encoding="utf-8"))


@functools.cache
def settings(arch: str, op: str, shape_class: str) -> dict[str, Any]:
    """The settings of a kernel on `arch` for one class of shapes; the defaults where nothing was measured."""
    return {**DEFAULTS[op], **_table().get(arch, {}).get(op, {}).get(shape_class, {})}
