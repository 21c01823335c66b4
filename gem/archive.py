"""The shipped records and what was made of them as one tar file with checksums, for a place that keeps artifacts.

    snakemake --cores all archive                                   results/frozen/archive.tar
    python -m gem.archive --output records.tar                      the same from a finished `frozen`
    python -m gem.archive --check records.tar                       every file against SHA256SUMS inside
    python -m gem.archive --check records.tar --against .           and that this checkout holds the same bytes

The same files give the same archive: names sorted, no owner, no time of day, fixed modes. It holds data/measured, the
report and the claims made from them, and SHA256SUMS over all of it, with paths as they lie in a checkout. Whoever
unpacks it in a checkout of the same commit and builds `frozen` gets the same report; `sha256sum --check SHA256SUMS`
and --against say so.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gem.cli import Parser
from gem.digest import ROOT

MADE = ("results/frozen/claims/claims.csv", "results/frozen/paper/report.pdf")
SUMS = "SHA256SUMS"


def contents(root: Path) -> dict[str, Path]:
    """Name in the archive -> file, sorted: data/measured, then what was made. ValueError names what is missing."""
    shipped = sorted(path for path in (root / "data" / "measured").rglob("*") if path.is_file())
    if not any(path.name == "runs.json" for path in shipped):
        raise ValueError(f"{root}/data/measured: no runs.json; allowed: a checkout with frozen records")
    for name in MADE:
        if not (root / name).is_file():
            raise ValueError(f"{name}: no such file; allowed: after snakemake --cores all frozen")
    return {path.relative_to(root).as_posix(): path for path in [*shipped, *(root / name for name in MADE)]}


def write(root: Path, output: Path) -> int:
    """Pack; returns the number of files. The archive is whole or absent."""
    files = {name: path.read_bytes() for name, path in contents(root).items()}
    files[SUMS] = "".join(f"{digest(data)}  {name}\n" for name, data in files.items()).encode()
    when = _newest(root)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mtime, info.mode = len(data), when, 0o644
                archive.addfile(info, io.BytesIO(data))
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return len(files)


def check(archive: Path, against: Path | None = None) -> int:
    """Number of files whose checksums hold, inside the archive and, with `against`, in that checkout. ValueError names
    the first file that differs, is missing, or is not listed.
    """
    try:
        with tarfile.open(archive, "r:") as source:
            found = {item.name: source.extractfile(item).read() for item in source if item.isfile()}
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive}: not a whole tar file ({error}); allowed: one written by gem.archive") from None
    if SUMS not in found:
        raise ValueError(f"{archive}: has no {SUMS}; allowed: an archive written by gem.archive")
    lines = found.pop(SUMS).decode().splitlines()
    listed = {name: value for value, _, name in (line.partition("  ") for line in lines)}
    for name in sorted(listed.keys() ^ found.keys()):
        raise ValueError(f"{archive}: {name} is {'missing' if name in listed else f'not in {SUMS}'}")
    for name, value in listed.items():
        if digest(found[name]) != value:
            raise ValueError(f"{archive}: {name} is not the file of {SUMS}")
        if against and not (against / name).is_file():
            raise ValueError(f"{against / name}: no such file; {archive.name} has one")
        if against and digest((against / name).read_bytes()) != value:
            raise ValueError(f"{against / name}: differs from the one in {archive.name}")
    return len(listed)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _newest(root: Path) -> int:
    """Time of the newest run, which stands for the time of every file."""
    folders = (root / "data" / "measured").glob("*/runs.json")
    runs = [info for path in folders for info in json.loads(path.read_text(encoding="utf-8")).values()]
    return max((int(datetime.fromisoformat(info["utc"]).timestamp()) for info in runs if info.get("utc")), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.archive", description="Pack or check the shipped records with their report.")
    parser.add_argument("--output", type=Path, metavar="TAR", help="write this archive")
    parser.add_argument("--check", type=Path, metavar="TAR", help="check this archive instead")
    parser.add_argument("--against", type=Path, metavar="DIR", help="with --check: a checkout with the same files")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to pack (default: this one)")
    args = parser.parse_args(argv)
    if bool(args.output) == bool(args.check) or (args.against and not args.check):
        parser.error("one of --output and --check is needed, --against with --check alone")
    try:
        if args.check:
            count = check(args.check, args.against)
            print(f"{args.check}: {count} files as listed" + (f", the same in {args.against}" if args.against else ""))
        else:
            count = write(args.root, args.output)
            print(f"{args.output}: {count} files, sha256 {digest(args.output.read_bytes())}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
