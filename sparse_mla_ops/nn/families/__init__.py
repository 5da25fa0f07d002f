"""What this package must know of each model family: names and facts, nothing else. One file per family."""

from sparse_mla_ops.nn.families import deepseek_v32, glm_moe_dsa
from sparse_mla_ops.nn.families.family import Family

FAMILIES: tuple[Family, ...] = (deepseek_v32.FAMILY, glm_moe_dsa.FAMILY)

__all__ = ["FAMILIES", "Family"]
