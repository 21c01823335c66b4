"""Order of the collectives in a step of expert parallelism and of fully sharded tables, from a profile (data_flow).

    python -m gem.bench.data_flow --tier smoke

Four processes on this host's CPU, over gloo: which collectives run, in which order and with how many bytes does not
depend on the device. Case experts: 2-way FSDP x 2-way expert parallelism, what the last layer's experts do. Case
tables_v3: one table collection, two ranks a copy, two replicas, each holding half of its shard.

Rows: subject = what travels, impl = the collective, phase; position = its place in the pass (messages of one collective
that follow each other share it), comm_bytes = what a rank sends. All ranks must show the same order.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem import config as configuration
from gem import record, workflow
from gem import train as single
from gem.bench.batches import MemorySplit, schema_of
from gem.cli import Parser
from gem.config import Config
from gem.parallel import dense, launch, sparse, trace, train
from gem.parallel.mesh import Mesh

EXPERIMENT, SOURCES = "data_flow", ("gem/bench/data_flow.py", "gem/parallel")
RANKS, VARIANT, TIER = 4, "full", "smoke"  # the smoke tier runs anywhere; the order is that of any size
BATCH, ROWS, TABLE_ROWS = 32, 64, 500
TABLES, DIM, IDS = 4, 16, 3
FLOAT_BYTES, ID_BYTES = 4, 8
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Flow:
    """One collective of a pass: phase "fwd" or "bwd", what travels, over which axis and how many ranks, bytes sent."""

    phase: str
    kind: str
    what: str
    axis: str
    ranks: int
    sent: float


def experts(rank: launch.Rank) -> list[Flow]:
    """A step's collectives of the last layer's experts, forward and backward apart."""
    config: Config = configuration.load(VARIANT, TIER)
    config = replace(config, train=replace(config.train, batch_size=BATCH))
    data = configuration.load_tier(TIER)["data"]
    split = MemorySplit(schema_of(data, TABLE_ROWS), ROWS, data)
    job = train.Job(Mesh(RANKS, RANKS, expert=2), dense.Options(prefetch=0))
    trainer = train.Trainer(config, single.Data(split, split), 0, rank, job, 2)
    rows = next(train.order(split, config, 0, False))
    parts = train.deal(rows, RANKS)
    batch = split.batch(parts[rank.rank])
    counts = {task: float(weights[rows].sum()) for task, weights in split.weights.items()}
    trainer.step(batch, parts, counts, 0)  # the first step also exchanges shapes
    losses: list[torch.Tensor] = []
    forward = trace.record(lambda: losses.append(trainer.loss(batch, counts)))
    backward = trace.record(losses[0].backward)
    unit = f"layers.{len(trainer.model.layers) - 1}.interaction.experts.experts"
    return [*_of_experts("fwd", forward, unit), *_of_experts("bwd", backward, unit)]


def _of_experts(phase: str, seen: list[trace.Collective], unit: str) -> list[Flow]:
    own = [item for item in seen if item.unit == unit or (item.what and not item.unit)]
    # between the gather of this layer's expert and what belongs to the next layer's or the one before
    start = next(index for index, item in enumerate(own) if item.unit == unit)
    length = 3 if phase == "fwd" else 4
    return [_flow_of(phase, item) for item in own[start : start + length]]


def _flow_of(phase: str, item: trace.Collective) -> Flow:
    names = {"parameters": "expert_parameters", "gradients": "parameter_gradients"}
    what, axis = names.get(item.what, item.what.replace(" ", "_")), "expert_shard" if item.unit else "expert"
    return Flow(phase, item.kind, what, axis, item.ranks, _sent(item, item.ranks))


class Lookup(nn.Module):
    """Tables alone, so that nothing else communicates."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=TABLE_ROWS, feature_names=[f"f{i}"])
                for i in range(TABLES)
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.tables(features).values().sum()


