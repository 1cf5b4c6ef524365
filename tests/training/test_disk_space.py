"""What stays, what goes and what is refused, decided without a Trainer."""

import errno
import os
from types import SimpleNamespace

import pytest
from mirror_targets import save, steps
from small_parts import Parts

from hf_ext.checkpoints.budget import Sizes
from hf_ext.errors import ArgumentError

GB = 10**9
SIZES = Sizes(weights=4000, optimizer=8000, other=1000)


def make(folder, *saved, **given) -> Parts:
    parts = Parts(folder, **given)
    for step in saved:
        save(parts.places.store, step)
    return parts


def now(parts: Parts, step: int, **counters) -> SimpleNamespace:
    for name, value in {"global_step": step, "epoch": step / 10, **counters}.items():
        setattr(parts.state, name, value)
    return parts.now()


def test_without_limit_or_budget_nothing_is_deleted(tmp_path):
    parts = make(tmp_path, 1, 2, 3)
    parts.space.rotate(now(parts, 3).state)
    assert steps(parts.places.store) == [1, 2, 3]


def test_a_limit_keeps_the_newest_and_the_best(tmp_path):
    parts = make(tmp_path, 1, 2, 3, 4, save_total_limit=2, metric_for_best_model="loss")
    parts.space.rotate(now(parts, 4, best_global_step=2).state)
    assert steps(parts.places.store) == [2, 4]


def test_the_best_saved_step_is_that_of_before_where_the_best_itself_was_not_saved(tmp_path):
    parts = make(tmp_path, 2, 4)
    parts.space.begin_run(2)
    assert parts.space.best_saved_step(now(parts, 4, best_global_step=4).state) == 4
    assert parts.space.best_saved_step(now(parts, 4, best_global_step=3).state) == 2
    parts.space.begin_run(None)
    assert parts.space.best_saved_step(now(parts, 4, best_global_step=3).state) is None


def test_room_is_made_before_a_save_and_what_is_in_the_way_is_renamed(tmp_path):
    parts = make(tmp_path, 1, 2)
    (tmp_path / "checkpoint-3").mkdir()
    other = parts.space.other_bytes(parts.model)
    sizes = [stored.num_bytes for stored in parts.places.store.checkpoints()]
    expected = sizes[-1] + 2**19  # as the newest, whose log has grown
    parts.args.save_total_size_gb = (other + sum(sizes) + expected - 1) / GB
    parts.space.make_room(now(parts, 3), SIZES)
    assert steps(parts.places.store) == [2]
    assert (tmp_path / "previous-checkpoint-3").is_dir()


def test_a_budget_that_holds_nothing_more_refuses_a_save_as_a_full_disk_would(tmp_path):
    parts = make(tmp_path, 1)
    parts.args.save_total_size_gb = parts.space.other_bytes(parts.model) / GB
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
        parts.space.make_room(now(parts, 2), SIZES)
    assert steps(parts.places.store) == [1]


def test_a_budget_too_small_is_refused(tmp_path):
    parts = make(tmp_path)
    needed = parts.space.other_bytes(parts.model) + 2 * SIZES.full_bytes
    parts.args.save_total_size_gb = needed / GB
    parts.space.check(parts.model, lambda: SIZES)
    parts.args.save_total_size_gb = (needed - 1) / GB
    with pytest.raises(ArgumentError, match="save_total_size_gb"):
        parts.space.check(parts.model, lambda: SIZES)
