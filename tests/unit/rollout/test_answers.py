"""SGLang's answers are read as the json module reads them, without an object per token; the experts of their tokens."""

import base64
import json

import numpy as np
import orjson
import pytest
import torch
from data_cases import build_char_tokenizer
from generation import load_rollouts
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.models.families import parse_architecture
from megarl.rollout import engine
from megarl.rollout.client import RequestError
from megarl.rollout.collector import build_sequences
from megarl.rollout.engine import decode_answer, load_expert_architecture
from megarl.rollout.rollout_file import Journal, RolloutWriter
from megarl.rollout.server import build_command
from megarl.types import FinishReason, Prompt, Response, Rollout, RoutedExperts, Sample, Score, WeightVersions

INT32 = st.integers(0, 2**31 - 1)


def parse_answer(raw, arch=None):
    return engine.parse_answer(raw, lambda ids: f"text of {len(ids)}", arch)


def make_answer(ids=(8, 9, 2), logprobs=(-0.1, -0.2, -0.3), text="hi", **changes):
    meta = {
        "id": "a1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 5,
        "weight_version": "4",
        "input_token_logprobs": [],
        "output_token_logprobs": [(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": len(ids),
        "e2e_latency": 0.5,
    }
    return {"text": text, "output_ids": list(ids), "meta_info": meta | changes}


def write(content) -> bytes:
    """As SGLang writes it."""
    return orjson.dumps(content)


@given(
    tokens=st.lists(st.tuples(INT32, st.floats(-1e30, 1e30) | st.floats(-50, 0, width=32)), min_size=1),
    text=st.text() | st.sampled_from(['"output_ids":[1,2]', '\\"output_token_logprobs":[[', '"routed_experts":"']),
)
def test_ids_and_logprobs_are_bit_for_bit_those_of_the_json_module(tokens, text):
    ids, logprobs = zip(*tokens, strict=True)
    raw = write(make_answer(ids, logprobs, text))
    answer, other = parse_answer(raw).response, json.loads(raw)
    assert other["text"] == text
    assert answer.token_ids.dtype == np.int32
    assert answer.token_ids.tolist() == other["output_ids"]
    with np.errstate(over="ignore"):
        values = np.float32([entry[0] for entry in other["meta_info"]["output_token_logprobs"]])
    assert answer.rollout_logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize("written", ["-0.0", "0", "-1e-7", "-1.5E+2", "-0.30000001192092896", "5e-324"])
def test_every_form_of_a_json_number_is_read(written):
    raw = write(make_answer()).replace(b"-0.2", written.encode())
    assert parse_answer(raw).response.rollout_logprobs.tobytes() == np.float32([-0.1, float(written), -0.3]).tobytes()


def test_an_answer_has_its_versions_as_runs_and_what_else_is_asked_of_it():
    spans = [{"version": v, "start": a, "end": b} for v, a, b in (("3", 0, 1), ("4", 1, 2), ("4", 2, 3))]
    answer = parse_answer(write({**make_answer(weight_versions=spans), "index": 6}))
    assert (answer.num_prompt_tokens, answer.index) == (5, 6)
    assert answer.response == Response(
        (8, 9, 2), "text of 3", (-0.1, -0.2, -0.3), (True,) * 3, WeightVersions((3, 4), (1, 3)), FinishReason.stop
    )
    assert parse_answer(write(make_answer())).response.weight_versions == WeightVersions((4,), (3,))


def entries(*found):
    return write(make_answer(output_token_logprobs=list(found)))


def spans(*ends):
    return write(make_answer(weight_versions=[{"version": "3", "start": a, "end": b} for a, b in ends]))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            write(make_answer(finish_reason={"type": "abort", "message": "lost"})),
            "ended with {'type': 'abort', 'message': 'lost'}; stop or length was expected",
        ),
        (entries([-0.1, 8, None]), "3 tokens came with 1 log-probs"),
        (entries([-0.1, 8, None], [-0.2, 9, None], [-0.3, 3, None]), "log-probs, not of these tokens"),
        (entries([-0.1, 8, None], [None, 9, None], [-0.3, 2, None]), "Failed to parse string: 'null'"),
        (entries([-0.1, 8, None], [-1e39, 9, None], [-0.3, 2, None]), "has id 9 with log-prob -inf"),
        (entries([-0.1, 8, None], [-0.2, 9, "x"], [-0.3, 2, None]), "have no end"),
        (entries([-0.1, 8], [-0.2, 9], [-0.3, 2]), "is not what SGLang writes"),
        (spans((0, 2), (1, 3)), "do not cover a response of 3 tokens"),
        (write(make_answer(weight_version="default")), "'default'"),
        (b"", "is not the JSON that SGLang writes"),
        (b'{"error": {"message": "out of memory"}}', "meta_info.*out of memory"),
        (write(make_answer((), ())), "a response of 0 tokens"),
        (write(make_answer())[:30], "an answer cannot be read: its output_ids have no end"),
        (write(make_answer()).replace(b"9", b"99999999999"), "has id 99999999999"),
        (write(make_answer()).replace(b"9", b"-9"), "has id -9"),
        (write(make_answer()).replace(b"],[-0.2,", b"],,-0.2"), "not of these tokens|a log-prob is missing"),
    ],
)
def test_an_answer_that_was_aborted_is_inconsistent_or_none_of_sglangs_is_refused(raw, message):
    with pytest.raises(RequestError, match=message):
        parse_answer(raw)


