"""Where tokens stand once padding is gone, worked out by hand."""

import pickle

import pytest
import torch

from hf_ext.data.varlen_layout import VarlenLayout, bounded_length

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]])


def test_sequences_are_laid_out_shortest_first():
    segments = VarlenLayout.from_mask(MASK)
    assert segments.lengths == (0, 1, 2, 3)
    assert segments.indices.tolist() == [4, 13, 14, 0, 1, 2]
    assert segments.cu_seqlens.tolist() == [0, 0, 1, 3, 6]
    assert segments.cu_seqlens.dtype == torch.int32
    assert (segments.shape, segments.max_length, segments.num_filled) == ((4, 4), 3, 0)


def test_positions_are_columns_of_the_padded_batch():
    assert VarlenLayout.from_mask(MASK).columns.tolist() == [[0, 1, 2, 0, 1, 2]]


def test_equally_long_sequences_form_one_group_and_empty_ones_none():
    assert [*VarlenLayout.from_mask(MASK).groups()] == [(0, 1, 1), (1, 1, 2), (3, 1, 3)]
    twos = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    assert [*VarlenLayout.from_mask(twos).groups()] == [(0, 2, 2), (4, 1, 3)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_any_mask_dtype_gives_the_same_layout(dtype):
    assert VarlenLayout.from_mask(MASK.to(dtype)).indices.tolist() == [4, 13, 14, 0, 1, 2]


def test_packing_gathers_and_unpacking_puts_back_with_zeros_where_padding_was():
    segments = VarlenLayout.from_mask(MASK)
    padded = torch.arange(1.0, 17.0).view(4, 4)
    packed = segments.pack(padded)
    assert packed.tolist() == [[5, 14, 15, 1, 2, 3]]
    assert segments.unpack(packed).tolist() == [[1, 2, 3, 0], [5, 0, 0, 0], [0, 0, 0, 0], [0, 14, 15, 0]]


def test_packing_keeps_trailing_dimensions_and_dtype():
    padded = torch.ones(4, 4, 2, 3, dtype=torch.bfloat16)
    segments = VarlenLayout.from_mask(MASK, round_up=True)
    packed = segments.pack(padded)
    assert (packed.shape, packed.dtype) == ((1, 6, 2, 3), torch.bfloat16)
    assert (segments.unpack(packed).shape, segments.unpack(packed).dtype) == ((4, 4, 2, 3), torch.bfloat16)


def test_gradients_reach_real_tokens_only():
    padded = torch.ones(4, 4, requires_grad=True)
    segments = VarlenLayout.from_mask(MASK)
    segments.unpack(segments.pack(padded) * torch.arange(1.0, 7.0)).sum().backward()
    assert padded.grad.tolist() == [[4, 5, 6, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 2, 3, 0]]


def test_filling_is_at_the_end_and_holds_zeros():
    mask = (torch.arange(10) < torch.tensor([[10], [7]])).long()  # 17 tokens: the next bounded length is 18
    segments = VarlenLayout.from_mask(mask, round_up=True)
    assert (segments.lengths, segments.num_filled, segments.max_length) == ((7, 10), 1, 10)
    assert segments.cu_seqlens.tolist() == [0, 7, 17, 18]
    assert [*segments.groups()] == [(0, 1, 7), (7, 1, 10)]
    assert segments.columns.shape == (1, 18)
    packed = segments.pack(torch.ones(2, 10))
    assert packed[0].tolist() == [1.0] * 17 + [0.0]
    assert torch.equal(segments.unpack(packed), mask.float())


def test_nothing_is_filled_where_the_length_is_bounded_already():
    segments = VarlenLayout.from_mask(torch.ones(2, 8), round_up=True)
    assert (segments.lengths, segments.num_filled) == ((8, 8), 0)


def test_filling_is_cut_into_pieces_no_longer_than_the_longest_sequence():
    mask = torch.arange(3) < torch.tensor([3] * 21 + [2])[:, None]  # 65 tokens become 72
    segments = VarlenLayout.from_mask(mask, round_up=True)
    assert (segments.num_filled, segments.max_length, len(segments.lengths)) == (7, 3, 22)
    assert segments.cu_seqlens.tolist()[-4:] == [65, 68, 71, 72]
    assert segments.cu_seqlens[:4].tolist() == [0, 2, 5, 8]


def test_slots_are_those_of_a_padded_copy_in_the_order_of_the_row():
    segments = VarlenLayout.from_mask(MASK)
    assert segments.slots.tolist() == [3, 6, 7, 9, 10, 11]  # a row of none, then 1, 2 and 3 tokens, 3 slots each
    assert segments.is_token.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    filled = VarlenLayout.from_mask(torch.arange(10) < torch.tensor([[10], [7]]), round_up=True)
    assert filled.slots.tolist() == [*range(7), *range(10, 20), 20]


def test_holes_are_seen():
    assert not VarlenLayout.from_mask(MASK).has_holes
    assert VarlenLayout.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1]])).has_holes


def test_it_moves_whole_and_survives_pickling():
    segments = VarlenLayout.from_mask(MASK, round_up=True)
    moved = segments.to("meta", non_blocking=True)
    names = ("indices", "cu_seqlens", "slots", "is_token")
    assert {getattr(moved, name).device.type for name in names} == {"meta"}
    assert (moved.lengths, moved.shape, moved.rounds_up) == (segments.lengths, segments.shape, True)
    copied = pickle.loads(pickle.dumps(segments))
    assert all(torch.equal(getattr(copied, name), getattr(segments, name)) for name in names)


def test_a_batch_without_tokens_has_no_length():
    segments = VarlenLayout.from_mask(torch.zeros(2, 3), round_up=True)
    assert (segments.lengths, segments.max_length, [*segments.groups()]) == ((0, 0), 0, [])
    assert segments.unpack(segments.pack(torch.ones(2, 3, 5))).tolist() == torch.zeros(2, 3, 5).tolist()


@pytest.mark.parametrize(
    ("length", "bounded"),
    [(0, 0), (1, 1), (15, 15), (16, 16), (17, 18), (31, 32), (33, 36), (100, 104), (1000, 1024), (1025, 1152)],
)
def test_bounded_lengths(length, bounded):
    assert bounded_length(length) == bounded


def test_there_are_eight_bounded_lengths_per_doubling_at_most_an_eighth_too_long():
    assert sorted({bounded_length(n) for n in range(257, 513)}) == [288, 320, 352, 384, 416, 448, 480, 512]
    assert all(n <= bounded_length(n) <= n * 1.125 for n in range(1, 5000))
