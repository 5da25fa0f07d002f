"""Importing the package: from a fresh process, with torch alone, without touching a GPU. And who may import whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A finder ahead of all others, so that an import fails as it does where the library is missing.
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by this test", name=name)

sys.meta_path.insert(0, Blocked())
"""
OPTIONAL = ("aiter", "amd_aiter", "flash_mla", "matplotlib", "tqdm", "transformers", "vllm")


def run(code: str, *, blocked: tuple[str, ...] = ()) -> str:
    """Run `code` in a fresh process in which `blocked` cannot be imported, and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_block_blocks() -> None:
    code = "try:\n    import json.tool\nexcept ImportError as error:\n    print(error)"
    assert run(code, blocked=("json",)).strip() == "json is blocked by this test"


@pytest.mark.parametrize("name", ["sparse_mla_ops", "sparse_mla_ops.testing", "sparse_mla_ops.formats"])
def test_package_imports_without_optional_libraries(name: str) -> None:
    run(f"import {name}", blocked=(*OPTIONAL, "triton", "numpy"))


def test_import_registers_every_operator_and_touches_no_gpu() -> None:
    run(
        """
import torch

before = set(sys.modules)
import sparse_mla_ops

assert not torch.cuda.is_initialized()
for name in sparse_mla_ops.ops.__all__:
    assert getattr(torch.ops.sparse_mla_ops, name).default is not None
    assert getattr(sparse_mla_ops, name).__name__ == name
assert sparse_mla_ops.registry.op_names() == tuple(sorted(sparse_mla_ops.ops.__all__))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"triton", "aiter", "transformers", "numpy", "tqdm", "matplotlib"}, new
loaded = {name for name in sys.modules if name.startswith("sparse_mla_ops.backends.")}
assert not loaded, loaded  # a backend is imported when a call first considers it
assert not any(name.startswith(("sparse_mla_ops.nn", "sparse_mla_ops.testing")) for name in sys.modules)
"""
    )


def test_call_on_the_cpu_needs_torch_alone() -> None:
    run(
        """
import torch
import sparse_mla_ops

q = sparse_mla_ops.concat_mla_q(torch.ones(2, 3, 8), torch.zeros(2, 3, 4))
assert q.shape == (2, 3, 12)
assert not torch.cuda.is_initialized()
""",
        blocked=(*OPTIONAL, "triton", "numpy"),
    )


def test_operators_are_defined_once() -> None:
    """`torch.library.custom_op` would let a second definition replace the first in silence."""
    run(
        """
import sparse_mla_ops
from sparse_mla_ops.ops._register import register_op

def concat_mla_q(q_nope: "torch.Tensor", backend: "str | None" = None) -> "torch.Tensor":
    return q_nope.clone()

import torch
try:
    register_op(rows="q_nope")(concat_mla_q)
except RuntimeError as error:
    assert "concat_mla_q" in str(error), error
else:
    raise SystemExit("a second definition was accepted")
"""
    )


def test_operator_without_a_backend_argument_is_refused() -> None:
    run(
        """
import torch
from sparse_mla_ops.ops._register import register_op

def scale(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

try:
    register_op(rows="x")(scale)
except TypeError as error:
    assert "scale: the last parameter of an operator is `backend`" in str(error), error
else:
    raise SystemExit("it was accepted")
"""
    )


def test_layers_import_downwards_only() -> None:
    """The contracts stand in pyproject.toml, under tool.importlinter."""
    lint_imports = Path(sys.executable).with_name("lint-imports")
    if not lint_imports.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
