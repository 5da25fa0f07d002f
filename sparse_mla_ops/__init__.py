"""Sparse multi-head latent attention as registered, graph-safe PyTorch operators.

Operators are `sparse_mla_ops.<name>` (and `torch.ops.sparse_mla_ops.<name>`), see `sparse_mla_ops.ops`; the model level
is `sparse_mla_ops.nn`. Importing this package needs nothing but torch and touches no GPU.
"""

from importlib.metadata import PackageNotFoundError, version

from sparse_mla_ops import ops
from sparse_mla_ops.ops import *  # noqa: F403 - the operators are the public names
from sparse_mla_ops.registry import BackendUnavailable, Explanation, explain, support_matrix, use_backend

try:
    __version__ = version("sparse_mla_ops")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0+source"

__all__ = [*ops.__all__, "BackendUnavailable", "Explanation", "explain", "support_matrix", "use_backend"]
