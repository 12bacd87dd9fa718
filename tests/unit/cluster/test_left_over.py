"""What killed drivers leave in /tmp and /dev/shm is removed by the next one."""

import os
import subprocess
import sys
from pathlib import Path

from megarl.cluster.opened import remove_left_over


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [f"megarl-{ended.pid}-abc_1", f"megarl-sync-{ended.pid}-x2", f"megarl-sglang-{ended.pid}-z"]
    kept = [
        f"megarl-{os.getpid()}-abc",
        f"megarl-sync-{os.getpid()}-y",
        "megarl-sglang-abc",
        "megarl-sync-abc",
        "other",
    ]
    for name in (*gone, *kept):
        (tmp_path / name / "below").mkdir(parents=True)
    remove_left_over([tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
