"""Every operator as PyTorch sees it: dispatch, schema, fakes, compilation, export. Generic over `testing.CASES`.

What the operators compute is checked against written-out formulas in test_reference.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_mla_ops
from sparse_mla_ops import formats, registry, testing
from sparse_mla_ops.testing import CASES, LAYOUTS, PLAIN_CASES, OpCase

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
BACKENDS = tuple(backend.name for backend in registry.BACKENDS)

MUTATED = {
    "concat_and_cache_mla": ("kv_cache",),
    "fused_qk_rope_concat_and_cache_mla": ("kv_cache",),
    "indexer_k_quant_and_cache": ("index_cache",),
}
MUTATING_CASES = testing.cases_of(*MUTATED)

SWEEP = (5, 6, 7, 1, 0, 2, 9)
"""Values of T in the order of calls: one static graph, one dynamic, and one each for the special sizes 1 and 0."""

all_cases = pytest.mark.parametrize("case", CASES, ids=str)
plain_cases = pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
mutating_cases = pytest.mark.parametrize("case", MUTATING_CASES, ids=str)
all_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def compiled(case: OpCase, backend: str) -> Any:
    """The case's function, compiled anew at each call."""
    return lambda **arguments: testing.compile_and_count(
        case.function, [arguments], backend=backend, fullgraph=True
    ).results[0]


def caches_of(case: OpCase, arguments: dict[str, Any]) -> list[Tensor]:
    return [arguments[name] for name in MUTATED[case.op]]


def test_cases_cover_every_operator() -> None:
    assert {case.op for case in CASES} == set(registry.op_names()) == set(sparse_mla_ops.ops.__all__)


# ----------------------------------------------------------------------------------------------------------------------
# Dispatch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@all_layouts
@all_cases
def test_dispatched_call_gives_the_backends_bits(case: OpCase, layout: str, device: str, backend: str) -> None:
    arguments = case.arguments(layout=layout, device=device)
    explanation = registry.explain(case.op, **arguments, backend=backend)
    if explanation.backend is None:
        pytest.skip(explanation.reasons[backend])

    dispatched = testing.outcome(lambda **kwargs: case.function(**kwargs, backend=backend), arguments)

    arguments = case.arguments(layout=layout, device=device)
    direct = testing.outcome_of(testing.run_backend(backend, case.op, arguments), arguments)
    testing.assert_same_bits(dispatched, direct)


@all_layouts
@all_cases
def test_memory_layout_of_arguments_changes_no_bit(case: OpCase, layout: str) -> None:
    actual = testing.outcome(case.function, case.arguments(layout=layout))
    testing.assert_same_bits(actual, testing.outcome(case.function, case.arguments()))


@all_cases
def test_same_call_gives_same_bits(case: OpCase) -> None:
    first, second = (testing.outcome(case.function, case.arguments(tokens=9)) for _ in range(2))
    testing.assert_same_bits(first, second)


@all_cases
def test_only_declared_arguments_are_written(case: OpCase) -> None:
    arguments = case.arguments()
    before = testing.copy_arguments(arguments)
    case.function(**arguments)
    written = {
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and not testing.same_bits(value, before[name])
    }
    assert written == set(MUTATED.get(case.op, ()))


@mutating_cases
def test_write_stays_inside_the_view_of_a_slab(case: OpCase) -> None:
    """What surrounds a cache in its storage belongs to other layers."""
    arguments = case.arguments()
    before = testing.copy_arguments(arguments)
    case.function(**arguments)
    for cache, old in zip(caches_of(case, arguments), caches_of(case, before)):
        after, expected = (torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in (cache, old))
        layout = cache.view(torch.uint8)
        outside = torch.ones_like(after, dtype=torch.bool)
        outside.as_strided(layout.shape, layout.stride(), layout.storage_offset()).fill_(False)
        assert bool(outside.any()) == ("slab" in case.variant)
        assert torch.equal(after[outside], expected[outside])


# ----------------------------------------------------------------------------------------------------------------------
# Schema and fakes


@pytest.mark.parametrize("op", registry.op_names())
def test_schema_declares_exactly_what_is_written(op: str) -> None:
    schema = getattr(torch.ops.sparse_mla_ops, op).default._schema
    assert testing.mutated_arguments(op) == MUTATED.get(op, ())
    assert all(returned.alias_info is None for returned in schema.returns)
    assert (schema.arguments[-1].name, schema.arguments[-1].default_value) == ("backend", None)


