"""What a preset costs: parameters, bytes and FLOPs per sample, by module: python -m gem.summary --preset base

Nothing runs: the model is built without storage and the FLOPs are the closed form of `gem.counts` over the lengths of a
dataset (--data), or over lengths drawn from the law of a tier's data section.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

import torch

from gem import config as configuration
from gem.cli import Parser
from gem.config import PRESETS, Config
from gem.counts import Counts
from gem.dataset import EventSchema, Schema, Split
from gem.model import GEM
from kernels.jagged import sample_lengths

# module of a parameter (first match) -> row of the table; the FLOP parts have the same names
ROWS = (
    ("tables", ("features.tables", "history.tables")),
    ("embedding", ("features.", "embed.")),
    ("feed_forward", (".feed_forward.",)),
    ("self_attention", (".attention.",)),
    ("pooling", (".pooler.",)),
    ("summary", (".summary.",)),
    ("interaction", (".interaction.",)),
    ("heads", ("heads.",)),
)
ADAMW_STATES = 2  # float32 numbers kept beside a dense parameter; a table keeps one a row


@dataclasses.dataclass(frozen=True)
class Row:
    """One module: parameters, bytes of parameters with gradients and optimiser states, forward FLOPs of one sample."""

    name: str
    params: int
    param_bytes: int
    train_bytes: int
    flops: float


def synthetic_schema(data: dict) -> Schema:
    """Schema of the synthesiser's defaults, with the history lengths of a tier's data section."""
    longest = int(data["max_length"])
    lengths = {"impression": (longest, 4), "click": (max(1, longest // 4), 3), "conversion": (max(1, longest // 16), 2)}
    return Schema(
        name="synthetic",
        num_dense=8,
        sparse={
            n: (size, "mean")
            for n, size in zip(("user", "item", "category", "context", "tag"), (1000, 500, 8, 12, 32), strict=True)
        },
        events=tuple(EventSchema(name, 500, actions, length) for name, (length, actions) in lengths.items()),
        tasks=("ctr", "cvr"),
    )


def drawn_lengths(schema: Schema, data: dict, batch: int) -> dict[str, torch.Tensor]:
    """Lengths of `batch` samples from the tier's length law, a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    law, fill = data.get("length_law", "lognormal"), float(data["fill"])
    return {e.name: sample_lengths(law, batch, e.max_length, fill, generator).to(torch.int64) for e in schema.events}


def summarise(config: Config, schema: Schema, counts: Counts) -> list[Row]:
    """A row a module, in the model's order. counts: a batch whose mean sample is wanted."""
    with torch.device("meta"):
        model = GEM(config, schema, "meta")
    flops = model.flops(counts)
    table_names = set(model.table_parameters())
    sums = {name: [0, 0, 0] for name, _ in ROWS}
    for name, value in model.named_parameters():
        row = next(row for row, marks in ROWS if any(mark in name for mark in marks))
        states = value.shape[0] if name in table_names else ADAMW_STATES * value.numel()
        sums[row][0] += value.numel()
        sums[row][1] += 4 * value.numel()
        sums[row][2] += 4 * (2 * value.numel() + states)
    assert set(flops) <= set(sums), f"parts without a row: {set(flops) - set(sums)}"
    return [Row(name, *sums[name], flops.get(name, 0) / counts.batch) for name, _ in ROWS]


def total(rows: list[Row]) -> Row:
    columns = zip(*((r.params, r.param_bytes, r.train_bytes, r.flops) for r in rows), strict=True)
    return Row("total", *(sum(column) for column in columns))


def expert_share(rows: list[Row]) -> float:
    """Share of the experts in the FLOPs."""
    return next(row.flops for row in rows if row.name == "interaction") / total(rows).flops


def text(rows: list[Row]) -> str:
    """The table, FLOPs of the forward; a training step costs three times as many."""
    whole = total(rows)
    lines = [f"{'module':<16}{'parameters':>14}{'MiB':>10}{'MiB training':>14}{'MFLOP/sample':>14}{'share':>8}"]
    for row in [*rows, whole]:
        mib, train_mib, share = row.param_bytes / 2**20, row.train_bytes / 2**20, row.flops / whole.flops
        lines.append(
            f"{row.name:<16}{row.params:>14,}{mib:>10.1f}{train_mib:>14.1f}{row.flops / 1e6:>14.2f}{share:>8.1%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.summary", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="base", help=f"one of {', '.join(PRESETS)} (default base)")
    parser.add_argument("--variant", default="full", help="id of a row of config/variants.tsv (default full)")
    parser.add_argument("--tier", default="gpu", help="tier whose data section gives the length law (default gpu)")
    parser.add_argument("--data", help="dataset folder whose train split gives lengths and table sizes instead")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes and FLOPs unrounded")
    arguments = parser.parse_args(argv)
    try:
        config = configuration.load(arguments.variant, arguments.tier, arguments.preset)
        if arguments.data:
            split = Split(arguments.data, "train")
            schema, batch = split.schema, split.num_rows
            lengths = {
                e.name: torch.from_numpy(split.items[e.name].lengths).clamp(max=e.max_length) for e in schema.events
            }
        else:
            data = configuration.load_tier(arguments.tier)["data"]
            schema, batch = synthetic_schema(data), 4096
            lengths = drawn_lengths(schema, data, batch)
    except (ValueError, OSError) as error:
        print(f"gem.summary: {error}", file=sys.stderr)
        return 1
    rows = summarise(config, schema, Counts(batch, lengths))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in [*rows, total(rows)]]))
    else:
        means = ", ".join(f"{name} {length.float().mean():.0f}" for name, length in lengths.items())
        print(f"preset {config.preset}, variant {config.variant}, mean lengths: {means}")
        print(text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
