"""The code in README, CONTRIBUTING and docs runs, top to bottom, and names in them exist."""

import json
import pathlib
import pkgutil
import re
import sys
import types

import pytest

from constrainx.recipes import all_recipes

from .import_contract import LAYERS, read_modules

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "recipes").glob("*.md")]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(PAGES)]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # A module, because dataclasses and recipes look up the one that they are defined in.
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, path.stem, module)
    exec(compile(_keep_code(path.read_text()), str(path), "exec"), vars(module))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
        text = (path.parent / target).read_text() if target else path.read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in [_make_anchor(heading) for heading in headings], anchor


def test_the_table_of_killed_runs_has_every_recipe():
    found = json.loads((ROOT / "docs" / "results" / "soak.json").read_text())
    assert found.keys() == all_recipes().keys()
    table = (ROOT / "docs" / "results" / "soak.md").read_text()
    for name, layouts in found.items():
        assert not any(one["lost"] for one in layouts)
        assert layouts[0]["layout"] == "same device"
        assert layouts[0]["difference"] == 0.0
        assert table.count(f"| {name} |") == len(layouts) == 3


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"`((?:cx|constrainx)(?:\.\w+)+)[`(]", ARCHITECTURE))),
)
def test_names_on_the_page_about_the_architecture_exist(name):
    pkgutil.resolve_name(re.sub(r"^cx\b", "constrainx", name))


def test_paths_on_the_page_about_the_architecture_exist():
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", ARCHITECTURE)
    assert "tests/test_house.py" in paths
    missing = [
        path
        for path in paths
        if not (ROOT / path).exists() and not (ROOT / "constrainx" / path).exists()
    ]
    assert not missing


def test_the_tree_on_the_page_about_the_architecture_is_the_one_there_is():
    tree = re.search(r"^constrainx/\n((?:  .*\n)+)", ARCHITECTURE, re.MULTILINE)[1]
    rooms = re.findall(r"^  (\w+)(?:/|\.py) ", tree, re.MULTILINE)
    assert tuple(rooms) == LAYERS
    drawn, room = set(), ""
    for indent, name in re.findall(r"^( +)(\w+)/ ", tree, re.MULTILINE):
        room = name if len(indent) == 2 else room
        drawn.add(name if len(indent) == 2 else f"{room}.{name}")
    modules = read_modules(ROOT / "constrainx").values()
    assert drawn == {module.inner_name for module in modules if module.is_face} - {""}


@pytest.mark.parametrize(
    "package", ["", ".groups", ".representations", ".masks", ".data", ".models"]
)
def test_every_public_name_is_on_the_page_about_the_api(package):
    face = pathlib.Path(pkgutil.resolve_name(f"constrainx{package}").__file__).read_text()
    # `Element` is a type alias.
    exported = set(re.findall(r"^from .* as (\w+)$", face, re.MULTILINE)) - {"Element"}
    shown = set(re.findall(rf"^::: constrainx{re.escape(package)}\.(\w+)", API, re.MULTILINE))
    assert not exported - shown


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)", API, re.MULTILINE))
def test_names_on_the_page_about_the_api_exist(name):
    pkgutil.resolve_name(name)


def _keep_code(text):
    """The Python blocks of a page, on the lines where they are, so that tracebacks point there."""
    lines, is_code = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = line == "```python"
            lines.append("")
        else:
            lines.append(line if is_code else "")
    return "\n".join(lines)


def _make_anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
