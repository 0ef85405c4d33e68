"""Metrics on Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from constrainx.errors import MissingPackageError
from constrainx.runtime._callback import Callback


class WeightsAndBiases(Callback):
    """Sends metrics to Weights & Biases: ``pip install 'constrainx[wandb]'``."""

    def __init__(self, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise MissingPackageError(
                "`WeightsAndBiases` needs the package wandb: pip install 'constrainx[wandb]'."
            ) from error
        self._wandb, self._options = wandb, options
        self._run: Any = None

    def on_start(self, trainer: Any, step: int) -> None:
        """Starts or continues a run there."""
        config = dict(getattr(trainer, "config", None) or {})
        self._run = self._wandb.init(**{"config": config, "resume": "allow", **self._options})

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics under "train"."""
        self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics under "eval"."""
        self._run.log({f"eval/{name}": value for name, value in metrics.items()}, step=step)

    def on_end(self, step: int, reason: str) -> None:
        """Finishes the run there."""
        self._run.summary["reason"] = reason
        self._run.finish()
