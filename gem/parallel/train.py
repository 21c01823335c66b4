"""Train one variant on many ranks: torchrun --nproc-per-node 2 -m gem.parallel.train --variant full --data DIR ...

The options of gem.train, and: --mesh (sizes of the axes), --sparse (how tables lie), --prefetch, --gather, --combine.
A step trains on --batch-size samples over all ranks, dealt evenly, so that any mesh follows the curve of one process
with that batch. Rank 0 writes what gem.train writes: seed<N>/metrics.jsonl, result.json, and summary.json.

Several hosts: the same command on each, with torchrun's rendezvous options, for example
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29400 -m gem.parallel.train ...
The number of steps is agreed on beforehand, from the rows of the split: no rank ends before another.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gem import evaluate, hardware, metrics, report
from gem import train as single
from gem.config import Config
from gem.counts import Counts
from gem.dataset import Batch, Split
from gem.heads import loss_sums
from gem.parallel import checkpoint, dense, launch, low_gather, mesh
from gem.parallel.launch import Rank
from gem.parallel.optim import ShardOptimizers
from gem.prefetch import prefetch
from gem.progress import Progress
from gem.sampler import batch_rows

WINDOW = 20  # steps that a GPU is ahead of the host that reads their losses


class RankDivergedError(RuntimeError):
    """Loss or gradient norm of the joined batch is NaN or infinite: names step and the ranks that saw it first."""


@dataclass(frozen=True)
class Job:
    """What one seed's run needs beyond the config: the mesh, how parameters travel, and when to save."""

    plan: mesh.Mesh
    options: dense.Options = field(default_factory=dense.Options)
    generation: str | None = None  # of sharded tables; None: replicated
    keep_last: bool = False
    checkpoint_every: int = 500
    resume: bool = False
    quiet: bool = True


