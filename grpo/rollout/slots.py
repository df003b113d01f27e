"""The rows that decode together: a place for each, what it has said so far, and one token more for all.

On CUDA a whole token is recorded once and replayed: the decoder's step, sampling, and what is noted of it.
Places, cache and recording may stay from one rollout to the next (`KeptSlots`).
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.rollout.cache import CacheBytes, move_to_front, rows_of_groups
from grpo.rollout.cuda_graphs import RecordedSteps, Recorder
from grpo.rollout.decoder import make_decoder, step_recorder
from grpo.rollout.tokens import sample_tokens


class Slots:
    """b groups of g rows: R = b·g places, group by group, for at most T tokens each.

    A row that has ended runs on with the others: what it samples goes to a column that nobody reads.
    """

    ids: Tensor  # (R, T + 1)
    logp: Tensor
    lengths: Tensor  # (R,)
    terminated: Tensor
    _uniforms: Tensor  # (R, T)
    _tokens: Tensor  # (R,), the newest, and its log-prob
    _newest_logp: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        groups: int,
        width: int,
        settings: SamplingSettings,
        *,
        ends: Sequence[int],
        recorder: Recorder | None = None,
    ) -> None:
        """width: rows of a group. ends: tokens that end a text. recorder: None: the device's, if any."""
        recorder = recorder or step_recorder(model)
        self.groups, self._width, self._settings = groups, width, settings
        self._ends = torch.tensor(ends, dtype=torch.long, device=model.device)
        self._longest = settings.max_new_tokens
        self._decoder = make_decoder(model, self._longest, recorded=recorder is not None)
        self._recorded = RecordedSteps(recorder) if recorder is not None else None
        self._device = model.device
        """Where all of it is."""
        rows, exact = groups * width, torch.promote_types(model.dtype, torch.float32)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=model.device)

        self._all_groups = groups
        self._room = {
            "ids": zeros(self._longest + 1), "logp": zeros(self._longest + 1, dtype=exact),
            "lengths": zeros(), "terminated": zeros(dtype=torch.bool),
            "_uniforms": zeros(self._longest, dtype=torch.float32),
            "_tokens": zeros(), "_newest_logp": zeros(dtype=exact),
        }  # fmt: skip
        """Of all places; the attributes of these names are of the first ones, that are in use."""
        self._use_first(groups)

    @property
    def is_recorded(self) -> bool:
        return self._recorded is not None

    @torch.no_grad()
    def start(self, prompt_ids: Sequence[Sequence[int]], uniforms: Tensor, *, longest_prompt: int) -> None:
        """Each group's prompt, and its rows' first tokens. uniforms: (R, T).

        longest_prompt: tokens of the longest that may take another's place later.
        """
        self._use_first(self._all_groups)
        logits = self._decoder.prefill(prompt_ids, self._width, longest_prompt=longest_prompt)
        self._begin(slice(None), logits, uniforms)

    @torch.no_grad()
    def replace(self, groups: Sequence[int], prompt_ids: Sequence[Sequence[int]], uniforms: Tensor) -> None:
        """Others take these groups' places, and have their first tokens."""
        logits = self._decoder.replace(groups, prompt_ids)
        self._begin(self.rows_of(groups), logits, uniforms)

    def _begin(self, rows: Tensor | slice, logits: Tensor, uniforms: Tensor) -> None:
        tokens, logp = self._sample(logits, uniforms[:, 0])
        self._uniforms[rows] = uniforms
        for values in (self.ids, self.logp):
            values[rows] = 0
        self.ids[rows, 0], self.logp[rows, 0] = tokens, logp
        self.lengths[rows], self.terminated[rows], self._tokens[rows] = 1, self._is_end(tokens), tokens

    @torch.no_grad()
    def advance(self) -> None:
        """One token more for each row that has not ended."""
        key, step = self._decoder.next_step()

        def work() -> None:
            logits = step(self._tokens)
            place = self.lengths.clamp(max=self._longest - 1).unsqueeze(1)
            tokens, logp = self._sample(logits, self._uniforms.gather(1, place).squeeze(1))
            running = ~self.terminated & (self.lengths < self._longest)
            place = torch.where(running, self.lengths, self._longest).unsqueeze(1)
            self.ids.scatter_(1, place, tokens.unsqueeze(1))
            self.logp.scatter_(1, place, logp.unsqueeze(1))
            self.lengths.add_(running)
            self.terminated.logical_or_(running & self._is_end(tokens))
            self._tokens.copy_(tokens)
            self._newest_logp.copy_(logp)

        if self._recorded is None:
            work()
        else:
            shown = self._tokens, self._newest_logp
            changed = *shown, self.ids, self.logp, self.lengths, self.terminated, *self._decoder.counters
            self._recorded((self.groups, key), work, changed=changed, shown=shown)

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """These rows (places) have ended after so many tokens: what they said beyond is dropped."""
        places = torch.tensor(rows, device=self._device)
        kept = torch.tensor(lengths, device=self._device)
        beyond = torch.arange(self._longest + 1, device=self._device) >= kept.unsqueeze(1)
        for values in (self.ids, self.logp):
            values[places] = values[places].masked_fill(beyond, 0)
        self.lengths[places], self.terminated[places] = kept, True

    def _is_end(self, tokens: Tensor) -> Tensor:
        return (tokens.unsqueeze(1) == self._ends).any(1)

    def _sample(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        settings = self._settings
        return sample_tokens(
            logits, uniforms, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
        )

    def skip(self, num_tokens: int) -> None:
        """Stand where that many more tokens lead, whatever they are: for tracing memory."""
        self._decoder.skip(num_tokens)

    @torch.no_grad()
    def keep(self, groups: Sequence[int], places: int | None = None) -> None:
        """Go on with some groups, in the first of so many places (None: one for each); the others leave."""
        rows = self.rows_of(groups)
        places = places or len(groups)
        self._decoder.keep(groups, places)
        move_to_front(self._room.values(), rows)
        self._use_first(places)
        self.lengths[len(rows) :] = self._longest  # over

    def _use_first(self, groups: int) -> None:
        """From here on there are so many groups, in the first places."""
        self.groups = groups
        for name, tensor in self._room.items():
            setattr(self, name, tensor[: groups * self._width])

    def rows_of(self, groups: Sequence[int]) -> Tensor:
        """Their places, in the groups' order."""
        return rows_of_groups(groups, self._width, self._device)

    def ended(self) -> list[bool]:
        """Whether all rows of a group have; it waits for an accelerator."""
        over: Tensor = (self.terminated | (self.lengths == self._longest)).view(self.groups, -1).all(1)
        return over.tolist()

    @property
    def cache_bytes(self) -> CacheBytes:
        return self._decoder.cache_bytes


class KeptSlots:
    """Slots that stay from one rollout to the next, one for each number of rows, the last used ones last."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slots] = {}

    def get(self, key: Hashable, make: Callable[[], Slots]) -> Slots:
        """Those that are known by this key, made if there are none."""
        slots = self._slots.pop(key, None) or make()
        self._slots[key] = slots
        return slots

    @property
    def nbytes(self) -> int:
        """Of caches; the rest is little."""
        return sum(slots.cache_bytes.held for slots in self._slots.values())

    @property
    def largest_nbytes(self) -> int:
        return max((slots.cache_bytes.held for slots in self._slots.values()), default=0)

    def trim(self, room: float) -> None:
        """Let go of those that were used longest ago, until no more than `room` bytes are held."""
        while self._slots and self.nbytes > room:
            del self._slots[next(iter(self._slots))]

    def release(self) -> None:
        self._slots.clear()
