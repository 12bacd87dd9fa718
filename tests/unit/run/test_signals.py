"""A signal becomes one exception, and a second one does not disturb the clean-up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.run.process import STOPPING_SIGNALS, Stopped, deferring_stops, stopping_on_signals


@pytest.mark.parametrize("number", STOPPING_SIGNALS)
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_raises_stopped_even_where_the_shell_ignores_it_and_the_handlers_come_back(number, before):
    own = signal.signal(number, before)
    try:
        if (number, before) == (signal.SIGHUP, signal.SIG_IGN):  # nohup
            with stopping_on_signals():
                os.kill(os.getpid(), number)
        else:
            with pytest.raises(Stopped) as caught, stopping_on_signals():
                os.kill(os.getpid(), number)
            assert caught.value.exit_code == 128 + number
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, own)


def test_a_second_signal_is_ignored_while_the_first_one_is_handled():
    steps = []

    def stop_twice():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("cleaned")

    with pytest.raises(Stopped), stopping_on_signals():
        stop_twice()
    assert steps == ["cleaned"]


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


def test_what_tests_start_does_not_ignore_what_the_shell_ignores():
    numbers = [*map(int, (*STOPPING_SIGNALS, signal.SIGQUIT))]
    code = f"import conftest, signal; print([n for n in {numbers} if signal.getsignal(n) is signal.SIG_IGN and n != 1])"
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT QUIT TERM USR1 USR2 XCPU; exec "$0" -c "$1"', sys.executable, code],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
