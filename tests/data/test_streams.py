"""Streams in batches: passes without end, positions that JSON holds, and resumes that read little or nothing twice."""

import json
from itertools import islice

import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchIterableDataset

from hf_ext.data import PassedRows, StreamBatchSampler
from hf_ext.data.batches.streams import can_seek
from hf_ext.errors import CheckpointError, DataError

pytestmark = pytest.mark.internals
READ: list[int] = []  # ids that sources were asked for


def generate(shards: list[int]):
    for shard in shards:
        for i in range(7):
            READ.append(10 * shard + i)
            yield {"id": 10 * shard + i}


def double(batch: dict) -> dict:
    return {"id": [value for value in batch["id"] for _ in range(2)]}


def of_generator(num_shards: int = 3, first: int = 0) -> IterableDataset:
    return IterableDataset.from_generator(generate, gen_kwargs={"shards": [first + i for i in range(num_shards)]})


def of_arrow(num_rows: int = 20, num_shards: int = 3, first: int = 0) -> IterableDataset:
    return Dataset.from_dict({"id": list(range(first, first + num_rows))}).to_iterable_dataset(num_shards)


def shuffled(num_shards: int = 6, seed: int = 0) -> IterableDataset:
    return of_generator(num_shards).shuffle(seed=seed, buffer_size=5)


class Counting(TorchIterableDataset):
    """0, 1, 2 ... `num_rows - 1`."""

    def __init__(self, num_rows: int = 5):
        self.num_rows = num_rows

    def __iter__(self):
        yield from range(self.num_rows)


class Once(Counting):
    """The same, but only the first time."""

    def __iter__(self):
        rows, self.num_rows = self.num_rows, 0
        yield from range(rows)


SEEKING = {
    "generator": of_generator,
    "map": lambda: of_arrow().map(lambda row: {"x": row["id"]}),
    "split": lambda: (
        of_generator()
        .map(double, batched=True, batch_size=4)
        .filter(lambda batch: [value % 3 > 0 for value in batch["id"]], batched=True)
    ),
    "skip and take": lambda: of_arrow().skip(3).take(9),
    "concatenated": lambda: concatenate_datasets([of_generator(), of_generator(2, 50)]),
    "interleaved at random": lambda: interleave_datasets(
        [of_generator(), of_generator(2, 50)], probabilities=[0.3, 0.7], seed=1, stopping_strategy="all_exhausted"
    ),
    "formatted": lambda: of_arrow().with_format("numpy"),
    "repeated": lambda: of_arrow(6, 2).repeat(2),
}
READING_AGAIN = {
    "shuffled": shuffled,
    "shuffled and mapped": lambda: of_arrow().shuffle(seed=0, buffer_size=5).map(lambda row: {"x": row["id"]}),
    "torch": Counting,
}


def take(sampler: StreamBatchSampler, num: int) -> list[list]:
    return [[str(row) for row in batch] for batch in islice(sampler, num)]


def resume(stream, position: dict, num_batches: int, rows_per_batch: int = 3) -> list[list]:
    """`num_batches` batches of a new sampler on `stream` from `position`, which went through JSON."""
    sampler = StreamBatchSampler(stream, rows_per_batch)
    sampler.load_state_dict(json.loads(json.dumps(position)))
    return take(sampler, num_batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_do_not_change_the_order_and_batches_run_across_passes(num_workers):
    sampler = StreamBatchSampler(Counting(5), 3)
    loader = DataLoader(PassedRows(), batch_sampler=sampler, collate_fn=tuple, num_workers=num_workers)
    assert list(islice(loader, 4)) == [(0, 1, 2), (3, 4, 0), (1, 2, 3), (4, 0, 1)]


def test_rows_carry_the_number_of_their_pass_and_a_shuffled_stream_has_another_order_in_each():
    sampler = StreamBatchSampler(of_arrow(2, 1), 3, pass_column="mask_epoch")
    rows = [row for batch in islice(sampler, 2) for row in batch]
    assert [(row["id"], row["mask_epoch"]) for row in rows] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    first, second = islice(StreamBatchSampler(of_generator(2).shuffle(seed=0, buffer_size=14), 14), 2)
    assert first != second
    assert sorted(row["id"] for row in first) == sorted(row["id"] for row in second) == [*range(7), *range(10, 17)]


def test_a_stream_without_rows_is_an_error_and_one_that_is_used_up_ends():
    with pytest.raises(DataError, match="no rows in pass 0"):
        take(StreamBatchSampler(of_arrow().filter(lambda row: False), 2), 1)
    sampler = StreamBatchSampler(Once(5), 2)
    assert take(sampler, 9) == [["0", "1"], ["2", "3"], ["4"]]
    with pytest.raises(DataError, match="--max_steps"):
        take(sampler, 1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*SEEKING, *READING_AGAIN])
