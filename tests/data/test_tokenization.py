"""Text to tokens and batches: ids by hand and as the tokenizer's own, lengths, chains that may be missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_t5 import T5_LETTERS, write_t5_vocabulary
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, BertTokenizer, EsmcTokenizer, EsmTokenizer, PreTrainedTokenizerFast, T5Config

from hf_ext.data import RARE, STANDARD, DataArguments, ResidueTokenizer, SequenceCollator, find_missing, load_data
from hf_ext.errors import DataError
from hf_ext.models import FAMILIES

ESM_VOCAB = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>", "<mask>"]
BERT_VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STANDARD, "X"]
SPACED = {"esm": False, "esmc": False, "bert": True, "t5": True}


def esm(folder, vocabulary=ESM_VOCAB):
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return EsmTokenizer(str(folder / "vocab.txt"), model_max_length=1024)


def esmc(folder):
    return EsmcTokenizer()


def bert(folder, vocabulary=BERT_VOCAB):
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False)


def t5(folder, letters=T5_LETTERS):
    T5Config(vocab_size=128).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(write_t5_vocabulary(folder, letters))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {make.__name__: make(tmp_path_factory.mktemp(make.__name__)) for make in (esm, esmc, bert, t5)}


def random_parts(num_chains, letters=STANDARD + "X", num_rows=40, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return [
        ["".join(rng.choice(list(letters), size=rng.integers(1, longest))) for _ in range(num_rows)]
        for _ in range(num_chains)
    ]


def tokenizer_own(tokenizer, *parts):
    names = {EsmTokenizer: "esm", EsmcTokenizer: "esmc", BertTokenizer: "bert"}
    name = names.get(type(tokenizer), "t5")
    texts = [[" ".join(text) if SPACED[name] else text for text in part] for part in parts]
    texts = [["|".join(chains) for chains in zip(*texts)]] if name == "esmc" else texts
    return tokenizer(*texts, padding=True, return_tensors="pt")


def assert_same_as_tokenizer(fast, tokenizer, *parts):
    expected, found = tokenizer_own(tokenizer, *parts), fast(*parts)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    types = expected.get("token_type_ids", torch.zeros_like(expected["input_ids"]))
    assert torch.equal(found.get("token_type_ids", torch.zeros_like(found["input_ids"])), types)


def test_ids_and_residue_mask_are_those_worked_out_by_hand(tokenizers):
    for name, parts, ids, residues in (
        ("esm", [["AC", "L"]], [[0, 5, 23, 2], [0, 4, 2, 1]], [[0, 1, 1, 0], [0, 1, 0, 0]]),
        ("esm", [["AC"], ["L"]], [[0, 5, 23, 2, 4, 2]], [[0, 1, 1, 0, 1, 0]]),
        ("esmc", [["AC", "L"]], [[0, 5, 23, 2], [0, 4, 2, 1]], [[0, 1, 1, 0], [0, 1, 0, 0]]),
        ("esmc", [["AC"], ["L"]], [[0, 5, 23, 31, 4, 2]], [[0, 1, 1, 0, 1, 0]]),  # a chain break between them
        ("bert", [["AC", "D"]], [[2, 5, 6, 3], [2, 7, 3, 0]], [[0, 1, 1, 0], [0, 1, 0, 0]]),
        ("t5", [["AC", "L"]], [[3, 22, 1], [4, 1, 0]], [[1, 1, 0], [1, 0, 0]]),
        ("t5", [["AC"], ["LX"]], [[3, 22, 1, 4, 23, 1]], [[1, 1, 0, 1, 1, 0]]),
    ):
        batch = ResidueTokenizer(tokenizers[name], len(parts))(*parts)
        assert batch["input_ids"].tolist() == ids
        assert batch["residue_mask"].int().tolist() == residues
    batch = ResidueTokenizer(tokenizers["bert"], 2)(["AC", "D"], ["D", "A"])
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 7, 3], [2, 7, 3, 5, 3, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]  # mark the second part
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("name", SPACED)
def test_ids_masks_and_types_equal_the_tokenizers_own(tokenizers, name, num_chains):
    fast, parts = ResidueTokenizer(tokenizers[name], num_chains), random_parts(num_chains)
    assert_same_as_tokenizer(fast, tokenizers[name], *parts)
    batch = fast(*parts)
    assert batch["residue_mask"].sum(1).tolist() == [sum(map(len, row)) for row in zip(*parts)]
    specials = torch.isin(batch["input_ids"], torch.tensor(tokenizers[name].all_special_ids))
    assert torch.equal(batch["residue_mask"], ~specials)
    fast.table[[ord("A"), ord("C")]] = fast.table[[ord("C"), ord("A")]]  # the broken twin
    with pytest.raises(AssertionError):
        assert_same_as_tokenizer(fast, tokenizers[name], *parts)


def test_rare_residues_keep_their_own_id_where_the_vocabulary_has_them_and_become_x_elsewhere(tokenizers):
    ids = ResidueTokenizer(tokenizers["esm"])(["UZOBX"])["input_ids"]
    assert ids.tolist() == [[0, 26, 27, 28, 25, 24, 2]]
    for name, letters, x in (("esm", "J", 24), ("bert", RARE, 25), ("t5", RARE, 23)):
        batch = ResidueTokenizer(tokenizers[name])([letters])
        assert batch["input_ids"][batch["residue_mask"]].tolist() == [x] * len(letters)


def letters(*sequences: str) -> np.ndarray:
    return np.bincount([*"".join(sequences).encode()], minlength=256)


def test_more_than_one_percent_unknown_residues_are_refused(tokenizers, tmp_path):
    fast = ResidueTokenizer(bert(tmp_path, BERT_VOCAB[:-1]))
    assert fast.check_contract(letters("A" * 99 + "X"), "heavy") == 0.01
    with pytest.raises(DataError) as error:
        fast.check_contract(letters("A" * 48, "XU"), "heavy")
    assert "Column 'heavy': 4.0% of the residues become the unknown token of BertTokenizer" in str(error.value)
    assert "allowed: 1%; unknown letters: U X" in str(error.value)
    assert "--bad_rows" not in str(error.value)  # which keeps rows of residues, known to the encoder or not
    known = ResidueTokenizer(tokenizers["esm"])
    assert known.check_contract(letters("ACDX", "UZOBJ"), "antigen") == 0.0
    with pytest.raises(DataError, match=r"unknown letters: a\)"):  # letters that are no residues count too
        known.check_contract(letters("ACDa"), "antigen")


def word_tokenizer(folder):
    return bert(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "protein"])


def tokenizer_with_inner_pieces(folder):
    return bert(folder, [*BERT_VOCAB[:5], *STANDARD, *(f"##{letter}" for letter in STANDARD)])


def tokenizer_that_merges(folder):
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", *STANDARD, "WW"])}
    model = models.BPE(vocabulary, [("W", "W")], unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="<pad>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (word_tokenizer, "does not map the 20 standard residues to 20 different tokens"),
        (tokenizer_with_inner_pieces, "does not give a residue the same one token wherever it stands"),
        (tokenizer_that_merges, "does not give a residue the same one token wherever it stands"),
    ],
)
def test_tokenizers_that_do_not_give_one_token_per_residue_are_refused(tmp_path, make, message):
    with pytest.raises(DataError, match=f"{message}.*Use the tokenizer of a protein language model"):
        ResidueTokenizer(make(tmp_path), 2)


def test_the_vocabulary_of_saprot_is_refused_and_promised_nowhere(tmp_path):
    """It has a token for each pair of a residue and a 3Di state, and none for a residue."""
    pairs = [residue + state for residue in f"{STANDARD}#" for state in "pynwrqhgdlvtmfsaeikc#"]
    with pytest.raises(DataError, match="does not map the 20 standard residues to 20 different tokens"):
        ResidueTokenizer(esm(tmp_path, [*ESM_VOCAB[:4], *pairs, "<mask>"]))
    docs = Path(__file__).resolve().parents[2] / "docs"
    promised = [family.models for family in FAMILIES.values()]
    assert "SaProt" not in " ".join([*promised, (docs / "encoders.md").read_text()])
    assert "SaProt is not taken" in (docs / "limits.md").read_text()


def test_length_limit_counts_special_tokens(tokenizers):
    assert ResidueTokenizer(tokenizers["esm"]).max_residues == 1022
    assert ResidueTokenizer(tokenizers["esm"], 2).max_residues == 1021
    assert ResidueTokenizer(tokenizers["bert"], 2, max_length=512).max_residues == 509
    assert ResidueTokenizer(tokenizers["t5"]).max_residues is None
    with pytest.raises(DataError, match="num_chains=3"):
        ResidueTokenizer(tokenizers["esm"], 3)


def esm_collator(tokenizers, too_long, max_residues, num_chains=1, **kwargs):
    names = ["heavy", "light"][:num_chains]
    tokenizer = ResidueTokenizer(tokenizers["esm"], num_chains)
    tokenizer.max_residues = max_residues
    return SequenceCollator({"+".join(names): tokenizer}, {"+".join(names): names}, too_long, **kwargs)


def texts(tokenizers, batch):
    """The residues of every row of a batch of ESM inputs, as a string."""
    rows = zip(batch["input_ids"], batch["residue_mask"])
    return ["".join(tokenizers["esm"].convert_ids_to_tokens(ids[mask].tolist())) for ids, mask in rows]


def test_too_long_inputs_are_an_error_by_default(tokenizers):
    collator = esm_collator(tokenizers, "error", 4)
    assert texts(tokenizers, collator.encode("heavy", ["ACDE"])) == ["ACDE"]
    with pytest.raises(DataError, match=r"'heavy' has 6 residues; its encoder takes 4. Use --too_long window, or"):
        collator.encode("heavy", ["A", "ACDEFG"])


def test_truncation_keeps_the_first_residues_and_cuts_the_longer_part_of_a_pair_first(tokenizers):
    collator = esm_collator(tokenizers, "truncate", 4)
    assert texts(tokenizers, collator.encode("heavy", ["ACDEFG", "AC"])) == ["ACDE", "AC"]
    for limit, heavy, light, kept in (
        (6, "AAAAAA", "CC", "AAAACC"),
        (6, "AA", "CCCCCC", "AACCCC"),
        (7, "AAAAA", "CCCCC", "AAAACCC"),
        (6, "AAA", "CCC", "AAACCC"),
    ):
        collator = esm_collator(tokenizers, "truncate", limit, num_chains=2)
        longest = "F" * 20  # makes the batch too long even where the first row is not
        assert texts(tokenizers, collator.encode("heavy+light", [heavy, longest], [light, longest]))[0] == kept


@pytest.fixture
def collator(tokenizers):
    inputs = {
        "heavy+light": ResidueTokenizer(tokenizers["bert"], 2, max_length=12),
        "antigen": ResidueTokenizer(tokenizers["esm"]),
    }
    return SequenceCollator(inputs, {"heavy+light": ["heavy", "light"], "antigen": ["antigen"]}, "truncate")


ROWS = [
    {"heavy": "ACD", "light": "EF", "antigen": "GHIKL", "label": 7.5, "bound": 0, "source_row": 1},
    {"heavy": "ACDEFGHIKL", "light": "EFGHI", "antigen": "G", "label": 6, "bound": -1, "source_row": 2},
]


def test_a_batch_holds_each_input_the_labels_and_the_bounds_where_rows_have_them(collator, tokenizers):
    batch = collator(ROWS)
    assert set(batch) == {"sequences", "labels", "bounds"}
    assert (batch["labels"].tolist(), batch["labels"].dtype) == ([7.5, 6.0], torch.float32)
    assert batch["bounds"].tolist() == [0, -1]
    assert texts(tokenizers, batch["sequences"]["antigen"]) == ["GHIKL", "G"]
    assert batch["sequences"]["heavy+light"]["residue_mask"].sum(1).tolist() == [5, 9]
    assert set(collator([{key: row[key] for key in ("heavy", "light", "antigen")} for row in ROWS])) == {"sequences"}


def test_a_batch_of_cached_embeddings_passes_through_and_its_live_rows_are_tokenized(collator, tokenizers):
    embeddings = {"heavy+light": torch.ones(2, 4)}
    cached = {"embeddings": embeddings, "labels": torch.tensor([7.5, 6.0])}
    assert collator(cached) == cached
    batch = collator({**cached, "live": [{"antigen": row["antigen"]} for row in ROWS]})
    assert batch["embeddings"] is embeddings
    assert list(batch["sequences"]) == ["antigen"]
    assert texts(tokenizers, batch["sequences"]["antigen"]) == ["GHIKL", "G"]


def same_batches(one, other):
    first, second = (collator(ROWS)["sequences"] for collator in (one, other))
    keys = [(name, key) for name in first for key in first[name]]
    assert keys == [(name, key) for name in second for key in second[name]]
    return all(torch.equal(first[name][key], second[name][key]) for name, key in keys)


def test_a_saved_collator_reads_back_to_identical_tensors_and_others_are_told_apart(collator, tmp_path):
    collator.save_pretrained(tmp_path)
    again, longer, swapped = (SequenceCollator.from_pretrained(tmp_path) for _ in range(3))
    assert (again.too_long, again.columns) == ("truncate", collator.columns)
    longer.tokenizers["heavy+light"].max_residues = 10
    swapped.tokenizers["antigen"].table[ord("G")] = 5
    assert same_batches(again, collator)
    assert [same_batches(broken, collator) for broken in (longer, swapped)] == [False, False]


def write(folder: Path, lights: list[str], heavies: list[str] | None = None) -> Path:
    """A table of heavy, light and pKd with a row for each of `lights`."""
    heavies = heavies or [f"EVQL{STANDARD[number]}" for number in range(len(lights))]
    lines = [f"{heavy},{light},{7 + number / 10}" for number, (heavy, light) in enumerate(zip(heavies, lights))]
    path = folder / "rows.csv"
    path.write_text("\n".join(["heavy,light,pKd", *lines]) + "\n")
    return path


def arguments(path: Path, *missing: str, **given) -> DataArguments:
    columns = {"sequence_columns": ["heavy", "light"], "missing_chains": [*missing], "label_column": "pKd"}
    return DataArguments(dataset_name=str(path), **columns, **given)


def load(path: Path, *missing: str, **given):
    return load_data(arguments(path, *missing, **given), output_dir=path.parent, seed=0)


def test_cells_of_the_named_column_may_be_empty_blank_or_a_marker_and_are_counted(tmp_path):
    path = write(tmp_path, ["DIQMTQ", "", "  ", "NA", "nan", "DIV", "", "D", "DI", "DIQ"])
    loaded = load(path, "light")
    rows = {row["heavy"]: row["light"] for split in loaded.splits.values() for row in split}
    assert [rows[f"EVQL{letter}"] for letter in STANDARD[:10]] == ["DIQMTQ", *[""] * 4, "DIV", "", "D", "DI", "DIQ"]
    assert loaded.report["changes"] == {"light": {"missing": 5}}
    counts = find_missing(loaded.splits, ["light"])["light"]
    assert sum(counts.values()) == 5
    assert counts == {name: sum(not row["light"] for row in split) for name, split in loaded.splits.items()}


def test_a_row_without_any_sequence_is_refused_or_dropped(tmp_path):
    path = write(tmp_path, ["DIQ", "", *["DIV"] * 10], ["", "EVQ", "EVQ", "", *[f"EV{x}" for x in STANDARD[:8]]])
    assert sum(load(path, "heavy", "light").report["sizes"].values()) == 12  # each row has one of them
    path = write(tmp_path, ["DIQ", "", "", *["DIV"] * 10], ["", "EVQ", "", *[f"EV{x}" for x in STANDARD[:10]]])
    with pytest.raises(DataError, match=r"1 value .*\n.*row 4, column 'heavy', .*: heavy and light are all missing"):
        load(path, "heavy", "light")
    dropped = load(path, "heavy", "light", bad_rows="drop").report
    assert (dropped["rows_rejected"], sum(dropped["sizes"].values())) == (1, 12)


@pytest.fixture
def plain_bert(tokenizers):
    return tokenizers["bert"]


def test_a_pair_with_one_part_missing_is_the_other_part_alone(plain_bert):
    # [CLS] 2, [SEP] 3, A 5, C 6, D 7; types: 1 in the second part of a pair alone
    batch = ResidueTokenizer(plain_bert, 2)(["AC", "AC", ""], ["D", "", "DD"])
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 7, 3], [2, 5, 6, 3, 0, 0], [2, 7, 7, 3, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2, [1] * 4 + [0] * 2]
    assert batch["residue_mask"].int().tolist() == [[0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6, [0] * 6]
    alone, single = ResidueTokenizer(plain_bert, 2)(["AC"], [""]), ResidueTokenizer(plain_bert, 1)(["AC"])
    assert torch.equal(alone["input_ids"], single["input_ids"])
    assert alone["input_ids"][0].tolist() == plain_bert("A C")["input_ids"]


def collate(plain_bert, lights, missing=("light",)):
    tokenizers = {name: ResidueTokenizer(plain_bert, 1) for name in ("heavy", "light")}
    collator = SequenceCollator(tokenizers, {"heavy": ["heavy"], "light": ["light"]}, missing_chains=missing)
    return collator, collator([{"heavy": "AC", "light": light} for light in lights])["sequences"]


def test_rows_that_lack_an_input_have_no_tokens_of_it_and_a_place_says_so(plain_bert):
    collator, batch = collate(plain_bert, ["D", "", "CC"])
    assert collator.optional_inputs == ["light"]
    assert batch["light"]["input_ids"].tolist() == [[2, 7, 3, 0], [2, 6, 6, 3]]
    assert batch["light"]["place"].tolist() == [0, -1, 1]
    assert "place" not in batch["heavy"]
    assert "place" not in collate(plain_bert, ["D", "CC"], missing=())[1]["light"]


def test_where_all_rows_lack_it_one_residue_stands_in_and_belongs_to_no_row(plain_bert):
    batch = collate(plain_bert, ["", ""])[1]["light"]
    assert batch["input_ids"].tolist() == [[2, 25, 3]]
    assert batch["place"].tolist() == [-1, -1]


def test_a_pair_is_lacked_only_where_both_parts_may_be(plain_bert):
    tokenizer, pair = ResidueTokenizer(plain_bert, 2), {"heavy+light": ["heavy", "light"]}
    optional = [
        SequenceCollator({"heavy+light": tokenizer}, pair, missing_chains=missing).optional_inputs
        for missing in (["light"], ["heavy", "light"])
    ]
    assert optional == [[], ["heavy+light"]]
