"""The recipe of a run that exists, for continuing or measuring it."""

from __future__ import annotations

import logging
import pathlib

from constrainx.recipes._find import find
from constrainx.recipes._recipe import Recipe
from constrainx.recipes._source import digest_source
from constrainx.runtime import RunError, read_config

log = logging.getLogger("constrainx")


def read_recipe(run: pathlib.Path, *, file: pathlib.Path | str | None = None) -> Recipe:
    """Reads the recipe that a run was started from.

    A run's folder may come from somebody else, and a recipe is code. So a recipe that does not come
    with the package is only imported if the caller names its file; what the folder says about that
    file, its digest included, proves nothing.

    Args:
        run: its folder.
        file: the file of a recipe that you trust.

    Raises:
        RunError: the folder has no run, one that was started without a recipe, or one whose recipe
            is a file and was not named.
    """
    config = read_config(run)
    recipe = config.get("recipe")
    if not isinstance(recipe, str):
        raise RunError(
            f"{run} was not started from a recipe: build its Trainer in Python and call restore()."
        )
    if file is None and recipe.endswith(".py"):
        raise RunError(
            f"{run} was started from {recipe!r}, which is not part of constrainx. Continuing or "
            "measuring the run executes the code in that file. If you know what is in it, name it: "
            f"`--recipe {recipe}`, or `cx.load(run, recipe=...)` in Python."
        )
    kind = find(recipe if file is None else str(file))
    source = config.get("source")
    recorded = source.get("recipe") if isinstance(source, dict) else None
    if recorded is not None and recorded != digest_source(kind)["recipe"]:
        log.warning(
            "the source of %s is not what %s was last trained with", file or recipe, run.name
        )
    return kind.from_config(config)
