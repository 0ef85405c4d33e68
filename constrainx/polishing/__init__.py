"""The end of a training: Gauss-Newton on the constraints alone."""

from constrainx.polishing._polish import polish as polish
from constrainx.polishing._polished import Polished as Polished
from constrainx.polishing._polished import PolishedConstraint as PolishedConstraint
from constrainx.polishing._search import Stride as Stride
