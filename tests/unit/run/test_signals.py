"""A signal becomes one exception, and a second one does not disturb the clean-up."""

import os
import signal

import pytest

from megarl.run.signals import Stopped, deferring_stops, stopping_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_raises_stopped_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, stopping_on_signals():
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


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
            os.kill(os.getpid(), signal.SIGTERM)
            with deferring_stops():
                steps.append("inner")
            steps.append("outer")
        steps.append("never")

    with pytest.raises(Stopped) as caught, stopping_on_signals():
        work()
    assert caught.value.exit_code == 143
    assert steps == ["inner", "outer"]
    assert "SIGTERM: finishing the current update first" in capfd.readouterr().err


def test_without_a_signal_a_deferral_changes_nothing_and_signals_are_raised_again_after_it():
    with stopping_on_signals():
        with deferring_stops():
            pass
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)


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
