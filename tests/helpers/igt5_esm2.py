"""IgT5 and ESM-2 in miniature, and the script that others trained a head on them with, written anew and literally."""

from itertools import pairwise
from pathlib import Path

import torch
from tiny_t5 import write_t5_encoder
from torch import nn
from transformers import AutoModel, AutoTokenizer, T5EncoderModel, T5Tokenizer

from hf_ext.data import make_demo_encoders, make_demo_table

HEAD_SIZES = (1024, 512, 256, 128)
LONGEST = 512  # tokens


def write_encoders(folder: Path) -> list[str]:
    """A T5 encoder with a T5Tokenizer and an ESM-2 with an EsmTokenizer; 32 and 64 wide, random weights."""
    return [write_t5_encoder(folder / "igt5"), make_demo_encoders(folder)[1]]


def write_rows(path: Path, num_rows: int) -> str:
    """Demo rows as a CSV with heavy, light, antigen, pKd."""
    make_demo_table(num_rows=num_rows).to_csv(str(path))
    return str(path)


def as_antibody(*chains: str) -> str:
    """What such a script hands to IgT5: residues apart, chains as a pair."""
    return " </s> ".join(" ".join(chain) for chain in chains)


class OriginalModel(nn.Module):
    """One sequence after the other through both encoders, then the head; with the names of its `.pth` files."""

    def __init__(self, igt5: str, esm2: str, dropout: float = 0.3):
        super().__init__()
        self.igt5_tokenizer = T5Tokenizer.from_pretrained(igt5, do_lower_case=False)
        self.igt5_model = T5EncoderModel.from_pretrained(igt5)
        self.esm2_tokenizer = AutoTokenizer.from_pretrained(esm2)
        self.esm2_model = AutoModel.from_pretrained(esm2)
        self.requires_grad_(False)
        sizes = [self.igt5_model.config.d_model + self.esm2_model.config.hidden_size, *HEAD_SIZES]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(after)]
        self.regressor = nn.Sequential(*layers[:-1], nn.Linear(sizes[-1], 1))

    def embed_antibody(self, antibody: str) -> torch.Tensor:
        return self._run(self.igt5_tokenizer, self.igt5_model, antibody).mean(dim=1).squeeze(0)

    def embed_antigen(self, antigen: str) -> torch.Tensor:
        return self._run(self.esm2_tokenizer, self.esm2_model, antigen)[:, 0, :].squeeze(0)

    def _run(self, tokenizer, encoder, text: str) -> torch.Tensor:
        inputs = tokenizer(text, return_tensors="pt", padding=True, truncation=True, max_length=LONGEST)
        with torch.no_grad():
            return encoder(**inputs).last_hidden_state

    def forward(self, antibodies: list[str], antigens: list[str]) -> torch.Tensor:
        first = torch.stack([self.embed_antibody(antibody) for antibody in antibodies])
        second = torch.stack([self.embed_antigen(antigen) for antigen in antigens])
        return self.regressor(torch.cat([first, second], dim=1)).squeeze(-1)


def train_head(model: OriginalModel, antibodies: list[str], antigens: list[str], labels: list[float]) -> None:
    """Two steps, so that the head is not what it was made as."""
    optimizer = torch.optim.AdamW(model.regressor.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (model(antibodies, antigens) - torch.tensor(labels)).square().mean().backward()
        optimizer.step()
