"""Train a generator of antibodies stage by stage: what `hf-ext generate` does, as a script to copy and change.

accelerate launch recipes/generate_antibody.py --dataset_name pairs.csv --stage auto
"""

from __future__ import annotations

from typing import Any

from hf_ext import GenerationTask, exit_on_errors


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and judges a generator; returns what the last stage's `all_results.json` holds."""
    task = GenerationTask()
    done: list[dict[str, Any]] = []
    for run in task.parse_stages(argv):  # one stage; with --stage auto three
        with run:  # a folder of its own, a log, the seed
            data = task.load(run)  # data.pairs: rows of antigens and antibodies
            parts = task.build(run, data)  # what Trainer takes: put your model, collator or callbacks in here
            trainer = run.build_trainer(**parts)  # a FastTrainer, with its plan in the log
            trained = task.train(run, trainer, data)
            task.save(run, trainer)
            facts = task.score(run, trainer, trained, data)  # antibodies for test antigens, and the stage's gates
            done.append(run.finish(trainer, trained, facts))  # all_results.json, report, model card
        task.check_gates(run, done)  # the command ends here where a gate failed
    return done[-1]


if __name__ == "__main__":
    with exit_on_errors():
        main()
