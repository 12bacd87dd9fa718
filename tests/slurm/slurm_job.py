"""One job of the tests' Slurm, and what is left of it."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from mini_slurm import MiniSlurm, wait_until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Job:
    slurm: MiniSlurm
    number: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / f"slurm_{self.number}"

    @property
    def output(self) -> str:
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self, name: str) -> str:
        """A value that `scontrol show job` gives."""
        words = self.slurm.call("scontrol", "show", "job", self.number).stdout.split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))

    def wait_for(self, text: str, deadline_s: float = 240.0) -> None:
        """Until the job has printed it. Raises AssertionError where it ends before."""

        def is_there() -> bool:
            if text in self.output:
                return True
            state = self.show("JobState")
            if state in ENDED:
                assert text in self.output, f"{text!r} never came; the job is {state}:\n{self.explain()}"
            return False

        wait_until(is_there, deadline_s, f"{text!r} of job {self.number}", self.explain)

    def wait_state(self, *states: str, deadline_s: float = 240.0) -> None:
        """Until the job is in one of these. Raises AssertionError where it has ended otherwise."""

        def is_so() -> bool:
            state = self.show("JobState")
            assert state in states or state not in ENDED, f"{state}, not {states}:\n{self.output}"
            return state in states

        wait_until(is_so, deadline_s, f"job {self.number} {states}", self.explain)

    def start_again(self) -> None:
        """Slurm would keep a requeued job for two minutes.

        A node takes a start for one that was cancelled where both are of the same second ("Job already killed, do not
        launch batch job"), and Slurm then calls the job failed.
        """
        time.sleep(1.1)
        self.slurm.call("scontrol", "update", f"jobid={self.number}", "StartTime=now")

    def find_processes(self) -> dict[int, dict[str, str]]:
        """The environments of the job's processes, by process id; Slurm's own daemons are not among them."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("SLURM_JOB_ID") == self.number:
                found[process.pid] = environment
        return found

    def find_left(self) -> list[str]:
        """Processes and files of the job that are still there."""
        processes = []
        for pid in self.find_processes():
            try:
                processes.append(f"{pid} {' '.join(psutil.Process(pid).cmdline())[:200]}")
            except psutil.Error:
                continue
        scratch = [*Path("/tmp").glob(f"megarl-ray-{self.number}-*"), *self.run_dir.glob(".slurm")]
        return [*processes, *map(str, scratch)]

    def expect_nothing_left(self, deadline_s: float = 120.0) -> None:
        """Slurm calls a job ended when it has asked it to."""
        wait_until(lambda: not self.find_left(), deadline_s, "a clean end", lambda: "\n".join(self.find_left()))

    def wait_checkpoint(self) -> None:
        """Until the newest one is of a finished iteration."""
        latest = self.run_dir / "checkpoints" / "latest"
        wait_until(lambda: latest.exists() and "000000" not in latest.read_text(), 60, "a checkpoint", self.explain)

    def list_iterations(self) -> list[int]:
        """Of the lines of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line)["iteration"] for line in path.read_text().splitlines()] if path.exists() else []

    def explain(self) -> str:
        logs = [*self.run_dir.glob("logs/slurm/*"), *self.run_dir.glob("logs/*.log")]
        ends = [f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs if log.is_file()]
        return "\n".join([self.output, *ends, self.slurm.read_logs(5)])
