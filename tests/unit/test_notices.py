"""SIGTERM as a flag: taken on request, passed on to who was there before, and given back."""

import os
import signal
import threading

import pytest

from p2pckpt.errors import UsageError
from p2pckpt.notices import Notice


@pytest.fixture
def before():
    """A handler of somebody else's; it counts."""
    heard = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, old)


def test_a_notice_is_remembered_and_passed_on(before):
    notice = Notice()
    assert not notice.given
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.given
    assert before == [signal.SIGTERM]
    notice.restore()


def test_the_handler_before_is_put_back(before):
    was = signal.getsignal(signal.SIGTERM)
    notice = Notice()
    assert signal.getsignal(signal.SIGTERM) != was
    notice.restore()
    assert signal.getsignal(signal.SIGTERM) == was


def test_a_handler_that_came_later_stays(before):
    notice = Notice()

    def later(number, frame):
        pass

    signal.signal(signal.SIGTERM, later)
    notice.restore()
    assert signal.getsignal(signal.SIGTERM) is later


def test_without_a_python_handler_before_the_process_survives_and_the_default_comes_back():
    old = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        notice = Notice()
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.given
        notice.restore()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, old)


def test_outside_of_the_main_thread_it_is_refused():
    found = []

    def elsewhere():
        try:
            Notice()
        except UsageError as e:
            found.append(str(e))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert "needs the main thread" in found[0]
