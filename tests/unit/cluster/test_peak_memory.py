"""Peak memory of processes."""

import subprocess
import sys

import numpy as np

from megarl.cluster.watch import find_own_peak, find_peak_of_tree

SIZE = 200 * 2**20


def test_the_peak_stays_when_the_memory_is_given_back():
    before = find_own_peak()
    array = np.ones(before + SIZE, dtype=np.uint8)
    del array
    assert find_own_peak() >= before + SIZE


def test_a_tree_has_the_memory_of_what_its_process_has_started():
    child = f"import sys; x = b'1' * {SIZE}; print('ready', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert find_peak_of_tree(process.pid) >= SIZE
        process.stdin.close()
    assert find_peak_of_tree(process.pid) == 0
