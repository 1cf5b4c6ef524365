"""Train one operator Transformer on 1-D advection and 2-D Darcy flow, step by step: a script to copy and change.

    accelerate launch recipes/examples/pde_operator/train.py        # on generated data, two minutes on two cores
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 \\
        recipes/examples/pde_operator/train.py --config recipes/examples/pde_operator/configs/pde_conservative.yaml
"""

from __future__ import annotations

from typing import Any

from pde_operator.task import OperatorTask

from hf_ext import exit_on_errors


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and scores an operator; returns what `all_results.json` holds."""
    task = OperatorTask()
    with task.parse(argv) as run:  # the command line; then a folder of its own, a log, the seed
        data = task.load(run)  # data.samples: inputs and solutions of each equation
        parts = task.build(run, data)  # what Trainer takes: put your model, collator or callbacks in here
        trainer = run.build_trainer(**parts)  # FastTrainer, or Trainer itself with --stock_trainer
        trained = task.train(run, trainer, data)
        task.save(run, trainer)
        facts = task.score(run, trainer, trained, data)  # on validation and test samples, beside baselines
        return run.finish(trainer, trained, facts)  # all_results.json, report, model card, push


if __name__ == "__main__":
    with exit_on_errors():
        main()
