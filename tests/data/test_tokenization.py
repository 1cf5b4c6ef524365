import numpy as np
import pytest
import torch
from tiny_t5 import T5_LETTERS, write_t5_vocabulary
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, BertTokenizer, EsmcTokenizer, EsmTokenizer, PreTrainedTokenizerFast, T5Config

from hf_ext.data.proteins import RARE, STANDARD
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.errors import DataError

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


def random_parts(num_parts, letters=STANDARD + "X", num_rows=40, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return [
        ["".join(rng.choice(list(letters), size=rng.integers(1, longest))) for _ in range(num_rows)]
        for _ in range(num_parts)
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


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("name", SPACED)
def test_ids_masks_and_types_equal_the_tokenizers_own(tokenizers, name, num_parts):
    fast, parts = ResidueTokenizer(tokenizers[name], num_parts), random_parts(num_parts)
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


def test_more_than_one_percent_unknown_residues_are_refused(tokenizers, tmp_path):
    fast = ResidueTokenizer(bert(tmp_path, BERT_VOCAB[:-1]))
    assert fast.check_contract(["A" * 99 + "X"], "heavy") == 0.01
    with pytest.raises(DataError) as error:
        fast.check_contract(["A" * 48, "XU"], "heavy")
    assert "Column 'heavy': 4.0% of the residues become the unknown token of BertTokenizer" in str(error.value)
    assert "allowed: 1%; unknown letters: U X" in str(error.value)
    assert "--bad_rows" not in str(error.value)  # which keeps rows of residues, known to the encoder or not
    known = ResidueTokenizer(tokenizers["esm"])
    assert known.check_contract(["ACDX", "UZOBJ"], "antigen") == 0.0
    with pytest.raises(DataError, match=r"unknown letters: a\)"):  # letters that are no residues count too
        known.check_contract(["ACDa"], "antigen")


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


def test_length_limit_counts_special_tokens(tokenizers):
    assert ResidueTokenizer(tokenizers["esm"]).max_residues == 1022
    assert ResidueTokenizer(tokenizers["esm"], 2).max_residues == 1021
    assert ResidueTokenizer(tokenizers["bert"], 2, max_length=512).max_residues == 509
    assert ResidueTokenizer(tokenizers["t5"]).max_residues is None
    with pytest.raises(DataError, match="num_parts=3"):
        ResidueTokenizer(tokenizers["esm"], 3)
