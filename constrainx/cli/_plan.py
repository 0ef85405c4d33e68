"""`constrainx plan`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from constrainx.cli._command import RecipeCommand
from constrainx.cli._console import print_line, print_table

if TYPE_CHECKING:
    from constrainx.recipes import Recipe

TargetName: TypeAlias = Literal["cpu", "a100", "h100", "h200", "b200"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(RecipeCommand):
    """Compile the step of a recipe for devices that need not be there, and show what it costs.

    Attributes:
        target: the kind of device; "cpu" simulates devices and needs nothing installed.
        devices: how many.
        mesh: how they are arranged, such as data=4,fsdp=2; by data alone if left out.
        batch: the size of the global batch; that of the recipe if left out.
        largest_batch: whether to find the largest batch that fits, which compiles the step a few
            times more.
        iterations: what to assume for loops whose length depends on the data, such as LSMR's.
        json: whether to print all figures as JSON.
    """

    without: ClassVar = ("devices", "fsdp", "batch")

    target: TargetName = "h100"
    devices: int = 8
    mesh: str | None = None
    batch: int | None = None
    largest_batch: bool = False
    iterations: int = 10
    json: bool = False

    def execute(self, recipe: Recipe) -> None:
        """Compiles it, and prints the plan."""
        from constrainx.plan import TARGETS, as_json, describe, make_mesh, make_plan, parse_mesh
        from constrainx.recipes import build_abstract

        target = TARGETS[self.target]
        mesh = make_mesh(target, parse_mesh(self.mesh, devices=self.devices))
        plan = make_plan(
            build_abstract(recipe, mesh),
            target,
            batch=self.batch,
            iterations=self.iterations,
            largest_batch=self.largest_batch,
        )
        if self.json:
            found = {"recipe": recipe.name, "method": recipe.method, **as_json(plan)}
            print_line(json.dumps(found))
        else:
            print_table(describe(plan), title=f"{recipe.name} {recipe.method}")
