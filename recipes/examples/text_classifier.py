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
from any_model import CLASS_METRICS, AnyModelTask, compute_accuracy, data_seed, judge_classes, sum_classes
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


class TextClassifier(AnyModelTask):
    """Train BERT from scratch to tell which of two words occurs more often in a sentence, on generated rows."""

    recipe = "examples/text_classifier"
    metrics = CLASS_METRICS
    defaults = {
        "preset": "max_speed",
        "output_dir": "outputs/text_classifier",
        "learning_rate": 1e-3,
        "warmup_steps": 0.1,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 128,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "metric_for_best_model": "accuracy",
        "resume": "auto",
        "logging_steps": 20,
        "report_to": "none",
    }

    def load(self, run: Run) -> Dataset:
        """All rows as tokens, those of training first; `length` is what batches of similar length are made by."""
        rows = make_rows(run.model_args.num_rows + run.model_args.num_test_rows, data_seed(run.args))
        tokenizer = make_tokenizer()
        return rows.map(lambda batch: tokenizer(batch["text"], return_length=True), batched=True)

    def build(self, run: Run, data: Dataset) -> dict[str, Any]:
        """What Trainer takes."""
        tokenizer, num_rows = make_tokenizer(), run.model_args.num_rows
        config = BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **SHAPE)
        return {
            "model": BertForSequenceClassification(config),
            "data_collator": DataCollatorWithPadding(tokenizer),
            "train_dataset": data.select(range(num_rows)),
            "eval_dataset": data.select(range(num_rows, len(data))),
            "processing_class": tokenizer,
            "preprocess_logits_for_metrics": sum_classes,  # 12 bytes a row
            "compute_metrics": compute_accuracy,
        }

    def judge(self, run: Run, trainer: Any, data: Dataset) -> dict[str, Any]:
        """Accuracy beside that of the most frequent class."""
        num_rows = run.model_args.num_rows
        return judge_classes(trainer.predict(trainer.eval_dataset), data["labels"][:num_rows], run.args.seed)


if __name__ == "__main__":
    with exit_on_errors():
        TextClassifier().main()
