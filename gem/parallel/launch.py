"""Start the ranks of a job and end them together: under torchrun, or as child processes of a test.

    python -m gem.parallel.launch --nproc-per-node 2 -m gem.parallel.train --variant full --data DIR --output DIR

takes torchrun's own options, starts the ranks through torchrun's agent and adds one line when the job is lost: which
rank ended, how, and where the last checkpoint lies. Plain `torchrun` starts the same job without that line. A rank
joins with `start()`, which reads what torchrun put into its environment; without torchrun it is a job of one rank.

No rank waits for ever: collectives have a timeout, and the first rank that ends otherwise than by returning takes the
others with it.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0  # of a collective: a step takes seconds, the slowest checkpoint minutes
GRACE_S = 1.0  # after a rank has failed, for what the others have to say
# NVLink multicast needs a fabric manager that shared hosts often withhold; with it off NCCL takes rings and trees.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
# Imported once by the process that the children of a test are forked from; seconds each otherwise.
PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "gem.train")


class RankError(RuntimeError):
    """A rank of a job raised, was killed or left. rank: which; the message names it and holds its traceback, if any."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Rank:
    """Who this process is: rank of world_size, place on its host, and the device that it computes on."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start(backend: str | None = None, timeout_s: float = TIMEOUT_S) -> Rank:
    """Join the job that torchrun describes in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*).

    backend: "nccl" (GPUs; gloo serves tensors on the CPU) or "gloo"; the default follows from whether there is a GPU.
    timeout_s: of every collective. ValueError for an unknown backend, a half-set environment, or too few GPUs.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in BACKENDS:
        raise ValueError(f"launch: backend {backend!r}; allowed: {', '.join(BACKENDS)}")
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in needed if name in os.environ]
    alone = not there
    if not alone and len(there) < len(needed):
        lost = ", ".join(name for name in needed if name not in there)
        raise ValueError(f"launch: {lost} is not set; allowed: {', '.join(needed)} as torchrun sets them, or none")
    rank, size, local = (0, 1, 0) if alone else (int(os.environ[name]) for name in needed[:3])
    device = torch.device("cpu")
    if backend == "nccl":
        for name, value in NO_MULTICAST.items():
            os.environ.setdefault(name, value)
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"launch: local rank {local} has no GPU, {torch.cuda.device_count()} are visible; allowed: at most one "
                "rank a GPU"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    options = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {"init_method": "env://"}
    dist.init_process_group(BACKENDS[backend], timeout=timedelta(seconds=timeout_s), **options)
    return Rank(rank, local, size, device)


def stop() -> None:
    """Leave the job. Every rank calls it when it is done; a rank that failed does not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def spawn(
    world_size: int, fn: Callable[..., Any], backend: str = "gloo", *, arguments: Sequence = (), timeout_s: float = 60.0
) -> list:
    """Run fn(rank: Rank, *arguments) in `world_size` processes of this host, joined as a job; results in rank order.

    For tests. fn must be importable by name, its result something that torch.save takes. On a CPU the processes are
    forked from one that has imported torch, so a world costs tenths of a second after the first. RankError names the
    rank that raised, was killed or left, also when others fail in its wake; TimeoutError names those that had not
    ended after `timeout_s`. No process outlives the call.
    """
    if world_size < 1:
        raise ValueError(f"launch: world_size is {world_size}; allowed: at least 1")
    if backend not in BACKENDS:
        raise ValueError(f"launch: backend {backend!r}; allowed: {', '.join(BACKENDS)}")
    context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload(list(PRELOADED))
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + timeout_s
    children, pipes = [], []
    packed = _pack(tuple(arguments))
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            job = (rank, world_size, store.port, backend, timeout_s, fn, packed, there)
            child = context.Process(target=_child, args=job, name=f"rank{rank}", daemon=True)
            child.start()
            there.close()
            children.append(child)
            pipes.append(here)
        return _collect(children, pipes, deadline, timeout_s)
    finally:
        for child in children:
            child.kill()
            child.join()


def _child(rank: int, size: int, port: int, backend: str, timeout_s: float, fn, packed: bytes, pipe) -> None:
    """Body of a spawned rank: join, run, send (True, result) or (False, time, text)."""
    faulthandler.dump_traceback_later(0.9 * timeout_s, exit=False)  # shows where a rank hangs
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    # the parent holds the store, as torchrun's agent does
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if backend == "gloo":
        torch.set_num_threads(1)
    try:
        payload = _pack(fn(start(backend, timeout_s), *_unpack(packed)))
    except BaseException as error:
        when = time.time()
        text = "".join(traceback.format_exception(error))
        pipe.send((False, when, f"{type(error).__name__}: {error}\n{text}"))
        os._exit(1)  # without waiting for peers that may never answer
    pipe.send((True, time.time(), payload))
    stop()


def _collect(children: list, pipes: list, deadline: float, timeout_s: float) -> list:
    answers: dict[int, tuple] = {}
    failed_at = None
    open_ranks = set(range(len(children)))
    while open_ranks:
        limit = deadline if failed_at is None else min(deadline, failed_at + GRACE_S)
        left = limit - time.monotonic()
        if left <= 0:
            break
        sources = {pipes[rank]: rank for rank in open_ranks}
        for source in wait(list(sources), left):
            rank = sources[source]
            try:
                answers[rank] = source.recv()
            except EOFError:
                pass  # ended without a word
            open_ranks.discard(rank)
            if rank not in answers or not answers[rank][0]:
                failed_at = failed_at or time.monotonic()
    size = len(children)
    silent = sorted(set(range(size)) - open_ranks - set(answers))
    if silent:  # killed ranks first: the others only report that they lost a peer
        children[silent[0]].join(GRACE_S)
        raise RankError(silent[0], f"rank {silent[0]} of {size} {ending(children[silent[0]].exitcode)}")
    errors = sorted((answer[1], rank) for rank, answer in answers.items() if not answer[0])
    if errors:
        rank = errors[0][1]
        raise RankError(rank, f"rank {rank} of {size}: {answers[rank][2]}")
    if open_ranks:
        names = ", ".join(map(str, sorted(open_ranks)))
        raise TimeoutError(f"launch: rank {names} of {size} had not ended after {timeout_s:g} s")
    return [_unpack(answers[rank][2]) for rank in range(size)]


def _pack(value) -> bytes:
    """Bytes by value: a tensor sent as such would be shared memory, which ends with its process."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(payload: bytes):
    return torch.load(io.BytesIO(payload), weights_only=False)


def ending(exit_code: int | None) -> str:
    """How a process ended, from its exit code: words for a message."""
    if exit_code is None:
        return "is still running"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"left with exit code {exit_code}"


def main(argv: Sequence[str] | None = None) -> int:
    """torchrun with a last line that names the lost rank and the last checkpoint. Exit code 1 when a rank failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from gem.parallel.checkpoint import describe_last

    options = run.parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = ending(failure.exitcode) if failure.exitcode else "failed"
        print(
            f"gem.parallel: rank {rank} {how} (process {failure.pid}); {describe_last(options.training_script_args)}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
