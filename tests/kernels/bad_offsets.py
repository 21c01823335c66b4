"""Offsets that every op refuses for 16 rows, and what it says after the argument's name: the first bad index and its
value, or the kind of what it got."""

import torch

ROWS = 16
BAD_OFFSETS = {
    "decreasing": (torch.tensor([0, 12, 8, 16]), r"offsets\[2\] = 8 is below offsets\[1\] = 12"),
    "start": (torch.tensor([1, 4, 16]), r"offsets\[0\] = 1; allowed: 0"),
    "past_the_end": (torch.tensor([0, 4, 17]), r"offsets\[2\] = 17; allowed: at most 16"),
    "float": (torch.tensor([0.0, 16.0]), r"dtype torch.float32; allowed: torch.int32, torch.int64"),
    "device": (torch.tensor([0, 16], device="meta"), r"on device meta; allowed: cpu"),
    "shape": (torch.tensor([[0], [16]]), r"shape \(2, 1\); allowed: \(B \+ 1,\)"),
    "no_entry": (torch.tensor([], dtype=torch.int64), r"shape \(0,\); allowed"),
    "list": ([0, 16], r"got list; allowed: a tensor"),
}