def tables(rank: launch.Rank) -> list[Flow]:
    """Collectives of V3: two ranks a copy of the tables, two replicas."""
    torch.manual_seed(0)
    plan = Mesh(RANKS, RANKS, model_parallel=2)
    model = Lookup()
    sharded = sparse.shard_tables(model, plan, "v3", lr=0.1, scheme="table")
    lengths = torch.full((TABLES * BATCH,), IDS)
    ids = torch.randint(0, TABLE_ROWS, (TABLES * BATCH * IDS,), generator=torch.Generator().manual_seed(rank.rank))
    features = KeyedJaggedTensor(keys=[f"f{i}" for i in range(TABLES)], values=ids, lengths=lengths)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        sharded.sync()

    backward(model(features))  # the first call also exchanges shapes
    losses: list[torch.Tensor] = []
    forward = trace.record(lambda: losses.append(model(features)))
    return [
        *_of_tables("fwd", forward, plan),
        *_of_tables("bwd", trace.record(lambda: backward(losses[0])), plan),
    ]


def _of_tables(phase: str, seen: list[trace.Collective], plan: Mesh) -> list[Flow]:
    flows, gathered = [], False
    for item in seen:
        gathered = gathered or item.kind == "all_gather"
        ranks, axis, width = item.ranks, "table_replica", FLOAT_BYTES
        if item.kind == "all_to_all":
            what = "gradients_of_embeddings" if phase == "bwd" else "embeddings" if gathered else "ids"
            ranks, axis, width = plan.model_parallel, "model_parallel", ID_BYTES if what == "ids" else FLOAT_BYTES
        elif item.kind in ("all_gather", "reduce_scatter"):
            what = "table_shards" if item.kind == "all_gather" else "parameters"
        else:
            continue  # a replicated optimiser state
        flows.append(Flow(phase, item.kind, what, axis, ranks, _sent(item, ranks, width)))
    return flows


def _sent(item: trace.Collective, ranks: int, width: int = FLOAT_BYTES) -> float:
    """Bytes that a rank sends: its part to every other rank of a gather, all but its own part else."""
    given = item.elements[0] * width
    return given * (ranks - 1) / (1 if item.kind == "all_gather" else max(ranks, 1))


def both(rank: launch.Rank) -> dict[str, list[Flow]]:
    return {"experts": experts(rank), "tables_v3": tables(rank)}


def add_records(run: record.Run, case: str, flows: list[Flow]) -> None:
    """Two rows a collective; neighbours of one kind and payload are one."""
    position = 0
    for (phase, kind, what), group in itertools.groupby(flows, key=lambda flow: (flow.phase, flow.kind, flow.what)):
        members = list(group)
        position += 1
        row = {"case": case, "subject": what, "impl": kind, "phase": phase}
        note = f"{members[0].axis} of {members[0].ranks} ranks; messages: {len(members)}"
        run.add(**row, metric="position", p50=position, note=note)
        run.add(**row, metric="comm_bytes", p50=sum(flow.sent for flow in members), note=note)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.data_flow", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        config = {"ranks": RANKS, "backend": "gloo", "variant": VARIANT, "preset": TIER, "batch": BATCH}
        found = launch.spawn(RANKS, both, timeout_s=TIMEOUT_S)
        orders = [
            {case: [(f.phase, f.kind, f.what, f.axis, f.ranks) for f in flows] for case, flows in rank.items()}
            for rank in found
        ]
        if any(order["experts"] != orders[0]["experts"] for order in orders):
            raise ValueError("data flow: ranks show other orders of collectives; allowed: one order")
        # tables lie unevenly, so a rank's own shards decide how many kernels gather; the kinds agree
        with record.Run(args.run or settings.name, EXPERIMENT, config=config, sources=SOURCES, num_devices=1) as run:
            for case, flows in found[0].items():
                add_records(run, case, flows)
    except (ValueError, OSError, launch.RankError, TimeoutError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
