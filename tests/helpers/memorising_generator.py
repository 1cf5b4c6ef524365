"""A generator that knows one antibody by heart, so that what it writes is known; in a folder as a run leaves it."""

from pathlib import Path

import torch
from antibody_examples import heavy, light
from tiny_generators import make_generator

from hf_ext.checkpoints import write_model_manifest
from hf_ext.data import AntibodyCollator, PairEncoder
from hf_ext.data.batches.antibodies import make_pair_tokenizer
from hf_ext.models import AntibodyGenerator

ANTIGENS = ["MKTAYIAKQRQISFVKSH", "GGSWLLPACDEE"]
CDR3 = "ARDYSSTF"
LOSS = 0.004  # nats a token: greedy decoding then writes it
MAX_STEPS = 200


def make_memorising() -> AntibodyGenerator:
    """An LSTM, 96 wide, that writes it for both antigens. Cost: 4 s."""
    model = make_generator("lstm", d_model=32, hidden_size=96).train()
    columns = PairEncoder().encode_rows(ANTIGENS, [heavy(CDR3)] * 2, [light()] * 2)
    batch = AntibodyCollator()([dict(zip(columns, row)) for row in zip(*columns.values())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    for _ in range(MAX_STEPS):
        loss = model(**batch).loss
        if loss.item() < LOSS:
            return model.eval()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"not memorised: loss {loss.item():.3f} after {MAX_STEPS} steps")


def save_generator(model: AntibodyGenerator, folder: Path) -> Path:
    """Weights, configuration, vocabulary and manifest."""
    model.save_pretrained(folder)
    make_pair_tokenizer().save_pretrained(folder)
    write_model_manifest(folder)
    return folder
