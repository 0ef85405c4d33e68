"""The trainer of a recipe, checked to be what the options asked for."""

from __future__ import annotations

from typing import Any

from constrainx.recipes._recipe import Recipe
from constrainx.recipes._resolve import RecipeError
from constrainx.trainers import Logging, Trainer


def build_trainer(recipe: Recipe, **options: Any) -> Trainer:
    """Calls `Recipe.trainer`, and checks that it passed on everything that `settings` returns.

    A recipe that forgets to would train without the folder, the seed or the devices that were asked
    for, and say nothing.

    Args:
        recipe: what to train.
        options: those of `Recipe.settings`, such as ``run=``.

    Raises:
        RecipeError: the trainer has other settings than those of the recipe and the options.
    """
    trainer = recipe.trainer(**options)
    wanted = recipe.settings(**options)
    lost = [name for name, value in wanted.items() if not _agrees(getattr(trainer, name), value)]
    if lost:
        raise RecipeError(
            f"`{type(recipe).__name__}.trainer` did not pass on {', '.join(map(repr, lost))}, so "
            "options would have no effect: end its call of `Trainer` with "
            "`**self.settings(**options)`, and leave these arguments to it."
        )
    return trainer


def _agrees(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Logging):
        return found == wanted
    # A recipe may have callbacks of its own, a title and an opinion about the bar.
    return found.every == wanted.every and all(one in found.callbacks for one in wanted.callbacks)
