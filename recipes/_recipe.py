"""A recipe: everything that defines a run, as a frozen dataclass with a command line of its own."""

from __future__ import annotations

import abc
import dataclasses
import math
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias

from constrainx.errors import ArgumentError, did_you_mean
from constrainx.recipes._resolve import CHOICES, RECORDED, RecipeError, Resolving
from constrainx.recipes._source import digest_source, find_file
from constrainx.runtime import Callback, Keep
from constrainx.step import Lagrangian, Method, MethodName, Penalty, as_method
from constrainx.trainers import (
    Devices,
    LearningRate,
    Logging,
    OnNonFinite,
    Precision,
    RunFolder,
    Trainer,
)

Size: TypeAlias = Literal["smoke", "cpu", "full"]
# Where a run takes place. It may continue elsewhere, so a run's config does not hold these.
PLACE = ("devices", "fsdp")
# What is logged and saved, and what happens when something goes wrong. A run may continue with
# other values, because they do not change what is computed.
OVERSIGHT = ("log_every", "save_every", "keep", "on_nonfinite", "on_save_error")
# What may change the result, and still change when a run continues, in a recipe that has it.
ADJUSTABLE = ("steps", "epochs", "learning_rate", "gamma", "weight", "precision", "accumulate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC, metaclass=Resolving):
    """What to train, on what, and how: subclass it and write `trainer`.

    A recipe has every field set to what will run. ``O3Inertia(method="plain", size="smoke",
    width=8)`` first takes the fields of its preset, then those of the method "plain", then those of
    the size "smoke", and then ``width``, which was given by hand. `but` makes another recipe from
    the same words: ``recipe.but(method="penalty")``.

    Class attributes say what there is to choose from:

    - ``name``: what the command line calls the recipe.
    - ``methods``: the fields that each method sets. The first method is the default.
    - ``sizes`` and ``presets``: the fields that each of these sets.
    - ``compared``: the methods that ``constrainx compare`` trains; all if left out.
    - ``figures``: the metrics to put in the table of a comparison, with their headings; all metrics
      if left out.
    - ``stretches``: the fields that say how long a run is, such as ``epochs``. A comparison at
      equal time multiplies those that are set, all by the same factor.
    - ``sweeps``: for each method, the fields that ``constrainx compare --sweep`` tries values of,
      each with the smallest and the largest one.
    - ``validation``: the fields under which figures are those of held-out training data, by which
      the best of a sweep is chosen. Leave it out if every seed has test data of its own.
    - ``axes``: the metrics to call error and violation in the pictures of a comparison. The first
      two of ``figures`` if left out.
    - ``adjustable``: the fields that may change when a run continues, beside those that only say
      where it runs and what is logged and saved. Leave out what shapes the network and what selects
      the data: held-out examples would become training examples.

    Attributes:
        method: which of the recipe's methods trains the network.
        size: "smoke" takes seconds, "cpu" minutes on two cores, "full" is for GPUs.
        preset: "ours", or "paper" to follow the paper as closely as possible.
        seed: the seed of data, network and training.
        devices: how many devices to use; all if None.
        fsdp: how many devices share each large parameter.
        precision: the precision of the forward and backward pass.
        accumulate: split each batch into this many parts and add up their gradients.
        ema: decay of a moving average of the parameters, which is used for evaluation.
        log_every: steps between logs.
        save_every: steps between checkpoints; only one at the end if None.
        keep: which checkpoints to keep.
        on_nonfinite: what to do when a step is not finite.
        on_save_error: what to do when a checkpoint cannot be written.
    """

    name: ClassVar[str]
    methods: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    compared: ClassVar[Sequence[str]] = ()
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    figures: ClassVar[Mapping[str, str]] = {}
    stretches: ClassVar[Sequence[str]] = ("steps", "epochs")
    sweeps: ClassVar[Mapping[str, Mapping[str, tuple[float, float]]]] = {}
    validation: ClassVar[Mapping[str, Any]] = {}
    axes: ClassVar[Sequence[str]] = ()
    adjustable: ClassVar[Sequence[str]] = ADJUSTABLE

    method: str = ""
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
    # The fields that were given by hand. It is a field because `dataclasses.replace` hands on
    # fields and nothing else.
    _given: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    # What a comparison at equal time decided by: a record for config.json, and no field.
    _budget = types.MappingProxyType[str, Any]({})

    @abc.abstractmethod
    def trainer(self, **options: Any) -> Trainer:
        """Builds everything; ``options`` such as ``run=`` are those of `settings`."""

    @property
    def published(self) -> Mapping[str, Mapping[str, str]]:
        """The paper's figures, by method and metric, as printed there."""
        return {}

    def measure(self, model: Any) -> dict[str, float]:  # noqa: ARG002
        """Measures what is too expensive for every evaluation, once, on the trained model."""
        return {}

    def outputs(self, model: Any, batch: Any) -> Any:
        """The outputs that ``constrainx polish`` keeps, at a training batch as a step sees it."""
        return model(batch["x"])

    def draw(self, model: Any, path: pathlib.Path) -> None:
        """Draws what the trained model has learned, if there is something to see."""

    def remarks(self, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:  # noqa: ARG002
        """Sentences to print below the table of a comparison, such as a test of significance.

        Args:
            results: for each method a list with one entry per seed, which has the keys ``metrics``
                and ``seconds``.
        """
        return []

    def but(self, **fields: Any) -> Self:
        """The same recipe except for some fields; a new method, size or preset takes full effect.

        ``O3Inertia(width=8).but(method="plain")`` is ``O3Inertia(width=8, method="plain")``.
        """
        return self._hand_on(type(self)(**{**self._given, **fields}))

    def record_budget(self, budget: Mapping[str, Any]) -> Self:
        """The same recipe, whose config.json says how its number of steps was chosen."""
        other = type(self)(**self._given)
        object.__setattr__(other, "_budget", types.MappingProxyType(dict(budget)))
        return other

    def was_given(self, name: str) -> bool:
        """Whether a field was given by hand, so that it wins over what a method sets."""
        return name in self._given

    def _hand_on(self, other: Self) -> Self:
        if self._budget:
            object.__setattr__(other, "_budget", self._budget)
        return other

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields that can be given, in order."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.name != "_given")

    @classmethod
    def list_changeable(cls) -> tuple[str, ...]:
        """The fields that may differ when a run continues."""
        known = cls.field_names()
        for name in cls.adjustable:
            if name not in known and name not in ADJUSTABLE:
                raise RecipeError(
                    f"`adjustable` of {cls.__name__} names {name!r}, which is no field of it."
                    f"{did_you_mean(name, known)}"
                )
        names = (*PLACE, *OVERSIGHT, *(name for name in cls.adjustable if name in known))
        return tuple(dict.fromkeys(names))

    def settings(
        self,
        *,
        run: pathlib.Path | str | None = None,
        config: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        learning_rate: LearningRate | None = None,
    ) -> dict[str, Any]:
        """The fields that every recipe has, in the groups that a trainer takes them in.

        Args:
            run: the folder of the run; None for none.
            config: what its config.json holds; that of the recipe by default.
            callbacks: to call during the run, besides those that write its folder and show the bar.
            progress: whether to show a bar.
            learning_rate: what the optimizer was made with, to log it.
        """
        folder = RunFolder(
            "" if run is None else run,
            config=self.config if config is None else config,
            save_every=self.save_every,
            keep=self.keep,
            on_save_error=self.on_save_error,
            may_change=(*self.list_changeable(), *self._list_provenance()),
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
                learning_rate=learning_rate,
            ),
        }

    @property
    def config(self) -> dict[str, Any]:
        """Everything that defines the run, without where it takes place."""
        fields = dataclasses.asdict(self)
        kept = {name: fields[name] for name in fields if name not in (*PLACE, "_given")}
        budget = {"equal_time": dict(self._budget)} if self._budget else {}
        return {"recipe": self._source(), "source": digest_source(type(self)), **budget, **kept}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **fields: Any) -> Self:
        """Rebuilds the recipe of a run.

        Args:
            config: the content of the run's config.json.
            fields: fields to change, such as ``devices``.
        """
        known = cls.field_names()
        unknown = sorted({*config} - {*known, *RECORDED})
        if unknown:
            raise RecipeError(
                f"the run's config.json has fields that {cls.name!r} does not have: {unknown}. It "
                "was written by another version of the recipe."
            )
        chosen = cls(**{name: config[name] for name in CHOICES if name in config})
        stored = {
            name: _restore_type(getattr(chosen, name), value)
            for name, value in config.items()
            if name in known
        }
        # A config does not tell what was given by hand: take what differs from the words chosen.
        same = chosen.but(
            **{name: value for name, value in stored.items() if value != getattr(chosen, name)}
        ).but(**fields)
        budget = config.get("equal_time")
        return same.record_budget(budget) if isinstance(budget, Mapping) else same

    @classmethod
    def _list_provenance(cls) -> tuple[str, ...]:
        """What else of a config may differ: the code, and the place of a file that a user names."""
        is_packaged = cls._source() == cls.name
        return ("source", "equal_time") if is_packaged else ("source", "equal_time", "recipe")

    @classmethod
    def _source(cls) -> str:
        """How `find` gets this class again: its name, or the file that it is in."""
        if cls.__module__.startswith("constrainx.recipes."):
            return cls.name
        return str(find_file(cls) or pathlib.Path().absolute())


