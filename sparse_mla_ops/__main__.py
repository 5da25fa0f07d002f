"""The command line: `python -m sparse_mla_ops <command>`. Each command imports what it needs, when it runs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from sparse_mla_ops import arch, registry

# Commands with a command line of their own: module, and what it needs beyond torch.
DELEGATED = {
    "build": ("sparse_mla_ops.build", "triton"),
    "bench": ("sparse_mla_ops.bench", ""),
}


def _version(*distributions: str) -> str:
    """The version of the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _short(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.float8_") for dtype in dtypes) or "–"


def _devices() -> list[str]:
    """One line per device: what it is, and the architecture by which settings and fp8 encodings are looked up."""
    lines = []
    names = [("cpu", platform.processor() or platform.machine())]
    if torch.cuda.is_available():
        names += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    for device, name in names:
        found = arch.arch_name(torch.device(device))
        known = "" if found in arch.FP8_SUPPORT else ", not in the table below, so taken to have no fp8"
        lines.append(f"  {device}: {name}, {found}{known}; new fp8 caches: {_short([arch.preferred_fp8_dtype(found)])}")
    return lines


def doctor() -> int:
    """Print what is here and what it can do."""
    print("versions")
    print(
        f"  sparse_mla_ops {importlib.import_module('sparse_mla_ops').__version__}, Python {platform.python_version()}"
    )
    accelerator = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    built_for = accelerator if torch.version.hip or torch.version.cuda else "CPU"
    print(f"  torch {torch.__version__} (built for {built_for})")
    print(f"  triton {_version('triton', 'pytorch-triton-rocm', 'triton-rocm')}")
    print(f"  transformers {_version('transformers')}")
    print(f"  aiter {_version('amd-aiter')}")
    print("\ndevices")
    print("\n".join(_devices()))

    policy = registry.read_policy(os.environ)
    print("\nbackends, in order of preference")
    for backend in sorted(registry.BACKENDS, key=lambda b: _place(policy.order, b.name)):
        if backend.name not in policy.order:
            print(f"  {backend.name}: left out by SPARSE_MLA_OPS_BACKENDS")
            continue
        try:
            module: ModuleType | None = importlib.import_module(backend.module)
            state = "imports"
        except Exception as error:  # a broken install may raise anything
            module, state = None, f"does not import: {type(error).__name__}: {error}"
        taken = ", ".join(backend.auto_device_types)
        print(f"  {backend.name}: {state}; taken by itself on {taken}, by name on {', '.join(backend.device_types)}")
        if getattr(module, "INTERPRETED", False):
            print("    TRITON_INTERPRET is set: kernels run in Triton's interpreter, slowly, and cannot be compiled")

    print("\nenvironment")
    for variable, default in (
        ("SPARSE_MLA_OPS_BACKENDS", ",".join(backend.name for backend in registry.BACKENDS)),
        ("SPARSE_MLA_OPS_AITER_SPARSE_MLA", "0"),
        ("TRITON_INTERPRET", "0"),
    ):
        value = os.environ.get(variable)
        print(f"  {variable}: {f'unset, so {default}' if value is None else value}")

    print("\nfp8 encodings by architecture: stored by conversion instructions; multiplied by matrix units")
    width = max(map(len, arch.FP8_SUPPORT))
    for name, support in arch.FP8_SUPPORT.items():
        print(f"  {name:<{width}}  {_short(support.stored):<17}  {_short(support.multiplied)}")
    print("\noperators")
    print(registry.support_matrix())
    return 0


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def explain(name: str, device: str, tokens: int, backend: str | None) -> int:
    """Print which backend runs each case that `name` is or is an operator of, and why the others do not."""
    from sparse_mla_ops import testing

    cases = [case for case in testing.CASES if name in (case.op, str(case))]
    if not cases:
        known = [*dict.fromkeys(case.op for case in testing.CASES), *map(str, testing.CASES)]
        close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
        print(f"explain: {name!r} is no operator and no case; close: {', '.join(close) or '–'}", file=sys.stderr)
        return 2
    for case in cases:
        arguments = case.arguments(tokens=tokens, device=device)
        print(f"{case} on {device}, T={tokens}")
        print("  " + str(registry.explain(case.op, **arguments, backend=backend)).replace("\n", "\n  "))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla_ops",
        description="Sparse multi-head latent attention operators: what is here, what runs where, what it costs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    about = "versions, devices, backends, fp8 encodings, environment and the support matrix"
    commands.add_parser("doctor", help=about, description=f"{about.capitalize()}.")
    one = commands.add_parser(
        "explain",
        help="which backend would run a call, and why each other one would not",
        description="Which backend would run the cases of an operator, and why each other one would not. Nothing runs.",
    )
    one.add_argument("name", help='an operator, as "sparse_mla_fwd", or one of its cases, as "sparse_mla_fwd-bf16"')
    default = "cuda" if torch.cuda.is_available() else "cpu"
    one.add_argument("--device", default=default, help="where the tensors are (default here: %(default)s)")
    one.add_argument("--tokens", type=int, default=5, help="rows T of the call (default: %(default)s)")
    names = [known.name for known in registry.BACKENDS]
    one.add_argument("--backend", choices=names, help="as if the call named it; a named backend never falls back")
    about = "compile every Triton kernel for AMD and NVIDIA GPUs, with no GPU: what each costs"
    commands.add_parser("build", add_help=False, help=about)
    commands.add_parser("bench", add_help=False, help="time the operators, against other implementations too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in DELEGATED:
        module, needs = DELEGATED[arguments[0]]
        try:
            command = importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = needs or error.name
            print(f"{arguments[0]}: needs {missing}, which is not installed ({error})", file=sys.stderr)
            return 2
        return command.main(arguments[1:]) or 0
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        return doctor()
    return explain(options.name, options.device, options.tokens, options.backend)


if __name__ == "__main__":
    sys.exit(main())
