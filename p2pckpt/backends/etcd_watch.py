"""A watch that outlives its connection and notices when nobody is there any more.

An etcd watch is a stream, and a stream can fall silent in two ways: nothing changes, or the member
is frozen. So while we wait, the member is asked for progress once a second; when no answer of any
kind comes for three seconds the stream is opened again on another member, from the revision after
the last one that was handed on. No revision is asked for before all its changes were handed on, and
none after: nothing is lost and nothing comes twice.

Contract: `EtcdWatch` yields batches of whole revisions, in order. It reconnects for as long as it
takes, and ends only with Compacted (list again), with ConfigError when etcd refuses the watch, or
with LedgerUnavailable when the client was closed.

Two things are left alone on purpose. The revision of a progress answer never moves the watch on:
before 3.4.25 and 3.5.8 it could run ahead of changes still to come (etcd-io/etcd#15220). And no
fragments are asked for, so that an answer always holds whole revisions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from pyetcd.etcdrpc import rpc_pb2 as pb

from p2pckpt.errors import Compacted, ConfigError, LedgerUnavailable
from p2pckpt.ports import Change

PROGRESS_S = 1.0
"""How long a stream may be quiet before the member is asked for progress, and asked again."""
SILENT_S = 3.0
"""How long all answers may be missing before the stream is given up."""
_LOOK_AFTER = 0.25
"""Of PROGRESS_S: how often it is looked whether a stream is quiet."""
_PAUSE_S = 0.05
"""A member that ends every stream at once must not make us spin."""
_PUT = 0


class _Lost(Exception):
    """The stream is no good any more; open another one."""


class Calls(Protocol):
    """What a watch needs of `etcd_calls.EtcdCalls`."""

    rpc_deadline_s: float

    @property
    def closed(self) -> bool:
        """The client was closed."""
        ...

    def cut_short(self) -> bool:
        """A CancelledError comes from closing the client."""
        ...

    async def reach(self, what: str) -> Any:
        """A member with a connection, however long it takes."""
        ...

    def move_on(self, member: Any) -> None:
        """Prefer another member."""
        ...

    def check_cluster(self, header: Any, member: Any) -> None:
        """Raises LedgerForgot for an answer of another cluster."""
        ...


class EtcdWatch:
    """An async iterator over batches of changes of the keys in `span`; see ports.Ledger.watch.

    A cancelled wait loses nothing: the next one goes on from the same revision on a new stream.
    Who has seen enough may just drop it: its stream ends soon after.
    """

    def __init__(
        self, calls: Calls, what: str, span: tuple[bytes, bytes], from_revision: int
    ) -> None:
        self._calls = calls
        self._what = what
        self._span = span
        self._next = from_revision
        self._stream: _Stream | None = None
        self._was_lost = False
        self._ended = False

    def __del__(self) -> None:
        if self._stream is not None:  # its timer would keep it, and etcd serving it, for ever
            self._stream.drop()

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> Sequence[Change]:
        while not self._ended:
            try:
                if self._stream is None:
                    member = await self._calls.reach(self._what)
                    self._stream = _Stream(self._calls, member)
                    await self._stream.begin(self._span, self._next)
                    if self._was_lost:
                        self._was_lost = False
                        return ()
                answer = await self._stream.next()
                if answer.canceled:
                    raise _why(self._what, self._next, answer)
                batch = _batch(answer, self._next)
            except _Lost:
                self._was_lost = True
                await self._end_stream(move_on=True)
                await asyncio.sleep(_PAUSE_S)
            except asyncio.CancelledError:
                await self._end_stream()
                raise
            except BaseException:
                await self.aclose()
                raise
            else:
                if batch:
                    self._next = batch[-1].revision + 1
                    return batch
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the watch. Again is fine."""
        self._ended = True
        await self._end_stream()

    async def _end_stream(self, move_on: bool = False) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            if move_on:
                self._calls.move_on(stream.member)
            await stream.end()


