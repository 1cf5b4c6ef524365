"""Write a trained model as one ONNX file, encoders and head together, which runs without torch and without hf_ext.

    hf-ext export --model outputs/affinity --format onnx --output model.onnx

The file takes token ids and their mask for each input, of any number of rows and tokens, and gives predictions: in
label units, or probabilities. Its metadata say how letters become ids, so that a program needs numpy and onnxruntime
alone (docs/library.md has one). Weights are in float32, adapters of LoRA are merged. Before the file appears, it
predicts 100 generated rows of several lengths: one whose numbers are not the model's is not kept.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, asdict, dataclass
from io import StringIO
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import option, parse_command
from ..checkpoints import find_model, make_folder
from ..data import RESIDUES, STANDARD, SequenceCollator
from ..errors import ArgumentError
from ..models import has_adapters
from ..optional import require
from ..processes import refuse_several
from ..property import AffinityPredictor, load_model
from .residues_of_ids import ResiduesOfIds

FACTS = "hf_ext"  # key of the metadata
LARGEST = 1_900_000_000  # bytes of weights in one file: protobuf ends at 2 GiB
BATCHES = (1, 2, 37, 60)  # rows that are compared
MOST_RESIDUES = 90  # of them
TOLERANCE = 1e-4  # of the scale of labels, or of a probability
ROUNDING = 1e-6  # of the number itself


@dataclass
class ExportArguments:
    """Which model, and what is written."""

    _argument_group_name = "export"  # in --help
    _only_reads = "export"

    model: str = option(MISSING, "Folder that hf-ext train wrote, or Hub id.")
    output: str = option("model.onnx", "New file; 1.9 GB of weights and more go into a second one, NAME.data.")
    format: Literal["onnx"] = option("onnx", "What to write.")
    revision: str | None = option(None, "Commit, tag or branch of a Hub model.")


def main(argv: Sequence[str] | None = None) -> Path:
    """Writes a model as ONNX; returns the path of the file.

    Raises:
        ArgumentError: no such model, one whose encoders are in 8 or 4 bits, or one of which the file predicts something
            else; a file that is there already.
        MissingDependencyError: onnx, onnxscript or onnxruntime does not work here.
    """
    _, (args,) = parse_command((ExportArguments,), {}, __doc__, argv)
    refuse_several("export")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx", "hf-ext export")
    output = Path(args.output).expanduser()
    if output.exists():
        raise ArgumentError(f"--output {output}: is there already. Nothing is overwritten: give a new file.")
    make_folder(output.parent)
    folder = find_model(args.model, args.revision)
    model = load_model(folder)
    if model.config.reads_vectors or model.config.numbers:
        told = "it reads vectors of a file" if model.config.reads_vectors else "it reads columns beside sequences"
        raise ArgumentError(f"--model {args.model}: {told}, which is not exported. Use hf-ext predict.")
    if model.config.wild_type:
        told = "it ranks by the likelihood of a language model"
        raise ArgumentError(f"--model {args.model}: {told}, which is not exported. Use hf-ext predict.")
    if bits := model.config.encoder_bits:
        raise ArgumentError(
            f"--model {args.model}: encoders in {bits} bits cannot be exported. Train without that flag."
        )
    if has_adapters(model):
        model.merge_adapters()
    model.config.encoder_dtype = "float32"
    model.config.encoder_autocast = None
    model.attach_encoders()
    collator = SequenceCollator.from_pretrained(folder)
    pairs = [column for parts in collator.columns.values() if len(parts) > 1 for column in parts]
    if collator.residues and {*pairs} & {*collator.missing_chains}:
        told = "heads read residues, and of a pair one chain may be missing: tokens do not tell which"
        raise ArgumentError(f"--model {args.model}: {told}. Use hf-ext predict, or train with --head mlp.")
    predictor = AffinityPredictor(model, collator, device="cpu")
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        draft = Path(scratch) / output.name
        write_onnx(predictor, draft)
        worst = compare_rows(predictor, draft)
        if not worst <= 1:  # NaN neither
            raise ArgumentError(
                f"--model {args.model}: as ONNX it predicts something else, {worst:.3g} times further from its own "
                "predictions than allowed, so that no file was written. Use hf-ext predict."
            )
        for path in Path(scratch).iterdir():
            os.replace(path, output.parent / path.name)
    print(f"{output}: predicts {sum(BATCHES)} generated rows as the model does.")
    return output


class Graph(nn.Module):
    """What the file computes: from {input: {"input_ids", "attention_mask"}}, (n, tokens), to {"prediction": (n, ...)}.

    Where residues have labels, predictions are those of all tokens, (n, tokens, ...).
    """

    def __init__(self, predictor: AffinityPredictor):
        super().__init__()
        self.model = predictor.model
        self.config = predictor.model.config  # which transformers' exporter reads
        self.tokenizers = predictor.collator.tokenizers
        self.residues = ResiduesOfIds(predictor.collator) if predictor.collator.residues else None

    def forward(self, sequences: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Predicts; rows without any residue in an input lack it."""
        kind = self.config.kind
        pooled = {}
        missing = {}
        masks = {}
        for name, tokens in sequences.items():
            frame = self.tokenizers[name].template
            ids = tokens["input_ids"]
            mask = tokens["attention_mask"]
            special = _is_among(ids, (*frame.prefix, *frame.between, *frame.suffix))
            residues = mask.bool() & ~special
            if frame.has_token_types and frame.between:
                ends = _is_among(ids, frame.between).long()
                tokens = {**tokens, "token_type_ids": mask * (ends.cumsum(1) > ends)}
            encoder = self.model.encoders[str(self.model.tower_of(name).encoder)]
            states = encoder(**tokens).last_hidden_state
            pooled[name] = self.model.pooling_of(name)(states, {**tokens, "residue_mask": residues})
            missing[name] = ~residues.any(1)
            masks[name] = residues
        if kind.per_residue:  # of one sequence
            logits = self.model.to_logits(self.model.head(states))
        else:
            every = {name: tokens["input_ids"] for name, tokens in sequences.items()}
            read = {} if self.residues is None else {RESIDUES: self.residues(every, masks)}
            logits = self.model(embeddings=pooled, missing=missing, **read).logits
        if kind.num_classes is not None:
            logits = logits.softmax(-1)
        elif kind.has_probabilities:
            logits = logits.sigmoid()
        return {"prediction": logits}


