"""Times of whole variants from times of their modules, and what each optimisation saves whatever the order.

A waterfall says what an optimisation saved after those before it; another order gives other numbers. The Shapley value
is the mean over all orders: with the time of every subset of toggles known it is exact. Subsets come from modules
timed one by one, since a module feels few toggles: seven toggles make 128 models out of some twenty cells.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from gem.bench.cells import COLUMNS, PER_EVENT, Cell
from gem.config import ModelConfig
from gem.model import branch_steps

STEPS = {"feed_forward": "feed_forward", "self_attention": "attend", "pooling": "pool"}
# Toggles between baseline_varlen and full that change what one GPU computes; balancing only moves samples between
# batches.
PLAYERS = ("attention_impl", "gdpa_impl", "self_attention", "rotary", "norm", "compskip", "pooling")
Place = tuple[Cell, int]  # a cell and the index of its event type (0 for modules that have none)


def cells_of(row: Mapping[str, str], model: ModelConfig, num_events: int) -> Counter[Place]:
    """How often each cell runs in a forward pass of the variant of `row`."""
    found: Counter[Place] = Counter()
    for layer in range(model.num_layers):
        found.update((Cell.of(kind, row), 0) for kind in COLUMNS if kind not in PER_EVENT)
        for index in range(num_events):
            depth = model.events[index % len(model.events)].num_layers
            steps = branch_steps(layer, depth, row["compskip"] == "on") or {}
            found.update((Cell.of(kind, row), index) for kind in PER_EVENT if steps.get(STEPS[kind]))
    return found


def subset_row(low: Mapping[str, str], high: Mapping[str, str], players: frozenset[str] | set[str]) -> dict[str, str]:
    """The row `low` with the columns in `players` as in `high`."""
    return dict(low) | {name: high[name] for name in players}


def subsets(players: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(chosen) for size in range(len(players) + 1) for chosen in itertools.combinations(players, size)]


def shapley(players: Sequence[str], value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Each player's mean marginal value over all orders; they sum to value(all) - value(none)."""
    known = {chosen: value(chosen) for chosen in subsets(players)}
    count = len(players)
    shares = dict.fromkeys(players, 0.0)
    for chosen, base in known.items():
        weight = math.factorial(len(chosen)) * math.factorial(count - len(chosen) - 1) if len(chosen) < count else 0
        for player in players:
            if player not in chosen:
                shares[player] += weight / math.factorial(count) * (known[chosen | {player}] - base)
    return shares
