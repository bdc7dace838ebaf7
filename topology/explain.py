"""Saying so: why a placement is as it is, and what it does not give.

Intuition: a placement that is weaker than asked for is no secret. Each rule that is not met becomes
a sentence: what was needed, what there is, and the losses that now kill.

Contract: pure functions from an answer to sentences; they decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from topology.cluster import TopologyError
from topology.ground import UNKNOWN, Ask, Caps, Ground
from topology.rules import Rules

NAMED_AT_MOST = 4


def refusal(owner: str, ask: Ask, i: int, have: int, ground: Ground) -> TopologyError:
    """Why the required level i cannot be met."""
    level = ask.rules.spread[i].name
    what = f"owner {owner}: level {level} is required"
    if ask.own[i] == UNKNOWN:
        return TopologyError(f"{what}, but the owner has no {level} label")
    rule = f"at most {ask.rules.most} in one {level}" + (
        "" if ask.rules.m else f" and none in the owner's own {level}"
    )
    hint = "" if ground.nested else " (the levels do not nest: none was found, one may exist)"
    return TopologyError(
        f"{what}: needs room for {ask.target} shards, {rule}; has room for {have}{hint}"
    )


def reason(how: str, ground: Ground, ask: Ask, caps: tuple[Caps, ...], exact: bool) -> str:
    """How the holders were chosen, within which caps; ``exact``: the owner's own is used up."""
    parts = [how]
    for i, (level, cap) in enumerate(zip(ask.rules.spread, caps, strict=False)):
        if ask.own[i] == UNKNOWN:
            own = f"the owner's {level.name} is unknown"
        else:
            few = f"{cap.own}" if exact else f"up to {cap.own}"
            own = f"{few if cap.own else 'none'} in the owner's own {ground.labels[i][ask.own[i]]}"
        parts.append(f"{level.name}: at most {cap.other} in one, {own}")
    return "; ".join(parts)


def degraded(nodes: tuple[str, ...], owner: str, ground: Ground, ask: Ask) -> tuple[str, ...]:
    """A sentence for each rule that is not met, with the losses that kill."""
    k, count, held = ask.rules.k, ask.rules.count, len(nodes)
    sentences = []
    if held < count:
        kills = (
            f"the owner and any {held - k + 1} of the holders"
            if held >= k
            else f"the owner {owner}"
        )
        sentences.append(
            f"host: needs {count} hosts beside the owner's, has {held}; losing {kills} kills"
        )
    signatures = [ground.signatures[ground.position[name]] for name in nodes]
    for i, level in enumerate(ask.rules.spread):
        shards = Counter(signature[i] for signature in signatures)
        named = Counter({ground.labels[i][c]: n for c, n in shards.items() if c != UNKNOWN})
        own = ground.labels[i][ask.own[i]] if ask.own[i] != UNKNOWN else None
        blind = tuple(
            name for name, signature in zip(nodes, signatures, strict=True)
            if signature[i] == UNKNOWN
        )  # fmt: skip
        causes = list(_causes(ask.rules, level.name, named, own, (owner, blind)))
        short = held < count and held >= k and held - max(named.values(), default=0) < k
        if short and ask.rules.m:
            causes.append(f"only {held} of {count} shards have a host")
        if causes:
            kills = "; ".join(_kills(level.name, named, own, held - len(blind) - k, held - k))
            safe = f"the owner and any one {level.name} may still be lost"
            sentences.append(f"{level.name}: {', '.join(causes)}; {kills or safe}")
    return tuple(sentences)


def _causes(
    rules: Rules, level: str, named: Counter[str], own: str | None, who: tuple[str, tuple[str, ...]]
) -> Iterator[str]:
    owner, blind = who
    if own is None:
        yield f"owner {owner} has no {level} label"
    if blind:
        yield f"no {level} label on {_some(blind)}"
    over = tuple(sorted(label for label, shards in named.items() if shards > rules.most))
    if over:
        worst = max(named.values())
        yield f"needs at most {rules.most} in one {level}, has up to {worst} in {_some(over)}"
    if not rules.m and own is not None and named[own]:
        yield f"needs none in the owner's {own}, has {named[own]}"


def _kills(
    level: str, named: Counter[str], own: str | None, sure: int, spare: int
) -> Iterator[str]:
    """Losses that kill: ``spare`` shards may go; ``sure`` of them if unlabelled holders go too."""
    if own is not None and named[own] > spare:
        yield f"losing {level} {own} kills"
    elif (named[own] if own is not None else max(named.values(), default=0)) > sure:
        yield f"losing {f'{level} {own}' if own is not None else f'one {level}'} may kill"
    certain = tuple(sorted(d for d, n in named.items() if d != own and n > spare))
    maybe = tuple(sorted(d for d, n in named.items() if d != own and spare >= n > sure))
    if certain:
        yield f"losing the owner and {level} {_some(certain)} kills"
    if maybe:
        yield f"losing the owner and {level} {_some(maybe)} may kill"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more
