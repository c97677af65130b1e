"""Every kernel of every file waits for the kernel before it, and is launched so that it may start early."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nextn.kernels

FILES = sorted(
    path for path in Path(nextn.kernels.__file__).parent.glob("*.py") if "_kernel[" in path.read_text()
)


WAITS = {"wait_for_inputs", "wait_alone"}


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _named(node: ast.AST) -> set[str]:
    """Names that a piece of code uses: functions that it calls, and such that it hands on to be called."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _waits(name: str, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether a function calls a wait, itself or through a helper of its file."""
    named = _named(functions[name])
    return bool(WAITS & named) or any(
        _waits(each, functions) for each in named if each in functions and each != name
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_kernel_waits_for_its_inputs(path: Path) -> None:
    """Launched early, it would otherwise read what is not written yet."""
    functions = _functions(ast.parse(path.read_text()))
    kernels = [name for name in functions if name.endswith("_kernel")]
    assert kernels
    assert [name for name in kernels if not _waits(name, functions)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_program_ends_before_it_has_waited(path: Path) -> None:
    """What a kernel reads early, it may read because every kernel before the last has ended."""
    for name, function in _functions(ast.parse(path.read_text())).items():
        waits = [
            node.lineno for node in ast.walk(function) if isinstance(node, ast.Name) and "wait_" in node.id
        ]
        returns = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Return)]
        if name.endswith("_kernel") and returns:
            assert min(waits) < min(returns), f"{name} returns before it waits"


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
