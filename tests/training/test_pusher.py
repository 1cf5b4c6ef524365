"""`Pusher` without a Trainer, over a real socket to a server that speaks the Hub's API."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, find_token, serve_hub
from tiny_classifier import make_args, make_model

from hf_ext.errors import ArgumentError
from hf_ext.hub import HubError
from hf_ext.hub.pushing import Push
from hf_ext.training.pusher import Patience, Pusher, grace_s
from hf_ext.training.team import Team

TOKEN = "hf_" + "canary" * 5 + "bird"
PATIENCE = Patience(retries=0, wait_s=0.01, grace_s=0.5)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serve_hub(monkeypatch, TOKEN) as server:
        yield server


@pytest.fixture
def make_pusher(tmp_path: Path, hub: HubServer) -> Callable[..., Pusher]:
    def make(**given: Any) -> Pusher:
        settings = {"hub_token": TOKEN, "hub_model_id": "me/x", "hub_strategy": "every_save", "push_to_hub": True}
        args = make_args(tmp_path / "run", **{**settings, **given})
        return Pusher(args, Team(args))

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoint-2"
    make_model().save_pretrained(folder)
    return folder


def save(pusher: Pusher, step: int, folder: Path | None, said: list[int]) -> None:
    pusher.saved(step, folder, make_model(), step, lambda: said.append(step), PATIENCE)


def test_a_checkpoint_is_pushed_once_and_announced(
    make_pusher: Callable, hub: HubServer, checkpoint: Path, tmp_path: Path
) -> None:
    pusher, said = make_pusher(), list[int]()
    pusher.open(PATIENCE)
    assert pusher.repo_id == "me/x"
    assert hub.repositories["me/x"].private
    assert pusher.wants_checkpoints
    save(pusher, 2, checkpoint, said)
    pusher.wait()
    save(pusher, 2, checkpoint, said)
    save(pusher, 4, None, said)  # not on this disk
    assert pusher.close() is None
    assert said == [2]
    assert hub.repositories["me/x"].messages[1:] == ["Training in progress, checkpoint-2"]
    assert set(hub.repositories["me/x"].files) == {".gitattributes", "config.json", "model.safetensors"}
    assert not list(tmp_path.rglob(".push-*"))
    assert find_token(TOKEN, hub, tmp_path) == []


def test_a_checkpoint_that_is_no_model_is_made_whole_only_while_it_is_the_newest(
    make_pusher: Callable, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / "checkpoint-2"
    folder.mkdir(parents=True)
    pusher = make_pusher()
    pusher.open(PATIENCE)
    pusher.saved(2, folder, make_model(), 3, lambda: None, PATIENCE)
    assert "is no whole model" in str(pusher.close())
    pusher.saved(2, folder, make_model(), 2, lambda: None, PATIENCE)
    assert pusher.close() is None
    assert "model.safetensors" in hub.repositories["me/x"].files


def test_what_a_stop_leaves_a_push() -> None:
    assert grace_s(PATIENCE, None) == 0.5
    assert grace_s(PATIENCE, 600.0) == 599.5  # as much is kept for the end
    assert grace_s(PATIENCE, -400.0) == 0.5


def test_the_strategies_that_push_nothing_or_pickles(make_pusher: Callable) -> None:
    assert not make_pusher(hub_strategy="end").wants_checkpoints
    with pytest.raises(ArgumentError, match="write pickles"):
        make_pusher(hub_strategy="checkpoint").begin(is_spread=True, keeps_library_files=True)


def test_a_wrong_token_is_refused_when_the_repository_is_opened(make_pusher: Callable) -> None:
    with pytest.raises(HubError):
        make_pusher(hub_token="hf_wrong").open(PATIENCE)


def test_the_trained_model_is_pushed_downloaded_and_checked(
    make_pusher: Callable, hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pusher, looked = make_pusher(), list[set[str]]()
    pusher.open(PATIENCE)
    folder = tmp_path / "run"

    def write() -> None:
        assert pusher.is_saving
        make_model().save_pretrained(folder)

    def make_card(**about: Any) -> None:
        (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n# {about['model_name']}\n")

    def check(place: Path) -> str:
        looked.append({path.name for path in place.iterdir() if path.is_file()})
        return "it is the same"

    pusher.save_with_card(write, make_card, {})
    assert not pusher.is_saving
    with caplog.at_level(logging.INFO):
        push = pusher.push_and_check({"message": "Done", **pusher.place()}, None, check, PATIENCE)
    assert isinstance(push, Push)
    assert {"README.md", "config.json", "model.safetensors"} <= looked[0]
    assert "it is the same." in caplog.text
    assert hub.repositories["me/x"].files["README.md"].endswith(b"# x\n")

    def differs(place: Path) -> str:
        raise HubError("another model")

    with pytest.raises(HubError, match="another model"):
        pusher.push_and_check({"message": "Again", **pusher.place()}, None, differs, PATIENCE)


def test_a_card_that_somebody_wrote_stays(make_pusher: Callable, tmp_path: Path) -> None:
    pusher, path = make_pusher(), tmp_path / "run" / "README.md"
    path.parent.mkdir()
    path.write_text("---\nlibrary_name: hf_ext\n---\n# Mine\n")

    def overwrite() -> None:
        path.write_text("PEFT's template")

    def make_card(**about: Any) -> None:
        raise AssertionError("a card is there")

    pusher.save_with_card(overwrite, make_card, {})
    assert path.read_text().endswith("# Mine\n")
