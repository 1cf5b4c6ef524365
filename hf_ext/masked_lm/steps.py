"""The steps of a run that trains a masked language model, see `hf_ext.tasks.Task`; its model, collator and splits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    EsmcConfig,
    EsmcForMaskedLM,
    EsmConfig,
    EsmcTokenizer,
    EsmForMaskedLM,
    PreTrainedModel,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..arguments import check_metric_name
from ..checkpoints import check_finite, check_model
from ..data import (
    ESM2,
    DataArguments,
    LoadedData,
    MaskedLMCollator,
    ResidueTokenizer,
    check_inputs,
    load_data,
    make_demo_table,
    make_esm_tokenizer,
    mark_evaluation,
    row_lengths,
)
from ..errors import ArgumentError, DataError
from ..evaluation import check_requirements, parse_requirements
from ..files import Json
from ..models import check_family, limit_of_positions, load_tokenizer, require_base
from ..pretrained import reading
from ..reporting import summarize_data
from ..tasks import Run, with_absolute_path
from ..trainer import FastTrainer
from .arguments import MaskedLMArguments
from .results import EVALUATION_METRICS, SCORES, UnigramBaseline, compute_metrics, format_scores, score_split, sum_rows

DEMO_LEARNING_RATE = 2e-3  # small models take larger steps
ESM_MAX_TOKENS = 1024  # what ESM-2 was trained on, with <cls> and <eos>
ESMC_MAX_TOKENS = 2048

logger = logging.get_logger(__name__)


def make_demo_sequences() -> Dataset:
    """Makes rows of one column `sequence`: the 739 distinct chains of the generated demo data; they share scaffolds."""
    table = make_demo_table()
    chains = dict.fromkeys(chain for column in ("heavy", "light", "antigen") for chain in table[column][:])
    return Dataset.from_dict({"sequence": list(chains)})


def fill_in_demo(args: MaskedLMArguments) -> bool:
    """Gives a small size to a command that names no model at all; whether it did."""
    names_none = not (args.model_name_or_path or args.model_size)
    if names_none:
        args.model_size = "demo"
    return names_none


def build_tokenizer(args: MaskedLMArguments) -> Any:
    """Returns the pretrained model's tokenizer, ESM C's, or ESM-2's, written from its 33 tokens.

    Raises:
        ArgumentError: there is no tokenizer at `model_name_or_path`.
    """
    if args.model_name_or_path is not None:
        return load_tokenizer(args.model_name_or_path, args.model_revision)
    if args.makes_esmc:
        return EsmcTokenizer(model_max_length=ESMC_MAX_TOKENS)
    return make_esm_tokenizer(model_max_length=ESM_MAX_TOKENS)


def build_model(args: MaskedLMArguments, for_lora: bool = False) -> PreTrainedModel:
    """Returns the pretrained model, or a new ESM-2 or ESM C with random weights (seed torch first), in float32.

    ESM's contact head is frozen.

    Args:
        for_lora: it trains under adapters, which are all that is saved.

    Raises:
        ArgumentError: no masked language model at `model_name_or_path`, one whose files are not those of its manifest
            or hold what is not finite; no size of a new one; one without a head, for LoRA.
    """
    if args.model_name_or_path is not None:
        model = _pretrained(args, for_lora)
    elif args.makes_esmc:
        model = EsmcForMaskedLM(EsmcConfig(**args.shape))
    else:
        model = EsmForMaskedLM(EsmConfig(**ESM2, layer_norm_eps=1e-5, **args.shape))
    freeze_contact_head(model)
    return model


def freeze_contact_head(model: PreTrainedModel) -> None:
    """Freezes ESM's contact head: masked-language-model training gives it no gradient, which stops DDP."""
    for name, parameter in model.named_parameters():
        if "contact_head." in name:
            parameter.requires_grad_(False)


