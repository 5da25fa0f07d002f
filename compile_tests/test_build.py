"""The Triton kernels, compiled for GPUs that are not here: they fit, they do not spill, they use the matrix units.

Compilation needs a process without Triton's interpreter, so what is compiled is compiled in another one, once for all
tests and all of pytest's workers.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")
from filelock import FileLock

from sparse_mla_ops import __main__ as command_line
from sparse_mla_ops import arch, build, registry, tuned

ROOT = Path(__file__).parents[1]
ARCHS = tuple(build.TARGETS)
FP8_TYPE = {"gfx942": "f8E4M3FNUZ", "gfx950": "f8E4M3FN", "sm89": "f8E4M3FN", "sm90": "f8E4M3FN", "sm120": "f8E4M3FN"}

# What is compiled here: every kind of cache and dot with few and many rows and heads; `build` does all the rest.
KINDS = ("bf16", "e4m3*-dot16", "e4m3*-dot8", "e4m3*-q8-dot8", "rows656-*-dot16")
SHAPES = ("h16-r64-t4", "h16-r0-t4096", "h32-r64-t4096", "h64-r64-t4096")
SUBSET = (
    *(f"sparse_mla_fwd/{kind}-{shape}" for kind in KINDS for shape in SHAPES),
    "sparse_mla_fwd/bf16-h64-r64-t4096-*",
    "rotary_embedding/h16-t4",
    "fused_qk_rope_concat_and_cache_mla/*-q-*-h16-r64-t4",
    "fused_qk_rope_concat_and_cache_mla/bf16-q-bf16-h64-r64-t4096-neox",
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python on `command` without the interpreter of kernels, unless `environment` asks for it."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, env=variables, capture_output=True, text=True
    )


def run_build(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "sparse_mla_ops", "build", *arguments, **environment)


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, *arguments: str) -> Any:
    """What `build` says in JSON, from one run for all workers of one test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    done, unfinished = folder / f"{name}.json", folder / f"{name}.unfinished"
    with FileLock(folder / f"{name}.lock"):
        if not done.exists():
            result = run_build(*arguments, "--json", str(unfinished))
            assert result.returncode in (0, 1), result.stderr
            unfinished.rename(done)
    return json.loads(done.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel of the subset on every architecture."""
    patterns = [part for pattern in SUBSET for part in ("--only", pattern)]
    return made_once(tmp_path_factory, "build", *patterns, "--jobs", "2")["built"]


@pytest.fixture(scope="session")
def listed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel that the launcher can choose, not compiled."""
    return made_once(tmp_path_factory, "list", "--list")


def of(kernels: list[dict[str, Any]], name: str, kernel: str = "") -> list[dict[str, Any]]:
    found = [one for one in kernels if one["arch"] == name and kernel in one["kernel"]]
    assert found, f"nothing was built for {name}"
    return found


def said(kernels: list[dict[str, Any]]) -> str:
    """Failing kernels, one a line."""
    return "\n" + "\n".join(
        f"{one['arch']} {one['op']}/{one['name']} {one['kernel']} {one['settings']}: {'; '.join(one['notes'])}"
        for one in kernels
    )


def why_not_fp8(one: dict[str, Any], operand: str) -> str | None:
    """Why the products of a kernel are not, or not all, of fp8 operands of type `operand`."""
    types = {side for dot in one["dots"] for side in (dot["lhs"], dot["rhs"])}
    if one["upcast"] or operand not in types:
        return f"asks for {one['dots_asked']}, multiplies {one['dots']}"
    takes_fp8 = ("fp8", "f8f6f4", "e4m3")
    if not any(name in mnemonic for mnemonic in one["matrix_instructions"] for name in takes_fp8):
        return f"no matrix instruction takes fp8: {one['matrix_instructions']}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


@pytest.mark.parametrize("name", ARCHS)
def test_kernels_compile(built: list[dict[str, Any]], name: str) -> None:
    failed = [one for one in of(built, name) if one["error"] is not None]
    assert not failed, said(failed)


@pytest.mark.parametrize("name", ARCHS)
def test_kernels_fit_shared_memory(built: list[dict[str, Any]], name: str) -> None:
    too_large = [one for one in of(built, name) if one["shared_bytes"] > build.TARGETS[name].shared_limit]
    assert not too_large, said(too_large)


MOST_SPILLED_ON_SM90 = {"e4m3fn-*": 64, "rows656-*-h64-*": 500, "rows656-*": 128, "bf16-h64-*": 320, "bf16-h32-*": 128}
"""Bytes, where the fastest settings measured on an H200 spill; at most 40 with triton 3.6, which measured them."""


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm90"])
def test_kernels_do_not_spill(built: list[dict[str, Any]], name: str) -> None:
    def most_bytes(call: str) -> int:
        bounds = MOST_SPILLED_ON_SM90.items() if name == "sm90" else ()
        return next((most for pattern, most in bounds if fnmatch.fnmatch(call, pattern)), 0)

    spilling = [one for one in of(built, name) if (one["resources"]["spill_bytes"] or 0) > most_bytes(one["name"])]
    assert not spilling, said(spilling)


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm90"])
def test_a_query_of_fp8_changes_nothing_about_the_keys(built: list[dict[str, Any]], name: str) -> None:
    """What the query was, before it is in the type that is multiplied, must not change the layout of the keys: on sm90
    their copies to shared memory would become loads into registers, which spill."""
    kernels = {one["name"]: one for one in of(built, name, "sparse_mla_kernel") if "dot8" in one["name"]}
    with_fp8 = [call for call in kernels if "-q8-" in call]
    assert len(with_fp8) >= 3  # calls that take the same kernel stand for one another
    for call in with_fp8:
        one, other = kernels[call], kernels[call.replace("-q8-", "-")]
        assert one["shared_bytes"] == other["shared_bytes"], said([one, other])


@pytest.mark.parametrize("name", ARCHS)
def test_attention_multiplies_on_matrix_units(built: list[dict[str, Any]], name: str) -> None:
    """All of its products, not just some: one that does not suit the unit's shapes is slow and says nothing."""
    kernels = of(built, name, "sparse_mla_kernel")
    without = [
        one
        for one in kernels
        if not one["matrix_instructions"]
        or len(one["dots"]) < 2
        or any("mma" not in dot["layout"] and "mfma" not in dot["layout"] for dot in one["dots"])
    ]
    assert not without, said(without)


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_fp8_dots_have_the_encoding_of_the_architecture(built: list[dict[str, Any]], name: str) -> None:
    """AMD multiplies values of 8 bits as well. One instruction name serves both encodings: only operand types tell."""
    kernels = [one for one in of(built, name, "sparse_mla_kernel") if "dot8" in one["name"]]
    assert len(kernels) >= len(SHAPES)
    for one in kernels:
        assert why_not_fp8(one, FP8_TYPE[name]) is None, said([one]) + f"\n{why_not_fp8(one, FP8_TYPE[name])}"
        types = {side for dot in one["dots"] for side in (dot["lhs"], dot["rhs"])}
        assert types == {FP8_TYPE[name]}, said([one]) + f"\n{types}"


@pytest.mark.parametrize("name", ["sm89", "sm120"])
def test_fp8_scores_are_of_fp8_operands(built: list[dict[str, Any]], name: str) -> None:
    """The scores only: values are converted."""
    kernels = [one for one in of(built, name, "sparse_mla_kernel") if "dot8" in one["name"]]
    assert kernels
    for one in kernels:
        assert why_not_fp8(one, FP8_TYPE[name]) is None, said([one]) + f"\n{why_not_fp8(one, FP8_TYPE[name])}"


def test_fp8_products_are_taken_in_fp16_on_hopper(built: list[dict[str, Any]]) -> None:
    """Where values are converted anyway and the query was rounded to fp8 before, fp16 products are the same numbers."""
    kernels = [one for one in of(built, "sm90", "sparse_mla_kernel") if "dot8" in one["name"]]
    assert len(kernels) >= len(SHAPES)
    for one in kernels:
        assert {side for dot in one["dots"] for side in (dot["lhs"], dot["rhs"])} == {"f16"}, said([one])


# ----------------------------------------------------------------------------------------------------------------------
# Settings


def test_settings_are_valid(listed: list[dict[str, Any]]) -> None:
    """A name with a slip in it would change nothing, and nobody would know."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), f"a name stands twice among {names}"
        return dict(pairs)

    text = ROOT.joinpath("sparse_mla_ops", "tuned.json").read_text(encoding="utf-8")
    table = json.loads(text, object_pairs_hook=no_duplicates)
    asked = {name for one in listed for name in one["shape_classes"]}
    assert set(table) <= set(arch.FP8_SUPPORT) - {"cpu"}
    for name, by_op in table.items():
        assert set(by_op) <= set(tuned.DEFAULTS), name
        for op, by_class in by_op.items():
            unknown = {f"{op}/{shape_class}" for shape_class in by_class} - asked
            assert not unknown, f"{name}, {op}: no call asks for {sorted(unknown)}"
            for shape_class, settings in by_class.items():
                where = f"{name}, {op}, {shape_class}"
                assert set(settings) <= set(tuned.DEFAULTS[op]), where
                for key, value in settings.items():
                    assert type(value) is int, where
                    assert value >= (key not in ("CONVERT", "SLOTS_FIRST")), where  # choices; the others are sizes
                    if key.startswith("BLOCK_") or key == "num_warps":
                        assert value & (value - 1) == 0, f"{where}: {key} is no power of two"


def test_every_class_that_is_asked_for_has_settings(listed: list[dict[str, Any]]) -> None:
    asked = {(one["arch"], shape_class) for one in listed for shape_class in one["shape_classes"]}
    assert {name for name, _ in asked} == set(ARCHS)
    for name, where in asked:
        op, _, shape_class = where.partition("/")
        assert set(tuned.settings(name, op, shape_class)) == set(tuned.DEFAULTS[op]), (name, where)


# ----------------------------------------------------------------------------------------------------------------------
# The tool


def test_upcast_is_seen(tmp_path: Path) -> None:
    """The types in the IR tell a product of fp8 from one of converted values, whoever converted them."""
    script = tmp_path / "kernels.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys
            import triton
            import triton.language as tl
            from sparse_mla_ops import build

            @triton.jit
            def kernel(a, b, out, UPCAST: tl.constexpr):
                row = tl.arange(0, 32)
                tile = row[:, None] * 32 + row[None, :]
                x, y = tl.load(a + tile), tl.load(b + tile)
                if UPCAST:
                    x, y = x.to(tl.float16), y.to(tl.float16)
                tl.store(out + tile, tl.dot(x, y))

            found = []
            for arch, element, upcast in json.loads(sys.argv[1]):
                signature = {"a": f"*{element}", "b": f"*{element}", "out": "*fp32", "UPCAST": "constexpr"}
                compiled = build.compile_kernel(kernel, signature, {(3,): upcast}, {}, arch)
                asked, dots = build.dots(compiled.asm["ttir"]), build.dots(compiled.asm["ttgir"])
                assembly, kind = (compiled.asm["amdgcn"], "hip") if arch[0] == "g" else (compiled.asm["ptx"], "cuda")
                found.append({
                    "dots_asked": [dot._asdict() for dot in asked],
                    "dots": [dot._asdict() for dot in dots],
                    "upcast": [dot._asdict() for dot in build.upcast_dots(asked, dots)],
                    "matrix_instructions": build.matrix_instructions(assembly, kind),
                })
            print(json.dumps(found))
            """
        )
    )
    wanted = [
        ("gfx942", "fp8e4b8", False),
        ("gfx950", "fp8e4nv", False),
        ("sm89", "fp8e4nv", False),
        ("gfx942", "fp8e4b8", True),
        ("gfx950", "fp8e4nv", True),
        ("sm89", "fp8e4nv", True),
        ("gfx942", "fp8e4nv", False),
    ]
    result = run(str(script), json.dumps(wanted))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for one, (name, _, _) in list(zip(found, wanted))[:3]:
        assert why_not_fp8(one, FP8_TYPE[name]) is None, (name, one)
    for one, (name, _, _) in list(zip(found, wanted))[3:6]:  # the source converts
        assert why_not_fp8(one, FP8_TYPE[name]), (name, one)
        assert {dot["lhs"] for dot in one["dots"]} == {"f16"}, (name, one)
    compilers = found[6]  # the compiler converts, as this unit does not know the encoding
    assert {dot["lhs"] for dot in compilers["dots_asked"]} == {"f8E4M3FN"}
    assert compilers["upcast"], compilers
    assert why_not_fp8(compilers, "f8E4M3FN"), compilers


