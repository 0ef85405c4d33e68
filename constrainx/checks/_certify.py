"""`certify`: how well constraints hold on held-out points, with bounds for all others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from constrainx.checks._bounds import bound_mean, bound_share, is_trustworthy
from constrainx.checks._table import figure, lay_out, percent, wrap
from constrainx.checks._violations import Points, Unit, Violations
from constrainx.constraints import Composed, Constraint, as_number, compose, constraints_of
from constrainx.data import Batches, arrays
from constrainx.errors import ArgumentError
from constrainx.runtime import Sharding

# Apart from the keys of training, which are made from the seed and a step.
_STREAM = 0x6365_7274


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified:
    """How well one constraint holds.

    Attributes:
        name: of the constraint.
        unit: what a violation is measured on: "example", "batch", "draw", or "parameters" for
            a constraint on just the parameters, whose figures are exact.
        count: how many of these were measured.
        mean: of their violations.
        upper: the upper confidence bound on the mean, see `constrainx.checks.bound_mean`.
        largest: the largest violation.
        where: its position in the data, counted from zero; None for the parameters.
        share: of the violations that exceed the tolerance.
        share_upper: the upper confidence bound on that share, by Clopper and Pearson.
        relative: the mean violation in units of the mean scale, see `Constraint.scale`; None for a
            constraint without one.
        tolerance: the violation up to which the constraint counts as met.
        nonfinite: how many violations were NaN or infinite.
        met: whether the constraint holds.
        remarks: what else to know, in sentences.
    """

    name: str
    unit: str
    count: int
    mean: float
    upper: float
    largest: float
    where: int | None
    share: float
    share_upper: float
    relative: float | None
    tolerance: float
    nonfinite: int
    met: bool
    remarks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How well all constraints hold. Made by `certify`; print it for a table.

    Attributes:
        constraints: one entry for each.
        confidence: of the bounds.
    """

    constraints: tuple[Certified, ...]
    confidence: float

    @property
    def met(self) -> bool:
        """Whether every constraint holds."""
        return all(found.met for found in self.constraints)

    def __getitem__(self, name: str) -> Certified:
        for found in self.constraints:
            if found.name == name:
                return found
        raise KeyError(name)

    def __str__(self) -> str:
        bound = f"≤ ({percent(self.confidence)})"
        headings = ["constraint", "mean", bound, "largest", "at", "relative", "tolerance", "met"]
        rows = [
            [
                found.name,
                figure(found.mean),
                figure(found.upper),
                figure(found.largest),
                "–" if found.where is None else f"{found.where}",
                figure(found.relative),
                figure(found.tolerance),
                "yes" if found.met else "NO",
            ]
            for found in self.constraints
        ]
        lines = lay_out(headings, rows)
        for found in self.constraints:
            for sentence in _describe(found, self.confidence):
                lines += wrap(sentence)
        return "\n".join(lines)

    def as_record(self) -> dict[str, Any]:
        """What is written to ``result.json``, with None for what is not a finite number."""
        return {
            "met": self.met,
            "confidence": self.confidence,
            "constraints": {
                found.name: {
                    field: _as_json(value)
                    for field, value in dataclasses.asdict(found).items()
                    if field != "name"
                }
                for found in self.constraints
            },
        }