def weigh_method(name: MethodName, weight: float) -> Method:
    """The method of that name, with this weight if it has one."""
    if name == "penalty":
        return Penalty(weight)
    return Lagrangian(weight) if name == "lagrangian" else as_method(name)


def steps_of(*, epochs: float, examples: int, batch: int) -> int:
    """How many steps this many passes over the data take.

    Raises:
        ArgumentError: a recipe was asked for no passes, or for batches without examples.
    """
    if epochs <= 0:
        raise ArgumentError(f"`epochs` must be more than 0, got {epochs!r}.")
    if batch < 1:
        raise ArgumentError(f"`batch` must be at least 1, got {batch!r}.")
    return max(1, math.ceil(epochs * examples / batch))


def _restore_type(example: Any, value: Any) -> Any:
    """Undoes what JSON does to tuples and dataclasses."""
    if dataclasses.is_dataclass(example) and isinstance(value, Mapping):
        names = {field.name for field in dataclasses.fields(example)}
        if unknown := sorted({*value} - names):
            raise RecipeError(
                f"the run's config.json has fields that {type(example).__name__} does not have: "
                f"{unknown}."
            )
        return dataclasses.replace(example, **value)  # type: ignore[type-var]
    if isinstance(example, tuple) and isinstance(value, list):
        return tuple(value)
    return value