def _like_training(collator: SequenceCollator, column: str, drawn: str) -> str:
    """Makes a row of the length that heads count by position, if they do: of variants one that substitutes two."""
    for source in collator.residues.values():
        state = source.state()
        if state.get("column") == column:
            return f"{drawn[0]}{state['wild_type'][1:-1]}{drawn[-1]}"
        lengths = [length for i, length, _ in state.get("columns", ()) if state["names"][i] == column]
        if lengths and lengths[0]:
            return (drawn * lengths[0])[: lengths[0]]
    return drawn


def _is_among(ids: Tensor, values: Sequence[int]) -> Tensor:
    return (ids[..., None] == ids.new_tensor(values)).any(-1)


def write_onnx(predictor: AffinityPredictor, path: Path) -> None:
    """Writes the model by the exporter of transformers, with what a program must know as JSON in the metadata."""
    import onnx_ir
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    facts: dict[str, Any] = {**predictor.model.config.kind.state(), "inputs": {}}
    sample: dict[str, dict[str, Tensor]] = {}
    for name, tokenizer in predictor.collator.tokenizers.items():
        facts["inputs"][name] = {
            **asdict(tokenizer.template),
            "columns": predictor.collator.columns[name],
            "ids": {letter: int(tokenizer.table[ord(letter)]) for letter in ascii_uppercase},
            "pad": tokenizer.pad_token_id,
            "max_residues": tokenizer.max_residues,
        }
        letters = STANDARD[len(sample) :]  # inputs of unlike sizes, or one would be taken for the other
        batch = tokenizer(*[[letters, letters[3:], letters[5:]]] * tokenizer.num_chains)
        sample[name] = {key: batch[key] for key in ("input_ids", "attention_mask")}
    any_size = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    shapes = {name: dict.fromkeys(tokens, any_size) for name, tokens in sample.items()}
    exporter: Any = OnnxExporter()  # typed for models of transformers, takes any module
    config = OnnxConfig(dynamic_shapes={"sequences": shapes})
    logging.disable(logging.WARNING)  # the exporter speaks of operators that this model has not
    try:
        with redirect_stdout(StringIO()):
            program = exporter.export(Graph(predictor).eval(), {"sequences": sample}, config).program
    finally:
        logging.disable(logging.NOTSET)
    for value in program.graph.inputs:
        value.name = value.name.removeprefix("sequences.")
    program.metadata_props[FACTS] = json.dumps(facts)
    num_bytes = sum(parameter.nbytes for parameter in predictor.model.parameters())
    onnx_ir.save(program, path, external_data=f"{path.name}.data" if num_bytes > LARGEST else None)


def compare_rows(predictor: AffinityPredictor, path: Path) -> float:
    """Returns how far predictions of generated rows by a file are from the model's, over what is allowed."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    collator = predictor.collator
    config = predictor.model.config
    draw = np.random.default_rng(0)
    worst = 0.0
    for number in BATCHES:
        rows = {}
        for column in predictor.columns:
            lengths = draw.integers(1, MOST_RESIDUES, number)
            rows[column] = ["".join(draw.choice([*STANDARD], length)) for length in lengths]
            rows[column][::2] = [_like_training(collator, column, one) for one in rows[column][::2]]
            if column in collator.missing_chains:
                rows[column][-1] = ""
        feed: dict[str, np.ndarray] = {}
        for name, columns in collator.columns.items():
            batch = collator.encode(name, *(rows[column] for column in columns))
            feed |= {f"{name}.{key}": batch[key].numpy() for key in ("input_ids", "attention_mask")}
        (found,) = session.run(None, feed)
        expected = config.kind.to_predictions(predictor.logits(rows))
        if config.kind.per_residue:
            found = found[batch["residue_mask"].numpy()]
            expected = np.concatenate(expected)
        allowed = TOLERANCE * np.asarray(config.label_std) + ROUNDING * np.abs(expected)
        worst = max(worst, float((np.abs(found - expected) / allowed).max()))
    return worst
