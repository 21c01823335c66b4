"""What ranks run for tests/parallel/test_sparse.py: one spawn a world size does it all and returns what it saw."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem.dataset import checked_kjt
from gem.parallel.mesh import Mesh
from gem.parallel.sparse import SparseTables, optimizer_states, shard_tables

# Sums and means in turn: TorchRec groups features by kernel, so their columns come out in another order.
BAGS = {"a": (13, PoolingType.SUM), "b": (40, PoolingType.MEAN), "c": (7, PoolingType.SUM), "d": (9, PoolingType.MEAN)}
ROWS = {"items": 30, "actions": 5}
DIM, STEPS, RATE = 8, 3, 0.5


class Tables(nn.Module):
    """Pooled features and histories, as the model has them."""

    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"bag_{key}", embedding_dim=DIM, num_embeddings=size, feature_names=[key], pooling=pooling
                )
                for key, (size, pooling) in BAGS.items()
            ]
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=f"row_{key}", embedding_dim=DIM, num_embeddings=size, feature_names=[key])
                for key, size in ROWS.items()
            ]
        )

    def forward(self, batch) -> list[torch.Tensor]:
        bags, rows = batch
        looked_up = self.rows(rows)
        return [self.bags(bags).values(), *(looked_up[key].values() for key in ROWS)]


def keyed(sizes: dict[str, int], batch: int, seed: tuple) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (len(sizes), batch))
    ids = [rng.integers(0, size, own.sum()) for size, own in zip(sizes.values(), lengths, strict=True)]
    values, flat = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(lengths.reshape(-1))
    return checked_kjt(list(sizes), values, flat, sizes=sizes)


def batch_of(rank: int, step: int, samples: int, device="cpu"):
    bags = {key: size for key, (size, _) in BAGS.items()}
    batch = keyed(bags, samples, (1, rank, step)), keyed(ROWS, samples, (2, rank, step))
    return tuple(part.to(torch.device(device)) for part in batch)


def loss_sum(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Not symmetric in the columns, and not linear: a permuted or a stale embedding changes it."""
    pooled, items, actions = outputs
    weights = torch.arange(1, pooled.shape[1] + 1, device=pooled.device) / 10
    return (pooled.sin() * weights).sum() + (items * items).sum() + actions.cos().sum()


def model() -> Tables:
    torch.manual_seed(3)
    return Tables()