def _pretrained(args: MaskedLMArguments, for_lora: bool) -> PreTrainedModel:
    name = str(args.model_name_or_path)
    if Path(name).is_dir():
        check_model(name)
    check_family(name, read_config(args).to_dict(), "Model")
    with reading_model(args):
        model, info = AutoModelForMaskedLM.from_pretrained(
            name,
            revision=args.model_revision,
            dtype="float32",  # left out, the dtype that the model was published in
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(key for key in info["missing_keys"] if "contact_head." not in key)
    if lost := [key for key in missing if not key.startswith("lm_head.")]:
        raise ArgumentError(f"{name!r} lacks weights: {lost[:5]} ({len(lost)} in all).")
    if missing and for_lora:
        raise ArgumentError(
            f"--use_peft: {name} has no language-model head, so that would be new, and adapters alone are saved. "
            "Train once without --use_peft, then start from that model."
        )
    if missing:
        logger.warning("%s has no language-model head: it starts from random weights", name)
    check_finite(name, model.state_dict())
    return model


def read_config(args: MaskedLMArguments) -> Any:
    """Reads the configuration at `model_name_or_path`; raises ArgumentError where there is none."""
    with reading_model(args):
        return AutoConfig.from_pretrained(
            str(args.model_name_or_path), revision=args.model_revision, trust_remote_code=False
        )


def reading_model(args: MaskedLMArguments) -> AbstractContextManager[None]:
    """Names what is wrong with the files of `model_name_or_path`, while they are read."""
    name = str(args.model_name_or_path)
    remedy = "a folder with config.json, model.safetensors and a tokenizer."
    told = f"Give a Hub id, such as facebook/esm2_t12_35M_UR50D, or {remedy}"
    return reading(f"model_name_or_path={name!r}: no masked language model there", name, told)


def build_collator(
    tokenizer: Any, model: PreTrainedModel, args: MaskedLMArguments, data_args: DataArguments, seed: int
) -> MaskedLMCollator:
    """Builds the collator for a column of sequences, or two that form a pair.

    Sets `max_residues` where the model sets the limit, so that `--too_long error` refuses rows above it.

    Raises ArgumentError for more columns, windows, or chains that rows may lack.
    """
    if data_args.missing_chains:
        raise ArgumentError("missing_chains: only affinity models and generators do without a chain; drop it.")
    if data_args.too_long == "window":
        raise ArgumentError("too_long=window: hf-ext mlm crops long sequences at random: use truncate, or error.")
    if len(data_args.sequence_columns) > 2:
        raise ArgumentError(f"sequence_columns={data_args.sequence_columns}: name one column, or two that form a pair.")
    columns = data_args.sequence_columns
    limit = limit_of_positions(model.config.to_dict())
    residues = ResidueTokenizer(tokenizer, len(columns), limit)
    collator = MaskedLMCollator(residues, columns, args.mlm_probability, seed, data_args.max_residues)
    data_args.max_residues = collator.max_residues
    return collator


def prepare_splits(splits: Any, args: Any, columns: dict[str, list[str]], stock: bool) -> dict[str, Any]:
    """Marks evaluation sets, and adds lengths where the stock Trainer groups by them.

    Evaluation streams are read into memory, once: otherwise each evaluation would read the source to its end, and of a
    set of unknown length several processes count some rows twice (1,525 masked residues instead of 931, seen with two).

    Raises:
        ArgumentError: a stream without `max_steps`, or evaluation asked for without a validation split.
        DataError: an evaluation stream has no rows.
    """
    ready = {**splits}
    for name, split in splits.items():
        if name == "train":
            continue
        rows = split if hasattr(split, "__len__") else Dataset.from_list([*split])
        if not len(rows):
            raise DataError(f"The {name} part of the stream has no rows: give --split_sizes a larger share, or 0.")
        ready[name] = mark_evaluation(rows)
    if "validation" not in ready and args.eval_strategy != "no":
        raise ArgumentError("There is no validation split: give --split_sizes a share for it, or --eval_strategy no.")
    if not hasattr(ready["train"], "__len__"):
        if args.max_steps < 1:
            raise ArgumentError("A stream has no length, so --max_steps says how long to train: give it.")
        # Else rank 0 of the stock Trainer joins batches of unequal width, and fails.
        args.accelerator_config.dispatch_batches = False
    elif stock and args.train_sampling_strategy == "group_by_length":
        for name, split in ready.items():  # the stock Trainer groups evaluation too
            ready[name] = split.add_column(args.length_column_name, row_lengths(split, columns))
    return ready


@dataclass
class MaskedLMData:
    """Rows, and what the length of a row depends on.

    Attributes:
        model, collator: with the limits that rows were read by.
        loaded: the splits as read, and what loading reports.
        splits: the same as Trainer takes them.
    """

    model: Any
    collator: MaskedLMCollator
    loaded: LoadedData
    splits: dict[str, Any]


def check(run: Run) -> None:
    """Implements `Task.check`."""
    check_metric_name(run.args.metric_for_best_model, EVALUATION_METRICS)
    parse_requirements(run.model_args.require, SCORES)
    if run.args.use_peft:
        require_base(run.model_args.model_name_or_path)


def load(run: Run) -> MaskedLMData:
    """Builds model and collator too: how long a row may be is the model's to say."""
    model_args = run.model_args
    data_args = run.data_args
    args = run.args
    table = None
    if data_args.dataset_name is None:
        run.log.info("No --dataset_name: generated demo data.")
        table = make_demo_sequences()
        if fill_in_demo(model_args):
            run.log.info("No model or --model_size either: a new ESM-2 with 2 layers, 64 wide.")
            if "learning_rate" not in run.explicit:
                args.learning_rate = DEMO_LEARNING_RATE
    model = build_model(model_args, for_lora=args.use_peft)
    collator: Any = build_collator(build_tokenizer(model_args), model, model_args, data_args, args.seed)
    loaded = load_data(data_args, output_dir=args.output_dir, seed=args.seed, needs_labels=False, table=table)
    loaded.report["inputs"] = check_inputs(collator, loaded.splits, data_args.dataset_name)
    run.log.info(summarize_data(loaded.report))
    splits = prepare_splits(loaded.splits, args, collator.columns, model_args.stock_trainer)
    run.test_dataset = splits.get("test")
    if model_args.require and not {"validation", "test"} & {*splits}:
        raise ArgumentError("--require: there are no validation or test rows to score the model on.")
    return MaskedLMData(model, collator, loaded, splits)


def build(run: Run, data: MaskedLMData) -> dict[str, Any]:
    """Implements `Task.build`; evaluations keep three sums per row, not scores of every token."""
    return {
        "model": data.model,
        "data_collator": data.collator,
        "train_dataset": data.splits["train"],
        "eval_dataset": data.splits.get("validation"),
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": sum_rows,
    }


def score(run: Run, trainer: FastTrainer, trained: TrainOutput, data: MaskedLMData) -> Json:
    """Scores test, or validation where there is no test, beside the frequencies of residues in training."""
    facts = {"data": with_absolute_path(data.loaded.report, "source")}
    name = next((name for name in ("test", "validation") if name in data.splits), None)
    if name is None:
        return facts
    baseline = UnigramBaseline.fit(data.loaded.splits["train"], data.collator)
    found = score_split(trainer, data.splits[name], name, baseline)
    scores = {**found[name]["model"], **trained.metrics}
    required = check_requirements(parse_requirements(run.model_args.require, SCORES), scores)
    shown = format_scores(found["verdict"], found[name])
    run.log.info("\nOver all masked residues of %s; unigram: training frequencies alone:\n%s", name, shown)
    return {**facts, **found, "requirements": required}
