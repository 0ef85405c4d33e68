"""Flax NNX networks."""

from constrainx.models._fourier import FourierProcess as FourierProcess
from constrainx.models._lenet import LeNet as LeNet
from constrainx.models._mlp import MLP as MLP
from constrainx.models._resnet import ResNet as ResNet
from constrainx.models._score import ScoreNetwork as ScoreNetwork
from constrainx.models._swin import Swin as Swin
