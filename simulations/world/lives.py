"""The life of a checkpoint: one enum, one dictionary of legal moves, and who watches over it.

    open -> snapped -> encoded -> sent -> sealed -> committed -> offloaded -> retired
       \\________________________________________\\-> abandoned

The agents have no such variable: each node has its part of a save, and the ledger has the outcome.
From outside an attempt is as far as the first node that got so far, until it has its outcome; the
tracker follows that from the event log and objects to a move that the table does not have.

Contract: evidence of a stage that lies behind is another node's and is no move; nothing leaves
`RETIRED` and `ABANDONED`. An attempt without outcome is abandoned when a newer generation begins.
"""

from __future__ import annotations

from enum import StrEnum

from p2pckpt import records as r


class Life(StrEnum):
    """How far an attempt is, in the order of a life."""

    OPEN = "open"
    SNAPPED = "snapped"
    ENCODED = "encoded"
    SENT = "sent"
    SEALED = "sealed"
    COMMITTED = "committed"
    OFFLOADED = "offloaded"
    RETIRED = "retired"
    ABANDONED = "abandoned"


MOVES: dict[Life, tuple[Life, ...]] = {
    Life.OPEN: (Life.SNAPPED, Life.ABANDONED),
    Life.SNAPPED: (Life.ENCODED, Life.ABANDONED),
    Life.ENCODED: (Life.SENT, Life.SEALED, Life.ABANDONED),
    Life.SENT: (Life.SEALED, Life.ABANDONED),
    Life.SEALED: (Life.COMMITTED, Life.ABANDONED),
    Life.COMMITTED: (Life.OFFLOADED, Life.RETIRED),
    Life.OFFLOADED: (Life.RETIRED,),
    Life.RETIRED: (),
    Life.ABANDONED: (),
}
"""Legal moves. From ENCODED to SEALED: nobody took a shard; such an attempt is abandoned later."""

NOTES = {
    "note.process_safe": Life.SNAPPED,
    "note.encoded": Life.ENCODED,
    "note.sealed": Life.SEALED,
}
"""How far a node says that an attempt is."""

ALL_MOVES = tuple(f"{a}->{b}" for a, after in MOVES.items() for b in after)
ORDER = {life: i for i, life in enumerate(Life)}
OPEN_ENDED = (Life.OPEN, Life.SNAPPED, Life.ENCODED, Life.SENT, Life.SEALED)


class Lives:
    """How far every attempt of a job is, and which moves were taken."""

    def __init__(self) -> None:
        self.now: dict[r.Attempt, Life] = {}
        self.taken: dict[str, int] = {}

    def saw(self, attempt: r.Attempt, life: Life) -> str:
        """Evidence that an attempt has got so far; what is illegal about it, or ""."""
        was = self.now.get(attempt)
        if was is None:
            self.now[attempt] = life
            return "" if life in (Life.OPEN, Life.ABANDONED) else f"began as {life}"
        if ORDER[life] <= ORDER[was] or not MOVES[was]:
            return ""
        self.now[attempt] = life
        move = f"{was}->{life}"
        self.taken[move] = self.taken.get(move, 0) + 1
        return "" if life in MOVES[was] else f"went from {was} to {life}"

    def generation_began(self, number: int) -> None:
        """What older generations had open is over."""
        for attempt, life in self.now.items():
            if attempt.generation < number and life in OPEN_ENDED:
                self.saw(attempt, Life.ABANDONED)