def test_a_token_of_a_row_beyond_the_tokenizers_is_kept_and_has_no_text():
    """Embeddings are padded: Qwen2.5's has 271 rows that its tokenizer does not know, and any may be sampled."""
    tokenizer = build_char_tokenizer()
    tokens = (8, len(tokenizer) + 7, 9, 2)
    raw = write(make_answer(tokens, (-0.1, -0.2, -0.3, -0.4)))
    found = engine.parse_answer(raw, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), None).response
    assert tuple(found.token_ids) == tokens
    assert found.text == tokenizer.decode([8, 9])


CONFIG = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 100, "eos_token_id": 2},
    **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 48},
    **{"num_experts": 200, "num_experts_per_tok": 3, "norm_topk_prob": True},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def arch(checkpoint):
    return load_expert_architecture(checkpoint)


def pick(num_tokens: int, num_layers: int = 2, seed: int = 0) -> np.ndarray:
    """int32 [num_tokens, num_layers, 3] of 200 experts, none twice"""
    generator = np.random.default_rng(seed)
    rows = [generator.permutation(200)[:3] for _ in range(num_tokens * num_layers)]
    return np.array(rows, dtype=np.int32).reshape(num_tokens, num_layers, 3)


def encode(routed: np.ndarray) -> str:
    return base64.b64encode(routed.tobytes()).decode()


def build_sample(group: int, prompt: tuple[int, ...], response: tuple[int, ...], with_experts: bool = True) -> Sample:
    routed = pick(len(prompt) + len(response) - 1, seed=group).astype(np.uint8)
    experts = RoutedExperts(routed.tobytes(), 2, 3, 200) if with_experts else None
    n = len(response)
    answer = Response(response, "x", (-0.5,) * n, (True,) * n, (1,) * n, FinishReason.stop, experts)
    return Sample(Prompt(f"p{group}", "x", prompt, "x"), answer, Score(1.0, True), group)


