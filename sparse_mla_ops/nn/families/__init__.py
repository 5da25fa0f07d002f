"""What this package must know of each model family: names and facts, nothing else. One file per family.

A family module has MODEL_TYPE (of the config), ATTENTION (name of the attention class) and `mla_spec(attention)`.
"""

from sparse_mla_ops.nn.families import deepseek_v32

FAMILIES = (deepseek_v32,)
