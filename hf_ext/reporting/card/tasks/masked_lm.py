"""The card of a masked language model."""

from __future__ import annotations

from typing import Any

from ...markdown import code, plain
from ...report.run_files import RunFiles
from ...report.values import as_dict
from ..facts import is_adapter, sequence_columns
from .base import TaskCard

# Made up. Residues apart: BERT's vocabularies need it, ESM's give the same ids either way.
EXAMPLE = "M K T A Y I A K Q"


class MaskedLMCard(TaskCard):
    tags = ("biology", "protein", "protein-language-model", "masked-lm")
    pipeline_tag = "fill-mask"
    index_task = ("fill-mask", "Masked language modelling")

    def __init__(self, run: RunFiles):
        super().__init__(run)
        self.library_name = "peft" if is_adapter(run) else "transformers"
        self.package = code(self.library_name)

    def description(self) -> list[str]:
        kind = plain(as_dict(self.run.results.get("model")).get("class", "class not recorded"))
        columns = ", ".join(map(code, sequence_columns(self.run)))
        return [
            f"A masked protein language model ({kind}): it predicts masked "
            f"residues of amino-acid sequences. Trained on {columns}."
        ]

    def subject(self) -> str:
        return "filling in masked residues"

    def contains_bases(self) -> bool:
        return super().contains_bases() or not is_adapter(self.run)

    def _scores_in(self, split: dict[str, Any]) -> dict[str, Any]:
        return split

    def loading_code(self, repo: str) -> list[str]:
        kind = "AutoModelForMaskedLM"
        imports = [f"from transformers import {kind}, AutoTokenizer"]
        if is_adapter(self.run):
            kind = "AutoPeftModel"
            imports = [f"from peft import {kind}", "from transformers import AutoTokenizer"]
        return [
            *imports,
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
            f'model = {kind}.from_pretrained("{repo}")',
            f'batch = tokenizer("{EXAMPLE} " + tokenizer.mask_token + " R Q", return_tensors="pt")',
            "print(tokenizer.decode(model(**batch).logits[0, 10].argmax()))",
        ]
