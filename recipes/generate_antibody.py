"""Train a generator of antibodies for antigens, in stages with gates, and say whether it reads the antigen at all.

    hf-ext generate                                   # generated demo data, about a minute
    accelerate launch --quiet recipes/generate_antibody.py --dataset_name pairs.csv --antigen_column antigen \\
        --heavy_column heavy --light_column light                         # your pairs, stage 1: proof
    accelerate launch --quiet recipes/generate_antibody.py --dataset_name pairs.csv --stage auto

On one device, `python recipes/generate_antibody.py` does the same and starts sooner.

Each row is an antibody and the antigen that it binds; joining tables is yours. With `--label_column pKd` the generator
can be asked for an affinity. Rows are split by antigen, unless you say how. A stage ends with `gates.json`; where a
gate fails, the exit status is 1, and `--stage auto` goes no further. Killed, or stopped with Ctrl-C, the same command
goes on where it was (`--resume auto`, the default).

Stages set what you do not; a flag of yours goes over its stage.
    1, proof: size tiny, 1,000 training rows above pKd 7, 100 for validation, 10 epochs of 32 rows a step; it is to
       memorise them, so the last model is kept and nothing stops early
    2, quality: small, 10,000 rows above pKd 7, 1,000 for validation, 20 epochs of 64; best model, patience 5
    3, full: full, all rows, 50 epochs of 64 x 2 accumulated; best model, patience 5
The learning rate follows the architecture and its width: 0.01 for an LSTM and 0.003 for a Transformer 128 wide, less in
proportion for wider ones; for an --antigen_encoder 0.0003 of adapters, 0.00003 of all its weights.
"""

from __future__ import annotations

import os
from typing import Any

from hf_ext.cli import quick_imports

with quick_imports():
    from transformers import set_seed

    from hf_ext.arguments.checks import check_metric_name
    from hf_ext.arguments.parser import FastArgumentParser
    from hf_ext.checkpoints.run_lock import run_folder
    from hf_ext.data.arguments import DataArguments
    from hf_ext.errors import exit_on_errors
    from hf_ext.generation.arguments import GeneratorArguments
    from hf_ext.generation.building import build_inputs, build_model, build_trainer, fill_in_demo
    from hf_ext.generation.measuring import EpochSamples, find_judges
    from hf_ext.generation.preparing import load_pairs, settle_columns
    from hf_ext.generation.results import check_passed, measure, save_all_gates
    from hf_ext.generation.stages import check_auto, describe_stage, settle_stage
    from hf_ext.generation.task import TASK
    from hf_ext.masked_lm.results import EVALUATION_METRICS
    from hf_ext.reporting.run_log import start_run_log
    from hf_ext.running import finish_run, leave_pages, parse_command, save_results, summarize_data
    from hf_ext.training_args import FastTrainingArguments


def main(argv: list[str] | None = None) -> dict:
    """Runs the recipe; returns what the last stage's `all_results.json` holds.

    Raises:
        GatesFailed: a stage did not reach what it must; everything was written before.
    """
    parser, (model_args, _, args) = parse_command(TASK.all_arguments, TASK.defaults, __doc__, argv)
    if model_args.stage != "auto":
        results = run_stage(parser.arguments, int(model_args.stage))
        check_passed(results)
        return results
    check_auto(args)
    done: list[dict] = []
    for stage in model_args.stages:
        folder, is_last = os.path.join(args.output_dir, f"stage-{stage}"), stage == model_args.stages[-1]
        done.append(run_stage(parser.arguments, stage, folder=folder, is_last=is_last))
        save_all_gates(args, done)
        check_passed(done[-1])
    return done[-1]


def run_stage(words: list[str], stage: int, *, folder: str | None = None, is_last: bool = True) -> dict:
    """One stage, from its command line to its gates; returns what its `all_results.json` holds.

    Args:
        words: the command line.
        stage: 1, 2 or 3.
        folder: of this stage, of several; None: `--output_dir`.
        is_last: no other stage follows, whatever the gates say.
    """
    own = [] if folder is None else ["--output_dir", folder]
    parser, (model_args, data_args, args) = parse_command(TASK.all_arguments, TASK.defaults, __doc__, [*words, *own])
    parser.arguments = words  # the command that repeats the run: of --stage auto, all its stages
    check_metric_name(args.metric_for_best_model, EVALUATION_METRICS)
    changed = settle_stage(stage, model_args, data_args, args, parser.explicit)
    with run_folder(args):
        start_run_log(args.output_dir, args.process_index == 0).info(describe_stage(stage, changed, folder is None))
        return run(stage, model_args, data_args, args, parser, is_last)


def run(
    stage: int,
    model_args: GeneratorArguments,
    data_args: DataArguments,
    args: FastTrainingArguments,
    parser: FastArgumentParser,
    is_last: bool,
) -> dict:
    """Trains, scores and reports, in an output folder that is this run's alone."""
    log = start_run_log(args.output_dir, args.process_index == 0)
    set_seed(args.seed)
    table = None
    if data_args.dataset_name is None:
        log.info("No --dataset_name: generated demo data, in which CDR-H3 follows the antigen by a planted rule.")
        table = fill_in_demo(model_args, args, parser.explicit)
    settle_columns(model_args, data_args, parser.explicit)
    judges = find_judges(model_args)
    data = load_pairs(model_args, data_args, parser.explicit, output_dir=args.output_dir, seed=args.seed, table=table)
    model = build_model(model_args, args, data)
    antigens = [antigen for split in data.splits for antigen in data.antibodies(split).antigens]
    inputs = build_inputs(model, args, antigens)
    tokens = {name: inputs.tokenize(data.antibodies(name), data.affinities(name)) for name in data.splits}
    log.info(summarize_data(data.report))

    samples = EpochSamples(str(args.output_dir), model_args, data, inputs, args.seed)
    trainer: Any = build_trainer(model, args, inputs, tokens["train"], tokens["validation"], [samples])
    log.info("\n%s\n", trainer.plan.table())
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()

    facts, text = measure(trainer, stage, model_args, data, inputs, judges)
    settings = {**vars(model_args), **vars(data_args)}
    results = save_results(trainer, trained, "generation", facts, settings, parser)
    log.info("\nStage %d, on test antigens:\n%s\n", stage, text)
    if is_last or not results["gates_passed"]:
        finish_run(trainer, log)
    else:
        leave_pages(trainer)
        trainer.close()
        log.info("Stage %d passed its gates; everything is in %s.", stage, args.output_dir)
    return results


if __name__ == "__main__":
    with exit_on_errors():
        main()
