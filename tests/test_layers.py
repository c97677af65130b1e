"""Imports go one way: server -> engine -> (tree, models) -> kernels; the root's modules are leaves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nextn

ROOT = Path(nextn.__file__).parent
LEAVES = {"config", "errors", "text", "demo"}
BELOW = {
    "server": {"engine", "tree", "models", "kernels"},
    "engine": {"tree", "models", "kernels"},
    "tree": {"kernels"},
    "models": {"kernels"},
    "kernels": set(),
}
KERNEL_LIBRARIES = {"torch", "triton"}
OPTIONAL = ("fastapi", "starlette", "uvicorn", "flashinfer", "triton")
"""Packages that offline use on a CPU does without: the server's, and what only a GPU needs."""


def source_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Absolute names of what a file imports anywhere, type-checking blocks included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; name the module in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer(name: str) -> str | None:
    """`engine` for nextn.engine.step, `config` for nextn.config.SpecConfig; None outside nextn."""
    parts = name.split(".")
    return parts[1] if parts[0] == "nextn" and len(parts) > 1 else None


@pytest.mark.parametrize("path", source_files(), ids=module_of)
def test_a_module_imports_only_what_lies_below_it(path):
    own = layer(module_of(path))
    targets = {layer(name) for name in imported(path)} - {None, "__version__"}
    if own is None:  # nextn/__init__.py exports the offline engine
        assert targets <= LEAVES | {"engine"}
    else:
        assert targets <= LEAVES | {own} | BELOW.get(own, set())


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=module_of)
def test_kernels_need_no_library_but_torch_and_triton(path):
    """Nor anything of nextn's but its errors, so that a kernel can be read and reused alone."""
    names = imported(path)
    libraries = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"nextn"}
    assert libraries <= KERNEL_LIBRARIES
    assert {layer(name) for name in names} - {None} <= {"kernels", "errors"}


def test_every_folder_has_its_layer():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    modules = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    assert folders | modules <= set(BELOW) | LEAVES


def test_everything_but_server_and_triton_files_imports_without_optional_packages():
    """A CPU installation without Triton runs, and `from nextn import LLM` needs no web framework."""
    modules = [
        module_of(path)
        for path in source_files()
        if layer(module_of(path)) != "server" and not _is_optional(imported(path, top_level_only=True))
    ]
    assert {"nextn.engine", "nextn.models", "nextn.tree", "nextn.kernels.ops"} <= set(modules)
    program = f"""
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
for module in {modules!r}:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_servers_flags_are_read_without_torch():
    """`nextn-serve --help` and the refusal of a wrong flag would else wait seconds for it."""
    program = "import sys, nextn.server.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "nextn.server.cli imports torch"


def _is_optional(names: set[str]) -> bool:
    """Whether a file is a Triton file: the only kind, beside the server's, that may name them at its top."""
    return any(name.split(".")[0] == "triton" for name in names)


def test_triton_files_lie_in_kernels_alone():
    for path in source_files():
        if _is_optional(imported(path)):
            assert layer(module_of(path)) == "kernels", path
