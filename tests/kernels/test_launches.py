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
WEIGHTS = ("weight", "w_", "q_norm", "kv_norm", "scale")
"""How pointers to what no kernel writes begin."""


class Paths:
    """All ways through one kernel of a file, its helpers included.

    early: what it loads before it has waited. ends: lines where a program ends without having waited.
    """

    def __init__(self, name: str, functions: dict[str, ast.FunctionDef]) -> None:
        self._functions = functions
        self.early: list[ast.Call] = []
        self.ends: list[int] = []
        kernel = functions[name]
        if not self._walk(kernel.body, waited=False, is_kernel=True):
            self.ends.append(kernel.end_lineno or kernel.lineno)

    def _walk(self, body: list[ast.stmt], *, waited: bool, is_kernel: bool) -> bool:
        """Go through statements; whether every program has waited that comes to their end."""
        for statement in body:
            if isinstance(statement, ast.If):
                self._read(statement.test, waited)
                branches = (statement.body, statement.orelse)
                after = [self._walk(each, waited=waited, is_kernel=is_kernel) for each in branches]
                waited = all(after)
            elif isinstance(statement, ast.For | ast.While):
                self._walk(statement.body, waited=waited, is_kernel=is_kernel)  # which may run no time
            elif isinstance(statement, ast.Return) and is_kernel:
                if not waited:
                    self.ends.append(statement.lineno)
                return True  # nobody comes to the end this way
            else:
                waited = self._read(statement, waited)
        return waited

    def _read(self, node: ast.AST, waited: bool) -> bool:
        """Go through one statement without branches, and what it calls or hands on to be called."""
        if waited:
            return True
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        self.early += [call for call in calls if ast.unparse(call.func) in ("tl.load", "gl.load")]
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        helpers = [self._functions[name] for name in names if name in self._functions]
        inside = [self._walk(helper.body, waited=False, is_kernel=False) for helper in helpers]
        return bool(WAITS & set(names)) or any(inside)


def _paths(source: str) -> dict[str, Paths]:
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return {name: Paths(name, functions) for name in functions if name.endswith("_kernel")}


def _is_constant_or_early(load: ast.Call) -> bool:
    by_l2 = any(word.arg == "cache_modifier" for word in load.keywords)
    return by_l2 or ast.unparse(load.args[0]).startswith(WEIGHTS)


def _launches_without_options(source: str) -> list[str]:
    """Launches whose keywords hold no `launch_options()`, in themselves or in a dictionary that does."""
    tree = ast.parse(source)
    with_options = {"launch_options()"}
    for node in ast.walk(tree):  # in the order of lines, so that one may be made from another
        if isinstance(node, ast.Assign) and any(word in ast.unparse(node.value) for word in with_options):
            with_options |= {ast.unparse(target) for target in node.targets}
    launches = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("_kernel")
    ]
    assert launches
    spread = [{ast.unparse(word.value) for word in call.keywords if word.arg is None} for call in launches]
    return [
        ast.unparse(call.func)
        for call, words in zip(launches, spread, strict=True)
        if not words & with_options
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_program_waits_for_its_inputs_before_it_ends(path: Path) -> None:
    """On every path. What a kernel reads early, it may because every kernel before the last has ended."""
    found = _paths(path.read_text())
    assert found
    assert {name: paths.ends for name, paths in found.items() if paths.ends} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_loaded_before_the_wait_is_constant_or_comes_from_the_l2(path: Path) -> None:
    """Anything else may not be written yet, or lie in the L1 as it was."""
    loads = {name: paths.early for name, paths in _paths(path.read_text()).items()}
    wrong = {
        name: [ast.unparse(load) for load in early if not _is_constant_or_early(load)]
        for name, early in loads.items()
    }
    assert {name: early for name, early in wrong.items() if early} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_launch_takes_the_launch_options(path: Path) -> None:
    """As keywords of its own, or in a dictionary that its file makes with them."""
    assert _launches_without_options(path.read_text()) == []


KERNEL = """
@triton.jit
def _helper(PDL):
    wait_for_inputs(PDL)

@triton.jit
def _some_kernel(x_ptr, weight_ptr, PDL):
    weight = tl.load(weight_ptr)
    if weight > 0:
        _helper(PDL)
        x = tl.load(x_ptr)
    else:
        wait_for_inputs(PDL)
        return
    tl.store(x_ptr, x)

def run(grid, x):
    _some_kernel[grid](x, **launch_options())
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("        wait_for_inputs(PDL)\n        return", "        return"),
        ("    weight = tl.load(weight_ptr)", "    weight = tl.load(x_ptr)"),
        ("        _helper(PDL)\n", ""),
        ("**launch_options()", "**{'PDL': False}"),
    ],
)
def test_these_tests_see_each_mistake(right: str, wrong: str) -> None:
    """And none in a kernel that has none."""

    def faults(source: str) -> list[object]:
        paths = _paths(source)["_some_kernel"]
        early = [load for load in paths.early if not _is_constant_or_early(load)]
        return [*paths.ends, *early, *_launches_without_options(source)]

    assert faults(KERNEL) == []
    assert right in KERNEL
    assert faults(KERNEL.replace(right, wrong)) != []
