"""Runs that are killed at random moments and resumed, against one that is left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from constrainx.errors import UserError
from constrainx.recipes._build import build_trainer
from constrainx.recipes._recipe import Recipe
from constrainx.runtime import parse_resume, prepare_run_folder

# A child that has not ended after so long hangs.
PATIENCE_SECONDS = 600
# Once a step is reached, how long at most until the signal.
DELAY_SECONDS = 0.05
# How often a child is killed before its first step.
EARLY = 0.2


class SoakError(UserError, RuntimeError):
    """A run failed by itself, so that there is nothing to compare."""


class Place(NamedTuple):
    """Where a run trains: simulated CPU devices in each of some processes."""

    processes: int
    devices: int


# Each start takes the next place of its layout, and after the last the first again.
LAYOUTS = {
    "same device": (Place(1, 1),),
    "1 and 2 devices": (Place(1, 1), Place(1, 2)),
    "1 and 2 processes": (Place(1, 2), Place(2, 1)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endured:
    """How a run that was killed compares with one that was not.

    Attributes:
        layout: where it was resumed, a key of `LAYOUTS`.
        kills: how often it was killed.
        in_saves: how many of these fell into the writing of a checkpoint.
        lost: the largest number of steps that were on disk at a kill, and not resumed from.
        repeated: the largest number of steps that were taken again, since they were not saved yet.
        difference: the largest difference of a parameter at the end, from a run that was left alone
            on the devices that this one started on.
        undisturbed: the same difference between runs that were left alone, each on the devices of
            one place of the layout: what the other order of sums does by itself.
        steps: of the whole run.
    """

    layout: str
    kills: int
    in_saves: int
    lost: int
    repeated: int
    difference: float
    undisturbed: float
    steps: int


def soak(
    recipe: Recipe,
    *,
    kills: int,
    folder: pathlib.Path,
    chance: int = 0,
    layouts: Sequence[str] = (),
) -> Iterator[Endured]:
    """Trains a recipe without a disturbance, and for each layout with SIGKILLs.

    Every process is one of its own, started by ``constrainx resume``. Most kills wait for a random
    step and a random fraction of 50 ms more; one in five comes before the first step. A killed run
    is compared with one that was left alone where the killed one began.

    Args:
        recipe: what to train; it should save every few steps.
        kills: how often each run is killed.
        folder: for the runs; must not exist.
        chance: the seed of the random moments.
        layouts: which of `LAYOUTS`; all if empty.

    Yields:
        A comparison for each layout.
    """
    recipe = recipe.but(log_every=1, devices=1, fsdp=1)
    file = recipe.config["recipe"] if recipe.config["recipe"].endswith(".py") else None
    straight: dict[Place, _Straight] = {}
    for index, layout in enumerate(layouts or LAYOUTS):
        for place in LAYOUTS[layout]:
            # As many devices in one process do the same arithmetic.
            alone = Place(1, place.processes * place.devices)
            if alone not in straight:
                run = folder / f"straight-on-{alone.devices}"
                straight[alone] = _train_straight(recipe, run, alone, file)
        wanted, *others = (
            straight[Place(1, place.processes * place.devices)] for place in LAYOUTS[layout]
        )
        run = _prepare(folder / f"killed-{index}", recipe)
        found = _endure(run, layout, kills, wanted, random.Random(f"{chance} {layout}"), file)
        parameters, _ = _read_parameters(recipe, run)
        yield dataclasses.replace(
            found,
            difference=_compare(parameters, wanted.parameters),
            undisturbed=max(
                (_compare(other.parameters, wanted.parameters) for other in others), default=0.0
            ),
        )


class _Straight(NamedTuple):
    """A run that was left alone."""

    parameters: list[np.ndarray]
    steps: int
    until_first_step: float


def _train_straight(
    recipe: Recipe, folder: pathlib.Path, place: Place, file: str | None
) -> _Straight:
    run = _prepare(folder, recipe)
    began = time.monotonic()
    with _start(run, place, file) as children:
        _wait_for_step(run, children, 1)
        until_first_step = time.monotonic() - began
        _wait_for_end(run, children)
    return _Straight(*_read_parameters(recipe, run), until_first_step)


def _compare(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    pairs = zip(some, others, strict=True)
    return max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs)


def _endure(
    run: pathlib.Path,
    layout: str,
    kills: int,
    straight: _Straight,
    rng: random.Random,
    file: str | None,
) -> Endured:
    steps = straight.steps
    lost = repeated = in_saves = done = 0
    saved, starts = 0, 0
    while done < kills:
        before = len(_read_resumes(run))
        place = LAYOUTS[layout][starts % len(LAYOUTS[layout])]
        starts += 1
        with _start(run, place, file) as children:
            if rng.random() < EARLY:
                # The first start may have compiled what later ones only read.
                _wait_for_next_step(run, children, rng.uniform(0, straight.until_first_step))
            else:
                # Not too far, so that some of the run is left for the other kills.
                reach = 2 * (steps - saved) // (kills - done + 1)
                target = saved + rng.randint(1, max(reach, 1))
                _wait_for_step(run, children, target)
                time.sleep(rng.uniform(0, DELAY_SECONDS))
            rng.shuffle(children)
            is_over = all(child.poll() == 0 for child in children)
            for child in children:
                _kill(child)
        lost = max([lost, *(saved - step for step in _read_resumes(run)[before:])])
        if is_over:
            break
        done += 1
        in_saves += any(run.glob("checkpoints/*.orbax-checkpoint-tmp*"))
        saved = _find_saved(run)
        repeated = max(repeated, _read_step(run) - saved)
    before = len(_read_resumes(run))
    with _start(run, LAYOUTS[layout][starts % len(LAYOUTS[layout])], file) as children:
        _wait_for_end(run, children)
    lost = max([lost, *(saved - step for step in _read_resumes(run)[before:])])
    return Endured(
        layout=layout,
        kills=done,
        in_saves=in_saves,
        lost=lost,
        repeated=repeated,
        difference=np.nan,
        undisturbed=np.nan,
        steps=steps,
    )


def _prepare(run: pathlib.Path, recipe: Recipe) -> pathlib.Path:
    """A run's folder with nothing but its settings, which `constrainx resume` starts from."""
    run.mkdir(parents=True)
    prepare_run_folder(run, recipe.config)
    return run.absolute()


