"""A T5 encoder such as ProtT5 or IgT5 in miniature: random weights, and a real sentencepiece vocabulary of residues."""

import torch
from sentencepiece import sentencepiece_model_pb2 as sentencepiece
from transformers import T5Config, T5EncoderModel

T5_LETTERS = "ALGVSREDTIPKFQNYMHWCX"  # ids from 3 on: <pad> 0, </s> 1, <unk> 2, A 3, ..., C 22, X 23


def write_t5_vocabulary(folder, letters=T5_LETTERS):
    """Writes `spiece.model` with one piece per letter, each with the mark that stands for a space before it."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = sentencepiece.ModelProto.SentencePiece
    model = sentencepiece.ModelProto()
    for piece, kind in (("<pad>", kinds.CONTROL), ("</s>", kinds.CONTROL), ("<unk>", kinds.UNKNOWN)):
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for letter in letters:
        model.pieces.add(piece=f"\u2581{letter}", score=-3.0, type=kinds.NORMAL)
    model.trainer_spec.model_type = sentencepiece.TrainerSpec.UNIGRAM
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.unk_id = 0, 1, 2
    model.trainer_spec.bos_id = -1
    model.normalizer_spec.name = "identity"
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    return str(folder)


def write_t5_encoder(folder, seed=0):
    """Writes the vocabulary, a configuration and weights, as `from_pretrained` reads them; 32 wide, 2 layers."""
    write_t5_vocabulary(folder)
    config = T5Config(
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        T5EncoderModel(config).save_pretrained(folder)
    return str(folder)
