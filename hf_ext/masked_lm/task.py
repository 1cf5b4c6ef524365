"""Fill in masked residues: pretrain or adapt a protein language model."""

from __future__ import annotations

from ..data import DataArguments
from ..tasks import USUAL, Task
from .arguments import MaskedLMArguments


class MaskedLMTask(Task):
    """Train a masked protein language model: ESM-2 or ESM C from scratch, or a published one further.

        hf-ext mlm --config mlm_esm2_8M.yaml

    Without data of yours it trains on generated chains, under a minute. Killed, or stopped with Ctrl-C, the same
    command goes on where it was (`--resume auto`, the default): masks are a function of seed, epoch and sequence, and
    streams are read on from their position. Sequences above --max_residues are cropped at random, anew in every epoch
    (--too_long error refuses them instead). A stream (--streaming true --max_steps N) is repeated until N steps are
    done. `--stock_trainer true` trains with transformers.Trainer itself, on the same data and masks.
    """

    name = "masked_lm"
    arguments = (MaskedLMArguments, DataArguments)
    defaults = {
        **USUAL,
        "output_dir": "outputs/mlm",
        # ESM-2's own (Lin et al. 2023, supplement), as is the usual decay of weights: Adam with these, 4e-4 after a
        # warm-up, then linear decay.
        "learning_rate": 4e-4,
        "adam_beta2": 0.98,
        "num_train_epochs": 10,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        # By share of the run, because a stream has no epochs.
        "eval_strategy": "steps",
        "eval_steps": 0.1,
        "save_strategy": "steps",
        "save_steps": 0.1,
        "logging_steps": 0.05,
        "metric_for_best_model": "token_loss",
        "greater_is_better": False,
    }


TASK = MaskedLMTask()
main = TASK.main
