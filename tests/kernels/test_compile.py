"""Every kernel, at the sizes of a full model, fits a Hopper: registers and shared memory within bounds.

A kernel file NAME.py has its launches in compile_cases/NAME.py, one function a case.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nextn.kernels
from tests.compile_check import MAX_SHARED, compile_module

CASES = sorted(path.stem for path in Path(__file__).parent.glob("compile_cases/*.py"))
KERNELS = Path(nextn.kernels.__file__).parent
SPILLS = {"_hopper_attention_kernel": 96}
"""Bytes a thread that a kernel may keep in memory: addresses and sizes of roles outside their inner loops."""


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper_within_bounds(name, tmp_path):
    compiled = compile_module(f"tests.kernels.compile_cases.{name}", tmp_path)
    assert {kernel.kernel for kernel in compiled} == jitted(KERNELS / f"{name}.py")
    for kernel in compiled:
        assert max(kernel.spill_stores, kernel.spill_loads) <= SPILLS.get(kernel.kernel, 0), kernel
        assert kernel.shared <= MAX_SHARED, kernel


def test_every_triton_file_has_compile_cases():
    files = [path.stem for path in KERNELS.glob("*.py") if jitted(path)]
    assert files
    assert set(files) == set(CASES)


def jitted(path: Path) -> set[str]:
    """Names of a file's kernels: jitted functions called something_kernel (the others are their helpers)."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(
            ast.unparse(decorator).startswith(("triton.jit", "gluon.jit"))
            for decorator in node.decorator_list
        )
    }
