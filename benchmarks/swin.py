"""What masks and their budget add to a step of Swin-S: time, compilation, state."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.report import Goal, Report, Table
from constrainx.recipes.l0_imagenet import L0ImageNet

# Short phases, so that few steps lead to the one in which probabilities are learned.
PHASES = {"steps": 100, "begin": 0.01, "freeze": 0.9}
GOALS = {"learned": 1.3, "bernoulli": 1.45}


def run(*, quick: bool) -> Report:
    """Times the trainer's own step, the contestants in turns, best of several."""
    small = {"width": 16, "depths": (2, 2), "heads": (1, 2), "image": 56} if quick else {}
    rounds = 1 if quick else 4
    steps = {name: _Step(name, small) for name in ("dense", "learned", "bernoulli", "gradual")}
    for _ in range(rounds):
        for step in steps.values():
            step.take()
    plain = steps["dense"]
    rows = [
        (
            name,
            step.seconds,
            step.seconds / plain.seconds,
            step.compiled,
            step.compiled / plain.compiled,
            step.state / 1e6,
        )
        for name, step in steps.items()
    ]
    goals = [
        Goal(
            f"{name}: at most {most} dense steps",
            f"{steps[name].seconds / plain.seconds:.2f}",
            steps[name].seconds <= most * plain.seconds,
        )
        for name, most in GOALS.items()
    ]
    learned = steps["learned"]
    compiled, state = learned.compiled / plain.compiled, learned.state / plain.state
    goals += [
        Goal("compilation at most 1.5 of the dense one", f"{compiled:.2f}", compiled <= 1.5),
        Goal("state at most twice the dense one", f"{state:.2f}", state <= 2.01),
    ]
    columns = {"method": "", "step, s": ".2f", "ratio": ".2f", "compile, s": ".0f"}
    return Report(
        name="swin",
        setting=f"l0-imagenet on synthetic images, batch 2, bfloat16, SGD, best of {rounds} steps "
        "in turns, while probabilities are learned.",
        tables=[
            Table("Swin-S", {**columns, "compile ratio": ".2f", "state, MB": ".0f"}, rows),
        ],
        goals=goals,
    )


class _Step:
    """One trainer's compiled step, and the best of its times."""

    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        recipe = L0ImageNet(
            data="synthetic", batch=2, method=method, devices=1, **PHASES, **settings
        )
        trainer = recipe.trainer(progress=False)
        lowered = trainer.lower()
        begin = time.perf_counter()
        self._step = lowered.compile()
        self.compiled = time.perf_counter() - begin
        self.state = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
        self._batch = trainer.sharding.place_batch(next(trainer.data.from_step(0)))
        (_, totals, _), _ = lowered.args_info
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), totals)
        self._carry: Any = (trainer.state, jax.device_put(zeros, trainer.sharding.whole))
        self.seconds = float("inf")
        for _ in range(2):
            self.take()
        self.seconds = float("inf")

    def take(self) -> None:
        """One step."""
        begin = time.perf_counter()
        *self._carry, _ = jax.block_until_ready(self._step(*self._carry, self._batch))
        self.seconds = min(self.seconds, time.perf_counter() - begin)