def one_process(sizes: list[int], optimizer: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Tables after STEPS steps on the joined batches, and the losses."""
    plain, losses = model(), []
    kind, options = (
        (torch.optim.SGD, {"lr": RATE}) if optimizer == "sgd" else (RowWiseAdagrad, {"lr": RATE, "eps": 1e-8})
    )
    _apply_optimizer_in_backward(kind, plain.parameters(), options)
    for step in range(STEPS):
        total = sum(loss_sum(plain(batch_of(rank, step, size))) for rank, size in enumerate(sizes)) / sum(sizes)
        total.backward()
        losses.append(float(total.detach()))
    return {name.split(".")[-2]: value.detach() for name, value in plain.named_parameters()}, losses


def train(rank, generation: str, mesh: Mesh, sizes: list[int], **options) -> tuple[SparseTables, list[float], list]:
    """The same on ranks: tables, losses of the joined batches, and what lies on this rank after each step."""
    own = model()
    tables = shard_tables(own, mesh, generation, device=rank.device, lr=RATE, **options)
    losses, memory = [], []
    for step in range(STEPS):
        samples = sizes[rank.rank]
        loss = loss_sum(own(batch_of(rank.rank, step, samples, rank.device))) * (rank.world_size / sum(sizes))
        loss.backward()
        tables.sync()
        mean = loss.detach() / rank.world_size
        dist.all_reduce(mean)
        losses.append(float(mean))
        memory.append(tables.memory())
    return tables, losses, memory


def meshes(world: int) -> dict[str, Mesh]:
    """V1 over all ranks; V2 and V3 in groups of half of them, two replicas of each shard."""
    two = Mesh(world, world, model_parallel=world // 2)
    return {"v1": Mesh(world, world), "v2": two, "v3": two}


def cases(world: int) -> dict[str, dict]:
    """Name -> arguments of `train`: every generation, tables placed in every way, even batches and uneven ones."""
    found = {}
    for generation, mesh in meshes(world).items():
        common = {"generation": generation, "mesh": mesh, "optimizer": "sgd"}
        found[f"{generation}-auto"] = common | {"sizes": [4] * world, "scheme": "auto"}
        found[f"{generation}-row"] = common | {"sizes": [4] * world, "scheme": "row"}
        found[f"{generation}-table-uneven"] = common | {"sizes": [5, 1, 3, 2][:world], "scheme": "table"}
        found[f"{generation}-adagrad"] = common | {
            "sizes": [4] * world,
            "scheme": "auto",
            "optimizer": "rowwise_adagrad",
        }
    return found


def everything(rank) -> dict:
    """All of it on gloo."""
    found = {name: _summary(*train(rank, **case)) for name, case in cases(rank.world_size).items()}
    return found | {
        "o39": division(rank) if rank.world_size == 2 else None,
        "eval": evaluation(rank),
        "refused": refused(rank),
        "stale": stale(rank),
        "bench": on_bench_tables(rank) if rank.world_size == 2 else None,
    }


def _summary(tables: SparseTables, losses: list, memory: list) -> dict:
    placed = {name: (place.rank, place.rows_by_rank()) for name, place in tables.placements.items()}
    return {
        "tables": tables.gather(),
        "losses": losses,
        "memory": memory,
        "states": [state.clone() for kernel in tables.kernels for state in optimizer_states(kernel)],
        "bytes": tables.bytes_by_rank(),
        "placed": placed,
    }


def division(rank) -> torch.Tensor:
    """Six rows of zeros, SGD rate 2; rank 0 looks up 0 and 4, rank 1 looks up 2 and 5, upstream gradient 0.3 each."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            config = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=6, feature_names=["f"])
            self.rows = EmbeddingCollection(tables=[config])
            nn.init.zeros_(self.rows.embeddings["t"].weight)

    own = One()
    tables = shard_tables(own, Mesh(2, 2), "v1", optimizer="sgd", lr=2.0)
    ids = torch.tensor([[0, 4], [2, 5]][rank.rank])
    looked_up = own.rows(checked_kjt(["f"], ids, torch.tensor([1, 1]), sizes={"f": 6}))["f"].values()
    looked_up.backward(torch.full_like(looked_up, 0.3))
    return tables.gather()["t"]


def evaluation(rank) -> dict:
    """Two lookups without a backward pass between: V3 gathers twice and keeps its part; then nothing is left whole."""
    own = model()
    plain = copy.deepcopy(own)
    tables = shard_tables(own, meshes(rank.world_size)["v3"], "v3", optimizer="sgd", scheme="row")
    batch = batch_of(rank.rank, 0, 4)
    own.eval()
    with torch.no_grad():
        first, second = own(batch), own(batch)
        right = plain(batch)
    error = max(float((a - b).abs().max()) for run in (first, second) for a, b in zip(run, right, strict=True))
    return {"error": error, "memory": tables.memory(), "whole": sum(w.numel() * 4 for w in plain.parameters())}


def stale(rank) -> dict:
    """A copy that is changed and freed without `sync` is lost, as after a lookup."""
    tables = shard_tables(model(), meshes(rank.world_size)["v3"], "v3", optimizer="sgd")
    before = tables.gather()
    with tables.whole():
        for _, _, _, weight in tables.local_shards():
            weight.add_(1.0)
    after = tables.gather()
    return {name: torch.equal(before[name], after[name]) for name in before}


def refused(rank) -> dict[str, str]:
    """Messages of everything that must stop before a collective, so that no rank waits for another."""
    world, two = rank.world_size, meshes(rank.world_size)["v2"]

    def shard(generation="v2", mesh=two, made=None, **options):
        shard_tables(made or model(), mesh, generation, **options)

    attempts = {
        "generation": lambda: shard("v4"),
        "optimizer": lambda: shard(optimizer="adam"),
        "strategy": lambda: shard("v3", strategy="torchrec"),
        "scheme": lambda: shard(scheme="column"),
        "copies": lambda: shard("v1"),
        "ranks": lambda: shard("v2", Mesh(2 * world, 2 * world, model_parallel=world)),
        "tables": lambda: shard(made=nn.ModuleDict({"x": nn.Linear(2, 2)})),
        "root": lambda: shard(made=model().bags),
        "id": lambda: keyed({"t": 10}, 4, (0,)) and checked_kjt(
            ["t"], torch.tensor([9, 10 if rank.rank == 1 else 8]), torch.tensor([1, 1]), sizes={"t": 10}
        ),
        "lengths": lambda: checked_kjt(["p", "q", "r"], torch.arange(8), torch.ones(8, dtype=torch.int64)),
    }  # fmt: skip
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def on_bench_tables(rank, names=("v1", "v2", "v3")) -> dict:
    """The check of the benchmark for every generation; and with tables drawn by their shards, what each rank holds."""
    from gem.bench import sparse as bench

    job = SimpleNamespace(rank=rank)
    errors = {name: bench.check(job, name) for name in names}
    tables = bench.TableSet(count=6, rows=3000, dim=16, batch=16, mean_ids=3.0)
    drawn = {}
    for name in ("v1", "v2", "v3"):
        own = bench.Bags(tables, "meta")
        sharded = shard_tables(own, bench.mesh_of(name, rank.world_size), name, device=rank.device, lr=0.01)
        batch = bench.batch_of(tables, rank.rank, 0, rank.device)
        target = bench.target_of(tables, rank.rank, 0, rank.device)
        bench.one_step(own, sharded, batch, target, rank.world_size)
        ids = bench.ids_here(sharded, tables, rank.rank, rank.world_size)
        drawn[name] = {"ids": ids, "memory": sharded.memory(), "tables": sharded.gather()}
    return {"errors": errors, "drawn": drawn}


def on_gpus(rank) -> dict:
    """On NCCL: V1 with uneven batches, and the check of the benchmark for every generation."""
    world = rank.world_size
    common = {"generation": "v1", "mesh": Mesh(world, world), "optimizer": "sgd"}
    found = {
        "row": _summary(*train(rank, sizes=[5, 3][:world], scheme="row", **common)),
        "auto": _summary(*train(rank, sizes=[4] * world, scheme="auto", **common)),
    }
    return found | on_bench_tables(rank, ("v1", "v2", "v3", "v3_torchrec"))
