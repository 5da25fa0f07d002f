"""Two MLA layers of one's own, with names and features of their own, run on paged caches through `MLASpec`.

    python examples/wrap_my_layer.py

One has rope, an indexer and a learned attention sink. The other has no rope (R = 0), and no indexer: it attends to the
tokens that the first one selected. Each is written densely below, as a model's author would write it; wrapped, it
prefills in chunks and decodes, and must give the same output. The exit status is 1 if it does not.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from sparse_mla_ops.nn import CacheSpec, FusedSparseMLA, IndexerSpec, MLASpec, PagedCache

HIDDEN, HEADS, LATENT, NOPE, VALUE = 64, 4, 32, 24, 20  # L = 32, P = 24, V = 20
MAX_LEN, TOPK = 128, 16


class MyAttention(nn.Module):
    """MLA in its textbook form: keys and values expanded from the latent, a dense mask over what is selected."""

    def __init__(self, rope: int) -> None:
        super().__init__()
        self.rope, self.scale = rope, (NOPE + rope) ** -0.5
        self.down_kv = nn.Linear(HIDDEN, LATENT + rope, bias=False)
        self.norm_kv = nn.RMSNorm(LATENT, eps=1e-5)
        self.to_q = nn.Linear(HIDDEN, HEADS * (NOPE + rope), bias=False)  # no low rank: straight from the hidden states
        self.up_kv = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        self.sink = None if rope == 0 else nn.Parameter(torch.randn(HEADS))

    def dense(self, x: Tensor, chosen: Tensor, table: Tensor) -> Tensor:
        """x [T, HIDDEN], chosen [T, T] bool, table [T, R] → [T, HIDDEN]"""
        length = len(x)
        q_nope, q_pe = self.to_q(x).view(length, HEADS, -1).split((NOPE, self.rope), dim=-1)
        latent, k_pe = self.down_kv(x).split((LATENT, self.rope), dim=-1)
        k_nope, v = self.up_kv(self.norm_kv(latent)).view(length, HEADS, -1).split((NOPE, VALUE), dim=-1)
        q = torch.cat((q_nope, rotate(q_pe, table.unsqueeze(1))), dim=-1)
        k = torch.cat((k_nope, rotate(k_pe, table).unsqueeze(1).expand(-1, HEADS, -1)), dim=-1)
        scores = torch.einsum("thd,shd->hts", q, k) * self.scale
        scores = scores.masked_fill(~chosen, float("-inf"))
        if self.sink is not None:  # one more key per head, with a logit but no value
            scores = torch.cat((scores, self.sink[:, None, None].expand(-1, length, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        return self.out(torch.einsum("hts,shd->thd", weights, v).flatten(1))

    def spec(self, indexer: IndexerSpec | None) -> MLASpec:
        """All that `FusedSparseMLA` needs to know."""
        return MLASpec(
            q_b_proj=self.to_q,
            kv_a_proj_with_mqa=self.down_kv,
            kv_a_layernorm=self.norm_kv,
            kv_b_proj=self.up_kv,
            o_proj=self.out,
            num_heads=HEADS,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=self.rope,
            v_head_dim=VALUE,
            kv_lora_rank=LATENT,
            softmax_scale=self.scale,
            is_neox=True,
            indexer=indexer,
            attn_sink=self.sink,
        )


class MyIndexer(nn.Module):
    heads, dim = 16, 32

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, self.heads * self.dim, bias=False), nn.Linear(HIDDEN, self.dim, bias=False)
        self.norm, self.head_weights = nn.LayerNorm(self.dim), nn.Linear(HIDDEN, self.heads, bias=False)

    def chosen(self, x: Tensor, table: Tensor) -> Tensor:
        """The TOPK best earlier tokens of each row as a mask [T, T]."""
        rope = table.shape[1]
        q, k = self.q(x).view(len(x), self.heads, self.dim), self.norm(self.k(x))
        q = torch.cat((rotate(q[..., :rope], table.unsqueeze(1)), q[..., rope:]), dim=-1)
        k = torch.cat((rotate(k[:, :rope], table), k[:, rope:]), dim=-1)
        scores = torch.einsum("tid,sd->tis", q, k).relu().mul(self.head_weights(x).unsqueeze(-1)).sum(1)
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        best = scores.masked_fill(~causal, float("-inf")).topk(min(TOPK, len(x)), dim=-1).indices
        return torch.zeros_like(causal).scatter(-1, best, True) & causal

    def spec(self) -> IndexerSpec:
        return IndexerSpec(
            wq_b=self.q,
            wk=self.k,
            k_norm=self.norm,
            weights_proj=self.head_weights,
            num_heads=self.heads,
            head_dim=self.dim,
            topk=TOPK,
            softmax_scale=1.0,  # a positive factor of all scores changes no selection
            is_neox=True,
        )


def rope_table(rope: int) -> Tensor:
    angles = torch.arange(MAX_LEN)[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / max(rope, 1))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """NeoX pairing: element i with i + R/2."""
    half = x.shape[-1] // 2
    cos, sin = table.split(half, dim=-1) if half else (table, table)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)
    length, rope = 60, 8
    x, table = torch.randn(length, HIDDEN), rope_table(rope)
    sink_layer, rope_free_layer, indexer = MyAttention(rope), MyAttention(0), MyIndexer()
    chosen = indexer.chosen(x, table[:length])
    expected = (
        sink_layer.dense(x, chosen, table[:length]),
        rope_free_layer.dense(x, chosen, rope_table(0)[:length]),
    )

    cache = CacheSpec(num_blocks=16, block_size=16, max_len=MAX_LEN, kv_dtype=torch.float32, index_dtype=torch.float32)
    with_sink = FusedSparseMLA(sink_layer.spec(indexer.spec()), cache, table)
    rope_free = FusedSparseMLA(rope_free_layer.spec(None), cache, rope_table(0))

    blocks = PagedCache(num_blocks=16, block_size=16, max_len=MAX_LEN, max_requests=1)
    request = blocks.add()
    outputs = []
    for start, end in ((0, 25), (25, 50), *((at, at + 1) for at in range(50, length))):  # two chunks, then decode
        step = blocks.step({request: end - start})
        phase = "decode" if end - start == 1 else "prefill"
        out, token_indices = with_sink(x[start:end], step, phase)
        shared, _ = rope_free(x[start:end], step, phase, token_indices=token_indices)
        outputs.append((out, shared))

    failed = False
    for name, wanted, got in zip(("with a sink", "rope-free"), expected, zip(*outputs)):
        error = (torch.cat(got) - wanted).norm() / wanted.norm()
        failed |= not error < 1e-5
        print(f"layer {name}: {length} tokens in two chunks and {length - 50} decode steps, relative error {error:.1e}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
