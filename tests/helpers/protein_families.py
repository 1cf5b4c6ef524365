"""A small pretrained encoder of every family that recipes take, with random weights and a vocabulary of residues."""

from pathlib import Path

import torch
from tiny_t5 import write_t5_vocabulary
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    EsmcConfig,
    EsmcForMaskedLM,
    EsmConfig,
    EsmcTokenizer,
    EsmForMaskedLM,
    EsmTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MT5Config,
    MT5EncoderModel,
    PreTrainedTokenizerFast,
    RoFormerConfig,
    RoFormerForMaskedLM,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from hf_ext.data import ESM_VOCABULARY, STANDARD

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64, "pad_token_id": 0}
SPECIAL = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>")
WORDS = (*SPECIAL, *STANDARD, "X")


def residue_tokenizer() -> PreTrainedTokenizerFast:
    """One token per residue, without spaces, framed as BERT does."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    frame = [(name, WORDS.index(name)) for name in ("<cls>", "<sep>")]
    tokenizer.post_processor = processors.TemplateProcessing("<cls> $A <sep>", "<cls> $A <sep> $B <sep>", frame)
    names = {f"{name.strip('<>')}_token": name for name in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _with_residues(folder: Path) -> None:
    residue_tokenizer().save_pretrained(folder)


def _bert_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STANDARD, "X"]) + "\n")
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)


def _esm_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(ESM_VOCABULARY) + "\n")
    EsmTokenizer(str(folder / "vocab.txt"), model_max_length=1024).save_pretrained(folder)


def _esm() -> EsmForMaskedLM:
    ids = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "max_position_embeddings": 1026}
    return EsmForMaskedLM(EsmConfig(position_embedding_type="rotary", token_dropout=True, **ids, **SIZES, **NO_DROPOUT))


def _plain(model_class: type, config_class: type, **settings: object) -> torch.nn.Module:
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return model_class(config_class(**{**ids, **SIZES, **settings}))


# Model type -> what makes the model (with its head where the family has one), and what writes its tokenizer.
FAMILIES = {
    "esm": (_esm, _esm_tokenizer),
    "esmc": (lambda: EsmcForMaskedLM(EsmcConfig(**SIZES)), lambda folder: EsmcTokenizer().save_pretrained(folder)),
    "t5": (lambda: T5EncoderModel(T5Config(**T5_SIZES)), write_t5_vocabulary),
    "mt5": (lambda: MT5EncoderModel(MT5Config(**T5_SIZES)), _with_residues),
    "umt5": (lambda: UMT5EncoderModel(UMT5Config(**T5_SIZES)), _with_residues),
    "bert": (lambda: _plain(BertForMaskedLM, BertConfig, **NO_DROPOUT), _bert_tokenizer),
    "roformer": (
        lambda: _plain(RoFormerForMaskedLM, RoFormerConfig, max_position_embeddings=64, **NO_DROPOUT),
        _with_residues,
    ),
    "modernbert": (
        lambda: _plain(ModernBertForMaskedLM, ModernBertConfig, cls_token_id=2, sep_token_id=3, local_attention=8),
        _with_residues,
    ),
    "gpt_neox": (lambda: _plain(GPTNeoXForCausalLM, GPTNeoXConfig, max_position_embeddings=64), _with_residues),
}
MASKED_LMS = ("esm", "esmc", "bert", "roformer", "modernbert")


def write_family(name: str, root: Path) -> str:
    """Writes model and tokenizer as a folder that `from_pretrained` reads; returns its path."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    make, write_tokenizer = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make().save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)
