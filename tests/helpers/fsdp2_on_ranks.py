"""What each process of `test_fsdp2_equals_one_process.py` runs: `python fsdp2_on_ranks.py FOLDER PART`, launched.

Writes to FOLDER, per run: losses and gathered weights, the saved model as `NAME-saved`, and what the plan says.
"""

import json
import sys
from pathlib import Path

from equal_cases import CASES, make_trainer, save_numbers
from ranks import leave
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

CHECKPOINTED = ("full", "lora")  # cases that are also trained with recomputed activations
RECOMPUTING = {"recomputed": {"activation_checkpointing": True}}


class CountRounded(TrainerCallback):
    """Share of the numbers in the first gradient that bfloat16 holds exactly."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            found = [p.grad.to_local().flatten() for p in model.parameters() if p.grad is not None]
            exact = sum(int((part == part.bfloat16().float()).sum()) for part in found)
            self.share = exact / sum(part.numel() for part in found)


def run(folder: Path, name: str, case: str, num_processes: int, **given):
    """Trains a case and saves it; returns the trainer."""
    trainer = make_trainer(case, folder / name, num_processes, folder / "encoders", **given)
    trainer.train()
    save_numbers(folder, name, trainer)
    trainer.save_model(str(folder / f"{name}-saved"))
    decision = next(d for d in trainer.plan.decisions if d.name == "sharding")
    split = [parameter for parameter in trainer.model.parameters() if isinstance(parameter, DTensor)]
    report = {"status": decision.status, "reason": decision.reason, "split": len(split), "evidence": decision.evidence}
    report["whole"] = len([*trainer.model.parameters()]) - len(split)
    if trainer.args.process_index == 0:
        (folder / f"{name}-about.json").write_text(json.dumps(report))
    return trainer


def run_half(folder: Path, num_processes: int) -> None:
    """bfloat16: a step as hf_ext sums gradients, one as accelerate would; and a frozen tower beside one that trains."""
    shares = {}
    for name in ("ours", "accelerate"):
        trainer = make_trainer("masked_lm", folder / name, num_processes, folder / "encoders", max_steps=1)
        if name == "accelerate":  # the broken twin
            trainer._ext_backend.configure = lambda plugin=trainer.accelerator.state.fsdp_plugin: object.__setattr__(
                plugin.mixed_precision_policy, "reduce_dtype", plugin.mixed_precision_policy.param_dtype
            )
        counter = CountRounded()
        trainer.args.max_grad_norm = 0.0
        trainer.add_callback(counter)
        trainer.train()
        shares[name] = counter.share
    for case in CASES:
        run(folder, f"half-{case}", case, num_processes)
    if trainer.args.process_index == 0:
        (folder / "shares.json").write_text(json.dumps(shares))


def main(folder: Path, part: str, num_processes: int) -> None:
    if part == "push":
        pushing = {"push_to_hub": True, "hub_model_id": "me/sharded", "hub_strategy": "end", "max_steps": 1}
        trainer = run(folder, "push", "masked_lm", num_processes, **pushing)
        commit = trainer.push_to_hub().oid
        (folder / f"commit-{trainer.args.process_index}.json").write_text(json.dumps(commit))
    elif part == "half":
        run_half(folder, num_processes)
        trainer = None
    else:
        for case in CASES:
            trainer = run(folder, f"{part}-{case}", case, num_processes)
            run(folder, f"{part}-louder-{case}", case, num_processes, broken=True)
        for case in CHECKPOINTED if part == "fsdp2" else ():
            for name, given in RECOMPUTING.items():
                run(folder, f"{part}-{name}-{case}", case, num_processes, **given)
    if trainer is not None:
        leave(trainer)


if __name__ == "__main__":
    import cpu_as_gpus.sitecustomize  # noqa: F401  # before accelerate looks for devices

    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
