"""One training step: loss, gradients, constraints, update, and a check that all of it is finite."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, masks, reseed_streams
from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.runtime import REMOVED, TRUSTED
from constrainx.step import ConstrainedState, Report, reports
from constrainx.trainers._guard import find_not_finite, name_causes
from constrainx.trainers._learning_rate import LearningRate, read_learning_rate
from constrainx.trainers._state import Health, State, split_model, start_healthy
from constrainx.trainers._totals import Totals, add_totals, describe_reports

Precision: TypeAlias = Literal["float32", "bfloat16"]
OnNonFinite: TypeAlias = Literal["stop", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """What a trainer compiles: one training step as a function of state, totals and batch.

    Attributes:
        graph: the structure of the model.
        rngs: the model's own random streams, seeded anew in each step.
        wrt: which variables are trained.
        loss: (model, batch[, key]) ↦ a number, or a number and metrics by name; or None.
        constraints: what must hold, or None.
        optimizer: with the constraints' method around it, if there are any.
        augment: (batch, key) ↦ batch, or None.
        accumulate: how many parts a batch is split into for its gradients.
        precision: of the forward and backward pass of the loss.
        ema: the decay of the moving average, or None.
        seed: of all randomness.
        on_nonfinite: whether a step that is not finite ends the run or is skipped.
        exempt: paths in the state that the guard does not look at, see `find_exempt`.
        learning_rate: what the optimizer was made with, to log it; None if that is not known.
        log_every: steps between logs, for which constraints are evaluated that do not act.
    """

    graph: nnx.GraphDef
    rngs: nnx.State
    wrt: Any
    loss: Callable[..., Any] | None
    constraints: Composed | None
    optimizer: optax.GradientTransformationExtraArgs
    augment: Callable[[Any, Array], Any] | None
    accumulate: int
    precision: Precision
    ema: float | None
    seed: int
    on_nonfinite: OnNonFinite
    exempt: frozenset[str] = frozenset()
    learning_rate: LearningRate | None = None
    log_every: int = 1

    @property
    def causes(self) -> tuple[str, ...]:
        """What may not be finite."""
        return name_causes(self.constraints.names if self.constraints else ())

    def initial(self, parameters: nnx.State, rest: nnx.State) -> State:
        """The state before the first step of a model with these parameters."""
        optimizer, constraints = self._take_apart(self.optimizer.init(parameters))
        zero = jnp.zeros((), jnp.int32)
        return State(
            step=zero,
            parameters=parameters,
            rest=rest,
            optimizer=optimizer,
            constraints=constraints,
            ema=() if self.ema is None else parameters,
            health=start_healthy(),
        )

    def __call__(
        self, state: State, totals: Totals, batch: PyTree
    ) -> tuple[State, Totals, Float[Array, ""]]:
        """The next state, metrics added up, and the loss of this step."""
        augment_key, loss_key, constraint_key = self._keys(state)
        if self.augment is not None:
            batch = self.augment(batch, augment_key)
        with jax.named_scope("loss"):
            loss, metrics, rest, gradients = self._gradients(state, batch, loss_key)
        extra: dict[str, Any] = {}
        is_logged = (state.step + 1) % self.log_every == 0
        if self.constraints is not None:
            module = self.model(state.parameters, state.rest)
            extra = {"batch": batch, "key": constraint_key, "module": module, "measure": is_logged}
        before = self._put_together(state.optimizer, state.constraints)
        # With constraints, their method names its own regions.
        region = jax.named_scope("update")
        with region if self.constraints is None else contextlib.nullcontext():
            updates, after = self.optimizer.update(gradients, before, state.parameters, **extra)
        optimizer, constraints = self._take_apart(after)
        with jax.named_scope("update"):
            parameters = optax.apply_updates(state.parameters, updates)
            update_norm = _norm(updates)
        found = reports(constraints)
        if self.loss is None:
            loss = _add_squares(found)
        new = State(
            step=state.step,
            parameters=parameters,
            rest=rest,
            optimizer=optimizer,
            constraints=constraints,
            ema=self._average(state.ema, parameters),
            health=state.health,
        )
        flags = find_not_finite(
            new,
            state,
            loss=loss,
            violations=[(report.violation, report.active) for report in found.values()],
            update_norm=update_norm,
            exempt=self.exempt,
        )
        health, is_good = self._examine(state, flags)
        kept = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old).astype(old.dtype), new, state
        )
        norms = {"gradient_norm": _norm(gradients), "update_norm": update_norm}
        rate = read_learning_rate(state, optimizer, self.learning_rate)
        rates = {} if rate is None else {"learning_rate": rate}
        metrics = {"loss": loss, **norms, **rates, **metrics}
        if self.constraints is not None:
            evaluated = {
                m.name: None if m.acts_always else m.acts_at(state.constraints.step) | is_logged
                for m in self.constraints
            }
            metrics |= describe_reports(found, evaluated)
            metrics[REMOVED] = constraints.removed
            metrics[TRUSTED] = constraints.trusted
        # A step that is skipped counts. One that ends the run does not.
        counts = jnp.ones((), bool) if self.on_nonfinite == "skip" else is_good
        return (
            kept._replace(step=state.step + counts, health=health),
            add_totals(totals, metrics, is_good),
            loss,
        )

    def at(
        self, state: State, batch: PyTree
    ) -> tuple[PyTree, Array, Callable[[PyTree], Array] | None]:
        """What a step sees: the augmented batch, the constraints' key, the loss by parameters."""
        augment_key, loss_key, constraint_key = self._keys(state)
        if self.augment is not None:
            batch = self.augment(batch, augment_key)

        def loss(parameters: PyTree) -> Array:
            return self._loss(parameters, state.rest, batch, loss_key)[0]

        return batch, constraint_key, None if self.loss is None else loss

    def _keys(self, state: State) -> Array:
        return jax.random.split(jax.random.fold_in(jax.random.key(self.seed), state.step), 3)

    def model(self, parameters: nnx.State, rest: nnx.State, *, seed: Any = None) -> Any:
        """The model with these parameters; with a seed, its random streams start from there."""
        rngs = self.rngs if seed is None else reseed_streams(self.rngs, seed)
        return nnx.merge(self.graph, parameters, rngs, rest)

    def loss_of(self, parameters: nnx.State, rest: nnx.State, batch: PyTree, key: Array) -> Array:
        """The loss of one step, without its metrics."""
        if self.augment is not None:
            batch = self.augment(batch, key)
        return self._loss(parameters, rest, batch, key)[0]

    def parameters_to_evaluate(self, state: State) -> nnx.State:
        """The moving average, if there is one, else the current parameters."""
        return state.parameters if self.ema is None else state.ema

    def metric_names(self, state: State, batch: PyTree) -> list[str]:
        """The metrics that a step reports, found by tracing it with shapes only."""
        _, totals, _ = jax.eval_shape(lambda s, b: self(s, {}, b), state, batch)
        return list(totals)

    def _gradients(
        self, state: State, batch: PyTree, key: Array
    ) -> tuple[Array, dict[str, Array], nnx.State, nnx.State]:
        if self.loss is None:
            nothing = jax.tree.map(jnp.zeros_like, state.parameters)
            return jnp.zeros(()), {}, state.rest, nothing
        value = jax.value_and_grad(self._loss, has_aux=True)
        if self.accumulate == 1:
            (loss, (metrics, rest)), gradients = value(state.parameters, state.rest, batch, key)
            return loss, metrics, rest, gradients

        def part(rest: nnx.State, item: tuple[PyTree, Array]) -> tuple[nnx.State, Any]:
            (loss, (metrics, rest)), gradients = value(state.parameters, rest, *item)
            return rest, (loss, metrics, gradients)

        def add(carry: Any, item: Any) -> tuple[Any, None]:
            rest, sums = carry
            rest, found = part(rest, item)
            return (rest, jax.tree.map(jnp.add, sums, found)), None

        pieces = jax.tree.map(functools.partial(_interleave, parts=self.accumulate), batch)
        items = (pieces, jax.random.split(key, self.accumulate))
        first, others = (
            jax.tree.map(lambda leaf: leaf[0], items),
            jax.tree.map(lambda leaf: leaf[1:], items),
        )
        (rest, sums), _ = jax.lax.scan(add, part(state.rest, first), others)
        means = jax.tree.map(lambda leaf: leaf / self.accumulate, sums)
        loss, metrics, gradients = means
        return loss, metrics, rest, gradients

    def _loss(
        self, parameters: nnx.State, rest: nnx.State, batch: PyTree, key: Array
    ) -> tuple[Array, tuple[dict[str, Array], nnx.State]]:
        assert self.loss is not None  # its callers see to that
        model_key, loss_key = jax.random.split(key)
        model = self.model(self._cast(parameters), rest, seed=model_key)
        if self.precision != "float32":
            # Rounded probabilities of masks would tie, and keep too many weights or too few.
            nnx.update(model, nnx.state(self.model(parameters, rest), masks.MaskProbability))
        model.train()
        extra = {"key": loss_key} if takes_key(self.loss) else {}
        result = self.loss(model, self._cast(batch), **extra)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        _check_scalars(loss, metrics)
        nnx.pop(model, nnx.Intermediate)
        changed = split_model(model, self.wrt)[3]
        changed = jax.tree.map(lambda new, old: new.astype(old.dtype), changed, rest)
        metrics = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        return jnp.asarray(loss, jnp.float32), (metrics, changed)

    def _cast(self, tree: PyTree) -> PyTree:
        if self.precision == "float32":
            return tree
        return jax.tree.map(
            lambda leaf: leaf.astype(self.precision) if leaf.dtype == jnp.float32 else leaf, tree
        )

    def _examine(self, state: State, flags: Array) -> tuple[Health, Array]:
        """Records a step that is not finite; returns the health, and whether to take this step."""
        bad, health = jnp.any(flags), state.health
        is_news = bad if self.on_nonfinite == "skip" else bad & (health.skipped == 0)
        noted = Health(
            skipped=health.skipped + bad,
            step=jnp.where(is_news, state.step, health.step),
            cause=jnp.where(is_news, jnp.argmax(flags).astype(jnp.int32), health.cause),
        )
        if self.on_nonfinite == "skip":
            return noted, ~bad
        # After the first such step nothing changes until the host has seen it.
        return noted, noted.skipped == 0

    def _average(self, ema: PyTree, parameters: nnx.State) -> PyTree:
        if self.ema is None:
            return ema
        decay = self.ema
        return jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, ema, parameters)

    def _put_together(self, optimizer: optax.OptState, constraints: PyTree) -> optax.OptState:
        return optimizer if self.constraints is None else ConstrainedState(optimizer, constraints)

    def _take_apart(self, state: Any) -> tuple[optax.OptState, PyTree]:
        return (state, ()) if self.constraints is None else state


