"""Train an affinity or property model: encoders, a head, scores with intervals, a folder to share.

    hf-ext train                                      # generated demo data, about a minute
    hf-ext train --config gb1.yaml                    # your data: copy one and edit it
    accelerate launch --quiet recipes/max_speed.py    # from a clone, on several devices
    accelerate launch --quiet recipes/max_speed.py --config recipes/configs/gb1.yaml

On one device, `python recipes/max_speed.py` does the same and starts sooner.

Frozen encoders are run once per distinct sequence; the head trains from the cache. `--use_peft` turns the same command
into fine-tuning with LoRA, `--tower_training full` into full fine-tuning; `--init_head_from` starts either from the
head of a frozen run. `--preset baseline` does what stock Trainer does. Killed, or stopped with Ctrl-C, the same command
goes on where it was (`--resume auto`, the default).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_ext.cli import quick_imports

with quick_imports():
    from datasets import Dataset
    from transformers import set_seed

    from hf_ext.affinity.arguments import AffinityArguments
    from hf_ext.affinity.building import build_collator, build_model, fill_in_demo, settle_encoders, settle_training
    from hf_ext.affinity.calibrating import calibrate_model, describe_calibration
    from hf_ext.affinity.distilling import Distillation, compare_with_teacher, distill, format_distillation
    from hf_ext.affinity.embedding_ridge import EmbeddingRidge
    from hf_ext.affinity.ensemble import score_seeds, train_seeds
    from hf_ext.affinity.heads.choice import choose_head, describe_choice, settle_head
    from hf_ext.affinity.intervals import fit_intervals, score_intervals
    from hf_ext.affinity.measure import check_measure, describe_measure, settle_calibration, settle_measure
    from hf_ext.affinity.results import save_results
    from hf_ext.affinity.rows import describe_rows, find_lone_value, find_units, held_out_values, load_rows
    from hf_ext.affinity.scoring import read_requirements, score_split
    from hf_ext.affinity.stacking import fit_ridge
    from hf_ext.affinity.task import TASK
    from hf_ext.arguments.parser import FastArgumentParser
    from hf_ext.checkpoints.run_lock import run_folder
    from hf_ext.data.arguments import DataArguments
    from hf_ext.data.demo import make_demo_encoders
    from hf_ext.data.loading import LoadedData
    from hf_ext.errors import exit_on_errors
    from hf_ext.evaluation.requirements import Requirement, check_requirements
    from hf_ext.evaluation.resampling import ResamplingUnits
    from hf_ext.evaluation.row_metrics import RowMetrics
    from hf_ext.evaluation.verdict import MODEL
    from hf_ext.hardware import detect_hardware
    from hf_ext.reporting.run_log import LOGGER, start_run_log
    from hf_ext.running import check_inputs, finish_run, parse_command
    from hf_ext.speedups.lora import lora_settings
    from hf_ext.trainer import FastTrainer
    from hf_ext.training_args import FastTrainingArguments


def main(argv: list[str] | None = None) -> dict:
    """Runs the recipe; returns what `all_results.json` holds."""
    parser, (model_args, data_args, args) = parse_command(TASK.all_arguments, TASK.defaults, __doc__, argv)
    settle_measure(args, model_args.loss)
    check_measure(args, model_args.loss, evaluated(model_args, data_args))
    read_requirements(model_args, data_args)
    with run_folder(args):
        return run(model_args, data_args, args, parser)


def run(
    model_args: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, parser: FastArgumentParser
) -> dict:
    """Trains, scores and reports, in an output folder that is this run's alone."""
    log = start_run_log(args.output_dir, args.process_index == 0)
    set_seed(args.seed)

    table = use_demo(model_args, data_args, args) if data_args.dataset_name is None else None
    data = load_rows(model_args, data_args, parser.explicit, output_dir=args.output_dir, seed=args.seed, table=table)
    splits, metrics = data.splits, evaluated(model_args, data_args)
    check_measure(args, model_args.loss, metrics, splits["validation"])
    requirements = read_requirements(model_args, data_args)  # recall may be left out now
    units = find_units(data_args, splits)
    validation_units = find_units(data_args, splits, "validation", min_units=1)
    if chosen := settle_encoders(model_args, args, detect_hardware(args.device)):
        log.info(chosen)
    model_args.tower_training, args.use_peft = settle_training(model_args, args.use_peft)
    distillation = distill(model_args, data_args, args, splits) if model_args.distill_from else None
    train_rows = distillation.train if distillation else splits["train"]
    settle_head(model_args, args, parser.explicit, train_rows)
    model = build_model(model_args, data_args.sequence_columns, lora_settings(args))
    collator = build_collator(model, data_args, model_args.max_length)
    data.report["inputs"] = check_inputs(collator, {**splits, "train": train_rows}, data_args.dataset_name)
    log.info(describe_rows(data))
    uncalibrated = settle_calibration(model_args, args, parser.explicit)
    log.info(f"{describe_measure(args, model_args.loss, metrics)} {uncalibrated}".rstrip())

    trainer = FastTrainer(
        model,
        args,
        data_collator=collator,
        train_dataset=train_rows,
        eval_dataset=splits["validation"],
        compute_metrics=metrics,
    )
    log.info("\n%s\n", trainer.plan.table())
    searched = {**splits, "train": train_rows}
    head = choose_head(trainer, model_args, args, searched, parser, held_out_values(data_args, searched))
    if head:
        log.info(describe_choice(head))
    if model_args.num_seeds > 1:
        trained = train_seeds(trainer, args)
    else:
        trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    ridge = fit_ridge(trainer, splits)
    calibration = calibrate_model(
        trainer, model_args.calibration, splits["validation"], ridge=ridge, units=validation_units
    )
    log.info("\n".join(describe_calibration(calibration)))
    fit_intervals(trainer, splits["validation"], validation_units)
    trainer.save_model()
    trainer.save_state()
    if model_args.merge_lora:
        trainer.save_merged(Path(str(args.output_dir)) / "merged")

    records = {"head_search": head, "calibration": calibration}
    given = (model_args, data_args, requirements, parser)
    results = report(trainer, trained, records, ridge, data, distillation, units, *given)
    finish_run(trainer, log, results.get("requirements", ()))
    return results


