"""T01: the claims of the source and our verdicts."""

import sys

from figures import cli

ID = "T01"
CAPTION = (
    "Every claim of the source with its published value, what our chip should allow, what we found, and the "
    "verdict by a rule that was fixed before the measurement. not_attempted: no record exists, and the limiter "
    "says why."
)
COLUMNS = ["id", "statement", "published", "expected", "ours", "unit", "verdict", "scope", "limiter", "figure"]


def build(source):
    return source.claims()[COLUMNS]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
