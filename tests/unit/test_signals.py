"""A signal becomes one exception, and a second one does not disturb the clean-up."""

import os
import signal

import pytest

from megarl.signals import Stopped, stopping_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
