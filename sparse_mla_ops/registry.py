"""Which backend runs a call: the table, the choice, and the reasons.

A backend is a module of plain functions, one per operator, named as the operator is. It is imported when a call first
considers it. `<op>(*outputs, *arguments)` fills the outputs; it may return a `Replay`. Beside it the module may define
`why_not_<op>(*arguments) -> str | None`: the reason for which it cannot run these arguments, judged from shapes,
dtypes, strides, formats and architecture, never from values.

Process-wide policy is read from the environment once, at import:

SPARSE_MLA_OPS_BACKENDS          comma-separated order and allow-list of backends; what is not listed is never imported
SPARSE_MLA_OPS_AITER_SPARSE_MLA  1 to ask for AITER's sparse MLA kernels, 0 (default) to leave them out
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

logger = logging.getLogger("sparse_mla_ops")

Replay = Callable[[Tensor, tuple[Tensor, ...], list[int | None]], None]
"""replay(like, outputs, addresses): does for these what a backend's function did for others of the same metadata.

like: a tensor on the device, to allocate scratch memory from. addresses: of each argument that is a tensor.
"""


class Backend(NamedTuple):
    name: str
    module: str
    """Dotted name, imported when a call first considers the backend."""
    device_types: tuple[str, ...]
    """Where it can run."""
    auto_device_types: tuple[str, ...]
    """Where it is taken without being named."""


BACKENDS: tuple[Backend, ...] = (
    Backend("triton", "sparse_mla_ops.backends.triton", device_types=("cuda", "cpu"), auto_device_types=("cuda",)),
    Backend("reference", "sparse_mla_ops.backends.reference", device_types=("cpu", "cuda"), auto_device_types=("cpu",)),
)
"""In order of preference."""


class BackendUnavailable(RuntimeError):
    """No backend can run a call. `reasons` maps each backend's name to why it does not."""

    def __init__(self, op: str, reasons: Mapping[str, str], named: str | None) -> None:
        self.op, self.reasons = op, dict(reasons)
        lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
        if named is None:
            head, advice = f"{op}: no backend can run this call", "change what the reasons name, or name a backend"
        else:
            head = f"{op}: backend {named!r} was asked for and cannot run this call; a named backend never falls back"
            advice = "change what the reason names, or leave the backend out to take the first that can"
        super().__init__(
            "\n".join([head, *lines, f"What to do: {advice}; sparse_mla_ops.explain(op, ...) shows every reason."])
        )


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the backend that would run (None: none can), and why each other one would not."""

    op: str
    backend: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        head = f"{self.op}: runs on {self.backend}" if self.backend else f"{self.op}: no backend can run this call"
        return "\n".join([head, *(f"  not {name}: {reason}" for name, reason in self.reasons.items())])


# ----------------------------------------------------------------------------------------------------------------------
# Policy


class Policy(NamedTuple):
    order: tuple[str, ...]
    aiter_sparse_mla: bool


def read_policy(environ: Mapping[str, str]) -> Policy:
    """The policy that `environ` asks for. Unknown values are errors, so that no flag is ignored without a word."""
    order = tuple(backend.name for backend in BACKENDS)
    if (listed := environ.get("SPARSE_MLA_OPS_BACKENDS")) is not None:
        order = tuple(name.strip() for name in listed.split(","))
        for name in order:
            check_backend_name(name, "SPARSE_MLA_OPS_BACKENDS")
        if len(set(order)) != len(order):
            raise ValueError(f"SPARSE_MLA_OPS_BACKENDS: a backend is listed twice in {listed!r}; list each once")
    flag = environ.get("SPARSE_MLA_OPS_AITER_SPARSE_MLA", "0")
    if flag not in ("0", "1"):
        raise ValueError(f"SPARSE_MLA_OPS_AITER_SPARSE_MLA: expected 0 or 1, got {flag!r}")
    return Policy(order, flag == "1")


def check_backend_name(name: str | None, argument: str = "backend") -> None:
    if name is not None and all(name != backend.name for backend in BACKENDS):
        known = ", ".join(backend.name for backend in BACKENDS)
        raise ValueError(f"{argument}: unknown backend {name!r}; this version has: {known}")


_policy = read_policy(os.environ)
_override: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("sparse_mla_ops_backends", default=())


@contextlib.contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Within the block, calls that name no backend use `names`.

    One name: as if every call had named it, so it never falls back. Several: they replace the order, and each counts as
    named: `use_backend("triton", "reference")` lets the reference fill gaps on a GPU. Calls that name a backend
    themselves keep it, and what SPARSE_MLA_OPS_BACKENDS leaves out stays out. The choice is made when an
    operator runs: entering the block around a compiled function recompiles nothing. Enter it outside the function that
    is compiled; it applies to the current thread (or task) only.
    """
    if not names:
        raise ValueError("use_backend: expected at least one backend name")
    for name in names:
        check_backend_name(name, "use_backend")
    token = _override.set(names)
    try:
        yield
    finally:
        _override.reset(token)


# ----------------------------------------------------------------------------------------------------------------------
# Choice


