"""Embedding tables over many ranks: three generations of sparse parallelism behind one switch, through TorchRec.

V1  one-dimensional: every table is sharded over all ranks (DistributedModelParallel).
V2  two-dimensional: tables are sharded over a model-parallel group; every such group has a copy, and the replicas of a
    shard are averaged after each step (DMPCollection).
V3  fully sharded two-dimensional: as V2, but the replicas of a shard hold a part of it each between uses.

The source's order of V3, and ours: forward = all-gather the shard over its replicas, exchange ids, look up, free the
copy, exchange embeddings; backward = all-gather again, exchange gradients, update, reduce-scatter the parameters. So
every lookup sees the updates of all replicas, and V3 computes what V2 computes, bit for bit on two replicas.

`strategy="torchrec"` runs DMPCollection's own FULLY_SHARDED instead (CUDA only). It reduce-scatters after the lookup
and gathers before the backward pass: one collective fewer, but from the backward pass to the next lookup a rank holds
the whole shard, a lookup misses the last update that other replicas made, and the optimiser's state is not averaged.

Gradients: TorchRec divides table gradients by the size of the group that shards the tables, and replicas are averaged,
so the update is that of the mean of the ranks' losses. A rank therefore differentiates its loss sum * ranks / samples
of all ranks (gem.parallel.dense.rank_loss), and a short batch weighs no more than its samples. Averaging replicas is
exact for a linear update (SGD); row-wise Adagrad keeps its state per group and averages it, so V2 and V3 take other
steps there than V1, by construction.

Uneven batches: every rank has at least one sample (TorchRec cannot exchange histories of none; a sample without ids
will do), and on a CPU their tables are placed whole (scheme "table"), since gloo cannot scatter pooled rows unevenly.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan, ShardingStrategy
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from gem.parallel.mesh import Mesh
from gem.parallel.placement import Placement, plan_module, remap
from gem.parallel.replica_shards import ReplicaShards

COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)
OPTIMIZERS = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}
STRATEGIES = ("source", "torchrec")


class Generation(enum.Enum):
    """The switch. The values are what records call them."""

    V1 = "v1"
    V2 = "v2"
    V3 = "v3"


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: tables now, at most during a step, and the optimiser's state."""

    tables: int
    peak_tables: int
    optimizer: int


class SparseTables:
    """The sharded tables of a model, made by `shard_tables`. Call `sync()` after every backward pass."""

    def __init__(self, model, dmp, generation, mesh, placements, replica_group, strategy):
        self.model, self.dmp, self.generation, self.mesh = model, dmp, generation, mesh
        self.placements: dict[str, Placement] = placements
        self.replica_group, self.strategy = replica_group, strategy
        self.kernels = find_kernels(dmp)
        self.shards = [ReplicaShards(k, replica_group) for k in self.kernels] if self._own_shards else []

    @property
    def _own_shards(self) -> bool:
        return self.generation is Generation.V3 and self.strategy == "source"

    def sync(self) -> None:
        """After a backward pass, which has updated this rank's tables: what the other replicas need to know.

        V1: nothing. V2: replicas are averaged. V3: the parameters are reduce-scattered over the replicas and the copy
        is freed. A collective call: every rank makes it, also one whose batch was empty.
        """
        if self.generation is Generation.V1 or self.strategy == "torchrec":
            return
        if self.generation is Generation.V2 and isinstance(self.dmp, DMPCollection):
            self.dmp.sync()
            return
        for shard in self.shards:
            shard.scatter()
        tensors = [state for kernel in self.kernels for state in optimizer_states(kernel)]
        if self.generation is Generation.V2:
            tensors += [w for kernel in self.kernels for w in kernel.emb_module.split_embedding_weights()]
        for tensor in tensors:
            average(tensor, self.replica_group)

    def memory(self) -> Memory:
        """What this rank holds, counted from storages."""
        states = sum(state.nbytes for kernel in self.kernels for state in optimizer_states(kernel))
        if self.shards:
            held, peak = (sum(getattr(shard, name) for shard in self.shards) for name in ("bytes_held", "bytes_peak"))
            return Memory(held, peak, states)
        if self.strategy == "torchrec":
            held, peak = zip(*map(torchrec_bytes, self.kernels), strict=True)
            return Memory(sum(held), sum(peak), states)
        held = sum(flat_weights(kernel).untyped_storage().nbytes() for kernel in self.kernels)
        return Memory(held, held, states)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block every rank holds its whole shards, for checkpoints and comparisons. Collective."""
        for shard in self.shards:
            shard.gather()
        try:
            yield
        finally:
            for shard in self.shards:
                shard.release()

    @torch.no_grad()
    def load(self, tables: dict[str, torch.Tensor]) -> None:
        """Copy whole tables, name -> [rows, dim], into the local shards. Every rank of a replica group loads alike."""
        with self.whole():
            for name, rows, columns, weight in self.local_shards():
                if name not in tables:
                    raise ValueError(f"sparse: no weights for table {name!r}; given: {', '.join(tables)}")
                weight.copy_(tables[name][rows, columns])
            for shard in self.shards:
                shard.keep()

    @torch.no_grad()
    def gather(self) -> dict[str, torch.Tensor]:
        """Whole tables on every rank, name -> [rows, dim] on the CPU. For tests and small models. Collective."""
        with self.whole():
            local = [(name, rows, cols, w.detach().cpu().clone()) for name, rows, cols, w in self.local_shards()]
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, local)
        found: dict[str, torch.Tensor] = {}
        for name, rows, columns, weight in (item for rank in everyone for item in rank):
            placement = self.placements[name]
            table = found.setdefault(name, torch.full((placement.rows, placement.dim), float("nan")))
            table[rows, columns] = weight
        return found

    def local_shards(self) -> Iterator[tuple[str, slice, slice, torch.Tensor]]:
        """(table, rows, columns, weights) of every shard on this rank; weights are views into the kernels' memory."""
        for kernel in self.kernels:
            views = kernel.emb_module.split_embedding_weights()
            for config, weight in zip(kernel.config.embedding_tables, views, strict=True):
                local = config.local_metadata
                row, column = (0, 0) if local is None else local.shard_offsets
                yield config.name, slice(row, row + weight.shape[0]), slice(column, column + weight.shape[1]), weight

    def bytes_by_rank(self) -> list[int]:
        """Table bytes that each rank of a model-parallel group is given, before V3 splits them again."""
        totals = [0] * self.mesh.model_parallel
        for placement in self.placements.values():
            for rank, rows in placement.rows_by_rank().items():
                totals[rank] += rows * placement.dim * 4
        return totals


