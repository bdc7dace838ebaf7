"""The rules of the world's checkers by name, told from the words of an objection.

The checkers speak in sentences. Here each rule has the words by which its sentences are known, so
that a planted bug can name the rule that is to object, and a hunt can say which one did. The
numbers are those of PROTOCOL.md, "What must hold".

Consequence: who changes a checker's words changes them here; `test_planted` holds that all words
stand in the simulations' code.
"""

from typing import NamedTuple


class Rule(NamedTuple):
    """``words``: one of them stands in each objection of this rule."""

    number: int
    what: str
    words: tuple[str, ...]


RULES = {
    "bytes": Rule(
        1,
        "a commit has its bytes, and keeps them while no more is lost than it can lose",
        (
            "committed without the bytes",
            "committed; it survives",
            "committed as full, and lacks",
            "are gone after",
        ),
    ),
    "place": Rule(
        1, "no two shards on a host, no more in a rack than parity replaces",
        ("lies on hosts", "in one rack"),
    ),
    "refusal": Rule(
        1, "a restore does not refuse what can be had",
        ("restore refuses, and all bytes", "the job failed", "refused at once, and"),
    ),
    "stored": Rule(
        1, "what counts as offloaded lies in the object store",
        ("the store has no bytes of ranks", ", which the ledger offers"),
    ),
    "together": Rule(
        2, "a restore returns on no rank before its ballot is closed for all",
        ("which is not closed for all ranks",),
    ),
    "restored": Rule(
        2, "what is restored is one step, bit-exact",
        ("has wrong bytes of step", "two steps or launches", "was restored, never committed"),
    ),
    "newest": Rule(
        2, "the newest step of the present lineage is restored, or the one asked for; trouble with "
        "time or peers passes over none (10)",
        ("is there and newer", "was asked for,"),
    ),
    "order": Rule(
        3, "a lineage never goes back, an older generation commits nothing",
        ("of its lineage", "committed in generation"),
    ),
    "told": Rule(
        4, "what is told as committed is",
        ("as committed, and they never were", "is committed, and it never was"),
    ),
    "changed": Rule(4, "a record that decides is written once", ("and is another one now",)),
    "life": Rule(4, "a checkpoint's life goes by the table", ("went from", "began as")),
    "freed": Rule(
        5, "nobody frees a byte of what is open or committed", ("of open or committed",)
    ),
    "late": Rule(
        7, "a file changes hands only when its writer is done",
        ("writes into it", "has changed"),
    ),
    "nothing": Rule(8, "'nothing' is said only where nothing was", ("restore said 'nothing'",)),
    "retired": Rule(
        9, "what is retired has keep_last newer steps and no reader",
        ("was retired while", "was retired for"),
    ),
    "rate": Rule(
        11, "saves commit at the promised rate",
        ("none committed", "saves that no fault explains committed"),
    ),
    "steady": Rule(
        11, "with faults over, redundancy is full, and files, keys, tasks are what commits need",
        (" s after the end:",),
    ),
}  # fmt: skip


def rule_of(why: str) -> str:
    """The rule of the first objection in a sentence or several; "" if none is known."""
    at = {
        name: place
        for name, rule in RULES.items()
        for words in rule.words
        if (place := why.find(words)) >= 0
    }
    return min(at, key=at.__getitem__, default="")
