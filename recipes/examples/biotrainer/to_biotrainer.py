"""Train biotrainer 1.4 on vectors that hf-ext embed wrote: `python to_biotrainer.py proteins.fasta proteins.h5 OUTPUT`.

Run it where biotrainer is installed. Headers have TARGET= and SET=. Vectors go in by `input_data`, found by the
sequence's hash or by id; a file with names by hash (`--names hash`) also does as `embeddings_file` of a configuration.
"""

import sys
from pathlib import Path

import h5py
from biotrainer.input_files import read_FASTA
from biotrainer.utilities.executer import parse_config_file_and_execute_run

fasta, vectors, output = sys.argv[1:]
Path(output).mkdir(parents=True, exist_ok=True)
records = []
with h5py.File(vectors, "r") as file:
    for record in read_FASTA(fasta):
        name = record.get_hash()
        vector = file[name if name in file else record.seq_id][()]
        records.append(record.copy_with_embedding(vector))
config = {
    "protocol": "sequence_to_value",
    "input_data": records,
    "output_dir": str(Path(output).resolve()),
    "device": "cpu",
    "num_epochs": 5,
}
result = parse_config_file_and_execute_run(config)
print(result["test_results"]["test"]["metrics"])