def shard_tables(
    model: nn.Module,
    mesh: Mesh,
    generation: Generation | str,
    *,
    device: torch.device | str = "cpu",
    optimizer: str = "rowwise_adagrad",
    lr: float = 0.1,
    eps: float = 1e-8,
    scheme: str = "auto",
    strategy: str = "source",
) -> SparseTables:
    """Replace every EmbeddingBagCollection and EmbeddingCollection inside `model` by its sharded form, in place.

    mesh: `mesh.model_parallel` ranks share a copy; V1 needs all of them, V2 and V3 a divisor. optimizer: runs inside
    the backward pass; "rowwise_adagrad" or, on a CPU and for V1, "sgd". scheme: where tables go, see
    gem.parallel.placement. strategy: of V3, see above. Weights keep their values: each rank copies its part of what
    `model` held; tables on the meta device, too large for one rank, are drawn shard by shard instead. Pooled features
    come out in the order of the tables, as from the plain collection. Dense parameters are left alone. Needs a process
    group of mesh.gpus ranks.

    ValueError before any work: unknown names, a mesh that does not fit the generation or the process group, no tables.
    """
    generation, device = Generation(generation), torch.device(device)
    _check(model, mesh, generation, device, optimizer, strategy)
    found = {path: module for path, module in model.named_modules() if isinstance(module, COLLECTIONS)}
    plans, placements = {}, {}
    for path, module in found.items():
        plans[path], placed = plan_module(module, mesh.model_parallel, device.type, scheme)
        placements |= placed
    named = [(config.name, _table(module, config.name)) for module in found.values() for config in _configs(module)]
    fresh = [name for name, weight in named if weight.is_meta]
    initial = {name: weight.detach().cpu().clone() for name, weight in named if not weight.is_meta}
    orders = {path: feature_order(module) for path, module in found.items() if isinstance(module, COLLECTIONS[0])}
    fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": lr, "eps": eps}
    sharders = [EmbeddingBagCollectionSharder(fused_params=dict(fused)), EmbeddingCollectionSharder(dict(fused))]
    plan, group = ShardingPlan(plans), None
    common = {"sharders": sharders, "init_data_parallel": False, "init_parameters": False}
    if device.type == "cpu":
        remap(plan, mesh.group("model_parallel").ranks(dist.get_rank()), device.type)
    if generation is Generation.V1:
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        dmp = DistributedModelParallel(model, env, device, plan, **common)
    elif device.type == "cuda":
        fully = generation is Generation.V3 and strategy == "torchrec"
        dmp = DMPCollection(
            model,
            device,
            plan,
            mesh.gpus,
            mesh.model_parallel,
            dist.group.WORLD,
            sharding_strategy=ShardingStrategy.FULLY_SHARDED if fully else ShardingStrategy.DEFAULT,
            **common,
        )
        group = dmp._default_ctx.replica_pg
    else:
        # DMPCollection accepts GPUs only; on a CPU the same sharded modules run in the same two-dimensional
        # environment, and `sync` does the averaging.
        env = _environment(mesh, device)
        dmp, group = DistributedModelParallel(model, env, device, plan, **common), env.replica_pg
    for path, names in orders.items():
        model.get_submodule(path).register_forward_hook(functools.partial(_in_order, names))
    if fresh and group is not None:  # each replica has drawn its own
        for kernel in find_kernels(dmp):
            average(flat_weights(kernel).detach(), group)
    tables = SparseTables(model, dmp, generation, mesh, placements, group, strategy)
    if not fresh:
        tables.load(initial)
    return tables


