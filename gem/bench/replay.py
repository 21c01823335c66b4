"""What each optimisation would give a workload of which only the sequence lengths are known.

    python -m gem.bench.replay --lengths lengths.txt --heads 4 --dim 128
    python -m gem.bench.replay --lengths log.csv --column history --kv-lengths log.csv --kv-column items --json out.json

Prints statistics of the lengths, what padding wastes, the bound of each op on a chip, the implementation that was
fastest in the shipped records of the most similar workload, the skew of tile schedules, what balancing over ranks
gains and, on a GPU, measured times. Sequences are taken in file order, --batch at a time. What concerns a kernel is
said of the typical batch: the whole batch whose number of query-key pairs is the median.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from data.cli import non_negative, positive, run
from gem import balance, hardware, record
from gem.bench import replay_numbers as numbers
from gem.bench.kernels import DeviceLostError
from gem.digest import ROOT
from kernels import bounds
from kernels.gdpa.activations import ACTIVATIONS

MEASURED = ROOT / "data" / "measured"
LONGEST = 2**20
DEFAULT_BATCH = 1152  # that of the shipped records
DTYPES = ("bfloat16", "float16")


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """int64 [N] from a text file with one length a line, or from a column of a CSV with a header.

    ValueError: no such file or column, no length, only zeros, or a value that is no whole number of 0 to LONGEST; it
    names file, line, value and what is allowed, and how many more there are.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; allowed: a text file with one length a line, or a CSV with its column")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8 text; allowed: a text file or a CSV") from None
    if column is None:
        values = list(enumerate(text.rstrip().split("\n") if text.strip() else [], 1))
        hint = "" if "," not in text else "; the column of a CSV is named with --column"
    else:
        values, hint = _column(path, text, column), ""
    bad = [(line, value) for line, value in values if not _is_length(value)]
    if bad:
        line, value = bad[0]
        more = f"; {len(bad) - 1} more such lines" if len(bad) > 1 else ""
        allowed = f"allowed: a whole number of 0 to {LONGEST:,}"
        raise ValueError(f"{path}: line {line}: {value.strip()!r}; {allowed}{hint}{more}")
    lengths = np.array([int(value) for _, value in values], np.int64)
    if not lengths.any():
        what = "holds no length" if not len(lengths) else "all lengths are 0"
        raise ValueError(f"{path}: {what}; allowed: at least one length above 0")
    return lengths


def _is_length(text: str) -> bool:
    text = text.strip()
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= LONGEST


def _column(path: Path, text: str, column: str) -> list[tuple[int, str]]:
    """(line, value) of a CSV's column; a row that is too short has an empty value."""
    reader = csv.reader(text.splitlines())
    header = [name.strip() for name in next(reader, [])]
    if header.count(column) != 1:
        raise ValueError(f"{path}: line 1: no single column {column!r}; allowed: {', '.join(header) or 'a header'}")
    index = header.index(column)
    return [(reader.line_num, row[index] if index < len(row) else "") for row in reader]


def load(options: argparse.Namespace) -> numbers.Lengths:
    """Lengths of both sides, checked against one another and against the batch."""
    q = read_lengths(options.lengths, options.column)
    kv = q
    if options.kv_lengths is not None:
        kv = read_lengths(options.kv_lengths, options.kv_column)
        if len(kv) != len(q):
            raise ValueError(f"{options.kv_lengths}: {len(kv)} lengths; allowed: {len(q)}, as in {options.lengths}")
    elif options.kv_column:
        raise ValueError("--kv-column: without --kv-lengths; allowed: with the file that has the column")
    batch = options.batch or min(len(q), DEFAULT_BATCH)
    if batch > len(q):
        raise ValueError(f"--batch: {batch}; allowed: 1 to {len(q)}, the lengths in {options.lengths}")
    lengths = numbers.Lengths(q, kv, batch)
    if not any((a * b).any() for a, b in lengths.batches()):
        raise ValueError(f"{options.kv_lengths}: no sequence has both queries and keys; allowed: at least one that has")
    return lengths


def report(lengths: numbers.Lengths, options: argparse.Namespace, folder: Path) -> dict:
    """Everything but measured times, as JSON takes it. folder: shipped records of options.chip, if there are any."""
    index, q, kv = lengths.typical()
    q_stats = numbers.statistics(lengths.q)
    chip = bounds.find_chip(options.chip)
    balanced = numbers.balancing(lengths, options.ranks, options.quadratic_share, options.seed)
    return {
        "format": 1,
        "lengths": str(options.lengths),
        "kv_lengths": str(options.kv_lengths) if options.kv_lengths else None,
        "heads": options.heads,
        "head_dim": options.dim,
        "dtype": options.dtype,
        "activation": options.activation,
        "chip": chip.name,
        "records": str(folder) if (folder / "kernels.csv").is_file() else None,
        "ceilings": numbers.ceilings_of(folder).source,
        "queries": q_stats,
        "keys": q_stats if lengths.is_self else numbers.statistics(lengths.kv),
        "batch": {"size": lengths.batch, "count": len(lengths.batches()), "typical": index},
        "padding": numbers.padding(lengths),
        "tiles": {"tile": numbers.TILE, "programs": chip.sms, "orders": numbers.tile_skews(q, kv, chip.sms)},
        "balance": balanced,
        "ops": numbers.describe_ops(q, kv, options, folder),
    }


