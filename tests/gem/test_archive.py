"""The archive of shipped records has the same bytes everywhere, and says what in it or in a checkout has changed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from figures import cli, fig_02_gap_forward, fig_04_jfa_generations
from gem import archive, claims, record_store
from paper import build, values
from tests.paper import tiny

ROOT = Path(__file__).resolve().parents[2]


def make(root: Path) -> None:
    """From `root`/data/measured to the archive, as the workflow does it for `frozen`, with two figures."""
    shared, frozen, measured = str(ROOT / "data" / "published"), Path("results/frozen"), Path("data/measured")
    with contextlib.chdir(root):  # so that records are named as in a checkout
        record_store.collect(measured, frozen / "records")
        sources = ["--measured", str(measured)]
        assert claims.main([*sources, "--output", f"{frozen}/claims/claims.csv"]) == 0
        for module in (fig_02_gap_forward, fig_04_jfa_generations):
            where = ["--records", f"{frozen}/records", "--output", f"{frozen}/figures/{module.ID}"]
            assert cli.main(module, [*sources, "--published", shared, *where]) == 0
        where = [*sources, "--published", shared, "--output", f"{frozen}/paper/values.json"]
        assert values.main(["--tier", "frozen", *where]) == 0
        assert build.main(["--tier", "frozen", "--output", f"{frozen}/paper/report.pdf"]) == 0
        assert archive.main(["--root", ".", "--output", "records.tar"]) == 0


def elsewhere(root: Path, **environment: str) -> None:
    """`make` in a process of its own."""
    code = "import sys; from tests.gem import test_archive as t; t.make(t.Path(sys.argv[1]))"
    environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, root], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A checkout's data/measured with a few records, and the report and the archive made of them."""
    root = tmp_path_factory.mktemp("archive") / "one"
    tiny.frozen_kernels(root / "data" / "measured")
    make(root)
    return root


def test_a_rebuild_from_the_archive_alone_has_the_same_bytes(built, tmp_path):
    """Elsewhere, in a process with other hashes, time zone and language."""
    root = tmp_path / "an other place"
    root.mkdir()
    with tarfile.open(built / "records.tar") as packed:
        names = packed.getnames()
        packed.extractall(root, [item for item in packed if item.name.startswith("data/")], filter="data")
    assert not (root / "results").exists() and names[-1] == archive.SUMS and sorted(names[:-1]) == names[:-1]
    elsewhere(root, PYTHONHASHSEED="77", TZ="Asia/Tokyo", LC_ALL="C", SOURCE_DATE_EPOCH="86400")
    for name in archive.MADE:
        assert (root / name).read_bytes() == (built / name).read_bytes(), name
    assert (root / "records.tar").read_bytes() == (built / "records.tar").read_bytes()
    assert archive.check(built / "records.tar", root) == len(names) - 1


def test_times_owners_and_modes_of_files_do_not_matter(built, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    for path in (copy / "data").rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    archive.write(copy, copy / "again.tar")
    assert (copy / "again.tar").read_bytes() == (built / "records.tar").read_bytes()


def test_a_changed_byte_is_found(built, tmp_path, capsys):
    whole = (built / "records.tar").read_bytes()
    (damaged := tmp_path / "damaged.tar").write_bytes(whole.replace(b"uniform_1024", b"uniform_1025", 1))
    assert archive.main(["--check", str(damaged)]) == 1
    assert "is not the file of SHA256SUMS" in capsys.readouterr().err
    (cut := tmp_path / "cut.tar").write_bytes(whole[:700])
    assert archive.main(["--check", str(cut)]) == 1
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    (copy / archive.MADE[1]).write_bytes(b"%PDF- another")
    assert archive.main(["--check", str(built / "records.tar"), "--against", str(copy)]) == 1
    error = capsys.readouterr().err
    assert "report.pdf: differs from the one in records.tar" in error
    assert archive.main(["--check", str(built / "records.tar"), "--against", str(built)]) == 0


def test_what_is_missing_is_one_line(tmp_path, capsys):
    assert archive.main(["--root", str(tmp_path), "--output", str(tmp_path / "x.tar")]) == 1
    assert "no runs.json" in capsys.readouterr().err
    tiny.frozen_kernels(tmp_path / "data" / "measured")
    assert archive.main(["--root", str(tmp_path), "--output", str(tmp_path / "x.tar")]) == 1
    error = capsys.readouterr().err
    assert "allowed: after snakemake --cores all frozen" in error and error.count("\n") == 1
    assert not (tmp_path / "x.tar").exists()
    with pytest.raises(SystemExit):
        archive.main([])
