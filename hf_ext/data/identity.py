"""Percent identity of sequences: 1 - edit distance / length of the longer one, exact, for many pairs at once.

Substitutions, insertions and deletions cost one each, so the number holds at any length and for unequal lengths. A
fragment is as identical to its whole as it covers of it. Letters are compared as they are: X equals only X.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

PAIRS_PER_CHUNK = 4096  # 32 KB per array of 64-bit words: the dozen that a step touches stay in a core's cache
RESIDUES_PER_CHUNK = 8_000_000
_WORD = 64
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_LAST, _ONE = np.uint64(_WORD - 1), np.uint64(1)


class SequenceSet:
    """Sequences as one flat array of letter numbers.

    Args:
        sequences: ASCII, in any letters.

    Attributes:
        lengths, starts: int64 [n], in residues; codes: uint8, all residues; num_letters: distinct letters, at least 1.
        composition: int32 [n, num_letters], how often each letter occurs.

    Cost: one pass; one byte a residue and four bytes a sequence and letter.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        raw = np.frombuffer("".join(sequences).encode("ascii"), dtype=np.uint8)
        letters = np.flatnonzero(np.bincount(raw, minlength=256))
        number_of = np.zeros(256, dtype=np.uint8)
        number_of[letters] = np.arange(len(letters))
        self.num_letters = max(1, len(letters))
        self.codes = number_of[raw]
        self.lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.composition = np.zeros((len(sequences), self.num_letters), dtype=np.int32)
        for letter in range(len(letters)):
            before = np.concatenate([[0], np.cumsum(self.codes == letter, dtype=np.int64)])
            self.composition[:, letter] = before[self.starts + self.lengths] - before[self.starts]

    def __len__(self) -> int:
        return len(self.lengths)

    def block(self, indices: np.ndarray, width: int) -> np.ndarray:
        """Returns uint8 [p, width], the first residues of each; what follows a shorter sequence has no meaning."""
        if not len(self.codes):
            return np.zeros((len(indices), width), dtype=np.uint8)
        places = self.starts[indices][:, None] + np.arange(width)
        return self.codes[np.minimum(places, len(self.codes) - 1)]


def allowed_edits(lengths: np.ndarray, identity: float) -> np.ndarray:
    """Returns int64, the most edits with which a pair whose longer sequence has this length reaches `identity`."""
    return np.floor((1.0 - identity) * lengths + 1e-9).astype(np.int64)


