"""The floor of the omicron set: ridge on one-hot residues, fitted per antibody; no encoder, no head.

python benchmarks/one_hot_ridge.py data/omicron.csv.gz split_genotype RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from hf_ext.evaluation import RidgeBaseline, score_predictions


def one_hot(sequences: pd.Series) -> np.ndarray:
    """One column per residue seen at each position that varies: (n, columns), float32."""
    letters = np.array([list(sequence) for sequence in sequences])
    varying = letters[:, (letters != letters[0]).any(axis=0)]
    return np.concatenate([(column[:, None] == np.unique(column)) for column in varying.T], axis=1).astype(np.float32)


def main() -> None:
    """Writes Spearman and RMSE on the test rows of all antibodies together."""
    table, split = pd.read_csv(sys.argv[1]), sys.argv[2]
    predictions, labels = [], []
    for _, rows in table.groupby("antibody"):
        features, values = one_hot(rows["antigen"]), rows["pKd"].to_numpy()
        part = {name: (rows[split] == name).to_numpy() for name in ("train", "valid", "test")}
        ridge = RidgeBaseline().fit(
            features[part["train"]], values[part["train"]], features[part["valid"]], values[part["valid"]]
        )
        predictions.append(ridge.predict(features[part["test"]]))
        labels.append(values[part["test"]])
    scores = score_predictions(np.concatenate(predictions), np.concatenate(labels))
    result = {"split": split, "scores": {name: scores[name] for name in ("spearman", "rmse")}}
    Path(sys.argv[3]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
