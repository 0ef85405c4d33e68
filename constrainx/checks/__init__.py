"""Checks of a model's constraints: how well they hold on held-out data."""

from constrainx.checks._bounds import bound_mean as bound_mean
from constrainx.checks._bounds import bound_share as bound_share
from constrainx.checks._certify import Certificate as Certificate
from constrainx.checks._certify import Certified as Certified
from constrainx.checks._certify import certify as certify
