"""What a step computes and sends: FSDP units of a preset with FLOPs and parameters, loads of ranks, bytes of tables.

A layer is two FSDP units, its experts and the rest of it; the embedding before the layers and the heads behind them are
one each. Numbers are those of gem.summary, spread evenly over the layers of the preset.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.lengths import LengthLaw
from gem import balance
from gem.bench import sparse_model

VARIANT, TIER, BATCH = "full", "gpu", 4096  # of the summary
LAYER_MODULES = ("feed_forward", "self_attention", "pooling", "summary")
FOLLOWS_LENGTH = {"embedding", "feed_forward", "self_attention", "pooling"}
FILL, MAX_LENGTH, LENGTH_CV, QUADRATIC_SHARE = 0.29, 4096, 1.3, 0.5  # as in gem.bench.balance
SUB_BATCH = balance.SUB_BATCH


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers at once. params: count. flops: module -> forward FLOPs a sample. experts: whether expert
    parallelism splits it."""

    name: str
    params: float
    flops: dict[str, float]
    experts: bool = False


@dataclass(frozen=True)
class Workload:
    """Units in forward order. expert_inputs, expert_outputs: bytes a sample into and out of the experts of a layer, at
    `value_bytes` a number. lookup_bytes, id_bytes: a sample's looked-up vectors and ids."""

    preset: str
    units: tuple[Unit, ...]
    expert_inputs: float
    expert_outputs: float
    num_experts: int
    lookup_bytes: float
    id_bytes: float

    @property
    def params(self) -> float:
        return sum(unit.params for unit in self.units)

    @property
    def flops(self) -> float:
        """Forward FLOPs of a sample."""
        return sum(sum(unit.flops.values()) for unit in self.units)


@lru_cache
def of_preset(preset: str, value_bytes: float = 2.0) -> Workload:
    """Workload of a preset of gem.config; ValueError for an unknown one."""
    from gem import config as configuration
    from gem import summary
    from gem.counts import Counts

    config = configuration.load(VARIANT, TIER, preset)
    data = configuration.load_tier(TIER)["data"]
    schema = summary.synthetic_schema(data)
    lengths = summary.drawn_lengths(schema, data, BATCH)
    rows = {row.name: row for row in summary.summarise(config, schema, Counts(BATCH, lengths))}
    model = config.model
    tokens = sum(float(length.float().mean()) for length in lengths.values())
    tokens_in = model.num_tokens + model.num_summary + len(model.events) * model.num_seeds
    layers = model.num_layers
    units = [Unit("embedding", rows["embedding"].params, {"embedding": rows["embedding"].flops})]
    rest_params = sum(rows[name].params for name in LAYER_MODULES) / layers
    rest_flops = {name: rows[name].flops / layers for name in LAYER_MODULES}
    expert = rows["interaction"]
    for layer in range(layers):
        units.append(Unit(f"layer{layer}", rest_params, rest_flops))
        flops = {"interaction": expert.flops / layers}
        units.append(Unit(f"experts{layer}", expert.params / layers, flops, experts=True))
    units.append(Unit("heads", rows["heads"].params, {"heads": rows["heads"].flops}))
    return Workload(
        preset=preset,
        units=tuple(units),
        expert_inputs=tokens_in * model.width * value_bytes,
        expert_outputs=model.num_tokens * model.width * value_bytes,
        num_experts=model.num_experts,
        lookup_bytes=(tokens + len(schema.sparse)) * model.table_dim * value_bytes,
        id_bytes=8 * (tokens + len(schema.sparse)),
    )


@lru_cache
def rank_loads(ranks: int, batch: int, scheme: str, pool: int, steps: int = 8, seed: int = 0) -> np.ndarray:
    """Load a sample of every rank in every step, float64 [steps, ranks], mean about 1, from the law of gem.balance.

    scheme: none, local, bbs or global; pool in sub-batches of 128. Lengths are drawn from 2^18 samples of the law, so
    that 8,192 ranks take seconds. ValueError when sizes do not divide.
    """
    parts = max(1, batch // SUB_BATCH)
    rounds = pool // parts if scheme in ("local", "bbs") else 1
    balance.check_sizes(scheme, batch, pool, SUB_BATCH, max(1, rounds))
    steps = -(-steps // rounds) * rounds
    rng = np.random.default_rng([seed, batch])
    lengths = LengthLaw("lognormal", MAX_LENGTH, FILL, LENGTH_CV).sample(2**18, rng)
    table = balance.Cost.mixed(lengths, QUADRATIC_SHARE)(lengths).astype(np.float32)
    found = []
    chunk = max(1, balance.CHUNK_SAMPLES // (steps * batch)) if scheme != "global" else ranks
    for first in range(0, ranks, chunk):
        count = min(chunk, ranks - first)
        # a chunk's own seed: the loads of the first ranks do not depend on how many follow
        draw = np.random.default_rng([seed, batch, first])
        load = table[draw.integers(0, len(table), (chunk, steps * batch), dtype=np.uint32)][:count]
        if scheme == "none":
            found.append(load.reshape(count, steps, batch).sum(-1, dtype=np.float64).T)
        elif scheme == "bbs":
            found.append(bbs_loads(load, batch, pool))
        else:
            rows = balance.plan(load, batch, scheme, **({"pool": pool} if scheme == "local" else {}))
            found.append(balance.step_loads(load, rows))
    return np.concatenate(found, 1) / batch


def bbs_loads(load: np.ndarray, batch: int, pool: int) -> np.ndarray:
    """Loads [steps, ranks] of base-batch shuffling, from sums of sub-batches alone; order inside a pool is kept."""
    ranks = len(load)
    totals = load.reshape(ranks, -1, pool, SUB_BATCH).sum(-1, dtype=np.float64)
    merged = balance.merge_pairs(totals, pool * SUB_BATCH // batch)
    picked = np.take_along_axis(totals[..., None, :], merged, -1).sum(-1)  # [ranks, pools, batches]
    shuffled = np.random.default_rng(0).permuted(picked, axis=-1)
    return shuffled.reshape(ranks, -1).T


@dataclass(frozen=True)
class TableTraffic:
    """A generation of sparse parallelism at one size: bytes a GPU holds, bytes it moves inside its host a step, and
    the skew of lookups."""

    resident: float
    peak: float
    moved: float
    skew: float


@lru_cache
def table_traffic(generation: str, gpus: int, model_parallel: int) -> TableTraffic:
    """As gem.bench.sparse_model has it, for any number of GPUs: v1 one copy over all, v2 a copy a group, v3 each shard
    split over its replicas."""
    tables = sparse_model.standard_tables()
    total = float(tables.sizes.sum())
    ranks = gpus if generation == "v1" else model_parallel
    replicas = gpus // ranks
    shard, share = total / ranks, (replicas - 1) / replicas
    held = shard / replicas if generation == "v3" else shard
    peak = held + shard if generation == "v3" and replicas > 1 else held
    moves = {"v1": 0.0, "v2": 2 * share * shard, "v3": 3 * share * shard}[generation]
    return TableTraffic(held, peak, moves, sparse_model.placement_skew(tables.loads, tables.pieces, ranks))
