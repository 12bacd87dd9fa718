"""The CPU stand-ins, in a process that has them on its path as a server has."""

import os
import subprocess
import sys

import pytest

from megarl.cpu.serving import STANDINS


def run(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(STANDINS)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_new_cache_slots_are_written_into_each_requests_row():
    out = run("""
import torch, sgl_kernel
table = torch.zeros(4, 6, dtype=torch.int32)
start, end = torch.tensor([1, 0, 5]), torch.tensor([3, 1, 5])
slots = torch.tensor([7, 8, 9])
sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor([2, 0, 1]), table, start, end, slots, 6)
print(table.tolist())
""")
    assert out == "[[9, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 8, 0, 0, 0], [0, 0, 0, 0, 0, 0]]"


@pytest.mark.parametrize(
    "call",
    [
        "import sgl_kernel; sgl_kernel.silu_and_mul(1)",
        "from sgl_kernel.flash_attn import flash_attn_varlen_func as f; f()",
        "import torchvision; torchvision.transforms.Resize(3)",
        "import triton; triton.jit(lambda x: x)[(1,)](2)",
        "import triton.language as tl; tl.load(0)",
    ],
)
def test_a_name_without_a_body_raises_when_called(call):
    out = run(f"""
try:
    {call}
except NotImplementedError as error:
    print(error)
""")
    assert "megarl" in out
    assert "stand-in" in out
