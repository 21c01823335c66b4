"""Synthetic jagged recommendation data with a known truth: `python -m data.synthesize --output DIR --samples N ...`.

A row is an impression to predict: a user, a candidate item, its category, a context, tags, dense features and the
user's histories of impressions, clicks and conversions. data/README.md is the data card, data/truth.py the label
process, data/lengths.py the lengths. Chunks are generated whole with numpy from (seed, split, chunk), so that memory
does not grow with the number of samples and the output depends on the parameters alone.
"""

import argparse
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from data.cli import fraction, non_negative, non_negative_float, positive, positive_float, rate, run
from data.histories import HistoryLaw, category_mix, recent_mix, sample_history, zipf_items
from data.lengths import LAWS, LengthLaw
from data.manifest import DataError
from data.parquet_io import DatasetWriter, fixed_lists, lists
from data.truth import Bound, Process, Rows, Weights, sigmoid
from gem.cli import Parser
from gem.progress import Progress, format_count

START = 1_700_000_000  # time stamp of the first sample, seconds since 1970
DAYS = 30
CHUNK_EVENTS = 400_000
CHUNK_ROWS = 16_384
PILOT_ROWS = 8_192
MAX_TAGS = 4


@dataclass(frozen=True)
class Parameters:
    """Everything that the output depends on; the command line's options, written to the manifest as "generator"."""

    samples: int
    eval_samples: int
    seed: int = 0
    max_length: int = 256
    click_max_length: int = 64
    conversion_max_length: int = 16
    fill: float = 0.35
    length_law: str = "lognormal"
    length_cv: float = 1.3
    num_users: int = 1000
    num_items: int = 500
    num_categories: int = 8
    num_contexts: int = 12
    num_tags: int = 32
    num_dense: int = 8
    zipf: float = 1.05
    ctr: float = 0.2
    cvr: float = 0.3
    recent_events: int = 16
    long_range_gap: int = 64
    static_weight: float = 0.8
    crossing_weight: float = 0.6
    recent_weight: float = 1.2
    long_range_weight: float = 0.8

    def __post_init__(self):
        if self.num_categories > self.num_items:
            raise DataError(
                f"num categories is {self.num_categories} for {self.num_items} items; at most one category per item"
            )

    @property
    def long_range_start(self) -> int:
        """Events with at least this many later ones are long range: more than the gap away from every recent event."""
        return self.long_range_gap + self.recent_events

    def laws(self) -> dict[str, LengthLaw]:
        longest = {
            "impression": self.max_length,
            "click": self.click_max_length,
            "conversion": self.conversion_max_length,
        }
        return {event: LengthLaw(self.length_law, most, self.fill, self.length_cv) for event, most in longest.items()}

    def weights(self) -> dict[str, Weights]:
        weights = Weights(self.static_weight, self.crossing_weight, self.recent_weight, self.long_range_weight)
        return {"ctr": weights, "cvr": weights}

    def header(self, command: str) -> dict:
        """The manifest without what only the data themselves tell."""
        sizes = {
            "user": self.num_users,
            "item": self.num_items,
            "category": self.num_categories,
            "context": self.num_contexts,
            "tag": self.num_tags,
        }
        return {
            "format": 1,
            "name": "synthetic",
            "seed": self.seed,
            "command": command,
            "generator": asdict(self),
            "num_dense": self.num_dense,
            "sparse_features": {name: {"num_embeddings": n, "pooling": "mean"} for name, n in sizes.items()},
            "event_types": {
                event: {"num_items": self.num_items, "num_actions": actions, "max_length": law.max_length}
                for (event, law), actions in zip(self.laws().items(), ACTIONS.values(), strict=True)
            },
            "tasks": ["ctr", "cvr"],
        }


# Dwell of an impression, kind of a click, kind of a conversion; a larger action is a stronger sign of interest.
ACTIONS = {"impression": 4, "click": 3, "conversion": 2}
# Mean seconds between events of a history: mostly a few in a session, sometimes days between sessions.
HISTORY_LAWS = {
    "impression": HistoryLaw(within=40.0, between=40_000.0, session_share=0.12),
    "click": HistoryLaw(within=400.0, between=150_000.0, session_share=0.3),
    "conversion": HistoryLaw(within=5_000.0, between=700_000.0, session_share=0.6),
}


