"""Weights as PyTorch libraries publish them: read without PyTorch, and written back.

`load_weights` takes a ``.safetensors`` or ``.pth`` file in the names of torchvision, timm or
transformers, and `save_weights` writes such a file. Both know `ResNet` and `Swin`.
"""

from constrainx.models.published._names import Layout as Layout
from constrainx.models.published._names import Name as Name
from constrainx.models.published._names import names_of as names_of
from constrainx.models.published._pickled import read_pickled as read_pickled
from constrainx.models.published._weights import load_weights as load_weights
from constrainx.models.published._weights import name_arrays as name_arrays
from constrainx.models.published._weights import save_weights as save_weights
