"""Train one variant: python -m gem.train --variant full --tier smoke --data DIR --output DIR

One process trains the variant once per seed, so that imports are paid for once. It leaves in the output folder:
summary.json (every seed and the spread over seeds), seed<N>/metrics.jsonl (a line a step, the evaluation last) and,
with --run, a part of that run's records. With --resume, finished seeds are kept and an interrupted one continues from
its checkpoint, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import gc
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from gem import checkpoint, checkpointing, evaluate, graphs, hardware, metrics, report
from gem import compile as compilation
from gem import config as configuration
from gem import fused_tables as fused
from gem.cli import Parser
from gem.config import Checkpointing, Config, Precision
from gem.counts import Counts
from gem.dataset import Batch, Split
from gem.heads import batch_loss
from gem.model import GEM, autocast
from gem.optim import Optimizers
from gem.prefetch import prefetch
from gem.progress import Progress
from gem.watch import DivergedError, Done, Watch, check

WARMUP_STEPS = 3  # steps left out of throughput: allocation, autotuning and compilation happen there


@dataclasses.dataclass
class Data:
    """Both splits of one dataset, read once for all seeds."""

    train: Split
    eval: Split

    @staticmethod
    def open(directory: str | Path) -> Data:
        return Data(Split(directory, "train"), Split(directory, "eval"))


def build(config: Config, data: Data, seed: int, device: torch.device, *, fused_tables: bool | None = None) -> GEM:
    """A model with everything put on from outside, in the documented order. The seed fixes its first parameters.

    fused_tables: tables on FBGEMM's fused kernels (gem/fused_tables.py); None: on a GPU. A GPU's parameters are drawn
    there. On a GPU the ops' checks of offsets are off unless KERNELS_CHECK says otherwise: `Split.batch` makes the
    offsets from lengths on the host, so they are right by construction, and a check in every op would cost time.
    """
    torch.manual_seed(seed)
    if device.type == "cuda":
        os.environ.setdefault("KERNELS_CHECK", "0")
    with torch.device(device):
        model = GEM(config, data.train.schema, device)
    model.heads.start_at({task: _base_rate(data.train, task) for task in data.train.schema.tasks})
    model.to(device)
    if config.toggles.precision is not Precision.BF16:
        from gem import precision

        precision.apply(model, config)
    if device.type == "cuda" if fused_tables is None else fused_tables:
        fused.apply(model, config)
    mode, backend = config.toggles.checkpointing, config.implementations.compile
    compilation.apply(model, backend, regions=mode is Checkpointing.NONE)  # else under their budgets
    saved, budget = config.toggles.saved_activations, config.train.checkpoint_budget
    sample = functools.partial(_forward_of_a_sample, model, config, data, device)
    checkpointing.apply(model, mode, backend=backend, budget=budget, saved=saved, forward=sample)
    return graphs.apply(model, config)


def _forward_of_a_sample(model: GEM, config: Config, data: Data, device: torch.device):
    """The model on the first batch of the data, as a training step runs it."""
    rows = np.arange(min(config.train.batch_size, data.train.num_rows))
    with autocast(config, device):
        return model(data.train.batch(rows).to(device))


def _base_rate(split: Split, task: str) -> float:
    weights = split.weights[task]
    return float((split.labels[task] * weights).sum() / max(weights.sum(), 1.0))


def train_seed(
    config: Config,
    data: Data,
    seed: int,
    output: Path,
    device: torch.device,
    *,
    steps: int | None = None,
    resume: bool = False,
    checkpoint_every: int = 500,
    keep_checkpoint: bool = False,
    quiet: bool = False,
) -> dict:
    """Train one seed and evaluate it; returns the seed's results, which are also the last line of metrics.jsonl."""
    output.mkdir(parents=True, exist_ok=True)
    result_path, checkpoint_path, log_path = output / "result.json", output / "checkpoint.pt", output / "metrics.jsonl"
    train = config.train
    per_epoch = data.train.num_rows // train.batch_size
    if per_epoch == 0:
        raise ValueError(
            f"dataset {data.train.directory}: too few rows: {data.train.num_rows} rows do not fill "
            f"one batch of {train.batch_size}"
        )
    total_steps = steps or train.steps or min(train.epochs * per_epoch, train.max_steps or sys.maxsize)
    if total_steps < train.epochs * per_epoch and not quiet:
        why = "--steps" if steps else "train.steps" if train.steps else "train.max_steps"
        print(f"{config.variant}: {total_steps} of {train.epochs * per_epoch} steps ({why})", file=sys.stderr)
    identity = {
        "variant": config.variant,
        "seed": seed,
        "preset": config.preset,
        "total_steps": total_steps,
        "batch_size": train.batch_size,
        "dataset": data.train.schema.name,
        "rows": data.train.num_rows,
    }
    if resume and result_path.is_file():
        saved = json.loads(result_path.read_text())
        if saved.get("identity") == identity:
            return saved
    result_path.unlink(missing_ok=True)
    model = build(config, data, seed, device)
    optimizers = Optimizers(model, config, total_steps)
    first, times, losses, flops, samples = 0, [], [], 0, 0
    if resume and checkpoint_path.is_file():
        state = checkpoint.load(checkpoint_path, identity)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        checkpoint.set_random_state(state["random"], device)
        first, times, losses = state["step"], list(state["times"]), list(state["losses"])
        flops, samples = state["flops"], state["samples"]
    _cut_log(log_path, first)
    hardware.reset_peak_memory(device)
    seen: list[Counts] = []  # counted outside the timed steps

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": optimizers.state_dict(),
            "random": checkpoint.random_state(device),
            "flops": flops,
            "samples": samples,
        }
        checkpoint.save(checkpoint_path, state | {"step": step, "times": times, "losses": losses, "identity": identity})

    def count() -> tuple[int, int]:
        done = sum(model.step_flops(counts) for counts in seen), sum(counts.batch for counts in seen)
        seen.clear()
        return flops + done[0], samples + done[1]

    def write(log, progress, done: Done) -> None:
        times.append(done.seconds)
        losses.append(done.loss)
        entry = {"step": done.step, "loss": done.loss, "grad_norm": done.norm, "seconds": round(done.seconds, 6)}
        log.write(json.dumps(entry) + "\n")
        progress.advance(1, loss=done.loss, qps=metrics_rate(times, train.batch_size))

    model.train()
    with (
        log_path.open("a") as log,
        Progress(total_steps, "steps", f"{config.variant} seed {seed}", quiet=quiet) as progress,
        collecting_again(),
        graphs.released(model),
    ):
        progress.advance(first)
        batches = prefetch(_batches(config, data.train, seed, first, total_steps, per_epoch), device)
        watch = Watch(model, config, seed, device) if device.type == "cuda" else None
        start = time.perf_counter()
        for step, batch in enumerate(batches, start=first):
            seen.append(Counts(batch.size, batch.lengths))
            if watch is None:
                loss, norm = train_step(model, optimizers, batch, config, step, seed)
                now = time.perf_counter()  # waiting for the batch is part of a step
                write(log, progress, Done(step, loss, norm, now - start))
            else:
                for done in watch.add(step, batch, *step_once(model, optimizers, batch, config, step)):
                    write(log, progress, done)
            if checkpoint_every and (step + 1) % checkpoint_every == 0 and step + 1 < total_steps:
                for done in watch.flush() if watch else ():
                    write(log, progress, done)
                log.flush()
                flops, samples = count()
                save(step + 1)
                if watch:
                    watch.restart()
            if step == first + WARMUP_STEPS and watch:
                set_aside()
            start = time.perf_counter()
        for done in watch.flush() if watch else ():
            write(log, progress, done)
        flops, samples = count()
        if model.replay is not None:
            model.replay.clear()  # evaluation needs the room
        result = _results(config, data, model, device, times, losses, flops, samples)
        result |= {"seed": seed, "identity": identity}
        log.write(json.dumps({"step": total_steps, "eval": result}) + "\n")
    if keep_checkpoint:
        save(total_steps)
    else:
        checkpoint_path.unlink(missing_ok=True)
    report.write_json(result_path, result)
    return result