def edit_distances(sequences: SequenceSet, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns int64 [p], the edit distance of sequences `left[i]` and `right[i]`.

    Bit-parallel: 64 rows of the alignment matrix a step, thousands of pairs side by side (Myers, J. ACM 46, 1999, in
    the block form of Hyyro, 2003).

    Cost: residues of the right times 64-bit words of the left, about 20 ns each, and as much again for every sequence
    on the left that is new to its chunk.
    """
    order = np.argsort(-sequences.lengths[right], kind="stable")
    distances = np.zeros(len(left), dtype=np.int64)
    start = 0
    while start < len(order):
        longest = max(1, int(sequences.lengths[right[order[start]]]))
        stop = start + max(1, min(PAIRS_PER_CHUNK, RESIDUES_PER_CHUNK // longest))
        chunk = order[start:stop]
        distances[chunk] = _align(sequences, left[chunk], right[chunk])
        start = stop
    return distances


def _align(sequences: SequenceSet, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Edit distances of one chunk; `right` goes from long to short, so that those under way are always the first."""
    rows, steps = sequences.lengths[left], sequences.lengths[right]
    words = max(1, -(-int(rows.max()) // _WORD))
    patterns, pattern_of = np.unique(left, return_inverse=True)
    matches = _match_masks(sequences, patterns, words)
    base = pattern_of * sequences.num_letters
    letters = np.ascontiguousarray(sequences.block(right, int(steps[0])).T)
    under_way = np.searchsorted(-steps, -np.arange(int(steps[0])), "left")
    # Differences down the matrix's current column, a bit a row: +1 in `plus`, -1 in `minus`, 0 in neither.
    plus = np.full((words, len(rows)), _ONES)
    minus = np.zeros((words, len(rows)), dtype=np.uint64)
    for letter, num in zip(letters, under_way):
        places = base[:num] + letter[:num]
        _step([mask[places] for mask in matches], plus[:, :num], minus[:, :num])
    distances = steps.copy()
    for word in range(words):
        used = np.clip(rows - word * _WORD, 0, _WORD).astype(np.uint64)
        mask = np.where(used == _WORD, _ONES, (_ONE << np.minimum(used, _LAST)) - _ONE)
        distances += np.bitwise_count(plus[word] & mask).astype(np.int64)
        distances -= np.bitwise_count(minus[word] & mask).astype(np.int64)
    return distances


def _step(matches: list[np.ndarray], plus: np.ndarray, minus: np.ndarray) -> None:
    """One column further, word by word; what leaves a word across its last row enters the next."""
    up: np.ndarray | np.uint64 = _ONE  # the matrix's first row counts up, for both ends of both sequences count
    down: np.ndarray | np.uint64 = np.uint64(0)
    for word, equal in enumerate(matches):
        rising, falling = plus[word], minus[word]
        vertical = equal | falling
        equal |= down
        horizontal = (((equal & rising) + rising) ^ rising) | equal
        more = falling | ~(horizontal | rising)
        less = rising & horizontal
        next_up, next_down = more >> _LAST, less >> _LAST
        more = (more << _ONE) | up
        less = (less << _ONE) | down
        rising[:] = less | ~(vertical | more)
        falling[:] = more & vertical
        up, down = next_up, next_down


def _match_masks(sequences: SequenceSet, patterns: np.ndarray, words: int) -> np.ndarray:
    """Returns uint64 [words, u * num_letters]: bit i of a letter's mask says that residue i of the pattern is it."""
    lengths = sequences.lengths[patterns]
    masks = np.zeros((words, len(patterns) * sequences.num_letters), dtype=np.uint64)
    block = sequences.block(patterns, int(lengths.max()))
    base = np.arange(len(patterns)) * sequences.num_letters
    for place in range(block.shape[1]):
        has = np.flatnonzero(lengths > place)
        masks[place // _WORD, base[has] + block[has, place]] |= _ONE << np.uint64(place % _WORD)
    return masks


def reach_identity(
    sequences: SequenceSet,
    left: np.ndarray,
    right: np.ndarray,
    identity: float,
    spend: Callable[[int], object] = lambda cost: None,
) -> np.ndarray:
    """Returns bool [p]: whether sequences `left[i]` and `right[i]` are at least `identity` (0 to 1) identical.

    Cheap bounds first: letter counts (so lengths, too) that differ by more than the allowed edits say no, few enough
    substitutions at equal length say yes. Only the rest is aligned, after `spend` was told its residues times words.
    """
    reached = np.zeros(len(left), dtype=bool)
    for start in range(0, len(left), 16 * PAIRS_PER_CHUNK):
        part = slice(start, start + 16 * PAIRS_PER_CHUNK)
        reached[part] = _reach(sequences, left[part], right[part], identity, spend)
    return reached


def _reach(
    sequences: SequenceSet, left: np.ndarray, right: np.ndarray, identity: float, spend: Callable[[int], object]
) -> np.ndarray:
    lengths = sequences.lengths[left], sequences.lengths[right]
    allowed = allowed_edits(np.maximum(*lengths), identity)
    surplus = sequences.composition[left] - sequences.composition[right]
    needed = np.maximum(np.maximum(surplus, 0).sum(1), np.maximum(-surplus, 0).sum(1))  # an edit mends one of each
    unsure = needed <= allowed
    reached = np.zeros(len(left), dtype=bool)
    same = np.flatnonzero(unsure & (lengths[0] == lengths[1]))
    same = same[np.argsort(lengths[0][same], kind="stable")]
    start = 0
    while start < len(same):
        width = int(lengths[0][same[min(len(same), start + PAIRS_PER_CHUNK) - 1]])
        stop = start + max(1, min(PAIRS_PER_CHUNK, RESIDUES_PER_CHUNK // max(1, width)))
        chunk = same[start:stop]
        differ = sequences.block(left[chunk], width) != sequences.block(right[chunk], width)
        differ &= np.arange(width) < lengths[0][chunk][:, None]
        reached[chunk] = differ.sum(1) <= allowed[chunk]
        start = stop
    rest = np.flatnonzero(unsure & ~reached)
    spend(int((lengths[1][rest] * (1 + lengths[0][rest] // _WORD)).sum()))
    reached[rest] = edit_distances(sequences, left[rest], right[rest]) <= allowed[rest]
    return reached
