"""An LSTM that reads the antigen both ways, and one that writes the antibody from the states that are left."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ...data import VarlenLayout
from ...errors import ArgumentError
from .configuration import GeneratorConfig
from .parts import DecoderState, EncoderStates

Memory = tuple[Tensor, Tensor]  # hidden states and cells, (layers * 2, k, hidden) each


class LstmEncoder(nn.Module):
    """Bidirectional LSTM; each antigen is computed at its own length, wherever in its row the padding stands."""

    main_input_name = "input_ids"  # transformers asks

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        layers = config.num_encoder_layers
        self.lstm = nn.LSTM(
            config.d_model,
            config.hidden_size,
            layers,
            bidirectional=True,
            batch_first=True,
            dropout=config.dropout if layers > 1 else 0.0,
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, layout: VarlenLayout | None = None
    ) -> EncoderStates:
        """Encodes k antigens, (k, tokens, 2 * hidden), zero where padding is, with `memory` and `mean`.

        Cost: one wait for the device, from which lengths are read.
        """
        embedded = self.dropout(self.embed_tokens(input_ids))
        is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        order = is_token.eq(0).int().argsort(dim=1, stable=True)  # tokens first, whichever side is padded
        there = order[:, :, None]
        embedded = embedded.gather(1, there.expand_as(embedded))
        lengths = is_token.ne(0).sum(1).cpu()
        states, last = (self._run_packed if embedded.is_cuda else self._run_in_stretches)(embedded, lengths)
        states = torch.zeros_like(states).scatter(1, there.expand_as(states), states)
        # (layers * 2, k, hidden) to (k, layers, 2 * hidden), of hidden states and of cells.
        by_row = [part.unflatten(0, (-1, 2)).permute(2, 0, 1, 3).flatten(2) for part in last]
        mean = states.sum(1) / lengths.to(states.device, states.dtype)[:, None]
        return EncoderStates(last_hidden_state=states, memory=torch.stack(by_row, dim=-1), mean=mean)

    def _run_packed(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, Memory]:
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        output, last = self.lstm(packed)
        return pad_packed_sequence(output, batch_first=True, total_length=embedded.shape[1])[0], last

    def _run_in_stretches(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, Memory]:
        """Runs all antigens side by side from one length at which some end to the next: no step is on padding.

        On a CPU the backward pass of a packed LSTM does not use oneDNN and is slower by far (torch 2.13). To run each
        length apart has as many steps as all lengths together; here they are those of the longest antigen.
        """
        order = lengths.argsort(descending=True, stable=True)
        ends = [0, *lengths.unique().tolist()]
        stretches = [(start, end, int((lengths > start).sum())) for start, end in pairwise(ends)]
        steps = torch.arange(embedded.shape[1])
        left = lengths[order, None] - 1
        mirrored = torch.where(steps <= left, left - steps, steps)[:, :, None].to(embedded.device)
        x = embedded[order]
        last = []
        for layer in range(self.lstm.num_layers):
            if layer:
                x = functional.dropout(x, self.lstm.dropout, self.training)
            ahead, end_ahead = self._run_one_way(x, stretches, f"l{layer}")
            flipped = x.gather(1, mirrored.expand_as(x))
            back, end_back = self._run_one_way(flipped, stretches, f"l{layer}_reverse")
            x = torch.cat([ahead, back.gather(1, mirrored.expand_as(back))], dim=2)
            last += [end_ahead, end_back]
        place = order.argsort()
        hidden = torch.cat([way[0] for way in last])
        cell = torch.cat([way[1] for way in last])
        return x[place], (hidden[:, place], cell[:, place])

    def _run_one_way(self, x: Tensor, stretches: list[tuple[int, int, int]], name: str) -> tuple[Any, Memory]:
        """Runs one layer, one direction, over rows of descending length; `name` is how torch ends those weights' names.

        Args:
            stretches: start, end, and how many rows are longer than the start.
        """
        weights = [getattr(self.lstm, f"{kind}_{name}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        hidden = cell = x.new_zeros(1, len(x), self.lstm.hidden_size)
        outputs = []
        ended = []
        for start, end, count in stretches:
            ended.append((hidden[:, count:], cell[:, count:]))
            begin = [state[:, :count].to(x.dtype).contiguous() for state in (hidden, cell)]
            output, hidden, cell = torch.lstm(
                x[:count, start:end], begin, weights, True, 1, 0.0, self.training, False, True
            )
            outputs.append(functional.pad(output, (0, 0, 0, 0, 0, len(x) - count)))
        ended.append((hidden, cell))
        states = functional.pad(torch.cat(outputs, dim=1), (0, 0, 0, x.shape[1] - stretches[-1][1]))
        ended.reverse()
        hidden = torch.cat([state for state, _ in ended], dim=1)
        cell = torch.cat([state for _, state in ended], dim=1)
        return states, (hidden, cell)


class LstmState(DecoderState):
    """`hidden`, `cell`: (layers, rows, hidden). `keys`: (rows, antigen tokens, hidden) where the decoder attends."""

    def __init__(self, hidden: Tensor, cell: Tensor, keys: Tensor | None):
        super().__init__()
        self.hidden = hidden
        self.cell = cell
        self.keys = keys

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the beams that go on. `keys` stay: beams of a row have one antigen."""
        self.hidden = self.hidden.index_select(1, beam_idx)
        self.cell = self.cell.index_select(1, beam_idx)


