"""Modules built on least squares."""

from constrainx.layers._feasible import Feasibility as Feasibility
from constrainx.layers._feasible import Feasible as Feasible
from constrainx.layers._feasible import UnmetWarning as UnmetWarning
