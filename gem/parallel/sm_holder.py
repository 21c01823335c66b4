"""A kernel that holds a number of multiprocessors until it is told to let go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

WARPS = 32  # 1,024 threads: with their registers no block of a large GEMM, which takes nearly all of them, fits beside
POLL_NS = 2000  # between two looks at the flag: polling without a pause would load the memory that GEMMs use
START_S = 2.0


@triton.jit
def _hold(flag, places, limit_ns, POLL: tl.constexpr):
    """One block an SM: says where it runs, then waits for the flag, or for limit_ns."""
    tl.store(places + tl.program_id(0), smid() + 1)
    start = globaltimer()
    now = start
    free = tl.load(flag, volatile=True)
    while (free == 0) & (now - start < limit_ns):
        until = now + POLL
        while now < until:
            now = globaltimer()
        free = tl.load(flag, volatile=True)


@contextlib.contextmanager
def hold(sms: int, limit_s: float) -> Iterator[list[int]]:
    """Holds `sms` multiprocessors of the current device, at most `limit_s` seconds; gives their numbers.

    The device must be idle when it starts, so that every block gets a multiprocessor of its own; that it did is
    checked (RuntimeError). Work of the current stream that is queued within the block has run when it is left.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    places = torch.zeros(sms, dtype=torch.int32, device=device)
    side, watch = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(side):
            _hold[(sms,)](flag, places, int(limit_s * 1e9), POLL_NS, num_warps=WARPS)
        taken = _wait_for(places, watch)
        if len(set(taken)) < sms:
            raise RuntimeError(f"hold: {len(set(taken))} of {sms} multiprocessors; allowed: an idle device")
        yield taken
        torch.cuda.current_stream().synchronize()
    finally:
        with torch.cuda.stream(watch):
            flag.fill_(1)
        torch.cuda.synchronize()


def _wait_for(places: torch.Tensor, stream: torch.cuda.Stream) -> list[int]:
    """Numbers of the multiprocessors once every block runs; what is known after START_S."""
    end = time.monotonic() + START_S
    with torch.cuda.stream(stream):
        while True:
            found = [place - 1 for place in places.tolist() if place]
            if len(found) == len(places) or time.monotonic() > end:
                return found
