"""The code in README and docs runs, top to bottom, and names that they mention exist."""

import pathlib
import pkgutil
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
# On the page already, and about to be written.


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(path):
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict = {"__name__": path.stem}
    exec(compile("\n".join(blocks), str(path), "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"`((?:cx|constrainx)(?:\.\w+)+)[`(]", ARCHITECTURE))),
)
def test_names_on_the_page_about_the_architecture_exist(name):
    pkgutil.resolve_name(re.sub(r"^cx\b", "constrainx", name))
