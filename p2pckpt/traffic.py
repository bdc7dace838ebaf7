"""What bytes move for, and how fast each kind may go.

Intuition: a checkpoint store shares links and cores with the training it serves. A rank that waits
for its state must have all of them; everything else can go slower while training needs them. So
each transfer says what it is for (`Traffic`), and whoever moves the bytes asks a `Pace` before each
small slice of them whether it is time.

A pace is a bucket of debt for each kind: a slice may go when the slices before it are paid for at
the kind's rate (the virtual scheduling form of the leaky bucket, ITU-T I.371 Annex A). Who was late
may catch up SLICE_S worth, so that a loop that looks now and then still reaches its rate.

Contract: the time is an argument. Within any T seconds a kind of rate R moves at most
R * (T + 2 * SLICE_S) bytes, and LEAST_SLICE_BYTES at least. A kind without a rate never waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

SLICE_S = 0.05
"""A slice is what the rate allows in so long: short against a training step, long enough to move
at the rate of a fast link in whole pieces."""

LEAST_SLICE_BYTES = 64 * 1024
"""Smaller ones would cost more in turns than they give in smoothness."""


class Traffic(StrEnum):
    """What for. Only RESTORE, which a job stands still for, is never held back."""

    RESTORE = "restore"
    SAVE = "save"
    REPAIR = "repair"
    DRAIN = "drain"
    OFFLOAD = "offload"
    SCRUB = "scrub"

    @property
    def can_wait(self) -> bool:
        """No deadline but that it gets on: such a transfer is given much more time."""
        return self not in (Traffic.RESTORE, Traffic.SAVE)


Rates = Mapping[Traffic, float]
"""Bytes a second, above 0, by kind; a kind that is not in it has no bound."""


class Pace:
    """Whether it is time for the next slice of a kind; one for each direction of a link."""

    def __init__(self) -> None:
        self._rates: dict[Traffic, float] = {}
        self._paid_s: dict[Traffic, float] = {}

    def limit(self, rates: Rates) -> None:
        """Other rates from now on."""
        self._rates = dict(rates)

    def holds(self, traffic: Traffic) -> bool:
        """Has the kind a rate?"""
        return traffic in self._rates

    def soonest_s(self, now_s: float) -> float:
        """Seconds until any kind that must wait now may go; infinite if none must."""
        waits = (self.wait_s(traffic, now_s) for traffic in self._rates)
        return min((wait_s for wait_s in waits if wait_s), default=math.inf)

    def slice_bytes(self, traffic: Traffic, most: int) -> int:
        """How much to move at once, of at most ``most``."""
        rate = self._rates.get(traffic)
        return most if rate is None else min(most, max(LEAST_SLICE_BYTES, int(rate * SLICE_S)))

    def wait_s(self, traffic: Traffic, now_s: float) -> float:
        """Seconds until the next slice may go; 0 now."""
        if traffic not in self._rates:
            return 0.0
        wait_s = self._paid_s.get(traffic, now_s) - now_s
        return wait_s if wait_s > 1e-6 else 0.0  # a sleep of less may not move the clock

    def spend(self, traffic: Traffic, size_bytes: int, now_s: float) -> None:
        """A slice goes."""
        if (rate := self._rates.get(traffic)) is not None:
            paid_s = max(self._paid_s.get(traffic, now_s), now_s - SLICE_S)
            self._paid_s[traffic] = paid_s + size_bytes / rate
