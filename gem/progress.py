"""Progress of long work: one line that moves on a terminal, plain log lines everywhere else.

with Progress(total=100_000, unit="samples", label="train") as progress:
    for batch in batches:
        progress.advance(len(batch), loss=0.41)

Each report says how much is done, the rate since the start and the time left. A terminal gets at most five updates a
second on one line; a file or a pipe gets a line every `log_seconds` and one at the end, so that logs stay readable.
"""

import sys
import time
from typing import TextIO


def format_count(value: float) -> str:
    """1234567 -> '1.23M': three significant digits, for counts and rates."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """3725.2 -> '1:02:05', 65 -> '1:05', 3.21 -> '3.2s'."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Counts work done towards `total` (None: unknown, then no time left is shown) and reports it to `stream`.

    unit: what is counted, in the plural ("rows", "steps"). label: what the work is. stream: stderr by default.
    quiet: count, but print nothing. log_seconds: how often a stream that is no terminal gets a line.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        label: str,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        log_seconds: float = 10.0,
        clock=time.monotonic,
    ):
        if total is not None and total < 0:
            raise ValueError(f"Progress: total is {total}; it must be None or at least 0")
        self.total, self.unit, self.label, self.quiet = total, unit, label, quiet
        self.stream = sys.stderr if stream is None else stream
        self.terminal = bool(getattr(self.stream, "isatty", lambda: False)())
        self.interval = 0.2 if self.terminal else log_seconds
        self.clock = clock
        self.start = self.last = clock()
        self.done = 0
        self.extras: dict[str, object] = {}
        self.width = 0
        self.closed = False

    def advance(self, amount: int = 1, **extras) -> None:
        """Counts `amount` more; `extras` (loss=0.3, events="1.2M/s") are shown after the rate, newest values."""
        self.done += amount
        self.extras.update(extras)
        now = self.clock()
        if now - self.last >= self.interval:
            self.last = now
            self._write(self.line(now))

    def line(self, now: float | None = None) -> str:
        """The report as text, without a line end."""
        elapsed = max((self.clock() if now is None else now) - self.start, 1e-9)
        rate = self.done / elapsed
        parts = [f"{self.done:,} {self.unit}"]
        if self.total is not None:
            share = 100.0 * self.done / self.total if self.total else 100.0
            parts = [f"{self.done:,}/{self.total:,} {self.unit} ({share:.0f} %)"]
        parts.append(f"{format_count(rate)} {self.unit}/s")
        for name, value in self.extras.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        if self.closed:
            parts.append(f"took {format_seconds(elapsed)}")
        elif self.total is not None and rate > 0:
            parts.append(f"{format_seconds(max(self.total - self.done, 0) / rate)} left")
        return f"{self.label}: " + ", ".join(parts)

    def close(self) -> None:
        """The last report, with the time that the work took. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._write(self.line(), end="\n")

    def _write(self, text: str, end: str = "") -> None:
        if self.quiet:
            return
        if self.terminal:
            padding = " " * max(0, self.width - len(text))
            self.stream.write(f"\r{text}{padding}{end}")
            self.width = len(text)
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.close()
        elif self.terminal and not self.quiet:
            self.stream.write("\n")
