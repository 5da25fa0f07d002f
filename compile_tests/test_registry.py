"""Which backend runs, what is said when none can, and what users may set.

The backends here are tiny modules: each fills the outputs of an operator with a number of its own.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_mla_ops
from sparse_mla_ops import registry, testing
from sparse_mla_ops.registry import Backend, BackendUnavailable, Policy, explain, read_policy, use_backend

OP = "rotary_embedding"
ARGUMENTS = testing.OpCase(OP, "bf16").arguments()
CPU, CPU_CUDA = ("cpu",), ("cpu", "cuda")


def filling(value: int) -> Callable[..., None]:
    def fill(q_out: torch.Tensor, k_out: torch.Tensor, *arguments: Any) -> None:
        q_out.fill_(value)
        k_out.fill_(value)

    return fill


def module(**functions: Callable[..., Any]) -> ModuleType:
    result = ModuleType("a_backend_of_the_tests")
    vars(result).update(functions)
    return result


def entry(
    name: str, *, devices: tuple[str, ...] = CPU_CUDA, auto_devices: tuple[str, ...] | None = None, **functions: Any
) -> tuple[Backend, ModuleType]:
    backend = Backend(name, f"backends_of_the_tests.{name}", devices, devices if auto_devices is None else auto_devices)
    return backend, module(**functions)


def ran() -> int:
    """The number of the backend that runs a call which names none."""
    return int(sparse_mla_ops.rotary_embedding(**ARGUMENTS)[0].flatten()[0])


ONE = entry("one", rotary_embedding=filling(1))
TWO = entry("two", rotary_embedding=filling(2))
THREE = entry("three", rotary_embedding=filling(3))


@pytest.fixture
def three_backends() -> Iterator[None]:
    with testing.backends_replaced(ONE, TWO, THREE):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Order


@pytest.mark.usefixtures("three_backends")
def test_first_usable_backend_runs() -> None:
    assert ran() == 1


def test_backend_that_refuses_is_passed_over() -> None:
    refusing = entry("refusing", rotary_embedding=filling(9), why_not_rotary_embedding=lambda *_: "not today")
    with testing.backends_replaced(refusing, TWO):
        assert ran() == 2


def test_backend_that_does_not_refuse_runs() -> None:
    willing = entry("willing", rotary_embedding=filling(9), why_not_rotary_embedding=lambda *_: None)
    with testing.backends_replaced(willing, TWO):
        assert ran() == 9


def test_policy_sets_the_order() -> None:
    with testing.backends_replaced(ONE, TWO, THREE, order=("three", "one")):
        assert ran() == 3


def test_why_not_gets_the_arguments_without_backend() -> None:
    seen: list[tuple[Any, ...]] = []
    asking = entry("asking", rotary_embedding=filling(1), why_not_rotary_embedding=lambda *args: seen.append(args))
    with testing.backends_replaced(asking):
        sparse_mla_ops.rotary_embedding(**ARGUMENTS, backend="asking")
    (arguments,) = seen
    assert len(arguments) == len(ARGUMENTS)
    assert all(
        given is expected or torch.equal(given, expected) for given, expected in zip(arguments, ARGUMENTS.values())
    )


def test_backend_left_out_by_policy_is_never_imported() -> None:
    """Importing a broken library can do harm, so leaving it out must keep it out."""
    absent = Backend("absent", "backends_of_the_tests.absent", CPU, CPU)
    with testing.backends_replaced((absent, None), TWO, order=("two",)):
        assert ran() == 2
        with pytest.raises(BackendUnavailable, match="absent: left out by SPARSE_MLA_OPS_BACKENDS"):
            sparse_mla_ops.rotary_embedding(**ARGUMENTS, backend="absent")
        assert explain(OP, **ARGUMENTS).reasons == {"absent": "left out by SPARSE_MLA_OPS_BACKENDS"}
        assert registry._load.cache_info().currsize == 1


# ----------------------------------------------------------------------------------------------------------------------
# A named backend


@pytest.mark.usefixtures("three_backends")
def test_named_backend_runs() -> None:
    assert int(sparse_mla_ops.rotary_embedding(**ARGUMENTS, backend="two")[0].flatten()[0]) == 2


def test_named_backend_never_falls_back() -> None:
    refusing = entry("refusing", rotary_embedding=filling(9), why_not_rotary_embedding=lambda *_: "not today")
    with testing.backends_replaced(refusing, TWO), pytest.raises(BackendUnavailable) as caught:
        sparse_mla_ops.rotary_embedding(**ARGUMENTS, backend="refusing")
    assert caught.value.reasons == {"refusing": "not today"}
    assert "backend 'refusing' was asked for and cannot run this call; a named backend never falls back" in str(
        caught.value
    )
    assert "leave the backend out" in str(caught.value)


@pytest.mark.usefixtures("three_backends")
def test_unknown_backend_names_those_there_are() -> None:
    message = "unknown backend 'four'; this version has: one, two, three"
    with pytest.raises(ValueError, match=f"backend: {message}"):
        sparse_mla_ops.rotary_embedding(**ARGUMENTS, backend="four")
    with pytest.raises(ValueError, match=f"use_backend: {message}"), use_backend("one", "four"):
        pass
    with pytest.raises(ValueError, match=f"backend: {message}"):
        explain(OP, **ARGUMENTS, backend="four")


# ----------------------------------------------------------------------------------------------------------------------
# No backend


def test_every_backend_gives_its_reason_when_none_can_run() -> None:
    table = (
        (Backend("broken", "backends_of_the_tests.broken", CPU, CPU), None),
        entry("without-op", concat_mla_q=filling(1)),
        entry("refusing", rotary_embedding=filling(1), why_not_rotary_embedding=lambda *_: "heads: not 3"),
        entry("gpu", devices=("cuda",), rotary_embedding=filling(1)),
        entry("slow", devices=CPU, auto_devices=(), rotary_embedding=filling(1)),
    )
    with testing.backends_replaced(*table), pytest.raises(BackendUnavailable) as caught:
        ran()
    reasons = caught.value.reasons
    assert list(reasons) == ["broken", "without-op", "refusing", "gpu", "slow"]
    assert reasons["broken"].startswith("importing backends_of_the_tests.broken failed: ModuleNotFoundError: ")
    assert reasons["without-op"] == "does not implement rotary_embedding"
    assert reasons["refusing"] == "heads: not 3"
    assert reasons["gpu"] == "does not run on cpu tensors"
    assert reasons["slow"] == "slow on cpu tensors, so it runs there only when it is named"
    message = str(caught.value)
    assert message.startswith("rotary_embedding: no backend can run this call\n")
    assert all(f"  {name}: {reason}" in message for name, reason in reasons.items())
    assert "What to do: " in message
    assert caught.value.op == OP


@pytest.mark.parametrize("error", ["raise OSError('libhip.so: not found')", "import a_module_that_is_not_there", "1 +"])
def test_module_that_breaks_at_import_is_a_reason(tmp_path: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built for another torch or driver may raise anything."""
    (tmp_path / "broken_backend.py").write_text(error)
    monkeypatch.syspath_prepend(tmp_path)
    broken = Backend("broken", "broken_backend", CPU, CPU)
    with testing.backends_replaced((broken, None), TWO):
        assert ran() == 2
        reason = explain(OP, **ARGUMENTS).reasons["broken"]
    assert reason.startswith("importing broken_backend failed: ")
    assert any(kind in reason for kind in ("OSError: libhip.so: not found", "ModuleNotFoundError", "SyntaxError"))