def set_aside() -> None:
    """Leave everything made so far out of Python's garbage collection, until `gc.unfreeze`: a model under torch.compile
    is a million objects, and looking through them now and then takes the host milliseconds a step."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def collecting_again() -> Iterator[None]:
    """Ends what `set_aside` began in the block, however the block ends."""
    try:
        yield
    finally:
        gc.unfreeze()


def train_step(
    model: GEM, optimizers: Optimizers, batch: Batch, config: Config, step: int, seed: int
) -> tuple[float, float]:
    """Forward, backward (tables are updated in it), clip and update; returns loss and dense gradient norm.

    Waits for both and raises DivergedError before a bad one changes anything. `step_once` is the form without waiting.
    """
    loss = forward_loss(model, batch, config)
    value = loss.item()
    check(model, config, seed, step, batch, value, None)
    loss.backward()
    norm = optimizers.clip()
    check(model, config, seed, step, batch, value, norm)
    optimizers.step(step)
    return value, norm


def step_once(
    model: GEM, optimizers: Optimizers, batch: Batch, config: Config, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same step queued on a GPU without one wait for it; loss and norm stay there, float32 scalars.

    Whoever calls it looks at them later (gem/watch.py); until then the device itself keeps the dense parameters from a
    loss or norm that is not finite.
    """
    loss = backward(model, batch, config)
    return loss, optimizers.clip_and_step(step, loss)


