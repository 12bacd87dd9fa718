"""The peak that model FLOPs utilization is a share of."""

from dataclasses import replace

import pytest
import torch

from megarl.config.load import load_config
from megarl.plan.seconds import find_peak_tflops, measure_cpu_tflops


@pytest.mark.parametrize(("placement", "num_gpus"), [("apart", 3), ("split", 2), ("colocated", 2)])
def test_the_peak_of_gpus_is_that_of_the_data_sheet_for_each_that_policy_or_critic_has(placement, num_gpus):
    keys = ["policy.parallel.num_processes=2", "model=qwen3_0_6b", "cluster=h100x8", f"cluster.placement={placement}"]
    config = load_config(["algo=vapo", *keys])
    peak = find_peak_tflops(config)
    assert peak == pytest.approx(num_gpus * config.cluster.hardware.bf16_tflops)
    unknown = replace(config.cluster, hardware=replace(config.cluster.hardware, gpu=None))
    assert find_peak_tflops(replace(config, cluster=unknown)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_peak_is_measured_with_the_threads_as_they_were():
    before = torch.get_num_threads()
    assert find_peak_tflops(load_config([])) > 0
    assert measure_cpu_tflops(torch.float32) > 0
    assert torch.get_num_threads() == before
