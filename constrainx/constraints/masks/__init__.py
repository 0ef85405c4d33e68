"""Learnable Bernoulli masks on the weights of any NNX model.

Each masked weight w has a probability p of its own, and the network computes with

    w · m,    m ~ Bernoulli(p),    and for the gradient ∂m/∂p := 1

(the straight-through estimator), so that for a loss L of v = w·m the gradients are ∂L/∂w = m ∂L/∂v
and ∂L/∂p = w ∂L/∂v. The probabilities are parameters like any other, stored beside the weights.
They are stored as they are, not as logits, so that the density mean(p) is linear in the parameters.
An optimizer may carry them out of [0, 1], where they act as the nearest end of the interval, and
the straight-through gradient can bring them back.
"""

from constrainx.constraints.masks._add import add_masks as add_masks
from constrainx.constraints.masks._add import kernels as kernels
from constrainx.constraints.masks._density import expected_density as expected_density
from constrainx.constraints.masks._density import realised_density as realised_density
from constrainx.constraints.masks._export import deterministic as deterministic
from constrainx.constraints.masks._export import export as export
from constrainx.constraints.masks._follow import Rule as Rule
from constrainx.constraints.masks._follow import RuleState as RuleState
from constrainx.constraints.masks._follow import follow_rule as follow_rule
from constrainx.constraints.masks._optimizer import with_mask_rate as with_mask_rate
from constrainx.constraints.masks._pattern import Pattern as Pattern
from constrainx.constraints.masks._pattern import parse_pattern as parse_pattern
from constrainx.constraints.masks._pattern import split_groups as split_groups
from constrainx.constraints.masks._phases import Phases as Phases
from constrainx.constraints.masks._probability import Masked as Masked
from constrainx.constraints.masks._probability import MaskProbability as MaskProbability
from constrainx.constraints.masks._probability import find_probabilities as find_probabilities
from constrainx.constraints.masks._probability import has_masks as has_masks
from constrainx.constraints.masks._probability import probabilities as probabilities
from constrainx.constraints.masks._rules import Learned as Learned
from constrainx.constraints.masks._rules import Magnitude as Magnitude
from constrainx.constraints.masks._rules import Memory as Memory
from constrainx.constraints.masks._rules import Seen as Seen
from constrainx.constraints.masks._sample import sample as sample
from constrainx.constraints.masks._straight_through import straight_through as straight_through
from constrainx.constraints.masks._top import top as top