def _add_squares(found: Mapping[str, Report]) -> Float[Array, ""]:
    """The sum of the mean squares of all rows that acted, which stands in for a loss."""
    squares = [jnp.where(r.active, jnp.square(r.violation), 0) for r in found.values()]
    return sum(squares, jnp.zeros(())).astype(jnp.float32)


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a loss takes a key for its own randomness."""
    try:
        return "key" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _interleave(leaf: Array, *, parts: int) -> Array:
    """The batch in parts on a new first axis: part i has the examples i, i + parts, ...

    Contiguous parts would each be on only some of the devices.
    """
    return jnp.swapaxes(leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]), 0, 1)


def _norm(tree: PyTree) -> Float[Array, ""]:
    """The norm as a dot product: on a CPU, XLA takes several times as long for a sum of squares."""
    products = [
        jnp.tensordot(leaf, leaf, axes=leaf.ndim, preferred_element_type=jnp.float32)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(products, jnp.zeros(())))


def _check_scalars(loss: Any, metrics: Any) -> None:
    if jnp.shape(loss) != ():
        raise ArgumentError(
            f"`loss` must return one number, got an array of shape {jnp.shape(loss)}: take its "
            "mean."
        )
    kind = jnp.result_type(loss)
    if jnp.issubdtype(kind, jnp.complexfloating):
        raise ArgumentTypeError(
            f"`loss` must return a real number, got {kind}: take the squared absolute value of "
            "what is complex, `jnp.abs(z) ** 2`, before the mean."
        )
    if not jnp.issubdtype(kind, jnp.floating):
        raise ArgumentTypeError(
            f"`loss` must return a floating-point number, got {kind}, which has no derivative: the "
            "model would not change."
        )
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError(
            "`loss` must return a number, or a number and a dictionary of metrics, got "
            f"{type(metrics).__name__} as the second."
        )
    for name, value in metrics.items():
        if jnp.shape(value) != ():
            raise ArgumentError(
                f"the metric {name!r} that `loss` returns must be one number, got shape "
                f"{jnp.shape(value)}."
            )
        if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            raise ArgumentTypeError(
                f"the metric {name!r} that `loss` returns must be real, got "
                f"{jnp.result_type(value)}: take its absolute value."
            )
