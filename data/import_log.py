"""Anyone's interaction log as a dataset: `python -m data.import_log --input FILE --output DIR ...`.

The log is CSV or TSV with a user, an item, a time and a rating or a 0/1 label per line. Each line becomes a sample
whose histories are that user's lines with a strictly earlier time (lines of the same second see none of each other).
The latest lines are the eval split; lines that share a time stamp are never split. Ids are numbered from 1 in order of
first appearance in train; an id that train never shows becomes 0 everywhere. Features besides the log's own are counts
over strictly earlier lines.
"""

import csv
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from data.cli import non_negative, positive, rate, run
from data.manifest import DataError
from data.parquet_io import DatasetWriter, check_target, fixed_lists, lists
from gem.cli import Parser
from gem.progress import Progress

MAX_ACTIONS = 16
CHUNK_EVENTS = 1_000_000
OWN_FEATURES = ("user", "item")
DENSE = ("history length", "seconds since the last event", "user's positive share", "item's positive share")
PRIOR = 5.0  # weight, in lines, of train's positive share in the two shares above


@dataclass(frozen=True)
class Source:
    """How to read a log. Columns are names, or positions from 0 as text. columns: names in file order for a file
    without them."""

    path: Path
    user: str = "user"
    item: str = "item"
    time: str = "time"
    rating: str | None = None
    label: str | None = None
    positive_at_least: float | None = None
    features: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    header: bool | None = None
    separator: str | None = None