def _batch(answer: Any, following: int) -> list[Change]:
    """The changes of one answer, without those that were handed on before."""
    return [
        Change(
            key=event.kv.key.decode(),
            value=event.kv.value if event.type == _PUT else None,
            revision=event.kv.mod_revision,
            create_revision=event.kv.create_revision,
        )
        for event in answer.events
        if event.kv.mod_revision >= following
    ]


def _why(what: str, following: int, answer: Any) -> Exception:
    """Why the member cancelled the watch."""
    if answer.compact_revision:
        return Compacted(
            f"{what}: changes from revision {following} on are gone, "
            f"etcd is compacted up to {answer.compact_revision}"
        )
    if "permission denied" in answer.cancel_reason.lower():
        return ConfigError(f"{what}: etcd refuses: {answer.cancel_reason}")
    return _Lost(answer.cancel_reason)


class _Stream:
    """One stream of one member, with one watch on it.

    Whoever waits reads the stream itself; a timer looks after it, asks for progress, and cancels
    the stream when that is not answered. (A task for each read costs as much as the read.)
    """

    def __init__(self, calls: Calls, member: Any) -> None:
        self._calls = calls
        self.member = member
        self._call = member.watch.Watch(metadata=(("hasleader", "true"),))
        self.waiting_since: float | None = None
        self._asked_at = -SILENT_S
        self._asking: asyncio.Task[None] | None = None
        self._given_up = ""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PROGRESS_S * _LOOK_AFTER, self._look)

    async def begin(self, span: tuple[bytes, bytes], revision: int) -> None:
        """Ask for changes from a revision on."""
        created = pb.WatchCreateRequest(key=span[0], range_end=span[1], start_revision=revision)
        await self._write(pb.WatchRequest(create_request=created))

    async def next(self) -> Any:
        """The next answer, of whatever kind. Raises _Lost after SILENT_S without one.

        The member is heard only while somebody waits here, so its silence counts from here.
        """
        self.waiting_since = asyncio.get_running_loop().time()
        try:
            answer = await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._lost(self._given_up or "cancelled") from None
        except grpc.aio.AioRpcError as error:
            raise self._lost(f"{error.code().name} {error.details()}") from None
        finally:
            self.waiting_since = None
        if answer is grpc.aio.EOF:
            raise self._lost("ended")
        self._calls.check_cluster(answer.header, self.member)
        return answer

    def _look(self) -> None:
        loop = self._loop
        now = loop.time()
        since = now if self.waiting_since is None else self.waiting_since
        if now - since > SILENT_S:
            self._give_up("silent")
            return
        asks = self._asking is not None and not self._asking.done()
        if now - max(since, self._asked_at) >= PROGRESS_S and not asks:
            self._asked_at = now
            self._asking = loop.create_task(self._ask(), name="watch progress")
        self._timer = loop.call_later(PROGRESS_S * _LOOK_AFTER, self._look)

    async def _ask(self) -> None:
        try:
            await self._write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
        except (_Lost, LedgerUnavailable) as e:
            self._give_up(str(e))

    def _give_up(self, why: str) -> None:
        """Whoever waits is told that the stream is lost."""
        self._given_up = why
        self._call.cancel()

    async def _write(self, request: Any) -> None:
        # Not `wait_for`: in Python 3.11 it loses a cancellation that meets the write's end.
        try:
            async with asyncio.timeout(self._calls.rpc_deadline_s):
                await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            raise self._lost(type(error).__name__) from None
        except asyncio.CancelledError:
            if not self._calls.cut_short():
                raise
            raise self._lost("closed") from None

    def _lost(self, why: str) -> Exception:
        if self._calls.closed:
            return LedgerUnavailable("watch: the etcd client was closed meanwhile")
        return _Lost(why)

    def drop(self) -> None:
        """End it soon, from any thread: who collects garbage may be one of a pool."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all that ran on it
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._timer.cancel()
        self._call.cancel()
        if self._asking is not None:
            self._asking.cancel()

    async def end(self) -> None:
        """Cancel the stream, so that no task and no timer is left behind."""
        self._cancel()
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=self._calls.rpc_deadline_s)