def test_import_is_tried_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "imports"
    (tmp_path / "counting_backend.py").write_text(f"open({str(log)!r}, 'a').write('x')\nraise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    with testing.backends_replaced((Backend("counting", "counting_backend", CPU, CPU), None), TWO):
        for _ in range(3):
            ran()
    assert log.read_text() == "x"


def test_reference_is_taken_on_a_gpu_only_when_it_is_named() -> None:
    """On a GPU it is a hundred times slower than a kernel, which must not happen without a word."""
    arguments = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]  # the choice looks no further than the device
    with pytest.raises(BackendUnavailable) as caught:
        registry.pick("mqa_logits", arguments)  # which no other backend has
    assert caught.value.reasons["reference"] == "slow on cuda tensors, so it runs there only when it is named"
    reference = importlib.import_module("sparse_mla_ops.backends.reference").mqa_logits
    assert registry.pick("mqa_logits", arguments, "reference") is reference
    with use_backend("triton", "reference"):
        assert registry.pick("mqa_logits", arguments) is reference


def test_device_that_no_backend_knows_is_refused() -> None:
    arguments = [SimpleNamespace(device=SimpleNamespace(type="xpu"))]
    with pytest.raises(BackendUnavailable, match="reference: does not run on xpu tensors"):
        registry.pick(OP, arguments)


# ----------------------------------------------------------------------------------------------------------------------
# use_backend


@pytest.mark.usefixtures("three_backends")
def test_use_backend_holds_within_the_block_only() -> None:
    with use_backend("two"):
        assert ran() == 2
    assert ran() == 1


@pytest.mark.usefixtures("three_backends")
def test_use_backend_nests() -> None:
    with use_backend("two"):
        with use_backend("three"):
            assert ran() == 3
        assert ran() == 2


