"""`--push_to_hub` as in Trainer: which files would leave this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers.trainer
from huggingface_hub.utils import filter_repo_objects

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

TOKEN = "hf_" + "x" * 20


class RecordingHub:
    """Stands where `huggingface_hub.HfApi` stands; keeps what would be uploaded."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def create_repo(self, repo_id: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, folder_path: str, ignore_patterns: list[str] | None = None, **_: object) -> str:
        root = Path(folder_path)
        names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            self.files[name] = (root / name).read_bytes()
        return "https://example.invalid"


def test_a_push_holds_the_model_and_its_card_and_no_pickle_or_token(
    make_affinity, demo_rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = RecordingHub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    model, collator = make_affinity()
    args = FastTrainingArguments(
        output_dir=str(tmp_path / "run"),
        speedups=["embedding_cache"],
        embedding_cache_dir=str(tmp_path / "cache"),
        max_steps=2,
        push_to_hub=True,
        hub_token=TOKEN,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = FastTrainer(model, args, data_collator=collator, train_dataset=demo_rows, eval_dataset=demo_rows)
    trainer.train()
    trainer.push_to_hub()
    trainer.end()
    assert {"README.md", "config.json", "model.safetensors", "inputs.json", "plan.json"} <= set(hub.files)
    assert not [name for name in hub.files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert not [name for name, content in hub.files.items() if TOKEN.encode() in content]
