"""Embed a table or FASTA of proteins: HDF5, .npz or Parquet, a vector for each protein or for each residue.

    hf-ext embed --encoder facebook/esm2_t12_35M_UR50D --dataset_name proteins.fasta --output proteins.h5
    hf-ext embed --model outputs/affinity --dataset_name data.csv --per residue --dtype float16 --output residues.h5

HDF5 has a data set for each protein, as ProtTrans and biotrainer write it; hf-ext train --embeddings FILE and the like
read it, too. Each distinct sequence is encoded once, the longest first, without padding where the encoder can be
packed. Killed, the same command goes on: what is encoded stands in OUTPUT.parts beside the output until that is whole.
An --output without a suffix is a folder of such parts and nothing else, for --embedding_cache_dir of other commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..arguments import PredictingArguments, parse_command
from ..data import ReadingArguments
from ..errors import ArgumentError
from ..property import EmbedArguments
from ..startup import quick_imports


def main(argv: Sequence[str] | None = None) -> Path:
    """Embeds each row of a table; returns the path of what was written.

    Raises:
        ArgumentError: an encoder or arguments that do not fit; an output that is there, or cannot be written.
        DataError: rows that the encoder cannot read; ids that do not name rows.
        CacheError: the disk has less room than the vectors take.
    """
    types = (EmbedArguments, ReadingArguments, PredictingArguments)
    parser, (own, reading, computing) = parse_command(types, {"too_long": "window"}, __doc__, argv)
    with quick_imports():  # here, so that --help waits for no model code
        from ..property import training_arguments
        from .embedding import embed

    if reading.streaming:
        raise ArgumentError("--streaming: sequences are known before the first is encoded. Leave it out.")
    output = find_output(own.output)
    if not output.suffix and "embedding_cache_dir" in parser.explicit:
        raise ArgumentError("--output without a suffix is a folder of parts itself. Leave --embedding_cache_dir out.")
    keeps_parts = not output.suffix or "embedding_cache_dir" in parser.explicit
    if "embedding_cache_dir" not in parser.explicit:
        computing.embedding_cache_dir = f"{output}.parts" if output.suffix else str(output)
    if "too_long" not in parser.explicit and own.model:
        reading.too_long = None
    args = training_arguments(computing, parser.explicit)
    embed(own, reading, args, output, keeps_parts)
    return output


def find_output(name: str) -> Path:
    """Finds the file, or folder of parts, to write; makes its folder.

    Raises:
        ArgumentError: another format, or a file that is there.
        FolderError, OSError: it cannot be written.
    """
    from ..checkpoints import make_folder
    from ..embeddings import WRITERS

    path = Path(name).expanduser().resolve()
    if path.suffix and path.suffix.lower() not in WRITERS:
        raise ArgumentError(f"--output {name}: give {', '.join(WRITERS)}, or no suffix for a folder of parts.")
    if path.suffix and path.exists():
        raise ArgumentError(f"--output {name} is there, and nothing is replaced. Remove it, or name another.")
    make_folder(path.parent, "--output")  # parts stand there before anything is encoded, so that it can be written to
    return path
