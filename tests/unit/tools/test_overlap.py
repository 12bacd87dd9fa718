"""The lengths of responses in tools/bench/overlap.py."""

from types import ModuleType, SimpleNamespace

import pytest
from tool_loading import load_tool


@pytest.fixture(scope="module")
def overlap() -> ModuleType:
    return load_tool("bench/overlap.py")


def test_lengths_vary_by_their_spread_and_follow_from_the_name_alone(overlap):
    class Engine:
        def _build_params(self, request):
            return {"temperature": 1.0, "max_new_tokens": 640}

    engine = Engine()
    overlap.vary_lengths(engine, 640)
    requests = [SimpleNamespace(name=f"group-{i}/0/0") for i in range(400)]
    lengths = [engine._build_params(request)["max_new_tokens"] for request in requests]
    assert lengths == [engine._build_params(request)["max_new_tokens"] for request in requests]
    assert 32 <= min(lengths) < 36
    assert 600 < max(lengths) <= 640
    # Half of them on each side of the geometric mean.
    assert 160 < sum(length < 640 / 20**0.5 for length in lengths) < 240