def backward(model: GEM, batch: Batch, config: Config) -> torch.Tensor:
    """Loss of a batch, a float32 scalar without its graph; gradients are left where they belong. One launch where the
    model has CUDA graphs (gem/graphs.py)."""
    if model.replay is not None:
        return model.replay(batch)
    loss = forward_loss(model, batch, config)
    loss.backward()
    return loss.detach()


def forward_loss(model: GEM, batch: Batch, config: Config) -> torch.Tensor:
    """Loss of a batch, a float32 scalar with its graph."""
    with autocast(config, batch.dense.device):
        logits = model(batch)
    return batch_loss(logits, batch)


def _batches(config: Config, split: Split, seed: int, first: int, total: int, per_epoch: int):
    step = first
    while step < total:
        epoch, start = divmod(step, per_epoch)
        for batch in split.epoch(config.train.batch_size, seed, epoch, config.toggles.balance.value, start):
            yield batch
            step += 1
            if step == total:
                return


def metrics_rate(times: Sequence[float], batch_size: int) -> float:
    recent = times[-20:]
    return batch_size * len(recent) / sum(recent)


def _results(config, data, model, device, times, losses, flops, samples) -> dict:
    warmup = min(WARMUP_STEPS, len(times) - 1)
    rate = metrics.throughput(times, config.train.batch_size, warmup)
    peak_memory = hardware.peak_memory_gib(device)
    model.eval()

    def forward(batch):
        with autocast(config, device):
            return model(batch)

    start = time.perf_counter()
    probabilities = evaluate.predict(forward, data.eval, config.train.eval_batch_size, device)
    scores = evaluate.score(probabilities, data.eval)
    flops_per_sample = flops / max(samples, 1)
    peak = hardware.peak(device)
    return {
        **{name: _plain(score.value) for name, score in scores.items()},
        "undefined": {name: score.reason for name, score in scores.items() if score.reason},
        "loss": float(np.mean(losses[-max(1, len(losses) // 5) :])),
        "qps": rate.samples_per_s,
        "time_ms": rate.time_p50 * 1e3,
        "time_ms_p20": rate.time_p20 * 1e3,
        "time_ms_p80": rate.time_p80 * 1e3,
        "warmup_steps": rate.warmup_steps,
        "timed_steps": rate.steps,
        "flops_per_sample": flops_per_sample,
        "train_flops": flops_per_sample * config.train.batch_size * len(times),
        "mfu": metrics.mfu(flops_per_sample * rate.samples_per_s, 1.0, peak.flops),
        "peak_name": peak.name,
        "peak_flops": peak.flops,
        "peak_mem_gib": peak_memory,
        "params_dense": sum(p.numel() for p in model.dense_parameters().values()),
        "params_tables": sum(p.numel() for p in model.table_parameters().values()),
        "eval_seconds": time.perf_counter() - start,
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cut_log(path: Path, first: int) -> None:
    """Drop what a killed run logged past its checkpoint."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if entry["step"] >= first or "eval" in entry:
            break
        kept.append(line + "\n")
    path.write_text("".join(kept))


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m gem.train", description=__doc__.splitlines()[0])
    p.add_argument("--variant", required=True, help="id of a row of config/variants.tsv")
    p.add_argument("--tier", default="smoke", help="name of config/<tier>.yaml (default smoke)")
    p.add_argument("--data", required=True, help="dataset folder made by data.synthesize or data.import_log")
    p.add_argument(
        "--output", help="folder of summary.json and seed<N>/ (default results/RUN/EXPERIMENT/[CASE/]VARIANT)"
    )
    p.add_argument("--run", help="write a part of the records under results/RUN (default: no records)")
    p.add_argument("--preset", help=f"size of the model: {', '.join(configuration.ALL_SIZES)} (default: the tier's)")
    p.add_argument("--seeds", help="comma-separated, such as 0,1,2 (default: the tier's)")
    p.add_argument("--steps", type=int, help="training steps (default: the tier's epochs)")
    p.add_argument("--batch-size", type=int, help="samples a step (default: the tier's)")
    p.add_argument("--resume", action="store_true", help="keep finished seeds, continue interrupted ones")
    p.add_argument(
        "--checkpoint-every", type=int, default=500, help="steps between checkpoints, 0 for none (default 500)"
    )
    p.add_argument("--keep-checkpoint", action="store_true", help="keep the final state of every seed")
    p.add_argument("--experiment", default="train", help="name of the records (default train)")
    p.add_argument("--case", help="case of the records (default: the dataset's name)")
    p.add_argument(
        "--format",
        choices=("mx", "hopper"),
        help="of rows in 8 bits: emulated, or real on Hopper (default: the tier's)",
    )
    p.add_argument(
        "--untimed", action="store_true", help="no throughput, time and MFU in the records: the device is shared"
    )
    p.add_argument("--quiet", action="store_true", help="no progress")
    return p


def configure(arguments: argparse.Namespace) -> Config:
    """Config of the command line; ValueError for anything unknown or out of range."""
    config = configuration.load(arguments.variant, arguments.tier, arguments.preset, training=True)
    if arguments.format is not None:
        names = dataclasses.replace(config.implementations, precision=arguments.format)
        config = dataclasses.replace(config, implementations=names)
    changes = {}
    if arguments.seeds is not None:
        try:
            changes["seeds"] = tuple(int(seed) for seed in arguments.seeds.split(","))
        except ValueError:
            raise ValueError(f"--seeds {arguments.seeds!r}: must be integers >= 0 separated by commas") from None
    if arguments.batch_size is not None:
        changes["batch_size"] = arguments.batch_size
    if arguments.steps is not None and arguments.steps < 1:
        raise ValueError(f"--steps {arguments.steps}: must be an integer >= 1")
    if arguments.checkpoint_every < 0:
        raise ValueError(f"--checkpoint-every {arguments.checkpoint_every}: must be an integer >= 0")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def output_folder(arguments: argparse.Namespace) -> Path:
    """--output, or its default inside the results of --run."""
    if arguments.output:
        return Path(arguments.output)
    if not arguments.run:
        raise ValueError("--output is needed unless --run names a folder under results")
    case = [arguments.case] if arguments.case else []
    return Path("results", arguments.run, arguments.experiment, *case, arguments.variant)


def _where(error: OSError, arguments: argparse.Namespace) -> str:
    """One line for a failed read or write; a full disk says which folder, and that nothing half-written counts."""
    text = " ".join(str(error).split())
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left while writing under {output_folder(arguments)} ({text}); free some and run again with "
            "--resume: nothing half-written counts as done"
        )
    return text


def main(argv: Sequence[str] | None = None, data: Data | None = None) -> int:
    """data: that of --data, where the caller has read it already (gem/bench/trainings.py)."""
    arguments = parser().parse_args(argv)
    # lengths differ from batch to batch: segments that grow serve them all, where fixed ones are freed and made anew
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        config = configure(arguments)
        device = hardware.open_device(config.device)
        data = Data.open(arguments.data) if data is None else data
        output = output_folder(arguments)
        results = [
            train_seed(
                config,
                data,
                seed,
                output / f"seed{seed}",
                device,
                steps=arguments.steps,
                resume=arguments.resume or os.environ.get("GEM_RESUME") == "1",
                checkpoint_every=arguments.checkpoint_every,
                keep_checkpoint=arguments.keep_checkpoint,
                quiet=arguments.quiet,
            )
            for seed in config.train.seeds
        ]
        summary = report.summarise(config, data, results, device)
        report.write_json(output / "summary.json", summary)
        if arguments.run:
            case = arguments.case or data.train.schema.name
            report.record(
                config,
                summary,
                tier=arguments.run,
                experiment=arguments.experiment,
                case=case,
                timed=not arguments.untimed,
                command=None if argv is None else f"python -m gem.train {shlex.join(argv)}",
            )
    except torch.OutOfMemoryError as error:
        reason = f"{config.variant} does not fit at local batch {config.train.batch_size}: {str(error).splitlines()[0]}"
        print(f"gem.train: out of memory: {reason}; lower --batch-size or take a smaller --preset", file=sys.stderr)
        if not arguments.run:
            return 1
        # a result like any other: the pipeline goes on, tables show the status
        case = arguments.case or data.train.schema.name
        report.record_failure(config, "oom", reason, tier=arguments.run, experiment=arguments.experiment, case=case)
        return 0
    except OSError as error:
        print(f"gem.train: {_where(error, arguments)}", file=sys.stderr)
        return 1
    except (ValueError, DivergedError, NotImplementedError) as error:
        print(f"gem.train: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(report.one_line(summary))
    return 0


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.exit(main())
