"""What reaches the terminal amid other people's output, and what signals do."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from megarl.config.schema.root import LoggerConfig
from megarl.report.report import build_report
from megarl.signals import STOPPING_SIGNALS, Stopped, deferring_stops, is_library, show_warnings, stopping_on_signals

NOISE = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from megarl.signals import capturing_output, get_error_descriptor, get_terminal
print("before")
try:
    with capturing_output(Path(sys.argv[1]) / "logs" / "driver.log"):
        print("print of a library")
        os.write(2, b"C++ of a library\\n")
        subprocess.run(["echo", "child of a library"])
        logging.getLogger("somebody").info("log of a library")
        logging.getLogger("httpx").info("a request")
        warnings.warn("warning of a library")
        print("ours", file=get_terminal())
        os.write(get_error_descriptor(), b"our error\\n")
        {body}
except ValueError as error:
    print("caught", error)
print("after")
logging.getLogger("somebody").warning("warning after")
"""


def run_noisy(folder: Path, body: str = "pass") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", NOISE.replace("{body}", body), str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_only_our_own_lines_reach_the_terminal_and_the_rest_is_in_the_log(tmp_path: Path) -> None:
    done = run_noisy(tmp_path)
    assert done.stdout.splitlines() == ["before", "ours", "after"]
    assert done.stderr.splitlines() == ["our error", "warning after"]
    log = (tmp_path / "logs" / "driver.log").read_text()
    for who in ("print", "C++", "child", "log", "warning"):
        assert f"{who} of a library" in log
    assert "a request" not in log
    assert "ours" not in log


def test_after_an_error_the_terminal_is_as_before_and_a_crash_shows_where_it_was(tmp_path: Path) -> None:
    done = run_noisy(tmp_path, "raise ValueError('of ours')")
    assert done.stdout.splitlines() == ["before", "ours", "caught of ours", "after"]
    done = run_noisy(tmp_path, "os.abort()")
    assert done.returncode < 0
    assert "Fatal Python error: Aborted" in done.stderr
    assert "library" not in done.stderr


def test_our_warnings_and_the_users_are_lines_of_the_report_and_those_of_libraries_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = build_report(LoggerConfig(tensorboard=False), tmp_path, 1, stream=sys.stdout)
    with show_warnings(report.message):
        warnings.warn_explicit("of a user", UserWarning, str(tmp_path / "my_reward.py"), 1)
        warnings.warn_explicit("of ours", RuntimeWarning, sys.modules["megarl.report.report"].__file__ or "", 1)
        warnings.warn_explicit("of torch", UserWarning, sys.modules["torch"].__file__ or "", 1)
    report.close()
    for library in ("json", "numpy"):
        assert is_library(__import__(library).__file__)
    shown = capsys.readouterr().out
    assert "warning: of a user\n" in shown
    assert "warning: of ours\n" in shown
    assert "of torch" not in shown


@pytest.mark.parametrize("number", STOPPING_SIGNALS)
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_raises_stopped_even_where_the_shell_ignores_it_and_the_handlers_come_back(number, before):
    has_nohup = (number, before) == (signal.SIGHUP, signal.SIG_IGN)
    signal.signal(number, before)
    with contextlib.nullcontext() if has_nohup else pytest.raises(Stopped) as caught, stopping_on_signals():
        os.kill(os.getpid(), number)
    assert has_nohup or caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_signal_is_ignored_while_the_first_one_is_handled():
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(Stopped, match="SIGTERM"))
        stack.enter_context(stopping_on_signals())
        stack.callback(os.kill, os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)


def test_within_a_deferral_a_signal_waits_for_its_end_and_then_raises(capfd):
    steps = []

    def work():
        with deferring_stops():
            pass
        with deferring_stops():
            os.kill(os.getpid(), signal.SIGTERM)
            with deferring_stops():
                steps.append("inner")
            steps.append("outer")
        steps.append("never")

    with pytest.raises(Stopped, match="SIGTERM"), stopping_on_signals():
        work()
    assert steps == ["inner", "outer"]
    assert "SIGTERM: finishing the current update first" in capfd.readouterr().err


def test_a_signal_that_c_code_has_turned_into_its_own_error_is_still_the_signal():
    """As CPython does where a C function returns a result although a handler has raised."""

    def wait():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Stopped as stopped:
            raise SystemError("<cyfunction CoreWorker.wait> returned a result with an exception set") from stopped

    with pytest.raises(Stopped), stopping_on_signals():
        wait()
    with pytest.raises(SystemError, match="another"), stopping_on_signals():
        raise SystemError("another")


def test_a_signal_within_a_destructor_ends_the_run_after_it():
    class Ended:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    hook = sys.unraisablehook

    def end_and_wait():
        Ended()
        time.sleep(30)

    with pytest.raises(Stopped, match="SIGTERM"), stopping_on_signals():
        end_and_wait()
    assert sys.unraisablehook is hook
