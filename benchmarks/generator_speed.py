"""Speed of antibody generators beside stock transformers: training and sampling, all sides in turn in one process.

    OMP_NUM_THREADS=1 python benchmarks/generator_speed.py pairs.csv --antigen_encoder ENCODER \\
        --output_json benchmarks/results/generator_speed.json

`training`: recipes/generate_antibody.py's trainer, stage 1 with its defaults, against the same model under
`Seq2SeqTrainer` with `DataCollatorForSeq2Seq`. A pass is one epoch over the same rows; passes of all sides take turns,
and each side goes on from the weights that its last pass left, so that losses can be compared along the way.
`encoder`: the same with a frozen ESM, and a third side: ours, but with the encoder in every step.
`sampling`: `sample_pairs` against `model.generate(do_sample=True)`, as many antibodies of the same length.
Parts may be measured one at a time (`--parts`); each replaces its own entry of the JSON. Rates are of real tokens:
those of each row's antigen and antibody, however often the antigen is computed. CPU seconds are those of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

from hf_ext.arguments.parser import parse_command
from hf_ext.data.antibodies import decode_pairs
from hf_ext.generation.building import Inputs, build_inputs, build_model
from hf_ext.generation.preparing import PairData, load_pairs, settle_columns
from hf_ext.generation.sampling import sample_pairs
from hf_ext.generation.stages import STAGES, settle_stage
from hf_ext.generation.task import TASK
from hf_ext.hardware import detect_hardware
from hf_ext.masked_lm.results import compute_metrics, sum_rows
from hf_ext.trainer import FastTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

PARTS = ("training", "encoder", "sampling")
LEARNING_RATE = 1e-3
SIDES = {"training": ("hf_ext", "stock"), "encoder": ("hf_ext", "encoder in every step", "stock")}


class StepClock(TrainerCallback):
    """Seconds from the first step's begin to the last one's end, on the wall and of the process; batches included."""

    begun: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first begins the measurement."""
        self.begun = self.begun or _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last ends it."""
        assert self.begun is not None
        self.wall_s, self.cpu_s = (now - then for now, then in zip(_now(), self.begun))
        self.num_steps = state.global_step


class Bench:
    """One architecture on the rows of a CSV: new models, and passes of each side over the training rows.

    Attributes:
        decisions: what the plan of our last pass switched on.
        had_autocast: side -> whether its forward passes ran in half precision.
    """

    def __init__(self, bench: argparse.Namespace, architecture: str, folder: Path, data: PairData | None = None):
        self.bench, self.folder = bench, folder
        self.decisions: dict[str, str] = {}
        self.had_autocast: dict[str, bool] = {}
        words = ["--dataset_name", bench.pairs, "--output_dir", str(folder), "--architecture", architecture]
        numbers = {"max_train_samples": bench.rows, "max_validation_samples": bench.eval_rows}
        numbers |= {"max_residues": bench.max_residues, "learning_rate": LEARNING_RATE}
        words += [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
        words += ["--bad_rows", "drop"]
        words += ["--split_column", bench.split_column] if bench.split_column else []
        words += ["--antigen_encoder", bench.antigen_encoder] if architecture == "esm" else []
        words += ["--lr_scheduler_type", "constant", "--warmup_steps", "0", "--num_train_epochs", "1", "--resume", "no"]
        self.words = [*words, "--eval_strategy", "no", "--save_strategy", "no", "--disable_tqdm", "true"]
        parser, (self.model_args, data_args, args) = self._parse(0)
        self.args = args
        settle_columns(self.model_args, data_args, parser.explicit)
        given = {"output_dir": str(folder), "seed": args.seed}
        self.data = data or load_pairs(self.model_args, data_args, parser.explicit, **given)
        antigens = [one for name in ("train", "validation") for one in self.data.antibodies(name).antigens]
        began = _now()
        self.inputs = build_inputs(self.make_model(0), args, antigens)
        self.caching_cpu_s = _now()[1] - began[1]
        names = ("train", "validation")
        self.train, self.validation = (self.inputs.tokenize(self.data.antibodies(name)) for name in names)
        self.tokens = sum(len(row["input_ids"]) + len(row["labels"]) for row in self.train)

    def _parse(self, seed: int, *words: str) -> Any:
        own = ["--seed", str(seed), "--embedding_cache_dir", str(self.folder / "cache")]
        parser, (model_args, data_args, args) = parse_command(
            TASK.all_arguments, TASK.defaults, __doc__, [*self.words, *own, *words]
        )
        settle_stage(1, model_args, data_args, args, parser.explicit)
        return parser, (model_args, data_args, args)

    def make_model(self, seed: int, weights: dict[str, torch.Tensor] | None = None) -> Any:
        """A new model; with the weights that a pass left."""
        set_seed(seed)
        model = build_model(self.model_args, self.args, self.data)
        if weights is not None:
            model.load_state_dict(weights)
        return model

    def run_pass(self, side: str, number: int, weights: dict[str, torch.Tensor], max_steps: int = -1) -> dict[str, Any]:
        """One epoch of a side from `weights`, which are changed; seconds and steps."""
        model, clock = self.make_model(0, weights), StepClock()
        if side != "hf_ext" and model.config.architecture == "esm":
            model.encoder.attach(torch.device("cpu"))  # loading it belongs to no step
        shared = model.shared.register_forward_hook(
            lambda *_: self.had_autocast.__setitem__(side, torch.is_autocast_enabled("cpu"))
        )
        if side == "stock":
            self._stock_trainer(model, clock, number, max_steps).train()
        else:
            args = self._parse(number, *(["--max_steps", str(max_steps)] if max_steps > 0 else []))[1][2]
            inputs = self.inputs if side == "hf_ext" else Inputs(self.inputs.antigen_tokenizer)
            trainer = FastTrainer(
                model,
                args,
                data_collator=inputs.collator,
                train_dataset=self.train,
                eval_dataset=self.validation,
                processing_class=inputs.tokenizer,
                compute_metrics=compute_metrics,
                preprocess_logits_for_metrics=sum_rows,
                callbacks=[clock],
            )
            trainer.train()
            if side == "hf_ext":
                self.decisions = {one.name: one.reason for one in trainer.plan.decisions if one.status == "applied"}
            trainer.end()
        shared.remove()
        weights.update({name: value.detach().clone() for name, value in model.state_dict().items()})
        return {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "steps": clock.num_steps}

    def _stock_trainer(self, model: Any, clock: StepClock, number: int, max_steps: int) -> Seq2SeqTrainer:
        args = Seq2SeqTrainingArguments(
            output_dir=str(self.folder / "stock"),
            per_device_train_batch_size=STAGES[1].per_device_train_batch_size,
            learning_rate=LEARNING_RATE,
            weight_decay=TASK.defaults["weight_decay"],
            lr_scheduler_type="constant",
            num_train_epochs=1,
            max_steps=max_steps,
            seed=number,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        tokenizer = self.inputs.antigen_tokenizer or self.inputs.tokenizer
        collator = DataCollatorForSeq2Seq(tokenizer)
        given = {"data_collator": collator, "train_dataset": self.train, "callbacks": [clock]}
        return Seq2SeqTrainer(model, args, **given)

    @torch.no_grad()
    def measure_loss(self, weights: dict[str, torch.Tensor]) -> float:
        """Nats per token of the validation rows, evaluation mode, float32."""
        model = self.make_model(0, weights).eval()
        total, num = 0.0, 0
        for start in range(0, len(self.validation), 32):
            rows = [self.validation[i] for i in range(start, min(start + 32, len(self.validation)))]
            batch = self.inputs.collator(rows)
            count = int((batch["labels"] != -100).sum())
            total, num = total + model(**batch).loss.item() * count, num + count
        return total / num


def _make_benches(bench: argparse.Namespace, architectures: Sequence[str], folder: Path) -> dict[str, Bench]:
    """One per architecture, all on the same rows, which are read once."""
    made: dict[str, Bench] = {}
    for name in architectures:
        made[name] = Bench(bench, name, folder / name, made[architectures[0]].data if made else None)
    return made


def compare_training(bench: argparse.Namespace, architectures: Sequence[str], part: str) -> dict[str, Any]:
    """Passes of each side of each architecture in turn; the order turns round with each round."""
    with tempfile.TemporaryDirectory() as folder:
        benches = _make_benches(bench, architectures, Path(folder))
        weights = {(name, side): benches[name].make_model(0).state_dict() for name in benches for side in SIDES[part]}
        for (name, side), given in weights.items():  # warm-up, whose weights are thrown away
            weights[name, side] = {key: value.clone() for key, value in given.items()}
            benches[name].run_pass(side, 0, dict(given), max_steps=1)
        passes: dict[Any, list[dict[str, Any]]] = {key: [] for key in weights}
        for number in range(bench.rounds):
            for name, side in [*weights][:: 1 if number % 2 else -1]:
                measured = benches[name].run_pass(side, number, weights[name, side])
                measured["loss"] = benches[name].measure_loss(weights[name, side])
                passes[name, side].append(measured)
                print(part, number, name, side, json.dumps(measured), flush=True)
        return {name: _describe(benches[name], SIDES[part], name, passes) for name in benches} | (
            {"lstm_over_transformer": ratios(passes["transformer", "hf_ext"], passes["lstm", "hf_ext"])}
            if {"lstm", "transformer"} <= {*benches}
            else {}
        )


def _describe(bench: Bench, sides: Sequence[str], name: str, passes: dict[Any, list[dict[str, Any]]]) -> dict[str, Any]:
    ours = passes[name, sides[0]]
    num_antigens = len(set(bench.data.antibodies("train").antigens))
    result: dict[str, Any] = {
        **{"rows": len(bench.train), "tokens_per_pass": bench.tokens, "distinct_antigens": num_antigens},
        **{"plan": bench.decisions, "caching_cpu_s": bench.caching_cpu_s, "half_precision": bench.had_autocast},
        "sides": {side: {"passes": passes[name, side]} for side in sides},
    }
    for side, entry in result["sides"].items():
        for unit in ("wall_s", "cpu_s"):
            rates = [bench.tokens / one[unit] for one in passes[name, side]]
            entry[f"tokens_per_{unit.removesuffix('_s')}_s"] = statistics.median(rates)
            entry[f"steps_per_{unit.removesuffix('_s')}_s"] = statistics.median(
                one["steps"] / one[unit] for one in passes[name, side]
            )
        if side != sides[0]:
            entry["hf_ext_is"] = ratios(passes[name, side], ours)
            entry["hf_ext_loss_minus_its"] = [a["loss"] - b["loss"] for a, b in zip(ours, passes[name, side])]
    return result


def ratios(slow: Sequence[dict[str, Any]], fast: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast the second is, per unit: median, least and most over the rounds."""
    found = {}
    for unit in ("wall_s", "cpu_s"):
        each = [a[unit] / b[unit] for a, b in zip(slow, fast)]
        found[unit] = {"median": statistics.median(each), "least": min(each), "most": max(each)}
    return found


