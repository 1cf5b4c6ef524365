"""Train a masked protein language model step by step: what `hf-ext mlm` does, as a script to copy and change.

accelerate launch recipes/mlm.py --config recipes/configs/mlm_esm2_8M.yaml
"""

from __future__ import annotations

from typing import Any

from hf_ext import MaskedLMTask, exit_on_errors


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and scores a model; returns what `all_results.json` holds."""
    task = MaskedLMTask()
    with task.parse(argv) as run:  # the command line; then a folder of its own, a log, the seed
        data = task.load(run)  # data.splits: rows; data.model and data.collator, which say how long one may be
        parts = task.build(run, data)  # what Trainer takes: put your model, collator or callbacks in here
        trainer = run.build_trainer(**parts)  # FastTrainer, or Trainer itself with --stock_trainer
        trained = task.train(run, trainer, data)
        task.save(run, trainer)
        facts = task.score(run, trainer, trained, data)  # on validation and test rows, beside a baseline
        return run.finish(trainer, trained, facts)  # all_results.json, report, model card, push


if __name__ == "__main__":
    with exit_on_errors():
        main()
