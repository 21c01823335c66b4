"""Dense parameters over many ranks: FSDP shard x DDP replica x expert, by FSDP2 over a DeviceMesh.

The source's three dense dimensions. Parameters, gradients and optimiser states are sharded over a shard group; replica
groups hold the same shards and all-reduce a shard's gradient alone ("2D FSDP"); the experts of a layer live on the
ranks of an expert group inside the shard group, each sharded over the rest of it (gem/parallel/experts.py). All-gathers
are issued `prefetch` units ahead of their use, forward and backward.

`shard` is put on last, from outside: precision -> compile -> checkpointing -> parallelism (gem/compile.py). It takes a
model that every rank has built alike and leaves on each rank its part alone.

Gradients: a rank differentiates `rank_loss`, its sum x ranks over the count of all ranks; FSDP sums over ranks, and the
shard's owner divides by the ranks once (gem/parallel/optim.py). So a label weighs the same on whatever rank it falls,
also in an uneven last batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gem import compile as compilation
from gem.config import Checkpointing
from gem.heads import normalised_loss
from gem.model import GEM
from gem.parallel import low_gather
from gem.parallel.experts import COMBINES, ExpertParallel
from gem.parallel.mesh import Mesh

TABLES = ("replicated", "sharded")
GATHERS = ("plain", *low_gather.SCHEMES)


@dataclass(frozen=True)
class Options:
    """How the dense part communicates.

    prefetch: units whose parameters are gathered ahead of their use; 0 gathers each when it is needed. gather: "plain"
    sends parameters in their compute dtype, "float8" and "mx" quantise each shard first. combine: how experts' outputs
    return, see ExpertParallel. tables: "replicated" keeps every table on every rank and averages its gradients;
    "sharded" leaves tables alone, for gem.parallel.sparse.
    """

    prefetch: int = 1
    gather: str = "plain"
    combine: str = "reduce_scatter"
    tables: str = "replicated"

    def __post_init__(self):
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"dense: prefetch is {self.prefetch!r}; allowed: a whole number of at least 0")
        for name, allowed in (("gather", GATHERS), ("combine", COMBINES), ("tables", TABLES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"dense: {name} is {value!r}; allowed: {', '.join(allowed)}")


@dataclass
class Dense:
    """What `shard` made of a model. model: the same object. units: modules that gather their parameters in one
    collective, in forward order. changes: weights whose gather is low, or why not."""

    model: GEM
    plan: Mesh
    options: Options
    units: list[FSDPModule]
    experts: list[ExpertParallel]
    changes: list[low_gather.Change] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.plan.gpus

    def set_rows(self, rows: Sequence[int] | None) -> None:
        """Samples of every rank of the job in the coming steps; None: expert groups ask each other in every layer."""
        members = self.plan.group("expert").ranks(dist.get_rank())
        for expert in self.experts:
            expert.rows = None if rows is None else [int(rows[rank]) for rank in members]

    def bytes_held(self) -> dict[str, int]:
        """Bytes of parameters on this rank: experts, the other dense parameters, tables."""
        held = {"experts": 0, "dense": 0, "tables": 0}
        tables = set(self.model.table_parameters())
        for name, parameter in self.model.named_parameters():
            part = "tables" if name in tables else "experts" if ".experts.experts." in name else "dense"
            held[part] += local(parameter).nbytes
        return held


def shard(
    model: GEM, plan: Mesh, device: torch.device, options: Options | None = None, *, dtype: str = "float32"
) -> Dense:
    """Shard the dense parameters of `model` over the ranks of `plan`, in place. Collective: every rank calls it.

    device: where parameters live and collectives run. dtype: "bfloat16" gathers parameters in bfloat16 and reduces
    gradients in float32; the shards themselves stay float32. ValueError before any work if the process group has
    another number of ranks, or experts do not divide over the expert group.
    """
    options = options or Options()
    _check(model, plan, dtype)
    meshes = open_meshes(plan, device.type)
    tables = set(model.table_parameters().values())
    result = Dense(model, plan, options, [], [])

    def unit(module: nn.Module, mesh: DeviceMesh, name: str, reshard: bool = True) -> None:
        result.changes += shard_unit(module, mesh, options, dtype, ignored=tables, name=name, reshard=reshard)
        result.units.append(module)

    unit(model.features, meshes.dense, "features")
    for index, layer in enumerate(model.layers):
        at = f"layers.{index}"
        if plan.expert > 1:
            experts = ExpertParallel(layer.interaction.experts.experts, meshes.expert_group, options.combine)
            layer.interaction.experts.experts = experts
            result.experts.append(experts)
            unit(experts, meshes.expert_parameters, f"{at}.interaction.experts.experts")
        unit(layer, meshes.dense, at)
        if plan.expert > 1:  # the layer gathers before the experts inside it do
            result.units[-2:] = result.units[:-3:-1]
    unit(model.heads, meshes.dense, "heads", reshard=False)  # the backward starts with them
    # what is left (embeddings of events) is small and needed first and last: it stays gathered
    result.changes += shard_unit(model, meshes.dense, options, dtype, ignored=tables, reshard=False)
    _graphs_inside_units(model, result.units, model.config.implementations.compile)
    _prefetch(model, result.units, options.prefetch)
    if options.tables == "replicated" and plan.gpus > 1:
        for table in tables:
            table.register_hook(_average)
    return result


@dataclass(frozen=True)
class Meshes:
    """dense: (replica, shard), or (shard) without replicas. expert_parameters: the same for one expert's parameters.
    expert_group: ranks that hold different experts of a layer."""

    dense: DeviceMesh
    expert_parameters: DeviceMesh | None = None
    expert_group: dist.ProcessGroup | None = None


def open_meshes(plan: Mesh, device_type: str) -> Meshes:
    """Process groups of a plan; members are `plan.group(name).ranks(rank)`. Collective."""
    dense = init_device_mesh(device_type, (plan.replica, plan.shard), mesh_dim_names=("replica", "shard"))
    dense = dense if plan.replica > 1 else dense["shard"]
    if plan.expert == 1:
        return Meshes(dense)
    sizes = (plan.replica, plan.shard // plan.expert, plan.expert)
    whole = init_device_mesh(device_type, sizes, mesh_dim_names=("replica", "expert_shard", "expert"))
    parameters = whole["replica", "expert_shard"] if plan.replica > 1 else whole["expert_shard"]
    return Meshes(dense, parameters, whole.get_group("expert"))


def shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    options: Options,
    dtype: str,
    *,
    ignored: set[nn.Parameter] | None = None,
    name: str = "",
    reshard: bool = True,
) -> list[low_gather.Change]:
    """Make `module` a unit of FSDP2: its parameters that no unit inside has are gathered and scattered together.

    Gradients are summed over the mesh. Returns the weights whose gather is low, or why not.
    """
    # FSDP2 warns of outputs that are views, since an in-place op on one would lose its hook; the model has no such op
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    changes = []
    if options.gather != "plain":
        prefix = f"{name}." if name else ""
        changes = low_gather.wrap(module, options.gather, mesh.size(mesh.ndim - 1), prefix)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored, reshard_after_forward=reshard)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum
    return changes


def rank_loss(sums: Mapping[str, Tensor], counts: Mapping[str, Tensor | float], ranks: int) -> Tensor:
    """What a rank differentiates: sum over tasks of its loss sum x ranks over the count of all ranks.

    sums: task -> weighted loss sum of this rank. counts: task -> weights summed over all ranks. The mean over ranks is
    the loss of the joined batch (a mean of the ranks' means would weigh a label by the size of its rank's part).
    """
    return normalised_loss(sums, counts) * ranks


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient as a plain tensor on the same storage."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return low_gather.plain(part.detach())


def _average(grad: Tensor) -> Tensor:
    """Gradient of a replicated table, before its optimiser sees it in the backward pass."""
    grad = grad.contiguous()
    dist.all_reduce(grad)
    return grad.div_(dist.get_world_size())


def _check(model: GEM, plan: Mesh, dtype: str) -> None:
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dense: dtype {dtype!r}; allowed: float32, bfloat16")
    there = dist.get_world_size() if dist.is_initialized() else "no"
    if there != plan.gpus:
        raise ValueError(f"dense: a mesh of {plan.gpus} ranks in a process group of {there} ranks; allowed: as many")
    count = len(model.layers[0].interaction.experts.experts)
    if count % plan.expert:
        raise ValueError(f"dense: {count} experts over an expert group of {plan.expert}; allowed: a divisor of {count}")
    mode, backend = model.config.toggles.checkpointing, model.config.implementations.compile
    # regions are planned from each rank's own times: ranks that recompute different experts would wait for each other
    if plan.expert > 1 and (mode is Checkpointing.REGION or (mode is Checkpointing.UNIFORM and backend != "eager")):
        raise ValueError(
            f"dense: checkpointing {mode.value} under compile {backend} with experts on other ranks; allowed: none, or "
            "uniform without a compiler"
        )
    if isinstance(model, FSDPModule):
        raise ValueError("dense: the model is sharded already; allowed: once")


def _graphs_inside_units(model: GEM, units: list[FSDPModule], backend: str) -> None:
    """Experts that are elsewhere are reached by collectives, so the interaction around them is no graph: each expert
    is. FSDP's own hooks run around a unit's forward, outside of all graphs."""
    if backend == "eager":
        return
    for layer in model.layers:
        if any(isinstance(module, ExpertParallel) for module in layer.interaction.modules()):
            compilation.leave_plain(layer.interaction)
    for unit in units:
        if isinstance(unit, ExpertParallel):
            for expert in unit.children():
                compilation.compile_module(expert, backend)
    # FSDP marks its modules for dynamo, which then takes their whole numbers (heads, widths) for symbols under
    # dynamic=True; gathered parameters are ordinary tensors inside a unit, so the mark is not needed there
    for module in model.modules():
        module._is_fsdp_managed_module = False


def _prefetch(model: GEM, units: list[FSDPModule], depth: int) -> None:
    if depth == 0:
        return
    model.set_modules_to_forward_prefetch(units[:depth])
    for place, module in enumerate(units):
        module.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + depth])
        before = units[max(0, place - depth) : place]
        module.set_modules_to_backward_prefetch(before[::-1])
