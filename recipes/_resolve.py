"""How the words of a recipe become its fields: preset, then method, then size, then your own."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from constrainx.errors import UserError, check_choice, did_you_mean

SIZES = ("smoke", "cpu", "full")
PRESETS = ("ours", "paper")
# The fields that stand for others, in the order in which they are applied.
CHOICES = ("preset", "method", "size")
# What a run's config.json holds besides the fields: which recipe it was, digests of its code, and
# the settings that changed when it was continued, and how a comparison chose its steps.
RECORDED = ("recipe", "source", "changes", "equal_time")


class RecipeError(UserError, ValueError):
    """There is no such recipe, or it cannot be used like this."""


class Resolving(abc.ABCMeta):
    """The metaclass of recipes: resolves the fields that were given before `__init__` sees them.

    `__post_init__` would be too late. By then the dataclass has filled in its defaults, and nobody
    can tell a default, which a method may set, from a field that was given by hand and must win.
    """

    def __call__(cls, *unnamed: Any, _given: Mapping[str, Any] | None = None, **fields: Any) -> Any:
        """Builds the recipe; ``_given`` comes from `dataclasses.replace`, with all other fields."""
        if _given is not None:
            before = super().__call__(**resolve(cls, _given), _given=_given)
            changed = {name: fields[name] for name in fields if fields[name] != vars(before)[name]}
            _refuse_choices(cls, changed)
            fields = {**_given, **changed}
        return super().__call__(*unnamed, **resolve(cls, fields), _given=fields)


def resolve(recipe: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges what preset, method and size stand for with the fields given by hand, which win.

    Args:
        recipe: the class.
        given: its fields, as the user gave them.

    Raises:
        RecipeError: the recipe has no such field, or one that would hide what a run records.
        ArgumentError: it has no such preset, method or size.
    """
    known = recipe.field_names()
    for name in RECORDED:
        if name in known:
            raise RecipeError(
                f"{recipe.__name__} must not have a field {name!r}, because config.json has an "
                "entry of that name for itself. Rename the field."
            )
    defaults = {field.name: field.default for field in dataclasses.fields(recipe)}
    _check_fields(given, known, owner=recipe.__name__)
    preset = given.get("preset", defaults["preset"])
    methods = recipe.methods or {"default": {}}
    method = given.get("method", defaults["method"] or next(iter(methods)))
    size = given.get("size", defaults["size"])
    check_choice("preset", preset, PRESETS)
    check_choice("method", method, methods)
    check_choice("size", size, SIZES)
    layers = {
        f"the preset {preset!r} of {recipe.__name__}": recipe.presets.get(preset, {}),
        f"the method {method!r} of {recipe.__name__}": methods[method],
        # After the method, so that it makes network and data small whatever the method asks for.
        f"the size {size!r} of {recipe.__name__}": recipe.sizes.get(size, {}),
    }
    fields: dict[str, Any] = {}
    for owner, layer in layers.items():
        _check_fields(layer, known, owner=owner)
        fields |= layer
    return {**fields, "preset": preset, "method": method, "size": size, **given}


def _check_fields(names: Iterable[str], known: Iterable[str], *, owner: str) -> None:
    for name in names:
        if name not in known:
            raise RecipeError(f"{owner} has no field {name!r}.{did_you_mean(name, known)}")


def _refuse_choices(recipe: type, changed: Mapping[str, Any]) -> None:
    """`replace` passes all fields, so a field of the old method would look as if given by hand."""
    for choice in CHOICES:
        if choice in changed:
            raise RecipeError(
                f"`dataclasses.replace` cannot change the {choice} of {recipe.__name__}, because "
                f"it keeps the fields that the old {choice} has set. Use "
                f"`recipe.but({choice}={changed[choice]!r})`, which sets them anew."
            )
