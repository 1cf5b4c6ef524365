"""Trainers whose blocks are compiled by a cheap backend, on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.plan import make_plan

BLOCKS = {"speedups": ["compile"]}


def compiled_trainer(folder, backend="eager", model=None, given=BLOCKS, dynamic=True, **others):
    """A trainer whose plan names another compiler than inductor: `eager` runs the same graphs as they are."""
    model, rows = make_wide_esm() if model is None else model, make_rows()
    plan = make_plan(make_args(folder, **given, **others), model, rows, pad_rows)
    found = plan["compile"]
    assert found.settings == {"dynamic": True}
    named = replace(found, settings={"dynamic": dynamic, "backend": backend})
    plan.decisions = [named if decision.name == "compile" else decision for decision in plan.decisions]
    return make_trainer(folder, model, rows, plan, **given, **others)


def evidence(trainer) -> dict:
    """What the plan on disk says of `compile`."""
    written = json.loads((Path(trainer.args.output_dir) / "plan.json").read_text())["decisions"]
    return next(decision["evidence"] for decision in written if decision["name"] == "compile")
