"""Samples of the elements of a tensor, the same ones every time, and how they come to the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.gradients.distributed.shards import local_part

Found = TypeVar("Found")

MOST: Final = 65_536
_NUMPY: Final = (torch.float32, torch.float64)
_PLAIN: Final = (Tensor, nn.Parameter)
_ALONE: Final = 4096
"""Vectors that numpy's BLAS multiplies in one thread: from 10,000 elements on it takes more."""


def small_array(tensor: Tensor, most: int = MOST) -> NDArray[Any] | None:
    """Return a view of an ordinary small tensor, whose numbers numpy has at a fraction of torch's cost per call."""
    if tensor.numel() > most or tensor.dtype not in _NUMPY or type(tensor) not in _PLAIN:
        return None
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_neg():
        return None
    found: NDArray[Any] = tensor.detach().numpy()
    return found


def read_together(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU, with one copy from each device, for which the processor waits once.

    What lies on the CPU is returned as it is.
    """
    found = list(tensors)
    for device in {tensor.device for tensor in found if not tensor.is_cpu}:
        there = [index for index, tensor in enumerate(found) if tensor.device == device]
        there.sort(key=lambda index: -found[index].element_size())  # so that each begins where its type may
        parts = [_as_bytes(found[index]) for index in there]
        copied = torch.split(torch.cat(parts).cpu(), [*map(len, parts)])
        for index, part in zip(there, copied, strict=True):
            found[index] = part.view(found[index].dtype).reshape(found[index].shape)
    return found


class Pending(Generic[Found]):
    """A result that follows from small tensors, once they are read."""

    def __init__(self, tensors: Sequence[Tensor], finish: Callable[..., Found]) -> None:
        self.tensors, self.finish = list(tensors), finish

    def value(self) -> Found:
        """Read the tensors and return the result."""
        return self.finish(*read_together(self.tensors))

    @classmethod
    def joined(cls, parts: Sequence[Pending[Any]], combine: Callable[..., Found]) -> Pending[Found]:
        """Return the result that follows from several others, whose tensors are read together."""

        def finish(*values: Tensor) -> Found:
            rest = iter(values)
            return combine(*[part.finish(*[next(rest) for _ in part.tensors]) for part in parts])

        return Pending([tensor for part in parts for tensor in part.tensors], finish)


class Reading:
    """Small tensors that wait to be read together, each with a function that takes their values.

    A function whose tensors lie on the CPU is called at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[list[Tensor], Callable[..., None]]] = []

    def add(self, tensors: Iterable[Tensor], take: Callable[..., None]) -> None:
        """Call a function with tensors on the CPU: now, or when they are read."""
        found = list(tensors)
        if all(tensor.is_cpu for tensor in found):
            take(*found)
        else:
            self._waiting.append((found, take))

    def read(self) -> None:
        """Read what waits, and call its functions in order."""
        waiting, self._waiting = self._waiting, []
        values = iter(read_together(tensor for tensors, _ in waiting for tensor in tensors))
        for tensors, take in waiting:
            take(*[next(values) for _ in tensors])


class HostCopies:
    """Copies of tensors on the CPU, all read together; any other tensor stands for itself."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._kept = [tensor for tensor in tensors if not tensor.is_cpu]  # so that no other tensor gets their ids
        self._found = dict(zip(map(id, self._kept), read_together(self._kept), strict=True))

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor."""
        return self._found.get(id(tensor), tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def dot(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the product of two vectors without the threads of numpy's BLAS, which would spin beside those of torch."""
    return float(first.dot(second) if len(first) <= _ALONE else np.einsum("i,i->", first, second))


def sampled(tensor: Tensor, most: int = MOST) -> Tensor:
    """Return at most so many elements that are held here, at equal distances; all of them where there are no more.

    They are not copied where that can be done without. The distance shares no factor with the size of the last
    dimension, so that no column is left out.
    """
    values = as_real(local_part(tensor))
    count = values.numel()
    if count <= most:
        return values.reshape(-1)
    stride = _stride(count, values.shape[-1], most)
    if values.is_contiguous():
        return values.view(-1)[::stride]
    return values.take(torch.arange(0, count, stride, device=values.device))


def places_of(chosen: Tensor, most: int, distance: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the places of some of the chosen elements of a vector, found without a read.

    These are the first of them and each one at a distance, which is a function of their number. Behind the last of them
    any place may follow.
    """
    ranks = chosen.cumsum(0)
    wanted = torch.arange(most, device=chosen.device) * distance(ranks[-1]) + 1
    return torch.searchsorted(ranks, wanted).clamp_max(len(chosen) - 1)


def weighed_sample(tensor: Tensor, most: int) -> Tensor:
    """Return such a sample in float64, as long as the whole: products of two of them estimate those of the tensors."""
    values = sampled(tensor, most).double()
    whole = as_real(local_part(tensor)).numel()
    return values * math.sqrt(whole / max(1, len(values)))


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor with the real and the imaginary part of complex numbers as its last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _stride(count: int, last: int, most: int) -> int:
    stride = math.ceil(count / most)
    while math.gcd(stride, last) != 1:
        stride += 1
    return stride
