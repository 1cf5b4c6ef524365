"""Train a masked protein language model: ESM-2 or ESM C from scratch, or a published one further.

    hf-ext mlm                                        # generated demo data, under a minute
    hf-ext mlm --config mlm_esm2_8M.yaml              # your sequences: copy that file and edit it
    accelerate launch --quiet recipes/mlm.py          # from a clone, on several devices
    accelerate launch --quiet recipes/mlm.py --config recipes/configs/mlm_esm2_8M.yaml
    accelerate launch --quiet recipes/mlm.py --model_size esm2_35M --dataset_name proteins.fasta --max_residues 512

On one device, `python recipes/mlm.py` does the same and starts sooner.

Killed, or stopped with Ctrl-C, the same command goes on where it was (`--resume auto`, the default): masks are a
function of seed, epoch and sequence, and streams are read on from their position. Sequences above --max_residues are
cropped at random, anew in every epoch (--too_long error refuses them instead). A stream (--streaming true --max_steps
N) is repeated until N steps are done. `--stock_trainer true` trains with transformers.Trainer itself, on the same data
and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_ext.cli import quick_imports

with quick_imports():
    from transformers import set_seed

    from hf_ext.arguments.checks import check_metric_name
    from hf_ext.arguments.parser import FastArgumentParser
    from hf_ext.checkpoints.run_lock import run_folder
    from hf_ext.data.arguments import DataArguments
    from hf_ext.data.loading import load_data
    from hf_ext.errors import ArgumentError, exit_on_errors
    from hf_ext.evaluation.requirements import Requirement, check_requirements, parse_requirements
    from hf_ext.masked_lm.arguments import MaskedLMArguments
    from hf_ext.masked_lm.building import (
        build_collator,
        build_model,
        build_tokenizer,
        build_trainer,
        fill_in_demo,
        make_demo_sequences,
        prepare_splits,
    )
    from hf_ext.masked_lm.results import (
        EVALUATION_METRICS,
        SCORES,
        UnigramBaseline,
        final_scores,
        format_scores,
        score_splits,
    )
    from hf_ext.masked_lm.task import TASK
    from hf_ext.models.lora import require_base
    from hf_ext.reporting.run_log import start_run_log
    from hf_ext.running import (
        check_inputs,
        finish_run,
        parse_command,
        save_results,
        summarize_data,
        with_absolute_path,
    )
    from hf_ext.training_args import FastTrainingArguments

DEMO_LEARNING_RATE = 2e-3  # small models take larger steps


def main(argv: list[str] | None = None) -> dict:
    """Runs the recipe; returns what `all_results.json` holds."""
    parser, (model_args, data_args, args) = parse_command(TASK.all_arguments, TASK.defaults, __doc__, argv)
    check_metric_name(args.metric_for_best_model, EVALUATION_METRICS)
    requirements = parse_requirements(model_args.require, SCORES)
    if args.use_peft:
        require_base(model_args.model_name_or_path)
    with run_folder(args):
        return run(model_args, data_args, args, requirements, parser)


def run(
    model_args: MaskedLMArguments,
    data_args: DataArguments,
    args: FastTrainingArguments,
    requirements: Sequence[Requirement],
    parser: FastArgumentParser,
) -> dict:
    """Trains, scores and reports, in an output folder that is this run's alone."""
    log = start_run_log(args.output_dir, args.process_index == 0)
    set_seed(args.seed)

    table = None
    if data_args.dataset_name is None:
        log.info("No --dataset_name: generated demo data.")
        table = make_demo_sequences()
        if fill_in_demo(model_args):
            log.info("No model or --model_size either: a new ESM-2 with 2 layers, 64 wide.")
            if "learning_rate" not in parser.explicit:
                args.learning_rate = DEMO_LEARNING_RATE
    model = build_model(model_args)
    collator: Any = build_collator(build_tokenizer(model_args), model, model_args, data_args, args.seed)
    data = load_data(data_args, output_dir=args.output_dir, seed=args.seed, needs_labels=False, table=table)
    data.report["inputs"] = check_inputs(collator, data.splits, data_args.dataset_name)
    log.info(summarize_data(data.report))
    splits = prepare_splits(data.splits, args, collator.columns, model_args.stock_trainer)

    if requirements and not {"validation", "test"} & {*splits}:
        raise ArgumentError("--require: there are no validation or test rows to score the model on.")
    trainer: Any = build_trainer(model, args, collator, splits, parser.explicit if model_args.stock_trainer else None)
    log.info("\n%s\n", "Stock Trainer, no plan." if model_args.stock_trainer else trainer.plan.table())
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()

    scores = score_splits(trainer, splits, UnigramBaseline.fit(data.splits["train"], collator))
    required = check_requirements(requirements, final_scores(scores))
    facts = {"data": with_absolute_path(data.report, "source"), **scores, "requirements": required}
    results = save_results(trainer, trained, "masked_lm", facts, {**vars(model_args), **vars(data_args)}, parser)
    log.info("\nOver all masked residues; unigram: training frequencies alone:\n%s", format_scores(scores))
    finish_run(trainer, log, required)
    return results


if __name__ == "__main__":
    with exit_on_errors():
        main()