def test_an_answers_experts_are_those_of_all_tokens_but_the_last(arch):
    routed = pick(4)
    raw = write(make_answer((8, 2), (-0.1, -0.3), prompt_tokens=3, routed_experts=encode(routed)))
    found = parse_answer(raw, arch).response.routed_experts
    assert (found.num_layers, found.top_k, found.num_experts) == (2, 3, 200)
    assert found.to_tensor().dtype == torch.uint8
    assert found.to_tensor().tolist() == routed.tolist()
    assert parse_answer(raw).response.routed_experts is None
    with pytest.raises(RequestError, match=r"needs --enable-return-routed-experts"):
        parse_answer(write(make_answer()), arch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "has 30 routed experts; 6 x 2 x 3 were expected"),
        (lambda x: np.where(x == x[2, 1, 0], 200, x), "to 200 of 200"),
        (lambda x: np.where(np.arange(6)[:, None, None] == 5, -1, x), "from -1 to"),
        # SGLang's buffer before anything is written to it.
        (lambda x: np.where(np.arange(6)[:, None, None] == 5, 0, x), "same expert twice"),
    ],
)
def test_what_no_router_chooses_is_refused(arch, change, message):
    with pytest.raises(ValueError, match=message):
        decode_answer(encode(change(pick(6)).astype(np.int32)), 7, arch)


def test_layers_without_experts_may_hold_anything_and_more_than_255_experts_have_two_bytes_each(checkpoint):
    dense_first = {**CONFIG, "model_type": "glm4_moe", "first_k_dense_replace": 1, "n_routed_experts": 300}
    dense_first |= {"num_experts": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    arch = parse_architecture(dense_first | {"n_shared_experts": 1}, checkpoint / "config.json")
    routed = pick(6) + 100
    routed[:, 0] = 0
    found = decode_answer(encode(routed), 7, arch).to_tensor()
    assert found.dtype == torch.int16
    assert found.tolist() == routed.tolist()


def test_a_resumed_run_and_a_replay_buffer_have_them_and_the_file_of_all_responses_has_not(tmp_path):
    samples = (build_sample(0, (3, 4), (5, 2)), build_sample(1, (3,), (2,), with_experts=False))
    journal = Journal(tmp_path / "journal")
    journal.save("iteration-1/round-1", samples)
    assert journal.load("iteration-1/round-1", [s.prompt for s in samples], 1) == samples
    writer = RolloutWriter(tmp_path / "rollouts.jsonl")
    writer.write(Rollout(samples, 3), 1)
    writer.close()
    (rollout,) = load_rollouts(tmp_path / "rollouts.jsonl")
    assert [s.response.routed_experts for s in rollout.samples] == [None, None]
    assert "routed_experts" not in (tmp_path / "rollouts.jsonl").read_text()


def test_the_policys_sequences_have_them_token_by_token_and_zero_where_it_chooses():
    rows = (((3, 4), (5, 2), True), ((3,), (2,), False), ((3,), (6, 7), True))
    samples = tuple(build_sample(group, *row) for group, row in enumerate(rows))
    sequences = build_sequences(Rollout(samples, 3))
    assert sequences.routed_experts.dtype == torch.uint8
    none = [[0] * 3] * 2
    expected = [*(1 + pick(3, seed=0)).tolist(), none, none, none, *(1 + pick(2, seed=2)).tolist(), none]
    assert sequences.routed_experts.tolist() == expected
    assert sequences.select(torch.tensor([2, 0])).routed_experts.tolist() == [*expected[6:], *expected[:4]]
    assert build_sequences(Rollout(samples[1:2], 3)).routed_experts is None


def test_the_server_is_told_and_a_dense_model_is_refused(checkpoint):
    options = {"--enable-return-routed-experts", "--disable-radix-cache"}
    for overrides, expected in (([], set()), (["rollout.router_replay=true"], options)):
        config = load_config(["model=tiny_moe", *overrides]).rollout
        command = build_command(config, checkpoint, host="127.0.0.1", port=1, seed=1)
        assert options & set(command) == expected
    no_experts = dict.fromkeys(key for key in CONFIG if "exp" in key or key.startswith(("moe", "norm")))
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen3"} | no_experts))
    with pytest.raises(ConfigError, match=r"rollout\.router_replay: found true, but the model .* has no experts"):
        load_expert_architecture(checkpoint)
