"""Whether another process lives: each writes to the store that it does, every second, from a thread."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from grpo.distributed.store import Store, StoreLost

_BEAT_EVERY_S = 1.0
PATIENCE_S = 20.0
"""Without a beat for so long a process counts as lost; launchers kill the others after 30 seconds."""


class Heartbeat:
    """This process's, until `stop`."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, reason: str | None) -> None:
        """No beat from here on. reason: what to tell the others, unless all is done."""
        self._stopped.set()
        self._thread.join(_BEAT_EVERY_S)
        if reason is not None:
            self._store.set(f"gone/{self._rank}", reason.encode())

    def _beat(self) -> None:
        number = 0
        with suppress(StoreLost):  # the store is gone: others will say so
            while True:
                number += 1
                self._store.set(f"beat/{self._rank}", str(number).encode())
                if self._stopped.wait(_BEAT_EVERY_S):
                    return


class Listener:
    """What the others' beats say."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.patience_s = PATIENCE_S
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0

    def trouble(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """The first of `ranks` that is gone, and what is known of it; None while all live."""
        now = time.monotonic()
        if now - self._looked > self.patience_s / 2:  # nobody listened meanwhile: begin anew
            self._heard.clear()
        self._looked = now
        silent = None
        for rank in ranks:
            if self._store.has([f"gone/{rank}"]):
                return rank, self._store.get(f"gone/{rank}").decode(errors="replace")
            beat = self._store.get(f"beat/{rank}") if self._store.has([f"beat/{rank}"]) else b""
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
            elif now - self._heard[rank][1] > self.patience_s and silent is None:
                silent = rank, f"is lost: no sign of life for {self.patience_s:.0f} seconds"
        return silent
