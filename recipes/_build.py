"""The trainer of a recipe, checked to be what the options asked for."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
from jax.sharding import Mesh

from constrainx.recipes._recipe import Recipe
from constrainx.recipes._resolve import RecipeError
from constrainx.trainers import Devices, Logging, Trainer, forget_values

log = logging.getLogger("constrainx")
# What a recipe raises that computes with parameters before there are any, or keeps the result.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


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


def build_abstract(recipe: Recipe, mesh: Mesh) -> Trainer:
    """The trainer of a recipe on any mesh, without arrays: to compile its step, not to train.

    The recipe is built inside of `jax.eval_shape`, so that not even the parameters exist. A recipe
    that needs their values, or makes its data by JAX, is built as usual, on one device of this
    machine, and its parameters are then forgotten.

    Args:
        recipe: whose step to compile.
        mesh: with the axes "data" and "fsdp"; its devices need not exist.
    """
    alone = recipe.but(devices=1, fsdp=1)

    def place(trainer: Trainer) -> Trainer:
        model = forget_values(trainer.model)
        return dataclasses.replace(trainer, model=model, devices=Devices(mesh=mesh))

    try:
        built: list[Trainer] = []
        jax.eval_shape(lambda: built.append(build_trainer(alone, progress=False)))
        trainer = place(built[0])
        trainer.validate()
    except NEEDS_VALUES:
        log.info("%s needs values to be built: its parameters are made here first", recipe.name)
        trainer = place(build_trainer(alone, progress=False))
    return trainer


def _agrees(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Logging):
        return found == wanted
    # A recipe may have callbacks of its own, a title and an opinion about the bar.
    return found.every == wanted.every and all(one in found.callbacks for one in wanted.callbacks)
