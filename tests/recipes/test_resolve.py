"""A recipe runs what its words say, wherever it was built."""

import copy
import dataclasses
import json
import pickle
import re
from typing import ClassVar

import pytest

from constrainx.cli._arguments import parse_with_fields
from constrainx.errors import ArgumentError
from constrainx.recipes import Recipe, RecipeError, all_recipes, gp_calibration
from constrainx.recipes._continual_rivals import InputNullSpace
from constrainx.recipes.conservative_score import ConservativeScore
from constrainx.recipes.gp_calibration import GpCalibration
from constrainx.recipes.o3_inertia import O3Inertia
from constrainx.recipes.robust_digits import RobustDigits
from constrainx.runtime import Keep
from constrainx.step import as_method

METHODS = [(name, method) for name, recipe in all_recipes().items() for method in recipe.methods]
# How the constraints of each method act. Those that are not listed have no constraints.
ACTS = {
    ("c4-fmnist", "kernels"): "nullspace",
    ("c4-fmnist", "annealed"): "nullspace",
    ("c4-fmnist", "rows"): "nullspace",
    ("c4-fmnist", "paper"): "nullspace",
    ("c4-fmnist", "penalty"): "penalty",
    ("c4-fmnist", "penalty-strong"): "penalty",
    ("conservative-score", "nullspace"): "nullspace",
    ("conservative-score", "paper"): "nullspace",
    ("continual-fmnist", "unchanged"): "nullspace",
    ("continual-fmnist", "a-gem"): "nullspace",
    ("continual-fmnist", "nscl"): InputNullSpace(),
    ("feasible-qp", "penalty"): "penalty",
    ("feasible-qp", "penalty-projected"): "penalty",
    ("invariant-digits", "nullspace"): "nullspace",
    ("invariant-digits", "penalty"): "penalty",
    ("l0-cifar10", "learned"): "nullspace",
    ("l0-cifar10", "bernoulli"): "nullspace",
    ("l0-cifar10", "lagrangian"): "lagrangian",
    ("l0-cifar10", "paper"): "nullspace",
    ("l0-imagenet", "learned"): "nullspace",
    ("l0-imagenet", "bernoulli"): "nullspace",
    ("l0-imagenet", "paper"): "nullspace",
    ("l0-svhn", "learned"): "nullspace",
    ("l0-svhn", "bernoulli"): "nullspace",
    ("l0-svhn", "lagrangian"): "lagrangian",
    ("l0-svhn", "paper"): "nullspace",
    ("o3-inertia", "nullspace"): "nullspace",
    ("o3-inertia", "paper"): "nullspace",
    ("o3-inertia", "penalty"): "penalty",
    ("o3-inertia", "penalty-strong"): "penalty",
    ("o3-inertia", "lagrangian"): "lagrangian",
    ("periodic-regression", "nullspace"): "nullspace",
    ("periodic-regression", "penalty"): "penalty",
    ("pinn", "nullspace"): "nullspace",
    ("pinn", "gauss-newton"): "nullspace",
    ("pinn", "penalty"): "penalty",
    ("pinn", "lagrangian"): "lagrangian",
    ("robust-digits", "nullspace"): "nullspace",
}


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A command without options of its own."""


def parse(recipe, *arguments):
    """The recipe that the command line builds from these arguments."""
    _, parsed = parse_with_fields(
        NoOptions,
        recipe(),
        arguments,
        command="train",
        description="",
        fields=recipe.field_names(),
    )
    return parsed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layered(Recipe):
    """Every layer sets `a`; each layer also sets a field that no later layer sets."""

    name: ClassVar[str] = "layered"
    presets: ClassVar = {"paper": {"a": 1, "b": 1, "c": 1, "d": 1}}
    methods: ClassVar = {"first": {}, "second": {"a": 2, "b": 2, "c": 2}}
    sizes: ClassVar = {"smoke": {"a": 3, "b": 3}}

    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    flag: bool = True
    shape: tuple[int, ...] = (1, 2)

    def trainer(self, **options):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simple(Recipe):
    """A recipe without methods."""

    name: ClassVar[str] = "simple"

    width: int = 8

    def trainer(self, **options):
        raise NotImplementedError


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_python_and_command_line_build_the_same_recipe(name, method):
    recipe = all_recipes()[name]
    built = recipe(method=method, size="smoke", seed=3, devices=1)
    arguments = ("--seed", "3", "--method", method, "--size=smoke", "--devices", "1")
    assert parse(recipe, *arguments) == built
    assert built.method == method
    assert {**recipe.methods[method], **recipe.sizes["smoke"]}.items() <= vars(built).items()


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_the_trainer_does_what_its_title_says(name, method):
    trainer = all_recipes()[name](method=method, size="smoke", devices=1).trainer(progress=False)
    assert trainer.logging.title == f"{name} {method}"
    acts = ACTS.get((name, method), "none")
    assert bool(trainer.constraint_names) == (acts != "none")
    if trainer.constraints:
        assert type(as_method(trainer.method)) is type(as_method(acts))


@pytest.mark.parametrize(
    ("method", "weight"), [("penalty", 1.28), ("penalty-strong", 3.84), ("lagrangian", 1.28e-3)]
)
def test_the_trainer_has_the_weight_of_its_method(method, weight):
    assert O3Inertia(method=method, size="smoke", devices=1).trainer().method.weight == weight


def test_the_trainer_has_the_loss_of_its_method():
    losses = {
        method: GpCalibration(method=method, size="smoke").trainer().loss
        for method in GpCalibration.methods
    }
    assert losses["predictive"] is gp_calibration.predictive
    assert losses["likelihood"] is gp_calibration.likelihood
    assert losses["paper"] is gp_calibration.as_in_the_paper
    assert ConservativeScore(method="qcsbm").quasi == 0.1
    assert ConservativeScore(method="usbm").quasi == 0
    assert RobustDigits(method="adversarial").on_attacked
    assert not RobustDigits(method="plain").on_attacked


def test_the_default_method_is_the_first_and_takes_effect():
    assert O3Inertia() == O3Inertia(method="nullspace")
    assert O3Inertia().constrained_by == "nullspace"


def test_later_layers_win_and_fields_given_by_hand_win_over_all():
    recipe = Layered(preset="paper", method="second", size="smoke", a=4)
    assert (recipe.a, recipe.b, recipe.c, recipe.d) == (4, 3, 2, 1)
    assert parse(Layered, "--a=4", "--size=smoke", "--method=second", "--preset=paper") == recipe


def test_repr_shows_what_will_run():
    text = repr(Layered(method="second"))
    assert "method='second'" in text
    assert "a=2" in text
    assert "given" not in text


def test_a_recipe_without_methods_has_one():
    recipe = Simple(width=4)
    assert recipe.method == "default"
    assert parse(Simple, "--width", "4") == recipe
    with pytest.raises(ArgumentError, match="'default'"):
        Simple(method="plain")


def test_an_empty_table_of_methods_is_like_none():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Empty(Simple):
        methods: ClassVar = {}

    assert Empty().method == "default"
    assert parse(Empty, "--width", "4").width == 4


def test_a_class_may_change_the_defaults_of_the_choices():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(Layered):
        method: str = "second"
        size: str = "smoke"

    assert (Other().a, Other().c) == (3, 2)
    assert Other(method="first").c == 0


def test_but_keeps_what_was_given_by_hand_and_resolves_the_rest():
    recipe = Layered(method="second", d=7)
    assert recipe.but(method="first") == Layered(method="first", d=7)
    assert recipe.but(size="smoke", seed=1) == Layered(method="second", size="smoke", d=7, seed=1)
    # Given by hand, although it is what the method sets already.
    assert Layered(a=0).but(method="second").a == 0


def test_replace_keeps_everything_else():
    recipe = Layered(method="second", size="smoke", d=7)
    replaced = dataclasses.replace(recipe, seed=1, c=9)
    assert replaced == Layered(method="second", size="smoke", d=7, seed=1, c=9)
    assert replaced.but(method="first") == Layered(size="smoke", d=7, seed=1, c=9)


@pytest.mark.parametrize("change", [{"method": "first"}, {"size": "cpu"}, {"preset": "paper"}])
def test_replace_refuses_to_change_a_choice(change):
    """Because it would keep the fields of the old method under the name of the new one."""
    recipe = Layered(method="second", size="smoke")
    ((name, value),) = change.items()
    with pytest.raises(RecipeError, match=re.escape(f"recipe.but({name}={value!r})")):
        dataclasses.replace(recipe, **change)


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_a_config_gives_the_recipe_back(name, method):
    kind = all_recipes()[name]
    recipe = kind(method=method, size="smoke", seed=2, keep=Keep(last=1))
    config = json.loads(json.dumps(recipe.config))
    assert config["recipe"] == name
    assert not {"devices", "fsdp", "_given"} & set(config)
    assert kind.from_config(config) == recipe
    assert kind.from_config(config, devices=2) == recipe.but(devices=2)


def test_a_config_wins_over_the_current_fields_of_its_method():
    config = {**Layered(method="second").config, "a": 5, "shape": [3]}
    recipe = Layered.from_config(config)
    assert (recipe.method, recipe.a, recipe.b, recipe.shape) == ("second", 5, 2, (3,))
    assert recipe.but(method="first") == Layered(a=5, shape=(3,))


def test_a_config_of_another_recipe_is_refused():
    with pytest.raises(RecipeError, match="width"):
        Layered.from_config(Simple().config)


def test_copies_are_equal():
    recipe = Layered(method="second", d=7)
    for other in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe
        assert hash(other) == hash(recipe)
        assert other.but(method="first") == Layered(d=7)


def test_options_given_with_their_default_still_count_as_given():
    assert parse(Layered, "--a", "0").but(method="second").a == 0
    assert not parse(Layered, "--no-flag").but(method="second").flag
    assert parse(Layered, "--keep.last", "3").but(keep=Keep(last=1)).keep == Keep(last=1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"widht": 3}, RecipeError, "no field 'widht'. Did you mean 'width'?"),
        ({"method": "penatly"}, ArgumentError, "Did you mean 'penalty'?"),
        ({"size": "smok"}, ArgumentError, "Did you mean 'smoke'?"),
        ({"preset": "papre"}, ArgumentError, "Did you mean 'paper'?"),
    ],
)
def test_mistakes_name_the_nearest_choice(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        O3Inertia(**fields)


def test_a_method_that_sets_an_unknown_field_is_named():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wrong(Simple):
        methods: ClassVar = {"wide": {"widht": 3}}

    with pytest.raises(RecipeError, match="the method 'wide' of Wrong has no field 'widht'"):
        Wrong()


@pytest.mark.parametrize("name", ["recipe", "source", "changes"])
def test_a_field_that_would_hide_what_a_run_records_is_refused(name):
    kind = dataclasses.make_dataclass(
        "Wrong", [(name, str, "mine")], bases=(Simple,), frozen=True, kw_only=True
    )
    with pytest.raises(RecipeError, match=f"Wrong must not have a field '{name}'"):
        kind()


@pytest.mark.parametrize("fields", [{"epochs": 0}, {"epochs": -1}, {"batch": 0}], ids=str)
def test_recipes_without_epochs_or_examples_are_refused(fields):
    (name,) = fields
    with pytest.raises(ArgumentError, match=f"`{name}` must be"):
        O3Inertia(size="smoke", **fields).trainer(progress=False)
