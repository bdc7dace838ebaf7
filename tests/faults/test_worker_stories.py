"""A worker that fails in the middle of a save: everybody is told soon, and the next save works."""

import pytest
from stage import ABORT, COMMIT, now, play

from p2pckpt.save import pipeline


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), MemoryError(), OSError(5, "EIO")])
def test_a_worker_that_raises_ends_the_attempt_with_its_reason(monkeypatch, error):
    """B049: the error of a background stage reaches all ranks, within seconds."""
    real, calls = pipeline.encode_rank, []

    def encode(rank, *rest):
        calls.append(rank)
        if len(calls) == 2:
            raise error
        return real(rank, *rest)

    monkeypatch.setattr(pipeline, "encode_rank", encode)

    ended = []

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        began = now()
        outcome = await launch.save(10)
        assert outcome.verdict is ABORT
        assert type(error).__name__ in outcome.reason
        assert now() - began < 5.0
        assert (await launch.save(20)).verdict is COMMIT
        ended.append(True)

    with pytest.raises(AssertionError, match=type(error).__name__):
        play(story)  # the stage tells of any exception that the product did not expect
    assert ended


def test_a_worker_that_never_ends_ends_the_attempt_at_its_deadline_and_is_named():
    """B049: n1 encodes for ever. All ranks are told within the attempt's time, and whose share it
    was; when n1 encodes again a save commits."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        stopped = stage.stop_encoder("n1")
        began = now()
        outcome = await launch.save(10)
        assert outcome.verdict is ABORT
        assert outcome.reason == "no outcome within 30 s; n1 has not sealed its share"
        assert now() - began < stage.config.attempt_timeout_s + 5.0
        stage.doors_of("n1", workers=stopped.workers)
        assert (await launch.save(20)).verdict is COMMIT
        for gate in stopped.gates.values():
            gate.set()
        assert (await launch.save(30)).verdict is COMMIT

    play(story)
