"""Speed and memory of an iteration, by verl's names where they mean the same."""

from collections.abc import Mapping

import psutil

from megarl.types import Metrics

STARTS = ("time/start", "time/load")
"""Phases that belong to a start and not to an iteration"""


def measure_speed(metrics: Metrics, times: Mapping[str, float]) -> Metrics:
    """perf/* of an iteration with responses. times: the seconds of its phases. Memory is that of now."""
    seconds = sum(value for name, value in times.items() if name not in STARTS)
    if "length/sum" not in metrics or seconds <= 0:
        return {}
    return {
        "perf/time_per_step": seconds,
        "perf/tokens_per_second": metrics["length/sum"] / seconds,
        "perf/samples_per_second": metrics["length/sum"] / metrics["length/mean"] / seconds,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
