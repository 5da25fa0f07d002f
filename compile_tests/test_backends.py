"""Every other backend against the reference: bit for bit where the contract says so, else within its accuracy.

On a CPU the triton backend runs in Triton's interpreter, as the root conftest asks, with bf16 and fp8 rounded by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla_ops import formats, ops, registry, testing, tuned
from sparse_mla_ops.ops._register import forget_plans
from sparse_mla_ops.testing import CASES, LAYOUTS, OpCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = tuple(backend.name for backend in registry.BACKENDS if backend.name != "reference")
BITWISE = (
    "rotary_embedding",
    "concat_mla_q",
    "concat_and_cache_mla",
    "fused_qk_rope_concat_and_cache_mla",
    "convert_req_index_to_global_index",
)
OTHER_HEADS = (1, 4, 8, 11, 17, 32, 40, 64, 80, 128)


def run(case: OpCase, backend: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    return testing.outcome(lambda **kwargs: case.function(**kwargs, backend=backend), arguments)


def skip_unless_it_runs(case: OpCase, backend: str, arguments: dict[str, Any]) -> None:
    explanation = registry.explain(case.op, **arguments, backend=backend)
    if explanation.backend is None:
        pytest.skip(explanation.reasons[backend])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", testing.cases_of(*BITWISE), ids=str)
def test_bits_are_those_of_the_reference(case: OpCase, layout: str, backend: str) -> None:
    arguments = case.arguments(tokens=7, layout=layout, device=DEVICE)
    skip_unless_it_runs(case, backend, arguments)
    expected = run(case, "reference", case.arguments(tokens=7, layout=layout, device=DEVICE))
    testing.assert_same_bits(run(case, backend, arguments), expected)


def precision_of(arguments: dict[str, Any]) -> str:
    """What the dots are in (see testing.TOLERANCES)."""
    q, cache = arguments["q"], arguments["kv_cache"]
    fp8_query = q.dtype in formats.FP8_MAX and arguments.get("dot_precision") != "bf16"
    if arguments.get("dot_precision") == "fp8" or fp8_query:
        return "fp8"
    return "fp32" if q.dtype == cache.dtype == torch.float32 else "bf16"


def in_double(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Attention by the reference's formula, in fp64 on dequantised inputs."""
    q, rank = arguments["q"], arguments["kv_lora_rank"]
    scales = {name: arguments.get(name) for name in ("q_scale", "kv_scale")}
    values = {name: 1.0 if scale is None else scale.item() for name, scale in scales.items()}
    real_q = formats.dequantize(q, scales["q_scale"] if q.dtype in formats.FP8_MAX else None).double()
    parts = formats.unpack_kv_cache(
        arguments["kv_cache"], rank, q.shape[2] - rank, values["kv_scale"], arguments.get("fp8_dtype")
    )
    kv = torch.cat(parts, dim=-1).flatten(0, 1).double()
    out, lse = [], []
    for t in range(len(q)):
        if (indptr := arguments.get("indptr")) is not None:
            row = arguments["indices"][indptr[t] : indptr[t + 1]]
        else:
            length = arguments.get("topk_length")
            row = arguments["indices"][t][: None if length is None else length[t]]
        row = row[(row >= 0) & (row < len(kv))].long()
        scores = real_q[t] @ kv[row].T * arguments["softmax_scale"]
        lse.append(scores.logsumexp(-1))
        result = scores.softmax(-1) @ kv[row][:, :rank]
        if (sink := arguments.get("attn_sink")) is not None and len(row):
            result = result * torch.sigmoid(lse[-1] - sink.double()).unsqueeze(-1)
        out.append(result)
    return {"output 0": torch.stack(out), "output 1": torch.stack(lse)}