@pytest.mark.usefixtures("three_backends")
def test_use_backend_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("two"):
        raise KeyError
    assert ran() == 1


@pytest.mark.usefixtures("three_backends")
def test_call_that_names_a_backend_keeps_it() -> None:
    with use_backend("two"):
        assert int(sparse_mla_ops.rotary_embedding(**ARGUMENTS, backend="three")[0].flatten()[0]) == 3


def test_use_backend_with_one_name_never_falls_back() -> None:
    message = "backend 'empty' was asked for"
    table = testing.backends_replaced(entry("empty"), TWO)
    with table, use_backend("empty"), pytest.raises(BackendUnavailable, match=message):
        ran()


def test_use_backend_with_several_names_replaces_the_order() -> None:
    with testing.backends_replaced(entry("empty"), ONE, TWO), use_backend("empty", "two"):
        assert ran() == 2


def test_use_backend_takes_nothing_that_policy_leaves_out() -> None:
    message = "two: left out by SPARSE_MLA_OPS_BACKENDS"
    table = testing.backends_replaced(ONE, TWO, order=("one",))
    with table, use_backend("two"), pytest.raises(BackendUnavailable, match=message):
        ran()


@pytest.mark.usefixtures("three_backends")
def test_use_backend_is_of_one_thread() -> None:
    results: dict[str, int] = {}

    def other() -> None:
        results["without"] = ran()
        with use_backend("three"):
            results["with"] = ran()
            inside.set()
            leave.wait(10)

    inside, leave = threading.Event(), threading.Event()
    with use_backend("two"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        results["meanwhile"] = ran()
        leave.set()
        thread.join()
    assert results == {"without": 1, "with": 3, "meanwhile": 2}


def test_use_backend_wants_a_name() -> None:
    with pytest.raises(ValueError, match="use_backend: expected at least one backend name"), use_backend():
        pass


@pytest.mark.usefixtures("three_backends")
def test_record_choices_tells_what_ran() -> None:
    with registry.record_choices() as choices:
        ran()
        with use_backend("two"):
            ran()
    ran()
    assert choices == {OP: "two"}


# ----------------------------------------------------------------------------------------------------------------------
# explain


def test_explain_names_the_backend_and_why_not_the_others() -> None:
    table = (entry("empty"), TWO, THREE)
    with testing.backends_replaced(*table):
        explanation = explain(OP, **ARGUMENTS)
        assert explanation == explain(sparse_mla_ops.rotary_embedding, *ARGUMENTS.values())
    assert (explanation.op, explanation.backend) == (OP, "two")
    assert explanation.reasons == {
        "empty": "does not implement rotary_embedding",
        "three": "can run this call, but two comes first",
    }
    assert str(explanation).splitlines() == [
        "rotary_embedding: runs on two",
        "  not empty: does not implement rotary_embedding",
        "  not three: can run this call, but two comes first",
    ]


def test_explain_says_that_nothing_can_run() -> None:
    with testing.backends_replaced(entry("empty")):
        explanation = explain(OP, **ARGUMENTS)
    assert explanation.backend is None
    assert str(explanation).startswith("rotary_embedding: no backend can run this call\n")


@pytest.mark.usefixtures("three_backends")
def test_explain_knows_named_and_overriding_backends() -> None:
    assert explain(OP, **ARGUMENTS, backend="two").backend == "two"
    assert explain(OP, **ARGUMENTS, backend="two").reasons["one"] == "'two' was asked for"
    with use_backend("three"):
        assert explain(OP, **ARGUMENTS).backend == "three"
    with use_backend("three", "two"):
        explanation = explain(OP, **ARGUMENTS)
    assert explanation.backend == "three"
    assert explanation.reasons["one"] == "not in the order in force"


def test_explain_agrees_with_the_choice_and_runs_nothing() -> None:
    case = testing.OpCase("concat_and_cache_mla", "bf16")
    arguments = case.arguments()
    before = testing.copy_arguments(arguments)
    explanation = explain(case.op, **arguments)
    assert testing.same_bits(arguments["kv_cache"], before["kv_cache"])
    with registry.record_choices() as choices:
        case.function(**arguments)
    assert choices == {case.op: explanation.backend}


def test_explain_of_an_unknown_operator_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"explain: unknown operator 'flash_mla'; expected one of .*sparse_mla_fwd"):
        explain("flash_mla")


def test_support_matrix_has_a_row_per_operator_and_a_column_per_backend() -> None:
    with testing.backends_replaced(ONE, entry("empty")):
        header, rule, *rows = registry.support_matrix().splitlines()
    assert header == "| operator | one | empty |"
    assert rule == "| --- | --- | --- |"
    assert len(rows) == len(registry.op_names())
    assert f"| `{OP}` | yes | – |" in rows
    assert "| `concat_mla_q` | – | – |" in rows


