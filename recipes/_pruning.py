"""What the recipes about sparse networks share: how a network becomes sparse, and what is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from constrainx.constraints import MaskBudget, attach, masks, prune
from constrainx.recipes._recipe import Recipe
from constrainx.recipes._resolve import RecipeError
from constrainx.step import Lagrangian, Method, Unconstrained, as_method
from constrainx.trainers.classification import cross_entropy, is_wrong

PruneBy = Literal["learned", "magnitude", "draws", "nothing"]
# Of the masks whose probabilities an optimizer moves by itself, as in the paper.
INITIAL = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseRecipe(Recipe):
    """A classifier whose weights become few while it trains.

    Attributes:
        density: the fraction of weights to keep; with a pattern, what it keeps.
        pattern: such as "2:4" to keep two of each four weights along the input axis.
        prune_by: "learned" and "magnitude" are the rules of `cx.prune`; "draws" trains the
            probabilities of masks by the optimizer of the weights, as in the paper; "nothing" is a
            dense network.
        masks: whether a step uses the most probable weights ("top"), or a draw ("bernoulli").
        budget: how the budget is kept.
        weight: of the augmented Lagrangian, whose constraint is a mean over all weights.
        begin: the fraction of the steps after which weights begin to go.
        freeze: the fraction of the steps after which masks are frozen.
        strength: of the rule "learned".
        gamma: of the budget, for "draws".
        finetune: the learning rate after one-shot pruning, as a fraction of that before it.
    """

    figures: ClassVar = {
        "error": "test error",
        "density": "density",
        "recalibrated error": "recalibrated",
    }
    axes: ClassVar = ("error", "density")

    density: float = 0.1
    pattern: str | None = None
    prune_by: PruneBy = "learned"
    masks: Literal["top", "bernoulli"] = "top"
    budget: Literal["nullspace", "lagrangian"] = "nullspace"
    weight: float = 3.0
    begin: float = 0.1
    freeze: float = 0.7
    strength: float = 3.0
    gamma: float = 1e-4
    finetune: float = 1.0

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        kept = masks.parse_pattern(self.pattern).density
        if "density" not in self._given:
            object.__setattr__(self, "density", kept)
        elif abs(kept - self.density) > 1e-6:
            raise RecipeError(
                f"`pattern` {self.pattern!r} keeps {kept:.3g} of the weights, and `density` is "
                f"{self.density!r}: leave `density` out."
            )

    def sparsify(
        self,
        model: nnx.Module,
        make: Callable[[Any], optax.GradientTransformation],
        rate: Callable[[Any], Any],
        steps: int,
    ) -> optax.GradientTransformation:
        """Adds masks and a budget to the model, and returns its optimizer."""
        if self.prune_by == "nothing":
            return make(rate)
        if self.prune_by == "draws":
            masks.add_masks(model, initial=INITIAL, pattern=self.pattern)
            start = round(self.begin * steps)
            attach(model, MaskBudget(self.density, gamma=self.gamma, start=start))
            return make(rate)
        phases = masks.Phases(
            density=self.density, steps=steps, begin=self.begin, freeze=self.freeze
        )
        return prune(
            model,
            make(rate),
            phases,
            learning_rate=rate,
            rule="magnitude" if self.prune_by == "magnitude" else "learned",
            strength=self.strength,
            pattern=self.pattern,
        )

    def schedule(self, peak: float, steps: int) -> Callable[[Any], Any]:
        """Warm-up and cosine; if all weights go at once, one more cosine after that."""
        first = round(self.begin * steps)
        if self.prune_by == "magnitude" and self.begin == self.freeze:
            again = optax.cosine_decay_schedule(self.finetune * peak, max(steps - first, 1))
            return optax.join_schedules([_warm_up(peak, first), again], [first])
        return _warm_up(peak, steps)

    @property
    def keeping(self) -> Method:
        """How the budget is kept, as a method."""
        if self.prune_by == "nothing":
            return Unconstrained()
        return Lagrangian(self.weight) if self.budget == "lagrangian" else as_method("nullspace")

    def take_masks(self, model: Any, key: Array) -> Any:
        """The model as a training step sees it."""
        if self.prune_by == "nothing":
            return model
        return masks.top(model) if self.masks == "top" else masks.sample(model, key)

    def loss(self, model: Any, batch: dict[str, Array], key: Array) -> Float[Array, ""]:
        """The mean cross-entropy of the masked network."""
        return jnp.mean(cross_entropy(self.take_masks(model, key), batch))

    def is_wrong(self, model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
        """Whether the network of the most probable weights is wrong."""
        return is_wrong(self.prune_now(model), batch)

    def prune_now(self, model: Any) -> Any:
        """The model with what would be exported of it."""
        if self.prune_by == "nothing" or not masks.has_masks(model):
            return model
        # A rule ends at its density. Draws and multipliers may not, and all are compared at one.
        is_free = self.pattern is None and self.prune_by == "draws"
        return masks.deterministic(model, self.density if is_free else None)

    def count_density(self, model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
        """The fraction of kernels' entries that are not zero, counted in what is exported."""
        share = masks.realised_density(self.prune_now(model))
        return jnp.broadcast_to(share, (jax.tree.leaves(batch)[0].shape[0],))


def _warm_up(peak: float, steps: int) -> Callable[[Any], Any]:
    warm = max(1, round(0.05 * steps))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(steps, warm + 1))
