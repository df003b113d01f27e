"""The arena that rows decode in: places for G groups of g rows, of which the first are active.

The model's own forward pass runs, and with it all of its modules; what is ours is the cache that it hands
keys and values to, and the attention that it calls (`static_cache.py`). A group may take the place of a
finished one, or the others move to the first places. Tensors stay where they are: on CUDA a whole token (the
model's pass, sampling, and what is noted of it) is recorded once for a number of groups and a length, and
replayed, in this rollout and the next.

Shapes: b active groups, R = b·g active rows, P prompt tokens, T new tokens at most, V vocabulary.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import is_sharded
from grpo.model.prefill import encode_prompts, layers_with_window, pad_prompts, sliding_window
from grpo.model.weights import sampling_in
from grpo.rollout.graphs import CUDAGraphs, Replay, run_and_record
from grpo.rollout.static_cache import BLOCK, Mask, Reading, StaticLayer, decoding, static_cache_length
from grpo.rollout.tokens import sample_tokens

FEW_ROWS = 64
"""On CUDA so many rows of a small model take as long as one."""


class Room(NamedTuple):
    """Groups of `width` rows, their tokens at most, and the tokens that end a completion."""

    groups: int
    width: int
    prompt_tokens: int
    new_tokens: int
    ends: tuple[int, ...]


class Completions(NamedTuple):
    """What some rows have sampled: `lengths` tokens, and 0 behind them.

    The last column has the newest token, also of a row that has ended and runs on until its group has.
    """

    ids: Tensor  # (R, T + 1)
    logp: Tensor  # (R, T + 1)
    lengths: Tensor  # (R,)
    terminated: Tensor  # (R,) bool: ended by itself

    @classmethod
    def empty(cls, rows: int, longest: int, model: PreTrainedModel) -> "Completions":
        ids = torch.zeros(rows, longest + 1, dtype=torch.long, device=model.device)
        logp = torch.zeros_like(ids, dtype=torch.promote_types(model.dtype, torch.float32))
        return cls(ids, logp, torch.zeros_like(ids[:, 0]), torch.zeros_like(ids[:, 0], dtype=torch.bool))


class Arena:
    groups: list[int | None]
    """The group in each active place, by the caller's numbers; None: the place is free, or is made so."""

    def __init__(
        self,
        model: PreTrainedModel,
        room: Room,
        graphs: CUDAGraphs | None = None,
        *,
        device_type: str | None = None,
    ) -> None:
        """device_type: of the device that a trace stands for, if not the model's."""
        self._device_type = device_type or model.device.type
        self.model, self._head, self.room, self._graphs = model, model.get_output_embeddings(), room, graphs
        self._config, self._window = model.config.get_text_config(decoder=True), sliding_window(model.config)
        self._replays: dict[Hashable, Replay] = {}
        rows, device = room.groups * room.width, model.device
        self._layers: list[StaticLayer] = []
        """Empty until the first prompts."""
        self._completions = Completions.empty(rows, room.new_tokens, model)
        self._uniforms = torch.zeros(rows, room.new_tokens, device=device)
        self._prompt_lengths = torch.zeros(room.groups, dtype=torch.long, device=device)
        self._ends = torch.tensor(room.ends, dtype=torch.long, device=device)

    @property
    def joins(self) -> bool:
        """Whether groups may take finished ones' places, by a pass of one process alone."""
        return not is_sharded(self.model)

    def restart(self, settings: SamplingSettings, num_groups: int) -> None:
        """All places are free again, and the first ones, for so many groups, are active."""
        names = "temperature", "top_k", "top_p", "min_p"
        self._sampling = {name: getattr(settings, name) for name in names}
        self._completions.lengths.fill_(self.room.new_tokens)  # over
        self._num_tokens = [0] * self.room.groups  # of each group's rows that go on, for the host
        self.groups = [None] * self._places_for(num_groups, self.room.groups)

    @property
    def in_use(self) -> list[int]:
        """Places that have a group."""
        return [place for place, group in enumerate(self.groups) if group is not None]

    @torch.no_grad()
    def fill(self, groups: Mapping[int, int], prompt_ids: Sequence[Sequence[int]], uniforms: Tensor) -> None:
        """Groups take free places, and their rows have first tokens. groups: by place. uniforms: (…, T)."""
        rows, written = self.rows_of(groups), self._completions
        with sampling_in(self.model):
            logits = self._head(self._encode([*groups], prompt_ids)).repeat_interleave(self.room.width, 0)
        tokens, logp = self._sample(logits, uniforms[:, 0])
        for values, first in ((written.ids, tokens), (written.logp, logp)):
            values[rows] = 0
            values[rows, 0] = values[rows, -1] = first
        written.lengths[rows], written.terminated[rows] = 1, self._is_end(tokens)
        self._uniforms[rows] = uniforms
        for place, group in groups.items():
            self.groups[place], self._num_tokens[place] = group, 1

    def _encode(self, places: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        """Keep keys and values of prompts in these places; the states (…, D) of their last tokens."""
        model, room, index = self.model, self.room, torch.tensor(places, device=self.model.device)
        prompts = pad_prompts(prompt_ids, width=room.prompt_tokens).to(model.device).padded_for(model)
        if not self._layers:
            sizes = room.groups, room.groups * room.width, static_cache_length(room.new_tokens)
            self._layers = [
                StaticLayer(*sizes, is_sliding=slides, device_type=self._device_type)
                for slides in layers_with_window(model.config)
            ]
        for layer in self._layers:
            layer.groups = index
        hidden, _ = encode_prompts(model, prompts, Cache(self._layers))
        for layer in self._layers:
            layer.clear(self.rows_of(places))
        self._prompt_lengths[index] = prompts.lengths
        return hidden

    @torch.no_grad()
    def advance(self) -> None:
        """One token more for each row that has not ended."""
        ages = self._num_tokens[: len(self.groups)]
        self._same_place = ages[0] - 1 if self._graphs is None and min(ages) == max(ages) else None
        self._num_tokens = [min(count + 1, self.room.new_tokens) for count in self._num_tokens]
        if self._graphs is None or not self._graphs.works:
            self._add_token(max(ages))
            return
        # A step is recorded for few lengths: by powers of two.
        num_blocks = -(-max(ages) // BLOCK)
        length = min(2 ** (num_blocks - 1).bit_length() * BLOCK, static_cache_length(self.room.new_tokens))
        key = *self._sampling.values(), len(self.groups), length
        if key in self._replays:
            self._replays[key]()
            return
        written = self._completions
        newest = [values[: len(self.groups) * self.room.width, -1] for values in written[:2]]
        replay = run_and_record(self._graphs, lambda: self._add_token(length), changed=written, shown=newest)
        self._replays = {} if replay is None else self._replays | {key: replay}

    def _add_token(self, length: int) -> None:
        rows, longest = len(self.groups) * self.room.width, self.room.new_tokens
        ids, logps, lengths, terminated = (values[:rows] for values in self._completions)
        prompt_lengths = self._prompt_lengths[: len(self.groups)].repeat_interleave(self.room.width)
        with sampling_in(self.model):
            hidden = self._decode(ids[:, -1:], (prompt_lengths + lengths - 1).unsqueeze(1), length)
            logits = self._head(hidden)
        uniforms = self._uniforms[:rows].gather(1, lengths.clamp(max=longest - 1).unsqueeze(1))
        tokens, logp = self._sample(logits, uniforms.squeeze(1))
        goes_on = ~terminated & (lengths < longest)
        place = torch.where(goes_on, lengths, longest).unsqueeze(1)
        for values, newest in ((ids, tokens), (logps, logp)):
            values[:, -1] = newest
            values.scatter_(1, place, newest.unsqueeze(1))
        lengths.add_(goes_on)
        terminated.logical_or_(goes_on & self._is_end(tokens))

    def _sample(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return sample_tokens(logits, uniforms, **self._sampling)

    def _is_end(self, tokens: Tensor) -> Tensor:
        return (tokens.unsqueeze(1) == self._ends).any(1)

    def _decode(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """The states (R, D) of each row's newest token; ids and positions (R, 1)."""
        reading = self._reading(length)
        with decoding(self._config, self._layers, reading):
            hidden: Tensor = self.model.base_model(
                input_ids=ids,
                # Handed through as it is; without any, some models look for padding, and wait for the device.
                attention_mask=reading.mask.completion,
                position_ids=positions,
                past_key_values=Cache(self._layers),
                use_cache=True,
            ).last_hidden_state
        return hidden.squeeze(1)

    def _reading(self, length: int) -> Reading:
        """Each row's newest token goes behind its others; what a row writes that has ended is never read."""
        rows, place = len(self.groups) * self.room.width, self._same_place
        mask = window_mask = self._mask_within(length, length + self.room.prompt_tokens)
        if self._window is not None:
            window_mask = self._mask_within(length, self._window)
        if place is not None:  # quicker than places of rows
            return Reading(slice(rows), place, mask, window_mask)
        lengths = self._completions.lengths[:rows]
        return Reading(torch.arange(rows, device=lengths.device), lengths - 1, mask, window_mask)

    def _mask_within(self, length: int, window: int) -> Mask:
        """What layers read that see so many of the newest tokens. Completions begin where prompts end."""
        num_groups, prompt_tokens = len(self.groups), self.room.prompt_tokens
        lengths = self._completions.lengths[: num_groups * self.room.width].unsqueeze(1)  # (R, 1)
        prompts = self._prompt_lengths[:num_groups].unsqueeze(1)  # (b, 1)
        first = lengths - window
        first_of_group = first.view(num_groups, -1).amax(1, keepdim=True)  # of rows that go on
        place, before = (torch.arange(n, device=lengths.device) for n in (length, prompt_tokens))
        reads_prompt = before < prompts
        if self._window is not None:  # padding stands on the left
            reads_prompt = before >= (prompt_tokens + first_of_group).maximum(prompt_tokens - prompts)
        dtype = self._layers[0].completions[0].dtype
        parts = (
            torch.zeros_like(reads, dtype=dtype).masked_fill_(~reads, torch.finfo(dtype).min)
            for reads in (reads_prompt, (place < lengths) & (place >= first))
        )
        return Mask(*(part[:, None, None] for part in parts))

    def rows(self, places: Iterable[int]) -> Completions:
        """What the rows of groups in these places have sampled, in the places' order."""
        rows = self.rows_of(places)
        return Completions(*(values[rows] for values in self._completions))

    def rows_of(self, places: Iterable[int]) -> Tensor:
        """Indices of their rows."""
        device = self._ends.device
        firsts = torch.tensor([*places], dtype=torch.long, device=device).unsqueeze(1) * self.room.width
        return (firsts + torch.arange(self.room.width, device=device)).flatten()

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """These rows have ended after so many tokens: what they sampled beyond is dropped."""
        ids, logp, *_ = written = self._completions
        index, ends = (torch.tensor(numbers, device=ids.device) for numbers in (rows, lengths))
        beyond = torch.arange(ids.shape[1], device=ids.device) >= ends.unsqueeze(1)
        for values in (ids, logp):
            values[index] = values[index].masked_fill(beyond, 0)
        written.lengths[index], written.terminated[index] = ends, True

    def ended(self) -> list[int]:
        """Places whose group has, in all of its rows; it waits for an accelerator."""
        over = self._completions.terminated | (self._completions.lengths == self.room.new_tokens)
        of_groups = over.view(-1, self.room.width).all(1).tolist()
        return [place for place in self.in_use if of_groups[place]]

    @torch.no_grad()
    def compact(self) -> None:
        """Groups move to the first places, and only as many as are needed stay active, one at least."""
        going_on = self.in_use or [0]
        active, room = self._places_for(len(going_on), len(self.groups)), self.room
        if active == len(self.groups):
            return
        rows = self.rows_of(going_on)
        self._move(torch.tensor(going_on, device=rows.device), rows)
        to_front([*self._completions, self._uniforms], rows)
        self._completions.lengths[len(rows) :] = room.new_tokens  # over
        free = [None] * (active - len(going_on))
        self._num_tokens = [*(self._num_tokens[p] for p in going_on), *[0] * (room.groups - len(going_on))]
        self.groups = [*(self.groups[place] for place in going_on), *free]

    def _places_for(self, num_groups: int, places: int) -> int:
        """How many of so many places are active for so many groups.

        Where steps are recorded: of all, a half, a quarter and so on, as recordings are for a number of rows;
        fewer than FEW_ROWS rows save nothing.
        """
        if self._graphs is None:
            return num_groups
        while places > 1 and (half := -(-places // 2)) >= num_groups and half * self.room.width >= FEW_ROWS:
            places = half
        return places

    def _move(self, groups: Tensor, rows: Tensor) -> None:
        """Their part of the cache goes to the first places."""
        for layer in self._layers:
            to_front(layer.prompts, groups)
            to_front(layer.completions, rows)
        to_front([self._prompt_lengths], groups)

    def skip(self, num_tokens: int) -> None:
        """Stand where that many more tokens lead, whatever they are: for tracing memory."""
        self._num_tokens = [count + num_tokens for count in self._num_tokens]
        self._completions.lengths.add_(num_tokens)

    @property
    def cache_bytes(self) -> int:
        """Of keys and values at most, while a token is added."""
        return sum(tensor.nbytes for layer in self._layers for tensor in (*layer.prompts, *layer.completions))


def to_front(tensors: Iterable[Tensor], index: Tensor) -> None:
    """What stands at these places goes to the first ones, tensor by tensor: never two copies of them all."""
    for tensor in tensors:
        tensor[: len(index)] = tensor.index_select(0, index)
