"""The texts of a step and what it came to, and the letters that shapes are written in.

B prompts a step, G completions a prompt, N = B * G rows; K tokens, row by row; R rows of a stream;
V vocabulary, D hidden width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from grpo.prompt import TASKS, Prompt

__all__ = ["TASKS", "Batch", "Prompt", "Step"]


@dataclass(frozen=True)
class Batch:
    """The texts of a step, or of one process's share of it. Nothing is padded; all of it is on the host.

    B prompts with N rows, which are whole groups side by side as they are sampled. A column is None until it
    is known. What is known is never changed: whatever is done again later starts from the same.
    """

    prompts: list[Prompt]
    """(B,)"""
    context_ids: list[list[int]]
    """(B,) token ids that the rows of each prompt begin with."""
    group: Tensor
    """(N,) which prompt each row belongs to; rising."""
    lengths: Tensor
    """(N,) tokens that a row has sampled, the end-of-text token included."""
    terminated: Tensor
    """(N,) bool: ended by itself; its opposite is truncated, cut at max_new_tokens."""
    texts: list[str]
    """(N,) completions, special tokens left out."""
    ids: Tensor
    """(K,) sampled tokens, row by row."""
    sampler_logp: Tensor
    """(K,) their log-probs as the sampler saw them."""
    learned: Tensor
    """(K,) bool: the tokens that are learned from."""
    credit: Tensor | None = None
    """(K,) each token's advantage: its row's, or its own where fields have theirs. Filled by the trainer."""
    old_logp: Tensor | None = None
    """(K,) log-probs under the policy before this step's updates. Filled by scoring, where wanted."""
    ref_logp: Tensor | None = None
    """(K,) log-probs under the reference. Filled by scoring, where there is one."""

    @staticmethod
    def of_rows(
        prompts: Sequence[Prompt],
        context_ids: Sequence[list[int]],
        ids: Tensor,
        lengths: Tensor,
        *,
        terminated: Tensor,
        sampler_logp: Tensor,
        texts: Sequence[str],
    ) -> "Batch":
        """Makes a batch of rows (N, C) that are padded on the right: ids and sampler_logp."""
        is_there = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        group_size = len(ids) // max(1, len(prompts))
        return Batch(
            prompts=list(prompts),
            context_ids=list(context_ids),
            group=torch.arange(len(prompts)).repeat_interleave(group_size),
            lengths=lengths,
            terminated=terminated,
            texts=list(texts),
            ids=ids[is_there],
            sampler_logp=sampler_logp[is_there],
            learned=torch.ones(int(is_there.sum()), dtype=torch.bool),
        )

    @staticmethod
    def empty() -> "Batch":
        """The batch of a process that has no groups."""
        nothing, numbers = torch.zeros(0), torch.zeros(0, dtype=torch.long)
        flags = torch.zeros(0, dtype=torch.bool)
        return Batch([], [], numbers, numbers, flags, [], numbers, nothing, flags, nothing)

    def __len__(self) -> int:
        """N"""
        return len(self.lengths)

    @property
    def group_size(self) -> int:
        """G, of a batch of whole groups."""
        return len(self) // max(1, len(self.prompts))

    @cached_property
    def offsets(self) -> Tensor:
        """(N + 1,) where each row's tokens begin, and where the last ones end."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def row(self) -> Tensor:
        """(K,) which row each token belongs to."""
        return torch.arange(len(self)).repeat_interleave(self.lengths, output_size=len(self.ids))

    @property
    def row_prompts(self) -> list[Prompt]:
        """(N,) the prompt of each row."""
        return [self.prompts[group] for group in self.group.tolist()]

    def by_row(self, values: Tensor) -> list[Tensor]:
        """Splits values (K,) of the tokens into N tensors, one a row."""
        return list(values.split(self.lengths.tolist()))

    def sum_by_row(self, values: Tensor) -> Tensor:
        """Sums values (K,) over each row's tokens: (N,)."""
        return values.new_zeros(len(self)).index_add(0, self.row, values)

    def padded(self, values: Tensor) -> Tensor:
        """Returns values (K,) of the tokens as rows (N, C), 0 on the right of shorter ones, to look at."""
        width = max(1, int(self.lengths.max())) if len(self) else 1
        place = torch.arange(len(values)) - self.offsets[:-1].repeat_interleave(self.lengths)
        return values.new_zeros(len(self), width).index_put((self.row, place), values)

    def select(self, rows: Sequence[int] | Tensor) -> "Batch":
        """Returns some rows, in this order, and the prompts that these have."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        groups, number = torch.unique_consecutive(self.group[rows], return_inverse=True)
        lengths = self.lengths[rows]
        starts = self.offsets[rows] - (lengths.cumsum(0) - lengths)
        tokens = torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)
        by_token = {name: value[tokens] for name, value in self._by_token()}
        return replace(
            self,
            prompts=[self.prompts[group] for group in groups.tolist()],
            context_ids=[self.context_ids[group] for group in groups.tolist()],
            group=number,
            lengths=lengths,
            terminated=self.terminated[rows],
            texts=[self.texts[row] for row in rows.tolist()],
        ).with_columns(**by_token)

    def select_groups(self, groups: Iterable[int]) -> "Batch":
        """Returns some whole groups, in this order."""
        size = self.group_size
        return self.select([group * size + row for group in groups for row in range(size)])

    @staticmethod
    def cat(batches: Sequence["Batch"]) -> "Batch":
        """Joins batches, which have the same columns, one after the other."""
        first = batches[0]
        sizes = torch.tensor([0, *(len(batch.prompts) for batch in batches)]).cumsum(0).tolist()
        columns = {
            name: torch.cat([getattr(batch, name) for batch in batches]) for name, _ in first._by_token()
        }
        return replace(
            first,
            prompts=[prompt for batch in batches for prompt in batch.prompts],
            context_ids=[ids for batch in batches for ids in batch.context_ids],
            group=torch.cat([batch.group + before for batch, before in zip(batches, sizes, strict=False)]),
            lengths=torch.cat([batch.lengths for batch in batches]),
            terminated=torch.cat([batch.terminated for batch in batches]),
            texts=[text for batch in batches for text in batch.texts],
        ).with_columns(**columns)

    def replace_groups(self, groups: Sequence[int], others: "Batch") -> "Batch":
        """Returns the same with `groups` (numbers among the B) taken from `others`, in order."""
        order = list(range(len(self.prompts)))
        for place, group in enumerate(groups, start=len(order)):
            order[group] = place
        return Batch.cat([self, others]).select_groups(order) if groups else self

    def without_tokens(self) -> "Batch":
        """Returns the same rows as if they had sampled nothing, which idle processes go through."""
        nothing = {name: value[:0] for name, value in self._by_token()}
        return replace(self, lengths=torch.zeros_like(self.lengths)).with_columns(**nothing)

    def with_columns(self, **columns: Tensor) -> "Batch":
        """Returns the same with these columns of tokens, by name."""
        return replace(self, **columns)  # type: ignore[arg-type]  # none is another kind of field

    # What scripts of earlier versions ask `step.rollout` for.

    @property
    def prompt_ids(self) -> list[list[int]]:
        """(B,) token ids of the prompts."""
        return self.context_ids

    @property
    def completion_ids(self) -> Tensor:
        """(N, C) sampled tokens, 0 on the right of shorter rows."""
        return self.padded(self.ids)

    @property
    def completions(self) -> list[str]:
        """(N,) the rows' texts."""
        return self.texts

    def _by_token(self) -> list[tuple[str, Tensor]]:
        names = "ids", "sampler_logp", "learned", "credit", "old_logp", "ref_logp"
        return [(name, value) for name in names if (value := getattr(self, name)) is not None]


@dataclass(frozen=True)
class Step:
    """The outcome of one step of a run."""

    number: int
    metrics: dict[str, float]
    """The whole step's, by TRL's names."""
    batch: Batch
    """The texts that this process sampled: all of the step's, where there is one process."""
    rewards: Tensor
    """(N,) of the whole step."""
    advantages: Tensor
    """(N,) of the whole step."""

    @property
    def completions(self) -> list[str]:
        """The batch's texts, group by group."""
        return self.batch.texts

    @property
    def rollout(self) -> Batch:
        """The batch, by the name that scripts of earlier versions know."""
        return self.batch
