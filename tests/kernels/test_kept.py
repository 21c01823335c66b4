"""Tables kept for a batch: the same ones while its offsets are the same, others as soon as they are not."""

import gc

import pytest
import torch

from kernels import kept as module
from kernels.kept import asked, kept


def total(q_offsets, kv_offsets, factor):
    """A table of its own each time it is built."""
    return torch.stack([x[-1] * factor for x in (q_offsets, kv_offsets) if x is not None])


@pytest.fixture
def offsets():
    return torch.tensor([0, 3, 5]), torch.tensor([0, 2, 9])


def test_built_once_for_the_same_offsets_and_sizes(offsets):
    first = kept(total, *offsets, 2)
    assert first.tolist() == [10, 18]
    assert kept(total, *offsets, 2) is first
    assert kept(total, *offsets, 3).tolist() == [15, 27]
    assert kept(total, None, offsets[1], 2).tolist() == [18]
    assert kept(total, offsets[1], offsets[0], 2).tolist() == [18, 10]


def test_other_functions_of_the_same_name_have_their_own(offsets):
    def other():
        def total(q_offsets, kv_offsets, factor):
            return "other"

        return total

    assert kept(total, *offsets, 2).tolist() == [10, 18]
    assert kept(other(), *offsets, 2) == "other"


def test_built_anew_when_offsets_change_in_place(offsets):
    first = kept(total, *offsets, 2)
    offsets[1][-1] = 7
    assert kept(total, *offsets, 2).tolist() == [10, 14]
    assert first.tolist() == [10, 18]


def test_equal_offsets_in_another_tensor_are_others(offsets):
    first = kept(total, *offsets, 2)
    again = kept(total, offsets[0], offsets[1].clone(), 2)
    assert again is not first and torch.equal(again, first)


def test_nothing_stays_when_offsets_are_gone(offsets):
    kept(total, *offsets, 2)
    q_offsets, kv_offsets = (x.clone() for x in offsets)
    before = len(module._KEPT)
    kept(total, q_offsets, kv_offsets, 2), kept(total, None, kv_offsets, 2)
    assert len(module._KEPT) == before + 2
    del q_offsets
    gc.collect()
    assert len(module._KEPT) == before + 1
    del kv_offsets
    gc.collect()
    assert len(module._KEPT) == before


def test_inference_tensors_have_no_version_and_are_not_kept():
    with torch.inference_mode():
        offsets = torch.tensor([0, 4])
        first = kept(total, None, offsets, 2)
        offsets[-1] = 5
        assert first.tolist() == [8] and kept(total, None, offsets, 2).tolist() == [10]


def test_what_is_asked_for_can_be_built_again(offsets):
    kept(total, *offsets, 2)
    with asked() as builds:
        there, new = kept(total, *offsets, 2), kept(total, *offsets, 5)
    kept(total, *offsets, 6)
    assert [build().tolist() for build in builds] == [[10, 18], [25, 45]] == [there.tolist(), new.tolist()]
    assert builds[0]() is not there
