"""Named axes of a job, as plain numbers: which ranks form which group. No process groups here.

The source's five dimensions: dense parameters are sharded over a `shard` group (FSDP), replicated over `replica` groups
(DDP), and experts live on the ranks of an `expert` group; tables are sharded over a `model_parallel` group and
replicated over the rest.

Rank r holds place r % shard of shard group r // shard. Expert groups are runs of neighbouring ranks, so that they
share a host, and lie inside the shard group: the parameters of one expert are sharded over shard / expert ranks. The
replicas of a table shard are neighbours too, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIASES = {"fsdp": "shard", "ddp": "replica", "ep": "expert", "mp": "model_parallel"}
AXES = ("shard", "replica", "expert", "model_parallel")


@dataclass(frozen=True)
class Group:
    """Groups of `size` ranks, `stride` apart, that tile the job of `job` ranks (0: as many as you like)."""

    name: str
    size: int
    stride: int
    job: int = 0

    def ranks(self, rank: int) -> list[int]:
        """Ranks of the group that `rank` belongs to."""
        block = self.size * self.stride
        first = rank // block * block + rank % self.stride
        return list(range(first, first + block, self.stride))


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes of a job of `gpus` ranks.

    shard * replica = gpus; expert divides shard; model_parallel divides gpus (its default, 0, is all of them: one copy
    of the tables). ValueError otherwise.
    """

    gpus: int
    shard: int
    replica: int = 1
    expert: int = 1
    model_parallel: int = 0

    def __post_init__(self):
        if self.model_parallel == 0:
            object.__setattr__(self, "model_parallel", self.gpus)
        for name in ("gpus", *AXES):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"mesh: {name} is {value!r}; allowed: a whole number of at least 1")
        if self.shard * self.replica != self.gpus:
            raise ValueError(
                f"mesh: shard {self.shard} x replica {self.replica} is {self.shard * self.replica}; allowed: a product "
                f"of {self.gpus} GPUs"
            )
        if self.shard % self.expert:
            raise ValueError(f"mesh: expert is {self.expert}; allowed: a divisor of shard, {self.shard}")
        if self.gpus % self.model_parallel:
            raise ValueError(f"mesh: model_parallel is {self.model_parallel}; allowed: a divisor of {self.gpus} GPUs")

    @property
    def table_replicas(self) -> int:
        return self.gpus // self.model_parallel

    def group(self, name: str) -> Group:
        """The groups of an axis: shard, expert_shard (of one expert's parameters), replica, expert, model_parallel,
        table_replica."""
        layout = {
            "shard": (self.shard, 1),
            "expert_shard": (self.shard // self.expert, self.expert),
            "replica": (self.replica, self.shard),
            "expert": (self.expert, 1),
            "model_parallel": (self.model_parallel, self.table_replicas),
            "table_replica": (self.table_replicas, 1),
        }
        if name not in layout:
            raise ValueError(f"mesh: group {name!r} is unknown; allowed: {', '.join(layout)}")
        return Group(name, *layout[name], self.gpus)

    def describe(self) -> str:
        return (
            f"shard {self.shard} x replica {self.replica}, expert {self.expert}, "
            f"model_parallel {self.model_parallel} x {self.table_replicas}"
        )


def parse(text: str, gpus: int) -> Mesh:
    """A mesh from "fsdp=128,ddp=32,ep=2,mp=512" (or the axes' own names); what is left out is filled up to `gpus`."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, found, value = item.partition("=")
        axis = ALIASES.get(name.strip(), name.strip())
        if not found or axis not in AXES:
            raise ValueError(f"plan: {item!r}; allowed: axis=size with {', '.join([*ALIASES, *AXES])}")
        if axis in sizes:
            raise ValueError(f"plan: {axis} occurs twice; allowed: once")
        if not value.strip().isdecimal():
            raise ValueError(f"plan: {item!r}; allowed: a whole number of at least 1")
        sizes[axis] = int(value)
        if sizes[axis] < 1:
            raise ValueError(f"plan: {item!r}; allowed: a whole number of at least 1")
    if "shard" not in sizes:
        replica = sizes.get("replica", 1)
        if gpus % replica:
            raise ValueError(f"plan: ddp={replica}; allowed: a divisor of {gpus} GPUs")
        sizes["shard"] = gpus // replica
    if "replica" not in sizes:
        if gpus % sizes["shard"]:
            raise ValueError(f"plan: fsdp={sizes['shard']}; allowed: a divisor of {gpus} GPUs")
        sizes["replica"] = gpus // sizes["shard"]
    return Mesh(gpus, **sizes)
