"""Model level: paged caches, step inputs, the fused MLA layer, and Hugging Face models made of it."""

from sparse_mla_ops.nn.cache import CacheFull, PagedCache
from sparse_mla_ops.nn.calibration import calibrate
from sparse_mla_ops.nn.fuse import FusionReport, UnsupportedModel, fuse_model, fused_layers, unfuse_model
from sparse_mla_ops.nn.generation import generate, paged_cache, step_logits
from sparse_mla_ops.nn.mla import CacheSpec, FusedSparseMLA, IndexerSpec, MLASpec
from sparse_mla_ops.nn.step import StepInputs

__all__ = [
    "CacheFull",
    "CacheSpec",
    "FusedSparseMLA",
    "FusionReport",
    "IndexerSpec",
    "MLASpec",
    "PagedCache",
    "StepInputs",
    "UnsupportedModel",
    "calibrate",
    "fuse_model",
    "fused_layers",
    "generate",
    "paged_cache",
    "step_logits",
    "unfuse_model",
]
