"""What the repository says about itself is true: README, pins, examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_mla_ops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_python(*arguments: str) -> str:
    """Output of a fresh interpreter in the repository, which need not be installed."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_shows_the_support_matrix_of_the_registry():
    shown = README.split("support_matrix()) -->\n")[1].split("\n<!-- end of support matrix")[0]
    assert shown == sparse_mla_ops.support_matrix()


def test_readme_names_every_operator_file():
    files = {path.stem for path in (ROOT / "sparse_mla_ops" / "ops").glob("[a-z]*.py")}
    assert files == set(sparse_mla_ops.ops.__all__)


def test_readme_examples_run():
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    run_python("-c", "\n".join(blocks))


def test_pre_commit_uses_the_pinned_ruff():
    constraints = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    (rev,) = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert rev == constraints["ruff"]


def test_example_passes_its_own_check():
    """The whole promise at once: tokens of plain transformers, no break, one compile of the decode step (Inductor)."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    assert "check passed" in run_python("examples/generate.py", "--check", "--device", "cpu")


def test_wrapped_layers_of_ones_own_match_their_dense_form():
    assert run_python("examples/wrap_my_layer.py").count("relative error") == 2


@pytest.mark.parametrize("flags", [["--kv-dtype", "fp8", "--index-dtype", "fp8"], ["--kv-dtype", "bf16", "--split"]])
def test_example_runs_quantised_and_eager(flags: list[str]):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    out = run_python("examples/generate.py", "--eager", "--device", "cpu", "--max-new-tokens", "8", *flags)
    assert out.count("of 8 tokens equal") == 4
