"""What report and card say of an operator: which equations, on which grid, and how little that says of any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_ext.reporting import (
    PLACEHOLDER,
    Block,
    Code,
    DataRecord,
    Page,
    RunRecord,
    Table,
    Text,
    from_json,
    index_scores,
    score_blocks,
    score_numbers,
    verdict_limits,
)
from hf_ext.text import join_words, units

MEANING = (
    "nRMSE of a row is the L2 of its error over the L2 of its solution. Scores are means over rows, and nRMSE without "
    "an equation is the mean over equations too; less is better."
)


def describe(results: Mapping[str, Any]) -> Page:
    """Returns the page of a run, from what its `all_results.json` holds."""
    run = from_json(RunRecord, results)
    data = run.data
    known = {**run.settings, **data.own}
    names = [*(known.get("tasks") or [])]
    equations = join_words(names) or "partial differential equations"
    size = int(known.get("resolution") or 32)
    return Page(
        title=f"Operator for {equations}",
        summary=f"An operator Transformer, which predicts solutions of {equations} on a grid of resolution {size}.",
        numbers=score_numbers(run.test, [f"{name}_nrmse" for name in names]),
        results=_score_blocks(run),
        data=_data_blocks(data),
        limits=[
            *verdict_limits(run.verdict),
            "Trained and scored on samples of one distribution: with other coefficients, initial or boundary "
            "conditions, with noise, or further in time it is untested.",
            f"It was trained at resolution {size} and reads no other: another grid takes a new training.",
            "Its scores are means over samples, and one solution may be much worse; a solver can bound its error, this "
            "model cannot.",
        ],
        subject=f"{equations} as in the training samples, and about nothing else: no other equation, and no claim "
        "about a real flow",
        loading=_loading(names, size),
        scores=index_scores(run.test),
        dataset=f"Generated {equations}",
        tags=["pde", "neural-operator"],
        library_name="hf_ext",
        task_type="regression",
        task_name="Solutions of partial differential equations",
    )


def _score_blocks(run: RunRecord) -> list[Block]:
    """Scores, and how far the model is below the best trivial prediction of each equation."""
    blocks = score_blocks(run.test, run.data.leaks)
    if not blocks:
        return []
    factors = {name: value for name, value in (run.test.own.get("factors") or {}).items() if units.is_finite(value)}
    if factors:
        listed = join_words([f"{name} {value:.2f}x" for name, value in factors.items()])
        blocks.append(Text(f"Error of the best trivial prediction over the model's: {listed}."))
    return [*blocks, Text(MEANING)]


def _data_blocks(data: DataRecord) -> list[Block]:
    if not data:
        return [Text("Not recorded: the run has no data report.")]
    facts = [["source", str(data.source)], *([name, str(data.own.get(name))] for name in ("resolution", "seed"))]
    equations = [[name, str(text)] for name, text in (data.own.get("tasks") or {}).items()]
    sizes = [[name, units.number(size)] for name, size in data.sizes.items()]
    caption = "Samples of each equation. All splits are drawn from one distribution."
    tables = (["", ""], facts, ""), (["equation", "samples of"], equations, ""), (["split", "samples"], sizes, caption)
    return [Table(headers, rows, text, code=[0] if rows is equations else []) for headers, rows, text in tables]


def _loading(names: list[str], size: int) -> list[Block]:
    # Made-up inputs of one sample: an initial state on r * r / 4 points; a field, as of Darcy flow, on r x r cells.
    examples = {"advection1d": f"torch.rand(1, {size**2 // 4})"}
    field = f"torch.full((1, {size}, {size}), 3.0)"
    inputs = ", ".join(f'"{name}_inputs": {examples.get(name, field)}' for name in names)
    lines = [
        "import torch",
        "",
        "# With recipes/examples/pde_operator of hf_ext's repository on PYTHONPATH.",
        "from pde_operator.model import OperatorTransformer",
        "",
        f'model = OperatorTransformer.from_pretrained("{PLACEHOLDER}")',
        f"inputs = {{{inputs}}}",
        "print(model(**inputs).logits)",
    ]
    order = join_words(names) + (", in this order" if len(names) > 1 else "")
    text = (
        f"logits (B, {len(names)}, {size * size:,}) are the solutions of {order}, in the unit of the data, at all "
        f"points of a grid; pde_operator.configuration.TASKS[name].query_grid({size}) has their coordinates."
    )
    return [Code("\n".join(lines), "python"), Text(text)]
