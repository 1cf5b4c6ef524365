"""What each of two processes of a test runs: `python padding_on_ranks.py FOLDER`. One row's label stands on padding."""

import sys
from pathlib import Path

from miniature_esm import make_wide_esm
from ranks import leave
from tiny_masked_lm import make_args, make_rows
from token_rows import pad_rows

from hf_ext.errors import PlanRefused
from hf_ext.trainer import FastTrainer


class LabelOnPadding:
    """A label where the mask is 0, in the second batch of the second process."""

    def __init__(self, rank: int):
        self.left = 2 if rank else -1

    def __call__(self, rows):
        batch = pad_rows(rows)
        if len(rows) == 2:  # no probe
            self.left -= 1
        if self.left == 0:
            batch["attention_mask"][0, 1] = 0
            batch["labels"][0, 1] = 7
        return batch


def main(folder: Path) -> None:
    args = make_args(folder, speedups=["packing"], attention="blocked", per_device_train_batch_size=2, max_steps=4)
    trainer = FastTrainer(make_wide_esm(), args, LabelOnPadding(args.process_index), make_rows(24))
    try:
        trainer.train()
        said = "nothing"
    except PlanRefused as refusal:
        said = str(refusal)
    (folder / f"said_{args.process_index}").write_text(said)
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
