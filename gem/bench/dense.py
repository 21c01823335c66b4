"""Dense parallelism on the GPUs of one host: gathers of parameters, and experts on their ranks (experiment dense).

    python -m gem.bench.dense --tier gpu2

gathers: every unit of the preset is gathered and freed, as FSDP does it in a step, in bfloat16 and in 8 bits: impl
fsdp2 quantises in every gather, impl prequantised sends shards that were quantised behind the optimiser's step, which
subject prequantise_<scheme> times. The gathered weights are first compared with the masters. experts: the experts of
one layer, forward and backward, with every expert on every rank (parameters gathered) and with an expert a rank
(activations gathered), over the local batch. Outputs and gradients of both are first compared with each other. What is
wrong gets no time but status failed.

comm_bytes: what a rank sends. Nothing is hidden here: times are of communication and compute in a row.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from gem import config as configuration
from gem.bench import ranks
from gem.bench.ranks import Job, add_time
from gem.config import Config
from gem.experts import Experts
from gem.model import GEM
from gem.parallel import dense, low_gather
from gem.parallel.experts import ExpertParallel
from gem.parallel.mesh import Mesh
from gem.summary import synthetic_schema

EXPERIMENT = "dense"
SOURCES = (
    "gem/bench/dense.py",
    "gem/bench/ranks.py",
    "gem/parallel/dense.py",
    "gem/parallel/experts.py",
    "gem/parallel/low_gather.py",
    "gem/parallel/fp8_rows.py",
    "gem/experts.py",
    "gem/precision.py",
    "kernels/mxfp8",
)
BATCHES = (64, 256, 1024, 4096)
REPEATS = 10
GATHER_LIMIT = {"plain": 2**-8, "float8": 0.06, "mx": 0.06}  # relative error of a weight: bf16, or 3 bits of mantissa
OUTPUT_LIMIT = 0.02  # bfloat16, and sums in another order
VARIANT = "full"


def gathers(job: Job) -> None:
    tier = configuration.load_tier(job.tier)
    config = configuration.load(VARIANT, job.tier)
    schema = synthetic_schema(tier["data"])
    world = job.rank.world_size
    run = job.open_run(EXPERIMENT, "gathers", SOURCES, {"preset": config.preset, "variant": VARIANT, "world": world})
    for scheme in dense.GATHERS:
        torch.manual_seed(0)
        with torch.device(job.rank.device):
            model = GEM(config, schema, job.rank.device)
        model.config = _eager(config)
        wanted = {name: value.detach().bfloat16() for name, value in model.dense_parameters().items()}
        sharded = dense.shard(
            model, Mesh(world, world), job.rank.device, dense.Options(prefetch=0, gather=scheme), dtype="bfloat16"
        )
        row = {"case": config.preset, "subject": f"gather_{scheme}", "impl": "fsdp2", "phase": "step"}
        error, sent = gathered_error(sharded, wanted), sent_bytes(sharded)

        def call(units=sharded.units):
            for unit in units:
                unit.unshard()
                unit.reshard()

        worst = max(job.gathered(error))
        note = f"{world} GPUs, {len(sharded.units)} units, {sum(c.kept is None for c in sharded.changes)} weights low"
        run.add(**row, metric="rel_err", p50=worst, note="gathered weights against the float32 masters, largest")
        run.add(**row, metric="correct", p50=float(worst <= GATHER_LIMIT[scheme]))
        if worst <= GATHER_LIMIT[scheme]:
            add_time(run, row, job.time(call, REPEATS), note)
            run.add(**row, metric="comm_bytes", p50=job.largest(sent), note=note)
            if scheme != "plain":
                prequantised(job, run, row, sharded, call, scheme)
        else:
            run.add(**row, metric="time_ms", status="failed", note=f"error {worst:.3g}")
        del model, sharded, call, wanted
        _release()
    if job.rank.is_first:
        run.write()


def prequantised(job: Job, run, row: dict, sharded: dense.Dense, call, scheme: str) -> None:
    """Times of quantising all shards once, and of the same gathers then."""
    parameters = list(sharded.model.dense_parameters().values())
    once = partial(low_gather.prequantise, parameters)
    add_time(run, row | {"subject": f"prequantise_{scheme}"}, job.time(once, REPEATS), "once a step, all units")
    add_time(run, row | {"impl": "prequantised"}, job.time(call, REPEATS), "shards were quantised before")


def gathered_error(sharded: dense.Dense, wanted: dict[str, torch.Tensor]) -> float:
    """Largest relative error of the weights that a rank sees after the gather."""
    worst = 0.0
    for unit in sharded.units:
        unit.unshard()
        prefix = next(name for name, module in sharded.model.named_modules() if module is unit)
        for name, value in unit.named_parameters():
            whole = f"{prefix}.{name}"
            if whole in wanted and value.shape == wanted[whole].shape:
                gap = (value.detach().float() - wanted[whole].float()).norm() / (wanted[whole].float().norm() + 1e-12)
                worst = max(worst, float(gap))
        unit.reshard()
    return worst


def sent_bytes(sharded: dense.Dense) -> float:
    """Bytes of one gather of all units that a rank sends: its shard, to every other rank."""
    tables, total = sharded.model.table_parameters(), 0
    for name, value in sharded.model.named_parameters():
        if name in tables or not hasattr(value, "to_local"):
            continue
        part = value.to_local()
        if isinstance(part, low_gather.LowGather):
            total += sum(item.nbytes for item in part.fsdp_pre_all_gather(None, None, None, None, None)[0])
        else:
            total += 2 * part.numel()  # bfloat16
    return float(total * (sharded.ranks - 1))


class Layer(nn.Module):
    """The experts of one layer over given tokens."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.experts(x, tokens)