class Generator:
    """Draws chunks; the factors of items and users come from the seed alone."""

    def __init__(self, parameters: Parameters):
        self.p = parameters
        self.laws = parameters.laws()
        self.zipf = np.random.default_rng([parameters.seed, 1])
        sizes = (parameters.num_users, parameters.num_items, parameters.num_categories, parameters.num_contexts)
        self.process = Process(*sizes, rng=np.random.default_rng([parameters.seed, 0]), weights=parameters.weights())
        pilot, _ = self.draw(
            PILOT_ROWS if self.mean_events * PILOT_ROWS < 2**25 else 1024,
            np.random.default_rng([parameters.seed, 2]),
            None,
        )
        self.process.calibrate(pilot, {"ctr": parameters.ctr, "cvr": parameters.cvr})

    @property
    def mean_events(self) -> float:
        """Expected events of a row, all types together."""
        return sum(law.mean for law in self.laws.values())

    @property
    def chunk_rows(self) -> int:
        return int(min(CHUNK_ROWS, max(1, CHUNK_EVENTS // max(self.mean_events, 1.0))))

    def draw(self, rows: int, rng: np.random.Generator, timestamp: np.ndarray | None):
        """Rows (what labels depend on) and the columns that follow from them; timestamp None: no columns."""
        p = self.p
        user = np.minimum((rng.random(rows) ** 2 * p.num_users).astype(np.int64), p.num_users - 1)
        item = zipf_items(rng, rows, p.num_items, p.zipf)
        context = rng.integers(0, p.num_contexts, rows)
        dense = rng.standard_normal((rows, p.num_dense), dtype=np.float32)
        # A user's present mood and long-standing taste: one category each, the same for half of the rows.
        old_taste = rng.integers(0, p.num_categories, rows)
        new_taste = np.where(rng.random(rows) < 0.5, old_taste, rng.integers(0, p.num_categories, rows))
        columns, mixes, old_mix = {}, {}, None
        for event, law in self.laws.items():
            lengths = law.sample(rows, rng)
            history = sample_history(rng, lengths, new_taste, old_taste, p, ACTIONS[event], event == "impression")
            mixes[event] = recent_mix(history, lengths, p.recent_events, p.num_categories)
            if event == "impression":
                old_mix = category_mix(history, lengths, p.long_range_start, p.num_categories)
            if timestamp is not None:
                times = HISTORY_LAWS[event].times(rng, lengths, timestamp)
                for part, values in (("item", history.item), ("action", history.action), ("time", times)):
                    columns[f"{event}_{part}"] = lists(values, lengths)
        category = item % p.num_categories
        if timestamp is not None:
            tags = rng.integers(0, MAX_TAGS + 1, rows)
            tag = rng.integers(0, p.num_tags, int(tags.sum()))
            one = np.ones(rows, np.int64)
            sparse = {"user": user, "item": item, "category": category, "context": context}
            columns |= {f"sparse_{name}": lists(values, one) for name, values in sparse.items()}
            columns |= {"sparse_tag": lists(tag, tags), "dense": fixed_lists(dense)}
            columns |= {"user_id": pa.array(user), "timestamp": pa.array(timestamp)}
        return Rows(user, item, category, context, dense, mixes, old_mix), columns

    def chunk(self, split: str, number: int, first: int, rows: int, timestamp: np.ndarray):
        """Columns of one chunk, and per task (true probability, label, scaled parts of the logit, rows where the label
        is defined)."""
        rng = np.random.default_rng([self.p.seed, 3 + (split == "eval"), number])
        truth, columns = self.draw(rows, rng, timestamp)
        tasks = {}
        defined = np.ones(rows, bool)
        for task, name in (("ctr", "click"), ("cvr", "conversion")):
            parts = self.process.scaled(task, self.process.parts(task, truth))
            probability = sigmoid(sum(parts.values()) + self.process.bias[task])
            label = (rng.random(rows) < probability) & defined
            tasks[task] = (probability, label, parts, defined)
            columns[name] = pa.array(label.astype(np.int8))
            columns[f"bayes_{task}"] = pa.array(probability.astype(np.float32))
            defined = label
        columns["sample_id"] = pa.array(np.arange(first, first + rows))
        return columns, tasks


def synthesize(parameters: Parameters, output: str, *, command: str = "", quiet: bool = False) -> dict:
    """Writes the dataset and returns its manifest. ValueError (bad parameters, bad target) comes before any row is
    drawn."""
    parameters.laws()
    bounds = {"ctr": Bound(), "cvr": Bound()}
    with DatasetWriter(output, parameters.header(command), with_bayes=True) as writer:
        generator = Generator(parameters)
        total = parameters.samples + parameters.eval_samples
        seconds = DAYS * 86_400 / total
        first, clock = 0, float(START)
        began = time.monotonic()
        with Progress(total, "rows", "synthesize", quiet=quiet) as progress:
            for split, wanted in (("train", parameters.samples), ("eval", parameters.eval_samples)):
                done = number = 0
                while done < wanted:
                    rows = min(generator.chunk_rows, wanted - done)
                    arrivals = np.random.default_rng([parameters.seed, 5 + (split == "eval"), number])
                    stamps = clock + np.cumsum(arrivals.exponential(seconds, rows))
                    clock = float(stamps[-1])
                    columns, tasks = generator.chunk(split, number, first, rows, stamps.astype(np.int64))
                    writer.write(split, columns)
                    if split == "eval":
                        for task, (probability, label, parts, defined) in tasks.items():
                            kept = {name: x[defined] for name, x in parts.items()}
                            bounds[task].add(probability[defined], label[defined], kept)
                    done, first, number = done + rows, first + rows, number + 1
                    rate = writer.events_written / max(time.monotonic() - began, 1e-9)
                    progress.advance(rows, events=f"{format_count(writer.events_written)} at {format_count(rate)}/s")
        return writer.finish({task: bound.result() for task, bound in bounds.items()})


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m data.synthesize", description=__doc__.split(":")[0] + ".")
    d = Parameters(1, 1)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder of the dataset; an older dataset there is replaced")
    add("--samples", type=positive, required=True, help="training rows")
    add("--eval-samples", type=positive, required=True, help="held-out rows, later in time")
    add("--seed", type=non_negative, default=d.seed)
    add("--max-length", type=positive, default=d.max_length, help="longest impression history (default %(default)s)")
    add("--click-max-length", type=positive, help="default: a quarter of --max-length")
    add("--conversion-max-length", type=positive, help="default: a sixteenth of --max-length")
    add("--fill", type=fraction, help="mean length / max length, in (0, 1] (default 1 for the law full, else 0.35)")
    add("--length-law", default=d.length_law, metavar="LAW", help=f"{', '.join(LAWS)} (default %(default)s)")
    add(
        "--length-cv",
        type=positive_float,
        default=d.length_cv,
        help="of the log-normal law before clipping (default %(default)s)",
    )
    for name, text in (
        ("users", "users"),
        ("items", "items"),
        ("categories", "item categories"),
        ("contexts", "contexts"),
        ("tags", "tags"),
    ):
        add(f"--num-{name}", type=positive, default=getattr(d, f"num_{name}"), help=f"{text} (default %(default)s)")
    add("--num-dense", type=positive, default=d.num_dense, help="dense features (default %(default)s)")
    add("--zipf", type=positive_float, default=d.zipf, help="exponent of item popularity (default %(default)s)")
    add("--ctr", type=rate, default=d.ctr, help="mean click probability (default %(default)s)")
    add("--cvr", type=rate, default=d.cvr, help="mean conversion probability given a click (default %(default)s)")
    add(
        "--recent-events",
        type=positive,
        default=d.recent_events,
        help="how many of the newest events count as recent (default %(default)s)",
    )
    add(
        "--long-range-gap",
        type=positive,
        default=d.long_range_gap,
        help="long-range events are further than this from every recent one (default %(default)s)",
    )
    for part in ("static", "crossing", "recent", "long-range"):
        default = getattr(d, f"{part.replace('-', '_')}_weight")
        add(
            f"--{part}-weight",
            type=non_negative_float,
            default=default,
            help="standard deviation in the logit (default %(default)s)",
        )
    add("--quiet", action="store_true", help="no progress")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = vars(parser().parse_args(arguments))
    output, quiet = options.pop("output"), options.pop("quiet")
    command = shlex.join(["python", "-m", "data.synthesize", *(sys.argv[1:] if arguments is None else arguments)])
    for name, share in (("click", 4), ("conversion", 16)):
        key = f"{name}_max_length"
        options[key] = options[key] or max(1, options["max_length"] // share)
    if options["fill"] is None:
        options["fill"] = 1.0 if options["length_law"] == "full" else Parameters(1, 1).fill
    parameters = replace(Parameters(1, 1), **options)
    began = time.monotonic()
    manifest = synthesize(parameters, output, command=command, quiet=quiet)
    seconds = time.monotonic() - began
    events = sum(sum(split["events"].values()) for split in manifest["splits"].values())
    bayes = manifest["bayes"]["ctr"]
    best, without = ("undefined" if ne is None else f"{ne:.4f}" for ne in (bayes["ne"], bayes["without"]["sequence"]))
    print(
        f"{output}: {parameters.samples:,} + {parameters.eval_samples:,} rows, {events:,} events in {seconds:.1f} s "
        f"({format_count(events / seconds)} events/s), best possible CTR NE {best}, without sequences {without}"
    )
    return 0


if __name__ == "__main__":
    run(main)
