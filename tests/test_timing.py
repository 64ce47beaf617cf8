"""timing.py without a GPU: what a captured graph keeps alive. The graph itself is only numbers here."""

import gc
import weakref
from contextlib import nullcontext

from numba_verify import timing


class Plan:
    """Something whose memory a graph works on."""

    def run(self, stream):
        assert stream


def test_a_replay_keeps_what_its_graph_works_on(monkeypatch):
    made = []

    def call(name, *_):
        made.append(name)
        return 7

    monkeypatch.setattr(timing.driver, "call", call)
    monkeypatch.setattr(timing.driver, "context", lambda ordinal: nullcontext())
    plan = Plan()
    replay, plan = timing.Replay(0, [plan.run]), weakref.ref(plan)
    gc.collect()
    assert plan() is not None and "cuGraphInstantiate" in made
    replay.close()
    gc.collect()
    assert plan() is None and made[-1] == "cuStreamDestroy"
