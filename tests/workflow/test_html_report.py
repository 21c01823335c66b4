"""Snakemake's report as a web page: what is packed, and that a real browser opens all of it without an error."""

import zipfile

import pytest

from . import browser
from .conftest import Workplace

CLICK = """(text => {
  const found = [...document.querySelectorAll("a")].find(link => link.innerText.trim() === text);
  if (found) found.click();
  return Boolean(found);
})"""
SHOWN = """(() => {
  const image = document.querySelector("img[src*='data/raw']");
  return Boolean(image && image.complete && image.naturalWidth > 100);
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """report.html, unpacked, of a small run with stubs: one ablation, one figure and one table."""
    place = Workplace(tmp_path_factory.mktemp("web"), stubs=True)
    targets = ["ablation_full", "figure_F02", "table_T02"]
    done = place.snakemake("--cores", "2", *targets)
    assert done.returncode == 0, done.stdout[-3000:]
    done = place.snakemake(*targets, "--report", "report.zip")
    assert done.returncode == 0, done.stdout[-3000:]
    with zipfile.ZipFile(place.folder / "report.zip") as archive:
        archive.extractall(place.folder / "unpacked")
    return place.folder / "unpacked" / "report" / "report.html"


@pytest.fixture(scope="module")
def program():
    found = browser.find()
    if found is None:
        pytest.skip("no Chromium found (envs/README.md says how to get one); GEM_BROWSER=PATH names one")
    return found


def test_report_packs_what_was_made(page):
    names = {path.name for path in page.parent.rglob("*") if path.is_file()}
    assert {"F02.svg", "T02.csv", "full.md"} <= names


def test_a_browser_opens_the_report_without_errors(page, program, tmp_path):
    with browser.Browser(program) as window:
        window.open(page.as_uri())
        assert "A replication of the training-efficiency work" in window.wait_for("document.body.innerText")
        first = window.screenshot(tmp_path / "start.png")
        for category, name in (("Figure", "F02"), ("Table", "T02"), ("Ablations", "full")):
            window.open(page.as_uri())
            window.wait_for(f"{CLICK}({category!r})")
            assert name in window.wait_for("document.querySelector('tbody')?.innerText")
        window.open(page.as_uri())
        window.wait_for(f"{CLICK}('Figure')")
        window.wait_for("Boolean(document.querySelector('tbody a'))")
        window.run("document.querySelector('tbody a').click()")
        window.wait_for(SHOWN)
        second = window.screenshot(tmp_path / "figure.png")
        assert window.errors == []
    for shot in (first, second):
        assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 10_000
    assert first.read_bytes() != second.read_bytes()


def test_the_browser_sees_errors(program, tmp_path):
    """What the test above counts as an error is one: a throw, console.error, a missing file, an address of the net."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<script>setTimeout(() => { throw new Error('thrown later') }, 0); console.error('said aloud');</script>"
        "<img src='gone.png'><script src='http://127.0.0.1:9/x.js'></script>"
    )
    with browser.Browser(program) as window:
        window.open(bad.as_uri())
        window.wait_for("document.readyState === 'complete'")
        said = "\n".join(window.errors)
        with pytest.raises(RuntimeError, match="no_such_name"):
            window.run("no_such_name")
    for part in ("thrown later", "said aloud", "gone.png", "asks the network for http://127.0.0.1:9/x.js"):
        assert part in said
