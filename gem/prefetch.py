"""Batches made and copied to a GPU while earlier ones train.

Who makes them matters: a step is a few thousand calls from Python, and whatever else runs Python in the same process
takes the interpreter between them. Measured on an H200 (preset base, batch 1,024): to queue a step took the host 91 ms
with one batch again and again, 123 ms with a new one each time from a thread beside it; how much of the difference is
the thread, and how much what a new batch needs anyway, was not told apart. So a process of its own makes them, one
PyTorch DataLoader worker, and hands each over as a single tensor; here they are only pinned, copied and taken apart.
"""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem.dataset import Batch

SHARED = Path("/dev/shm")  # where a worker's tensors lie
ROOM = 2**30  # bytes there that a worker may need; a container often has 64 MiB
ALIGN = 256


def prefetch(batches: Iterator[Batch], device: torch.device, depth: int = 2) -> Iterator[Batch]:
    """Batches on `device`, made while earlier ones train. On a CPU they are made in turn.

    For a GPU a batch goes through page-locked memory and a stream of its own, so that neither making nor copying it
    delays the step before; the stream that trains waits for the copy, the host does not. depth: batches made ahead. A
    process makes them where one can be had: not from a daemonic process, and with too little shared memory (said once)
    a thread does. What fails while a batch is made is raised where the batch was wanted.
    """
    if device.type == "cpu":
        yield from batches
    elif device.type != "cuda" or multiprocessing.current_process().daemon or not _has_room():
        yield from from_thread(batches, device, depth)
    else:
        yield from from_process(batches, device, depth)


_SAID: set[str] = set()


def _has_room() -> bool:
    free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0
    if free < ROOM and not _SAID:
        _SAID.add("room")
        print(
            f"prefetch: {SHARED} has {free / 2**20:.0f} MiB left, {ROOM / 2**20:.0f} are wanted (docker: --shm-size "
            "2g); a thread makes the batches, which can slow the steps of a fast GPU",
            file=sys.stderr,
        )
    return free >= ROOM


# A batch as one tensor


@dataclass
class Parcel:
    """A batch in one buffer. parts: (field, key, dtype, shape, first byte, bytes); plain: what is no tensor."""

    data: torch.Tensor
    parts: list[tuple]
    plain: dict

    def pin_memory(self) -> Parcel:
        """Called by the DataLoader."""
        return Parcel(self.data.pin_memory(), self.parts, self.plain)


def pack(batch: Batch) -> Parcel:
    """All tensors of a batch in one buffer of bytes."""
    found, plain = [], {}
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if isinstance(value, KeyedJaggedTensor):
            plain[field.name] = (value.keys(), value.length_per_key())
            found += [(field.name, "values", value.values()), (field.name, "lengths", value.lengths())]
        elif isinstance(value, torch.Tensor):
            found.append((field.name, None, value))
        elif isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values()):
            found += [(field.name, key, item) for key, item in value.items()]
        else:
            plain[field.name] = value
    parts, end = [], 0
    for name, key, item in found:
        size = item.numel() * item.element_size()
        parts.append((name, key, item.dtype, tuple(item.shape), end, size))
        end += -(-size // ALIGN) * ALIGN
    data = torch.empty(max(end, 1), dtype=torch.uint8)
    for (*_, first, size), (_, _, item) in zip(parts, found, strict=True):
        if size:
            data[first : first + size] = item.contiguous().view(-1).view(torch.uint8)
    return Parcel(data, parts, plain)


def unpack(parcel: Parcel) -> Batch:
    """The batch of a parcel, on views of its buffer. `lengths` are kept for long, so they are copies."""
    values: dict = {}
    for name, key, dtype, shape, first, size in parcel.parts:
        item = parcel.data[first : first + size].view(dtype).view(shape)
        if key is None:
            values[name] = item
        else:
            values.setdefault(name, {})[key] = item.clone() if name == "lengths" else item
    for name, value in parcel.plain.items():
        if name in values:  # a KJT
            keys, per_key = value
            values[name] = KeyedJaggedTensor(keys=keys, **values[name], length_per_key=per_key)
        else:
            values[name] = value
    return Batch(**values)


class _Parcels(IterableDataset):
    """What the worker runs."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches = batches

    def __iter__(self) -> Iterator[Parcel]:
        return map(pack, self.batches)


def from_process(batches: Iterator[Batch], device: torch.device, depth: int) -> Iterator[Batch]:
    """`prefetch` by a process, which inherits `batches`: nothing is pickled on the way there."""
    loader = DataLoader(
        _Parcels(batches), batch_size=None, num_workers=1, prefetch_factor=depth, pin_memory=device.type == "cuda",
        multiprocessing_context="fork",
    )  # fmt: skip
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    with warnings.catch_warnings():  # Python warns of forks beside threads; the worker touches none of their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        parcels = iter(loader)
    sent: deque = deque()
    try:
        while (parcel := next(parcels, None)) is not None:
            sent.append(_send(unpack(parcel), device, copies))
            if len(sent) > 1:
                yield _receive(*sent.popleft(), device)
        while sent:
            yield _receive(*sent.popleft(), device)
    finally:
        del parcels  # nobody else knows it, so the worker ends here


def from_thread(batches: Iterator[Batch], device: torch.device, depth: int) -> Iterator[Batch]:
    """`prefetch` by a thread."""
    ready: queue.Queue = queue.Queue(maxsize=depth)
    # The thread that queues the step must not wait for Python's usual 5 ms whenever this one holds the interpreter.
    patience = sys.getswitchinterval()
    sys.setswitchinterval(min(patience, 2e-4))
    stop = threading.Event()
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(item) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work():
        try:
            for batch in batches:
                if not put(_send(batch if copies is None else batch.pin_memory(), device, copies)):
                    return
            put(None)
        except Exception as error:  # raised again where the batch was wanted
            put(error)

    thread = threading.Thread(target=work, daemon=True, name="prefetch")
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield _receive(*item, device)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(patience)


def _send(batch: Batch, device: torch.device, copies) -> tuple[Batch, torch.cuda.Event | None]:
    """Copy a batch from page-locked memory on its own stream: (batch there, when it has arrived)."""
    if copies is None:
        return batch.to(device), None
    with torch.cuda.stream(copies):
        return batch.to(device), copies.record_event()


def _receive(batch: Batch, copied: torch.cuda.Event | None, device: torch.device) -> Batch:
    """Let the current stream wait for a batch."""
    if copied is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        batch.record_stream(stream)
    return batch