@all_layouts
@all_cases
def test_opcheck(case: OpCase, layout: str) -> None:
    arguments = case.arguments(layout=layout)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(x.dtype in formats.FP8_MAX for x in testing.tensors_of(arguments)):
        # It looks for mutation with torch.allclose, which knows no fp8. What it checks is checked for these cases by
        # test_only_declared_arguments_are_written and test_fake_matches_real_and_outputs_are_fresh.
        tests.remove("test_schema")
    torch.library.opcheck(case.overload, (), arguments, test_utils=tests)


@plain_cases
def test_backward_is_refused_and_nothing_is_recorded_for_it(case: OpCase) -> None:
    """PyTorch puts one node behind the outputs, which warns in a backward; intermediates of a backend are not kept."""
    arguments = case.arguments()
    mutated = testing.mutated_arguments(case.op)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in mutated:
            value.requires_grad_()
    torch.library.opcheck(case.overload, (), arguments, test_utils="test_autograd_registration")
    outputs = [output for output in testing.tensors_of(case.function(**arguments)) if output.requires_grad]
    for output in outputs:
        inputs = [node for node, _ in output.grad_fn.next_functions if node is not None]
        assert all(type(node).__name__ == "AccumulateGrad" for node in inputs)
        with pytest.warns(UserWarning, match=f"{case.op}: an autograd kernel was not registered"):
            output.sum().backward()


@pytest.mark.parametrize("tokens", [0, 1, 5])
@all_layouts
@all_cases
def test_fake_matches_real_and_outputs_are_fresh(case: OpCase, layout: str, tokens: int) -> None:
    testing.assert_fake_matches_real(case.function, case.arguments(tokens, layout))


# ----------------------------------------------------------------------------------------------------------------------
# Compiled against eager


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@all_cases
def test_compiled_call_gives_eager_bits(case: OpCase, backend: str) -> None:
    actual = testing.outcome(compiled(case, backend), case.arguments())
    testing.assert_same_bits(actual, testing.outcome(case.function, case.arguments()))


@pytest.mark.parametrize("layout", ["sliced", "permuted"])
@plain_cases
def test_inductor_passes_strides_on(case: OpCase, layout: str) -> None:
    actual = testing.outcome(compiled(case, "inductor"), case.arguments(layout=layout))
    testing.assert_same_bits(actual, testing.outcome(case.function, case.arguments(layout=layout)))


def check_sweep(case: OpCase, backend: str) -> None:
    calls = [case.arguments(tokens) for tokens in SWEEP]
    report = testing.compile_and_count(case.function, calls, backend=backend)
    assert report.graph_breaks == ()
    assert report.compiles <= 4, f"compiled per call: {dict(zip(SWEEP, report.compiles_per_call))}"
    for tokens, arguments, result in zip(SWEEP, calls, report.results):
        actual = testing.outcome_of(result, arguments)
        testing.assert_same_bits(actual, testing.outcome(case.function, case.arguments(tokens)))


@all_cases
def test_sizes_compile_at_most_four_times(case: OpCase) -> None:
    check_sweep(case, "eager")  # guards are Dynamo's, whatever compiles the graph


@plain_cases
def test_sizes_compile_at_most_four_times_with_inductor(case: OpCase) -> None:
    check_sweep(case, "inductor")


def scales_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in arguments.items() if isinstance(x, Tensor) and name in ("q_scale", "kv_scale")}


@pytest.mark.parametrize("case", [case for case in CASES if scales_of(case.arguments())], ids=str)
def test_new_scale_values_recompile_nothing(case: OpCase) -> None:
    def rescaled(factor: float) -> dict[str, Any]:
        arguments = case.arguments()
        return arguments | {name: scale * factor for name, scale in scales_of(arguments).items()}

    calls = [rescaled(factor) for factor in (1.0, 2.0, 0.3)]
    report = testing.compile_and_count(case.function, calls, backend="eager", fullgraph=True)
    assert report.compiles_per_call == (1, 0, 0)
    for factor, arguments, result in zip((1.0, 2.0, 0.3), calls, report.results):
        actual = testing.outcome_of(result, arguments)
        testing.assert_same_bits(actual, testing.outcome(case.function, rescaled(factor)))


