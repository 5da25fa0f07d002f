from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_mla_ops.nn.mla import IndexerSpec, MLASpec


@dataclass(frozen=True)
class Family:
    """A model family of transformers.

    model_type: of its config. attention: name of its attention class.
    is_neox, index_is_neox: pairing of the rotation in MLA and in the indexer.
    passes_topk: whether its decoder layers hand the token indices of one layer to the next (top-k sharing): an
        attention then returns them as a third value and takes `prev_topk_indices`.
    """

    model_type: str
    attention: str
    is_neox: bool
    index_is_neox: bool
    passes_topk: bool

    def mla_spec(self, attention: Any) -> MLASpec:
        """The parts of an attention module, by the names that DeepSeek-V3.2 gave them and its relatives kept.

        Raises AttributeError for a part that is missing.
        """
        return MLASpec(
            q_a_proj=attention.q_a_proj,
            q_a_layernorm=attention.q_a_layernorm,
            q_b_proj=attention.q_b_proj,
            kv_a_proj_with_mqa=attention.kv_a_proj_with_mqa,
            kv_a_layernorm=attention.kv_a_layernorm,
            kv_b_proj=attention.kv_b_proj,
            o_proj=attention.o_proj,
            num_heads=attention.num_heads,
            qk_nope_head_dim=attention.qk_nope_head_dim,
            qk_rope_head_dim=attention.qk_rope_head_dim,
            v_head_dim=attention.v_head_dim,
            kv_lora_rank=attention.kv_lora_rank,
            softmax_scale=attention.scaling,  # (P + R)^-0.5, times mscale² for yarn
            is_neox=self.is_neox,
            indexer=None if attention.indexer is None else self._indexer_spec(attention.indexer),
        )

    def _indexer_spec(self, indexer: Any) -> IndexerSpec:
        return IndexerSpec(
            wq_b=indexer.wq_b,
            wk=indexer.wk,
            k_norm=indexer.k_norm,
            weights_proj=indexer.weights_proj,
            num_heads=indexer.n_heads,
            head_dim=indexer.head_dim,
            topk=indexer.index_topk,
            softmax_scale=indexer.softmax_scale,
            is_neox=self.index_is_neox,
        )
