"""What ranks run for tests/parallel/test_dense*.py: one spawn a world size does all of these and returns what it saw.

The oracle is one process: `reference` trains the joined batches with gem.train's own step, in the parent.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gem import train as single
from gem.heads import batch_loss
from gem.model import GEM
from gem.optim import Optimizers
from gem.parallel import checkpoint, dense, experts, low_gather, trace, train
from gem.parallel.mesh import Mesh
from tests.gem import tiny

STEPS = 4
BATCH = 8
FOUR_EXPERTS = dataclasses.replace(tiny.MODEL, num_experts=4, num_tokens=8)


def config(model=tiny.MODEL, **columns: str):
    return tiny.config(BATCH, model, {"steps": STEPS, "checkpoint_budget": 0.0}, **columns)


def batches(data, steps: int = STEPS, size: int = BATCH) -> list[np.ndarray]:
    return list(np.arange(steps * size).reshape(steps, size))


def reference(folder: Path, chosen=None, device: str | torch.device = "cpu") -> dict:
    """One process on the joined batches: losses, gradient norms, first gradients, parameters and tables afterwards."""
    chosen = chosen or config()
    data = single.Data.open(folder)
    device = torch.device(device)
    model = single.build(chosen, data, 0, device, fused_tables=False)
    optimizers = Optimizers(model, chosen, STEPS)
    first = data.train.batch(batches(data)[0]).to(device)
    grads = torch.autograd.grad(
        batch_loss(model(first), first), list(model.dense_parameters().values()), allow_unused=True
    )
    names = list(model.dense_parameters())
    found = {"grads": {n: g.cpu() for n, g in zip(names, grads, strict=True) if g is not None}, "loss": [], "norm": []}
    for step, rows in enumerate(batches(data)):
        loss, norm = single.train_step(model, optimizers, data.train.batch(rows).to(device), chosen, step, 0)
        found["loss"].append(loss)
        found["norm"].append(norm)
    found["params"] = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    return found


class Difference:
    """Largest difference from the reference over its largest value, over tensors."""

    def __init__(self):
        self.worst, self.name = 0.0, ""

    def add(self, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        error = ((found - wanted).abs().max() / (wanted.abs().max() + 1e-6)).item() if wanted.numel() else 0.0
        if not error <= self.worst:
            self.worst, self.name = error, name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or gradient with all its shards, as a plain tensor."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return low_gather.plain(tensor.detach()).cpu()


def everywhere(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of all ranks by name: experts live on some ranks only."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {name: value for rank in found for name, value in rank.items()}


def follows(rank, folder, wanted: dict, plan: Mesh, *, options=None, chosen=None, generation=None, split=None) -> dict:
    """Train STEPS joined batches on `plan` and compare with the reference: curve, norms, first gradients, parameters.

    split: rank -> share of a batch; the default deals evenly. Returns errors and what lies on this rank.
    """
    chosen, options = chosen or config(), options or dense.Options()
    data = single.Data.open(folder)
    job = train.Job(plan, options, generation)
    trainer = train.Trainer(chosen, data, 0, rank, job, STEPS)
    deal = split or (lambda rows: train.deal(rows, plan.gpus))
    errors = {name: Difference() for name in ("loss", "norm", "grads", "params")}
    for step, rows in enumerate(batches(data)):
        parts = deal(rows)
        counts = {task: float(weights[rows].sum()) for task, weights in data.train.weights.items()}
        batch = train.part_of(data.train, parts, rank.rank).to(rank.device)
        if step == 0:
            finish, grads = trainer.optimizers.finish, {}

            def caught(loss, finish=finish, grads=grads):
                grads |= {n: p.grad for n, p in trainer.model.dense_parameters().items() if p.grad is not None}
                own = {name: whole(grad) / plan.gpus for name, grad in grads.items()}
                grads.clear()
                grads |= everywhere(own)
                return finish(loss)

            trainer.optimizers.finish = caught
        loss, norm, _ = trainer.step(batch, parts, counts, step).tolist()
        if step == 0:
            trainer.optimizers.finish = finish
            assert set(grads) == set(wanted["grads"]), set(grads) ^ set(wanted["grads"])
            for name, grad in grads.items():
                errors["grads"].add(name, grad, wanted["grads"][name])
        errors["loss"].add(f"step {step}", torch.tensor(loss), torch.tensor(wanted["loss"][step]))
        errors["norm"].add(f"step {step}", torch.tensor(norm), torch.tensor(wanted["norm"][step]))
    own = {name: whole(value) for name, value in trainer.model.dense_parameters().items()}
    if trainer.tables is None:
        own |= {name: whole(value) for name, value in trainer.model.table_parameters().items()}
    else:
        tables = trainer.tables.gather()
        own |= {name: tables[name.split(".")[-2]] for name in wanted["params"] if name.split(".")[-2] in tables}
    found = everywhere(own)
    assert set(found) == set(wanted["params"]), set(found) ^ set(wanted["params"])
    for name, value in found.items():
        errors["params"].add(name, value, wanted["params"][name])
    result = {name: (error.worst, error.name) for name, error in errors.items()}
    result["held"] = trainer.dense.bytes_held()
    result["names"] = [n for n in trainer.model.dense_parameters() if ".experts.experts." in n]
    result["local_experts"] = [
        int(n.split(".experts.experts.")[1].split(".")[0]) for n in result["names"] if n.startswith("layers.0.")
    ]
    result["units"] = len(trainer.dense.units)
    result["scores"] = {name: score.value for name, score in trainer.evaluate().items()}
    result["fresh"] = fresh(trainer)
    result["changes"] = [(change.name, change.kept) for change in trainer.dense.changes]
    return result


def fresh(trainer) -> list[bool]:
    """Of every shard that travels in 8 bits: whether the bytes that lie ready are those of its values now."""
    shards = [getattr(value, "_local_tensor", value) for value in trainer.model.dense_parameters().values()]
    low = [shard for shard in shards if isinstance(shard, low_gather.LowGather)]
    return [shard.payload is not None and torch.equal(shard.payload, shard.quantised()) for shard in low]


def restored(rank, folder, saved: Path) -> dict:
    """Shards in 8 bits before and after a checkpoint is read into them."""
    trainer = train.Trainer(
        config(), single.Data.open(folder), 0, rank, train.Job(Mesh(2, 2), dense.Options(gather="float8")), STEPS
    )
    shards = [getattr(value, "_local_tensor", value) for value in trainer.model.dense_parameters().values()]
    low = [shard for shard in shards if isinstance(shard, low_gather.LowGather)]
    before = [shard.quantised() for shard in low]
    trainer.restore(checkpoint.last(saved))
    changed = [not torch.equal(old, shard.quantised()) for old, shard in zip(before, low, strict=True)]
    return {"fresh": fresh(trainer), "changed": changed}


def trains(rank, folder, output: Path, plan: Mesh, **job) -> dict:
    """gem.parallel.train.train_seed on `plan`."""
    chosen = config()
    data = single.Data.open(folder)
    steps = job.pop("steps", None)
    return train.train_seed(chosen, data, 0, output, rank, train.Job(plan, **job), steps=steps)


def flow(rank, folder, plan: Mesh, options=None) -> list[trace.Collective]:
    """Collectives of the second step on `plan`."""
    data = single.Data.open(folder)
    trainer = train.Trainer(config(), data, 0, rank, train.Job(plan, options or dense.Options(prefetch=0)), STEPS)
    rows = batches(data)[0]
    parts = train.deal(rows, plan.gpus)
    counts = {task: float(weights[rows].sum()) for task, weights in data.train.weights.items()}
    batch = data.train.batch(parts[rank.rank])
    trainer.step(batch, parts, counts, 0)
    return trace.record(lambda: trainer.step(batch, parts, counts, 1))


def jagged_rows(rank) -> dict:
    """gather_rows over events of ranks with different numbers of them, against the same on one process."""
    lengths = [[3, 0, 2], [0], [4], [1, 1, 1, 1]][: rank.world_size]
    rows = [sum(own) for own in lengths]
    group = dist.group.WORLD
    events = torch.arange(float(sum(rows)) * 2).reshape(-1, 2)
    scale = torch.arange(1.0, sum(rows) + 1)[:, None]  # what every rank does with every event
    own = events.split(rows)[rank.rank].clone().requires_grad_()
    everyone = experts.gather_rows(own, group, rows)
    (everyone * scale * (rank.rank + 1)).sum().backward()
    factor = sum(range(1, rank.world_size + 1))
    wanted = (scale * factor).expand(-1, 2).split(rows)[rank.rank]
    asked = experts.exchange_rows(own.shape[0], group, own.device)
    offsets = experts.gather_rows(torch.tensor(lengths[rank.rank]), group, [len(item) for item in lengths])
    try:
        experts.gather_rows(own, group, [row + 1 for row in rows])
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "values": torch.equal(everyone.detach(), events),
        "gradient": torch.equal(own.grad, wanted),
        "asked": asked == rows,
        "lengths": offsets.tolist() == [length for item in lengths for length in item],
        "refused": refused,
    }


def low_bytes(rank) -> dict:
    """Error and bytes of the gather of one linear layer, 64 x 96, by scheme, and what reaches the shard as gradient."""
    found = {}
    mesh = dense.open_meshes(Mesh(rank.world_size, rank.world_size), "cpu").dense
    for scheme in dense.GATHERS:
        torch.manual_seed(3)
        linear = torch.nn.Linear(96, 64, bias=False)
        linear.weight.data[0] *= 1e5  # an outlier row sets no scale but its own
        linear.weight.data[1, 0] = 3e4  # an outlier element that of its row in float8, of 32 elements in mx
        master = linear.weight.detach().clone()
        model = torch.nn.Sequential(linear)
        changes = dense.shard_unit(model, mesh, dense.Options(gather=scheme), "float32")
        x = torch.randn(5, 96)
        for _ in range(2):  # the second gather writes into the first one's memory
            seen = trace.record(lambda model=model, x=x: model(x).sum().backward())
        gather = next(item for item in seen if item.kind == "all_gather")
        model.unshard()
        error = (linear.weight.detach() - master).norm(dim=1) / master.norm(dim=1)
        beside = ((linear.weight.detach() - master)[1, 32:].norm() / master[1, 32:].norm()).item()
        model.reshard()
        found[scheme] = {
            "errors": [error[0].item(), error[2:32].max().item(), error[32:].max().item()],
            "beside": beside,
            "elements": gather.elements[0],
            "changed": [change.name for change in changes if change.kept is None],
            "grad": (whole(linear.weight.grad) / 2 - rank.world_size * x.sum(0)).abs().max().item(),
        }
    return found


def small_world(rank, folder, out: Path, wanted: dict, hidden: dict) -> dict:
    """Everything for a world of two."""
    two, expert = Mesh(2, 2), Mesh(2, 2, 1, 2)
    sharded = dense.Options(tables="sharded")
    return {
        "fsdp": follows(rank, folder, wanted, two),
        "replica": follows(rank, folder, wanted, Mesh(2, 1, 2)),
        "expert": follows(rank, folder, wanted, expert),
        "all_to_all": follows(rank, folder, wanted, expert, options=dense.Options(prefetch=2, combine="all_to_all")),
        "uneven": follows(rank, folder, wanted, expert, split=lambda rows: [rows[:5], rows[5:]]),
        "no_rows": follows(rank, folder, wanted, expert, split=lambda rows: [rows, rows[:0]]),
        "checkpointed": follows(rank, folder, wanted, expert, chosen=config(checkpointing="uniform")),
        "together": follows(rank, folder, wanted, expert, options=sharded, generation="v1"),
        "float8": follows(rank, folder, wanted, two, options=dense.Options(gather="float8")),
        "mx": follows(rank, folder, wanted, expert, options=dense.Options(gather="mx")),
        "jagged": jagged_rows(rank),
        "low": low_bytes(rank),
        "run": trains(rank, folder, out / "run", expert, steps=6, checkpoint_every=2),
        "run_sharded": trains(
            rank, folder, out / "sharded", expert, steps=6, checkpoint_every=2, options=sharded, generation="v1"
        ),
        "restored": restored(rank, folder, out / "run" / "checkpoints"),
        "last": trains(rank, folder, out / "last", two, steps=9, checkpoint_every=0, keep_last=True),
        "diverged": diverges(rank, folder),
        "refused": refused(folder),
    }


def refused(folder) -> list[str]:
    """What `shard` says to models and plans that it cannot take."""
    schema = single.Data.open(folder).train.schema
    three = dataclasses.replace(tiny.MODEL, num_experts=3, num_tokens=6)
    expert, cpu, found = Mesh(2, 2, 1, 2), torch.device("cpu"), []
    for chosen, plan, dtype in (
        (config(three), expert, "float32"),
        (config(checkpointing="region"), expert, "float32"),
        (config(), Mesh(4, 4), "float32"),
        (config(), expert, "float16"),
    ):
        try:
            dense.shard(GEM(chosen, schema), plan, cpu, dtype=dtype)
        except ValueError as error:
            found.append(str(error))
    return found


def diverges(rank, folder) -> str:
    """One rank's loss becomes NaN: what every rank raises."""
    data = single.Data.open(folder)
    trainer = train.Trainer(config(), data, 0, rank, train.Job(Mesh(2, 2)), STEPS)
    if rank.rank == 1:
        loss = trainer.loss
        trainer.loss = lambda batch, counts: loss(batch, counts) * float("nan")
    rows = batches(data)[0]
    parts = train.deal(rows, 2)
    counts = dict.fromkeys(data.train.weights, 1.0)
    before = whole(trainer.model.heads.hidden["ctr"].weight)
    try:
        trainer.step(data.train.batch(parts[rank.rank]), parts, counts, 7)
    except train.RankDivergedError as error:
        after = whole(trainer.model.heads.hidden["ctr"].weight)
        return f"{error}; parameters {'kept' if torch.equal(before, after) else 'changed'}"
    return "went on"


