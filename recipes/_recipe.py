"""A recipe: everything that defines a run, as a frozen dataclass with a command line of its own."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import math
import pathlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeAlias

from constrainx.errors import UserError
from constrainx.runtime import Callback, Keep
from constrainx.step import Lagrangian, Method, MethodName, Penalty, as_method
from constrainx.trainers import Devices, Logging, OnNonFinite, Precision, RunFolder, Trainer

Size: TypeAlias = Literal["smoke", "cpu", "full"]
SIZES: tuple[Size, ...] = ("smoke", "cpu", "full")
# Where a run takes place; it may go on elsewhere.
PLACE = ("devices", "fsdp")


class RecipeError(UserError, ValueError):
    """There is no such recipe, or it cannot be used like this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """What to train, on what, and how; subclass it and write `trainer`.

    Class attributes say what there is to choose from. ``methods``, ``sizes`` and ``presets`` are
    the fields that each choice sets; a field that is given by hand wins over them.

    Attributes:
        method: which of the recipe's methods trains the network.
        size: "smoke" takes seconds, "cpu" minutes on two cores, "full" is for GPUs.
        preset: "ours", or "paper" to follow the paper as far as it can be followed.
        seed: of data, network and training.
        devices: how many to use; None for all.
        fsdp: how many devices share each large parameter.
        precision: of the forward and backward pass.
        accumulate: gradients in so many parts.
        ema: the decay of an average of the parameters, with which to evaluate.
        log_every: steps between logs.
        save_every: steps between checkpoints; None for one at the end.
        keep: which checkpoints stay.
        on_nonfinite: what to do at a step that is not finite.
        on_save_error: what to do when a checkpoint cannot be written.
    """

    name: ClassVar[str]
    methods: ClassVar[Mapping[str, Mapping[str, Any]]]
    compared: ClassVar[Sequence[str]]
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    figures: ClassVar[Mapping[str, str]]

    method: str
    size: Size = "full"
    preset: Literal["ours", "paper"] = "ours"
    seed: int = 0
    devices: int | None = None
    fsdp: int = 1
    precision: Precision = "float32"
    accumulate: int = 1
    ema: float | None = None
    log_every: int = 50
    save_every: int | None = None
    keep: Keep = dataclasses.field(default_factory=Keep)
    on_nonfinite: OnNonFinite = "stop"
    on_save_error: Literal["stop", "continue"] = "stop"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, self.methods, owner=self.name)
        _check_choice("size", self.size, SIZES, owner=self.name)
        _check_choice("preset", self.preset, ("ours", "paper"), owner=self.name)

    @abc.abstractmethod
    def trainer(self, **options: Any) -> Trainer:
        """Builds everything; ``options`` such as ``run=`` are those of `settings`."""

    @property
    def published(self) -> Mapping[str, Mapping[str, str]]:
        """The paper's figures, by method and name, as they are printed there."""
        return {}

    def measure(self, model: Any) -> dict[str, float]:  # noqa: ARG002
        """Figures of the trained model that are too dear for every evaluation."""
        return {}

    def draw(self, model: Any, path: pathlib.Path) -> None:  # noqa: B027
        """Draws what the trained model has learnt, if there is something to see."""

    def remarks(self, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:  # noqa: ARG002
        """Sentences below the table of a comparison, such as a test of significance.

        Args:
            results: by method, one for each seed, with their ``metrics`` and ``seconds``.
        """
        return []

    @classmethod
    def chosen(
        cls, *, method: str | None = None, size: str = "full", preset: str = "ours", **fields: Any
    ) -> Any:
        """The recipe with what method, size and preset stand for, and other fields by hand.

        Example:
            ``O3Inertia.chosen(size="smoke", method="plain", seed=3)``
        """
        method = next(iter(cls.methods)) if method is None else method
        _check_choice("method", method, cls.methods, owner=cls.name)
        _check_choice("size", size, SIZES, owner=cls.name)
        _check_choice("preset", preset, ("ours", "paper"), owner=cls.name)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            _check_choice("field", name, known, owner=cls.name)
        # A size makes the network and the data smaller, whatever the method asks for.
        layers = [
            cls.presets.get(preset, {}),
            cls.methods[method],
            cls.sizes.get(size, {}),
            {"method": method, "size": size, "preset": preset},
            fields,
        ]
        return cls(**{name: value for layer in layers for name, value in layer.items()})

    def settings(
        self,
        *,
        run: pathlib.Path | str | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> dict[str, Any]:
        """The fields that every recipe has, in the groups that a trainer takes them in.

        Args:
            run: the folder of the run; None for none.
            callbacks: who listens.
            progress: whether to show a bar.
        """
        folder = RunFolder(
            "" if run is None else run,
            config=self.config,
            save_every=self.save_every,
            keep=self.keep,
            on_save_error=self.on_save_error,
        )
        return {
            "seed": self.seed,
            "devices": Devices(self.devices, fsdp=self.fsdp),
            "precision": self.precision,
            "accumulate": self.accumulate,
            "ema": self.ema,
            "on_nonfinite": self.on_nonfinite,
            "run": None if run is None else folder,
            "logging": Logging(
                every=self.log_every,
                callbacks=callbacks,
                progress=progress,
                title=f"{self.name} {self.method}",
            ),
        }

    @property
    def config(self) -> dict[str, Any]:
        """All that defines the run, and nothing about where it takes place."""
        fields = dataclasses.asdict(self)
        kept = {name: value for name, value in fields.items() if name not in PLACE}
        return {"recipe": source_of(type(self)), **kept}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **place: Any) -> Any:
        """The recipe of a run, for other devices perhaps."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(config) - known - {"recipe"})
        if unknown:
            raise RecipeError(
                f"the run's config.json has fields that {cls.name!r} does not know: {unknown}. It "
                "was written by another version of the recipe."
            )
        fields = {name: value for name, value in config.items() if name in known}
        if isinstance(fields.get("keep"), Mapping):
            fields["keep"] = Keep(**fields["keep"])
        return cls(**{**fields, **place})


def all_recipes() -> dict[str, type[Recipe]]:
    """The recipes that come with the package, by name."""
    from constrainx import recipes

    found = {}
    for module in pkgutil.iter_modules(recipes.__path__):
        if module.name.startswith("_"):
            continue
        for recipe in _recipes_in(importlib.import_module(f"{recipes.__name__}.{module.name}")):
            found[recipe.name] = recipe
    return dict(sorted(found.items()))


def find(name: str) -> type[Recipe]:
    """A recipe by its name, or by the file that it is in.

    Raises:
        RecipeError: there is none; with the nearest name that there is.
    """
    if name.endswith(".py"):
        return _from_file(pathlib.Path(name))
    recipes = all_recipes()
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.0)
        raise RecipeError(
            f"there is no recipe {name!r}. Did you mean {near[0]!r}? `constrainx list` shows all; "
            "your own goes by its file, such as my_recipe.py."
        )
    return recipes[name]


def summary(recipe: type[Recipe]) -> str:
    """What it shows, in one line: the first of its module's docstring."""
    text = inspect.getdoc(sys.modules[recipe.__module__]) or inspect.getdoc(recipe) or ""
    return text.splitlines()[0] if text else ""


def source_of(recipe: type[Recipe]) -> str:
    """How to find the recipe again: its name, or the file that it is in."""
    module = sys.modules[recipe.__module__]
    if recipe.__module__.startswith("constrainx.recipes."):
        return recipe.name
    return str(pathlib.Path(module.__file__ or "").absolute())


def _from_file(path: pathlib.Path) -> type[Recipe]:
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [],
            n=1, cutoff=0.4,
        )  # fmt: skip
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise RecipeError(f"there is no file {path}.{hint}")
    name = f"constrainx_user_recipe_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    found = _recipes_in(module)
    if len(found) != 1:
        raise RecipeError(
            f"{path} must define one subclass of `constrainx.recipe.Recipe`, found "
            f"{[recipe.__name__ for recipe in found] or 'none'}."
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


def _check_choice(field: str, value: Any, choices: Any, *, owner: str) -> None:
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), map(str, choices), n=1, cutoff=0.0)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(f"{owner} has no {field} {value!r}: use one of {list(choices)}.{hint}")


def weigh_method(name: MethodName, weight: float) -> Method:
    """The method of that name, with this weight if it has one."""
    if name == "penalty":
        return Penalty(weight)
    return Lagrangian(weight) if name == "lagrangian" else as_method(name)


def steps_of(*, epochs: float, examples: int, batch: int) -> int:
    """So many passes over the data, in steps."""
    return max(1, math.ceil(epochs * examples / batch))
