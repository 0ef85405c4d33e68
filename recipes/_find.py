"""Finding recipes: those that come with the package by name, one's own by file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import sys
from types import ModuleType

from constrainx.errors import did_you_mean
from constrainx.recipes._recipe import Recipe
from constrainx.recipes._resolve import RecipeError


def all_recipes() -> dict[str, type[Recipe]]:
    """The recipes that come with the package, by name."""
    found = {}
    for module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)]):
        if module.name.startswith("_"):
            continue
        for recipe in _recipes_in(importlib.import_module(f"{__package__}.{module.name}")):
            found[recipe.name] = recipe
    return dict(sorted(found.items()))


def find(name: str) -> type[Recipe]:
    """Finds a recipe by its name, or by the file that defines it.

    >>> find("o3-inertia").__name__
    'O3Inertia'

    Raises:
        RecipeError: there is no such recipe; the message has the nearest name that exists.
    """
    if name.endswith(".py"):
        return _load(pathlib.Path(name))
    recipes = all_recipes()
    if name not in recipes:
        raise RecipeError(
            f"there is no recipe {name!r}.{did_you_mean(name, recipes)} `constrainx list` shows "
            "all; name your own by its file, such as my_recipe.py."
        )
    return recipes[name]


def describe(recipe: type[Recipe]) -> str:
    """What a recipe shows, in one line: the first of its module's docstring, or of its own."""
    text = inspect.getdoc(sys.modules[recipe.__module__]) or inspect.getdoc(recipe) or ""
    return text.splitlines()[0] if text else ""


def read_starter(file: pathlib.Path) -> str:
    """The text of a small recipe with comments, under names that fit the file it is written to."""
    words = re.findall(r"[A-Za-z0-9]+", file.stem) or ["my", "recipe"]
    camel = "".join(word[:1].upper() + word[1:] for word in words)
    text = (pathlib.Path(__file__).parent / "_starter.py").read_text()
    return (
        text.replace("MyRecipe", camel if camel[0].isalpha() else f"Recipe{camel}")
        .replace("my-recipe", "-".join(words).lower())
        .replace("my_recipe.py", file.name)
    )


def _load(path: pathlib.Path) -> type[Recipe]:
    """Imports the file, and returns the recipe in it."""
    if not path.is_file():
        hint = did_you_mean(path, path.parent.glob("*.py"), cutoff=0.4)
        raise RecipeError(f"there is no file {path}.{hint}")
    # As for a script: what stands next to the file can be imported.
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.insert(0, folder)
    name = f"constrainx_user_recipe_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Before it runs, because a dataclass looks up its own module.
    sys.modules[name] = module
    specification.loader.exec_module(module)
    found = _recipes_in(module)
    if len(found) != 1:
        names = ", ".join(recipe.__name__ for recipe in found) or "none"
        raise RecipeError(
            f"{path} must define exactly one subclass of `constrainx.recipes.Recipe` that has a "
            f"`trainer` method, found {names}."
        )
    if not isinstance(getattr(found[0], "name", None), str):
        raise RecipeError(
            f"{found[0].__name__} in {path} has no name: give it one, as in "
            f'`name: ClassVar[str] = "{path.stem.replace("_", "-")}"`.'
        )
    return found[0]


def _recipes_in(module: ModuleType) -> list[type[Recipe]]:
    return [
        item
        for item in vars(module).values()
        if isinstance(item, type)
        and issubclass(item, Recipe)
        and item.__module__ == module.__name__
        and not inspect.isabstract(item)
    ]
