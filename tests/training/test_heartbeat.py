"""When silence is a sign: learned from the longest one, never before the floor, and not while something else watches."""

from __future__ import annotations

import os

import pytest

from training_container import heartbeat as module
from training_container.heartbeat import LOADING_S, Heartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """time.monotonic() of both sides: the list's one number."""
    now_s = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    return now_s


def beats(heartbeat: Heartbeat, clock: list[float], *after_s: float) -> None:
    for seconds in after_s:
        clock[0] += seconds
        heartbeat.beat()


def test_a_worker_that_loads_has_an_hour(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    clock[0] += LOADING_S - 1
    assert heartbeat.hung_for_s(1000.0, floor_s=1.0) is None
    clock[0] += 2
    assert heartbeat.hung_for_s(1000.0, floor_s=1.0) == LOADING_S + 1


def test_silence_counts_from_the_floor_or_from_ten_times_the_longest_one(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    beats(heartbeat, clock, 5, 2, 8, 3)
    for silent_s, floor_s, hung in ((79, 10, None), (81, 10, 81), (81, 100, None), (101, 100, 101)):
        clock[0] += silent_s
        assert heartbeat.hung_for_s(1000.0, floor_s) == hung
        clock[0] -= silent_s


def test_the_first_beat_ends_loading_and_is_no_silence_to_learn_from(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    beats(heartbeat, clock, 900)
    clock[0] += 11
    assert heartbeat.hung_for_s(1000.0, floor_s=10.0) == 11


def test_what_watches_over_itself_is_not_watched_and_teaches_nothing(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    beats(heartbeat, clock, 1, 1)
    with heartbeat.resting():
        clock[0] += 5000
        assert heartbeat.hung_for_s(1000.0, floor_s=10.0) is None
    clock[0] += 11
    assert heartbeat.hung_for_s(1000.0, floor_s=10.0) == 11


def test_a_forked_workers_beats_are_seen(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    pid = os.fork()
    if pid == 0:
        heartbeat.beat()
        os._exit(0)
    os.waitpid(pid, 0)
    clock[0] += 20
    assert heartbeat.hung_for_s(0.0, floor_s=10.0) == 20
