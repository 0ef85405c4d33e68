"""`constrainx data bench`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from constrainx.cli._command import RecipeCommand
from constrainx.cli._console import print_line, print_table

if TYPE_CHECKING:
    from constrainx.recipes import Recipe

# With fewer batches, those that workers finish at the same time distort the rate.
FEW = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchData(RecipeCommand):
    """Read the training batches of a recipe without a model, and show where they wait.

    Attributes:
        seconds: how long to read: once as in training, and once more to time the stages.
    """

    seconds: float = 5.0

    def execute(self, recipe: Recipe) -> None:
        """Prints examples a second, and the time of each stage."""
        import jax

        from constrainx.data import measure_throughput
        from constrainx.recipes import build_trainer

        trainer = build_trainer(recipe, progress=False)
        data, sharding = trainer.data, trainer.sharding
        # Its parameters would take memory that batches may need.
        del trainer

        def place(batch: Any) -> None:
            jax.block_until_ready(jax.device_put(sharding.place_batch(batch)))

        found = measure_throughput(data, seconds=self.seconds, place=place)
        print_line(
            f"{recipe.name}, size {recipe.size}, batch {data.batch}: {found.rate:,.0f} examples a "
            f"second, read as in training ({found.batches} batches)."
        )
        total = sum(found.stages.values())
        rows = [*found.stages.items(), ("together", total)]
        print_table(
            [(stage, f"{1e6 * one:,.1f}", f"{one / total:.1%}") for stage, one in rows],
            headings=("stage", "µs an example", "share"),
            title="In one thread, without workers:",
        )
        if found.batches < FEW:
            print_line(f"Only {found.batches} batches: --seconds {6 * self.seconds:g} is surer.")