@contextlib.contextmanager
def _start(
    run: pathlib.Path, place: Place, file: str | None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of one start, each in a group of its own; none of them outlives the block."""
    flag = "--xla_force_host_platform_device_count="
    flags = re.sub(rf"{flag}\d+", "", os.environ.get("XLA_FLAGS", "")) + f" {flag}{place.devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    total = place.processes * place.devices
    command = [sys.executable, "-m", "constrainx", "resume", str(run), "--devices", str(total)]
    command += [] if file is None else ["--recipe", file]
    address = f"localhost:{_find_port()}"
    children = []
    try:
        with open(run / "output.txt", "ab") as output:
            for index in range(place.processes):
                joined = ["--distributed", f"{address},{place.processes},{index}"]
                children.append(
                    subprocess.Popen(
                        [*command, *(joined if place.processes > 1 else [])],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        yield children
    finally:
        for child in children:
            _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a child that has not ended, and those that it has started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _wait_for_step(
    run: pathlib.Path, children: Sequence[subprocess.Popen[bytes]], step: int
) -> None:
    """Waits until a step is logged, or the children have ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _read_step(run) < step and any(child.poll() is None for child in children):
        _check(run, children, deadline)
        time.sleep(0.002)
    _check(run, children, deadline)


def _wait_for_next_step(
    run: pathlib.Path, children: Sequence[subprocess.Popen[bytes]], seconds: float
) -> None:
    """Waits for some time, but not beyond the first step that these children log."""
    deadline = time.monotonic() + seconds
    before = _read_step(run)
    while _read_step(run) == before and time.monotonic() < deadline:
        _check(run, children, math.inf)
        time.sleep(0.002)


def _wait_for_end(run: pathlib.Path, children: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(child.poll() is None for child in children):
        _check(run, children, deadline)
        time.sleep(0.05)
    _check(run, children, deadline)


def _check(run: pathlib.Path, children: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    failed = [child for child in children if child.poll() not in (None, 0)]
    if failed:
        raise SoakError(
            f"{run} failed by itself, with exit code {failed[0].returncode}: see {run}/output.txt."
        )
    if time.monotonic() > deadline:
        raise SoakError(f"{run} hangs: see {run}/output.txt.")


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _read_lines(run: pathlib.Path, *, last: int | None = None) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics, or those in its last bytes."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0 if last is None else max(size - last, 0))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def _read_step(run: pathlib.Path) -> int:
    """The newest step in the metrics; zero before the first."""
    steps = [line["step"] for line in _read_lines(run, last=2**14) if line["kind"] == "train"]
    return steps[-1] if steps else 0


def _read_resumes(run: pathlib.Path) -> list[int]:
    """The steps from which the run was resumed, in order."""
    found = [parse_resume(str(line.get("message"))) for line in _read_lines(run)]
    return [step for step in found if step is not None]


def _find_saved(run: pathlib.Path) -> int:
    """The newest checkpoint that was complete; zero if there is none."""
    names = [path.name for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    return max(map(int, names), default=0)


def _read_parameters(recipe: Recipe, run: pathlib.Path) -> tuple[list[np.ndarray], int]:
    trainer = build_trainer(recipe, run=run, progress=False)
    step = trainer.restore()
    leaves = jax.tree.leaves(trainer.state.parameters)
    return [np.asarray(leaf, np.float64) for leaf in leaves], step
