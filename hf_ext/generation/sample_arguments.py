"""The command line of `recipes/sample.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

from ..arguments.checks import ABOVE_ZERO, COUNT, FINITE, SEED, check_choices, check_ranges
from ..data.arguments import DataArguments
from ..errors import ArgumentError
from .sampling import MAX_TOKENS, SHARE, TEMPERATURE, TOKENS_PER_BATCH, Decoding

ANTIGEN = "antigen"
NUM_SAMPLES = 10
KNOWN_ANTIGENS = (ANTIGEN, "antigen_sequence", "sequence")  # columns that are looked for, in this order
_RANGES = {
    **dict.fromkeys(("num_samples", "num_beams", "max_new_tokens", "max_tokens_per_batch", "top_k"), COUNT),
    "affinity": FINITE,
    "temperature": ABOVE_ZERO,
    "top_p": SHARE,
    "seed": SEED,
}


@dataclass
class SampleArguments:
    """Which model, for which antigens, how tokens are chosen, what is said about the outputs.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "sampling"  # in --help
    _first_flags = (
        *("model", "revision", "antigen", "dataset_name", "antigen_column", "id_column", "bad_rows", "output"),
        *("num_samples", "affinity", "temperature", "top_p", "greedy", "seed", "max_tokens_per_batch", "needs_light"),
        *("numbering", "training_data", "training_columns", "discriminator"),
    )

    model: str = field(metadata={"help": "Folder that generate_antibody.py wrote, or Hub id."})
    revision: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads these types)
        default=None, metadata={"help": "Commit, tag or branch of a Hub model."}
    )
    antigen: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "One antigen's sequence, in place of --dataset_name."}
    )
    dataset_name: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "FASTA, CSV, TSV, JSONL (each also .gz) or Parquet file of antigens, or Hub dataset id."},
    )
    dataset_revision: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Commit, tag or branch of a Hub dataset."}
    )
    antigen_column: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": f"Column with the antigen's sequence. Left out: the first of {', '.join(KNOWN_ANTIGENS)}."},
    )
    id_column: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Column that names antigens in the FASTA. Left out: id, where there is one."}
    )
    filter: Optional[str] = field(default=None, metadata={"help": "Rows to keep, as in max_speed.py."})  # noqa: UP045
    bad_rows: Literal["error", "drop"] = field(
        default="error",
        metadata={"help": "error: stop and list unusable antigens. drop: leave them out, listed beside the output."},
    )
    stop_codon: Literal["refuse", "trim"] = field(
        default="refuse", metadata={"help": "trim: remove one * at the end of a sequence."}
    )
    gaps: Literal["refuse", "remove"] = field(
        default="refuse", metadata={"help": "remove: take the gaps - and . out of sequences."}
    )
    output: str = field(
        default="antibodies.csv", metadata={"help": "CSV to write; a FASTA of that name is written beside it."}
    )
    keep_columns: bool = field(default=True, metadata={"help": "Write all columns of the input too, as read."})
    num_samples: Optional[int] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": f"Antibodies per antigen. Left out: {NUM_SAMPLES}; all beams of --num_beams; 1 with --greedy."
        },
    )
    affinity: Optional[float] = field(  # noqa: UP045
        default=None, metadata={"help": "Affinity to ask for, in the unit of training (pKd). Left out: unknown."}
    )
    temperature: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={"help": f"Below 1 the likely becomes likelier. Left out: {TEMPERATURE} where antibodies are drawn."},
    )
    top_k: Optional[int] = field(default=None, metadata={"help": "Only so many of the likeliest tokens."})  # noqa: UP045
    top_p: Optional[float] = field(  # noqa: UP045
        default=None, metadata={"help": "Only the likeliest tokens that together have this probability."}
    )
    greedy: bool = field(default=False, metadata={"help": "The likeliest token each time: one antibody per antigen."})
    num_beams: int = field(default=1, metadata={"help": "Beam search; --num_samples of the beams are kept."})
    seed: int = field(default=0, metadata={"help": "The same seed gives the same antibodies, in batches of any size."})
    max_new_tokens: int = field(
        default=MAX_TOKENS, metadata={"help": "Tokens of a pair; longer ones are cut off and marked."}
    )
    max_tokens_per_batch: int = field(
        default=TOKENS_PER_BATCH, metadata={"help": "Tokens that are written together; less needs less memory."}
    )
    needs_light: bool = field(default=True, metadata={"help": "false: a heavy chain alone is a valid output."})
    numbering: Literal["auto", "immunum", "anarcii", "off"] = field(
        default="auto",
        metadata={"help": "Number outputs as variable domains; auto: by immunum (extra 'numbering') if installed."},
    )
    training_data: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "File that the model was trained on: the nearest antibody there is named."}
    )
    training_columns: list[str] = field(
        default_factory=lambda: ["heavy", "light"],
        metadata={"help": "Its columns of heavy and light chains, or of heavy chains alone."},
    )
    discriminator: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Folder or Hub id of a model of max_speed.py, which predicts affinities of outputs."},
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, _RANGES)
        if (self.antigen is None) == (self.dataset_name is None):
            raise ArgumentError("Name the antigens: either --dataset_name FILE, or --antigen SEQUENCE.")
        if self.antigen is not None and (self.antigen_column or self.id_column or self.filter):
            raise ArgumentError("--antigen is a sequence: --antigen_column, --id_column and --filter are for files.")
        if not 1 <= len(self.training_columns) <= 2:
            raise ArgumentError(f"training_columns={self.training_columns}: name heavy and light, or heavy alone.")
        if not self.decoding.draws and (self.temperature or self.top_k or self.top_p):
            raise ArgumentError(
                "--temperature, --top_k and --top_p are for what is drawn; --greedy and --num_beams draw nothing."
            )

    @property
    def decoding(self) -> Decoding:
        """As `sample_pairs` is told; raises `ArgumentError` where settings contradict each other."""
        names = ("top_k", "top_p", "greedy", "num_beams", "seed", "max_new_tokens", "max_tokens_per_batch")
        given = {name: getattr(self, name) for name in names}
        draws = not self.greedy and self.num_beams == 1
        given["temperature"] = self.temperature or (TEMPERATURE if draws else 1.0)
        usual = 1 if self.greedy else self.num_beams if self.num_beams > 1 else NUM_SAMPLES
        return Decoding(num_samples=usual if self.num_samples is None else self.num_samples, **given)

    def data_arguments(self, antigen_column: str, id_column: str | None) -> DataArguments:
        """Of the antigens, for `load_sequences`."""
        return DataArguments(
            dataset_name=self.dataset_name,
            dataset_revision=self.dataset_revision,
            sequence_columns=[antigen_column],
            id_column=id_column,
            filter=self.filter,
            bad_rows=self.bad_rows,
            stop_codon=self.stop_codon,
            gaps=self.gaps,
        )
