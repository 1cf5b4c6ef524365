"""Let biotrainer 1.4 write vectors that hf_ext trains on: `python from_biotrainer.py proteins.fasta ENCODER FOLDER`.

Run it where biotrainer is installed; ENCODER is a Hub id or a folder. Prints the file: an HDF5 data set for each
sequence, named by its hash.
"""

import sys
from pathlib import Path

import torch
from biotrainer.embedders import get_embedding_service
from biotrainer.protocols import Protocol

fasta, encoder, folder = sys.argv[1:]
Path(folder).mkdir(parents=True, exist_ok=True)
service = get_embedding_service(
    embedder_name=encoder, custom_tokenizer_config=None, use_half_precision=False, device=torch.device("cpu")
)
print(service.compute_embeddings(fasta, Path(folder), Protocol.sequence_to_value))
