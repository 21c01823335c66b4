"""Lists of work in Triton's interpreter, one line a check that held: python -m tests.kernels.work_lists_checks"""

from __future__ import annotations

import itertools

import torch

from kernels.jagged import lengths_to_offsets
from kernels.work_lists import KEY_ROWS, QUERY_ROWS, build_backward_lists, build_forward_list

CASES = 30


def drawn(case: int, g: torch.Generator):
    """(q offsets or None, kv offsets, rows of both), some with empty sequences, rows past the end or no sequence."""
    batch = 0 if case == 4 else 150 if case == 7 else int(torch.randint(1, 9, (1,), generator=g))
    q_lengths = torch.randint(0, 400, (batch,), generator=g)
    kv_lengths = torch.randint(0, 400, (batch,), generator=g) * torch.randint(0, 2, (batch,), generator=g)
    spare, dense = case % 4, case % 3 == 0
    kv = lengths_to_offsets(kv_lengths)
    q = None if dense else lengths_to_offsets(q_lengths)
    return (
        q,
        kv.long() if case % 2 else kv,
        32 if dense else int(q_lengths.sum()) + spare,
        int(kv_lengths.sum()) + spare,
    )


def spans(offsets) -> list[tuple[int, int]]:
    """(first row, rows) of every sequence."""
    ends = offsets.tolist()
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def forward_lists_hold_every_valid_tile_longest_keys_first() -> None:
    g = torch.Generator().manual_seed(0)
    for case in range(CASES):
        q, kv, q_rows, _ = drawn(case, g)
        keys = spans(kv)
        sequences = [
            (*((0, q_rows) if q is None else spans(q)[i]), *keys[i], i * q_rows if q is None else int(q[i]))
            for i in range(len(keys))
        ]
        if q is not None:  # the rows past the last sequence: their outputs are zeros
            sequences.append((int(q[-1]), q_rows - int(q[-1]), 0, 0, int(q[-1])))
        expected = []
        for q_first, q_size, kv_first, kv_size, out in sorted(sequences, key=lambda row: -row[3]):
            tiles = -(-q_size // 64)
            expected += [[q_first, q_size, kv_first, kv_size, len(expected), tiles, out, 0]] * tiles
        table, count = build_forward_list(q, kv, q_rows, 64)
        assert table[: int(count)].tolist() == expected, case
        assert all(row == [0, 0, 0, 0, 0, 1, 0, 0] for row in table[int(count) :].tolist()), case


def backward_lists_name_every_key_tile_once() -> None:
    """Every tile of keys of every sequence once, next to its neighbours, with counters of its own."""
    g = torch.Generator().manual_seed(1)
    for case in range(CASES):
        q, kv, q_rows, kv_rows = drawn(case, g)
        dense, batch, end = q is None, kv.numel() - 1, int(kv[-1])
        queries = [(0, q_rows)] * batch if dense else spans(q)
        firsts = [i * q_rows if dense else int(q[i]) for i in range(batch)]
        units = [(*queries[i], *spans(kv)[i], firsts[i]) for i in range(batch)]
        rest = 0 if dense else int(q[-1])
        units.append((batch * q_rows if dense else rest, 0 if dense else q_rows - rest, 0, 0))
        units.append((0, 0, end, kv_rows - end, 0))  # keys past the last sequence: gradients of zero
        found, table, count = build_backward_lists(q, kv, q_rows, kv_rows, 0)
        assert [row[:4] for row in found.tolist()][:batch] == [list(row[:4]) for row in units[:batch]], case
        assert [row[1] for row in found.tolist()] == [row[1] for row in units], case  # zero_kernel fills these
        expected = [(*row[2:4], *row[:2]) for row in units if row[3] for _ in range(-(-row[3] // KEY_ROWS))]
        table, owners, start = table[: int(count)].tolist(), {}, 0
        assert sorted(tuple(row[:4]) for row in table) == sorted(expected), case
        for i, row in enumerate(table):  # the tiles of a sequence follow one another
            start = i if row[5] == i else start
            assert row[5] == start and row[6] == -(-row[1] // KEY_ROWS) and i < start + row[6], case
            for m in range(-(-row[3] // QUERY_ROWS)):  # no two sequences share a counter, and all counters exist
                assert owners.setdefault(row[7] + m, row[4]) == row[4], case
                assert row[7] + m <= (batch * q_rows if dense else q_rows) // QUERY_ROWS + batch + 2, case
        assert all(a[3] >= b[3] for a, b in itertools.pairwise(table)), case
        _, pieces, number = build_backward_lists(q, kv, q_rows, kv_rows, 1)
        assert int(number) == batch + 2 == pieces.shape[0], case
        assert sorted(pieces[:, 2:4].tolist()) == sorted(found[:, :2].tolist()), case
        tiles = pieces[:, 6].tolist()
        assert sum(tiles) == len(table) and pieces[:, 5].tolist() == [sum(tiles[:i]) for i in range(batch + 2)], case


CHECKS = (forward_lists_hold_every_valid_tile_longest_keys_first, backward_lists_name_every_key_tile_once)

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(check.__name__, flush=True)
