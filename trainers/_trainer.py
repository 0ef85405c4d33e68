"""`Trainer`: what to train, on what, and how; the loop itself is in `loop.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree

from constrainx.constraints import Attached, Constraint, compose, constraints_of
from constrainx.data import Batches
from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.runtime import (
    Bar,
    Callback,
    CheckpointError,
    Checkpoints,
    JsonLines,
    Keep,
    Sharding,
    TensorBoard,
    has_checkpoints,
    listen_for_signals,
    lock_run_folder,
    prepare_run_folder,
)
from constrainx.step._optax import Method, Metric
from constrainx.step._project import SolverChoice
from constrainx.trainers._evaluation import Evaluation
from constrainx.trainers._loop import Loop
from constrainx.trainers._step import (
    OnNonFinite,
    Placement,
    Precision,
    State,
    Step,
    apart,
    combine,
    healthy,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitor:
    """The metric of the evaluation that decides which checkpoint is best, and when to stop.

    Attributes:
        metric: its name.
        mode: whether small or large is good.
        patience: stop after so many evaluations without a new best; None never does.
        min_change: what counts as a new best.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    patience: int | None = None
    min_change: float = 0.0

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether the value is a new best."""
        if math.isnan(value):
            return False
        gain = math.inf if best is None else (best - value if self.mode == "min" else value - best)
        return gain > self.min_change


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        reason: "finished", "stopped early" or "asked to stop".
        step: after how many steps.
        metrics: of the last evaluation.
        model: the trained model; with the averaged parameters, if there is an average.
        seconds: spent in steps, those before a `restore` included, compilation and evaluation not.
    """

    reason: str
    step: int
    metrics: dict[str, float]
    model: Any = dataclasses.field(repr=False)
    seconds: float