@pytest.mark.parametrize("layout", LAYOUTS)
@all_cases
def test_no_rows_write_nothing_and_need_no_backend(case: OpCase, layout: str) -> None:
    arguments = case.arguments(0, layout)
    before = testing.copy_arguments(arguments)
    with testing.backends_replaced():  # nothing could run
        outputs = testing.tensors_of(case.function(**arguments))
    assert all(output.numel() == 0 for output in outputs)
    for name, value in arguments.items():
        assert not isinstance(value, Tensor) or testing.same_bits(value, before[name]), name


@pytest.mark.parametrize("case", [*PLAIN_CASES, *MUTATING_CASES], ids=str)
def test_no_rows_compiled_with_inductor_write_nothing(case: OpCase) -> None:
    arguments = case.arguments(0)
    before = testing.copy_arguments(arguments)
    actual = testing.outcome(compiled(case, "inductor"), arguments)
    testing.assert_same_bits(actual, testing.outcome(case.function, before))


def test_switching_backends_around_a_compiled_function_recompiles_nothing() -> None:
    """A choice made in traced Python would be baked into the graph."""
    case = OpCase("rotary_embedding", "bf16")
    arguments = case.arguments()
    ones = ModuleType("ones")
    ones.rotary_embedding = lambda q_out, k_out, *_: (q_out.fill_(1), k_out.fill_(1))  # type: ignore[attr-defined]
    backend = registry.Backend("ones", "a_module_of_ones", device_types=("cpu",), auto_device_types=("cpu",))
    reference = next(backend for backend in registry.BACKENDS if backend.name == "reference")

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(case.function, backend=counter, fullgraph=True)
    with testing.backends_replaced((reference, None), (backend, ones)):
        rotated, _ = function(**arguments)
        with sparse_mla_ops.use_backend("ones"):
            filled, _ = function(**arguments)
        again, _ = function(**arguments)

    assert counter.frame_count == 1
    assert bool((filled == 1).all())
    assert not bool((rotated == 1).all())
    assert testing.same_bits(rotated, again)


# ----------------------------------------------------------------------------------------------------------------------
# Caches under functionalisation


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@mutating_cases
def test_cache_is_written_when_the_result_is_unused(case: OpCase, backend: str) -> None:
    """A mutation that the schema did not declare would be dropped with the dead result (pytorch #118649)."""

    def step(arguments: dict[str, Any]) -> None:
        case.function(**arguments)

    arguments, expected = case.arguments(), case.arguments()
    testing.compile_and_count(step, [(arguments,)], backend=backend, fullgraph=True)
    case.function(**expected)
    untouched = caches_of(case, case.arguments())
    for actual, want, before in zip(caches_of(case, arguments), caches_of(case, expected), untouched):
        assert testing.same_bits(actual, want)
        assert not testing.same_bits(actual, before)


@mutating_cases
def test_inductor_copies_no_cache(case: OpCase) -> None:
    arguments = case.arguments()
    testing.assert_no_cache_copy(case.function, arguments, caches_of(case, arguments))


def test_inductor_copies_no_cache_of_a_layer_that_writes_and_reads_it() -> None:
    """The slab is the graph's input, the cache a view taken inside, as of layers that share one allocation."""
    read = OpCase("sparse_mla_fwd", "bf16").arguments()
    write = OpCase("concat_and_cache_mla", "bf16").arguments()
    slab = torch.stack([write["kv_cache"]] * 3, dim=1)

    def layer(slab: Tensor, write: dict[str, Any], read: dict[str, Any]) -> Tensor:
        cache = slab[:, 1]
        sparse_mla_ops.concat_and_cache_mla(**{**write, "kv_cache": cache})
        out, _ = sparse_mla_ops.sparse_mla_fwd(**{**read, "kv_cache": cache})
        return out * 2

    report = testing.assert_no_cache_copy(layer, (slab, write, read), [slab, slab[:, 1]])

    expected = torch.stack([OpCase("concat_and_cache_mla", "bf16").arguments()["kv_cache"]] * 3, dim=1)
    assert testing.same_bits(report.results[0], layer(expected, write, read))
    assert testing.same_bits(slab, expected)


