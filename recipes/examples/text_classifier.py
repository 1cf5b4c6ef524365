"""Any text classifier: BERT from scratch tells which of two words occurs more often in a sentence.

    accelerate launch --quiet recipes/examples/text_classifier.py                    # generated data
    accelerate launch --quiet recipes/examples/text_classifier.py --preset baseline  # what stock Trainer does
    accelerate launch --quiet recipes/examples/text_classifier.py --stock_trainer true  # stock Trainer itself

What is said of proteins elsewhere holds here: the plan says of each speed-up whether it serves this model, killed runs
go on where they were (`--resume auto`, the default), and beside the score stands that of the most frequent class. For
your own model, replace `make_rows` and the configuration.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from hf_ext.recipes.examples.any_model import (
    CLASS_METRICS,
    AnyModelArguments,
    build_trainer,
    compute_accuracy,
    data_seed,
    finish_any_run,
    judge_classes,
    sum_classes,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    set_seed,
)

from hf_ext.arguments.checks import check_metric_name
from hf_ext.arguments.parser import parse_command
from hf_ext.checkpoints.run_lock import run_folder
from hf_ext.errors import exit_on_errors
from hf_ext.training_args import FastTrainingArguments

DEFAULTS = {
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


def main(argv: list[str] | None = None) -> dict:
    """Runs the example; returns what `all_results.json` holds."""
    parser, (example, args) = parse_command((AnyModelArguments, FastTrainingArguments), DEFAULTS, __doc__, argv)
    check_metric_name(args.metric_for_best_model, CLASS_METRICS)
    with run_folder(args):
        set_seed(args.seed)
        tokenizer = make_tokenizer()
        rows = make_rows(example.num_rows + example.num_test_rows, data_seed(args))
        # `length` is what batches of similar length are made by.
        rows = rows.map(lambda batch: tokenizer(batch["text"], return_length=True), batched=True)
        held_out = rows.select(range(example.num_rows, len(rows)))
        model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **SHAPE))
        trainer = build_trainer(
            *(model, args, example, parser),
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=rows.select(range(example.num_rows)),
            eval_dataset=held_out,
            processing_class=tokenizer,
            preprocess_logits_for_metrics=sum_classes,  # 12 bytes a row
            compute_metrics=compute_accuracy,
        )
        trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        scores = judge_classes(trainer.predict(held_out), rows["labels"][: example.num_rows], args.seed)
        return finish_any_run(trainer, trained, parser, example, scores)


if __name__ == "__main__":
    with exit_on_errors():
        main()
