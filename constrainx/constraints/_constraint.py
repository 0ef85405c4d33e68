"""`Constraint`: what must hold of a network, as an object."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._numbers import as_count, as_number, as_number_or_schedule
from constrainx.constraints._reduce import NamedReduction, as_reduction
from constrainx.constraints.reductions import Reduction, flatten, root_mean_square
from constrainx.errors import ArgumentError, check_choice

# Where the null-space step projects a constraint's rows.
Placement: TypeAlias = Literal["twice", "update", "gradient"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """Something that must hold of a model; subclass it and write ``residual``.

    >>> import jax.numpy as jnp, constrainx as cx
    >>> class PeriodicIn2Pi(cx.Constraint):
    ...     def residual(self, model, batch, *, key):
    ...         return model(batch["x"] + 2 * jnp.pi) - model(batch["x"])
    >>> PeriodicIn2Pi(gamma=0.5).label
    'periodic-in2-pi'

    A subclass with fields of its own is a dataclass, too: ``@dataclasses.dataclass(frozen=True)``.
    A subclass with ``kind = "inequality"`` holds where its residual is at most zero. A subclass
    whose set is an affine one of the parameters may have a method ``nearest(self, model)`` that
    moves the model to its nearest point of the set, in place; the step then needs no solver. The
    same goes for methods ``select`` and ``correct``, see `UnitNorm` for an example.

    Attributes:
        name: its name in logs; by default made from the name of the class.
        gamma: the fraction of the violation that a step removes to first order, J Δθ = −γ c: a
            number or an Optax schedule. One is a full Gauss-Newton step.
        damping: μ, how soft the rows are in the null-space step: a number of at least 0 or an Optax
            schedule. Zero is hard. Otherwise a step does what the rows ask for only as far as it
            is cheap, J Δθ = −γ c + μ ḡ λ, with multipliers λ and the mean squared length ḡ of the
            constraint's rows, so that μ has no unit: at one, a row by itself gets half of what it
            asks for. In the gradient, training ends where a penalty of weight γ / (μ ḡ) would.
        wrt: an NNX filter: the parameters that the constraint may move.
        reduce: how residuals become rows: "none", "norm", "mean", "rms", `Norm`, `Sketch`, or any
            object with a method ``__call__(self, residual, *, key)``, see `Reduction`.
        examples: the number of examples that it looks at, the first ones of the batch; None for
            all. Its cost is in proportion.
        start: the first step at which it acts.
        stop: the first step at which it no longer acts; None for never.
        every: the number of steps from one at which it acts to the next.
        tolerance: the violation up to which it counts as met.
        placement: where the null-space step projects its rows, "gradient", "update" or "twice", see
            `NullSpace`. None stands for "twice" where the rows depend on the parameters alone, and
            for "gradient" where they depend on the batch or the key, too.
        one_sided: whether rows that are norms may fall faster than γ asks, J Δθ ≤ −γ c.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "equality"

    name: str | None = None
    gamma: float | Callable[[Any], Any] = 0.1
    damping: float | Callable[[Any], Any] = 0.0
    wrt: Any = nnx.Param
    reduce: str | Reduction = "none"
    examples: int | None = None
    start: int = 0
    stop: int | None = None
    every: int = 1
    tolerance: float = 1e-3
    placement: Placement | None = None
    one_sided: bool = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        as_reduction(self.reduce, owner=owner, kind=self.kind)
        # Plain Python numbers, because a constraint must have a hash and arrays have none.
        numbers: dict[str, Any] = {
            "gamma": as_number_or_schedule(self.gamma, argument=f"{owner}(gamma=...)"),
            "damping": as_number_or_schedule(self.damping, argument=f"{owner}(damping=...)"),
            "tolerance": as_number(self.tolerance, argument=f"{owner}(tolerance=...)", least=0),
            "start": as_count(self.start, argument=f"{owner}(start=...)", least=0),
            "every": as_count(self.every, argument=f"{owner}(every=...)"),
        }
        if self.examples is not None:
            fix = "Use None for the whole batch."
            argument = f"{owner}(examples=...)"
            numbers["examples"] = as_count(self.examples, argument=argument, fix=fix)
        if self.stop is not None:
            fix = "Use None for a constraint that acts to the end."
            argument = f"{owner}(stop=...)"
            numbers["stop"] = as_count(self.stop, argument=argument, fix=fix)
        if self.placement is not None:
            check_choice("placement", self.placement, get_args(Placement), owner=owner)
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        if self.one_sided and not self._has_norms:
            raise ArgumentError(
                f"`{owner}(one_sided=True, reduce={self.reduce!r})`: only rows that are never "
                'negative may fall faster than γ asks. Use `reduce="norm"`, `reduce="rms"` or '
                "`Norm(groups=...)`, or leave `one_sided` out; a reduction of your own needs the "
                "attribute `nonnegative = True`."
            )

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, ...]]:
        """Returns what is zero when the constraint holds: any pytree of real arrays.

        A residual that changes in training may take ``step``, too: the number of steps taken, or
        None outside of training, when it should say what must hold in the end.

        Args:
            model: the module that the constraint is attached to.
            batch: the training batch, as the loss sees it.
            key: for constraints that draw samples; a new one each step.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method `residual(self, model, batch, *, key)` that "
            "returns what is zero when the constraint holds."
        )

    def look_at(self, model: Any, batch: Any, key: Array) -> Any:  # noqa: ARG002
        """Returns what the step hands to ``residual`` as its batch; the batch itself by default.

        Override it for a constraint on points of its own, so that the step can tell which rows
        depend on which of them: arrays with the points along the first axis. What it returns must
        not depend on the parameters. ``residual`` may get such points, or a whole batch.

        Args:
            model: the module that the constraint is attached to.
            batch: the training batch.
            key: for drawing points; not the one that ``residual`` gets.
        """
        return batch

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """Returns by how much the constraint fails, for people to read.

        This is the root mean square of the residual r, or of max(r, 0) for an inequality.
        """
        entries = flatten(self.residual(model, batch, key=key), owner=self.label)
        return root_mean_square(jnp.maximum(entries, 0) if self.kind == "inequality" else entries)

    def scale(self, model: Any, batch: Any, key: Array) -> Float[Array, ""] | None:  # noqa: ARG002
        """Returns what the violation is small or large in comparison with, or None if nothing is.

        Override it where shrinking the model's output would lower the violation without coming any
        closer to what must hold. `certify` and evaluations then show the ratio of the two as well.
        It has the unit of the violation: for a violation that is a squared norm of differences of
        outputs, the squared norm of the output.
        """
        return None

    def relative_violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""] | None:
        """Returns the violation in units of `scale`, or None if there is no scale.

        This is the ratio of two means over the batch, not the mean of ratios. It is infinite where
        the scale is zero and the violation is not, and zero where both are.
        """
        scale = self.scale(model, batch, key)
        if scale is None:
            return None
        violation = self.violation(model, batch, key)
        empty = scale <= 0
        ratio = violation / jnp.where(empty, 1, scale)
        return jnp.where(empty, jnp.where(violation > 0, jnp.inf, 0), ratio)

    @property
    def has_scale(self) -> bool:
        """Whether the violation is small or large in comparison with something."""
        return type(self).scale is not Constraint.scale

    @property
    def is_one_sided(self) -> bool:
        """Whether the rows of this equality may fall faster than γ asks."""
        return self.kind == "equality" and self.one_sided

    @property
    def _has_norms(self) -> bool:
        reduction = as_reduction(self.reduce, owner=type(self).__name__, kind=self.kind)
        return bool(getattr(reduction, "nonnegative", False))

    @property
    def label(self) -> str:
        """The name, or the class's name in lower case with hyphens."""
        return self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def reduction(self) -> Reduction:
        """``reduce`` as an object, which names the constraint in its errors."""
        base = as_reduction(self.reduce, owner=type(self).__name__, kind=self.kind)
        return NamedReduction(self.label, base)