@dataclasses.dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains a model under its constraints, on any number of devices, and can go on where it ended.

    >>> import jax.numpy as jnp, numpy as np, optax, constrainx as cx
    >>> from flax import nnx
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> trainer = cx.Trainer(
    ...     model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
    ...     loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
    ...     optimizer=optax.adam(0.1),
    ...     data=cx.data.arrays({"x": x, "y": 3 * x}, batch=32),
    ...     steps=100,
    ...     devices=1,
    ...     progress=False,
    ... )
    >>> result = trainer.fit()
    >>> print(result.reason, result.model.kernel[...].round(1))
    finished [[3.]]

    Attributes:
        model: an NNX module, possibly with attached constraints. It is left alone until `fit` ends,
            and then holds the trained parameters.
        loss: (model, batch) ↦ a number, or a number and a dictionary of metrics. If it has an
            argument ``key``, that is a new random key in each step. The model is in training mode,
            and its own random streams are seeded anew in each step.
        optimizer: any Optax transformation.
        data: the training batches, see `constrainx.data`.
        steps: how many steps to take in all.
        constraints: in addition to those attached to the model. Constraints see the model in
            evaluation mode and in full precision.
        method: "nullspace", "penalty", "lagrangian" or "none".
        placement: whether the null-space step projects the optimizer's "update" or the "gradient".
        metric: of the projection, "identity" or "optimizer", see `constrain`.
        solver: of the projection, see `constrain`.
        weight: of penalty and Lagrangian.
        augment: (batch, key) ↦ batch, a part of the compiled step.
        evaluation: held-out data; metrics are over all of its examples.
        metrics: (model, batch) ↦ a figure for each example, by name.
        evaluate_every: steps between evaluations; None for one at the end.
        monitor: which metric says what is best, and when to stop.
        accumulate: compute gradients in so many parts, one after the other.
        precision: "bfloat16" casts parameters and batch for the loss alone; parameters, optimizer
            and constraints stay in float32.
        ema: the decay of a moving average of the parameters, with which to evaluate.
        wrt: an NNX filter: which variables are trained.
        seed: of all randomness, which is a function of seed and step.
        devices: how many to use; None for all.
        fsdp: how many devices share each large parameter.
        run: a folder for config, metrics, TensorBoard events and checkpoints; None for none.
        config: what to write to its config.json.
        save_every: steps between checkpoints; None for one at the end.
        keep: which checkpoints stay.
        on_save_error: "stop", or "continue" without that checkpoint.
        on_nonfinite: "stop" at a step that is not finite, or "skip" it.
        log_every: steps between logs. In between, the host does not wait for the device.
        callbacks: who else listens.
        progress: whether to show a bar.
        title: what to call the run beside the bar.
    """

    model: nnx.Module
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    data: Batches
    steps: int
    constraints: Sequence[Constraint] = ()
    method: Method = "nullspace"
    placement: Placement = "update"
    metric: Metric = "identity"
    solver: SolverChoice = "auto"
    weight: float = 1.0
    augment: Callable[[Any, jax.Array], Any] | None = None
    evaluation: Batches | None = None
    metrics: Mapping[str, Callable[[Any, Any], jax.Array]] = dataclasses.field(default_factory=dict)
    evaluate_every: int | None = None
    monitor: Monitor | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    ema: float | None = None
    wrt: Any = nnx.Param
    seed: int = 0
    devices: int | None = None
    fsdp: int = 1
    run: pathlib.Path | str | None = None
    config: Mapping[str, Any] | None = None
    save_every: int | None = None
    keep: Keep = dataclasses.field(default_factory=Keep)
    on_save_error: Literal["stop", "continue"] = "stop"
    on_nonfinite: OnNonFinite = "stop"
    log_every: int = 50
    callbacks: Sequence[Callback] = ()
    progress: bool = True
    title: str = ""

    def __post_init__(self) -> None:
        self._check()
        self.run = None if self.run is None else pathlib.Path(self.run)
        self.sharding = Sharding.over(devices=self.devices, fsdp=self.fsdp)
        self.sharding.check_batch(self.data.batch)
        if self.data.batch % (self.accumulate * self.sharding.mesh.size):
            raise ArgumentError(
                f"`accumulate={self.accumulate}` parts of a batch of {self.data.batch} must be "
                f"multiples of the {self.sharding.mesh.size} devices."
            )
        constrained = nnx.clone(self.model)
        constrained.eval()
        found = [*constraints_of(constrained), *(Attached((), c) for c in self.constraints)]
        composed = compose(constrained, *self.constraints, model=constrained) if found else None
        names = composed.names if composed else ()
        self._check_monitor(names)
        transformation, order = combine(
            self.optimizer,
            composed,
            method=self.method,
            placement=self.placement,
            metric=self.metric,
            solver=self.solver,
            weight=self.weight,
        )
        graph, _, rngs, _ = apart(self.model, self.wrt)
        self._step = Step(
            graph=graph,
            rngs=rngs,
            wrt=self.wrt,
            loss=self.loss,
            constraints=None if self.method == "none" else composed,
            transformation=transformation,
            order=order,
            augment=self.augment,
            accumulate=self.accumulate,
            precision=self.precision,
            ema=self.ema,
            seed=self.seed,
            on_nonfinite=self.on_nonfinite,
        )
        self.state: State = self.sharding.place(self._step.initial(self.model))
        self._evaluation = Evaluation(
            rebuild=self._step.model,
            metrics=self.metrics,
            constraints=dict(zip(names, found, strict=True)),
            sharding=self.sharding,
            seed=self.seed,
        )
        self._compiled = jax.jit(
            self._step,
            donate_argnums=(0, 1),
            out_shardings=(self.sharding.of_state(self.state), self.sharding.whole, None),
        )
        # What a checkpoint notes down beside the arrays.
        self._best: float | None = None
        self._without_best = 0
        self._seconds = 0.0
        self._restored_from: pathlib.Path | None = None
        self._is_first = jax.process_index() == 0

    def _check(self) -> None:
        if not isinstance(self.model, nnx.Module):
            raise ArgumentTypeError(
                f"`Trainer(model=...)` must be an nnx.Module, got {type(self.model).__name__}."
            )
        if not isinstance(self.data, Batches):
            raise ArgumentTypeError(
                "`Trainer(data=...)` must come from `constrainx.data`, for example "
                f"`cx.data.arrays({{'x': x}}, batch=128)`, got {type(self.data).__name__}."
            )
        choices = {
            "method": get_args(Method),
            "placement": get_args(Placement),
            "metric": get_args(Metric),
            "precision": get_args(Precision),
            "on_nonfinite": get_args(OnNonFinite),
            "on_save_error": ("stop", "continue"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
                raise ArgumentError(
                    f"`Trainer({name}={value!r})` must be one of {list(allowed)}. Did you mean "
                    f"{near!r}?"
                )
        for name in ("steps", "accumulate", "log_every", "evaluate_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"`Trainer({name}=...)` must be at least 1, got {value!r}.")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ArgumentError(f"`Trainer(ema=...)` must be in [0, 1), got {self.ema!r}.")
        if self.monitor and self.evaluation is None:
            raise ArgumentError("`Trainer(monitor=...)` needs `evaluation=`, held-out data.")

    def _check_monitor(self, constraints: Sequence[str]) -> None:
        known = {*self.metrics, *(f"violation/{name}" for name in constraints)}
        if self.monitor and self.monitor.metric not in known:
            near = difflib.get_close_matches(self.monitor.metric, known, n=1, cutoff=0.0)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"`Monitor(metric={self.monitor.metric!r})` is not measured: use one of "
                f"{sorted(known)}.{hint}"
            )

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return int(self.state.step)

    @property
    def constraint_names(self) -> tuple[str, ...]:
        """Of the constraints that act in training."""
        composed = self._step.constraints
        return () if composed is None else composed.names

    @property
    def trained(self) -> Any:
        """The model as it is now; with the averaged parameters, if there is an average."""
        model = self._step.model(self._step.averaged_or_current(self.state), self.state.rest)
        model.eval()
        return model

    def fit(self, *, fast_dev_run: bool = False) -> Result:
        """Trains up to ``steps``, or goes on from where `restore` has put it.

        SIGTERM and Ctrl-C make it save and return; a second Ctrl-C does not wait.

        Args:
            fast_dev_run: two steps and one batch of the evaluation, without a folder: does it run?
        """
        run = None if fast_dev_run else self.run
        last = min(self.steps, self.step + 2) if fast_dev_run else self.steps
        assert not isinstance(run, str)
        if self.on_nonfinite == "stop":
            # What was not finite before has been reported, or skipped by a run that was to skip it.
            self.state = self.state._replace(health=self.sharding.place(healthy()))
        with contextlib.ExitStack() as stack:
            checkpoints, aside = None, []
            if run is not None:
                resuming = _same(run, self._restored_from)
                if self._is_first:
                    stack.enter_context(lock_run_folder(run))
                    prepare_run_folder(run, self.config or {}, resuming=resuming)
                checkpoints = self._checkpoints(run)
                stack.callback(checkpoints.close)
                aside = checkpoints.set_aside_after(self.step) if resuming else []
            listeners = self._listeners(run, last)
            asked = stack.enter_context(listen_for_signals())
            loop = Loop(self, listeners, checkpoints, last, limit=1 if fast_dev_run else None)
            reason = "failed"
            try:
                loop.start(aside)
                reason = loop.go(asked)
            finally:
                for listener in listeners:
                    listener.on_end(self.step, reason)
        nnx.update(self.model, self.state.parameters, self.state.rest)
        return Result(reason, self.step, loop.evaluated, self.trained, loop.seconds)

    def evaluate(
        self, data: Batches | None = None, *, limit: int | None = None
    ) -> dict[str, float]:
        """Metrics and violations on held-out data, those of ``evaluation`` by default."""
        data = self.evaluation if data is None else data
        if data is None:
            raise ArgumentError(
                "`evaluate` needs data: pass it here or as `Trainer(evaluation=...)`."
            )
        parameters = self._step.averaged_or_current(self.state)
        return self._evaluation(parameters, self.state.rest, data, limit=limit)

    def restore(
        self,
        step: int | Literal["last", "best"] = "last",
        *,
        run: pathlib.Path | str | None = None,
        fallback: bool = False,
        or_start: bool = False,
    ) -> int:
        """Puts the state of a checkpoint in place, and returns its step.

        Args:
            step: which one; by default the newest.
            run: the folder of the run; by default this trainer's.
            fallback: whether to take the one before, and so on, if the checkpoint is damaged.
            or_start: whether a run that was killed before its first checkpoint starts again.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
        """
        folder = pathlib.Path(run or self.run or "")
        is_there = (run or self.run) and (folder / "checkpoints").is_dir()
        if or_start and not (is_there and has_checkpoints(folder / "checkpoints")):
            self._restored_from = folder
            return self.step
        if not is_there:
            raise CheckpointError(f"there are no checkpoints in {folder}: nothing to restore.")
        checkpoints = self._checkpoints(folder, reading=True)
        try:
            wanted = _wanted(checkpoints, step)
            if wanted is None:
                raise CheckpointError(f"{folder} has no complete checkpoint.")
            earlier = [s for s in reversed(checkpoints.steps) if s < wanted]
            self.state, about = _first_readable(
                checkpoints, [wanted, *(earlier if fallback else [])], self.state
            )
        finally:
            checkpoints.close()
        self._best, self._without_best = about.get("best"), about.get("without_best", 0)
        self._seconds = about.get("seconds", 0.0)
        self._restored_from = folder
        return self.step

    def validate(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Traces one step on shapes alone, which finds most mistakes; returns their state."""
        return jax.eval_shape(self._step, self.state, {}, self._example())[0]

    def lower(self) -> jax.stages.Lowered:
        """The step, ready to be compiled, to look at memory and collectives."""
        batch = self.sharding.place_batch(self._example())
        return self._compiled.lower(self.state, self._totals(batch), batch)

    def _example(self) -> PyTree:
        with contextlib.closing(self._batches(self.step)) as batches:
            return jax.tree.map(jnp.asarray, next(batches))

    def _batches(self, step: int) -> Any:
        return self.data.from_step(step, process=jax.process_index(), processes=jax.process_count())

    def _totals(self, batch: PyTree) -> dict[str, jax.Array]:
        """Sums at zero."""
        names = self._step.metric_names(self.state, batch)
        return jax.device_put({name: jnp.zeros(()) for name in names}, self.sharding.whole)

    def _checkpoints(self, run: pathlib.Path, *, reading: bool = False) -> Checkpoints:
        return Checkpoints(
            run / "checkpoints",
            keep=self.keep,
            metric=self.monitor.metric if self.monitor else None,
            mode=self.monitor.mode if self.monitor else "min",
            reading=reading,
        )

    def _listeners(self, run: pathlib.Path | None, last: int) -> list[Callback]:
        if not self._is_first:
            return []
        listeners: list[Callback] = []
        if run is not None:
            listeners += [JsonLines(run / "metrics.jsonl"), TensorBoard(run / "tensorboard")]
        if self.progress:
            listeners.append(Bar(last, title=self.title))
        return [*listeners, *self.callbacks]


def _same(folder: pathlib.Path, other: pathlib.Path | None) -> bool:
    return other is not None and folder.absolute() == other.absolute()


def _wanted(checkpoints: Checkpoints, step: int | str) -> int | None:
    if step == "last":
        return checkpoints.latest
    if step == "best":
        return checkpoints.best
    if isinstance(step, str):
        raise ArgumentError(
            f"`restore(step=...)` must be a number, 'last' or 'best', got {step!r}."
        )
    return step


def _first_readable(
    checkpoints: Checkpoints, steps: Sequence[int], like: State
) -> tuple[State, dict[str, Any]]:
    for step, is_last in zip(steps, [*[False] * (len(steps) - 1), True], strict=True):
        try:
            return checkpoints.restore(step, like)
        except CheckpointError:
            if is_last:
                raise
    raise AssertionError("there is at least one step")
