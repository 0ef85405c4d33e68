"""Neural networks for the recipes."""

from constrainx.models.lenet import LeNet as LeNet
from constrainx.models.mlp import MLP as MLP
