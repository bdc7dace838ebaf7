"""The hook, with a scripted agent at the other end of its link."""

import pytest

from p2pckpt import checkpointer as hook
from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import (
    AgentUnreachable,
    LedgerUnavailable,
    StaleGenerationError,
    UsageError,
)
from p2pckpt.launch import Launch


class ScriptedLink:
    """Answers by `says[kind of request]`: a reply, or an error; Accepted without one."""

    def __init__(self, paths):
        self.says = {"TrainerJoin": w.Joined(1, "n0")}
        self.asked, self.broken = [], False

    def call(self, request, timeout_s):
        kind = type(request).__name__
        self.asked.append(kind)
        said = self.says.get(kind, w.Accepted())
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(hook, "AgentLink", ScriptedLink)
    return hook.Checkpointer("train", agent="/nowhere", launch=Launch(0, 1, "t"))


@pytest.mark.parametrize(
    ("why", "asked"),
    [
        (AgentUnreachable("no reply"), ["TrainerJoin", "Leave", "closed"]),
        (LedgerUnavailable("its roster was not read"), ["TrainerJoin", "Leave", "closed"]),
        (KeyboardInterrupt(), ["TrainerJoin", "Leave", "closed"]),
        (UsageError("a rank of another job"), ["TrainerJoin", "closed"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_gives_up_joining_leaves_unless_the_seat_is_anothers(monkeypatch, why, asked):
    """The agent may seat it all the same: then others would wait for its part of each save."""
    links = []

    class Failing(ScriptedLink):
        def __init__(self, paths):
            super().__init__(paths)
            self.says["TrainerJoin"] = why
            links.append(self)

    monkeypatch.setattr(hook, "AgentLink", Failing)
    with pytest.raises(type(why)):
        hook.Checkpointer("train", agent="/nowhere", launch=Launch(0, 1, "t"))
    assert links[0].asked == asked


def outcome(verdict):
    attempt = r.Attempt("ledger", "1000.train", 1, 0, 5)
    return w.SaveState(r.Outcome(attempt=attempt, verdict=verdict, by="n0"))


def in_flight(loop):
    handle = hook.SaveHandle(5, _owner=loop, _ordinal=loop._loop.begin_save())
    loop._pending.append(handle)
    return handle


def test_a_ledger_that_is_away_for_a_while_does_not_end_a_handle(loop):
    """The agent restarted and has no ledger yet: the save goes on, and is told when it is back."""
    handle, says = in_flight(loop), loop._seat.link.says
    says["SaveStatus"] = LedgerUnavailable("not answered yet")
    assert not handle.done()
    assert loop.errors == 1
    says["SaveStatus"] = outcome(r.Verdict.COMMIT)
    assert handle.wait() == "committed"


def test_an_error_that_stays_ends_a_handle(loop):
    handle = in_flight(loop)
    loop._seat.link.says["SaveStatus"] = StaleGenerationError("generation 2 began")
    assert handle.done()
    assert handle.status == "failed"


def test_a_handle_in_flight_is_not_said_to_have_failed_by_a_close(loop, monkeypatch):
    """The save goes on in the agent, and may commit; who asks then asks too late."""
    monkeypatch.setattr(hook, "LAST_OUTCOME_S", 0.0)
    handle = in_flight(loop)
    loop._seat.link.says["SaveStatus"] = w.SaveState(None)
    loop.close()
    for ask in (handle.wait, handle.done):
        with pytest.raises(UsageError, match="step 5: in flight when this Checkpointer was closed"):
            ask()
    assert handle.status == "in flight"


def test_who_cannot_tell_of_a_failed_save_leaves_all_the_same(loop):
    """Else the rank counts as living for as long as its process does, which goes on without it."""
    loop._untold.append(w.SlotFailed(0, 5, "late"))
    loop._seat.link.says["SlotFailed"] = LedgerUnavailable("etcd does not answer")
    loop.close()
    assert loop._seat.link.asked[-2:] == ["Leave", "closed"]
    assert loop.errors == 1


def test_a_silent_agent_is_not_asked_for_long_by_a_close(loop):
    loop._untold.append(w.SlotFailed(0, 5, "late"))
    for kind in ("SlotFailed", "SaveStatus", "Leave"):
        loop._seat.link.says[kind] = AgentUnreachable("no reply")
    in_flight(loop)
    loop.close()
    assert loop._seat.link.asked[-1] == "closed"
