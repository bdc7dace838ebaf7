"""The flow between movers without UCX: frames, grants, fairness, and how to break the rules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt.backends import ucx_flow as flow
from p2pckpt.errors import FormatError, IntegrityError, PeerUnreachable, Refused
from p2pckpt.traffic import LEAST_SLICE_BYTES, SLICE_S, Pace, Traffic

NONCE = "0123456789abcdef" * 2
U64 = st.integers(0, 2**64 - 1)
LIMITS = flow.Limits(piece_bytes=100, open_pieces=8)


def outbound(length, limits=LIMITS):
    return flow.Outbound(1, NONCE, length, "peer:1", limits, 0.0)


def inbound(length, op=1, limits=LIMITS):
    return flow.Inbound(op, NONCE, length, limits)


def offered(length, op=1, limits=LIMITS):
    made = inbound(length, op, limits)
    made.offer(flow.Frame(flow.Kind.OFFER, NONCE, length=length), 0.0)
    return made


# -- frames ---------------------------------------------------------------------------------------


@given(
    st.sampled_from(flow.Kind),
    st.binary(min_size=16, max_size=16),
    U64,
    U64,
    U64,
    st.text("aé€", max_size=60),
)
def test_frame_round_trip(kind, nonce, offset, length, tag, text):
    frame = flow.Frame(kind, nonce.hex(), offset, length, tag, text)
    assert len(frame.pack()) == flow.FRAME_BYTES
    assert flow.Frame.unpack(frame.pack()) == frame


@given(st.text(max_size=400))
def test_long_text_is_cut_between_characters(text):
    read = flow.Frame.unpack(flow.Frame(flow.Kind.REFUSED, NONCE, text=text).pack())
    assert text.startswith(read.text)
    assert read.text == text or len(read.text.encode()) > 190


@given(st.integers(0, flow.FRAME_BYTES * 8 - 1))
def test_every_flipped_bit_is_noticed(bit):
    data = bytearray(flow.Frame(flow.Kind.GRANT, NONCE, 1, 2, 3, "why").pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        flow.Frame.unpack(bytes(data))


@given(st.binary(max_size=300))
def test_garbage_is_refused(data):
    with pytest.raises(FormatError):
        flow.Frame.unpack(data)


def test_unknown_version_names_both_numbers():
    data = bytearray(flow.Frame(flow.Kind.WAIT, NONCE).pack())
    data[4] = 9
    with pytest.raises(FormatError, match="version 9, this release reads 1"):
        flow.Frame.unpack(bytes(data))


# -- the whole flow -------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
    st.integers(3, 150),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_any_order_of_arrival_fills_every_region(
    lengths, piece_bytes, open_pieces, chance: random.Random
):
    """Receivers and senders run against each other, frames in order, pieces in any order."""
    limits = flow.Limits(piece_bytes=piece_bytes, open_pieces=open_pieces)
    window = flow.Window(limits)
    pairs = []
    for op, length in enumerate(lengths):
        sender, receiver = outbound(length, limits), inbound(length, op, limits)
        receiver.offer(sender.offer(), 0.0)
        window.join(receiver)
        pairs.append((sender, receiver, bytearray(length)))
    flying = []
    tags = iter(range(1, 10_000))
    while True:
        while (receiver := window.next()) is not None:
            sender, _, _ = pairs[receiver.op]
            piece = receiver.grant(next(tags), 0.0)
            heard = sender.hear(
                flow.Frame(flow.Kind.GRANT, NONCE, piece.offset, piece.length, piece.tag), 0.0
            )
            assert (heard.offset, heard.length, heard.tag) == (
                piece.offset,
                piece.length,
                piece.tag,
            )
            flying.append((receiver.op, piece))
        assert window.open == len(flying) <= open_pieces
        if not flying:
            break
        op, piece = flying.pop(chance.randrange(len(flying)))
        sender, receiver, region = pairs[op]
        for i in range(piece.offset, piece.offset + piece.length):
            region[i] += 1
        sender.left(0.0)
        assert receiver.landed(piece.tag) == piece.length
    for sender, receiver, region in pairs:
        assert receiver.whole
        assert not sender.ended
        assert sender.hear(flow.Frame(flow.Kind.DONE, NONCE), 0.0) is None
        assert sender.ended
        assert bytes(region) == b"\1" * len(region)


@settings(deadline=None)
@given(
    st.integers(1, 2_000_000),
    st.sampled_from([None, 1e5, 1e6, 1e7]),
    st.sampled_from([None, 1e5, 1e6, 1e7]),
)
def test_the_slower_side_sets_the_pace_and_what_waits_holds_no_place(length, ours, theirs):
    """A sender with one rate and a receiver with another, looked at every 10 ms; and beside them a
    transfer without any, for which the window always has room."""
    limits = flow.Limits(piece_bytes=1 << 18, open_pieces=2)
    paces = [Pace(), Pace()]
    for pace, rate in zip(paces, (ours, theirs), strict=True):
        pace.limit({Traffic.SAVE: rate} if rate else {})
    window = flow.Window(limits, paces[1])
    sender = flow.Outbound(1, NONCE, length, "peer:1", limits, 0.0, Traffic.SAVE)
    receiver = flow.Inbound(1, NONCE, length, limits, Traffic.SAVE)
    receiver.offer(sender.offer(paces[0].holds(Traffic.SAVE)), 0.0)
    window.join(receiver)
    now = 0.0
    for tag in range(1_000_000):
        if (ready := sender.more(paces[0], now)) is not None:
            receiver.hear(flow.Frame.unpack(ready.pack()), now)
        if (turn := window.next(now)) is not None:
            assert turn is receiver
            piece = receiver.grant(tag, now, paces[1].slice_bytes(Traffic.SAVE, 1 << 18))
            paces[1].spend(Traffic.SAVE, piece.length, now)
            what = (flow.Kind.GRANT, NONCE, piece.offset, piece.length, tag)
            sender.hear(flow.Frame(*what), now)
            sender.left(now)
            receiver.landed(tag)
        elif receiver.whole:
            break
        else:
            assert window.open == 0
            now += 0.01
            sender.check(now)
            if receiver.due(now):
                sender.hear(flow.Frame(flow.Kind.WAIT, NONCE), now)
    slower = min((rate for rate in (ours, theirs) if rate), default=0)
    if not slower:
        assert now == 0
        return
    needs_s = length / slower
    assert needs_s - 2 * SLICE_S - LEAST_SLICE_BYTES / slower <= now <= 1.1 * needs_s + 0.3


def test_a_sender_that_is_not_ready_and_falls_silent_is_gone():
    pace = Pace()
    pace.limit({Traffic.SAVE: 1e3})
    sender = flow.Outbound(1, NONCE, 1_000_000, "peer:1", LIMITS, 0.0, Traffic.SAVE)
    receiver = inbound(1_000_000)
    receiver.offer(sender.offer(bounded=True), 0.0)
    assert not receiver.wants
    receiver.hear(sender.more(pace, 0.0), 0.0)
    assert receiver.wants
    receiver.landed(receiver.grant(1, 0.0).tag)
    assert receiver.asked == LIMITS.piece_bytes
    again = [t for t in range(60) if (frame := sender.more(pace, t / 10)) and frame.offset]
    assert again == list(range(10, 60, 10)), "it says that it lives"
    receiver.ready = receiver.asked
    receiver.due(5.0)
    with pytest.raises(PeerUnreachable, match="silent"):
        receiver.due(5.1)
    whole = offered(1000)
    whole.due(100.0)  # one that was ready for all owes nothing


@pytest.mark.parametrize("offset", [0, 499, 1001, 2**63])
def test_ready_never_goes_back_nor_beyond_the_end(offset):
    receiver = inbound(1000)
    receiver.offer(flow.Frame(flow.Kind.OFFER, NONCE, 500, 1000), 0.0)
    assert receiver.ready == 500
    receiver.hear(flow.Frame(flow.Kind.READY, NONCE, 500), 0.0)
    with pytest.raises(FormatError, match=f"READY {offset}, was 500 of 1000"):
        receiver.hear(flow.Frame(flow.Kind.READY, NONCE, offset), 0.0)


def test_more_is_said_of_than_offered_and_a_flood_of_it():
    with pytest.raises(FormatError, match="1000 bytes without 1001"):
        inbound(1000).offer(flow.Frame(flow.Kind.OFFER, NONCE, 1001, 1000), 0.0)
    receiver = offered(1000)
    with pytest.raises(FormatError, match="flood"):
        [receiver.hear(flow.Frame(flow.Kind.READY, NONCE, 1000), 1.0) for _ in range(70)]


def test_grant_before_it_is_ready():
    sender = outbound(1000)
    sender.offer(bounded=True)
    with pytest.raises(FormatError, match="grants"):
        sender.hear(flow.Frame(flow.Kind.GRANT, NONCE, 0, 1, 5), 0.0)


def test_window_is_shared_evenly_and_one_transfer_gets_half_at_most():
    window = flow.Window(LIMITS)
    alone = offered(10_000, 0)
    window.join(alone)
    tags = iter(range(100))
    for _ in range(4):
        assert window.next() is alone
        alone.grant(next(tags), 0.0)
    assert window.next() is None
    others = [offered(10_000, op) for op in (1, 2)]
    for other in others:
        window.join(other)
    got = []
    while (turn := window.next()) is not None:
        turn.grant(next(tags), 0.0)
        got.append(turn.op)
    assert sorted(got) == [1, 1, 2, 2]
    window.leave(alone)
    window.leave(alone)
    assert window.open == 4
    assert window.next() in others


# -- the receiver's rules -------------------------------------------------------------------------


def test_another_length_is_an_integrity_error_with_both():
    with pytest.raises(IntegrityError, match="needs 1000 bytes, the sender has 999"):
        inbound(1000).offer(flow.Frame(flow.Kind.OFFER, NONCE, length=999), 0.0)


def test_a_second_sender_is_refused():
    receiver = offered(10)
    with pytest.raises(Refused, match="another connection"):
        receiver.offer(flow.Frame(flow.Kind.OFFER, NONCE, length=10), 0.0)


def test_overdue_piece_and_floor_rate():
    limits = flow.Limits(piece_bytes=1 << 30, open_pieces=1)
    receiver = offered(1 << 30, limits=limits)
    receiver.grant(7, 100.0)
    late_s = 100.0 + (1 << 30) / 50e6
    receiver.due(late_s - 0.01)
    with pytest.raises(PeerUnreachable, match="did not arrive within 21\\.5 s"):
        receiver.due(late_s + 0.01)
    assert limits.piece_deadline_s(8 << 20) == 2.0
    assert flow.Limits().piece_deadline_s(8 << 20) == 2.0
    slow = flow.Limits(open_pieces=8, floor_bytes_per_s=4 << 20)
    assert slow.piece_deadline_s(8 << 20) == 16.0, "seven others may be ahead of it"


def test_waiting_sender_hears_every_second():
    receiver = inbound(1000)
    assert not receiver.due(50.0)  # nobody is there to hear it
    receiver.offer(flow.Frame(flow.Kind.OFFER, NONCE, length=1000), 50.0)
    assert [t for t in range(500, 540) if receiver.due(t / 10)] == [510, 520, 530]


# -- the sender's rules ---------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 1001), (1, 10), (0, 2**63)])
def test_grant_outside_what_is_left_is_refused(offset, length):
    with pytest.raises(FormatError, match="grants"):
        outbound(1000).hear(flow.Frame(flow.Kind.GRANT, NONCE, offset, length, 5), 0.0)


@pytest.mark.parametrize("kind", [flow.Kind.OFFER, flow.Kind.DONE])
def test_frame_out_of_turn(kind):
    with pytest.raises(FormatError, match=f"{kind.name} at 0 of 1000"):
        outbound(1000).hear(flow.Frame(kind, NONCE), 0.0)


def test_frame_of_another_transfer():
    with pytest.raises(FormatError, match="another transfer"):
        outbound(1000).hear(flow.Frame(flow.Kind.WAIT, NONCE[::-1]), 0.0)


def test_refusal_carries_the_reason():
    with pytest.raises(Refused, match="peer:1: no such nonce"):
        outbound(1000).hear(flow.Frame(flow.Kind.REFUSED, NONCE, text="no such nonce"), 0.0)


def test_silence_and_flood():
    sender = outbound(1000)
    sender.hear(flow.Frame(flow.Kind.WAIT, NONCE), 3.0)
    sender.check(7.9)
    with pytest.raises(PeerUnreachable, match="silent for 5\\.1 s"):
        sender.check(8.1)
    with pytest.raises(FormatError, match="flood"):
        [sender.hear(flow.Frame(flow.Kind.WAIT, NONCE), 4.0) for _ in range(1000)]


def test_slow_but_honest_receiver_is_no_flood():
    sender = outbound(64 << 20, flow.Limits(piece_bytes=1 << 20))
    for i in range(64):
        for wait in range(3):
            sender.hear(flow.Frame(flow.Kind.WAIT, NONCE), 3.0 * i + wait)
        sender.hear(flow.Frame(flow.Kind.GRANT, NONCE, i << 20, 1 << 20, i), 3.0 * i)