def experts(job: Job) -> None:
    config = configuration.load(VARIANT, job.tier)
    model, world, device = config.model, job.rank.world_size, job.rank.device
    if model.num_experts % world:
        raise ValueError(f"dense: {model.num_experts} experts on {world} GPUs; allowed: a divisor")
    num_in = model.num_tokens + model.num_summary + len(model.events) * model.num_seeds
    torch.manual_seed(0)
    plain = Experts(model, num_in).to(device)
    layers = {"replicated": shard_layer(copy.deepcopy(plain), world, device, "")}
    for combine in ("reduce_scatter", "all_to_all"):
        layers[combine] = shard_layer(copy.deepcopy(plain), world, device, combine)
    run = job.open_run(EXPERIMENT, "experts", SOURCES, {"preset": config.preset, "world": world, "batches": BATCHES})
    for batch in BATCHES:
        torch.manual_seed(1 + job.rank.rank)
        x = torch.randn(batch, model.num_tokens, model.width, device=device, dtype=torch.bfloat16)
        tokens = torch.randn(batch, num_in, model.width, device=device, dtype=torch.bfloat16)
        wanted = None
        for name, layer in layers.items():
            inputs = x.detach().requires_grad_(), tokens.detach().requires_grad_()

            def call(layer=layer, inputs=inputs):
                with torch.autocast(device.type, torch.bfloat16):
                    out = layer(*inputs)
                out.sum().backward()
                return out

            out = call().detach()
            found = (out.float(), inputs[1].grad.float())
            wanted = wanted or found
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
            worst = max(job.gathered(error))
            subject, impl = ("experts_replicated", "fsdp2") if name == "replicated" else ("experts_parallel", name)
            row = {"case": f"batch{batch}", "subject": subject, "impl": impl, "phase": "step"}
            run.add(**row, metric="correct", p50=float(worst <= OUTPUT_LIMIT), note=f"error {worst:.2g}")
            if worst > OUTPUT_LIMIT:
                run.add(**row, metric="time_ms", status="failed", note=f"differs from replicated by {worst:.3g}")
                continue
            add_time(run, row, job.time(call, REPEATS), f"{world} GPUs, preset {config.preset}, local batch {batch}")
            sent = layer_bytes(plain, name, world, batch, num_in, model)
            run.add(**row, metric="comm_bytes", p50=sent, note="bf16 parameters and activations, float32 gradients")
            held = sum(dense.local(value).nbytes for value in layer.parameters())
            run.add(**row, metric="param_bytes", p50=job.largest(held))
    if job.rank.is_first:
        run.write()
    del layers, plain
    _release()


def shard_layer(module: Experts, world: int, device: torch.device, combine: str) -> Layer:
    """One layer's experts on the ranks of a job: gathered on each (combine ""), or an expert a rank."""
    plan = Mesh(world, world, expert=world if combine else 1)
    meshes, options = dense.open_meshes(plan, device.type), dense.Options()
    layer = Layer(module)
    if combine:
        module.experts = ExpertParallel(module.experts, meshes.expert_group, combine)
        dense.shard_unit(module.experts, meshes.expert_parameters, options, "bfloat16")
    dense.shard_unit(layer, meshes.dense, options, "bfloat16")
    return layer


def layer_bytes(plain: Experts, name: str, world: int, batch: int, num_in: int, model) -> float:
    """Bytes that a rank sends in forward and backward: parameters twice and gradients once, or activations and their
    gradients; a reduce-scatter carries every expert's place, an all-to-all its own."""
    others = world - 1
    own = sum(value.numel() for value in plain.norm.parameters())
    weights = sum(value.numel() for value in plain.experts.parameters())
    parameters = own + (weights if name == "replicated" else 0)
    total = others / world * parameters * (2 + 2 + 4)
    if name != "replicated":
        outputs = model.num_tokens if name == "reduce_scatter" else model.num_tokens / world
        total += others * batch * model.width * 2 * (2 * num_in + outputs)
        # backward of the outputs: gradients of all tokens are gathered, or each rank's own tokens sent to it
        total += others * batch * model.width * 2 * (model.num_tokens if name == "reduce_scatter" else outputs)
    return float(total)


def _eager(config: Config) -> Config:
    return dataclasses.replace(config, implementations=dataclasses.replace(config.implementations, compile="eager"))


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    dist.barrier()


PARTS = {"gathers": gathers, "experts": experts}


def main(argv: list[str] | None = None) -> int:
    return ranks.main("gem.bench.dense", __doc__.split("\n")[0], PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
