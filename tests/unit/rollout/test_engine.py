"""What the engine refuses before any server is asked."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from data_cases import build_char_tokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import DeadlineError, Sampling, Truncation, TurnRequest
from megarl.rollout.client import run_in_parallel, wait_left_over
from megarl.rollout.engine import SGLangEngine, compute_sampling_seed
from megarl.rollout.server import find_stop_tokens, load_generation_spec

SAMPLING = Sampling(1.0)


def write(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_the_stop_tokens_are_those_of_both_files_as_servers_have_them(tmp_path):
    write(tmp_path, {"vocab_size": 50, "eos_token_id": 2})
    assert load_generation_spec(tmp_path).stop_token_ids == (2,)
    write(tmp_path, {"vocab_size": 50, "eos_token_id": 2}, {"eos_token_id": [3, 4]})
    spec = load_generation_spec(tmp_path)
    assert (spec.vocab_size, spec.stop_token_ids) == (50, (3, 4, 2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token_id": 2}, r"config.json: vocab_size is None"),
        ({"vocab_size": 50}, "no eos_token_id"),
        ({"vocab_size": 50, "eos_token_id": 50}, "one or several of 50 tokens"),
        ({"vocab_size": 50, "eos_token_id": True}, r"config\.json: eos_token_id is True"),
        ({"vocab_size": 50, "eos_token_id": [2, -1]}, "one or several of 50 tokens"),
    ],
)
def test_a_checkpoint_that_cannot_end_responses_is_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        load_generation_spec(write(tmp_path, config))


def test_a_turns_seed_follows_from_the_runs_seed_and_its_name(tmp_path):
    # sha256sum of the text 7/iteration-1/round-1/0/3 begins with these 16 digits.
    assert compute_sampling_seed("7/iteration-1/round-1/0/3") == 0x916255DABB0A9226 >> 1
    write(tmp_path, {"vocab_size": 50, "eos_token_id": 2})
    engines = [SGLangEngine(["http://127.0.0.1:1"], tmp_path, RolloutConfig(), seed=seed, top_k=5) for seed in (7, 8)]
    ids = np.array([5], dtype=np.int32)
    names = [f"{key}/{row}/{k}" for key in "ab" for row in range(4) for k in range(3)]
    params = [engine._build_params(TurnRequest(ids, 3, SAMPLING, 0, name)) for engine in engines for name in names]
    assert params == [
        engine._build_params(TurnRequest(ids, 3, SAMPLING, 0, name)) for engine in engines for name in names
    ]
    assert all(each["top_k"] == 5 for each in params)
    own = engines[0]._build_params(TurnRequest(ids, 3, Sampling(1.0, truncation=Truncation(top_p=0.8)), 0))
    assert (own["top_p"], own["top_k"]) == (0.8, -1)
    seeds = [each["sampling_seed"] for each in params]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert "sampling_seed" not in engines[0]._build_params(TurnRequest(ids, 3, SAMPLING, 0))


def test_texts_of_one_token_and_numbers_end_responses_too(tmp_path):
    tokenizer = build_char_tokenizer()
    spec = load_generation_spec(write(tmp_path, {"vocab_size": len(tokenizer), "eos_token_id": 2}))
    (letter,) = tokenizer("b", add_special_tokens=False)["input_ids"]
    assert find_stop_tokens(RolloutConfig(stop=["b"], stop_token_ids=[2, 3]), spec, tokenizer) == (2, letter, 3)
    for keys, num_tokens, message in (
        ({"stop": ["bb"]}, len(tokenizer), r"rollout\.stop: found 'bb', .* tokenizer writes as \['b', 'b'\]"),
        ({"stop_token_ids": [len(tokenizer)]}, len(tokenizer), rf"found \[{len(tokenizer)}\], outside"),
        ({"stop": ["b"]}, 3, rf"rollout\.stop or .*: found \[{letter}\], outside the vocabulary of 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_stop_tokens(RolloutConfig(**keys), replace(spec, vocab_size=num_tokens), tokenizer)


def test_calls_that_were_given_up_are_waited_for():
    released, ended = threading.Event(), threading.Event()

    def close_slowly():
        released.wait(20)
        ended.set()

    def fail():
        raise RuntimeError("a server was lost")

    with pytest.raises(RuntimeError, match="a server was lost"):
        run_in_parallel([close_slowly, fail], [])
    with pytest.raises(DeadlineError, match=r"1 abandoned calls to SGLang servers have not ended within 0.1 s"):
        wait_left_over(0.1)
    threading.Timer(0.3, released.set).start()
    wait_left_over(20)
    assert ended.is_set()
    wait_left_over(0.0)
