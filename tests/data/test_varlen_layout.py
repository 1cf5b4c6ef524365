"""Where tokens stand once padding is gone, worked out by hand."""

import pickle

import torch

from hf_ext.data.varlen_layout import BatchLayout, VarlenLayout, bounded_length

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]])


def test_sequences_are_laid_out_shortest_first():
    layout = VarlenLayout.from_mask(MASK)
    assert layout.lengths == (0, 1, 2, 3)
    assert layout.indices.tolist() == [4, 13, 14, 0, 1, 2]
    assert (layout.cu_seqlens.tolist(), layout.cu_seqlens.dtype) == ([0, 0, 1, 3, 6], torch.int32)
    assert (layout.shape, layout.max_length, layout.num_filled) == ((4, 4), 3, 0)
    assert layout.columns.tolist() == [[0, 1, 2, 0, 1, 2]]  # of the padded batch
    assert layout.slots.tolist() == [3, 6, 7, 9, 10, 11]  # a row of none, then 1, 2 and 3 tokens, 3 slots each
    assert layout.is_token.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert [*VarlenLayout.from_mask(MASK).groups()] == [(0, 1, 1), (1, 1, 2), (3, 1, 3)]
    twos = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    assert [*VarlenLayout.from_mask(twos).groups()] == [(0, 2, 2), (4, 1, 3)]


def test_packing_gathers_and_unpacking_puts_back_with_zeros_where_padding_was():
    layout = VarlenLayout.from_mask(MASK)
    padded = torch.arange(1.0, 17.0).view(4, 4).requires_grad_()
    packed = layout.pack(padded)
    assert packed.tolist() == [[5, 14, 15, 1, 2, 3]]
    assert layout.unpack(packed).tolist() == [[1, 2, 3, 0], [5, 0, 0, 0], [0, 0, 0, 0], [0, 14, 15, 0]]
    layout.unpack(packed * torch.arange(1.0, 7.0)).sum().backward()  # gradients reach real tokens only
    assert padded.grad.tolist() == [[4, 5, 6, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 2, 3, 0]]
    wide = layout.pack(torch.ones(4, 4, 2, 3, dtype=torch.bfloat16))
    assert (wide.shape, wide.dtype) == ((1, 6, 2, 3), torch.bfloat16)
    assert (layout.unpack(wide).shape, layout.unpack(wide).dtype) == ((4, 4, 2, 3), torch.bfloat16)


def test_filling_is_at_the_end_and_holds_zeros():
    mask = (torch.arange(10) < torch.tensor([[10], [7]])).long()  # 17 tokens: the next bounded length is 18
    layout = VarlenLayout.from_mask(mask, round_up=True)
    assert (layout.lengths, layout.num_filled, layout.max_length) == ((7, 10), 1, 10)
    assert layout.cu_seqlens.tolist() == [0, 7, 17, 18]
    assert [*layout.groups()] == [(0, 1, 7), (7, 1, 10)]
    assert layout.slots.tolist() == [*range(7), *range(10, 20), 20]
    assert layout.columns.shape == (1, 18)
    packed = layout.pack(torch.ones(2, 10))
    assert packed[0].tolist() == [1.0] * 17 + [0.0]
    assert torch.equal(layout.unpack(packed), mask.float())
    full = VarlenLayout.from_mask(torch.ones(2, 8), round_up=True)
    assert (full.lengths, full.num_filled) == ((8, 8), 0)  # bounded already
    mask = torch.arange(3) < torch.tensor([3] * 21 + [2])[:, None]  # 65 tokens become 72
    layout = VarlenLayout.from_mask(mask, round_up=True)
    assert (layout.num_filled, layout.max_length, len(layout.lengths)) == (7, 3, 22)
    assert layout.cu_seqlens.tolist()[-4:] == [65, 68, 71, 72]
    assert not VarlenLayout.from_mask(MASK).has_holes
    assert VarlenLayout.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1]])).has_holes


def test_it_moves_whole_and_survives_pickling():
    layout = VarlenLayout.from_mask(MASK, round_up=True)
    layout.memo["kernel"] = "of this device"
    moved, copied = layout.to("meta", non_blocking=True), pickle.loads(pickle.dumps(layout))
    names = ("indices", "cu_seqlens", "slots", "is_token")
    assert {getattr(moved, name).device.type for name in names} == {"meta"}
    assert (moved.lengths, moved.shape, moved.rounds_up, moved.memo) == (layout.lengths, layout.shape, True, {})
    whole = BatchLayout((4, 4), layout, torch.arange(3)).to("meta")
    assert (whole.segments.indices.device.type, whole.labelled.device.type) == ("meta", "meta")
    assert all(torch.equal(getattr(copied, name), getattr(layout, name)) for name in names)


def test_a_batch_without_tokens_has_no_length():
    layout = VarlenLayout.from_mask(torch.zeros(2, 3), round_up=True)
    assert (layout.lengths, layout.max_length, [*layout.groups()]) == ((0, 0), 0, [])
    assert layout.unpack(layout.pack(torch.ones(2, 3, 5))).tolist() == torch.zeros(2, 3, 5).tolist()


def test_there_are_eight_bounded_lengths_per_doubling_at_most_an_eighth_too_long():
    lengths = {0: 0, 1: 1, 15: 15, 16: 16, 17: 18, 31: 32, 33: 36, 100: 104, 1000: 1024, 1025: 1152}
    assert {length: bounded_length(length) for length in lengths} == lengths
    assert sorted({bounded_length(n) for n in range(257, 513)}) == [288, 320, 352, 384, 416, 448, 480, 512]
    assert all(n <= bounded_length(n) <= n * 1.125 for n in range(1, 5000))
