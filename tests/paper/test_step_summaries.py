"""Tables and facts of timed steps hold the numbers of the records, and are absent without them."""

from figures.load import Source
from paper import step_summaries
from tests.figures.test_steps import STEP_MS, source  # noqa: F401 (a fixture)


def test_steps_stand_in_order_with_their_numbers(source):  # noqa: F811
    (table,) = step_summaries.timed(source)
    names = [row[0] for row in table["rows"]]
    assert names[:3] == ["baseline_padded", "add_jagged", "baseline_varlen"] and names[-1] == "drop_gdpa"
    assert table["device"] == "H200" and len(names) == len(STEP_MS)
    full = dict(zip(table["header"], table["rows"][names.index("full")], strict=True))
    assert full["step, ms"] == "100.0" and full["samples/s"] == "10,240" and full["MFU, %"] == "20.0"
    low = dict(zip(table["header"], table["rows"][names.index("mxfp8_full")], strict=True))
    assert low["mixed MFU, %"] == "22.5" and full["mixed MFU, %"] == "-" and "8 bits" in table["note"]
    assert full["local MFU, %"] == "90.0" and full["parts / step"] == "-"


def test_components_are_milliseconds(source):  # noqa: F811
    (table,) = step_summaries.components(source)
    row = next(row for row in table["rows"] if row[0] == "full")
    assert dict(zip(table["header"], row, strict=True))["attention, ms"] == "50.00"


def test_facts_are_ratios_of_the_headline(source):  # noqa: F811
    facts = step_summaries.facts(source)
    assert facts["step.qps_ratio.full.baseline_padded"] == {"text": "4\u00d7", "device": "H200"}
    assert facts["step.qps_ratio.full_same_math.baseline_varlen"]["text"] == "1.5\u00d7"
    assert facts["step.qps_ratio.mxfp8_full.full"]["text"] == "1.25\u00d7"
    assert facts["step.mfu_mixed.mxfp8_full"]["text"] == "22.5 %"
    assert facts["step.mfu.full"]["text"] == "20.0 %"
    assert facts["step.predicted_count"]["text"] == str(len(STEP_MS))


def test_nothing_without_records(tmp_path):
    empty = Source(tmp_path, tmp_path, tmp_path)
    assert step_summaries.facts(empty) == {} and all(make(empty) == [] for make in step_summaries.ALL)
