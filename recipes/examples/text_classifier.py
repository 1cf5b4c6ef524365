"""Any text classifier: BERT from scratch tells which of two words occurs more often in a sentence.

    accelerate launch recipes/examples/text_classifier.py                    # generated data
    accelerate launch recipes/examples/text_classifier.py --preset baseline  # what stock Trainer does
    accelerate launch recipes/examples/text_classifier.py --stock_trainer true  # stock Trainer itself

What is said of proteins elsewhere holds here: the plan says of each speed-up whether it serves this model, killed runs
go on where they were (`--resume auto`, the default), and beside the score stands that of the most frequent class. For
your own model, replace `make_rows` and the configuration.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from any_model import DEFAULTS, ClassifierTask, data_seed
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from hf_ext import Run, exit_on_errors

SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WORDS = ("red", "blue", "the", "a", "cat", "dog", "saw", "near", "house", "tree", "old", "small", "ran", "slept")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per word, without a download."""
    ids = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def make_rows(num_rows: int, seed: int) -> Dataset:
    """Sentences of 5 to 40 words; label 1 where "red" occurs more often than "blue", 0 where less."""
    generator = np.random.default_rng(seed)
    texts: list[str] = []
    labels: list[int] = []
    while len(texts) < num_rows:
        words = generator.choice(WORDS, size=generator.integers(5, 41)).tolist()
        if words.count("red") != words.count("blue"):
            texts.append(" ".join(words))
            labels.append(int(words.count("red") > words.count("blue")))
    return Dataset.from_dict({"text": texts, "labels": labels})


class TextClassifier(ClassifierTask):
    """Train BERT from scratch to tell which of two words occurs more often in a sentence, on generated rows."""

    recipe = "examples/text_classifier"
    defaults = {
        **DEFAULTS,
        "output_dir": "outputs/text_classifier",
        "learning_rate": 1e-3,
        "num_train_epochs": 3,
        "metric_for_best_model": "accuracy",
    }

    def load(self, run: Run) -> Dataset:
        """All rows as tokens, those of training first; `length` is what batches of similar length are made by."""
        rows = make_rows(run.model_args.num_rows + run.model_args.num_test_rows, data_seed(run.args))
        tokenizer = make_tokenizer()
        return rows.map(lambda batch: tokenizer(batch["text"], return_length=True), batched=True)

    def build(self, run: Run, data: Dataset) -> dict[str, Any]:
        """What Trainer takes."""
        tokenizer = make_tokenizer()
        config = BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **SHAPE)
        return {
            "model": BertForSequenceClassification(config),
            "data_collator": DataCollatorWithPadding(tokenizer),
            "processing_class": tokenizer,
            **self.split(run, data),
        }


if __name__ == "__main__":
    with exit_on_errors():
        TextClassifier().main()
