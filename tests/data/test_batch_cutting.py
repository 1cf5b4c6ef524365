"""A batch cut in parts is what the collator makes of their rows."""

from itertools import product

import pytest
import torch
from tiny_generators import make_rows
from token_rows import pad_rows
from transformers import BatchEncoding, EsmTokenizer

from hf_ext.data.antibodies import AntibodyCollator, PairEncoder
from hf_ext.data.batch_cutting import copy_batch, cut_batch
from hf_ext.data.batching import RepeatedRows
from hf_ext.data.collators import SequenceCollator
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.data.varlen_layout import LayoutMaker

TOKENS = [{"input_ids": [5] * n, "labels": [-100] * (n - 1) + [6]} for n in (3, 9, 4, 6, 7)]


def plain(value):
    """Tensors as lists with their dtype; without the layout, which models make anew."""
    if torch.is_tensor(value):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(name, plain(part)) for name, part in items if name != "layout"]
    return value


def assert_parts_of(collate, rows, each):
    whole = collate(rows)
    parts = cut_batch(whole, each)
    assert len(parts) == -(-len(rows) // each)
    for number, part in enumerate(parts):
        assert dict(plain(part)) == dict(plain(collate(rows[number * each : (number + 1) * each])))
        assert "layout" not in part
    assert plain(whole) == plain(collate(rows))  # which is left as it was


def test_padded_tokens_and_what_has_no_rows():
    with_layout = LayoutMaker(True, True, True).add_to
    for each in (1, 2, 3, 4):
        assert_parts_of(pad_rows, TOKENS, each)
        assert_parts_of(lambda rows: with_layout(pad_rows(rows)), TOKENS, each)
    whole = {"input_ids": torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]]), "name": "all"}
    whole["attention_mask"] = whole["input_ids"].ne(0).long()
    first, second = cut_batch(whole, 2)
    assert first["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert (second["input_ids"].tolist(), second["attention_mask"].tolist()) == ([[6]], [[1]])
    assert second["name"] == "all"


def test_antigens_that_rows_share_and_labels_as_wide_as_these():
    rows = make_rows()
    states = AntibodyCollator(
        states_of=lambda antigens: [torch.full((len(ids), 2), 1.0 * len(ids)) for ids in antigens]
    )
    for collate, each in product((AntibodyCollator(), states), (1, 2, 3)):
        assert_parts_of(collate, [rows[i] for i in (0, 1, 0, 1, 0)], each)
    columns = PairEncoder().encode_rows(["ACDEFGH", "A"], ["ACDEFG", "ACDEF"], ["", "CC"], [1, 2])  # both 9 wide
    assert_parts_of(AntibodyCollator(), [dict(zip(columns, row)) for row in zip(*columns.values())], 1)


@pytest.mark.parametrize(("too_long", "missing"), [("window", []), ("window", ["heavy"]), ("truncate", ["heavy"])])
def test_inputs_of_an_affinity_model_with_windows_and_missing_chains(demo_encoders, missing, too_long):
    tokenizer = ResidueTokenizer(EsmTokenizer.from_pretrained(demo_encoders[1]), 1)
    tokenizer.max_residues = 4
    collator = SequenceCollator({"heavy": tokenizer}, {"heavy": ["heavy"]}, too_long, 1, missing)
    chains = ["EVQL", "", "EVQLVESGG", "", "EV"] if missing else ["EVQL", "EVQLVESGG", "EVQLVESGGGLV", "EVQLV", "EV"]
    rows = [{"heavy": chain, "label": 1.0 * i} for i, chain in enumerate(chains)]
    whole = collator(rows)
    for each, number in product((1, 2, 3), range(5)):
        if number * each >= len(rows):
            continue
        part, mine = cut_batch(whole, each)[number], rows[number * each : (number + 1) * each]
        made, expected = part["sequences"]["heavy"], collator(mine)["sequences"]["heavy"]
        assert part["labels"].tolist() == [row["label"] for row in mine]
        if not any(row["heavy"] for row in mine):  # another one stands in
            assert made["place"].tolist() == [-1] * len(mine)
            continue
        if "owner" not in expected:  # none of these is cut, so that the collator does not number them
            made = {name: value for name, value in made.items() if name not in ("owner", "num_rows")}
        assert dict(plain(made)) == dict(plain(expected))


def test_classes_of_batches_stay_and_what_cannot_be_cut_is_left_whole():
    for kind in (RepeatedRows, BatchEncoding):
        assert all(isinstance(part, kind) for part in cut_batch(kind(pad_rows(TOKENS)), 2))
    assert type(copy_batch(RepeatedRows(a=1))) is RepeatedRows
    for batch in (
        {"input_ids": torch.ones(1, 20), "cu_seqlens": torch.tensor([0, 8, 20])},  # packed in one row
        {"input_ids": torch.ones(4, 5), "position_ids": torch.arange(5)[None]},
        {"input_ids": torch.ones(4, 5), "num": torch.tensor(3)},
        {"input_ids": torch.ones(4, 5), "other": object()},
        {"input_ids": torch.ones(1, 5)},
        torch.ones(4, 5),
        {},
        {"a": 1},
    ):
        assert cut_batch(batch, 2) is None, batch