def evaluated(model_args: AffinityArguments, data_args: DataArguments) -> RowMetrics:
    """What every evaluation computes."""
    return RowMetrics(model_args.binder_threshold, data_args.group_column)


def use_demo(model_args: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments) -> Dataset:
    """Generates a table and two encoders, and makes the arguments name them."""
    LOGGER.info("No --dataset_name: generated demo data and two small untrained encoders.")
    with args.main_process_first(desc="demo encoders"):
        encoders = make_demo_encoders(Path(str(args.output_dir)) / "demo_encoders")
    return fill_in_demo(model_args, data_args, encoders)


def report(
    trainer: FastTrainer,
    trained: Any,
    records: dict[str, Any],
    ridge: EmbeddingRidge | None,
    data: LoadedData,
    distillation: Distillation | None,
    units: ResamplingUnits | None,
    model_args: AffinityArguments,
    data_args: DataArguments,
    requirements: Sequence[Requirement],
    parser: FastArgumentParser,
) -> dict[str, Any]:
    """Scores the test split and writes the results; returns what `all_results.json` holds."""
    splits, folder = data.splits, trainer.args.output_dir
    scored: dict[str, Any] = {
        "threshold": model_args.binder_threshold,
        "group_column": data_args.group_column,
        "units": units,
    }
    test = score_split(
        trainer,
        splits,
        "test",
        **scored,
        leaks=data.report.get("leaks"),
        ridge=ridge,
        lone_value=find_lone_value(data_args, splits),
    )
    stored = trainer.model.config.prediction_intervals
    intervals = score_intervals(stored, test.predictions, test.labels, splits, units)
    test.notes.extend(intervals["notes"])
    seeds = score_seeds(trainer, trained, splits, test, **scored) if model_args.num_seeds > 1 else None
    comparison = None
    if distillation:
        comparison = compare_with_teacher(distillation, test, splits["test"], folder, **scored)
    settings = {**vars(model_args), **vars(data_args)}
    records["prediction_intervals"] = intervals
    records["requirements"] = check_requirements(requirements, test.scores[MODEL]) or None
    results = save_results(trainer, trained, test, splits, data.report, settings, parser, records, seeds, comparison)
    LOGGER.info("\n%s\n", test.table())
    if seeds:
        LOGGER.info(seeds.text())
    if comparison:
        LOGGER.info(format_distillation(comparison))
    LOGGER.info("\n".join(results["advice"]))
    return results


if __name__ == "__main__":
    with exit_on_errors():
        main()
