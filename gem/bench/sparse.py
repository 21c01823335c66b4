"""Three generations of sparse parallelism on the GPUs of one host: memory, balance and time a step (experiment sparse).

    python -m gem.bench.sparse --tier gpu2

One set of tables, one seeded batch a rank and step. V2 and V3 keep a copy of the tables on every GPU, for two GPUs are
no more than two groups of one; so their lookups cross no link, and V1 alone exchanges ids and embeddings. What is
measured is what a group of any size pays for its copies. Each generation is first checked on small tables against one
process and the joined batch; a wrong one gets no time but status failed.

Rows, case gpus<n>, subject v1, v2, v3 (and v3_torchrec, TorchRec's own order): memory_bytes with impl `tables` (between
steps), `tables_peak` (counted), `allocated_peak` (the allocator's, lookups and all); skew of table bytes and of
looked-up ids; time_ms of forward, backward and whole step; subject <name>_sync: time of averaging or scattering.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem.bench import ranks
from gem.bench.ranks import Job, add_time
from gem.bench.timing import Timing
from gem.parallel.mesh import Mesh
from gem.parallel.sparse import SparseTables, shard_tables

EXPERIMENT = "sparse"
SOURCES = (
    "gem/bench/sparse.py",
    "gem/bench/ranks.py",
    "gem/parallel/sparse.py",
    "gem/parallel/placement.py",
    "gem/parallel/replica_shards.py",
)
SUBJECTS = {"v1": ("v1", "source"), "v2": ("v2", "source"), "v3": ("v3", "source"), "v3_torchrec": ("v3", "torchrec")}
WARMUP, STEPS = 3, 10
LINEAR = {"lr": 1e4, "eps": 1e4}  # row-wise Adagrad so far from its own sum that its update is a plain gradient step


@dataclass(frozen=True)
class TableSet:
    """Tables of log-normal size and log-normal ids a sample, as large models have them. rows: of all together."""

    count: int = 24
    rows: int = 16_000_000
    dim: int = 128
    batch: int = 1024
    mean_ids: float = 20.0
    seed: int = 2026

    @property
    def sizes(self) -> list[int]:
        draw = np.random.default_rng(self.seed).lognormal(0.0, 1.5, self.count)
        return [max(4, int(value)) for value in draw / draw.sum() * self.rows]

    @property
    def ids(self) -> list[float]:
        """Mean ids a sample of each table."""
        draw = np.random.default_rng(self.seed + 1).lognormal(0.0, 0.5, self.count)
        return list(draw / draw.mean() * self.mean_ids)


SMALL = TableSet(count=5, rows=400, dim=16, batch=8, mean_ids=3.0)
MEASURED = TableSet()


class Bags(nn.Module):
    """The tables alone, pooled by sum. device: "meta" leaves drawing the weights to the shards."""

    def __init__(self, tables: TableSet, device: str):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table{i}",
                    embedding_dim=tables.dim,
                    num_embeddings=size,
                    feature_names=[f"feature{i}"],
                    pooling=PoolingType.SUM,
                )
                for i, size in enumerate(tables.sizes)
            ],
            device=torch.device(device),
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values()


def batch_of(tables: TableSet, rank: int, step: int, device) -> KeyedJaggedTensor:
    """Ids of one rank and step: lengths Poisson, ids uniform over each table."""
    rng = np.random.default_rng([tables.seed, rank, step])
    lengths = [rng.poisson(mean, tables.batch) for mean in tables.ids]
    values = [rng.integers(0, size, own.sum()) for size, own in zip(tables.sizes, lengths, strict=True)]
    return KeyedJaggedTensor(
        keys=[f"feature{i}" for i in range(tables.count)],
        values=torch.from_numpy(np.concatenate(values)).to(device),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)).to(device),
        length_per_key=[int(own.sum()) for own in lengths],
    )


def target_of(tables: TableSet, rank: int, step: int, device) -> torch.Tensor:
    """Gradient of the pooled embeddings, so that no dense model is needed: the loss is their scalar product."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(tables.batch, tables.count * tables.dim, generator=generator).to(device)


def one_process(tables: TableSet, weights: dict[str, torch.Tensor], world: int, steps: int) -> dict[str, torch.Tensor]:
    """Tables after `steps` plain gradient steps of rate 1 on the joined batches, by autograd on the CPU."""
    model = Bags(tables, "cpu")
    with torch.no_grad():
        for name, weight in weights.items():
            model.bags.embedding_bags[name].weight.copy_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            pooled = model(batch_of(tables, rank, step, "cpu"))
            (pooled * target_of(tables, rank, step, "cpu")).sum().div(world * tables.batch).backward()
        optimizer.step()
    return {name: bag.weight.detach() for name, bag in model.bags.embedding_bags.items()}


def one_step(model: nn.Module, tables: SparseTables, batch, target, world: int, mark=lambda: None) -> None:
    """Forward, backward with the update, sync. `mark` is called between them."""
    mark()
    pooled = model(batch)
    loss = (pooled * target).sum() / len(target)  # equal batches: sum * ranks / samples of all ranks
    mark()
    loss.backward()
    mark()
    tables.sync()
    mark()


def mesh_of(name: str, world: int) -> Mesh:
    """V1: one copy over all ranks; else a copy a rank, the only two-dimensional layout of two ranks with replicas."""
    return Mesh(world, world, model_parallel=world if name == "v1" else 1)


