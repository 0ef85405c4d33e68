"""Reading the arrays of a ``.pth`` file without PyTorch, and without running what is in it.

Such a file is a pickle, and a pickle may call any function. Only the few that rebuild a tensor are
admitted here, by name, and each is replaced by ours; anything else is refused before it runs.
"""

from __future__ import annotations

import collections
import io
import math
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from constrainx.errors import UserError

# The classes that a storage may have, and the dtype that each stands for.
_DTYPES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
# How files from before PyTorch 1.6 begin.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_LARGEST = 2**40


class WeightsFileError(UserError, ValueError):
    """A file with weights cannot be read, or does not fit the model."""


class _Storage(NamedTuple):
    """A run of numbers in the file, which tensors look into."""

    key: str
    dtype: Any
    length: int


class _Tensor(NamedTuple):
    """Which numbers of a storage make a tensor."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickled(path: pathlib.Path | str) -> dict[str, np.ndarray]:
    """The tensors of a ``.pth`` file by name.

    Nested dictionaries, such as ``{"model": {...}, "epoch": 3}``, are read as names joined by dots;
    entries that are not tensors are left out.

    Raises:
        WeightsFileError: it is not such a file, or holds anything but tensors and plain values.
    """
    path = pathlib.Path(path)
    try:
        found, read = _read_zip(path) if zipfile.is_zipfile(path) else _read_old(path)
        return {name: _take(tensor, read) for name, tensor in _name_tensors(found).items()}
    except WeightsFileError:
        raise
    except FileNotFoundError:
        raise WeightsFileError(f"there is no file {path}.") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise WeightsFileError(
            f"{path} is not a complete file of PyTorch weights: {type(error).__name__}: {error}."
        ) from error


def _read_zip(path: pathlib.Path) -> tuple[Any, Callable[[_Storage], bytes]]:
    """The format since PyTorch 1.6: a zip archive of a pickle and one file for each storage."""
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise WeightsFileError(f"{path} is a zip archive, but not one that PyTorch wrote.")
    folder = names[0].removesuffix("/data.pkl")
    if (
        f"{folder}/byteorder" in archive.namelist()
        and archive.read(f"{folder}/byteorder") == b"big"
    ):
        raise WeightsFileError(f"{path} was written on a big-endian machine, which is not read.")
    found = _Unpickler(io.BytesIO(archive.read(names[0])), path).load()
    return found, lambda storage: archive.read(f"{folder}/data/{storage.key}")


def _read_old(path: pathlib.Path) -> tuple[Any, Callable[[_Storage], bytes]]:
    """The format before: pickles one after the other, then the storages."""
    with path.open("rb") as file:
        if _Unpickler(file, path).load() != _OLD_MAGIC:
            raise WeightsFileError(f"{path} is not a file of PyTorch weights.")
        _Unpickler(file, path).load()  # the version of the protocol
        _Unpickler(file, path).load()  # sizes of integers on the machine that wrote it
        unpickler = _Unpickler(file, path)
        found = unpickler.load()
        stored: dict[str, bytes] = {}
        for key in _Unpickler(file, path).load():
            storage = unpickler.storages[key]
            count = int.from_bytes(file.read(8), "little")
            stored[key] = file.read(count * np.dtype(storage.dtype).itemsize)
    return found, lambda storage: stored[storage.key]


class _Unpickler(pickle.Unpickler):
    """Admits what rebuilds a tensor, and nothing else."""

    def __init__(self, file: Any, path: pathlib.Path):
        super().__init__(file)
        self.path = path
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        admitted = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        }
        if (module, name) not in admitted:
            raise WeightsFileError(
                f"{self.path} would call {module}.{name}, which is not a tensor, and is not read. "
                "Save a state dictionary alone, or convert the file to .safetensors."
            )
        return admitted[module, name]

    def persistent_load(self, identity: Any) -> _Storage:
        kind, dtype, key, _, count, *_ = identity
        if kind != "storage" or not isinstance(key, str):
            raise WeightsFileError(f"{self.path} refers to {kind!r}, which is not a tensor.")
        return self.storages.setdefault(key, _Storage(key, dtype, int(count)))


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


def _name_tensors(found: Any, prefix: str = "") -> dict[str, _Tensor]:
    if isinstance(found, _Tensor):
        return {prefix or "tensor": found}
    if not isinstance(found, Mapping):
        return {}
    return {
        path: tensor
        for name, value in found.items()
        for path, tensor in _name_tensors(value, f"{prefix}.{name}" if prefix else name).items()
    }


def _take(tensor: _Tensor, read: Callable[[_Storage], bytes]) -> np.ndarray:
    storage, offset, shape, strides = tensor
    numbers = np.frombuffer(read(storage), storage.dtype)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    is_inside = offset >= 0 and min(strides, default=0) >= 0 and math.prod(shape) <= _LARGEST
    if math.prod(shape) and not (is_inside and last < numbers.size):
        raise ValueError("a tensor reaches beyond the numbers that are there")
    view = np.lib.stride_tricks.as_strided(
        numbers[offset:], shape, [stride * numbers.itemsize for stride in strides]
    )
    return view.copy()
