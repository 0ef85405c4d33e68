"""Pruning a network while it trains, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import optax
from flax import nnx

from constrainx.constraints import masks
from constrainx.constraints._attach import attach
from constrainx.constraints._mask_budget import MaskBudget
from constrainx.errors import ArgumentError, check_choice

Rule: TypeAlias = Literal["learned", "magnitude"]


def prune(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    phases: masks.Phases,
    *,
    learning_rate: float | Callable[[Any], Any],
    rule: Rule = "learned",
    strength: float = 3.0,
    every: int = 10,
    where: Any = masks.kernels,
    pattern: str | None = None,
    decay: float = 0.999,
) -> optax.GradientTransformationExtraArgs:
    """Adds masks to a model, and returns an optimizer that prunes it while it trains.

    All weights train at first; then they become fewer as the phases say, and at the end masks are
    frozen. The state of it all is in the probabilities and in the optimizer, so that it can be
    saved and resumed in any phase.

    >>> import jax, jax.numpy as jnp, optax, constrainx as cx
    >>> from flax import nnx
    >>> model = nnx.Linear(10, 4, rngs=nnx.Rngs(0))
    >>> phases = cx.masks.Phases(density=0.25, steps=60)
    >>> sparse = cx.prune(model, optax.adam(1e-2), phases, learning_rate=1e-2)
    >>> optimizer = nnx.Optimizer(model, cx.constrain(sparse, model), wrt=nnx.Param)
    >>> @nnx.jit
    ... def step(model, optimizer, key):
    ...     x = jax.random.normal(key, (16, 10))
    ...     def loss(model):
    ...         return jnp.mean((cx.masks.top(model)(x) - x[:, :4]) ** 2)
    ...     optimizer.update(model, nnx.grad(loss)(model))
    >>> for index in range(60):
    ...     step(model, optimizer, jax.random.key(index))
    >>> float(cx.masks.realised_density(cx.masks.export(model)))
    0.25

    Args:
        model: the model; masks are added unless it has some, and with the rule "learned" a
            `MaskBudget` is attached, which `constrain` and `Trainer` find there.
        optimizer: for the weights, any Optax transformation. It does not see the probabilities.
        phases: when weights go, and how many stay.
        learning_rate: that of the optimizer; the probabilities move in proportion.
        rule: "learned" as in `masks.Learned`, or "magnitude" as in `masks.Magnitude`.
        strength: ρ of the rule "learned": how much what is learned counts beside what weights
            do anyway.
        every: how many steps lie between two choices of the rule "magnitude".
        where: an NNX filter: the weights to mask.
        pattern: such as "2:4", see `masks.add_masks`; its density is the one to reach.
        decay: of the optimizer's second moments, as Adam's ``b2``.
    """
    check_choice("rule", rule, get_args(Rule), owner="prune")
    if not (math.isfinite(strength) and strength > 0):
        raise ArgumentError(f"`prune(strength=...)` must be above 0, got {strength!r}.")
    if every < 1:
        raise ArgumentError(f"`prune(every=...)` must be at least 1, got {every!r}.")
    if not masks.has_masks(model):
        masks.add_masks(model, where, initial=1.0, pattern=pattern)
    elif pattern is not None:
        raise ArgumentError(
            "`prune(pattern=...)` is for a model without masks: pass it to `add_masks` instead."
        )
    patterns = tuple(variable.pattern for _, variable in masks.find_probabilities(model))
    _check_density(phases, patterns)
    chosen: masks.Learned | masks.Magnitude
    if rule == "learned":
        chosen = masks.Learned(
            phases=phases, learning_rate=learning_rate, strength=strength, patterns=patterns
        )
        _attach_budget(model, phases, patterns)
    else:
        chosen = masks.Magnitude(phases=phases, every=every, patterns=patterns)
    return masks.follow_rule(model, optimizer, chosen, decay=decay)


def _check_density(phases: masks.Phases, patterns: Sequence[masks.Pattern | None]) -> None:
    for pattern in patterns:
        if pattern is not None and abs(pattern.density - phases.density) > 1e-6:
            raise ArgumentError(
                f"`Phases(density={phases.density!r})` and a pattern that keeps {pattern.kept} of "
                f"{pattern.group} weights contradict each other: the density is "
                f"{pattern.density!r}."
            )


def _attach_budget(
    model: nnx.Module, phases: masks.Phases, patterns: Sequence[masks.Pattern | None]
) -> None:
    """Holds the expected density on the schedule, until the masks are frozen."""
    has_pattern = {pattern is not None for pattern in patterns}
    if len(has_pattern) > 1:
        raise ArgumentError(
            "`prune` needs masks that all have a pattern, or none: prune the parts one by one."
        )
    if phases.last - phases.first > 1:
        budget = MaskBudget(
            phases.target,
            per="group" if True in has_pattern else "model",
            gamma=1.0,
            start=phases.first + 1,
            stop=phases.last,
            placement="update",
        )
        attach(model, budget)
