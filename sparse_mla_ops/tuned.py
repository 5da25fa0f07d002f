"""Block sizes, warps and stages of the Triton kernels: measured, from `tuned.json`, or a default that fits anywhere.

`tuned.json` maps architecture → operator → shape class → settings. `python -m sparse_mla_ops bench --tune` writes it.
Nothing is tuned when a kernel is called: a first call may be inside a graph capture.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple


class ShapeClass(NamedTuple):
    """A key of tuned.json: architecture, kernel, class of shapes."""

    arch: str
    kernel: str
    name: str


DEFAULTS: dict[str, dict[str, Any]] = {
    # BLOCK_H heads per program.
    "cache_write": {"BLOCK_H": 4, "num_warps": 4},
    # BLOCK_N keys per step of the loop, BLOCK_G latent columns per tile (at most 128 for 656-byte rows); CONVERT, how
    # fp8 tiles are converted, VECTOR, how many latent values a thread loads at once, and SLOTS_FIRST, 0 or 1: see the
    # kernel. A call that is split aims at programs_per_sm programs on each multiprocessor, and gives no split fewer
    # than min_keys keys.
    "sparse_mla_fwd": {
        "BLOCK_N": 16,
        "BLOCK_G": 128,
        "CONVERT": 2,
        "VECTOR": 16,
        "SLOTS_FIRST": 0,
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
def _settings(key: ShapeClass) -> dict[str, Any]:
    measured = _table().get(key.arch, {}).get(key.kernel, {})
    name = key.name
    if name not in measured:
        name = name.replace("-few", "-split")
    return {**DEFAULTS[key.kernel], **measured.get(name, {})}


_watched: tuple[list[ShapeClass], Mapping[ShapeClass, Mapping[str, Any]]] | None = None


def settings(arch: str, kernel: str, name: str) -> dict[str, Any]:
    """The settings of a kernel on `arch` for one class of shapes; the defaults where nothing was measured.

    A class "…-few" is as "…-split" where it was not measured apart.
    """
    key = ShapeClass(arch, kernel, name)
    if _watched is None:
        return _settings(key)
    asked, instead = _watched
    asked.append(key)
    return {**_settings(key), **instead.get(key, {})}


@contextlib.contextmanager
def watch(instead: Mapping[ShapeClass, Mapping[str, Any]] | None = None) -> Iterator[list[ShapeClass]]:
    """Within the block, collect the classes whose settings are asked for. instead: settings that replace theirs."""
    global _watched
    before, _watched = _watched, ([], instead or {})
    try:
        yield _watched[0]
    finally:
        _watched = before


def reread() -> None:
    """Read tuned.json again, which has changed."""
    _table.cache_clear()
    _settings.cache_clear()
