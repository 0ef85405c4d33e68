"""Comparisons at equal time: how long a step of each method takes, and so how many each gets."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from constrainx.errors import UserError
from constrainx.recipes._build import build_trainer
from constrainx.recipes._recipe import Recipe
from constrainx.runtime import read_object, write_object
from constrainx.trainers import StepClock

# The fastest round counts, because what disturbs a measurement only ever makes it slower.
ROUNDS = 3
SECONDS_A_ROUND = 1.0
# Each try is off by a fraction of a step for each of the steps before.
TRIES = 4


class EqualTimeError(UserError, ValueError):
    """Methods cannot be given equal time like this."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What a method does with the time that it is given.

    Attributes:
        seconds: the time, for steps alone.
        step_seconds: how long one step takes, as it was measured.
        steps: how many steps fit.
        fields: of the recipe, so that it takes that many steps.
    """

    seconds: float
    step_seconds: float
    steps: int
    fields: Mapping[str, Any]

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with that number of steps, whose config.json says why."""
        record = {name: getattr(self, name) for name in ("seconds", "step_seconds", "steps")}
        return recipe.but(**self.fields).record_budget(record)


def share_time(
    recipe: Recipe, methods: Sequence[str], path: pathlib.Path, *, seconds: float | None
) -> dict[str, Share]:
    """Gives each method the same time, by measuring how long its steps take.

    What was measured is written to a file and read from there the next time, so that a comparison
    that continues has the same steps. A method that is not in it yet is measured then.

    Args:
        recipe: what all runs have in common.
        methods: of the recipe.
        path: of the file.
        seconds: for the steps of each run; None for as long as the first method takes for its own.

    Raises:
        EqualTimeError: the file is of another recipe or another time, or the recipe has no field
            that says how long it trains.
    """
    stored = _read(path, seconds)
    missing = [method for method in methods if method not in stored["methods"]]
    if missing:
        # The first one decides how much time there is, whether or not it was measured before.
        timed = missing if seconds is not None or "seconds" in stored else [methods[0], *missing]
        timed = list(dict.fromkeys(timed))
        counts = {method: count_steps(recipe.but(method=method)) for method in timed}
        times = time_methods([recipe.but(method=method) for method in timed])
        step_seconds = dict(zip(timed, times, strict=True))
        if "seconds" not in stored:
            first = methods[0]
            stored["seconds"] = seconds or step_seconds[first] * counts[first]
            stored["is_given"] = seconds is not None
        for method in missing:
            steps = allocate_steps(stored["seconds"], step_seconds[method])
            fields, taken = stretch(
                recipe.but(method=method), steps, taken=counts[method], count=count_steps
            )
            share = Share(stored["seconds"], step_seconds[method], taken, fields)
            stored["methods"][method] = dataclasses.asdict(share)
        stored.setdefault("measured", time.strftime("%Y-%m-%d %H:%M:%S %z"))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_object(path, stored)
    return {method: Share(**stored["methods"][method]) for method in methods}


def allocate_steps(seconds: float, step_seconds: float) -> int:
    """How many steps fit into the time, and at least one.

    >>> allocate_steps(60, 0.25), allocate_steps(0.1, 0.25)
    (240, 1)
    """
    return max(1, round(seconds / step_seconds))


def stretch(
    recipe: Recipe, steps: int, *, taken: int, count: Callable[[Recipe], int]
) -> tuple[dict[str, Any], int]:
    """The fields with which a recipe takes that many steps, or as nearly as its fields allow.

    Whole epochs can be met only to half an epoch; a fraction of an epoch, or steps, exactly.

    Args:
        recipe: how it is.
        steps: how many it should take.
        taken: how many it takes.
        count: how many another one takes.

    Returns:
        The fields, and how many steps it then takes.

    Raises:
        EqualTimeError: none of the recipe's fields says how long it trains.
    """
    known = recipe.field_names()
    names = [n for n in recipe.stretches if n in known and getattr(recipe, n) is not None]
    if not names:
        raise EqualTimeError(
            f"{type(recipe).__name__} has no field that says how long it trains, such as `steps` "
            "or `epochs`, so its methods cannot be given equal time. Add one, or name yours in the "
            'class attribute `stretches`, as in `stretches: ClassVar = ("iterations",)`.'
        )
    hints = typing.get_type_hints(type(recipe))
    found: list[tuple[int, dict[str, Any]]] = []
    # A part of a step counts as a whole one, so the middle of the last step is safest.
    factor = (steps - 0.5) / max(taken - 0.5, 0.5)
    for _ in range(TRIES):
        fields = {n: _multiply(getattr(recipe, n), factor, hints[n]) for n in names}
        now = count(recipe.but(**fields))
        found.append((now, fields))
        if now == steps:
            break
        factor *= (steps - 0.5) / max(now - 0.5, 0.5)
    taken, fields = min(found, key=lambda one: abs(one[0] - steps))
    return fields, taken


def count_steps(recipe: Recipe) -> int:
    """How many steps a recipe takes, by building its trainer."""
    return build_trainer(recipe, progress=False).steps


def time_methods(recipes: Sequence[Recipe]) -> list[float]:
    """How long a step of each recipe takes, in seconds.

    In each round all of them are timed, so that a machine that becomes busy slows down all alike.
    """
    with contextlib.ExitStack() as stack:
        clocks: list[StepClock] = [
            stack.enter_context(build_trainer(recipe, progress=False).clock_steps())
            for recipe in recipes
        ]
        rounds = [
            [clock.measure(seconds=SECONDS_A_ROUND) for clock in clocks] for _ in range(ROUNDS)
        ]
    return [min(times) for times in zip(*rounds, strict=True)]


def _multiply(value: Any, factor: float, hint: Any) -> Any:
    """The value times the factor, as a whole number of at least 1 where only these are allowed."""
    if float in (hint, *typing.get_args(hint)):
        return float(f"{value * factor:.9g}")
    return max(1, round(value * factor))


def _read(path: pathlib.Path, seconds: float | None) -> dict[str, Any]:
    try:
        stored = read_object(path)
    except FileNotFoundError:
        return {"methods": {}}
    except ValueError as error:
        raise EqualTimeError(
            f"{path} is damaged: {error}. Choose another folder with `--out`."
        ) from error
    before = stored["seconds"] if stored["is_given"] else None
    if before != seconds:
        asked = "`--equal-time`" if seconds is None else f"`--seconds {seconds:g}`"
        had = "`--equal-time`" if before is None else f"`--seconds {before:g}`"
        raise EqualTimeError(
            f"the runs in {path.parent} are of a comparison with {had}, and this one has {asked}. "
            "Choose another folder with `--out`."
        )
    return stored