# ----------------------------------------------------------------------------------------------------------------------
# Export


class Program(torch.nn.Module):
    """A call of one operator whose arguments of varying size are inputs, the others constants.

    An int that follows T, such as the number of rows to gather, comes from the shape of an input, as it does in models.
    """

    def __init__(self, case: OpCase) -> None:
        super().__init__()
        self.case = case
        small, large = case.arguments(5), case.arguments(6)
        self.counts = {name for name, x in small.items() if isinstance(x, int) and x != large[name]}
        self.constants = {name: x for name, x in small.items() if not isinstance(x, Tensor) and name not in self.counts}

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        arguments = {name: x.shape[0] if name in self.counts else x for name, x in inputs.items()}
        return self.case.function(**arguments, **self.constants)

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        return {
            name: torch.zeros(x, 2) if name in self.counts else x
            for name, x in self.case.arguments(tokens).items()
            if name not in self.constants
        }

    def dynamic_shapes(self) -> dict[str, dict[int, Any]]:
        """Every dimension that T changes."""
        pairs = zip(self.inputs(5).items(), self.inputs(6).values())
        return {
            name: {dim: torch.export.Dim.DYNAMIC for dim in range(x.dim()) if x.shape[dim] != other.shape[dim]}
            for (name, x), other in pairs
        }


def check_export(case: OpCase, strict: bool) -> None:
    program = Program(case)
    exported = torch.export.export(
        program, (program.inputs(5),), dynamic_shapes=(program.dynamic_shapes(),), strict=strict
    ).module()
    for tokens in (9, 2):
        inputs, expected = program.inputs(tokens), program.inputs(tokens)
        actual = testing.outcome_of(exported(inputs), inputs)
        testing.assert_same_bits(actual, testing.outcome_of(program(expected), expected))


@all_cases
def test_export_with_dynamic_rows(case: OpCase) -> None:
    check_export(case, strict=False)


@plain_cases
def test_strict_export_with_dynamic_rows(case: OpCase) -> None:
    check_export(case, strict=True)


# ----------------------------------------------------------------------------------------------------------------------
# The checkers themselves: each must be able to fail


def test_compile_report_counts_breaks_and_recompiles() -> None:
    def broken(x: Tensor, factor: float) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * factor

    x = torch.ones(3)
    report = testing.compile_and_count(broken, [(x, 2.0), (x, 2.0), (x, 3.0)], backend="eager")
    assert len(report.graph_breaks) >= 1
    assert report.compiles_per_call[0] == 2
    assert report.compiles_per_call[1] == 0
    assert report.compiles_per_call[2] >= 1
    assert report.compiles == sum(report.compiles_per_call)
    assert torch.equal(report.results[2], torch.full((3,), 6.0))


def test_compile_report_holds_inductors_code() -> None:
    report = testing.compile_and_count(lambda x: x.sin(), [(torch.ones(3),)])
    assert len(report.code) == 1
    assert "sin" in report.code[0]


@pytest.mark.parametrize("variant", ["bf16", "bf16-slab", "fp32", "uint8-e4m3fn", "e4m3fn", "rows656-slab"])
def test_copied_cache_is_found_in_inductors_code(variant: str) -> None:
    case = OpCase("concat_and_cache_mla", variant)

    def clones(arguments: dict[str, Any]) -> Tensor:
        cache = arguments["kv_cache"].clone()
        case.function(**{**arguments, "kv_cache": cache})
        return cache

    arguments = case.arguments()
    with pytest.raises(AssertionError, match="is copied"):
        testing.assert_no_cache_copy(clones, (arguments,), [arguments["kv_cache"]])


