"""Names for the axes of a parameter, by which it can be split over devices."""

from __future__ import annotations

from typing import Any


def name_axes(*axes: str | None) -> dict[str, Any]:
    """Metadata of a parameter: a logical name for each of its axes, or None.

    They do nothing by themselves. `nnx.get_partition_spec` reads them, and
    ``nnx.logical_axis_rules([("out", "fsdp")])`` says which axis of a mesh each stands for.

    >>> from flax import nnx
    >>> layer = nnx.Linear(4, 8, kernel_metadata=name_axes("in", "out"), rngs=nnx.Rngs(0))
    >>> with nnx.logical_axis_rules([("in", None), ("out", "fsdp")]):
    ...     print(nnx.get_partition_spec(nnx.state(layer))["kernel"].get_value())
    P(None, 'fsdp')
    """
    # NNX would otherwise split the parameter as it is created, and fail where there is no mesh.
    return {"out_sharding": axes, "eager_sharding": False}