def test_dots_are_read_off_the_ir() -> None:
    asynchronous = """
    #mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0}>
    #blocked = #ttg.blocked<{sizePerThread = [1, 4]}>
    #mfma = #ttg.amd_mfma<{version = 4}>
    %1 = ttng.warp_group_dot %a, %b, %c {isAsync = true} : !ttg.memdesc<64x512xf8E4M3FN, #shared, #smem> * \
!ttg.memdesc<512x64xf8E4M3FN, #shared1, #smem> -> tensor<64x64xf32, #mma> loc(#loc1)
    %2:3 = ttng.warp_group_dot_wait %1, %x {pendings = 0 : i32} : tensor<64x64xf32, #mma>
    %3 = tt.dot %d, %e, %f : tensor<16x16xf32, #ttg.dot_op<{opIdx = 0, parent = #blocked}>> * tensor<16x32xf16, \
#ttg.dot_op<{opIdx = 1, parent = #blocked}>> -> tensor<16x32xf32, #blocked> loc(#loc2)
    %4 = tt.dot_scaled %g scale %s, %h scale %t, %i lhs = e4m3 rhs = e4m3 {fastMath = false} : tensor<32x128xf8E4M3FN, \
#ttg.dot_op<{opIdx = 0, parent = #mfma}>>, tensor<32x4xi8, #linear> * tensor<128x32xf8E4M3FN, #ttg.dot_op<{opIdx = 1, \
parent = #mfma}>>, tensor<32x4xi8, #linear> -> tensor<32x32xf32, #mfma> loc(#loc3)
    """
    found = build.dots(textwrap.dedent(asynchronous))
    assert found == (
        build.Dot("f8E4M3FN", "f8E4M3FN", "nvidia_mma"),
        build.Dot("f32", "f16", "blocked"),
        build.Dot("f8E4M3FN", "f8E4M3FN", "amd_mfma"),
    )
    assert [dot.on_matrix_unit for dot in found] == [True, False, True]
    fp8, fnuz, f16 = (build.Dot(element, element, "") for element in ("f8E4M3FN", "f8E4M3FNUZ", "f16"))
    assert build.upcast_dots([fp8, fp8], found) == ()
    assert build.upcast_dots([fp8, fp8, fp8], found) == (fp8,), "one of three was converted"
    assert build.upcast_dots([fnuz, f16], found) == (fnuz,)


