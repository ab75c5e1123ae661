"""The lock around the engine: exclusive, reentrant, and handed to whoever waits."""

from __future__ import annotations

import threading
import time

from pagedkv.engine.turns import Turns


def test_one_at_a_time_and_again_for_the_holder() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with turns, turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (inside, most) == ([0], [1])


def test_a_loop_that_takes_it_again_and_again_lets_others_in() -> None:
    turns, stop, loops = Turns(), threading.Event(), [0]

    def loop() -> None:
        while not stop.is_set():
            with turns:
                loops[0] += 1
                time.sleep(0.002)

    thread = threading.Thread(target=loop)
    thread.start()
    while loops[0] < 3:
        time.sleep(0.001)
    waited = []
    for _ in range(5):
        before = loops[0]
        with turns:
            waited.append(loops[0] - before)
    stop.set()
    thread.join(10)
    assert max(waited) <= 2, "the turn that runs, and at most one that was about to begin"
