"""Train an affinity or property model step by step: what `hf-ext train` does, as a script to copy and change.

accelerate launch recipes/max_speed.py --config recipes/configs/gb1.yaml
"""

from __future__ import annotations

from typing import Any

from hf_ext import AffinityTask, exit_on_errors


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and scores a model; returns what `all_results.json` holds."""
    task = AffinityTask()
    with task.parse(argv) as run:  # the command line; then a folder of its own, a log, the seed
        data = task.load(run)  # data.splits: rows of train, validation and test
        parts = task.build(run, data)  # what Trainer takes: add callbacks, or subclass its collator or model
        trainer = run.build_trainer(**parts)  # a FastTrainer, with its plan in the log
        trained = task.train(run, trainer, data)
        task.save(run, trainer)
        facts = task.score(run, trainer, trained, data)  # on test rows, beside baselines
        return run.finish(trainer, trained, facts)  # all_results.json, report, model card, push


if __name__ == "__main__":
    with exit_on_errors():
        main()