@pytest.mark.parametrize(
    ("name", "registers", "shared", "num_warps", "programs"),
    [
        ("gfx942", 128, 0, 4, 4),  # 512 registers hold 4 waves on each SIMD
        ("gfx942", 129, 0, 4, 3),  # given out by 8
        ("gfx942", 24, 16 * 1024, 4, 4),  # 64 KiB hold 4
        ("gfx942", 24, 0, 4, 8),
        ("gfx942", 24, 64 * 1024 + 1, 4, 0),
        ("gfx950", 512, 64 * 1024, 8, 0),  # 8 waves are 2 on each SIMD
        ("sm90", 255, 0, 8, 1),
        ("sm90", 128, 114 * 1024, 4, 1),  # each program takes 1 KiB more
        ("sm90", 128, 113 * 1024, 4, 2),
        ("sm89", 32, 0, 4, 12),
    ],
)
def test_occupancy(name: str, registers: int, shared: int, num_warps: int, programs: int) -> None:
    assert build.programs_per_multiprocessor(name, registers, shared, num_warps) == programs


def specialisation(kernel: str) -> build.Specialisation:
    return build.Specialisation("op", kernel, "sm90", kernel, (), {}, {}, {}, {}, {})


def test_compiler_that_ends_its_process_fails_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("ends_its_process.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernels = ("json:nothing", "ends_its_process:kernel", "json:nothing")
    done: list[build.Built] = []
    results = build.build_all([specialisation(kernel) for kernel in kernels], jobs=2, on_done=done.append)
    assert [one.name for one in results] == list(kernels)
    assert "AttributeError" in (results[0].error or "")
    assert "ended its process" in (results[1].error or "")
    assert "AttributeError" in (results[2].error or "")
    assert len(done) == 3
    assert build.Report(tuple(results), ()).failures == tuple(results)


def test_report_says_what_is_wrong() -> None:
    fine = build.Built("op", "fine", "sm90", "kernel", (), {"BLOCK_N": 64, "num_warps": 4}, 1.0, shared_limit=9)
    large = build.Built("op", "large", "sm90", "kernel", (), {}, 1.0, shared_bytes=10, shared_limit=9)
    spills = build.Built("op", "spills", "sm90", "kernel", (), {}, 1.0, resources=build.Resources(255, 0, 0, 40))
    report = build.Report((fine, large, spills), (build.Skipped("op", "refused", "sm80", "no fp8"),))
    assert report.failures == (large,)
    text = build.table(report)
    for part in ("N64 w4", "OVER THE LIMIT of 9 bytes", "spills 40 bytes", "refused", "no fp8", "1 spill, 1 do not"):
        assert part in text, text
    assert json.loads(json.dumps(report.to_json()))["built"][1]["fits"] is False


def test_interpreted_kernels_cannot_be_built() -> None:
    result = run_build("--arch", "sm90", TRITON_INTERPRET="1")
    assert result.returncode == 2
    assert "TRITON_INTERPRET" in result.stderr
    assert "Unset it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "gfx1"), "unknown architecture 'gfx1'; expected one of gfx942, "),
        (("--op", "attention"), "unknown operator attention; expected some of concat_and_cache_mla, "),
        (("--arch", "sm90", "--only", "nothing"), "no call has such a name"),
    ],
)
def test_wrong_names_are_errors(arguments: tuple[str, ...], message: str) -> None:
    result = run_build(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The other commands


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (*(backend.name for backend in registry.BACKENDS), *arch.FP8_SUPPORT, registry.support_matrix()):
        assert part in text


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", "rotary_embedding-bf16", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "rotary_embedding: runs on reference" in text
    assert "not triton: slow on cpu tensors" in text
    assert command_line.main(["explain", "rotary_embeding"]) == 2
    assert "close: rotary_embedding" in capsys.readouterr().err
