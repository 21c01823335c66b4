"""Buffers with guard rows on both sides, to see a store that leaves its tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def guarded(value: int, guard: int = 64) -> Iterator[list[torch.Tensor]]:
    """Within the block torch.empty gives views into larger buffers; leaving it asserts that their rims hold `value`.

    Yields the list of those buffers. guard: elements before and behind, a multiple of 8 so that rows stay aligned.
    """
    buffers, original = [], torch.empty

    def empty(*args, **kwargs):
        shape = args[0] if isinstance(args[0], tuple | list | torch.Size) else args
        size = int(torch.Size(shape).numel())
        flat = original(size + 2 * guard, **kwargs).fill_(value)
        buffers.append((flat, size))
        return flat[guard : guard + size].view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield buffers
    for flat, size in buffers:
        assert bool((flat[:guard] == value).all()) and bool((flat[guard + size :] == value).all())