def compare_sampling(bench: argparse.Namespace) -> dict[str, Any]:
    """As many antibodies for the same antigens in one batch by both, each `max_new_tokens` long."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, made in _make_benches(bench, ("lstm", "transformer"), Path(folder)).items():
            model = made.make_model(0).eval()
            model.config.eos_token_id = None  # as long as they may be: with new weights lengths would differ by chance
            antigens = sorted(set(made.data.antibodies("validation").antigens))[: bench.antigens]
            sides = {"hf_ext": _ours(model, antigens, bench), "stock": _plain(model, antigens, made.inputs, bench)}
            passes: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for number in range(-1, bench.rounds):
                for side in [*sides][:: 1 if number % 2 else -1]:
                    began = _now()
                    written = sides[side](number + 1)
                    seconds = [now - then for now, then in zip(_now(), began)]
                    if number >= 0:  # the first is warm-up
                        passes[side].append({"wall_s": seconds[0], "cpu_s": seconds[1], "antibodies": written})
            rates = {
                side: statistics.median(one["antibodies"] / one["cpu_s"] for one in each)
                for side, each in passes.items()
            }
            results[name] = {"passes": passes, "antibodies_per_cpu_s": rates}
            results[name]["hf_ext_is"] = ratios(passes["stock"], passes["hf_ext"])
            print("sampling", name, json.dumps(results[name]["hf_ext_is"]), flush=True)
    return results


def _ours(model: Any, antigens: Sequence[str], bench: argparse.Namespace) -> Callable[[int], int]:
    def write(seed: int) -> int:
        settings = {"num_samples": bench.samples, "max_new_tokens": bench.max_new_tokens, "seed": seed}
        found = sample_pairs(model, None, antigens, **settings, show_progress=False)
        return sum(map(len, found))

    return write


def _plain(model: Any, antigens: Sequence[str], inputs: Inputs, bench: argparse.Namespace) -> Callable[[int], int]:
    def write(seed: int) -> int:
        set_seed(seed)
        batch = inputs.tokenizer(list(antigens), padding=True, return_tensors="pt")
        settings = {"num_return_sequences": bench.samples, "max_new_tokens": bench.max_new_tokens}
        return len(decode_pairs(model.generate(**batch, do_sample=True, eos_token_id=None, **settings)))

    return write


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Measures the parts that were asked for and writes them into the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help="CSV with columns antigen, heavy and light.")
    parser.add_argument("--output_json", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["training", "sampling"])
    parser.add_argument("--antigen_encoder", help="ESM-2 of the part 'encoder'.")
    parser.add_argument("--split_column")
    for name, value in {
        **{"rows": 256, "eval_rows": 64, "max_residues": 400, "rounds": 5},
        **{"antigens": 4, "samples": 8, "max_new_tokens": 231},
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    bench = parser.parse_args()
    if "encoder" in bench.parts and not bench.antigen_encoder:
        parser.error("the part encoder needs --antigen_encoder, the folder or Hub id of an ESM-2")
    result = json.loads(bench.output_json.read_text()) if bench.output_json.is_file() else {}
    for part in bench.parts:
        before, load = time.process_time(), os.getloadavg()[0]
        if part == "sampling":
            measured = compare_sampling(bench)
        else:
            measured = compare_training(bench, ["esm"] if part == "encoder" else ["lstm", "transformer"], part)
        names = ("rows", "max_residues", "rounds", "antigens", "samples", "max_new_tokens")
        result["machine"] = {
            **{"hardware": detect_hardware(torch.device("cpu")).name, "torch": torch.__version__},
            "num_threads": torch.get_num_threads(),
        }
        result[part] = {
            "settings": {name: getattr(bench, name) for name in names},
            "load": [load, os.getloadavg()[0]],
            "cpu_s": time.process_time() - before,
            **measured,
        }
        bench.output_json.parent.mkdir(parents=True, exist_ok=True)
        bench.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