def text_of(found: dict) -> Iterator[str]:
    """Lines of the report."""
    batch, stats = found["batch"], found["queries"]
    what = f"{found['heads']} heads of {found['head_dim']}, {found['dtype']}"
    yield f"{stats['sequences']:,} sequences of {found['lengths']}; {what}"
    whole = stats["sequences"] // batch["size"]
    batches = f"{whole:,} batch{'es' if whole > 1 else ''} of {batch['size']:,}"
    rest = stats["sequences"] % batch["size"]
    batches += f" and one of {rest:,}" if rest else ""
    yield f"{batches} in file order; the typical one (median of pairs) is number {batch['typical'] + 1}"
    yield ""
    columns = ("tokens", "mean", "p50", "p90", "p99", "max", "cv", "fill", "empty")
    yield f"{'lengths':<24}" + "".join(f"{name:>11}" for name in columns)
    for side in ("queries", "keys") if found["kv_lengths"] else ("queries",):
        cells = (
            f"{found[side][name]:,.2f}" if name in ("cv", "fill") else f"{found[side][name]:,.0f}" for name in columns
        )
        yield f"{side if found['kv_lengths'] else 'sequences':<24}" + "".join(f"{cell:>11}" for cell in cells)
    yield ""
    yield f"{'padding wastes':<28}{'tokens':>11}{'pairs':>11}"
    for target, waste in found["padding"].items():
        yield f"{'to the ' + target:<28}{waste['tokens']:>11.1%}{waste['pairs']:>11.1%}"
    yield ""
    yield from _text_of_ops(found)
    tiles = found["tiles"]
    yield f"tile skew, {tiles['tile']} x {tiles['tile']} tiles of the typical batch on {tiles['programs']} programs"
    yield f"{'order':<24}{'max/mean':>11}{'max/min':>11}"
    for order, value in tiles["orders"].items():
        least = "idle" if value["max_over_min"] is None else f"{value['max_over_min']:.2f}"
        yield f"{order:<24}{value['max_over_mean']:>11.2f}{least:>11}"
    yield ""
    ranks = found["balance"]
    yield (
        f"load over {ranks['ranks']:,} ranks, batches of {ranks['batch']:,} drawn from these sequences, sub-batches of "
        f"{ranks['sub_batch']:,}, {ranks['pool']} to a pool, {ranks['quadratic_share']:.0%} of the load by pairs"
    )
    yield f"{'scheme':<24}{'max/mean':>11}{'gain':>11}"
    for scheme, value in ranks["schemes"].items():
        yield f"{scheme:<24}{value['max_over_mean']:>11.3f}{value['gain']:>10.3f}x"
    yield ""
    yield from _text_of_times(found["times"])


def _text_of_ops(found: dict) -> Iterator[str]:
    yield f"typical batch on {found['chip']}; ceilings: {found['ceilings']}; bwd recomputes the scores once"
    if found["records"] is None:
        yield f"no shipped records of {found['chip']}: which implementation is best is not known"
    yield f"{'op':<24}{'bound ms':>11}{'TFLOP/s':>11}  {'limiter':<8}{'best (ours)':<18}{'expected':>9}  compared"
    for op, value in found["ops"].items():
        for phase, row in value["phases"].items():
            line = f"{op + ' ' + phase:<24}{row['bound_ms']:>11.4g}{row['tflops']:>11.0f}  {row['limiter']:<8}"
            best = row["best"]
            if best is None:
                yield f"{line}no record"
                continue
            expected = "" if best["expected_ms"] is None else f"{best['expected_ms']:.4g}"
            name = best["impl"] if best["ours"] in (best["impl"], None) else f"{best['impl']} ({best['ours']})"
            yield f"{line}{name:<18}{expected:>9}  {', '.join(best['compared'])}"
    for op, value in found["ops"].items():
        near = value["nearest"]
        if near:
            features = near["features"]
            yield (
                f"  {op}: by the records of {near['case']} ({int(near['batch']):,} sequences of mean "
                f"{2 ** features['mean queries']:.0f}, cv {features['cv of queries']:.2f}, keys of mean "
                f"{2 ** features['mean keys']:.0f}, {near['num_heads']} heads of {near['head_dim']}, {near['dtype']}"
                f"{', ' + near['activation'] if near['activation'] else ''}), distance {near['distance']:.2f}"
            )
    near = [value["nearest"] for value in found["ops"].values() if value["nearest"]]
    for name in ("head_dim", "dtype"):
        if any(str(found[name]) != row[name] for row in near):
            yield f"  {name} {found[name]} is not that of these records: see the support matrices, kernels/*/README.md"
    if found["records"]:
        yield "  best, compared: fastest first in those records; (ours): the fastest that is no peer"
        yield "  expected: ms, the bound here over the share of its bound that the best reached there"
    yield ""