# ----------------------------------------------------------------------------------------------------------------------
# Environment


@pytest.mark.usefixtures("three_backends")
@pytest.mark.parametrize(
    ("environ", "policy"),
    [
        ({}, Policy(("one", "two", "three"), False)),
        ({"SPARSE_MLA_OPS_BACKENDS": "three"}, Policy(("three",), False)),
        ({"SPARSE_MLA_OPS_BACKENDS": " three, one "}, Policy(("three", "one"), False)),
        ({"SPARSE_MLA_OPS_AITER_SPARSE_MLA": "0"}, Policy(("one", "two", "three"), False)),
        ({"SPARSE_MLA_OPS_AITER_SPARSE_MLA": "1"}, Policy(("one", "two", "three"), True)),
    ],
    ids=str,
)
def test_policy_is_what_the_environment_says(environ: dict[str, str], policy: Policy) -> None:
    assert read_policy(environ) == policy


@pytest.mark.usefixtures("three_backends")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BACKENDS", "one,four", "SPARSE_MLA_OPS_BACKENDS: unknown backend 'four'; this version has: one, two, three"),
        ("BACKENDS", "one,,two", "SPARSE_MLA_OPS_BACKENDS: unknown backend ''"),
        ("BACKENDS", "", "SPARSE_MLA_OPS_BACKENDS: unknown backend ''"),
        ("BACKENDS", "ONE", "SPARSE_MLA_OPS_BACKENDS: unknown backend 'ONE'"),
        ("BACKENDS", "one,two,one", "SPARSE_MLA_OPS_BACKENDS: a backend is listed twice in 'one,two,one'"),
        ("AITER_SPARSE_MLA", "yes", "SPARSE_MLA_OPS_AITER_SPARSE_MLA: expected 0 or 1, got 'yes'"),
        ("AITER_SPARSE_MLA", "", "SPARSE_MLA_OPS_AITER_SPARSE_MLA: expected 0 or 1, got ''"),
    ],
)
def test_environment_with_an_unknown_value_is_an_error(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_policy({f"SPARSE_MLA_OPS_{name}": value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SPARSE_MLA_OPS_BACKENDS", "cutlass", "unknown backend 'cutlass'"),
        ("SPARSE_MLA_OPS_AITER_SPARSE_MLA", "on", "expected 0 or 1, got 'on'"),
    ],
)
def test_bad_environment_stops_the_import(name: str, value: str, message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sparse_mla_ops"],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert f"ValueError: {name}: {message}" in result.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Log


def records_of(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "sparse_mla_ops"]


def test_choice_is_logged_once_per_operator_and_backend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparse_mla_ops")
    with testing.backends_replaced(entry("empty"), TWO, THREE):
        for _ in range(2):
            ran()
        with use_backend("three"):
            for _ in range(2):
                ran()
    assert records_of(caplog) == [
        (logging.INFO, "rotary_embedding runs on two; not empty: does not implement rotary_embedding"),
        (logging.INFO, "rotary_embedding runs on three"),
    ]


def attend() -> None:
    case = testing.OpCase("sparse_mla_fwd", "bf16")
    case.function(**case.arguments())


AITER_REFUSES = entry("aiter", sparse_mla_fwd=filling(1), why_not_sparse_mla_fwd=lambda *_: "H = 3 heads")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([AITER_REFUSES, entry("two", sparse_mla_fwd=filling(2))], "H = 3 heads"),
        ([entry("two", sparse_mla_fwd=filling(2))], "this version of sparse_mla_ops has no aiter backend"),
    ],
    ids=["aiter refuses", "no aiter"],
)
def test_refused_wish_for_aiter_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, table: list[tuple[Backend, ModuleType]], reason: str
) -> None:
    with testing.backends_replaced(*table, aiter_sparse_mla=True):
        for _ in range(2):
            attend()
    warnings = [message for level, message in records_of(caplog) if level == logging.WARNING]
    assert warnings == [
        f"SPARSE_MLA_OPS_AITER_SPARSE_MLA=1 was refused for sparse_mla_fwd, which runs on two: {reason}"
    ]


def test_granted_wish_for_aiter_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with testing.backends_replaced(entry("aiter", sparse_mla_fwd=filling(1)), aiter_sparse_mla=True):
        attend()
    assert not [message for level, message in records_of(caplog) if level >= logging.WARNING]


def test_wish_for_aiter_is_of_sparse_mla_fwd_only(caplog: pytest.LogCaptureFixture) -> None:
    with testing.backends_replaced(ONE, aiter_sparse_mla=True):
        ran()
    assert not [message for level, message in records_of(caplog) if level >= logging.WARNING]