def test_cache_copied_by_functionalisation_is_found() -> None:
    """The cache's old values are still needed after the write, so Inductor has to keep a copy."""
    case = OpCase("concat_and_cache_mla", "bf16")

    def returns_old_values(arguments: dict[str, Any]) -> Tensor:
        old = arguments["kv_cache"] + 0
        case.function(**arguments)
        return old

    arguments = case.arguments()
    with pytest.raises(AssertionError, match="is copied"):
        testing.assert_no_cache_copy(returns_old_values, (arguments,), [arguments["kv_cache"]])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("buf0 = empty_strided_cpu((5, 8, 32), (256, 32, 1), torch.bfloat16)", True),
        ("buf0 = empty_strided_cuda((1280, ), (1, ), torch.bfloat16)", True),
        ("buf0 = empty_strided_cuda((5, 8, 64), (512, 64, 1), torch.uint8)", True),
        ("buf0 = empty_strided_cuda((s77, 8, 32), (256, 32, 1), torch.bfloat16)", True),
        ("buf1 = torch.ops.aten.clone.default(arg0_1)", True),
        ("buf0 = empty_strided_cpu((5, 8, 32), (256, 32, 1), torch.float32)", False),
        ("buf0 = empty_strided_cpu((s77, 3, 32), (96, 32, 1), torch.bfloat16)", False),
        ("assert_size_stride(arg0_1, (5, 8, 32), (256, 32, 1))", False),
        ("# Source Nodes: [clone], Original ATen: [aten.clone]", False),
    ],
)
def test_cache_copies_reads_inductors_lines(line: str, found: bool) -> None:
    cache = torch.zeros(5, 8, 32, dtype=torch.bfloat16)
    assert testing.cache_copies(f"import torch\n    {line}\n", cache) == ([line] if found else [])


class FaultyOps:
    """An operator with a fault each, whose fake is the plain `x.new_empty(x.shape)`."""

    @staticmethod
    def wrong_strides(x: Tensor) -> Tensor:
        return torch.empty_like(x)  # copies the strides of a permuted input

    @staticmethod
    def returns_input(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def wrong_dtype(x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("fault", "message"), [("wrong_strides", "stride is"), ("returns_input", "stride is"), ("wrong_dtype", "dtype is")]
)
def test_fake_that_differs_is_found(fault: str, message: str) -> None:
    def op(x: Tensor) -> Tensor:
        fake = isinstance(x, torch._subclasses.FakeTensor)
        return x.new_empty(x.shape) if fake else getattr(FaultyOps, fault)(x)

    with pytest.raises(AssertionError, match=message):
        testing.assert_fake_matches_real(op, {"x": torch.ones(4, 3).t()})


def test_output_that_shares_storage_is_found() -> None:
    with pytest.raises(AssertionError, match="real output 0 shares its storage with x"):
        testing.assert_fake_matches_real(lambda x: x.view(3, 4), {"x": torch.ones(4, 3)})
    with pytest.raises(AssertionError, match="real output 1 shares its storage with output 0"):
        testing.assert_fake_matches_real(lambda x: torch.ones(2, 4).unbind(), {"x": torch.ones(4, 3)})


def test_relative_error_is_of_each_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    actual = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 1.0]])
    assert testing.relative_error_per_row(actual, expected).tolist() == [0.1, 0.0, float("inf")]


@pytest.mark.parametrize("precision", testing.TOLERANCES)
def test_assert_accurate_judges_the_worst_row(precision: str) -> None:
    """A row that is small beside the others must not hide behind them."""
    tolerance = testing.TOLERANCES[precision].per_row
    expected = torch.ones(4, 2, 8, dtype=torch.float64) * torch.tensor([1e4, 1e4, 1.0, 1e4])[:, None, None]
    inside, outside = expected.clone(), expected.clone()
    inside[2, 1] *= 1 + 0.9 * tolerance
    outside[2, 1] *= 1 + 1.1 * tolerance
    testing.assert_accurate(inside, expected, precision)
    with pytest.raises(AssertionError, match=r"in row \(2, 1\)"):
        testing.assert_accurate(outside, expected, precision)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_assert_accurate_wants_infinities_in_the_same_places(value: float) -> None:
    expected = torch.tensor([[1.0, float("-inf")], [1.0, 2.0]])
    testing.assert_accurate(expected.clone(), expected, "fp32")
    wrong = expected.clone()
    wrong[0, 1] = value
    with pytest.raises(AssertionError):
        testing.assert_accurate(wrong, expected, "fp32")
    wrong = expected.clone()
    wrong[1, 1] = value
    with pytest.raises(AssertionError):
        testing.assert_accurate(wrong, expected, "fp32")


def test_same_bits_tells_zeros_apart() -> None:
    assert testing.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not testing.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not testing.same_bits(torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32))


def test_unknown_layout_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"layout: expected one of .*'compact'.* got 'columns'"):
        PLAIN_CASES[0].arguments(layout="columns")