def read_log(source: Source) -> pd.DataFrame:
    """Columns user, item (text), time (int64 seconds), value (float64), positive (bool) and feature:<name> (text), in
    file order."""
    if not source.path.is_file():
        raise DataError(f"{source.path}: no such file")
    separator = source.separator or sniff(source.path)
    header = source.columns is None if source.header is None else source.header
    try:
        frame = pd.read_csv(
            source.path,
            sep=separator,
            header=0 if header else None,
            dtype=str,
            keep_default_na=False,
            engine="c" if len(separator) == 1 else "python",
            quoting=csv.QUOTE_MINIMAL,
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DataError(f"{source.path}: not readable as separated text ({' '.join(str(error).split())})") from None
    if source.columns is not None:
        if len(source.columns) != frame.shape[1]:
            count = frame.shape[1]
            raise DataError(f"{source.path}: --columns names {len(source.columns)} columns, the file has {count}")
        if len(set(source.columns)) != len(source.columns):
            raise DataError("--columns names a column twice")
        frame.columns = list(source.columns)
    frame.columns = [str(name).strip() for name in frame.columns]

    def pick(name: str, role: str) -> pd.Series:
        if name in frame.columns:
            return frame[name]
        if name.isdecimal() and int(name) < frame.shape[1]:
            return frame.iloc[:, int(name)]
        raise DataError(
            f"{source.path}: no column {name!r} for {role}; allowed: {', '.join(frame.columns)}, "
            f"or a position 0..{frame.shape[1] - 1}"
        )

    def numbers(name: str, role: str) -> np.ndarray:
        text = pick(name, role)
        values = pd.to_numeric(text, errors="coerce").to_numpy(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise DataError(f"{source.path}: row {bad[0] + 1}: {role} is {text.iloc[bad[0]]!r}; it must be a number")
        return values

    out = pd.DataFrame({"user": pick(source.user, "--user"), "item": pick(source.item, "--item")})
    for name in OWN_FEATURES:
        empty = np.flatnonzero((out[name] == "").to_numpy())
        if len(empty):
            raise DataError(f"{source.path}: row {empty[0] + 1}: {name} is empty")
    out["time"] = np.floor(numbers(source.time, "--time")).astype(np.int64)
    if source.label is not None:
        out["value"] = numbers(source.label, "--label")
        bad = np.flatnonzero(~out["value"].isin([0.0, 1.0]).to_numpy())
        if len(bad) and source.positive_at_least is None:
            raise DataError(
                f"{source.path}: row {bad[0] + 1}: label is {out['value'].iloc[bad[0]]:g}; allowed: 0, 1 "
                "(or give --positive-at-least)"
            )
        out["positive"] = out["value"] >= (1.0 if source.positive_at_least is None else source.positive_at_least)
    else:
        if source.positive_at_least is None:
            raise DataError(
                "--positive-at-least is missing: from which rating on is a line positive? Or name a --label"
            )
        out["value"] = numbers(source.rating or "rating", "--rating")
        out["positive"] = out["value"] >= source.positive_at_least
    for name in source.features:
        out[f"feature:{name}"] = pick(name, "--features")
    return out


def sniff(path: Path) -> str:
    """The separator of the first line: tab, '::', comma, semicolon or bar; DataError when there is none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        line = file.readline()
    for separator in ("\t", "::", ",", ";", "|"):
        if separator in line:
            return separator
    raise DataError(f"{path}: the first line holds no tab, '::', comma, semicolon or bar; give --separator")


def split_point(times: np.ndarray, eval_share: float) -> int:
    """First eval row of ascending `times`: about the last eval_share of the rows, moved up so that no time stamp is on
    both sides."""
    point = len(times) - max(1, round(len(times) * eval_share))
    if point <= 0:
        return 0
    return int(np.searchsorted(times, times[point - 1], side="right"))


def earlier(keys: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For rows in ascending time: (order, start, stop) with order the rows grouped by key, in time order inside a
    group, and order[start[i]:stop[i]] the rows of i's key with a strictly earlier time. A stop never reaches i or a
    tie of i."""
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_times = keys[order], times[order]
    place = np.arange(len(keys))
    new_key = np.ones(len(keys), bool)
    new_key[1:] = sorted_keys[1:] != sorted_keys[:-1]
    new_time = new_key.copy()
    new_time[1:] |= sorted_times[1:] != sorted_times[:-1]
    start, stop = np.empty_like(place), np.empty_like(place)
    start[order] = np.maximum.accumulate(np.where(new_key, place, 0))
    stop[order] = np.maximum.accumulate(np.where(new_time, place, 0))
    return order, start, stop


def number_ids(text: np.ndarray, train_rows: int) -> tuple[np.ndarray, int]:
    """Dense ids (1.. in order of first appearance in train, 0 for the rest) and the size of their table."""
    codes, _ = pd.factorize(text)  # codes count up in order of appearance, so train's are those up to its maximum
    known = int(codes[:train_rows].max(initial=-1)) + 1
    return np.where(codes < known, codes + 1, 0).astype(np.int64), known + 1


def number_actions(values: np.ndarray, train_rows: int) -> tuple[np.ndarray, int]:
    """Ratings as small ids in ascending order: one a value, or 16 quantile bins of train when it has more than 16
    values."""
    levels = np.unique(values[:train_rows])
    if len(levels) > MAX_ACTIONS:
        levels = np.unique(np.quantile(values[:train_rows], np.arange(MAX_ACTIONS) / MAX_ACTIONS))
    return (np.searchsorted(levels, values, side="right") - 1).clip(0).astype(np.int64), len(levels)


class Log:
    """A log in time order, with dense ids, histories as ranges and causal features."""

    def __init__(self, frame: pd.DataFrame, eval_share: float, features: tuple[str, ...]):
        frame = frame.sort_values("time", kind="stable", ignore_index=True)
        self.rows = len(frame)
        self.time = frame["time"].to_numpy()
        self.train_rows = split_point(self.time, eval_share)
        if self.train_rows == 0 or self.train_rows == self.rows:
            raise DataError(
                f"{self.rows} rows with {len(np.unique(self.time))} different times leave train with "
                f"{self.train_rows} rows and eval with "
                f"{self.rows - self.train_rows}; both need at least one, so give more rows or another --eval-share"
            )
        self.positive = frame["positive"].to_numpy()
        self.action, self.num_actions = number_actions(frame["value"].to_numpy(), self.train_rows)
        self.ids, self.sizes = {}, {}
        for name, source in [(name, name) for name in OWN_FEATURES] + [(name, f"feature:{name}") for name in features]:
            self.ids[name], self.sizes[name] = number_ids(frame[source].to_numpy(), self.train_rows)
        # Histories follow the log's own users, not the numbered ones: users unseen in train share id 0 but no history.
        users, _ = pd.factorize(frame["user"])
        items, _ = pd.factorize(frame["item"])
        self.user = users.astype(np.int64)
        self.by_user = earlier(users, self.time)
        order, start, stop = self.by_user
        positives = self.positive[order]
        self.positive_order = order[positives]
        before = np.concatenate([[0], np.cumsum(positives)])
        self.positive_start, self.positive_stop = before[start], before[stop]
        self.dense = self.causal(users_range=(order, start, stop), items_range=earlier(items, self.time))

    def causal(self, users_range, items_range) -> np.ndarray:
        """float32 [rows, 4], see DENSE: from earlier lines alone; train has mean 0, deviation 1."""
        prior = self.positive[: self.train_rows].mean()
        columns = []
        order, start, stop = users_range
        length = stop - start
        last = np.where(length > 0, self.time[order[np.maximum(stop - 1, 0)]], self.time)
        columns += [np.log1p(length), np.log1p(self.time - last)]
        for order, start, stop in (users_range, items_range):
            count = np.concatenate([[0], np.cumsum(self.positive[order])])
            columns.append((count[stop] - count[start] + PRIOR * prior) / (stop - start + PRIOR))
        dense = np.stack(columns, 1)
        train = dense[: self.train_rows]
        deviation = train.std(0)
        return ((dense - train.mean(0)) / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)

    def history(self, event: str, first: int, stop_row: int, max_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the log that are the histories of rows first..stop_row, flat, and their lengths; the newest
        max_length each."""
        if event == "history":
            order, start, stop = self.by_user
        else:
            order, start, stop = self.positive_order, self.positive_start, self.positive_stop
        stop = stop[first:stop_row]
        start = np.maximum(start[first:stop_row], stop - max_length)
        lengths = stop - start
        begins = np.cumsum(lengths) - lengths
        return order[np.arange(int(lengths.sum())) + np.repeat(start - begins, lengths)], lengths

    def columns(self, first: int, stop: int, max_length: int) -> dict[str, pa.Array]:
        """Columns of rows first..stop of the log."""
        span = slice(first, stop)
        one = np.ones(stop - first, np.int64)
        columns = {f"sparse_{name}": lists(ids[span], one) for name, ids in self.ids.items()}
        for event in ("history", "positive"):
            rows, lengths = self.history(event, first, stop, max_length)
            columns[f"{event}_item"] = lists(self.ids["item"][rows], lengths)
            columns[f"{event}_action"] = lists(self.action[rows], lengths)
            columns[f"{event}_time"] = lists(self.time[rows], lengths)
        click = self.positive[span].astype(np.int8)
        return columns | {
            "sample_id": pa.array(np.arange(first, stop)),
            "user_id": pa.array(self.user[span]),
            "timestamp": pa.array(self.time[span]),
            "dense": fixed_lists(self.dense[span]),
            "click": pa.array(click),
            "conversion": pa.array(np.zeros_like(click)),
        }


def import_log(
    source: Source,
    output: str | Path,
    *,
    eval_share: float = 0.1,
    max_length: int = 256,
    min_rows: int = 100,
    command: str = "",
    quiet: bool = False,
) -> dict:
    """Writes the dataset and returns its manifest; DataError with one line before anything is written."""
    check_target(Path(output))
    for name in source.features:
        if not name.isidentifier() or name in OWN_FEATURES or source.features.count(name) > 1:
            raise DataError(f"--features names {name!r}; each must be a word of its own, and not user or item")
    frame = read_log(source)
    if len(frame) < min_rows:
        raise DataError(f"{source.path}: {len(frame)} rows; at least {min_rows} are needed (--min-rows)")
    log = Log(frame, eval_share, source.features)
    options = {
        "input": source.path.name,
        "eval_share": eval_share,
        "max_length": max_length,
        "positive_at_least": source.positive_at_least,
        "dense": list(DENSE),
        "id_0": "not seen in train",
    }
    event = {"num_items": log.sizes["item"], "num_actions": log.num_actions, "max_length": max_length}
    header = {
        "format": 1,
        "name": source.path.stem,
        "seed": None,
        "command": command,
        "generator": options,
        "num_dense": len(DENSE),
        "sparse_features": {name: {"num_embeddings": size, "pooling": "mean"} for name, size in log.sizes.items()},
        "event_types": {"history": event, "positive": dict(event)},
        "tasks": ["ctr"],
    }
    chunk = max(1, min(16_384, CHUNK_EVENTS // (2 * max_length)))
    spans = {"train": (0, log.train_rows), "eval": (log.train_rows, log.rows)}
    with (
        DatasetWriter(output, header, with_bayes=False) as writer,
        Progress(log.rows, "rows", "import", quiet=quiet) as bar,
    ):
        for split, (first, stop) in spans.items():
            for row in range(first, stop, chunk):
                end = min(row + chunk, stop)
                writer.write(split, log.columns(row, end, max_length))
                bar.advance(end - row)
        return writer.finish(None)


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m data.import_log",
        description="Turn an interaction log (CSV or TSV) into a dataset. Columns are names or positions from 0.",
    )
    add = parser.add_argument
    add("--input", required=True, type=Path, metavar="FILE")
    add("--output", required=True, metavar="DIR", help="folder of the dataset; an older dataset there is replaced")
    add("--columns", type=names, metavar="A,B,...", help="the columns in order, for a file without a header")
    add("--header", action="store_true", default=None, help="the first line is a header even though --columns is given")
    add("--no-header", dest="header", action="store_false", help="no header line; columns are positions")
    add("--separator", help="between columns (default: found in the first line)")
    for role in ("user", "item", "time"):
        add(f"--{role}", default=role, metavar="COLUMN", help=f"column of the {role} (default {role!r})")
    value = parser.add_mutually_exclusive_group()
    value.add_argument("--rating", metavar="COLUMN", help="column of the rating (default 'rating')")
    value.add_argument("--label", metavar="COLUMN", help="column of a 0/1 label, instead of a rating")
    add("--positive-at-least", type=float, metavar="X", help="a line is positive from this rating on")
    add("--features", type=names, default=(), metavar="A,B,...", help="further columns that become sparse features")
    add("--eval-share", type=rate, default=0.1, help="share of the lines, the latest, held out (default %(default)s)")
    add(
        "--max-length", type=positive, default=256, help="longest history; the newest events stay (default %(default)s)"
    )
    add("--min-rows", type=non_negative, default=100, help="fewer lines are an error (default %(default)s)")
    add("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    source = Source(
        path=options.input,
        user=options.user,
        item=options.item,
        time=options.time,
        rating=options.rating,
        label=options.label,
        positive_at_least=options.positive_at_least,
        features=options.features,
        columns=options.columns,
        header=options.header,
        separator={"\\t": "\t"}.get(options.separator, options.separator),
    )
    manifest = import_log(
        source,
        options.output,
        eval_share=options.eval_share,
        max_length=options.max_length,
        min_rows=options.min_rows,
        command=shlex.join(["python", "-m", "data.import_log", *(sys.argv[1:] if arguments is None else arguments)]),
        quiet=options.quiet,
    )
    splits, sizes = manifest["splits"], manifest["sparse_features"]
    print(
        f"{options.output}: {splits['train']['rows']:,} + {splits['eval']['rows']:,} rows, "
        f"{sizes['user']['num_embeddings'] - 1:,} users and {sizes['item']['num_embeddings'] - 1:,} items in train"
    )
    return 0


if __name__ == "__main__":
    run(main)
