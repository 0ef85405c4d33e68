"""The training loop: step, log, evaluate, save, check for preemption, always in that order."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from constrainx.errors import UserError
from constrainx.runtime import Callback, CheckpointError, Checkpoints, StopRequests, Trace
from constrainx.step import contradictions
from constrainx.trainers._batches import GiveUp, wait_for
from constrainx.trainers._program import OnNonFinite
from constrainx.trainers._settings import Monitor, OnSaveError
from constrainx.trainers._state import Progress, State
from constrainx.trainers._totals import STEPS, Totals, find_means
from constrainx.trainers._watch import Watch

# Steps that may be queued: the device always has work, and memory for batches stays bounded.
AHEAD = 8
# Seconds without a batch after which an evaluation is given up once a signal has come, and after
# which a process that has peers ends.
PATIENCE, PATIENCE_WITH_PEERS = 5.0, 30.0


class NonFiniteError(UserError, RuntimeError):
    """A step was not finite. The trainer keeps the state before it."""


class StalledError(UserError, RuntimeError):
    """A signal came while data had stalled, and nothing could be saved."""


class Ending(enum.StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    STOPPED_EARLY = "stopped early"
    ASKED_TO_STOP = "asked to stop"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a loop ended.

    Attributes:
        ending: why it ended.
        signal: what asked it to stop, such as "SIGTERM", or None.
        metrics: of the last evaluation.
        saved: the step of the newest checkpoint, or None.
        unsaved: the steps whose checkpoints could not be written.
    """

    ending: Ending
    signal: str | None
    metrics: dict[str, float]
    saved: int | None
    unsaved: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When the loop does what.

    Attributes:
        last: the step to train up to.
        log_every: steps between logs.
        evaluate_every: steps between evaluations, or None.
        save_every: steps between checkpoints, or None.
        monitor: what decides which checkpoint is best, or None.
        on_nonfinite: what to do at a step that is not finite.
        on_save_error: what to do when a checkpoint cannot be written.
    """

    last: int
    log_every: int
    evaluate_every: int | None
    save_every: int | None
    monitor: Monitor | None
    on_nonfinite: OnNonFinite
    on_save_error: OnSaveError


class Loop:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        progress: Progress,
        schedule: Schedule,
        *,
        take_step: Callable[[State, Totals, PyTree], tuple[State, Totals, jax.Array]],
        start_totals: Callable[[PyTree], Totals],
        causes: Sequence[str],
        watch: Watch,
        evaluate: Callable[[GiveUp], dict[str, float] | None] | None,
        listeners: Sequence[Callback],
        checkpoints: Checkpoints | None,
        trace: Trace,
        about: Mapping[str, Any],
    ):
        """Sets up a loop.

        Args:
            progress: updated by the loop.
            schedule: when to do what.
            take_step: the compiled step.
            start_totals: a batch on the devices ↦ the sums of all metrics, at zero.
            causes: what may turn out not to be finite, in the order of `Health.cause`.
            watch: looks for signs in what is logged that the run is going wrong.
            evaluate: measures the current state, unless it gives up waiting for data; or None.
            listeners: the callbacks.
            checkpoints: where to save, or None.
            trace: of some steps.
            about: what else to store with each checkpoint.
        """
        self._progress, self._schedule = progress, schedule
        self._take_step, self._start_totals, self._causes = take_step, start_totals, causes
        self._watch, self._measure, self._trace = watch, evaluate, trace
        self._listeners, self._checkpoints, self._about = listeners, checkpoints, about
        self._step = progress.step
        self._evaluated: dict[str, float] = {}
        self._evaluated_at = -1
        self._waited = 0.0
        self._noted = int(progress.state.health.skipped)
        self._contradicted = False
        self._requests: StopRequests | None = None
        self._unsaved: set[int] = set()

    def tell(self, message: str) -> None:
        """Reports an event to every listener."""
        for listener in self._listeners:
            listener.on_event(self._step, message)

    def run(
        self,
        batches: Generator[PyTree, None, None],
        place: Callable[[PyTree], PyTree],
        requests: StopRequests,
    ) -> Outcome:
        """Runs the loop: step, log, evaluate, save, check for preemption.

        Args:
            batches: this process's rows, from the current step on; closed at the end.
            place: puts them on the devices.
            requests: signals that ask the run to stop.
        """
        progress, last = self._progress, self._schedule.last
        ending, signal = Ending.FINISHED, None
        self._requests = requests
        with contextlib.closing(self._time(batches)) as timed, contextlib.ExitStack() as stack:
            stack.callback(self._trace.end)
            if self._step >= last:
                self._evaluate(is_last=True)
                return self._conclude(ending, signal)
            totals: Any = None
            in_flight: collections.deque[jax.Array] = collections.deque()
            clock = time.perf_counter()
            counted = self._step
            for rows in itertools.islice(timed, last - self._step):
                batch = place(rows)
                is_first = totals is None
                if is_first:
                    zeros = self._start_totals(batch)
                    totals = jax.tree.map(jnp.copy, zeros)
                with self._trace.around(self._step + 1, before=totals):
                    progress.state, totals, token = self._take_step(progress.state, totals, batch)
                self._step += 1
                if traced := self._trace.end_after(self._step, token):
                    self.tell(traced)
                in_flight.append(token)
                if len(in_flight) > AHEAD:
                    jax.block_until_ready(in_flight.popleft())
                if is_first:
                    jax.block_until_ready(token)  # compiled: the clock starts now
                    clock, counted, self._waited = time.perf_counter(), self._step, 0.0
                is_last = self._step == last
                if self._step % self._schedule.log_every == 0 or is_last:
                    figures = self._read_totals(totals, clock, self._step - counted)
                    progress.seconds += time.perf_counter() - clock
                    totals = jax.tree.map(jnp.copy, zeros)
                    for listener in self._listeners:
                        listener.on_log(self._step, figures)
                    clock, counted, self._waited = time.perf_counter(), self._step, 0.0
                if self._is_due(self._schedule.evaluate_every) or self._is_due(
                    self._schedule.save_every
                ):
                    jax.block_until_ready(token)  # or queued steps would count as evaluation
                pause = time.perf_counter()
                stop_early = self._evaluate(is_last=is_last)
                asked = requests.at(self._step)
                self._save(is_due=is_last or stop_early or bool(asked))
                clock += time.perf_counter() - pause
                if stop_early:
                    ending = Ending.STOPPED_EARLY
                    break
                if asked and not is_last:
                    ending, signal = Ending.ASKED_TO_STOP, asked
                    break
            else:
                if self._step < last:  # a signal came while there was no batch to take a step on
                    ending, signal = Ending.ASKED_TO_STOP, requests.asked
                    self._save(is_due=True)
        self._check_health()
        if self._checkpoints is not None:
            self._try_to_save(self._checkpoints.wait)
        return self._conclude(ending, signal)

    def _conclude(self, ending: Ending, signal: str | None) -> Outcome:
        saved = self._checkpoints.latest if self._checkpoints else None
        return Outcome(ending, signal, self._evaluated, saved, tuple(sorted(self._unsaved)))

    def _time(self, batches: Generator[PyTree, None, None]) -> Generator[PyTree, None, None]:
        """Yields the same batches, and adds up the time spent waiting for them.

        Ends when a signal comes during the wait.
        """
        try:
            while True:
                start = time.perf_counter()
                if not wait_for(batches, self._give_up_training):
                    return
                try:
                    rows = next(batches)
                except StopIteration:
                    return
                self._waited += time.perf_counter() - start
                yield rows
        finally:
            batches.close()

    def _give_up_training(self, seconds: float) -> bool:
        """The state is between two steps, and can be saved at once."""
        return self._give_up(seconds, patience=0.0)

    def _give_up_evaluation(self, seconds: float) -> bool:
        """An evaluation decides about early stopping, so it gets a moment to finish."""
        return self._give_up(seconds, patience=PATIENCE)

    def _give_up(self, seconds: float, *, patience: float) -> bool:
        requests = self._requests
        if requests is None or requests.asked is None:
            return False
        if requests.is_alone:
            return seconds >= patience
        if seconds < PATIENCE_WITH_PEERS:
            return False
        saved = self._checkpoints.latest if self._checkpoints else None
        kept = "none was saved before" if saved is None else f"the last is of step {saved}"
        raise StalledError(
            f"asked to stop by {requests.asked}, but no batch has come for {seconds:.0f} s, and "
            "without it this process cannot reach the step at which all would save. No checkpoint "
            f"of step {self._step}; {kept}."
        )

    def _read_totals(self, totals: Any, clock: float, steps: int) -> dict[str, float]:
        """Means since the last log. The host waits for the device here and nowhere else."""
        sums = {name: float(value) for name, value in jax.device_get(totals).items()}
        taken, figures = sums[STEPS], find_means(sums)
        elapsed = time.perf_counter() - clock
        if steps:
            figures["steps_per_second"] = steps / elapsed
            figures["data_wait"] = self._waited / elapsed
        if taken:
            # First, because it may explain a step that was not finite, which ends the run below.
            for sentence in self._watch.look(self._step, figures):
                self.tell(sentence)
        self._check_health()
        self._name_contradictions()
        return figures

    def _check_health(self) -> None:
        """Reports a step that was not finite, and what in it was not."""
        health = jax.device_get(self._progress.state.health)
        if health.skipped <= self._noted:
            return
        message = f"step {int(health.step)} was not finite: {self._causes[int(health.cause)]}"
        if self._schedule.on_nonfinite == "stop":
            saved = self._checkpoints.latest if self._checkpoints else None
            kept = f" The last checkpoint, of step {saved}, is good." if saved is not None else ""
            self.tell(message)
            raise NonFiniteError(
                f"{message}. Parameters are those before that step.{kept} Lower the learning rate "
                "or gamma, clip gradients, or skip such steps: on_nonfinite='skip', on the command "
                "line --on-nonfinite skip."
            )
        new = int(health.skipped) - self._noted
        self._noted = int(health.skipped)
        self.tell(f"{message}; skipped {new} steps since the last log")

    def _name_contradictions(self) -> None:
        """Reports contradicting constraints, once per run."""
        if self._contradicted:
            return
        for sentence in contradictions(self._progress.state.constraints):
            self._contradicted = True
            self.tell(sentence)

    def _evaluate(self, *, is_last: bool) -> bool:
        """Evaluates if that is due; returns whether patience has run out."""
        is_due = is_last or self._is_due(self._schedule.evaluate_every)
        if self._measure is None or not is_due:
            return False
        found = self._measure(self._give_up_evaluation)
        if found is None:
            self.tell("the evaluation was given up: its data has stalled, and a signal came")
            return False
        self._evaluated, self._evaluated_at = found, self._step
        for listener in self._listeners:
            listener.on_evaluate(self._step, self._evaluated)
        monitor, progress = self._schedule.monitor, self._progress
        if monitor is None:
            return False
        value = self._evaluated[monitor.metric]
        if monitor.is_better(value, progress.best):
            progress.best, progress.without_best = value, 0
            self._save(is_due=True)
            return False
        progress.without_best += 1
        return monitor.patience is not None and progress.without_best >= monitor.patience

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self._step % every == 0

    def _save(self, *, is_due: bool) -> None:
        if self._checkpoints is None or not (is_due or self._is_due(self._schedule.save_every)):
            return
        if self._step in self._checkpoints.steps:
            return
        self._check_health()
        progress = self._progress
        about = {
            **self._about,
            "best": progress.best,
            "without_best": progress.without_best,
            "seconds": progress.seconds,
        }
        checkpoints, metrics = self._checkpoints, {}
        if self._evaluated_at == self._step:
            metrics = self._evaluated
        # An earlier save that failed must not keep this one from being tried.
        self._try_to_save(checkpoints.wait)
        begun = self._try_to_save(
            lambda: checkpoints.save(self._step, progress.state, about=about, metrics=metrics)
        )
        if begun:
            for listener in self._listeners:
                listener.on_save(self._step)

    def _try_to_save(self, save: Callable[[], None]) -> bool:
        """Returns whether it worked; a failure ends the run only if `on_save_error` is "stop"."""
        try:
            save()
        except CheckpointError as error:
            if error.step is not None:
                self._unsaved.add(error.step)
            self.tell(str(error))
            if self._schedule.on_save_error == "stop":
                raise
            return False
        return True
