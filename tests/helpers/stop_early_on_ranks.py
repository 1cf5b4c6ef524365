"""What each process of `test_two_processes_early_stopping.py` runs: `python stop_early_on_ranks.py FOLDER`."""

import json
import sys
from pathlib import Path

from ranks import leave
from watched_runs import make_script, make_trainer, model_of

from hf_ext.trainer import FastTrainer

PREDICTIONS = [model_of(0.3), *(model_of(1.0, i) for i in range(6))]


def train(folder: Path) -> FastTrainer:
    """A run that stops after the third step; its evaluation batches are no whole number for two processes."""
    script = make_script(*PREDICTIONS)
    trainer = make_trainer(folder, script, early_stopping_patience=2, per_device_eval_batch_size=64)
    trainer.train()
    return trainer


if __name__ == "__main__":
    out = Path(sys.argv[1])
    trained = train(out / "run")
    report = {"step": trained.state.global_step, "decisions": trained.stopping_decisions}
    (out / f"report-{trained.args.process_index}.json").write_text(json.dumps(report))
    leave(trained)
