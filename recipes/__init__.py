"""One file an experiment, the base class that they share, and their comparison."""

from constrainx.recipes._comparison import Comparison as Comparison
from constrainx.recipes._comparison import ComparisonError as ComparisonError
from constrainx.recipes._comparison import Results as Results
from constrainx.recipes._comparison import write_result as write_result
from constrainx.recipes._recipe import SIZES as SIZES
from constrainx.recipes._recipe import Recipe as Recipe
from constrainx.recipes._recipe import RecipeError as RecipeError
from constrainx.recipes._recipe import all_recipes as all_recipes
from constrainx.recipes._recipe import find as find
from constrainx.recipes._recipe import steps_of as steps_of
from constrainx.recipes._recipe import summary as summary
from constrainx.recipes._recipe import weigh_method as weigh_method
