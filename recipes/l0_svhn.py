"""A residual network that keeps a tenth of its weights, on the house numbers of SVHN.

    constrainx data prepare svhn_cropped
    constrainx compare l0-svhn --size cpu --seeds 3

The same as l0-cifar10 in all but the data, and in that digits are not mirrored.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from constrainx import data
from constrainx.recipes.l0_cifar10 import L0CIFAR10


@dataclasses.dataclass(frozen=True, kw_only=True)
class L0SVHN(L0CIFAR10):
    """SVHN on a tenth of the weights."""

    name: ClassVar[str] = "l0-svhn"

    images: str = "svhn_cropped"

    @property
    def flips(self) -> tuple[data.transforms.Transform, ...]:
        """None: a mirrored digit is another thing."""
        return ()

    @property
    def published(self) -> dict[str, dict[str, str]]:
        """The paper's figures for 90 % sparsity, after 300 epochs on ResNet-18."""
        return {
            "one-shot": {"error": "0.201 ± 0.027"},
            "paper": {"error": "0.085 ± 0.003"},
        }
