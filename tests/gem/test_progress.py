"""gem.progress: what is printed where, with a fake clock."""

import io

import pytest

from gem.progress import Progress, format_count, format_seconds


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_log_lines_are_plain_and_rare():
    clock, out = Clock(), io.StringIO()
    with Progress(1000, "rows", "synthesize", stream=out, clock=clock, log_seconds=10) as progress:
        for _ in range(100):
            clock.now += 0.25
            progress.advance(10, loss=0.5)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and "\r" not in out.getvalue()
    assert lines[0] == "synthesize: 400/1,000 rows (40 %), 40 rows/s, loss 0.5, 0:15 left"
    assert lines[-1].endswith("took 0:25")


def test_terminal_rewrites_one_line():
    clock, out = Clock(), Terminal()
    with Progress(None, "steps", "train", stream=out, clock=clock) as progress:
        for _ in range(4):
            clock.now += 1
            progress.advance()
    assert out.getvalue().count("\r") == 5 and out.getvalue().count("\n") == 1
    assert "left" not in out.getvalue()


def test_quiet_counts_and_prints_nothing():
    out = io.StringIO()
    with Progress(0, "rows", "x", stream=out, quiet=True) as progress:
        progress.advance(3)
    assert progress.done == 3 and out.getvalue() == ""


def test_bad_total():
    with pytest.raises(ValueError, match="total is -1"):
        Progress(-1, "rows", "x")


def test_formats():
    assert [format_count(x) for x in (7, 1234567, 2.5e9)] == ["7", "1.23M", "2.5G"]
    assert [format_seconds(x) for x in (3.21, 65, 3725.2)] == ["3.2s", "1:05", "1:02:05"]