def certify(
    model: nnx.Module,
    constraints: Composed | Constraint | Sequence[Constraint] | None = None,
    data: Batches | PyTree = None,
    *,
    confidence: float = 0.95,
    share: float | None = None,
    batch: int | None = None,
    draws: int = 512,
    devices: int | None = None,
    seed: int = 0,
) -> Certificate:
    """Measures on held-out points how well constraints hold, and bounds what to expect elsewhere.

    A constraint is met if the upper confidence bound on its mean violation is at most its
    tolerance and every violation is finite; with ``share``, also only if no more than that share
    of all points exceeds the tolerance, with the same confidence.

    A violation is that of a single example where the residual has examples along its first axis.
    It is that of a batch where the residual is a figure of all examples, or where
    ``reduce="mean"`` asks only for the mean to be zero. A constraint that draws its own points is
    measured on ``draws`` draws, and one on just the parameters exactly.

    The bound on the mean is an approximation, see `constrainx.checks.bound_mean`. That on the share
    of points above the tolerance holds for any distribution. Both are about points like these: the
    data must not have been used in training.

    >>> import constrainx as cx, numpy as np
    >>> from flax import nnx
    >>> class Odd(cx.Constraint):
    ...     def residual(self, model, batch, *, key):
    ...         return model(-batch["x"]) + model(batch["x"])
    >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    >>> print(cx.certify(model, Odd(), {"x": np.linspace(0, 1, 300)[:, None]}, devices=1))
    constraint  mean  ≤ (95 %)  largest  at  relative  tolerance  met
    odd            0         0        0   0         –      0.001  yes
    - odd: 300 examples; none exceeds the tolerance, and with 95 % confidence at
      most 0.994 % of all do.

    Args:
        model: measured in evaluation mode, and left as it is.
        constraints: those to measure, in addition to the ones that are attached to the model; or
            all of them, as `compose` returns them.
        data: held-out batches from `constrainx.data`, or a pytree of arrays with examples along the
            first axis. May be left out for constraints on the parameters, or that draw points.
        confidence: of all bounds.
        share: the share of points that may exceed the tolerance; None for any.
        batch: how many examples are measured at a time, and in a point that is a batch; as in the
            data if left out. It is rounded down to a multiple of the number of devices.
        draws: how many, for constraints that draw their own points.
        devices: how many to use; all if None. A model that a `Trainer` has placed stays there.
        seed: for constraints that draw; the keys differ from all those of training.
    """
    as_number(confidence, argument="certify(confidence=...)")
    if not 0.5 <= confidence < 1:
        raise ArgumentError(
            f"`certify(confidence=...)` must be at least 0.5 and below 1, got {confidence!r}."
        )
    if share is not None and not 0 <= share <= 1:
        raise ArgumentError(f"`certify(share=...)` must be between 0 and 1, got {share!r}.")
    composed = _compose(model, constraints)
    batches = _as_batches(data)
    sharding = _find_sharding(model) or Sharding.over(devices=devices)
    size = min(batch or batches.batch, batches.examples or batches.batch)
    points = Points(
        model=_place(model, sharding),
        data=batches,
        sharding=sharding,
        batch=max(size // sharding.mesh.size, 1) * sharding.mesh.size,
        draws=draws,
        key=jax.random.fold_in(jax.random.key(seed), _STREAM),
    )
    return Certificate(
        tuple(
            judge(
                member.name,
                points.measure(member, index),
                tolerance=member.tolerance,
                confidence=confidence,
                share=share,
            )
            for index, member in enumerate(composed)
        ),
        confidence,
    )


def judge(
    name: str,
    found: Violations,
    *,
    tolerance: float,
    confidence: float = 0.95,
    share: float | None = None,
) -> Certified:
    """What violations at held-out points say about a constraint."""
    values = found.values
    count, bad = len(values), ~np.isfinite(values)
    hits = int(np.sum(bad | (values > tolerance)))
    exact = found.unit is Unit.PARAMETERS
    remarks = []
    if count == 0:
        mean = upper = largest = math.nan
        where = None
        remarks.append(
            "no batch of held-out data is full, so nothing was measured: pass a smaller `batch`"
        )
    elif bad.any():
        mean = upper = largest = math.nan
        where = int(np.argmax(bad))
        remarks.append(
            f"{int(bad.sum())} of {count} violations are not finite, the first at {where}"
        )
    else:
        mean, where = float(np.mean(values)), int(np.argmax(values))
        largest = float(values[where])
        upper = mean if exact else bound_mean(values, confidence=confidence)
        if not exact and count < 2:
            remarks.append(f"one {found.unit} gives no bound: measure more of them")
        elif not exact and not is_trustworthy(values):
            remarks.append(
                f"the violations have such a long tail that {count} of them are too few for the "
                "bound on the mean; rely on the share, which has no such limit, or measure more"
            )
    if found.left_out:
        remarks.append(f"{found.left_out} examples were left out, since they do not fill a batch")
    share_upper = float(hits > 0) if exact else bound_share(hits, count, confidence=confidence)
    relative = None
    if found.scales is not None and count:
        scale = float(np.mean(found.scales))
        relative = mean / scale if scale > 0 else (0.0 if mean == 0 else math.inf)
    return Certified(
        name=name,
        unit=str(found.unit),
        count=count,
        mean=mean,
        upper=upper,
        largest=largest,
        where=None if exact else where,
        share=hits / count if count else math.nan,
        share_upper=share_upper,
        relative=relative,
        tolerance=tolerance,
        nonfinite=int(bad.sum()),
        # Comparisons with NaN are false.
        met=bool(upper <= tolerance and not bad.any() and (share is None or share_upper <= share)),
        remarks=tuple(remarks),
    )


def _describe(found: Certified, confidence: float) -> list[str]:
    name = found.name
    if found.unit == Unit.PARAMETERS:
        first = f"{name}: a constraint on just the parameters, so the figures are exact."
    else:
        many = (
            found.unit
            if found.count == 1
            else f"{found.unit}{'es' if found.unit == 'batch' else 's'}"
        )
        hits = round(found.share * found.count) if found.count else 0
        exceed = (
            "none exceeds the tolerance"
            if hits == 0
            else f"{percent(found.share)} exceed the tolerance"
        )
        first = (
            f"{name}: {found.count} {many}; {exceed}, and with {percent(confidence)} confidence "
            f"at most {percent(found.share_upper)} of all do."
        )
    return [first, *(f"{name}: {remark}." for remark in found.remarks)]


def _compose(model: nnx.Module, constraints: Any) -> Composed:
    if isinstance(constraints, Composed):
        return constraints
    given = [constraints] if isinstance(constraints, Constraint) else list(constraints or ())
    attached = [model] if constraints_of(model) else []
    return compose(*attached, *given, model=model)


def _as_batches(data: Any) -> Batches:
    if isinstance(data, Batches):
        return data
    if data is None:
        data = {"none": np.zeros((1,), np.float32)}
    if not isinstance(data, dict):
        raise ArgumentError(
            "`certify(data=...)` must be batches from `constrainx.data` or a dictionary of arrays, "
            f"such as {{'x': x}}, got {type(data).__name__}."
        )
    examples = len(next(iter(jax.tree.leaves(data)), ()))
    return arrays(data, batch=max(min(examples, 256), 1), shuffle=False)


def _find_sharding(model: nnx.Module) -> Sharding | None:
    """The sharding of a model that a trainer has placed; None for others."""
    for leaf in jax.tree.leaves(nnx.state(model)):
        match getattr(leaf, "sharding", None):
            case jax.sharding.NamedSharding(mesh=jax.sharding.Mesh() as mesh):
                return Sharding(mesh=mesh) if mesh.axis_names == ("data", "fsdp") else None
    return None


def _place(model: nnx.Module, sharding: Sharding) -> nnx.Module:
    if _find_sharding(model) is not None or sharding.mesh.size == 1:
        return model
    parts: Any = nnx.split(model, nnx.RngState, ...)
    graph, rngs, state = parts
    return nnx.merge(graph, rngs, sharding.place(state), copy=True)


def _as_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
