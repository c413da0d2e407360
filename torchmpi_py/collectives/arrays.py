"""numpy and cupy arrays in collectives: a tensor that shares the array's memory replaces the array during the call.

``torch.from_numpy`` converts numpy arrays, and DLPack converts cupy arrays. Neither copies the data. The caller gets an
array as the result. DLPack also orders streams. At the call, torch's current stream waits for the work in cupy's
stream. Afterwards, in the thread that waits for the result, cupy's stream waits for torch's stream. This module never
imports cupy, because a program that passes a cupy array has already imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from torchmpi_py.core.handles import Handle
from torchmpi_py.core.tensors import writes_into_x

NumpyArray = np.ndarray[Any, Any]


class ArrayCall:
    """The arguments of a call, with tensors in place of arrays; other arguments are unchanged."""

    def __init__(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.x = x = args[0] if args else kwargs.get("x")
        self._library = _library_of(x)
        self._arrays: list[tuple[Tensor, Any]] = []
        if self._library is None:
            return
        out = kwargs.get("out")
        self.x = self._tensor(verb, "x", x, out)
        if args:
            self.args = (self.x, *args[1:])
        else:
            self.kwargs = {**kwargs, "x": self.x}
        if out is not None:
            if _library_of(out) is not self._library:
                kind = f"{type(x).__module__}.{type(x).__name__}"
                raise TypeError(f"{verb}: x is a {kind}, so out must be a {kind}, not {type(out).__name__}")
            self.kwargs = {**self.kwargs, "out": self.x if out is x else self._tensor(verb, "out", out)}

    def _tensor(self, verb: str, name: str, array: Any, out: Any = None) -> Tensor:
        """Return a tensor on the memory of ``array``, the argument called ``name``; record the pair for ``result``."""
        tensor = from_dlpack(array) if self._library is not np else _on_numpy(verb, name, array, out)
        self._arrays.append((tensor, array))
        return tensor

    def result(self, result: Any) -> Any:
        """Convert the result of the collective: if it is a tensor, return an array.

        If the tensor was made for the argument ``x`` or ``out``, return this argument itself, else a new array.
        """
        if self._library is None:
            return result
        if not isinstance(result, Tensor):
            if self._library is not np:
                # There is nothing to convert, but ``from_dlpack`` also makes cupy's stream wait for torch's stream.
                self._library.from_dlpack(self._arrays[0][0])
            return result
        # Convert the tensor even if it belongs to an argument: ``from_dlpack`` also orders cupy's stream.
        new = result.numpy() if self._library is np else self._library.from_dlpack(result)
        for tensor, array in self._arrays:
            if tensor is result:
                return array
        return new

    def handle(self, handle: Handle[Any]) -> Handle[Any]:
        """Make the waits on ``handle`` return arrays (see ``result``), and return ``handle``."""
        if self._library is not None:
            handle.to_array = self.result
        return handle


def _library_of(x: object) -> Any:
    """Return the module numpy or cupy if ``x`` is one of its arrays, else None."""
    if isinstance(x, np.ndarray):
        return np
    cupy: Any = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else None


def _on_numpy(verb: str, name: str, array: NumpyArray, out: object) -> Tensor:
    """Return a tensor on the memory of ``array``, or on the memory of a copy if the array is read-only.

    Raise ValueError if the collective would write to a read-only array. Raise TypeError for masked arrays, dtypes that
    torch does not have, byte orders that differ from this machine's, and negative strides.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{verb}: {name} is a masked array; pass {name}.data and {name}.mask in two separate calls")
    if not array.flags.writeable:
        if name == "out" or writes_into_x(verb, out):
            raise ValueError(f"{verb}: {name} is a read-only numpy array, but {verb} writes to it; pass {name}.copy()")
        array = array.copy()  # torch would warn about a tensor on read-only memory.
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        remedy = f"{name}.astype(...)" if isinstance(error, TypeError) else f"np.ascontiguousarray({name})"
        if not array.dtype.isnative:
            remedy = f'{name}.astype({name}.dtype.newbyteorder("="))'
        raise TypeError(
            f"{verb}: {name} is a numpy array of {array.dtype} with strides {array.strides}, which torch "
            f"cannot use as a tensor: {str(error).rstrip('.')}. Pass {remedy}"
        ) from None
