"""`Trainer`: what to train, on what, and how.

`_program.py` has the step, `_loop.py` the loop, and `_run.py` the folder of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree
from rich.console import Console

from constrainx.checks import Certificate, Diagnosis, certify, diagnose_point
from constrainx.constraints import Composed, Constraint, compose, constraints_of
from constrainx.data import Batches, check_integers
from constrainx.errors import ArgumentError, check_choice
from constrainx.polishing import Polished, polish
from constrainx.runtime import (
    Bar,
    Callback,
    CheckpointError,
    Restored,
    RunError,
    Sharding,
    Trace,
    by_path,
    check_same_settings,
    describe_resume,
    end_program,
    listen_for_signals,
    read_config,
)
from constrainx.step import Method, MethodName, Point, Unconstrained, as_method, constrain
from constrainx.trainers._abstract import as_shapes, forget_values, is_abstract
from constrainx.trainers._batches import GiveUp, read_ahead
from constrainx.trainers._checks import (
    check_batches,
    check_count,
    check_decay,
    check_measured,
    check_model,
    check_real,
    check_split,
)
from constrainx.trainers._clock import StepClock
from constrainx.trainers._guard import find_exempt, find_spoilt
from constrainx.trainers._loop import Ending, Loop, NonFiniteError, Schedule
from constrainx.trainers._masks_used import check_masks_used
from constrainx.trainers._measure import Measure
from constrainx.trainers._optimizer import describe_optimizer
from constrainx.trainers._polish import Polish
from constrainx.trainers._program import OnNonFinite, Precision, Program
from constrainx.trainers._recorded import describe_constraints, find_differences
from constrainx.trainers._run import OpenRun, WhichStep, can_restore, open_run, restore_progress
from constrainx.trainers._settings import (
    Devices,
    Evaluation,
    Logging,
    Monitor,
    RunFolder,
    as_devices,
    as_evaluation,
    as_run_folder,
)
from constrainx.trainers._state import Progress, State, split_model, start_healthy
from constrainx.trainers._watch import Watch

OnSignal: TypeAlias = Literal["exit", "return"]
log = logging.getLogger("constrainx")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        reason: "finished", "stopped early" or "asked to stop".
        step: how many steps had been taken.
        metrics: of the last evaluation; of the polished model, if it was polished.
        model: the trained model; with the averaged parameters, if there is an average; polished, if
            the trainer was asked to.
        seconds: spent in steps, including those before a `restore`, without compilation and
            evaluation.
        signal: what asked it to stop, such as "SIGTERM"; None if nothing did.
        saved: the step of the newest checkpoint; None if there is none.
        unsaved: the steps whose checkpoints could not be written.
        polished: what polishing did; None without it, and for a run that can continue.
    """

    reason: Ending
    step: int
    metrics: dict[str, float]
    model: Any = dataclasses.field(repr=False)
    seconds: float
    signal: str | None = None
    saved: int | None = None
    unsaved: tuple[int, ...] = ()
    polished: Polished | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains a model under its constraints, on any number of devices, and can resume a run.

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
    ...     logging=cx.Logging(progress=False),
    ... )
    >>> result = trainer.fit()
    >>> print(result.reason, result.model.kernel[...].round(1))
    finished [[3.]]

    Attributes:
        model: an NNX module, possibly with attached constraints. It is left alone until `restore`
            or the end of `fit`, and then holds the parameters that were loaded or trained. If it
            has shapes alone, as those that `nnx.eval_shape` returns, the trainer holds no arrays,
            and can `validate`, `trace` and `lower` its step, but not train.
        loss: (model, batch) ↦ a number, or a number and a dictionary of metrics. If it has an
            argument ``key``, that is a new random key in each step. The model is in training mode,
            and its own random streams are seeded anew in each step. None is for runs that
            constraints alone drive, such as `Residuals`: the optimizer then gets gradients of zero,
            and what is logged as the loss is the sum of the constraints' squared violations.
        optimizer: any Optax transformation.
        data: the training batches, see `constrainx.data`.
        steps: how many steps to take in total.
        constraints: in addition to those attached to the model. Constraints see the model in
            evaluation mode and in full precision.
        method: how the optimizer respects them: `NullSpace`, `Penalty`, `Lagrangian` or one of your
            own; "nullspace", "penalty", "lagrangian" and "none" are short for their defaults.
        augment: (batch, key) ↦ batch, a part of the compiled step.
        evaluation: what is measured on held-out data, and when; or just that data.
        run: where config, metrics and checkpoints go; or just a path; None for nowhere.
        devices: which devices train; or just how many; None for all.
        logging: what is logged, and which callbacks are called.
        accumulate: how many parts to split a batch into; their gradients are computed one after
            the other.
        precision: "bfloat16" casts parameters and batch for the loss alone; parameters, optimizer
            and constraints stay in float32.
        ema: the decay of a moving average of the parameters, which is used for evaluation.
        wrt: an NNX filter: which variables are trained.
        seed: for all randomness, which is a function of seed and step.
        on_nonfinite: "stop" at a step that is not finite, or "skip" it.
        polish: how to polish the model of the result when training has ended, see
            `constrainx.polish`; None for not at all. Checkpoints, and so a run that is resumed,
            hold the parameters that training led to.
    """

    model: nnx.Module
    loss: Callable[..., Any] | None
    optimizer: optax.GradientTransformation
    data: Batches
    steps: int
    constraints: Sequence[Constraint] = ()
    method: Method | MethodName = "nullspace"
    augment: Callable[[Any, jax.Array], Any] | None = None
    evaluation: Evaluation | Batches | None = None
    run: RunFolder | pathlib.Path | str | None = None
    devices: Devices | int | None = None
    logging: Logging = dataclasses.field(default_factory=Logging)
    accumulate: int = 1
    precision: Precision = "float32"
    ema: float | None = None
    wrt: Any = nnx.Param
    seed: int = 0
    on_nonfinite: OnNonFinite = "stop"
    polish: Polish | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        check_real(self.model, self.wrt)
        check_batches("Trainer(data=...)", self.data)
        check_choice("precision", self.precision, get_args(Precision), owner="Trainer")
        check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonFinite), owner="Trainer")
        check_count("Trainer(steps=...)", self.steps)
        check_count("Trainer(accumulate=...)", self.accumulate)
        check_decay("Trainer(ema=...)", self.ema)
        devices = as_devices(self.devices)
        self.sharding = (
            Sharding.over(devices=devices.count, fsdp=devices.fsdp)
            if devices.mesh is None
            else Sharding(mesh=devices.mesh)
        )
        check_split(self.data.batch, self.sharding, accumulate=self.accumulate)
        with self._own_mesh():
            self._build()

    def _build(self) -> None:
        self._is_abstract = is_abstract(nnx.state(self.model))
        if self._is_abstract:
            self.model = forget_values(self.model)
        self._evaluation = as_evaluation(self.evaluation)
        self._folder = as_run_folder(self.run)
        self._restored_from: pathlib.Path | None = None
        self._result: Result | None = None
        self._notes: list[str] = []
        self._refused: list[str] = []
        composed = self._compose()
        method = as_method(self.method, argument="Trainer(method=...)")
        acting = None if isinstance(method, Unconstrained) else composed
        if self.loss is None and acting is None:
            raise ArgumentError(
                "`Trainer(loss=None)` needs constraints that act, such as `cx.Residuals(...)`: "
                "without them nothing would change."
            )
        optimizer = optax.with_extra_args_support(self.optimizer)
        graph, _, rngs, _ = split_model(self.model, self.wrt)
        program = Program(
            graph=graph,
            rngs=rngs,
            wrt=self.wrt,
            loss=self.loss,
            constraints=acting,
            optimizer=optimizer if acting is None else constrain(optimizer, acting, method=method),
            augment=self.augment,
            accumulate=self.accumulate,
            precision=self.precision,
            ema=self.ema,
            seed=self.seed,
            on_nonfinite=self.on_nonfinite,
            learning_rate=self.logging.learning_rate,
            log_every=self.logging.every,
        )
        if self._is_abstract:
            # Which arrays start with infinite values is not known, so the guard checks all.
            self._program = program
            start = jax.eval_shape(program.initial, *split_model(self.model, self.wrt)[1::2])
            self._progress = Progress(state=self.sharding.shapes(start))
        else:
            start = program.initial(*split_model(self.model, self.wrt)[1::2])
            self._program = dataclasses.replace(program, exempt=find_exempt(start))
            self._progress = Progress(state=self.sharding.place(start))
        self._measure = Measure(
            rebuild=self._program.model,
            metrics=self._evaluation.metrics if self._evaluation else {},
            constraints=composed,
            sharding=self.sharding,
            seed=self.seed,
        )
        if self._monitor is not None:
            check_measured(self._monitor.metric, self._measure.names)
        self._compiled = jax.jit(
            self._program,
            donate_argnums=(0, 1),
            out_shardings=(self.sharding.of_state(self.state), self.sharding.whole, None),
        )

    def _shared_settings(self) -> dict[str, Any]:
        """What processes that train together must have in common."""
        schedule = dataclasses.asdict(self._schedule(self.steps))
        digest = 0
        for leaf in jax.tree.leaves(nnx.state(self.model, self.wrt)):
            if getattr(leaf, "is_fully_addressable", True):
                digest = zlib.crc32(np.asarray(leaf).tobytes(), digest)
        return {
            "seed": self.seed,
            "step": self.step,
            **{f"config {name}": value for name, value in self.config.items()},
            **{name.replace("_", " "): value for name, value in schedule.items()},
            "batch": self.data.batch,
            "accumulate": self.accumulate,
            "precision": self.precision,
            "ema": self.ema,
            "arrays": {
                path: f"{leaf.dtype}{list(leaf.shape)}"
                for path, leaf in by_path(self.state).items()
            },
            "digest of the model": digest,
        }

    def _own_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Our mesh in place of one that the caller has set, which may have other devices."""
        is_free = jax.sharding.get_abstract_mesh().empty
        return contextlib.nullcontext() if is_free else jax.set_mesh(self.sharding.mesh)

    def _compose(self) -> Composed | None:
        """All constraints, found and composed once, about the model in evaluation mode."""
        model = nnx.clone(self.model)
        model.eval()
        if not constraints_of(model) and not self.constraints:
            return None
        return compose(model, *self.constraints, model=model)

    @property
    def state(self) -> State:
        """All arrays that change in training."""
        return self._progress.state

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self._progress.step

    @property
    def config(self) -> dict[str, Any]:
        """What is written to the run's config.json."""
        return dict(self._folder.config) if self._folder else {}

    @property
    def constraint_names(self) -> tuple[str, ...]:
        """The names of the constraints that act in training."""
        composed = self._program.constraints
        return () if composed is None else composed.names

    @property
    def trained(self) -> Any:
        """The model as it is now; with the averaged parameters, if there is an average."""
        parameters = self._program.parameters_to_evaluate(self.state)
        model = self._program.model(parameters, self.state.rest)
        model.eval()
        return model

    @property
    def result(self) -> Result | None:
        """How the last `fit` ended, even if a signal then ended the program; None before."""
        return self._result

    def fit(self, *, fast_dev_run: bool = False, on_signal: OnSignal = "exit") -> Result:
        """Trains up to ``steps``, from the start or from the checkpoint that `restore` has loaded.

        SIGTERM and Ctrl-C make it save, and then end the program, so that a loop over seeds does
        not go on with the next: Ctrl-C raises KeyboardInterrupt, and SIGTERM SystemExit, with exit
        code 0 if the run has a folder to continue from, and 143 otherwise. Until then `result`
        has what would have been returned. A second Ctrl-C stops at once and saves nothing.

        Args:
            fast_dev_run: take two steps and evaluate one batch, without a folder, to see that it
                runs.
            on_signal: "return" to return the result after a signal, whose `reason` is then "asked
                to stop".
        """
        check_choice("on_signal", on_signal, get_args(OnSignal), owner="fit")
        self._check_concrete("fit")
        if jax.process_count() > 1:
            check_same_settings(self._shared_settings())
        self._check_start()
        folder = None if fast_dev_run else self._folder
        schedule = self._schedule(min(self.steps, self.step + 2) if fast_dev_run else self.steps)
        if self.on_nonfinite == "stop":
            # Earlier steps that were not finite have been reported, or skipped on purpose.
            health = self.sharding.place(start_healthy())
            self._progress.state = self.state._replace(health=health)
        with (
            self._own_mesh(),
            self._open(folder) as opened,
            listen_for_signals() as requests,
        ):
            listeners = self._listeners(opened, schedule.last)
            loop = Loop(
                self._progress,
                schedule,
                take_step=self._compiled,
                start_totals=self._start_totals,
                causes=self._program.causes,
                watch=Watch(self._program.constraints, as_method(self.method)),
                evaluate=self._evaluator(limit=1 if fast_dev_run else None),
                listeners=listeners,
                checkpoints=opened.checkpoints if opened else None,
                trace=Trace(self.logging.profile),
                about={
                    "config": self.config,
                    "settings": self._settings,
                    "monitor": None
                    if self._monitor is None
                    else {"metric": self._monitor.metric, "mode": self._monitor.mode},
                    "devices": self.sharding.mesh.size,
                    "processes": jax.process_count(),
                },
            )
            reason = "failed"
            try:
                self._announce(loop, listeners, opened)
                batches = read_ahead(self._batches(self.step), is_cheap=self.data.is_cheap)
                found = loop.run(batches, self.sharding.place_batch, requests)
                reason = str(found.ending) + (f" by {found.signal}" if found.signal else "")
            finally:
                for listener in listeners:
                    listener.on_end(self.step, reason)
        nnx.update(self.model, self.state.parameters, self.state.rest)
        seconds = self._progress.seconds
        self._result = result = Result(
            found.ending,
            self.step,
            found.metrics,
            self.trained,
            seconds,
            found.signal,
            found.saved,
            found.unsaved,
        )
        if self.polish is not None and result.reason is not Ending.ASKED_TO_STOP:
            settings = self.polish
            if fast_dev_run:
                settings = dataclasses.replace(settings, max_steps=1)
            self._result = result = self._polish_result(result, settings)
        if result.signal is not None and on_signal == "exit":
            end_program(result.signal, is_saved=folder is not None and found.saved == self.step)
        return result

    def _polish_result(self, result: Result, settings: Polish) -> Result:
        model, polished = self.run_polish(settings)
        metrics = result.metrics
        if self._evaluation is not None:
            metrics = self.evaluate_model(model)
        log.info("%s", polished.reason)
        return dataclasses.replace(result, model=model, metrics=metrics, polished=polished)

    def run_polish(self, settings: Polish | None = None) -> tuple[Any, Polished]:
        """A polished copy of the model as it is now, and what was done to it.

        Args:
            settings: how; those of ``polish`` by default.
        """
        self._check_concrete("run_polish")
        if self._measure.constraints is None:
            raise ArgumentError("`run_polish` needs constraints, and this trainer has none.")
        settings = settings or self.polish or Polish()
        with self._own_mesh():
            return polish(
                self.trained,
                self._measure.constraints,
                self.data,
                keep=None if settings.weight is None else self.data,
                held_out=self._evaluation.data if self._evaluation else None,
                loss=self.loss,
                augment=self.augment,
                seed=self.seed,
                **settings.options,
            )

    def evaluate_model(self, model: Any) -> dict[str, float]:
        """Metrics and violations of another model of the same structure, on the held-out data."""
        if self._evaluation is None:
            raise ArgumentError("`evaluate_model` needs data: pass `Trainer(evaluation=...)`.")
        _, parameters, _, rest = split_model(model, self.wrt)
        with self._own_mesh():
            found = self._measure(
                parameters, rest, self._evaluation.data, limit=None, give_up=lambda _: False
            )
        assert found is not None  # nothing gives up
        return found

    def _check_start(self) -> None:
        """Raises if a checkpoint is to be continued that is not finite: no step would help it."""
        spoilt = find_spoilt(self.state, self._program.exempt) if self.step else []
        if spoilt:
            more = f" and {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
            raise NonFiniteError(
                f"the state of step {self.step} is not finite: {spoilt[0]}{more}. Continue from an "
                "earlier checkpoint, `restore(step)`, on the command line `--step`; `constrainx "
                "verify` lists them."
            )

    def evaluate(
        self, data: Batches | None = None, *, limit: int | None = None
    ) -> dict[str, float]:
        """Metrics and violations on held-out data, those of ``evaluation`` by default."""
        self._check_concrete("evaluate")
        data = self._evaluation.data if data is None and self._evaluation else data
        if data is None:
            raise ArgumentError(
                "`evaluate` needs data: pass it here or as `Trainer(evaluation=...)`."
            )
        found = self._evaluate(data, limit=limit, give_up=lambda _: False)
        assert found is not None
        return found

    def _evaluate(
        self, data: Batches, *, limit: int | None, give_up: GiveUp
    ) -> dict[str, float] | None:
        parameters = self._program.parameters_to_evaluate(self.state)
        with self._own_mesh():
            return self._measure(parameters, self.state.rest, data, limit=limit, give_up=give_up)

    def certify(self, data: Batches | None = None, **options: Any) -> Certificate:
        """How well the constraints hold on held-out data, those of ``evaluation`` by default.

        A constraint on whole batches is measured on batches as large as in training.

        Args:
            data: the held-out batches.
            options: those of `constrainx.certify`.
        """
        data = self._evaluation.data if data is None and self._evaluation else data
        self._check_concrete("certify")
        if self._measure.constraints is None:
            raise ArgumentError("`certify` needs constraints, and this trainer has none.")
        options = {"batch": self.data.batch, "seed": self.seed, **options}
        with self._own_mesh():
            return certify(self.trained, self._measure.constraints, data, **options)

    def diagnose(self) -> Diagnosis:
        """Examines the constraints at the current step, on its batch; see `constrainx.diagnose`."""
        self._check_concrete("diagnose")
        if self._measure.constraints is None:
            raise ArgumentError("`diagnose` needs constraints, and this trainer has none.")
        with self._own_mesh():
            batch = self.sharding.place_batch(self._example())
            batch, key, loss = self._program.at(self.state, batch)
            model = self._program.model(self.state.parameters, self.state.rest)
            point = Point(
                self._measure.constraints.at(self.state.step),
                self.state.parameters,
                self.state.step,
                batch,
                key,
                model,
            )
            return diagnose_point(point, loss=loss, method=as_method(self.method))

    @contextlib.contextmanager
    def clock_steps(self) -> Iterator[StepClock]:
        """A clock that measures how long steps take, before the first; the trainer stays as it is.

        The clock has a copy of the state, and compiles the step.
        """
        self._check_concrete("clock_steps")
        constraints = self._program.constraints
        with self._own_mesh():
            clock = StepClock(
                jax.tree.map(jnp.copy, self.state),
                take_step=self._compiled,
                start_totals=self._start_totals,
                batches=lambda: read_ahead(self._batches(0), is_cheap=self.data.is_cheap),
                place=self.sharding.place_batch,
                steps=self.steps,
                every=[member.every for member in constraints or ()],
            )
            try:
                yield clock
            finally:
                clock.close()

    def restore(
        self,
        step: WhichStep = "last",
        *,
        run: pathlib.Path | str | None = None,
        fallback: bool = False,
        or_start: bool = False,
        strict: bool = True,
        keep_hyperparameters: bool = False,
    ) -> int:
        """Loads the state of a checkpoint, also into ``model``, and returns its step.

        What was not restored, and which settings differ from those that were recorded, is logged.

        Args:
            step: which one; by default the newest.
            run: the folder of the run; by default this trainer's.
            fallback: whether to try earlier checkpoints if this one is damaged.
            or_start: whether to start from the beginning if there is no checkpoint yet.
            strict: whether to refuse a checkpoint whose arrays have other names, shapes or dtypes,
                and to refuse to continue a run with other settings than it had. Otherwise those
                arrays that match are restored.
            keep_hyperparameters: whether constants of `optax.inject_hyperparams`, such as a
                learning rate, stay those of this trainer instead of those of the checkpoint.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another model.
        """
        self._check_concrete("restore")
        folder = as_run_folder(run) or self._folder
        if folder is None:
            raise CheckpointError(
                "there is nothing to restore: say from which folder, by `restore(run=...)` or "
                "`Trainer(run=...)`."
            )
        if can_restore(folder) or not or_start:
            self._progress, found = restore_progress(
                folder,
                self._monitor,
                step,
                self.state,
                fallback=fallback,
                strict=strict,
                keep_hyperparameters=keep_hyperparameters,
            )
            self._note_differences(found, folder, strict=strict)
            # Copies, because the state is donated to the next step.
            copies = jax.tree.map(jnp.copy, (self.state.parameters, self.state.rest))
            nnx.update(self.model, *copies)
        self._restored_from = pathlib.Path(folder.path)
        return self.step

    def _note_differences(self, found: Restored, folder: RunFolder, *, strict: bool) -> None:
        """Says what was not restored, and what differs from what was recorded."""
        config = find_differences(found.about.get("config"), self.config, without=folder.may_change)
        recorded = found.about.get("settings")
        others = find_differences(recorded, self._settings, without=("optimizer",))
        # Checkpoints of older versions say nothing about the optimizer, or about any setting.
        before = recorded.get("optimizer") if isinstance(recorded, dict) else None
        others += find_differences(before, self._settings["optimizer"])
        differing = [*config, *(one for one in others if one not in config)]
        self._refused = config if strict else []
        self._notes = list(found.notes)
        if differing:
            self._notes.append(f"saved with other settings: {', '.join(differing)}")
        for note in self._notes:
            log.info("step %d of %s: %s", self.step, folder.path, note)

    def validate(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Traces one step with shapes only, which finds most mistakes; returns the new state."""
        with self._own_mesh():
            # All values of a batch are checked, where it is not only planned.
            batch = self._shape_batch(self.data.batch) if self._is_abstract else self._example()
            check_masks_used(self._program, self.state, batch)
            return jax.eval_shape(self._program, self.state, {}, batch)[0]

    def lower(self, *, batch: int | None = None) -> jax.stages.Lowered:
        """The step, ready to be compiled, for a look at its memory and collectives.

        Only shapes go into it, so nothing is put on the devices, which need not exist.

        Args:
            batch: the size of the global batch, if another than that of the data.
        """
        traced = self.trace(batch=batch)
        with self._own_mesh():
            return traced.lower()

    def trace(self, *, batch: int | None = None) -> jax.stages.Traced:
        """The step as a jaxpr, from which `lower` starts; ``batch`` is as there."""
        count = self.data.batch if batch is None else batch
        check_split(count, self.sharding, accumulate=self.accumulate)
        with self._own_mesh():
            rows = self._shape_batch(count)
            check_masks_used(self._program, self.state, rows)
            names = self._program.metric_names(self.state, rows)
            zero = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.sharding.whole)
            state = self.sharding.shapes(self.state)
            return self._compiled.trace(state, dict.fromkeys(names, zero), rows)

    def _check_concrete(self, wanted: str) -> None:
        if self._is_abstract:
            raise ArgumentError(
                f"`{wanted}` needs parameters, and `Trainer(model=...)` has shapes alone: only "
                "`validate`, `trace` and `lower` work with these."
            )

    def _schedule(self, last: int) -> Schedule:
        evaluation, folder = self._evaluation, self._folder
        return Schedule(
            last=last,
            log_every=self.logging.every,
            evaluate_every=evaluation.every if evaluation else None,
            save_every=folder.save_every if folder else None,
            monitor=self._monitor,
            on_nonfinite=self.on_nonfinite,
            on_save_error=folder.on_save_error if folder else "stop",
        )

    def _open(self, folder: RunFolder | None) -> contextlib.AbstractContextManager[OpenRun | None]:
        if folder is None:
            return contextlib.nullcontext()
        before, path = self._restored_from, pathlib.Path(folder.path)
        is_same = before is not None and before.absolute() == path.absolute()
        if is_same and self._refused and self._config_agrees(path):
            raise RunError(
                f"the checkpoint of step {self.step} in {path} was saved with other settings than "
                f"config.json has now: {'; '.join(self._refused)}. Put them back, or continue with "
                "the new ones: `restore(strict=False)`, on the command line `--no-strict`."
            )
        return open_run(folder, self._monitor, resume_from=self.step if is_same else None)

    def _announce(self, loop: Loop, listeners: Sequence[Callback], opened: OpenRun | None) -> None:
        """Reports how the batch is split, and from which step the run starts."""
        if self.logging.progress and jax.process_index() == 0:
            description = self.sharding.describe(self.state, self.data.batch)
            Console().print(description, highlight=False, soft_wrap=True, style="dim")
        for listener in listeners:
            listener.on_start(self, self.step)
        if self._restored_from is not None:
            aside, changes = (opened.set_aside, opened.changes) if opened else ((), ())
            loop.tell("; ".join([describe_resume(self.step, aside, changes), *self._notes]))

    def _evaluator(
        self, *, limit: int | None
    ) -> Callable[[GiveUp], dict[str, float] | None] | None:
        if self._evaluation is None:
            return None
        data = self._evaluation.data
        return lambda give_up: self._evaluate(data, limit=limit, give_up=give_up)

    def _example(self) -> PyTree:
        with contextlib.closing(self._batches(self.step)) as batches:
            rows = next(batches)
        check_integers(rows, of="the batches")
        return jax.tree.map(jnp.asarray, rows)

    def _shape_batch(self, count: int) -> PyTree[jax.ShapeDtypeStruct]:
        """A batch of that many examples as shapes, of which one example is read."""
        # As one of as many processes as there are examples: a batch for many devices is large.
        rows: Any = self.data.from_step(0, process=0, processes=self.data.batch)
        with contextlib.closing(rows):
            example = next(rows)
        check_integers(example, of="the batches")
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype),
            as_shapes(jax.tree.map(np.asarray, example)),
        )
        return self.sharding.shapes_of_batch(shapes)

    def _batches(self, step: int) -> Any:
        return self.data.from_step(step, process=jax.process_index(), processes=jax.process_count())

    def _start_totals(self, batch: PyTree) -> dict[str, jax.Array]:
        """Sums at zero."""
        check_masks_used(self._program, self.state, batch)
        names = self._program.metric_names(self.state, batch)
        return jax.device_put({name: jnp.zeros(()) for name in names}, self.sharding.whole)

    @property
    def _settings(self) -> dict[str, Any]:
        """What a checkpoint records of the settings that change its numbers."""
        return {
            "seed": self.seed,
            "batch": self.data.batch,
            "accumulate": self.accumulate,
            "precision": self.precision,
            "ema": self.ema,
            "method": type(as_method(self.method)).__name__,
            "gamma": describe_constraints(self._program.constraints),
            "optimizer": describe_optimizer(self.optimizer),
        }

    def _config_agrees(self, folder: pathlib.Path) -> bool:
        """Whether config.json is that of this trainer, or gone; if not, opening the run says so."""
        if not (folder / "config.json").exists():
            return True
        may_change = (*(self._folder.may_change if self._folder else ()), "changes")
        return not find_differences(read_config(folder), self.config, without=may_change)

    @property
    def _monitor(self) -> Monitor | None:
        return self._evaluation.monitor if self._evaluation else None

    def _listeners(self, opened: OpenRun | None, last: int) -> list[Callback]:
        if jax.process_index() > 0:
            return []
        bar = [Bar(last, title=self.logging.title)] if self.logging.progress else []
        return [*(opened.writers if opened else ()), *bar, *self.logging.callbacks]
