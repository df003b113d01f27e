"""The arena that rows decode in: slots for rows, places for their prompts, and pages for their own tokens.

A row takes a free slot and leaves it when it has ended; its prompt stays as long as any of its rows wants it,
and it takes a page more when its text has filled the last. The model's own forward pass runs, and with it all
of its modules; what is ours is the cache that it hands keys and values to, and the attention that it calls
(`static_cache.py`). Tensors stay where they are: on CUDA a whole token (the model's pass, sampling, and what
is noted of it) is recorded once for a number of rows, prompts and pages, and replayed, in this rollout and
the next.

Shapes: R active rows, P prompt tokens, T new tokens at most, V vocabulary, and as in `static_cache.py`.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import is_sharded
from grpo.model.head import LogitRule
from grpo.model.prefill import encode_prompts, pad_prompts, sliding_window
from grpo.model.ways import layers_with_window
from grpo.model.weights import multiply_head, sampling_in
from grpo.rollout.graphs import CUDAGraphs, Replay, warm_up_and_capture
from grpo.rollout.places import Pool, moves_into_gaps
from grpo.rollout.room import DecodeCapacity
from grpo.rollout.static_cache import AttentionBias, DecodeStep, StaticLayer, decoding
from grpo.rollout.tables import Slot, Tables
from grpo.rollout.tokens import sample_tokens

RECORDED_TOKENS = 48
"""Tokens of a row's only page that recorded steps read, or 2, 4, … times as many."""


class Completions(NamedTuple):
    """The tokens that some rows have sampled: `lengths` of them, and 0 behind.

    The last column has the newest token, also of a row that has ended and has not left.
    """

    ids: Tensor  # (R, T + 1)
    logp: Tensor  # (R, T + 1)
    lengths: Tensor  # (R,)
    terminated: Tensor  # (R,) bool: ended by itself

    @classmethod
    def empty(
        cls, rows: int, longest: int, model: PreTrainedModel, device: torch.device | str | None = None
    ) -> "Completions":
        """Makes empty completions of a model, on its device, or another one."""
        ids = torch.zeros(rows, longest + 1, dtype=torch.long, device=device or model.device)
        logp = torch.zeros_like(ids, dtype=torch.promote_types(model.dtype, torch.float32))
        return cls(ids, logp, torch.zeros_like(ids[:, 0]), torch.zeros_like(ids[:, 0], dtype=torch.bool))