def _text_of_times(times: dict) -> Iterator[str]:
    if times["rows"] is None:
        yield f"measured times: {times['reason']}"
        return
    yield f"measured on {times['device']}, ms"
    yield (
        f"{'op':<24}{'impl':<16}{'phase':<6}{'p50':>11}{'p20':>11}{'p80':>11}{'TFLOP/s':>11}{'bound':>11}"
        f"{'of bound':>11}{'expected':>11}"
    )
    for row in times["rows"]:
        line = f"{row['op']:<24}{row['impl']:<16}{row['phase']:<6}"
        if row["time_ms"] is None:
            yield f"{line}{row['status']}: {row['note']}"
            continue
        cells = [f"{row[name]:.4g}" for name in ("time_ms", "p20_ms", "p80_ms")]
        cells.append("" if row["tflops"] is None else f"{row['tflops']:.0f}")
        cells.append("" if row.get("bound_ms") is None else f"{row['bound_ms']:.4g}")
        cells.append("" if row["share_of_bound"] is None else f"{row['share_of_bound']:.0%}")
        cells.append("" if row.get("expected_ms") is None else f"{row['expected_ms']:.4g}")
        yield line + "".join(f"{cell:>11}" for cell in cells)


def measured_times(lengths: numbers.Lengths, options: argparse.Namespace, folder: Path) -> dict:
    """Times on this machine's GPU, or the reason why there are none: {"device", "reason", "rows"}."""
    if options.no_times:
        return {"device": None, "reason": "not asked for (--no-times)", "rows": None}
    if not torch.cuda.is_available():
        return {"device": None, "reason": "need an NVIDIA GPU, and torch sees none here", "rows": None}
    device = hardware.open_device("cuda")
    name = hardware.device_name(device)
    same = bounds.DEVICE_NAMES.get(name) == bounds.find_chip(options.chip).name
    ceilings = numbers.ceilings_of(folder) if same else bounds.NOMINAL
    _, q, kv = lengths.typical()
    return {"device": name, "reason": None, "rows": numbers.measure(q, kv, options, device, ceilings)}


def beside_the_model(times: dict, ops: dict) -> dict:
    """Measured times with what was said before measuring: bound_ms of op and phase, and expected_ms of the
    implementation that was fastest in the records of the nearest workload (None for the others)."""
    for row in times["rows"] or []:
        said = ops.get(row["op"], {}).get("phases", {}).get(row["phase"])
        best = said["best"] if said else None
        row["bound_ms"] = said["bound_ms"] if said else None
        row["expected_ms"] = best["expected_ms"] if best and best["impl"] == row["impl"] else None
    return times


def this_chip() -> str:
    """The GPU of this machine where its figures are known, else h200."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return bounds.DEVICE_NAMES.get(name, "h200")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gem.bench.replay", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--lengths", type=Path, required=True, metavar="FILE", help="lengths of the queries, one a line, or a CSV")
    add("--column", help="column of --lengths, which is then a CSV with a header")
    add("--kv-lengths", type=Path, metavar="FILE", help="lengths of the keys, where they differ (default: the same)")
    add("--kv-column", help="column of --kv-lengths")
    add("--heads", type=positive, default=4, help="attention heads (default %(default)s)")
    add("--dim", type=positive, default=128, help="size of a head (default %(default)s)")
    add("--batch", type=positive, help=f"sequences a batch (default: all, at most {DEFAULT_BATCH})")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="default %(default)s")
    add("--activation", choices=sorted(ACTIVATIONS), default="gelu_tanh", help="of gdpa (default %(default)s)")
    add("--chip", choices=sorted(bounds.CHIPS), help="of bounds and records (default: this GPU's, else h200)")
    add("--records", type=Path, metavar="DIR", help="records of that chip (default: data/measured/<chip>)")
    add("--ranks", type=positive, default=64, help="data-parallel ranks to balance over (default %(default)s)")
    add("--quadratic-share", type=balance.share, default=0.5, help="of a load, by pairs (default %(default)s)")
    add("--seed", type=non_negative, default=0)
    add("--no-times", action="store_true", help="measure nothing, also on a GPU")
    add("--json", type=Path, metavar="OUT", help="also write everything to this file")
    options = parser.parse_args(arguments)
    options.chip = options.chip or this_chip()
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = options.records or MEASURED / options.chip
    if options.records and not (folder / "kernels.csv").is_file():
        raise ValueError(f"--records: {folder} has no kernels.csv; allowed: a folder such as data/measured/h200")
    if options.json and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json: {options.json.parent} is no folder; allowed: a file in a folder that exists")
    lengths = load(options)
    found = report(lengths, options, folder)
    try:
        found["times"] = beside_the_model(measured_times(lengths, options, folder), found["ops"])
    except DeviceLostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(text_of(found)))
    if options.json:
        record.write_text(options.json, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
