"""A small random DeepSeek-V3.2 model generates with plain transformers, then fused and compiled.

    python examples/generate.py [PROMPT ...] [--kv-dtype fp32|bf16|fp8] [--index-dtype ...] [--eager] [--check]

Prompts are text; bytes are the tokens. With --check the exit status is 1 unless, unquantised in fp32, the tokens
of both are identical, no graph breaks, and the decode step compiles at most 3 times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from sparse_mla_ops.arch import arch_name, preferred_fp8_dtype
from sparse_mla_ops.nn import fuse_model, generate

PROMPTS = (
    "Multi-head latent attention keeps one row per token.",
    "The indexer scores every cached key, and only the best of them are attended to: that is what sparse means here.",
    "Positions are not slots.",
    "A cache of 656 bytes per token holds 512 fp8 values, four scales and 64 bf16 rope values.",
)
MAX_LEN = 512
MOST_DECODE_COMPILES = 3


def small_model(seed: int) -> DeepseekV32ForCausalLM:
    """Random weights, real structure. 16 index heads: with few, ReLU gives exact zeros and so ties. index_topk is well
    below the context, so that selection matters."""
    torch.manual_seed(seed)
    config = DeepseekV32Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=16,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.1,
    )
    return DeepseekV32ForCausalLM(config).eval()


def generate_plain(
    model: DeepseekV32ForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """transformers' own attention and cache, one prompt at a time."""
    generated = []
    for prompt in tqdm(prompts, desc="plain transformers", unit="prompt"):
        tokens = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        generated.append(tokens[0, len(prompt) :].tolist())
    return generated


class CountedProgress:
    """Shows each token as it comes, and notes how many graphs the prefill step had compiled."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, desc="fused (compiles first)", unit="token")
        self.prefill_graphs: int | None = None

    def __call__(self, prompt: int, token: int) -> None:
        if self.prefill_graphs is None:
            self.prefill_graphs = counters["stats"]["unique_graphs"]
        self.bar.update()


def show(tokens: Sequence[int]) -> str:
    return " ".join(f"{token:02x}" for token in tokens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue (default: four of our own)")
    parser.add_argument("--kv-dtype", choices=("fp32", "bf16", "fp8"), default="fp32", help="of the KV cache")
    parser.add_argument("--index-dtype", choices=("fp32", "bf16", "fp8"), default="fp32", help="of the indexer cache")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--split", action="store_true", help="rotate, join and write in three operators, not one")
    parser.add_argument("--eager", action="store_true", help="do not compile the fused model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit 1 unless the run is what this package promises")
    options = parser.parse_args(argv)
    if options.check and (options.kv_dtype, options.index_dtype, options.eager) != ("fp32", "fp32", False):
        parser.error("--check needs unquantised fp32 caches and a compiled step: leave the other flags out")

    texts = options.prompts or PROMPTS
    prompts = [list(text.encode()) for text in texts]
    model = small_model(options.seed).to(options.device)

    start = time.perf_counter()
    expected = generate_plain(model, prompts, options.max_new_tokens)
    plain_seconds = time.perf_counter() - start

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": preferred_fp8_dtype(arch_name(model.device))}
    report = fuse_model(
        model,
        num_blocks=len(prompts) * MAX_LEN // 64,
        block_size=64,
        max_len=MAX_LEN,
        kv_dtype=dtypes[options.kv_dtype],
        index_dtype=dtypes[options.index_dtype],
        fused=not options.split,
    )
    print(f"\n{report}\n")

    counters.clear()
    progress = CountedProgress(len(prompts) * options.max_new_tokens)
    start = time.perf_counter()
    with progress.bar:
        actual = generate(model, prompts, options.max_new_tokens, compile=not options.eager, on_token=progress)
    fused_seconds = time.perf_counter() - start

    for text, plain, fused in zip(texts, expected, actual):
        same = sum(a == b for a, b in zip(plain, fused))
        print(f"\n{text!r}: {same} of {len(plain)} tokens equal\n  plain  {show(plain)}\n  fused  {show(fused)}")

    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    decode_compiles = graphs - (progress.prefill_graphs or 0)
    recompiles = max(0, graphs - 2)  # one graph for the prefill step and one for the decode step are meant
    print(f"\nplain {plain_seconds:.1f} s, fused {fused_seconds:.1f} s, compiling included")
    print(f"graphs {graphs}, breaks {breaks}, recompiles {recompiles}; compiles of the decode step: {decode_compiles}")

    if options.check:
        failures = []
        if actual != expected:
            failures.append("tokens differ from plain transformers")
        if breaks:
            failures.append(f"expected 0 graph breaks, got {breaks}: {dict(counters['graph_break'])}")
        if not 1 <= decode_compiles <= MOST_DECODE_COMPILES:
            failures.append(f"expected 1 to {MOST_DECODE_COMPILES} compiles of the decode step, got {decode_compiles}")
        print("\n".join(f"check failed: {failure}" for failure in failures) or "check passed")
        return bool(failures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
