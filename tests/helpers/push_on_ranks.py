"""What each process of a two-process test runs: `python push_on_ranks.py FOLDER` under torchrun.

A run that pushes, and one whose Hub fails; `push-RANK.json` in FOLDER holds what each process saw. HF_ENDPOINT is a
server of the test, whose repository "me/broken" refuses commits.
"""

import json
import os
import sys
from pathlib import Path

from ranks import leave
from token_rows import RecordingCollator
from train_on_ranks import make_model, make_rows, settings

from hf_ext.hub import HubError, push
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))


def main(folder: Path) -> None:
    push.WAITS_S = ()
    report = {}
    for name in ("good", "broken"):
        given = {"push_to_hub": True, "hub_model_id": f"me/{name}", "hub_strategy": "every_save"}
        args = FastTrainingArguments(
            **settings(folder / name, max_steps=2, save_strategy="steps", save_steps=1, **given),
            per_device_train_batch_size=2,
        )
        trainer = FastTrainer(make_model(), args, RecordingCollator(), make_rows(8))
        trainer.train()
        try:
            report[name] = trainer.push_to_hub().oid
        except HubError as error:
            report[name] = str(error)
    (folder / f"push-{RANK}.json").write_text(json.dumps(report))
    trainer.args.push_to_hub = False  # else `end` raises again
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
