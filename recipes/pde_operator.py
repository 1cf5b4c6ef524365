"""Train one operator Transformer on two equations at once: 1-D advection and 2-D Darcy flow, on generated data.

    accelerate launch --quiet recipes/pde_operator.py  # two minutes on two cores
    accelerate launch --quiet recipes/pde_operator.py --resolution 64 --num_train_samples 1000 --hidden_size 256 \\
        --num_queries 1024 --inverse_loss_every 4 --physics_every 4
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/pde_operator.py \\
        --config recipes/configs/pde_conservative.yaml --effective_batch_size 120

On one device, `python recipes/pde_operator.py` does the same and starts sooner.

Advection is solved exactly, Darcy flow by finite volumes; samples are made once and kept in --data_cache_dir. With
`--dataset_name 1D_Advection_Sols_beta0.4.hdf5 2D_DarcyFlow_beta1.0_Train.hdf5` they are PDEBench's. Scores are nRMSE:
the L2 of the error over the L2 of the solution, beside what the mean of the training solutions and, for advection, the
initial state score. Killed, or stopped with Ctrl-C, the same command goes on where it was.
`--stock_trainer true` trains with transformers.Trainer itself and AdamW, on the same samples, points and losses.
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
    from hf_ext.errors import exit_on_errors
    from hf_ext.evaluation.requirements import Requirement, check_requirements, parse_requirements
    from hf_ext.pde.arguments import OperatorArguments, check_training
    from hf_ext.pde.building import build_model, build_rows, build_trainer, describe_samples, load_samples
    from hf_ext.pde.results import MODEL, ErrorMetrics, format_scores, score_names, score_splits
    from hf_ext.pde.task import TASK
    from hf_ext.reporting.run_log import start_run_log
    from hf_ext.running import finish_run, parse_command, save_results
    from hf_ext.training_args import FastTrainingArguments


def main(argv: list[str] | None = None) -> dict:
    """Runs the recipe; returns what `all_results.json` holds."""
    parser, (model_args, args) = parse_command(TASK.all_arguments, TASK.defaults, __doc__, argv)
    check_metric_name(args.metric_for_best_model, ErrorMetrics(model_args.tasks).row_metrics)
    check_training(model_args, args)
    requirements = parse_requirements(model_args.require, score_names(model_args.tasks))
    with run_folder(args):
        return run(model_args, args, requirements, parser)


def run(
    model_args: OperatorArguments,
    args: FastTrainingArguments,
    requirements: Sequence[Requirement],
    parser: FastArgumentParser,
) -> dict:
    """Trains, scores and reports, in an output folder that is this run's alone."""
    log = start_run_log(args.output_dir, args.process_index == 0)
    set_seed(args.seed)

    samples = load_samples(model_args, args)
    report = describe_samples(samples, model_args)
    log.info("Data, %s: %s", report["source"], "; ".join(report["tasks"].values()))
    model = build_model(model_args, samples["train"])
    rows = build_rows(samples)
    trainer: Any = build_trainer(model, args, model_args, rows, parser.explicit)
    log.info("\n%s\n", "Stock Trainer, no plan." if model_args.stock_trainer else trainer.plan.table())
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()

    scores = score_splits(trainer, rows, samples)
    required = check_requirements(requirements, scores["test"]["scores"][MODEL])
    settings = {**vars(model_args), **{name: getattr(model.config, name) for name in model_args.shape}}
    facts = {"data": report, "verdict": scores["test"]["verdict"], **scores, "requirements": required}
    results = save_results(trainer, trained, "pde_operator", facts, settings, parser)
    log.info("\nnRMSE on the test samples, none of which was trained on:\n%s", format_scores(scores["test"]))
    finish_run(trainer, log, required)
    return results


if __name__ == "__main__":
    with exit_on_errors():
        main()