def deal(rows: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Rows of a batch -> rows of each rank, in order; sizes differ by at most one and may be zero."""
    return np.array_split(rows, ranks)


def part_of(split: Split, parts: Sequence[np.ndarray], rank: int) -> Batch:
    """A rank's part of a dealt batch. A rank without rows takes another's first row with weight 0: it joins every
    collective of the step and adds nothing to loss or gradients (an empty KeyedJaggedTensor has no lookups)."""
    if len(parts[rank]):
        return split.batch(parts[rank])
    batch = split.batch(next(part for part in parts if len(part))[:1])
    return replace(batch, weights={task: torch.zeros_like(weight) for task, weight in batch.weights.items()})


def sizes_of(parts: Sequence[np.ndarray]) -> list[int]:
    """Samples that each rank's `part_of` a batch holds."""
    return [max(1, len(part)) for part in parts]


def order(split: Split, config: Config, seed: int, keep_last: bool) -> Iterator[np.ndarray]:
    """Rows of every step, epoch after epoch, without end: the batches of one process, and with keep_last the rows that
    fill none as a shorter batch at the end of each epoch."""
    epoch = 0
    while True:
        lengths, size = split.sequence_lengths(), config.train.batch_size
        batches = batch_rows(lengths, size, seed, epoch, config.toggles.balance.value)
        yield from batches
        if keep_last and batches.size < split.num_rows:
            yield np.setdiff1d(np.arange(split.num_rows), batches.reshape(-1))
        epoch += 1


def steps_of(config: Config, split: Split, keep_last: bool, steps: int | None = None) -> int:
    """Steps of a run, as gem.train counts them; the same on every rank. ValueError if a batch cannot be filled."""
    per_epoch = split.num_rows // config.train.batch_size
    if per_epoch == 0:
        raise ValueError(
            f"dataset {split.directory}: too few rows: {split.num_rows} rows do not fill one batch of "
            f"{config.train.batch_size}"
        )
    per_epoch += keep_last and split.num_rows % config.train.batch_size > 0
    train = config.train
    return steps or train.steps or min(train.epochs * per_epoch, train.max_steps or sys.maxsize)


class Trainer:
    """Model, optimisers and data of one seed on one rank. Every method is collective."""

    def __init__(self, config: Config, data: single.Data, seed: int, rank: Rank, job: Job, total_steps: int):
        self.config, self.data, self.seed, self.rank, self.job = config, data, seed, rank, job
        model = _build(config, data, seed, rank.device)
        self.tables = None
        self.table_names = {name.split(".")[-2]: name for name in model.table_parameters()}
        if job.generation:
            from gem.parallel import sparse

            self.tables = sparse.shard_tables(
                model, job.plan, job.generation, device=rank.device, lr=config.train.table_lr
            )
        self.dense = dense.shard(model, job.plan, rank.device, job.options, dtype=config.dtype)
        self.model = model
        self.optimizers = ShardOptimizers(self.dense, config, total_steps)

    def loss(self, batch: Batch, counts: dict[str, float]) -> torch.Tensor:
        """What this rank differentiates for its part of a batch. counts: weights of the whole batch by task."""
        with single.autocast(self.config, batch.dense.device):
            logits = self.model(batch)
        return dense.rank_loss(loss_sums(logits, batch.labels, batch.weights), counts, self.dense.ranks)

    def step(self, batch: Batch, rows: Sequence[np.ndarray], counts: dict[str, float], step: int) -> torch.Tensor:
        """Train on this rank's part of a batch whose rows are dealt as `rows`.

        Returns [loss, gradient norm] of the whole batch, equal on all ranks, and this rank's own loss: float32 [3] on
        the device. On a GPU nothing waits for them, and the update is left out where they are not finite.
        """
        self.dense.set_rows(sizes_of(rows))
        loss = self.loss(batch, counts)
        loss.backward()
        if self.tables is not None:
            self.tables.sync()
        found = torch.stack((*self.optimizers.finish(loss), loss.detach().float()))
        if found.is_cpu:
            self.check([step], found[None])
        self.optimizers.step(step)
        return found

    def check(self, steps: Sequence[int], found: torch.Tensor) -> list[list[float]]:
        """Loss and norm of steps, as numbers. RankDivergedError on every rank at the first step that is not finite.

        found: what `step` returned, [steps, 3]. Every rank calls it after the same step.
        """
        values = found.tolist()
        for step, (loss, norm, _), row in zip(steps, values, found, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                bad = torch.zeros(self.dense.ranks, device=found.device)
                bad[self.rank.rank] = (~row[2].isfinite()).float()
                dist.all_reduce(bad)
                ranks = ", ".join(str(index) for index, flag in enumerate(bad.tolist()) if flag)
                raise RankDivergedError(
                    f"variant {self.config.variant}, seed {self.seed}, step {step}: loss {loss}, gradient norm {norm}; "
                    + (f"bad loss on rank {ranks}" if ranks else "losses are finite, gradients are not")
                )
        return [row[:2] for row in values]

    @torch.no_grad()
    def evaluate(self) -> dict[str, metrics.Score]:
        """Scores of the held-out split, each batch dealt over the ranks; the same on every rank."""
        self.model.eval()
        split, size = self.data.eval, self.config.train.eval_batch_size
        own: dict[str, list] = {task: [] for task in split.schema.tasks}
        for start in range(0, split.num_rows, size):
            parts = deal(np.arange(start, min(start + size, split.num_rows)), self.dense.ranks)
            self.dense.set_rows(sizes_of(parts))
            with single.autocast(self.config, self.rank.device):
                logits = self.model(part_of(split, parts, self.rank.rank).to(self.rank.device))
            for task in own:
                probabilities = logits[task].float().sigmoid().cpu().numpy()
                own[task].append(probabilities[: len(parts[self.rank.rank])])
        self.model.train()
        everyone: list = [None] * self.dense.ranks
        dist.all_gather_object(everyone, own)
        whole = {
            task: np.concatenate(
                [part for batch in zip(*(rank[task] for rank in everyone), strict=True) for part in batch]
            )
            for task in own
        }
        return evaluate.score(whole, split)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on, by names that do not depend on the mesh."""
        state = self.optimizers.state()
        if self.tables is not None:
            from gem.parallel import table_state

            state |= table_state.state(self.tables, self.table_names)
        return state

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint of any mesh: FSDP shards are read in place, tables copied into their shards."""
        state = self.state()
        checkpoint.load(path, state)
        low_gather.prequantise(self.model.dense_parameters().values())
        if self.tables is not None:
            from gem.parallel import table_state

            table_state.restore(self.tables, self.table_names, state)


def _build(config: Config, data: single.Data, seed: int, device: torch.device):
    """The model of one process, with plain tables: their gradients are averaged, or TorchRec replaces them."""
    return single.build(config, data, seed, device, fused_tables=False)


def train_seed(
    config: Config, data: single.Data, seed: int, output: Path, rank: Rank, job: Job, *, steps: int | None = None
) -> dict:
    """Train one seed on all ranks and evaluate it; the seed's results, equal on every rank. Rank 0 writes them.

    A resumed run goes on from the last checkpoint, whatever mesh wrote it.
    """
    total = steps_of(config, data.train, job.keep_last, steps)
    identity = {
        "variant": config.variant,
        "seed": seed,
        "preset": config.preset,
        "total_steps": total,
        "batch_size": config.train.batch_size,
        "dataset": data.train.schema.name,
        "rows": data.train.num_rows,
        "keep_last": job.keep_last,
    }
    folder = output / "checkpoints"
    trainer = Trainer(config, data, seed, rank, job, total)
    first, losses, times = 0, [], []
    found = checkpoint.last(folder) if job.resume else None
    if found is not None:
        run = checkpoint.read_run(found, identity)
        trainer.restore(found)
        first, losses, times = run["step"], run["losses"], run["times"]
    log_path = output / "metrics.jsonl"
    if rank.is_first:
        output.mkdir(parents=True, exist_ok=True)
        single._cut_log(log_path, first)
    # draws of a step (stochastic rounding) follow from seed, place and rank, since a resumed job may have other ranks
    torch.manual_seed(int(np.random.SeedSequence([seed, first, rank.rank]).generate_state(1)[0]))
    hardware.reset_peak_memory(rank.device)
    trainer.model.train()
    dealt = _dealt(data.train, config, seed, job, first, total)
    own = (part_of(data.train, rows, rank.rank) for _, rows, _ in _dealt(data.train, config, seed, job, first, total))
    seen: list[Counts] = []
    samples = 0
    with Progress(total, "steps", f"{config.variant} seed {seed}", quiet=job.quiet or not rank.is_first) as progress:
        progress.advance(first)
        pending = _Pending(trainer, log_path)
        for (step, rows, counts), batch in zip(dealt, prefetch(own, rank.device), strict=True):
            pending.add(step, trainer.step(batch, rows, counts, step))
            samples += sum(map(len, rows))
            seen.append(Counts(batch.size, batch.lengths))
            save = job.checkpoint_every and (step + 1) % job.checkpoint_every == 0 and step + 1 < total
            if save or step + 1 == total or pending.is_full:
                for loss, seconds in pending.take():
                    losses.append(loss)
                    times.append(seconds)
                    progress.advance(1, loss=loss)
            if save:
                run = {"identity": identity, "mesh": job.plan.describe(), "losses": losses, "times": times}
                path = checkpoint.save(folder, step + 1, trainer.state(), run)
                if rank.is_first and not job.quiet:
                    print(f"checkpoint: {path}", file=sys.stderr)
                pending.restart()
    result = _results(trainer, times, losses, seen, samples) | {"seed": seed, "identity": identity}
    if rank.is_first:
        report.write_json(output / "result.json", result)
    return result


class _Pending:
    """Steps whose results the host has not read: one at a time on a CPU; on a GPU a whole window, at the same step on
    every rank, so that its queue never runs empty and a bad step stops all ranks together."""

    def __init__(self, trainer: Trainer, log_path: Path):
        self.trainer, self.log_path = trainer, log_path
        self.window = WINDOW if trainer.rank.device.type == "cuda" else 1
        self.steps: list[int] = []
        self.found: list[torch.Tensor] = []
        self.marks: list = [self._mark()]

    @property
    def is_full(self) -> bool:
        return len(self.steps) >= self.window

    def _mark(self):
        if self.trainer.rank.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, step: int, found: torch.Tensor) -> None:
        self.steps.append(step)
        self.found.append(found)
        self.marks.append(self._mark())

    def take(self) -> list[tuple[float, float]]:
        """(loss, seconds) of the steps so far, which rank 0 also logs. Waits for them."""
        values = self.trainer.check(self.steps, torch.stack(self.found)) if self.steps else []
        on_gpu = self.trainer.rank.device.type == "cuda"
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        seconds = [a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in pairs]
        if self.trainer.rank.is_first and values:
            with self.log_path.open("a") as log:
                for step, (loss, norm), spent in zip(self.steps, values, seconds, strict=True):
                    entry = {"step": step, "loss": loss, "grad_norm": norm, "seconds": round(spent, 6)}
                    log.write(json.dumps(entry) + "\n")
        self.steps, self.found, self.marks = [], [], self.marks[-1:]
        return [(loss, spent) for (loss, _), spent in zip(values, seconds, strict=True)]

    def restart(self) -> None:
        """Time the next step from here."""
        self.marks = [self._mark()]


def _dealt(split: Split, config: Config, seed: int, job: Job, first: int, total: int):
    """(step, rows of each rank, weights of the whole batch by task) of the steps first .. total - 1."""
    for step, rows in zip(range(total), order(split, config, seed, job.keep_last), strict=False):
        if step >= first:
            counts = {task: float(weights[rows].sum()) for task, weights in split.weights.items()}
            yield step, deal(rows, job.plan.gpus), counts


def _results(trainer: Trainer, times: list, losses: list, seen: list[Counts], samples: int) -> dict:
    """Results of a seed in the form of gem.train, of the whole job: QPS counts every sample once, MFU all GPUs."""
    config, rank, job = trainer.config, trainer.rank, trainer.job
    warmup = min(single.WARMUP_STEPS, len(times) - 1)
    rate = metrics.throughput(times, config.train.batch_size, warmup)
    flops = torch.tensor([sum(trainer.model.step_flops(counts) for counts in seen)], dtype=torch.float64)
    flops = flops.to(rank.device)
    dist.all_reduce(flops)
    flops_per_sample = flops.item() / max(samples, 1)
    scores = trainer.evaluate()
    peak = hardware.peak(rank.device)
    held = trainer.dense.bytes_held()
    return {
        **{name: score.value if math.isfinite(score.value) else None for name, score in scores.items()},
        "undefined": {name: score.reason for name, score in scores.items() if score.reason},
        "loss": float(np.mean(losses[-max(1, len(losses) // 5) :])),
        "ranks": job.plan.gpus,
        "mesh": job.plan.describe(),
        "tables": job.generation or job.options.tables,
        "qps": rate.samples_per_s,
        "qps_per_rank": rate.samples_per_s / job.plan.gpus,
        "time_ms": rate.time_p50 * 1e3,
        "time_ms_p20": rate.time_p20 * 1e3,
        "time_ms_p80": rate.time_p80 * 1e3,
        "warmup_steps": rate.warmup_steps,
        "timed_steps": rate.steps,
        "flops_per_sample": flops_per_sample,
        "train_flops": flops_per_sample * config.train.batch_size * len(times),
        "mfu": metrics.mfu(flops_per_sample * rate.samples_per_s, 1.0, peak.flops * job.plan.gpus),
        "peak_name": peak.name,
        "peak_flops": peak.flops,
        "peak_mem_gib": hardware.peak_memory_gib(rank.device),
        "params_dense": sum(value.numel() for value in trainer.model.dense_parameters().values()),
        "params_tables": sum(value.numel() for value in trainer.model.table_parameters().values()),
        "bytes_on_rank_0": held,
    }


def parser():
    p = single.parser()
    p.prog, p.description = "torchrun ... -m gem.parallel.train", __doc__.splitlines()[0]
    p.add_argument("--mesh", default="", help="fsdp=128,ddp=32,ep=2,mp=512; what is left out is filled up (all FSDP)")
    p.add_argument("--sparse", choices=("v1", "v2", "v3"), help="tables sharded through TorchRec (default: replicated)")
    p.add_argument("--prefetch", type=int, default=1, help="units whose parameters are gathered ahead (default 1)")
    p.add_argument("--gather", default="plain", help=f"{', '.join(dense.GATHERS)} (default plain)")
    p.add_argument("--combine", default="reduce_scatter", help="how experts' outputs return (default reduce_scatter)")
    p.add_argument("--keep-last", action="store_true", help="train on the rows that fill no batch, too")
    p.add_argument("--backend", choices=tuple(launch.BACKENDS), help="default: nccl where there is a GPU")
    p.add_argument("--timeout", type=float, default=launch.TIMEOUT_S, help="seconds of a collective (default 600)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    rank = None
    try:
        config = single.configure(arguments)
        if arguments.run or arguments.keep_checkpoint:
            raise ValueError("parallel train: --run and --keep-checkpoint belong to gem.train; allowed: --output")
        output = single.output_folder(arguments)
        rank = launch.start(arguments.backend or ("nccl" if config.device == "cuda" else "gloo"), arguments.timeout)
        plan = mesh.parse(arguments.mesh, rank.world_size) if arguments.mesh else mesh.Mesh(*[rank.world_size] * 2)
        options = dense.Options(
            arguments.prefetch, arguments.gather, arguments.combine, "sharded" if arguments.sparse else "replicated"
        )
        job = Job(
            plan,
            options,
            arguments.sparse,
            arguments.keep_last,
            arguments.checkpoint_every,
            arguments.resume,
            arguments.quiet,
        )
        data = single.Data.open(arguments.data)
        results = [
            train_seed(config, data, seed, output / f"seed{seed}", rank, job, steps=arguments.steps)
            for seed in config.train.seeds
        ]
        if rank.is_first:
            summary = report.summarise(config, data, results, rank.device)
            report.write_json(output / "summary.json", summary | {"mesh": plan.describe(), "ranks": rank.world_size})
            print(report.one_line(summary))
        launch.stop()
    except (OSError, ValueError, RankDivergedError, NotImplementedError) as error:
        if rank is None or rank.is_first:
            print(f"gem.parallel.train: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # a collective that lost a peer
        print(f"gem.parallel.train: rank {rank.rank if rank else '?'}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
