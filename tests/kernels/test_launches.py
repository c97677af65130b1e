"""Every kernel of every file waits for the kernel before it, and is launched so that it may start early."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nextn.kernels

FILES = sorted(
    path for path in Path(nextn.kernels.__file__).parent.glob("*.py") if "_kernel[" in path.read_text()
)


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _called(node: ast.AST) -> set[str]:
    """Names of the functions that a piece of code calls."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}


def _waits(name: str, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether a function calls `wait_for_inputs`, itself or through a helper of its file."""
    called = _called(functions[name])
    return "wait_for_inputs" in called or any(
        _waits(each, functions) for each in called if each in functions and each != name
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_kernel_waits_for_its_inputs(path: Path) -> None:
    """Launched early, it would otherwise read what is not written yet."""
    functions = _functions(ast.parse(path.read_text()))
    kernels = [name for name in functions if name.endswith("_kernel")]
    assert kernels
    assert [name for name in kernels if not _waits(name, functions)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_launch_takes_the_launch_options(path: Path) -> None:
    """As keywords of its own, or in a dictionary that the same function or its file's makes with them."""
    source = path.read_text()
    tree = ast.parse(source)
    launches = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("_kernel")
    ]
    assert launches
    spread = [[ast.unparse(word.value) for word in call.keywords if word.arg is None] for call in launches]
    assert all(spread), f"a launch of {path.name} passes no options"
    assert "launch_options()" in source
