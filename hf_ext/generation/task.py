"""Write antibodies for an antigen, trained in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..data import DataArguments
from ..files import Facts, Json
from ..tasks import USUAL, Task
from .arguments import GeneratorArguments
from .stages import GATES_NAME, check_auto, check_passed, write_gates

if TYPE_CHECKING:
    from ..tasks import Run


class GenerationTask(Task):
    """Train a generator of antibodies for antigens, in stages with gates, and say whether it reads the antigen at all.

        hf-ext generate --dataset_name pairs.csv --antigen_column antigen --stage auto

    Each row is an antibody and the antigen that it binds; joining tables is yours. Without data of yours it trains on
    generated pairs, about a minute. With `--label_column pKd` the generator can be asked for an affinity. Rows are
    split by antigen, unless you say how. A stage ends with `gates.json`; where a gate fails, the exit status is 1, and
    `--stage auto` goes no further. Killed, or stopped with Ctrl-C, the same command goes on where it was
    (`--resume auto`, the default).

    Stages set what you do not; a flag of yours goes over its stage::

        1, proof: size tiny, 1,000 training rows above pKd 7, 100 for validation, 10 epochs of 32 rows a step; it is to
           memorise them, so the last model is kept and nothing stops early
        2, quality: small, 10,000 rows above pKd 7, 1,000 for validation, 20 epochs of 64; best model, patience 5
        3, full: full, all rows, 50 epochs of 64 x 2 accumulated; best model, patience 5

    The learning rate follows the architecture and its width: 0.01 for an LSTM and 0.003 for a Transformer 128 wide,
    less in proportion for wider ones; for an --antigen_encoder 0.0003 of adapters, 0.00003 of all its weights.
    """

    name = "generation"
    arguments = (GeneratorArguments, DataArguments)
    defaults = {
        **USUAL,
        "output_dir": "outputs/generator",
        "too_long": "error",
        "per_device_eval_batch_size": 64,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "metric_for_best_model": "token_loss",
        "greater_is_better": False,
        "remove_unused_columns": False,  # the lengths of rows, by which batches are made, are no input of the model
        "logging_steps": 0.05,
    }

    def parse_stages(self, argv: Sequence[str] | None = None) -> list[Run]:
        """Returns a run for each stage of a command line: one; of `--stage auto` all, each in a folder of its own.

        Raises:
            ArgumentError: as `parse`; `--stage auto` with what only one stage can have.
        """
        whole = self.parse(argv)
        if whole.model_args.stage != "auto":
            whole.stage = int(whole.model_args.stage)
            return [whole]
        check_auto(whole.args)
        words = whole.parser.arguments
        runs = []
        for stage in whole.model_args.stages:
            run = self.parse([*words, "--output_dir", str(whole.folder / f"stage-{stage}")])
            run.parser.arguments = words  # the command that repeats the run: all its stages
            run.stage = stage
            run.is_last = stage == whole.model_args.stages[-1]
            runs.append(run)
        return runs

    def check_gates(self, run: Run, stages: Sequence[Facts]) -> None:
        """Ends the command where the last stage did not pass; of `--stage auto`, writes `gates.json` of all so far.

        Args:
            run: of the last stage.
            stages: what `all_results.json` of each stage holds, in order.

        Raises:
            GatesFailed: everything was written before.
        """
        from ..processes import do_on_main

        if run.model_args.stage == "auto":
            gates = {results["stage"]: results["gates"] for results in stages}
            do_on_main(run.args, lambda: write_gates(run.folder.parent / GATES_NAME, gates))
        check_passed(stages[-1])

    def main(self, argv: Sequence[str] | None = None) -> Json:
        """Runs one stage, or several in turn while gates pass; returns what the last one's `all_results.json` holds.

        Raises:
            GatesFailed: a stage did not reach what it must; everything was written before.
        """
        done: list[Json] = []
        for run in self.parse_stages(argv):
            with run:
                done.append(self.take_steps(run))
            self.check_gates(run, done)
        return done[-1]


TASK = GenerationTask()
main = TASK.main
