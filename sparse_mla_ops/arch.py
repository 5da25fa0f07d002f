"""Architecture names, and which fp8 encodings each one stores and multiplies.

An architecture is always named by what its compiler calls it (`gfx942`, `sm90`), never by a product name.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

E4M3FN = torch.float8_e4m3fn
E4M3FNUZ = torch.float8_e4m3fnuz


class Fp8Support(NamedTuple):
    """The fp8 encodings of one architecture.

    stored: encodings that its conversion instructions read and write.
    multiplied: encodings that its matrix units take as operands.
    """

    stored: tuple[torch.dtype, ...]
    multiplied: tuple[torch.dtype, ...]


_NO_FP8 = Fp8Support(stored=(), multiplied=())
_OCP = Fp8Support(stored=(E4M3FN,), multiplied=(E4M3FN,))

FP8_SUPPORT: dict[str, Fp8Support] = {
    "cpu": Fp8Support(stored=(E4M3FN, E4M3FNUZ), multiplied=()),
    "gfx942": Fp8Support(stored=(E4M3FN, E4M3FNUZ), multiplied=(E4M3FNUZ,)),
    "gfx950": _OCP,
    "sm80": _NO_FP8,
    "sm86": _NO_FP8,
    "sm89": _OCP,
    "sm90": _OCP,
    "sm100": _OCP,
    "sm103": _OCP,
    "sm120": _OCP,
    "sm121": _OCP,
}


def arch_name(device: torch.device) -> str:
    """The architecture behind `device`: "cpu", "gfx942", "sm90", …"""
    if device.type == "cpu":
        return "cpu"
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _gpu_arch(index)


@functools.lru_cache(maxsize=None)
def _gpu_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def fp8_support(arch: str) -> Fp8Support:
    """The fp8 encodings of `arch`; an architecture without an entry is taken to have none."""
    return FP8_SUPPORT.get(arch, _NO_FP8)


def preferred_fp8_dtype(arch: str) -> torch.dtype:
    """The encoding a new fp8 cache should use on `arch`: the one its matrix units multiply, else e4m3fn."""
    multiplied = fp8_support(arch).multiplied
    return multiplied[0] if multiplied else E4M3FN