def check(job: Job, name: str) -> float:
    """Largest error of the tables after three steps on small ones, relative to the largest weight."""
    world, rank, device = job.rank.world_size, job.rank.rank, job.rank.device
    generation, strategy = SUBJECTS[name]
    torch.manual_seed(1)
    model = Bags(SMALL, "cpu")
    before = {table: bag.weight.detach().clone() for table, bag in model.bags.embedding_bags.items()}
    right = one_process(SMALL, before, world, 3)
    sharded = shard_tables(model, mesh_of(name, world), generation, device=device, strategy=strategy, **LINEAR)
    for step in range(3):
        batch, target = batch_of(SMALL, rank, step, device), target_of(SMALL, rank, step, device)
        one_step(model, sharded, batch, target, world)
    found = sharded.gather()
    scale = max(float(weight.abs().max()) for weight in right.values())
    return max(float((found[table] - weight).abs().max()) for table, weight in right.items()) / scale


def phases(model, tables: SparseTables, batches: Iterator, world: int) -> list[tuple[float, float, float]]:
    """(forward, backward, sync) in ms of STEPS steps of this rank."""
    for _ in range(WARMUP):
        one_step(model, tables, *next(batches), world)
    marks = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    dist.barrier()
    for _ in range(STEPS):
        one_step(model, tables, *next(batches), world, mark)
    torch.cuda.synchronize()
    steps = [marks[first : first + 4] for first in range(0, 4 * STEPS, 4)]
    return [tuple(a.elapsed_time(b) for a, b in itertools.pairwise(four)) for four in steps]


def measure(job: Job, run, name: str, tables: TableSet) -> None:
    world, rank, device = job.rank.world_size, job.rank.rank, job.rank.device
    generation, strategy = SUBJECTS[name]
    row = {"case": f"gpus{world}", "subject": name, "phase": "step"}
    limit = 1e-4 if name != "v3_torchrec" else float("inf")  # it looks up rows that miss the other rank's last update
    error = check(job, name)
    right = job.agree(error < limit)
    run.add(**row, impl="small", metric="rel_err", p50=job.largest(error), note="against one process, three steps")
    if not right:
        run.add(**row, impl="step", metric="time_ms", status="failed", note=f"error {error:.3g} on small tables")
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    torch.manual_seed(rank)
    model = Bags(tables, "meta")
    sharded = shard_tables(model, mesh_of(name, world), generation, device=device, strategy=strategy, lr=0.01)
    batches = ((batch_of(tables, rank, s, device), target_of(tables, rank, s, device)) for s in range(WARMUP + STEPS))
    made = iter(list(batches))
    torch.cuda.reset_peak_memory_stats()
    times = torch.tensor(phases(model, sharded, made, world), device=device)
    peak = torch.cuda.max_memory_allocated() - empty
    dist.all_reduce(times, dist.ReduceOp.MAX)
    memory = sharded.memory()
    for impl, value in (
        ("tables", memory.tables),
        ("tables_peak", memory.peak_tables),
        ("allocated_peak", peak),
    ):
        note = (
            "largest of the ranks; tables are float32" if impl != "allocated_peak" else "inputs of all steps included"
        )
        run.add(**row, impl=impl, metric="memory_bytes", p50=job.largest(value), note=note)
    state = job.largest(memory.optimizer)
    run.add(**row | {"subject": f"{name}_optimizer"}, impl="tables", metric="memory_bytes", p50=state)
    loads = sharded.bytes_by_rank()
    run.add(**row, impl="table_bytes", metric="skew", p50=max(loads) / (sum(loads) / len(loads)))
    ids = job.gathered(float(ids_here(sharded, tables, rank, world)))
    run.add(**row, impl="lookups", metric="skew", p50=max(ids) / (sum(ids) / len(ids)), note="ids looked up, one step")
    for place, (phase, subject) in enumerate((("fwd", name), ("bwd", name), ("step", f"{name}_sync"))):
        timing = Timing.of(times[:, place].tolist(), WARMUP)
        add_time(run, row | {"phase": phase, "subject": subject, "impl": "step"}, timing)
    add_time(
        run, row | {"impl": "step"}, Timing.of(times.sum(1).tolist(), WARMUP), "forward, backward with update, sync"
    )
    # whatever a generation leaves behind would count against the next
    del model, sharded, made
    gc.collect()
    torch.cuda.empty_cache()


@lru_cache
def _ids_by_table(tables: TableSet, world: int) -> list[list[np.ndarray]]:
    """Ids of the first step, by rank and table."""
    found = []
    for rank in range(world):
        batch = batch_of(tables, rank, 0, "cpu")
        found.append([part.numpy() for part in batch.values().split(batch.length_per_key())])
    return found


def ids_here(sharded: SparseTables, tables: TableSet, rank: int, world: int) -> int:
    """Ids that this rank looks up in the first step: of its own batch under V2 and V3, of its rows of all under V1."""
    everyone = _ids_by_table(tables, world)
    if sharded.mesh.model_parallel == 1:
        return sum(len(ids) for ids in everyone[rank])
    total = 0
    for index in range(tables.count):
        placement = sharded.placements[f"table{index}"]
        for own in everyone:
            total += int((placement.ranks_of(own[index]) == rank).sum())
    return total


def generations(job: Job) -> None:
    """All generations, one after another, on the same tables."""
    settings = vars(MEASURED) | {"sizes": MEASURED.sizes, "steps": STEPS, "optimizer": "rowwise_adagrad"}
    run = job.open_run(EXPERIMENT, "generations", SOURCES, settings)
    for name in SUBJECTS:
        measure(job, run, name, MEASURED)
    if job.rank.is_first:
        run.write()
    dist.barrier()


PARTS = {"generations": generations}


def main(argv: list[str] | None = None) -> int:
    return ranks.main("gem.bench.sparse", __doc__.split("\n")[0], PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