class LstmDecoder(nn.Module):
    """LSTM that starts from a linear map of the encoder's states, and attends to all of them if asked to.

    It starts from the last states and, for its own hidden states, from the mean of all: from the last alone hardly a
    gradient reaches tokens far from the ends, and one so small that CPUs take ten times as long to compute with it.

    Attention: dot product of the state with a linear map of the encoder's states, after the LSTM (Luong et al.,
    arXiv:1508.04025, without input feeding, so that a whole sequence is computed at once in training).
    """

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        width = config.hidden_size
        layers = config.num_decoder_layers
        self.hidden_bridge = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.cell_bridge = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.d_model, width, layers, batch_first=True, dropout=config.dropout if layers > 1 else 0.0
        )
        self.keys = nn.Linear(2 * width, width, bias=False) if config.attend else None
        self.combine = nn.Linear(2 * width, width) if config.attend else None

    def forward(
        self,
        embedded: Tensor,
        encoded: EncoderStates,
        attention_mask: Tensor | None = None,
        past: LstmState | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, LstmState | None]:
        """Returns (rows, tokens, hidden), and the state after them if `use_cache`.

        Args:
            embedded: (rows, tokens, d_model): those that `past` has not seen.
            encoded, attention_mask: of each row's antigen; the mask (rows, antigen tokens).
        """
        state = self._begin(encoded) if past is None else past
        start = (state.hidden.contiguous(), state.cell.contiguous())
        output, (hidden, cell) = self.lstm(self.dropout(embedded), start)
        if self.combine is not None:
            keys: Any = state.keys
            allowed = None if attention_mask is None else attention_mask.bool()[:, None, :]
            context = functional.scaled_dot_product_attention(output, keys, keys, attn_mask=allowed)
            output = torch.tanh(self.combine(torch.cat([output, context], dim=-1)))
        if not use_cache:
            return self.dropout(output), None
        state.hidden = hidden
        state.cell = cell
        state.num_tokens += embedded.shape[1]
        return self.dropout(output), state

    def _begin(self, encoded: EncoderStates) -> LstmState:
        """Returns the state before the first token."""
        memory = encoded.memory
        mean = encoded.mean
        if memory is None or mean is None:
            raise ArgumentError("encoder_outputs without memory and mean: give an LSTM's decoder what encode returned.")
        hidden, cell = memory.unbind(-1)
        hiddens = [linear(torch.cat([hidden[:, i], mean], dim=1)) for i, linear in enumerate(self.hidden_bridge)]
        cells = [linear(cell[:, i]) for i, linear in enumerate(self.cell_bridge)]
        keys = None if self.keys is None else self.keys(encoded.last_hidden_state)
        return LstmState(torch.stack(hiddens), torch.stack(cells), keys)
