"""Flax NNX networks."""

from constrainx.models.lenet import LeNet as LeNet
from constrainx.models.mlp import MLP as MLP
from constrainx.models.score import ScoreNetwork as ScoreNetwork
