"""The culprits of a leak: what the census saw grow, joined with the lines that a recording saw make it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo.memory.leaks.census import Group, Held
from grpo.memory.leaks.recording import Recorded


@dataclass(frozen=True)
class Culprit:
    """What piled up, by how many bytes in how many steps, and the line that made it, where known."""

    what: str
    num_bytes: int
    num_steps: int
    site: str | None = None

    def __str__(self) -> str:
        made = f", created at {self.site}" if self.site else ""
        return f"{self.what}, {self.num_bytes / 2**20:.1f} MB in {self.num_steps} steps{made}"


def name_culprits(grown: Mapping[Group, Held], num_steps: int, recorded: Recorded) -> tuple[Culprit, ...]:
    """Fastest first: tensors that grew in `num_steps` steps, with the lines that were seen to make such;
    what piled up while recorded and is not in the census, or there in many shapes; other allocations.
    """
    here = f"{Path.cwd()}/"
    sites: dict[Group, list[str]] = {}
    culprits = [
        Culprit("allocations outside torch", more, recorded.num_steps, site.removeprefix(here))
        for site, more in recorded.allocations.items()
    ]
    for (site, group), more in recorded.tensors.items():
        if grown.get(group, Held()).num_bytes / num_steps > more / recorded.num_steps / 2:
            sites.setdefault(group, []).append(site.removeprefix(here))
        else:
            such = f"tensors such as {group}"
            culprits.append(Culprit(such, more, recorded.num_steps, site.removeprefix(here)))
    culprits += [
        Culprit(
            f"{held.num_tensors} tensors {group}",
            held.num_bytes,
            num_steps,
            " and ".join(sites.get(group, [])) or None,
        )
        for group, held in grown.items()
    ]
    return tuple(sorted(culprits, key=lambda culprit: -culprit.num_bytes / culprit.num_steps))
