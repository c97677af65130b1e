"""What the package says of itself agrees: version, changelog, entry points, the files that a wheel holds."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import nextn

REPOSITORY = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_installed_version_is_the_source_version():
    assert importlib.metadata.version("nextn") == nextn.__version__


def test_changelog_begins_with_this_version():
    headings = re.findall(
        r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert headings[0] == nextn.__version__


@pytest.mark.parametrize("target", PROJECT["scripts"].values())
def test_every_command_has_its_function(target):
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_constraints_cover_every_dependency_but_triton_and_flashinfer():
    """What CI tests with is fixed, so that a release elsewhere cannot turn it red."""
    text = (REPOSITORY / "requirements/constraints.txt").read_text(encoding="utf-8")
    pinned = {line.split("==")[0].lower() for line in text.splitlines() if "==" in line}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in wanted} - {"nextn"}
    assert {name.replace("-", "_") for name in names} <= {name.replace("-", "_") for name in pinned}


def test_no_source_trusts_remote_code():
    for path in Path(nextn.__file__).parent.rglob("*.py"):
        assert "trust_remote_code=True" not in path.read_text(encoding="utf-8"), path