def check_attention(case: OpCase, backend: str, arguments: dict[str, Any]) -> None:
    skip_unless_it_runs(case, backend, arguments)
    actual, expected = run(case, backend, arguments), in_double(arguments)
    testing.assert_accurate(actual["output 0"], expected["output 0"], precision_of(arguments))
    if arguments.get("return_lse"):
        tolerance = 0.05 if precision_of(arguments) == "fp8" else 1e-3
        torch.testing.assert_close(actual["output 1"].double(), expected["output 1"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", testing.cases_of("sparse_mla_fwd"), ids=str)
def test_attention_is_accurate(case: OpCase, layout: str, backend: str) -> None:
    check_attention(case, backend, case.arguments(tokens=5, layout=layout, device=DEVICE))


@pytest.mark.skipif(DEVICE == "cuda", reason="pretends to be another device; on a GPU the real one is tested")
@pytest.mark.parametrize("name", ["sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("case", testing.cases_of("sparse_mla_fwd"), ids=str)
def test_attention_is_accurate_as_it_is_launched_elsewhere(case: OpCase, name: str) -> None:
    """The choices for another architecture: types of the products, sizes of the tiles, which way round they stand."""
    triton_backend = pytest.importorskip("sparse_mla_ops.backends.triton", reason="triton is not installed")
    with triton_backend.pretend_device(triton_backend.Device(name, 132)):
        check_attention(case, "triton", case.arguments(tokens=3, device=DEVICE))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", OTHER_HEADS)
@pytest.mark.parametrize("cache", ["bf16", "e4m3fn", "rows656"])
def test_attention_is_accurate_for_any_number_of_heads(cache: str, heads: int, backend: str) -> None:
    """Numbers of heads below, between and above the kernels' tiles, with a row that attends to nothing."""
    case = OpCase("sparse_mla_fwd", cache)
    arguments = case.arguments(tokens=3, device=DEVICE)
    q = torch.randn(3, heads, arguments["q"].shape[2], generator=torch.Generator().manual_seed(heads))
    arguments["q"] = q.to(DEVICE, arguments["q"].dtype)
    check_attention(case, backend, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [float("-inf"), -3.0, 0.0, 5.0, 1e30, float("inf")])
@pytest.mark.parametrize("tokens", [1, 40], ids=["split", "whole"])
def test_sinks_of_any_size_take_their_share(sink: float, tokens: int, backend: str) -> None:
    case = OpCase("sparse_mla_fwd", "bf16")
    arguments = case.arguments(tokens=tokens, device=DEVICE)
    arguments["attn_sink"] = torch.full((arguments["q"].shape[1],), sink, device=DEVICE)
    arguments["indices"] = arguments["indices"].repeat(1, 30)  # long enough to be split over K
    check_attention(case, backend, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kept", [0, 1, 63, 64, 65, 200, 333])
def test_splits_that_find_no_key_change_nothing(kept: int, backend: str) -> None:
    """Only the last `kept` of 333 indices are valid, so that whole tiles and whole splits are holes."""
    case = OpCase("sparse_mla_fwd", "fp32-lse")
    arguments = case.arguments(tokens=2, device=DEVICE)
    rows = arguments["kv_cache"].shape[0] * arguments["kv_cache"].shape[1]
    indices = torch.randint(0, rows, (2, 333), generator=torch.Generator().manual_seed(kept))
    indices[:, : 333 - kept] = -1
    arguments["indices"] = indices.to(DEVICE, torch.int32)
    check_attention(case, backend, arguments)


@pytest.fixture
def set_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Give every class of the triton backend's kernels other settings, until the test ends."""
    usual = tuned.settings

    def set_them(**settings: int) -> None:
        monkeypatch.setattr(tuned, "settings", lambda *shape_class: {**usual(*shape_class), **settings})
        forget_plans()

    yield set_them
    forget_plans()


@pytest.mark.parametrize("keys", [1, 127, 128, 300])
@pytest.mark.parametrize(
    ("convert", "block_keys", "num_warps"),
    [*itertools.product((0, 1, 2, 3), (64,), (4, 8)), (3, 128, 4), (3, 32, 4)],
)
@pytest.mark.parametrize("cache", ["e4m3fn", "e4m3fn-released-r0", "rows656"])
def test_attention_is_accurate_however_fp8_tiles_are_converted(
    cache: str, convert: int, block_keys: int, num_warps: int, keys: int, set_settings: Callable[..., None]
) -> None:
    """Settings differ from GPU to GPU: each way of the triton kernel computes the same, with tails and holes."""
    set_settings(CONVERT=convert, BLOCK_N=block_keys, num_warps=num_warps, num_stages=1)
    case = OpCase("sparse_mla_fwd", cache)
    arguments = case.arguments(tokens=3, device=DEVICE)
    rows = arguments["kv_cache"].shape[0] * arguments["kv_cache"].shape[1]
    indices = torch.randint(-rows // 4, rows + rows // 4, (3, keys), generator=torch.Generator().manual_seed(keys))
    arguments["indices"] = indices.to(DEVICE, torch.int32)
    arguments["dot_precision"] = "bf16"
    check_attention(case, "triton", arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if case.op in (*BITWISE, "sparse_mla_fwd")], ids=str)
def test_same_call_gives_the_same_bits_when_it_is_repeated(case: OpCase, backend: str) -> None:
    """The second call of the same metadata may take a shorter way; other values must go the same way."""
    first = case.arguments(device=DEVICE)
    skip_unless_it_runs(case, backend, first)
    run(case, backend, first)
    repeated = run(case, backend, case.arguments(device=DEVICE, seed=3))
    with registry.record_choices():  # another state of the registry: nothing is remembered for it
        anew = run(case, backend, case.arguments(device=DEVICE, seed=3))
    testing.assert_same_bits(repeated, anew)


def test_triton_refuses_columns_that_32_bits_cannot_address() -> None:
    triton = pytest.importorskip("sparse_mla_ops.backends.triton", reason="triton is not installed")
    near, far = torch.empty(4, 8, 512, device="meta"), torch.empty(512, 4, 1 << 21, device="meta").permute(1, 2, 0)
    with triton.pretend_device(triton.Device("sm90", 132)):
        assert triton.why_not_concat_mla_q(near, near[..., :64], None, None) is None
        reason = triton.why_not_concat_mla_q(far, far[..., :64], None, None)
    assert reason is not None
    assert "columns of q_nope lie 2^31 elements or more apart" in reason


@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize("convert", [0, 1, 2, 3])
def test_scales_of_656_byte_rows_may_be_small_and_large(
    convert: int, kind: str, set_settings: Callable[..., None]
) -> None:
    """Scales are multiplied at 16 bits, any fp32 number though they are: latents of 1e-4 and 1e3 are as accurate."""
    set_settings(CONVERT=convert, BLOCK_N=64, num_warps=8, num_stages=1)
    case = OpCase("sparse_mla_fwd", "rows656")
    arguments = case.arguments(tokens=3, device=DEVICE)
    factor = 1.37 * (2.0**-14 if kind == "small" else 2.0**8)
    scales = arguments["kv_cache"].flatten(0, 1)[:, formats.DS_MLA_SCALES_AT : formats.DS_MLA_ROPE_AT]
    scales.copy_((scales.contiguous().view(torch.float32) * factor).view(torch.uint8))
    # The query's latent part shrinks where the cache's grows, so that the scores stay what they are.
    arguments["q"][..., : formats.DS_MLA_LATENT] /= factor
    check_attention(case, "triton", arguments)


@pytest.mark.parametrize(
    ("latent", "block_pitch", "offset", "name"),
    [(512, 64, 0, "fp8"), (48, 3, 0, "fp8"), (40, 64, 0, "fp8_unaligned"), (512, 64, 8, "fp8_unaligned")],
)
def test_fp8_values_are_taken_in_pairs_only_from_aligned_rows(
    latent: int, block_pitch: int, offset: int, name: str
) -> None:
    """On an H200: rows of a pool that starts, or whose latents end, within 16 bytes have settings of their own."""
    triton_backend = pytest.importorskip("sparse_mla_ops.backends.triton", reason="triton is not installed")
    width = latent + 64 if latent % 16 == 0 else latent + 8
    pool = torch.empty(8 * block_pitch * width + offset, dtype=torch.uint8)[offset:]
    cache = pool.view(8, block_pitch, width)[:, :3]
    q, indices = torch.empty(4, 16, width, dtype=torch.bfloat16), torch.empty(4, 512, dtype=torch.int32)
    device = triton_backend.Device("sm90", 132)
    with triton_backend.pretend_device(device), triton_backend.record_launches() as launches, tuned.watch() as asked:
        ops.sparse_mla_fwd(
            q,
            cache,
            indices,
            0.1,
            latent,
            kv_scale=torch.empty(1),
            phase="decode",
            backend="triton",
            fp8_dtype=torch.float8_e4m3fn,
        )
    assert asked[0].name == f"{name}-h16-few"
    assert (launches[0].arguments["CONVERT"] == 3) == (name == "fp8")