def feature_order(bags: EmbeddingBagCollection) -> list[str]:
    """Features in the order in which a plain collection puts their columns."""
    return [name for config in bags.embedding_bag_configs() for name in config.feature_names]


def _in_order(names: list[str], module: nn.Module, inputs, output) -> KeyedTensor:
    """Pooled features by table: a sharded collection groups them by kernel instead, which would permute a model's
    columns."""
    keyed = output.wait() if hasattr(output, "wait") else output
    if list(keyed.keys()) == names:
        return keyed
    parts = keyed.to_dict()
    lengths = [parts[name].shape[1] for name in names]
    return KeyedTensor(keys=names, length_per_key=lengths, values=torch.cat([parts[name] for name in names], 1))


def find_kernels(module: nn.Module) -> list[nn.Module]:
    """TorchRec's embedding kernels in a sharded model, each once, in a fixed order."""
    found: dict[int, nn.Module] = {}

    def visit(item: nn.Module) -> None:
        if hasattr(item, "emb_module") and hasattr(item, "config"):
            found[id(item)] = item
            return
        for lookup in getattr(item, "_lookups", ()):  # not registered as children
            visit(getattr(lookup, "module", lookup))
        for child in item.children():
            visit(child)

    visit(module)
    return list(found.values())


def flat_weights(kernel: nn.Module) -> torch.Tensor:
    """The one tensor in which a kernel keeps all its tables, on the GPU or the CPU."""
    emb = kernel.emb_module
    return emb.weights_host if emb.weights_host.numel() else emb.weights_dev


def torchrec_bytes(kernel: nn.Module) -> tuple[int, int]:
    """(now, at most in a step) of a kernel under TorchRec's FULLY_SHARDED: its whole shard, and its part of it."""
    whole, part = kernel._unsharded_param, kernel._shard_buf
    held = whole.untyped_storage().nbytes() + (0 if part is None else part.untyped_storage().nbytes())
    return held, whole.numel() * whole.element_size() + kernel._shard_buf_nbytes


def optimizer_states(kernel: nn.Module) -> list[torch.Tensor]:
    """Float state of the kernel's optimiser that replicas must share: none for SGD."""
    if kernel.emb_module.optimizer == EmbOptimType.EXACT_SGD:
        return []
    return [state["sum"] for state in kernel.emb_module.get_optimizer_state()]


def average(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Mean over a group, in place. gloo has no mean: it sums, then divides."""
    if tensor.is_cuda:
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    else:
        dist.all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))


def _environment(mesh: Mesh, device: torch.device) -> ShardingEnv2D:
    groups = [mesh.group("model_parallel").ranks(first) for first in range(mesh.table_replicas)]
    device_mesh = DeviceMesh(device.type, groups, mesh_dim_names=("replicate", "shard"))
    return ShardingEnv2D(
        sharding_pg=device_mesh.get_group("shard"),
        replica_pg=device_mesh.get_group("replicate"),
        global_pg=dist.group.WORLD,
        device_mesh=device_mesh,
    )


def _check(model, mesh: Mesh, generation: Generation, device: torch.device, optimizer: str, strategy: str) -> None:
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"sparse: optimizer {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")
    if strategy not in STRATEGIES:
        raise ValueError(f"sparse: strategy {strategy!r}; allowed: {', '.join(STRATEGIES)}")
    if strategy == "torchrec" and (generation is not Generation.V3 or device.type != "cuda"):
        raise ValueError(f"sparse: strategy torchrec with {generation.value} on {device.type}; allowed: v3 on cuda")
    if optimizer == "sgd" and generation is not Generation.V1 and device.type == "cuda":
        raise ValueError(
            "sparse: optimizer sgd with DMPCollection, which averages Adagrad's state; allowed: rowwise_adagrad"
        )
    if generation is Generation.V1 and mesh.table_replicas != 1:
        raise ValueError(
            f"sparse: v1 with model_parallel {mesh.model_parallel}; allowed: all {mesh.gpus} ranks (one copy)"
        )
    if not dist.is_initialized() or dist.get_world_size() != mesh.gpus:
        ranks = dist.get_world_size() if dist.is_initialized() else "no"
        raise ValueError(f"sparse: a mesh of {mesh.gpus} ranks in a process group of {ranks} ranks; allowed: as many")
    if isinstance(model, COLLECTIONS):
        raise ValueError("sparse: the model is itself a table collection; allowed: a module that contains it")
    tables = [module for module in model.modules() if isinstance(module, COLLECTIONS)]
    if len({_table(m, c.name).is_meta for m in tables for c in _configs(m)}) > 1:
        raise ValueError("sparse: some tables are on the meta device, some are not; allowed: all or none")
    if not tables:
        raise ValueError("sparse: the model has no tables; allowed: EmbeddingBagCollection, EmbeddingCollection")


def _configs(module: nn.Module):
    bags = isinstance(module, EmbeddingBagCollection)
    return module.embedding_bag_configs() if bags else module.embedding_configs()


def _table(module: nn.Module, name: str) -> torch.Tensor:
    inner = module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings
    return inner[name].weight
