"""Flax NNX networks."""

from constrainx.models.mlp import MLP as MLP