class Arena:
    slots: list[Slot]
    """The active rows, by their places."""

    def __init__(
        self,
        model: PreTrainedModel,
        room: DecodeCapacity,
        graphs: CUDAGraphs | None = None,
        *,
        device_type: str | None = None,
    ) -> None:
        """device_type: of the device that a trace stands for, if not the model's."""
        self._device_type = device_type or model.device.type
        self.model, self.room, self._graphs = model, room, graphs
        self._config, self._window = model.config.get_text_config(decoder=True), sliding_window(model.config)
        self._rule = LogitRule.of(model.config)
        self._replays: dict[Hashable, Replay] = {}
        self._layers: list[StaticLayer] = []
        """Empty until the first prompts, as the next."""
        self._states: Tensor | None = None
        """(prompts, D) of each prompt's last token, from which a row begins."""
        self._written = set[int]()
        """Pages that have had something in them."""
        self._completions = Completions.empty(room.rows, room.new_tokens, model)

        self._uniforms = torch.zeros(room.rows, room.new_tokens, device=model.device)
        self._prompt_lengths = torch.zeros(room.prompts, dtype=torch.long, device=model.device)
        self._ends = torch.tensor(room.ends, dtype=torch.long, device=model.device)
        self._tables = Tables(room, model.device, recorded=graphs is not None)

    @property
    def supports_refill(self) -> bool:
        """Whether rows may begin while others decode, by a pass of one process alone."""
        return not is_sharded(self.model)

    def reset(self, settings: SamplingSettings) -> None:
        """Frees all slots, places and pages."""
        names = "temperature", "top_k", "top_p", "min_p"
        self._sampling = {name: getattr(settings, name) for name in names}
        self._completions.lengths.fill_(self.room.new_tokens)  # over
        self.slots = []
        self._prompts, self._pages = Pool(self.room.prompts), Pool(self.room.pages)
        self._place_of: dict[int, int] = {}
        """The places of prompts, by group."""
        self._changed = True

    # ------------------------------------------------------------------------------------------ prompts

    @property
    def groups(self) -> Collection[int]:
        """The groups whose prompts are in the arena."""
        return self._place_of.keys()

    @property
    def prompts_at_once(self) -> int:
        """The most prompts that are encoded together: as many as all slots have rows of."""
        return -(-self.room.rows // self.room.group_size)

    @property
    def free_prompts(self) -> int:
        """How many prompts there is room for."""
        return self._prompts.num_free

    @torch.no_grad()
    def encode(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Encodes prompts into free places, by their groups, where their keys and values are kept."""
        taken = {group: self._prompts.take() for group in prompts}
        index = torch.tensor([*taken.values()], device=self.model.device)
        with sampling_in(self.model):
            states, lengths = self._encode([*taken.values()], [*prompts.values()])
        if self._states is None:
            self._states = states.new_zeros(self.room.prompts, states.shape[1])
        self._states[index], self._prompt_lengths[index] = states, lengths
        self._place_of |= taken
        self._changed = True

    def _encode(self, places: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Keep keys and values of prompts in these places; the states (b, D) of their last tokens, and their
        lengths (b,).
        """
        model, room = self.model, self.room
        prompts = pad_prompts(prompt_ids, width=room.prompt_tokens).to(model.device).padded_for(model)
        if not self._layers:
            pages = room.pages + (self._graphs is not None)  # the last is written by slots that are free
            self._layers = [
                StaticLayer(
                    room.prompts, pages, self.room.page, is_sliding=slides, device_type=self._device_type
                )
                for slides in layers_with_window(model.config)
            ]
        index = torch.tensor(places, device=model.device)
        for layer in self._layers:
            layer.prompt_places = index
        hidden, _ = encode_prompts(model, prompts, Cache(self._layers))
        return hidden, prompts.lengths

    def forget(self, groups: Iterable[int]) -> None:
        """Give back the places of these groups' prompts; none of their rows is active."""
        for group in groups:
            self._prompts.give_back(self._place_of.pop(group))
        self._changed = True

    # --------------------------------------------------------------------------------------------- rows

    @property
    def free_slots(self) -> int:
        """How many rows may begin."""
        return self.room.rows - len(self.slots)

    @property
    def free_pages(self) -> int:
        """How many pages are nobody's."""
        return self._pages.num_free

    @torch.no_grad()
    def begin(self, rows: Mapping[int, int], uniforms: Tensor) -> None:
        """Begins rows in free slots, with a page and a first token each. rows: by group. uniforms: (…, T)."""
        written, device, first = self._completions, self.model.device, len(self.slots)
        self.slots += [Slot(row, group) for row, group in rows.items()]
        self.add_pages(self.slots[first:])
        index = torch.arange(first, len(self.slots), device=device)
        groups = list(dict.fromkeys(rows.values()))
        places = torch.tensor([self._place_of[group] for group in groups], device=device)
        of_groups = torch.tensor([groups.index(group) for group in rows.values()], device=device)
        assert self._states is not None
        uniforms = uniforms.to(device)
        with sampling_in(self.model):
            logits = self._rule(multiply_head(self.model, self._states[places]))[of_groups]
        tokens, logp = self._sample(logits, uniforms[:, 0])
        for values, newest in ((written.ids, tokens), (written.logp, logp)):
            values[index] = 0
            values[index, 0] = values[index, -1] = newest
        written.lengths[index], written.terminated[index] = 1, self._is_end(tokens)
        self._uniforms[index] = uniforms
        self._changed = True

    def lacks_page(self, slot: Slot, ahead: int) -> bool:
        """Whether a row that goes on so many tokens has to have a page more; the newest is in none yet."""
        return len(slot.pages) * self.room.page < min(slot.tokens + ahead - 1, self.room.new_tokens)

    def add_pages(self, slots: Iterable[Slot]) -> None:
        """Gives each of these rows a free page more."""
        is_new, used = not self._written, list[int]()
        for slot in slots:
            slot.pages.append(page := self._pages.take())
            used += [page] if page in self._written else []
            self._written.add(page)
        if used or is_new:  # what another row has written, a NaN perhaps, would outlive its mask
            index = torch.tensor(used, dtype=torch.long, device=self.model.device)
            for layer in self._layers:
                layer.clear(index)
        self._changed = True

    def leave(self, places: Collection[int]) -> None:
        """Free these slots and their pages; the other rows close up."""
        going_on = [place for place in range(len(self.slots)) if place not in places]
        for place in places:
            for page in self.slots[place].pages:
                self._pages.give_back(page)
        self._keep(going_on)

    def close_gaps(self) -> None:
        """Moves pages and prompts together where more than an eighth of what is read is nobody's."""
        for pool, move in ((self._pages, self._move_pages), (self._prompts, self._move_prompts)):
            if pool.front > len(pool.taken) + len(pool.taken) // 8:
                move(pool.close_gaps())
                self._changed = True

    def _keep(self, going_on: list[int]) -> list[int]:
        """Moves rows into the slots of those that leave. Returns who is then where."""
        moves = moves_into_gaps(going_on)
        self._move([*self._completions, self._uniforms], moves)
        now_at = {moves.get(place, place): place for place in going_on}
        order = [now_at[place] for place in range(len(going_on))]
        self.slots = [self.slots[place] for place in order]
        self._completions.lengths[len(order) :] = self.room.new_tokens  # over
        self._changed = True
        return order

    def _move_pages(self, moves: Mapping[int, int]) -> None:
        for slot in self.slots:
            slot.pages = [moves.get(page, page) for page in slot.pages]
        self._move([stored for layer in self._layers for stored in layer.pages], moves)

    def _move_prompts(self, moves: Mapping[int, int]) -> None:
        self._place_of = {group: moves.get(place, place) for group, place in self._place_of.items()}
        stored = [stored for layer in self._layers for stored in layer.prompts]
        assert self._states is not None
        self._move([*stored, self._states, self._prompt_lengths], moves)

    def _move(self, tensors: Iterable[Tensor], moves: Mapping[int, int]) -> None:
        """Moves rows from some places to others, tensor by tensor: there are never two copies of them all."""
        if moves:
            source, to = (
                torch.tensor([*places], device=self.model.device) for places in (moves, moves.values())
            )
            for tensor in tensors:
                tensor[to] = tensor[source]

    # ------------------------------------------------------------------------------------------- tokens

    @torch.no_grad()
    def decode_step(self) -> None:
        """Decodes one token more for each row that has not ended."""
        if self._changed:
            self._tables.update(self.slots, self._place_of, self._prompts.front, self._pages.front)
            self._changed = False
        most = max((slot.tokens for slot in self.slots), default=1)
        for slot in self.slots:
            slot.tokens = min(slot.tokens + 1, self.room.new_tokens)
        length = min(most, self.room.page) if self._tables.sizes.per_row == 1 else self.room.page
        if self._graphs is None or not self._graphs.works:
            self._add_token(length)
            return
        # A step is recorded for few lengths: by powers of two.
        parts = -(-length // RECORDED_TOKENS)
        length = min(2 ** (parts - 1).bit_length() * RECORDED_TOKENS, self.room.page)
        key = *self._sampling.values(), self._tables.sizes, length
        if key in self._replays:
            self._replays[key]()
            return
        written = self._completions
        newest = [values[: len(self.slots), -1] for values in written[:2]]
        replay = warm_up_and_capture(
            self._graphs, lambda: self._add_token(length), changed=written, shown=newest
        )
        self._replays = {} if replay is None else self._replays | {key: replay}

    def _add_token(self, length: int) -> None:
        rows, longest = self._tables.sizes.rows, self.room.new_tokens
        ids, logps, lengths, terminated = (values[:rows] for values in self._completions)
        prompt_lengths = self._prompt_lengths[self._tables.row_prompts]
        with sampling_in(self.model):
            hidden = self._decode(ids[:, -1:], (prompt_lengths + lengths - 1).unsqueeze(1), length)
            logits = self._rule(multiply_head(self.model, hidden))
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
        """Returns the states (R, D) of each row's newest token; ids and positions are (R, 1)."""
        step = self._step_for(length)
        with decoding(self._config, self._layers, step):
            hidden: Tensor = self.model.base_model(
                input_ids=ids,
                # Handed through as it is; without any, some models look for padding, and wait for the device.
                attention_mask=step.mask.page,
                position_ids=positions,
                past_key_values=Cache(self._layers),
                use_cache=True,
            ).last_hidden_state
        return hidden.squeeze(1)

    def _step_for(self, length: int) -> DecodeStep:
        """Each row's newest token goes behind its others; what a row writes that has ended is never read."""
        places, sizes = self._tables.places, self._tables.sizes
        newest = self._completions.lengths[: sizes.rows] - 1
        number = (newest // self.room.page).clamp(max=sizes.per_row - 1)
        page = places.row_pages.gather(1, number.unsqueeze(1)).squeeze(1)
        if self._graphs is not None:  # free slots write, too: to the page that is nobody's
            page = page.where(places.has_page[:, 0], self.room.pages)
        mask = window_mask = self._mask_within(length, None)
        if self._window is not None:
            window_mask = self._mask_within(length, self._window)
        return DecodeStep(page, newest % self.room.page, places, mask, window_mask)

    def _mask_within(self, length: int, window: int | None) -> AttentionBias:
        """Returns the bias of layers that see so many of the newest tokens. Completions begin where prompts
        end."""
        places, sizes, prompt_tokens = self._tables.places, self._tables.sizes, self.room.prompt_tokens
        lengths = self._completions.lengths[: sizes.rows]  # (R,)
        own = (lengths[places.page_rows] - places.page_numbers * self.room.page).unsqueeze(1)  # (n, 1)
        place, before = (torch.arange(n, device=lengths.device) for n in (length, prompt_tokens))
        reads_own = place < own
        prompts = self._prompt_lengths[: sizes.prompts, None, None]  # (b, 1, 1)
        if self._window is None:
            reads_prompt = before < prompts
        else:  # padding stands on the left
            reads_prompt = before >= prompt_tokens - prompts
        if window is not None:
            reads_own = reads_own & (place >= own - window)
            first = lengths[places.prompt_rows].unsqueeze(2) - window  # (b, g, 1)
            reads_prompt = reads_prompt & (before >= prompt_tokens + first)  # (b, g, P)
        dtype = self._layers[0].pages[0].dtype
        parts = (
            torch.zeros_like(reads, dtype=dtype).masked_fill_(~reads, torch.finfo(dtype).min)
            for reads in (reads_prompt, reads_own)
        )
        prompt, own_tokens = parts
        return AttentionBias(prompt[:, None], own_tokens[:, None, None])

    def skip(self, num_tokens: int) -> None:
        """Stand where that many more tokens lead, whatever they are: for tracing memory."""
        for slot in self.slots:
            slot.tokens += num_tokens
        self._completions.lengths[: len(self.slots)].add_(num_tokens)

    # ------------------------------------------------------------------------------------------ results

    def sampled(self, places: Sequence[int]) -> Completions:
        """Returns the tokens that the rows in these slots have sampled."""
        index = torch.tensor(places, dtype=torch.long, device=self.model.device)
        return Completions(*(values[index] for values in self._completions))

    def cut(self, places: Sequence[int], lengths: Sequence[int]) -> None:
        """These rows have ended after so many tokens: what they sampled beyond is dropped."""
        ids, logp, *_ = written = self._completions
        index, ends = (torch.tensor(numbers, device=ids.device) for numbers in (places, lengths))
        beyond = torch.arange(ids.shape[1], device=ids.device) >= ends.unsqueeze(1)
        for values in (ids, logp):
            values[index] = values[index].masked_fill(beyond, 0)
        written.lengths[index], written.terminated[index] = ends, True

    def ended(self) -> list[int]:
        """Slots whose rows have ended; it waits for an accelerator."""
        over = self._completions.terminated | (self._completions.lengths == self.room.new_tokens)
        return over[: len(self.slots)].nonzero().flatten().tolist()

    @property
    def cache_bytes(self) -> int:
        """The bytes of keys and values at most, while a token is added."""
        return sum(tensor.nbytes for layer in self._layers for tensor in (*layer.prompts, *layer.pages))

    @property
    def used_bytes(self) -> int:
        """The bytes of keys and values that prompts and rows have taken."""
        stored = [
            (pool, t)
            for layer in self._layers
            for pool, kept in ((self._prompts, layer.prompts), (self._pages, layer.pages))
            for t in kept
        ]
        return sum(len(pool.taken) * (tensor.nbytes // len(tensor)) for pool, tensor in stored)