def larger_world(rank, folder, out: Path, wanted: dict, hidden: dict) -> dict:
    """What needs four ranks or more: two-dimensional meshes, experts whose parameters are sharded, another mesh."""
    n = rank.world_size
    four = {"chosen": config(FOUR_EXPERTS), "options": dense.Options(combine="all_to_all", prefetch=2)}
    sharded = dense.Options(tables="sharded")
    found = {
        "fsdp": follows(rank, folder, wanted, Mesh(n, n)),
        "2d": follows(rank, folder, wanted, Mesh(n, n // 2, 2)),
        "expert": follows(rank, folder, wanted, Mesh(n, n, 1, 2)),
        "2d_expert": follows(rank, folder, wanted, Mesh(n, n // 2, 2, 2)),
        "four_experts": follows(rank, folder, hidden, Mesh(n, n, 1, 4), **four),
        "no_rows": follows(rank, folder, wanted, Mesh(n, n, 1, 2), split=lambda r: [r[:7], r[7:]] + [r[:0]] * (n - 2)),
        "together": follows(rank, folder, wanted, Mesh(n, n // 2, 2, 2), options=sharded, generation="v1"),
        "flow": flow(rank, folder, Mesh(n, n, 1, 2)),
        "flow_2d": flow(rank, folder, Mesh(n, n // 2, 2)),
        "resumed_replicated": trains(
            rank, folder, out / "sharded", Mesh(n, n), steps=6, checkpoint_every=2, resume=True
        ),
        "resumed": trains(rank, folder, out / "run", Mesh(n, n // 2, 2, 2), steps=6, checkpoint_every=2, resume=True),
    }
    if n == 4:  # from replicated tables to sharded ones; over eight ranks the tiny tables leave one without any id, on
        # which FBGEMM's CPU backward fails
        again = {"steps": 6, "checkpoint_every": 2, "resume": True, "options": sharded, "generation": "v1"}
        found["resumed_sharded"] = trains(rank, folder, out / "again", Mesh(n, n), **again)
        five = Mesh(n, n // 2, 2, 2, model_parallel=n // 2)
        found["five"] = {
            generation: follows(rank, folder, wanted, five, options=sharded, generation=generation)
            for generation in ("v2", "v3")
        }
    return found


def on_gpus(rank, folder) -> dict:
    """The same on GPUs over NCCL, for one rank or two: each against one process on this rank's own GPU."""
    n = rank.world_size
    wanted = reference(folder, device=rank.device)
    every = Mesh(n, n)
    found = {
        "fsdp": follows(rank, folder, wanted, every),
        "checkpointed": follows(rank, folder, wanted, every, chosen=config(checkpointing="uniform")),
        "float8": follows(rank, folder, wanted, every, options=dense.Options(gather="float8")),
        "mx": follows(rank, folder, wanted, every, options=dense.Options(gather="mx")),
    }
    if n == 2:
        expert, sharded = Mesh(2, 2, 1, 2), dense.Options(tables="sharded")
        swap = dense.Options(combine="all_to_all", prefetch=2)
        found |= {
            "replica": follows(rank, folder, wanted, Mesh(2, 1, 2)),
            "expert": follows(rank, folder, wanted, expert),
            "all_to_all": follows(rank, folder, wanted, expert, options=swap),
            "uneven": follows(rank, folder, wanted, expert, split=lambda rows: [rows[:5], rows[5:]]),
            "together": follows(rank, folder, wanted, expert, options=sharded, generation="v1"),
        }
    return found


def compiled(rank, folder, wanted: dict) -> dict:
    """Layers as graphs under FSDP's hooks; with experts elsewhere, their parts."""
    chosen = config()
    chosen = dataclasses.replace(
        chosen, implementations=dataclasses.replace(chosen.implementations, compile="aot_eager")
    )
    n = rank.world_size
    return {
        "fsdp": follows(rank, folder, wanted, Mesh(n, n), chosen=chosen),
        "expert": follows(rank, folder, wanted, Mesh(n, n, 1, 2), chosen=chosen),
    }