@functools.lru_cache(maxsize=None)
def _load(module: str) -> ModuleType | str:
    """The backend's module, or why it cannot be imported. A broken install may raise anything at import."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        return f"importing {module} failed: {type(error).__name__}: {error}"


def _refusal(backend: Backend, op: str, arguments: Sequence[Any], *, named: bool) -> str | None:
    device_type = arguments[0].device.type
    if backend.name not in _policy.order:
        return "left out by SPARSE_MLA_OPS_BACKENDS"
    if device_type not in backend.device_types:
        return f"does not run on {device_type} tensors"
    if not named and device_type not in backend.auto_device_types:
        return f"slow on {device_type} tensors, so it runs there only when it is named"
    module = _load(backend.module)
    if isinstance(module, str):
        return module
    if not hasattr(module, op):
        return f"does not implement {op}"
    why_not = getattr(module, f"why_not_{op}", None)
    return why_not(*arguments) if why_not is not None else None


def _candidates(named: str | None) -> tuple[tuple[Backend, ...], str | None, bool]:
    """The backends to try, in order; the name that binds the choice, if one does; whether the caller named them all."""
    override = _override.get()
    if named is None and len(override) == 1:
        named = override[0]
    order = (named,) if named is not None else override or _policy.order
    backends = tuple(next(backend for backend in BACKENDS if backend.name == name) for name in order)
    return backends, named, named is not None or bool(override)


def state() -> tuple[Any, ...] | None:
    """What a choice depends on besides the arguments, to be compared with a later one. None: choose anew and record."""
    return None if _recorder.get() is not None else (_override.get(), id(_policy), id(BACKENDS))


def pick(op: str, arguments: Sequence[Any], named: str | None = None) -> Callable[..., Replay | None]:
    """The function that runs `op` on `arguments` (real tensors; the first one decides the device).

    Raises BackendUnavailable with one reason per backend.
    """
    candidates, named, by_name = _candidates(named)
    reasons: dict[str, str] = {}
    for backend in candidates:
        reason = _refusal(backend, op, arguments, named=by_name)
        if reason is None:
            _log_choice(op, backend.name, reasons)
            if (choices := _recorder.get()) is not None:
                choices[op] = backend.name
            return getattr(_load(backend.module), op)
        reasons[backend.name] = reason
    raise BackendUnavailable(op, reasons, named)


_recorder: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def record_choices() -> Iterator[dict[str, str]]:
    """Within the block, fill the yielded dict with the backend that each operator runs on."""
    choices: dict[str, str] = {}
    token = _recorder.set(choices)
    try:
        yield choices
    finally:
        _recorder.reset(token)


_logged: set[tuple[str, str]] = set()


def _log_choice(op: str, backend: str, refused: Mapping[str, str]) -> None:
    """Once for each operator and backend: the choice, and as a warning a wish that was refused."""
    if (op, backend) in _logged:
        return
    _logged.add((op, backend))
    logger.info("%s runs on %s%s", op, backend, "".join(f"; not {name}: {why}" for name, why in refused.items()))
    if op == "sparse_mla_fwd" and _policy.aiter_sparse_mla and backend != "aiter":
        reason = refused.get("aiter", "this version of sparse_mla_ops has no aiter backend")
        logger.warning(
            "SPARSE_MLA_OPS_AITER_SPARSE_MLA=1 was refused for %s, which runs on %s: %s", op, backend, reason
        )


# ----------------------------------------------------------------------------------------------------------------------
# What users ask

_contracts: dict[str, Callable[..., Any]] = {}
"""Name of each registered operator → its contract (see ops/_register.py)."""


def declare(contract: Callable[..., Any]) -> None:
    _contracts[contract.__name__] = contract


def op_names() -> tuple[str, ...]:
    return tuple(sorted(_contracts))


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend `op(*args, **kwargs)` would run on, and why each other one would not. Nothing runs.

    op: the operator or its name. The arguments are checked as the operator checks them, and raise what it raises.
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in _contracts:
        raise ValueError(f"explain: unknown operator {name!r}; expected one of {', '.join(op_names())}")
    contract = _contracts[name]
    bound = inspect.signature(contract).bind(*args, **kwargs)
    bound.apply_defaults()
    contract(*bound.args)
    *arguments, named = bound.args
    check_backend_name(named)
    candidates, named, by_name = _candidates(named)
    chosen, reasons = None, {}
    for backend in candidates:
        reason = _refusal(backend, name, arguments, named=by_name)
        if reason is None and chosen is None:
            chosen = backend.name
        else:
            reasons[backend.name] = reason or f"can run this call, but {chosen} comes first"
    for backend in BACKENDS:
        if backend not in candidates:
            other = f"{named!r} was asked for" if named is not None else "not in the order in force"
            reasons[backend.name] = _refusal(backend, name, arguments, named=False) or other
    return Explanation(name, chosen, reasons)


def support_matrix() -> str:
    """A Markdown table of operators against backends, read off the backends themselves."""
    header = ["operator", *(backend.name for backend in BACKENDS)]
    rows = [header, ["---"] * len(header)]
    for op in op_names():
        cells = [f"`{op}`"]
        for backend in BACKENDS:
            module = _load(backend.module)
            cells.append("yes" if not isinstance(module, str) and hasattr(module, op) else "–")
        rows.append(cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
