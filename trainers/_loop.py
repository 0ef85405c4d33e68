"""The training loop: step, log, evaluate, save, check for preemption, always in that order."""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console

from constrainx.data import prefetch
from constrainx.errors import UserError
from constrainx.runtime import Callback, CheckpointError, Checkpoints
from constrainx.step import contradictions

if TYPE_CHECKING:
    from constrainx.trainers._trainer import Trainer

# Steps that may wait for the device. It always has work, and memory for batches stays bounded.
AHEAD = 8


class NonFiniteError(UserError, RuntimeError):
    """A step was not finite. The state is that before it."""


class Loop:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        trainer: Trainer,
        listeners: Sequence[Callback],
        checkpoints: Checkpoints | None,
        last: int,
        limit: int | None,
    ):
        self.trainer, self.listeners, self.checkpoints = trainer, listeners, checkpoints
        self.last, self.limit = last, limit
        self.step = trainer.step
        self.evaluated: dict[str, float] = {}
        self._evaluated_at = -1
        self.seconds = trainer._seconds
        self._waited = 0.0
        self._noted = int(trainer.state.health.skipped)
        self._contradicted = False

    def start(self, aside: Sequence[int]) -> None:
        """Tells everybody, also which checkpoints of later steps were set aside."""
        trainer = self.trainer
        if trainer.progress and trainer._is_first:
            sharding = trainer.sharding
            Console().print(
                sharding.describe(trainer.state, trainer.data.batch),
                highlight=False,
                soft_wrap=True,
                style="dim",
            )
        for listener in self.listeners:
            listener.on_start(trainer, self.step)
        if trainer._restored_from is not None:
            later = f"; set aside the later checkpoints {list(aside)}" if aside else ""
            self._tell(f"resumed from step {self.step}{later}")

    def go(self, asked: Any) -> str:
        """Step, log, evaluate, save, check for preemption; returns why it ended."""
        trainer = self.trainer
        if self.step >= self.last:
            self._evaluate(is_last=True)
            return "finished"
        batches = self._timed(trainer._batches(self.step))
        totals: Any = None
        reason = "finished"
        in_flight: collections.deque[jax.Array] = collections.deque()
        clock = time.perf_counter()
        counted = self.step
        with contextlib.closing(batches):
            for rows in itertools.islice(batches, max(self.last - self.step, 0)):
                batch = trainer.sharding.place_batch(rows)
                is_first = totals is None
                if is_first:
                    zeros = trainer._totals(batch)
                    totals = jax.tree.map(jnp.copy, zeros)
                trainer.state, totals, token = trainer._compiled(trainer.state, totals, batch)
                self.step += 1
                in_flight.append(token)
                if len(in_flight) > AHEAD:
                    jax.block_until_ready(in_flight.popleft())
                if is_first:
                    jax.block_until_ready(token)  # compiled: the clock starts now
                    clock, counted, self._waited = time.perf_counter(), self.step, 0.0
                is_last = self.step == self.last
                if self.step % trainer.log_every == 0 or is_last:
                    figures = self._logged(totals, clock, self.step - counted)
                    self.seconds += time.perf_counter() - clock
                    totals = jax.tree.map(jnp.copy, zeros)
                    self._tell_log(figures)
                    clock, counted, self._waited = time.perf_counter(), self.step, 0.0
                if self._is_due(trainer.evaluate_every) or self._is_due(trainer.save_every):
                    jax.block_until_ready(token)  # or steps would count as evaluation
                pause = time.perf_counter()
                stop_early = self._evaluate(is_last=is_last)
                ask = asked.at(self.step)
                self._save(is_due=is_last or stop_early or bool(ask))
                clock += time.perf_counter() - pause
                if stop_early:
                    reason = "stopped early"
                    break
                if ask and not is_last:
                    reason = f"asked to stop by {ask}"
                    break
        self._check_health()
        if self.checkpoints is not None:
            self._guarded(self.checkpoints.wait)
        return reason

    def _timed(self, batches: Any) -> Generator[PyTree, None, None]:
        """The same batches, with the time spent waiting for them noted down."""
        source = prefetch(batches) if not self.trainer.data.is_cheap else batches
        try:
            while True:
                start = time.perf_counter()
                try:
                    rows = next(source)
                except StopIteration:
                    return
                self._waited += time.perf_counter() - start
                yield rows
        finally:
            source.close()

    def _logged(self, totals: Any, clock: float, steps: int) -> dict[str, float]:
        """Means since the last log. Here, and only here, the host waits for the device."""
        sums = {name: float(value) for name, value in jax.device_get(totals).items()}
        taken = max(sums.pop("steps"), 1.0)
        figures = {name: value / taken for name, value in sums.items()}
        elapsed = time.perf_counter() - clock
        if steps:
            figures["steps_per_second"] = steps / elapsed
            figures["data_wait"] = self._waited / elapsed
        self._check_health()
        self._name_contradictions()
        return figures

    def _tell_log(self, figures: Mapping[str, float]) -> None:
        for listener in self.listeners:
            listener.on_log(self.step, figures)

    def _tell(self, message: str) -> None:
        for listener in self.listeners:
            listener.on_event(self.step, message)

    def _check_health(self) -> None:
        """Names the first step that was not finite, and what in it was not."""
        health = jax.device_get(self.trainer.state.health)
        if health.skipped <= self._noted:
            return
        cause = self.trainer._step.causes[int(health.cause)]
        message = f"step {int(health.step)} was not finite: {cause}"
        if self.trainer.on_nonfinite == "stop":
            saved = self.checkpoints.latest if self.checkpoints else None
            kept = f" The last checkpoint, of step {saved}, is good." if saved is not None else ""
            self._tell(message)
            raise NonFiniteError(
                f"{message}. Parameters are those before that step.{kept} Lower the learning rate "
                "or gamma, clip gradients, or skip such steps: on_nonfinite='skip', on the command "
                "line --on-nonfinite skip."
            )
        new = int(health.skipped) - self._noted
        self._noted = int(health.skipped)
        self._tell(f"{message}; skipped {new} steps since the last log")

    def _name_contradictions(self) -> None:
        """Once a run: that constraints contradict is a property of the problem."""
        if self._contradicted:
            return
        for sentence in contradictions(self.trainer.state.constraints):
            self._contradicted = True
            self._tell(sentence)

    def _evaluate(self, *, is_last: bool) -> bool:
        """Whether patience has run out."""
        trainer = self.trainer
        if trainer.evaluation is None or not (is_last or self._is_due(trainer.evaluate_every)):
            return False
        self.evaluated, self._evaluated_at = trainer.evaluate(limit=self.limit), self.step
        for listener in self.listeners:
            listener.on_evaluate(self.step, self.evaluated)
        monitor = trainer.monitor
        if monitor is None:
            return False
        value = self.evaluated[monitor.metric]
        if monitor.is_better(value, trainer._best):
            trainer._best, trainer._without_best = value, 0
            self._save(is_due=True)
            return False
        trainer._without_best += 1
        return monitor.patience is not None and trainer._without_best >= monitor.patience

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _save(self, *, is_due: bool) -> None:
        trainer = self.trainer
        if self.checkpoints is None or not (is_due or self._is_due(trainer.save_every)):
            return
        if self.step in self.checkpoints.steps:
            return
        self._check_health()
        about = {
            "config": trainer.config or {},
            "best": trainer._best,
            "without_best": trainer._without_best,
            "seconds": self.seconds,
            "devices": trainer.sharding.mesh.size,
            "processes": jax.process_count(),
        }
        checkpoints, metrics = self.checkpoints, {}
        if self._evaluated_at == self.step:
            metrics = self.evaluated
        # That the one before has failed is no reason not to try this one.
        self._guarded(checkpoints.wait)
        begun = self._guarded(
            lambda: checkpoints.save(self.step, trainer.state, about=about, metrics=metrics)
        )
        if begun:
            for listener in self.listeners:
                listener.on_save(self.step)

    def _guarded(self, save: Callable[[], None]) -> bool:
        """A save that fails is reported, and ends the run only if that was asked for."""
        try:
            save()
        except CheckpointError as error:
            self._tell(str(error))
            if self.trainer.on_save_error == "stop":
                raise
            return False
        return True
