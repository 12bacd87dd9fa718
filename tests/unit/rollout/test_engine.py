"""What the engine refuses before any server is asked."""

import json
import socket
import threading

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema.rollout import RolloutConfig
from megarl.rollout.client import ConnectionLostError
from megarl.rollout.engine import MAX_ATTEMPTS, Request, SGLangEngine, compute_sampling_seed
from megarl.rollout.served_model import load_generation_spec
from megarl.types import Prompt


def write(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_the_generation_config_decides_the_stop_tokens(tmp_path):
    write(tmp_path, {"vocab_size": 50, "eos_token_id": 2})
    assert load_generation_spec(tmp_path).stop_token_ids == (2,)
    write(tmp_path, {"vocab_size": 50, "eos_token_id": 2}, {"eos_token_id": [3, 4]})
    spec = load_generation_spec(tmp_path)
    assert (spec.vocab_size, spec.stop_token_ids) == (50, (3, 4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token_id": 2}, r"config.json: vocab_size is None"),
        ({"vocab_size": 50}, "no eos_token_id"),
        ({"vocab_size": 50, "eos_token_id": 50}, "outside the vocabulary of 50"),
    ],
)
def test_a_checkpoint_that_cannot_end_responses_is_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        load_generation_spec(write(tmp_path, config))


def test_every_response_of_every_call_has_a_seed_of_its_own():
    # sha256sum of the text 7/iteration-1/round-1/0/3 begins with these 16 digits.
    assert compute_sampling_seed("7/iteration-1/round-1/0/3") == 0x916255DABB0A9226 >> 1
    requests = [Request([], 3, {"top_k": 5}, False, key) for key in ("7/a", "8/a", "7/b")]
    params = [request.build_params(row, k) for request in requests for row in range(4) for k in range(3)]
    assert params == [request.build_params(row, k) for request in requests for row in range(4) for k in range(3)]
    assert all(each["top_k"] == 5 for each in params)
    seeds = [each["sampling_seed"] for each in params]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert Request([], 3, {"top_k": 5}, False, None).build_params(0, 0) == {"top_k": 5}


def test_an_unreachable_server_is_tried_a_bounded_number_of_times(tmp_path, monkeypatch):
    """The listener accepts and hangs up: every connection is one lost request."""
    write(tmp_path, {"vocab_size": 50, "eos_token_id": 2})
    monkeypatch.setattr("megarl.rollout.engine.ATTEMPT_PAUSE_S", 0.1)
    checks = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(10)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = SGLangEngine([url], tmp_path, RolloutConfig(), check_processes=lambda: checks.append(1))
        accepted = []

        def hang_up():
            for _ in range(MAX_ATTEMPTS):
                connection, _ = listener.accept()
                accepted.append(connection.recv(65536))
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ConnectionLostError, match=f"{url}/generate"):
            engine.generate([Prompt("p", "", (5,), "")], num_responses=1, temperature=1.0)
        thread.join()
    assert len(accepted) == MAX_ATTEMPTS
    assert len(checks) > 1  # asked again: a process ends a moment after its connections