def test_a_resume_after_any_batch_of_any_pass_continues_with_the_next_and_so_does_the_next_resume(name):
    make = {**SEEKING, **READING_AGAIN}[name]
    assert can_seek(make()) == (name in SEEKING)
    num_batches = 3 * -(-len(list(make())) // 3)  # three passes
    sampler = StreamBatchSampler(make(), 3, num_remembered=num_batches)
    batches = take(sampler, num_batches)
    for done in range(num_batches - 1):
        position = sampler.state_dict(done)
        assert (position["state"] is None) == (name in READING_AGAIN or done == 0)
        assert resume(make(), position, 2) == batches[done : done + 2]
    assert resume(make(), sampler.state_dict(num_batches - 3), 2) != batches[-2:]
    second = StreamBatchSampler(make(), 3)
    second.load_state_dict(sampler.state_dict(1))
    assert take(second, 2) == batches[1:3]
    assert resume(make(), second.state_dict(2), 2) == batches[3:5]


def test_what_was_consumed_is_not_read_again_but_the_current_pass_of_a_shuffled_stream_which_is_said(caplog):
    sampler = StreamBatchSampler(of_generator(10), 3)
    batches = take(sampler, 40)  # 120 rows: in the second pass of 70
    READ.clear()
    assert resume(of_generator(10), sampler.state_dict(36), 4) == batches[36:]
    # 108 rows were consumed, 38 of this pass: 5 of its 10 sources, and 3 rows of the next, which a generator repeats.
    assert (len(READ), caplog.text) == (3 + 12, "")
    sampler = StreamBatchSampler(shuffled(), 3)
    batches = take(sampler, 20)  # 60 rows: in the second pass of 42
    READ.clear()
    assert resume(shuffled(), sampler.state_dict(18), 2) == batches[18:]
    assert 12 + 6 <= len(READ) <= 42
    assert "12 rows of pass 1 are read again" in caplog.text


def test_positions_are_kept_for_as_many_batches_as_were_asked_for_and_fit_other_numbers_of_rows_per_batch():
    sampler = StreamBatchSampler(Counting(5), 3, num_remembered=2)
    assert sampler.state_dict(0) == {"pass": 0, "rows": 0, "state": None, "last_row": None}
    take(sampler, 6)
    assert [sampler.state_dict(num)["rows"] for num in (4, 5, 6)] == [2, 5, 3]
    assert resume(Counting(5), sampler.state_dict(6), 2, rows_per_batch=4) == [list("3401"), list("2340")]


def test_another_stream_than_before_is_an_error_before_its_first_row():
    sampler = StreamBatchSampler(shuffled(), 3)
    take(sampler, 3)
    for other, words in ((shuffled(6, seed=1), "another one"), (shuffled(1), "missing")):
        with pytest.raises(CheckpointError, match=f"Row 9 of pass 0 .* {words}"):
            resume(other, sampler.state_dict(3), 1)
    sampler = StreamBatchSampler(of_generator(6), 3)
    take(sampler, 3)
    with pytest.raises(CheckpointError, match=r"cannot \(was `shuffle` added"):
        resume(shuffled(), sampler.state_dict(3), 1)


def read_on_ranks(world_size: int, steps: int, position: dict | None = None, num_skipped: int = 0) -> list:
    """Rows that all processes train on in `steps` steps; Trainer drops `num_skipped` batches of each."""
    ranks = []
    for rank in range(world_size):
        sampler = StreamBatchSampler(of_arrow(), 2)
        if position is not None:
            sampler.load_state_dict(position, num_skipped * world_size)
        shard = BatchSamplerShard(sampler, world_size, rank)
        ranks.append(take(SkipBatchSampler(shard, num_skipped), steps))
    return [row for batches in zip(*ranks) for own in batches for row in own]


def test_the_rows_of_a_step_do_not_depend_on_the_number_of_processes_on_which_a_run_may_continue():
    whole = read_on_ranks(1, 28)
    assert read_on_ranks(4, 7) == whole
    sampler = StreamBatchSampler(of_arrow(), 2)
    take(sampler, 12)
    position = sampler.state_dict(12)  # three steps of four processes, of two rows each
    for world_size, num_skipped in ((4, 3), (2, 3), (1, 3)):
        assert read_on_ranks(world_size, 4, position, num_skipped) == whole[24 : 24 + 8 * world_size]
