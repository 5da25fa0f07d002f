"""`bench` on a CPU: what it prints, writes and counts, whom it refuses, how it searches. Times are not judged."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import os
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_mla_ops import bench, tuned
from sparse_mla_ops.bench import AttentionShape, Runner, ShapeClass, WriteShape
from sparse_mla_ops.ops import _register

CPU = torch.device("cpu")
SMALL = AttentionShape("decode", 3, 4, 576, "bf16", keys=16, pool=128)
TUNED = resources.files("sparse_mla_ops").joinpath("tuned.json").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ----------------------------------------------------------------------------------------------------------------------
# A run


def test_run_prints_a_table_and_writes_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.csv"
    assert bench.main(["--csv", str(path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("# device cpu (cpu), driver none")
    assert f"torch {torch.__version__}" in lines[1]
    assert "small shapes on the reference backend, timed on the host" in lines[2]
    assert "TB/s, bf16 matmul" in lines[3]
    for title in ("µs", "±IQR", "TFLOP/s", "TB/s", "limit", "error", "/ours"):
        assert out.count(f" {title}") >= 2  # a table for each operator
    count = len(bench.CPU_SHAPES)
    assert f"[{count}/{count}] {bench.CPU_SHAPES[-1].name}" in err

    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames or ()) == bench.CSV_KEYS
        rows = list(reader)
    for row in rows:
        assert any(line.startswith(f"{row['shape']} ") and f" {row['contender']} " in line for line in lines)
        assert (row["us"] == "") == (row["note"] != "")
    for shape in bench.CPU_SHAPES:
        (ours,) = (row for row in rows if row["shape"] == shape.name and row["kind"] == "ours")
        assert ours["contender"] == "reference"
        assert (ours["timing"], ours["device"], float(ours["over_ours"])) == ("cpu", "cpu", 1.0)
        assert float(ours["us"]) > 0
        dots = getattr(shape, "dots", None)
        limit = 0.0 if isinstance(shape, WriteShape) else 0.06 if dots == "fp8" else 0.005
        assert float(ours["error"]) <= limit
    eager = [row for row in rows if row["contender"] == "eager"]
    assert [float(row["error"]) for row in eager] == [0.0, 0.0, 0.0]
    assert " bitwise " in out


def test_only_and_operator_names_choose_rows(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["sparse_mla_fwd", "--only", "prefill"]) == 0
    out = capsys.readouterr().out
    assert "prefill-bf16" in out
    assert "decode-" not in out
    assert "write-" not in out


def test_plot_is_written(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    path = tmp_path / "rows.png"
    assert bench.main(["--only", "bf16-H4", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib.*sparse_mla_ops\[bench\]"):
        bench.main(["--plot", str(tmp_path / "rows.png")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "no shapes for softmax; there are some for sparse_mla_fwd, fused_qk_rope"),
        (["--only", "H99"], "no shape has 'H99' in its name; there are: decode-"),
    ],
)
def test_unknown_names_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


def measured(shape: bench.Shape, folder: Path | None = None) -> dict[str, bench.Row]:
    rows = bench.measure_shape(shape, CPU, bench.Peers(folder), bench.Ceilings(1e9, 1e9))
    return {row.contender: row for row in rows}


def test_peers_that_cannot_run_say_why(tmp_path: Path):
    shape = dataclasses.replace(SMALL, width=512)
    assert measured(shape)["flashmla-h4"].note == "needs --peers DIR, a folder with _flashmla_C.abi3.so"
    assert measured(shape, tmp_path)["flashmla-h64"].note.endswith("has no _flashmla_C.abi3.so")
    (tmp_path / "_flashmla_C.abi3.so").touch()
    (tmp_path / "rocm_aiter_mla_sparse.py").write_text("def something_else():\n    pass\n")
    rows = measured(shape, tmp_path)
    assert rows["flashmla-h4"].note == "FlashMLA runs on NVIDIA GPUs only"
    assert rows["vllm-triton"].note.startswith("rocm_aiter_mla_sparse.py of this version has no _rocm_sparse_attn")
    line = bench.format_row(rows["vllm-triton"])
    assert "vllm-triton" in line
    assert "not measured: rocm_aiter" in line


def test_backend_that_refuses_or_breaks_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    backends = (
        bench.registry.Backend("triton", "sparse_mla_ops.no_such_module", ("cpu",), ("cpu",)),
        bench.registry.BACKENDS[-1],
    )
    monkeypatch.setattr(bench.registry, "BACKENDS", backends)
    rows = measured(SMALL)
    assert "importing sparse_mla_ops.no_such_module failed" in rows["triton"].note
    assert rows["triton"].us is None
    assert rows["reference"].over_ours == 1.0

    def broken(*_: Any) -> bench.Prepared:
        raise OSError("first line\nsecond line")

    monkeypatch.setattr(bench.Peers, "flashmla", broken)
    assert measured(SMALL)["flashmla-h4"].note == "OSError: first line"


def test_only_a_wrong_result_has_a_large_error():
    inputs = bench.AttentionInputs(SMALL, CPU)
    out = bench._caller(SMALL, inputs.arguments, None)(0)
    assert inputs.error(lambda: out) < 0.005
    padded = torch.nn.functional.pad(out, (0, 0, 0, 60), value=math.nan)
    assert inputs.error(lambda: padded) < 0.005  # heads that were added do not count
    wrong = out.clone()
    wrong[2, 1] *= 1.1
    assert inputs.error(lambda: wrong) == pytest.approx(0.1, abs=0.01)
    wrong[2, 1, 5] = math.nan
    assert math.isnan(inputs.error(lambda: wrong))


@pytest.mark.parametrize("cache", ["bf16", "fp8", "fp8_ds_mla"])
def test_cache_write_is_compared_bit_for_bit(cache: str):
    shape = WriteShape(cache, 5, 2, pool=128)
    inputs = bench.WriteInputs(shape, CPU)
    call = bench._caller(shape, inputs.arguments, None)
    assert inputs.error(lambda: call(0)) == 0.0
    assert inputs.error(lambda: bench.plain_split_path(**inputs.arguments(0))) == 0.0
    assert inputs.error(lambda: call(1)) > 0.1  # another set: other rows of the cache, another query

    def one_row_missing() -> torch.Tensor:
        out = call(0)
        inputs.cache.view(-1, inputs.cache.shape[-1])[inputs.slots[0][4]] = 0
        return out

    assert inputs.error(one_row_missing) > 0.1


def test_write_inputs_are_what_a_model_hands_over():
    inputs = bench.WriteInputs(WriteShape("bf16", 5, 2, pool=128), CPU)
    assert inputs.q_nope[0].stride() == (512, 5 * 512, 1)
    slots = torch.cat(inputs.slots)
    assert len(slots.unique()) == len(slots)


def test_functions_are_taken_with_what_they_use(tmp_path: Path):
    (tmp_path / "big.py").write_text(
        "import not_installed\n\nLIMIT = 3\nUNUSED = not_installed.x\n\n\n"
        "def helper(x):\n    return min(x, LIMIT)\n\n\n"
        "@functools.cache\ndef entry(x):\n    return helper(x) + math.floor(0.5)\n"
    )
    pytest.importorskip("triton", reason="triton is not installed")
    module = bench._extract(tmp_path / "big.py", ["entry"])
    assert module.entry(7) == 3
    assert not hasattr(module, "UNUSED")
    assert [path.name for path in tmp_path.iterdir()] == ["big.py"]


# ----------------------------------------------------------------------------------------------------------------------
# Formulas


def test_attention_work_by_hand():
    shape = AttentionShape("prefill", 4096, 16, 512, "bf16")
    # 4096 rows of 2048 keys of 1024 bytes; 16 heads, 512 multiply-adds for a score and 512 for the output.
    assert shape.work == (4096 * 2048 * 16 * 2 * 1024, 4096 * 2048 * 1024)
    assert AttentionShape("decode", 2, 16, 512, "fp8").work.bytes == 2 * 2048 * 512
    shape = AttentionShape("decode", 16, 64, 576, "fp8_ds_mla")
    assert shape.work == (16 * 2048 * 64 * 2 * (576 + 512), 16 * 2048 * 656)


def test_write_work_by_hand():
    # Read and written: 16 heads of 576; KV: 1152 bytes in, a row out.
    assert WriteShape("bf16", 64, 16).work == (0, 64 * (16 * 576 * 4 + 1152 + 1152))
    assert WriteShape("fp8", 64, 16).work == (0, 64 * (16 * 576 * 3 + 1152 + 576))
    assert WriteShape("fp8_ds_mla", 1, 16).work == (0, 16 * 576 * 4 + 1152 + 656)


def test_floor_is_the_slower_of_bytes_and_flops():
    ceilings = bench.Ceilings(bytes_per_s=4e12, flops_per_s=8e14)
    assert ceilings.floor_us(bench.Work(flops=8e8, bytes=1e7)) == pytest.approx(2.5)
    assert ceilings.floor_us(bench.Work(flops=8e9, bytes=1e7)) == pytest.approx(10.0)


def test_rates_and_ratios_follow_from_the_median(monkeypatch: pytest.MonkeyPatch):
    times = {"reference": [9.0, 10.0, 11.0], "slow": [40.0, 20.0, 30.0]}
    names = iter(times)

    def make_runner(call: bench.CallSet, calls: int, device: torch.device) -> Runner:
        name = next(names)
        return Runner(lambda: times[name], lambda: call(0), call)

    monkeypatch.setattr(bench, "make_runner", make_runner)
    prepared = bench.Prepared(lambda i: torch.zeros(1), lambda run: 0.5)
    work = bench.Work(flops=2e6, bytes=1e4)
    monkeypatch.setattr(
        AttentionShape,
        "contenders",
        lambda *_: (
            bench.Contender(name, kind, work, lambda: prepared)
            for name, kind in (("reference", "ours"), ("slow", "peer"))
        ),
    )
    rows = measured(SMALL)
    ours, slow = rows["reference"], rows["slow"]
    assert (ours.us, slow.us, slow.over_ours, slow.error) == (10.0, 30.0, 3.0, 0.5)
    assert ours.tflops == pytest.approx(0.2)  # 2e6 FLOP in 1e-5 s
    assert ours.tb_per_s == pytest.approx(1e-3)
    assert ours.share_of_limit == pytest.approx(2e6 / 1e9 / 1e-5)
    assert ours.samples == 9


def test_best_of_the_head_counts_is_a_row_of_its_own():
    rows = {
        name: bench.Row("op", "s", name, "peer", "graph", us=us)
        for name, us in (("flashmla-h16", 200.0), ("flashmla-h64", 60.0))
    }
    bench._add_best_of(rows, "flashmla-h", "flashmla-best")
    assert (rows["flashmla-best"].us, rows["flashmla-best"].note) == (60.0, "is flashmla-h64")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let a process choose its core")
def test_host_time_is_that_of_the_least_disturbed_core(monkeypatch: pytest.MonkeyPatch):
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)[:16]
    now = [0.0]

    def perf_counter() -> float:
        (core,) = os.sched_getaffinity(0)
        now[0] += 1e-3 * (1 + core)  # burst of 10 calls on core 0: 1 ms, on core 1: 2 ms
        return now[0]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench.time, "perf_counter", perf_counter)
    row = bench.measure_host(WriteShape("bf16", 1, 2, pool=128), 30.0, CPU)
    assert row.us == pytest.approx(100.0 * (1 + cores[0]))
    assert f"slowest of {len(cores)} cores {100.0 * (1 + cores[-1]):.1f} µs" in row.note
    assert os.sched_getaffinity(0) == allowed


# ----------------------------------------------------------------------------------------------------------------------
# Tuning


def test_tune_needs_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--tune"]) == 1
    assert "--tune needs a GPU" in capsys.readouterr().err


def test_tuned_json_is_kept_in_the_form_in_which_it_is_written():
    assert bench.format_tuned(json.loads(TUNED)) == TUNED


SPLIT = ShapeClass("sm90", "sparse_mla_fwd", "16bit-h16-split")
CURRENT = {
    "BLOCK_N": 64,
    "BLOCK_G": 128,
    "SLOTS_FIRST": 0,
    "num_warps": 4,
    "num_stages": 2,
    "programs_per_sm": 1,
    "min_keys": 64,
}


def test_candidates_are_the_whole_grid_nearest_first():
    every = bench.candidates(SPLIT, CURRENT)
    assert every[0] == CURRENT
    assert len(every) == len({tuple(c.items()) for c in every}) == 4 * 4 * 2 * 3 * 3 * 3 * 2
    changes = [sum(c[key] != CURRENT[key] for key in c) for c in every]
    assert changes == sorted(changes)
    assert bench.candidates(SPLIT._replace(name="16bit-h16-few"), CURRENT) == every
    whole = bench.candidates(SPLIT._replace(name="16bit-h16-whole"), CURRENT)
    assert len(whole) == 4 * 4 * 2 * 3 * 2
    assert set(whole[0]) == {"BLOCK_N", "BLOCK_G", "SLOTS_FIRST", "num_warps", "num_stages"}
    for converted in ("fp8-h16-whole", "ds_mla-h16-whole"):
        fp8 = bench.candidates(SPLIT._replace(name=converted), {**CURRENT, "CONVERT": 3, "VECTOR": 8})
        assert len(fp8) == 4 * 2 * len(whole)
        assert fp8[0]["CONVERT"] == 3
        assert fp8[0]["VECTOR"] == 8


def test_few_rows_take_the_settings_of_a_split_call_where_they_have_none():
    few = SPLIT._replace(arch="gfx942", name="16bit-h16-few")
    assert tuned.settings(*few) == tuned.settings(*few._replace(name="16bit-h16-split"))
    assert tuned.settings(*SPLIT) != tuned.settings(*SPLIT._replace(name="16bit-h16-few"))


def test_settings_hold_within_the_block_only():
    pytest.importorskip("triton", reason="triton is not installed")
    before = tuned.settings(*SPLIT)
    other = ShapeClass("sm90", "cache_write", "few-rows")
    usual = tuned.settings(*other)
    with tuned.watch({SPLIT: {"BLOCK_N": 7}}) as asked:
        assert tuned.settings(*SPLIT) == {**before, "BLOCK_N": 7}
        assert tuned.settings(*other) == usual
    assert asked == [SPLIT, other]
    assert tuned.settings(*SPLIT) == before


def test_known_calls_are_not_repeated_with_settings_of_another_block(monkeypatch: pytest.MonkeyPatch):
    """A plan holds the kernel of the settings that it was made with: a search that met one would time it for all."""
    plans: dict[Any, Any] = {"before the block": None}
    monkeypatch.setattr(_register, "_all_plans", [plans])
    with bench.settings_as(SPLIT, {"BLOCK_N": 7}):
        assert not plans
        plans["within the block"] = None
    assert not plans


@pytest.mark.parametrize(
    ("shape", "kernel", "name"),
    [
        (AttentionShape("decode", 16, 16, 512, "bf16", pool=128), "sparse_mla_fwd", "16bit-h16-few"),
        (AttentionShape("decode", 17, 16, 512, "bf16", pool=128), "sparse_mla_fwd", "16bit-h16-split"),
        (AttentionShape("decode", 2, 128, 576, "fp8", "bf16", pool=128), "sparse_mla_fwd", "fp8-h16-few"),
        (AttentionShape("decode", 131, 64, 576, "fp8_ds_mla", pool=128), "sparse_mla_fwd", "ds_mla-h64-split"),
        (AttentionShape("prefill", 132, 32, 576, "bf16", pool=128), "sparse_mla_fwd", "16bit-h32-whole"),
        (WriteShape("bf16", 1, 16, pool=128), "cache_write", "few-rows"),
    ],
)
def test_class_of_a_shape_is_what_the_backend_looks_up(shape: bench.Shape, kernel: str, name: str):
    backend = pytest.importorskip("sparse_mla_ops.backends.triton", reason="triton is not installed")
    with backend.pretend_device(backend.Device("sm90", 132)):
        assert bench.class_of(shape, CPU) == ShapeClass("sm90", kernel, name)


class FakeTuner(bench.Tuner):
    """Times come from the settings; BLOCK_N = 128 cannot run, and one fast choice is wrong."""

    def _runner(self, at: int, settings: bench.Settings) -> Runner:
        if settings["BLOCK_N"] == 128:
            raise RuntimeError("out of resource: shared memory")
        us = 10.0 * (at + 1)
        us *= {16: 2.0, 32: 0.9, 64: 1.0}[settings["BLOCK_N"]] * {4: 1.0, 8: 0.8}[settings["num_warps"]]
        wrong = settings["num_warps"] == 8 and settings["num_stages"] == 1
        if wrong:
            us *= 0.5
        out = self.right * (2.0 if wrong else 1.0)
        return Runner(lambda: [us], lambda: out, lambda _: out)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(bench, "PAUSE_S", 0.0)
    shape = dataclasses.replace(SMALL, rows=2)
    tuner = FakeTuner(SPLIT, [shape, shape], CPU)
    tuner.current = dict(CURRENT)
    tuner.right = bench._caller(shape, tuner.inputs[0].arguments, None)(0)
    return tuner


def test_search_finds_the_fastest_settings_that_are_right(tuner: FakeTuner):
    said: list[str] = []
    best = tuner.search(1e9, said.append)
    assert (best["BLOCK_N"], best["num_warps"]) == (32, 8)
    assert best["num_stages"] != 1
    assert "tried 1728 of 1728 candidates" in said[0]
    # 432 with BLOCK_N = 128, and 216 that are wrong, of which those with BLOCK_N = 16 may be given up as slow before.
    assert re.search(r"\((576|648) could not run", said[0])
    assert any("7.20 µs" in line and "10.00 µs" in line for line in said)


def test_search_out_of_time_has_tried_the_current_settings(tuner: FakeTuner):
    said: list[str] = []
    assert tuner.search(0.0, said.append) == CURRENT
    assert "tried 1 of 1728" in said[0]


def test_found_settings_are_written_class_by_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("triton", reason="triton is not installed")
    path = tmp_path / "tuned.json"
    table = json.loads(TUNED)
    table["sm90"]["sparse_mla_fwd"]["16bit-h16-split"]["OUTSIDE_THE_GRID"] = 5
    before_tuning = bench.format_tuned(table)
    path.write_text(before_tuning)
    classes = itertools.cycle([SPLIT, ShapeClass("sm90", "cache_write", "few-rows")])
    monkeypatch.setattr(bench, "class_of", lambda shape, device: next(classes))
    monkeypatch.setattr(bench.Tuner, "search", lambda self, seconds, say: {**self.current, "num_warps": 16})
    shapes = (SMALL, WriteShape("bf16", 2, 2, pool=128))
    assert bench.tune(shapes, "no-such", 1.0, CPU, path) == 2
    assert path.read_text() == before_tuning
    assert bench.tune(shapes, "16bit-h16", 1.0, CPU, path) == 0
    after = json.loads(path.read_text())
    table["sm90"]["sparse_mla_fwd"]["16bit-h16-split"] |= {"num_warps": 16, "SLOTS_FIRST": 0}  # found, and as it is
    assert after == table
