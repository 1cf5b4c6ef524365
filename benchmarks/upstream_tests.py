"""Runs transformers' own tests of Trainer with Trainer, and with FastTrainer in its place.

    pip install optuna parameterized
    git clone https://github.com/huggingface/transformers    # at the tag of the installed version
    python benchmarks/upstream_tests.py transformers

Takes 20 minutes on two CPU cores and writes benchmarks/results/upstream_tests.json. The installed transformers is what
is tested, whatever version the tests are of. The Hub is not asked: of its models, three small ones are made here, and
tests that need more fail with both. Not run: tests of collators, and those that need several devices.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "upstream_tests.json"
SIDES = ("Trainer", "FastTrainer")
NAMES = ("trainer", "trainer_*", "training_args")
PACKAGES = ("hf_ext", "transformers", "torch", "accelerate", "peft", "optuna")
# Why a test fails with FastTrainer. Each is a row of the table in docs/library.md.
_FILES = "looks for `training_args.bin`, which is a pickle: ours is `training_args.json`"
_RATES = "compares rates that ours logs too: no two runs have the same (states and weights are equal)"
_EDITED = "splits the file of a checkpoint's weights by hand: its hashes no longer match"
_CHANGED = "resumes with other steps or another batch size: ours wants `allow_changed`"
_CALLBACKS = "lists the callbacks of a new trainer: ours come beside Trainer's"
REASONS = {
    "test_save_checkpoints": _FILES,
    "test_load_best_model_at_end": _FILES,
    "test_load_best_model_from_safetensors": _FILES,
    "test_save_best_checkpoint": _FILES,
    "test_can_resume_training": _RATES,
    "test_resume_training_with_frozen_params": _RATES,
    "test_resume_training_with_gradient_accumulation": _RATES,
    "test_multiple_peft_adapters": _RATES,
    "test_resume_training_with_checkpoint": _EDITED,
    "test_resume_training_with_shard_checkpoint": _EDITED,
    "test_resume_training_with_different_batch_size": _CHANGED,
    "test_compare_trainer_and_checkpoint_args_logging": _CHANGED,
    "test_resume_from_interrupted_training": _CHANGED,
    "test_custom_callback_added_at_init": _CALLBACKS,
    "test_default_callbacks_are_present": _CALLBACKS,
    "test_printer_callback_when_tqdm_disabled": _CALLBACKS,
    "test_event_flow": "a save due at the end of an epoch comes after `on_epoch_end`",
    "test_best_model_checkpoint_behavior": "`save_total_limit=1` leaves the best checkpoint and the newest",
    "test_logging_inf_nan_filter": "trains on a loss that is NaN: ours ends the run",
    "test_get_eval_dataloader_with_persistent_workers": "wants workers that live on: ours switches that off",
    "test_training_iterable_dataset": "looks at the sampler of a stream's loader, which is ours",
}


def pytest_configure(config: object) -> None:
    """As a plugin of pytest, before it imports the tests: puts FastTrainer under the name of Trainer."""
    side = os.environ["TRAINER_UNDER_TEST"]
    if side == "FastTrainer":
        from hf_ext.trainer import FastSeq2SeqTrainer, FastTrainer
        from hf_ext.training_args import FastTrainingArguments
    import transformers  # only now: it puts another module object in its place while others import it

    for name in ("GlueDataset", "GlueDataTrainingArguments"):  # that older tests import, and do not use without the Hub
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    if side == "FastTrainer":
        transformers.Trainer, transformers.Seq2SeqTrainer = FastTrainer, FastSeq2SeqTrainer
        transformers.TrainingArguments = FastTrainingArguments


def make_models(folder: Path) -> None:
    """Small models, with a tokenizer of letters, under the names that tests ask the Hub for."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, LlamaConfig, LlamaForCausalLM

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.printable.strip()]
    tokens += [f"##{letter}" for letter in string.ascii_letters + string.digits]
    shape = {"vocab_size": len(tokens), "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    bert = BertForSequenceClassification(BertConfig(num_attention_heads=2, **shape))
    llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, bos_token_id=2, eos_token_id=3, **shape))
    (folder / "vocab.txt").write_text("\n".join(tokens))
    for name in ("bert-base-cased", "bert-base-uncased", "hf-internal-testing/tiny-random-LlamaForCausalLM"):
        tokenizer = BertTokenizer(str(folder / "vocab.txt"), bos_token="[CLS]", eos_token="[SEP]")
        tokenizer.save_pretrained(folder / name)
        (llama if "Llama" in name else bert).save_pretrained(folder / name)


def run(side: str, folder: Path) -> str:
    """Runs all files with one of `SIDES`; what pytest found, as XML."""
    files = [str(path) for name in NAMES for path in sorted(folder.glob(f"tests/trainer/test_{name}.py"))]
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    settings = {"TRAINER_UNDER_TEST": side, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "upstream_tests", "-p", "no:cacheprovider", "-n", "0", "-q"]
    command += ["--timeout", "300", "--continue-on-collection-errors", "--junitxml", f"{side}.xml", *files]
    subprocess.run(
        command, cwd=folder, env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}, check=False
    )
    return (folder / f"{side}.xml").read_text()


def read_outcomes(xml: str) -> dict[str, str]:
    """What became of each test: passed, failed or skipped."""
    words = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    found = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        kinds = [words[part.tag] for part in case if part.tag in words]
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


def compare(stock: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, object]:
    """How many passed, failed and were skipped on each side, and which differ, with why."""
    differ = [name.rpartition("::")[2] for name in stock if stock[name] == "passed" != ours.get(name)]
    gained = [name.rpartition("::")[2] for name in ours if ours[name] == "passed" != stock.get(name)]
    return {
        "Trainer": dict(Counter(stock.values())),
        "FastTrainer": dict(Counter(ours.values())),
        "pass with Trainer alone": {name: REASONS.get(name, "not known") for name in differ},
        "pass with FastTrainer alone": gained,
    }


def main() -> None:
    """Copies the tests to where no other transformers lies beside them, runs both sides, and writes the result."""
    source = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("tests/trainer", "tests/fixtures"):
            shutil.copytree(source / part, folder / part)
        for file in ("tests/__init__.py", "conftest.py", "pyproject.toml"):
            shutil.copy(source / file, folder / file)
        make_models(folder)
        found = compare(*(read_outcomes(run(side, folder)) for side in SIDES))
    library = (source / "src" / "transformers" / "__init__.py").read_text()
    tests_of = library.partition('__version__ = "')[2].partition('"')[0]
    result = {"tests of transformers": tests_of, "versions": {name: version(name) for name in PACKAGES}, **found}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
