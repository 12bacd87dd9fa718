"""Log-probs of a server's responses beside the trainer's, for the same weights on the same device."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.mcore.spec import Role
from megarl.tools.gpu.lines import Line, judge
from megarl.tools.gpu.setting import SMALL, SMALL_VOCAB, Setting, build_small_spec
from megarl.tools.gpu.training import find_small_checkpoint, open_worker
from megarl.types import Sequences

BOUNDS = {Dtype.float32: (1e-3, 1e-4), Dtype.bfloat16: (0.3, 0.03)}
"""Largest and mean |difference| of a log-prob, by the servers' dtype"""
NUM_PROMPTS, PROMPT_LENGTH, RESPONSE_LENGTH = 8, 12, 24


def check_logprobs(setting: Setting) -> Iterator[Line]:
    """Greedy and sampled responses of one server, and the trainer's log-probs of their tokens."""
    rollout, dtype = setting.config.rollout, setting.config.rollout.dtype
    checkpoint = find_small_checkpoint(setting)
    prompts = make_prompts()
    asked = {
        # SGLang gives log-probs of greedy tokens at temperature 1.
        "greedy": ({"temperature": 0.0}, 1.0),
        "sampled": ({"temperature": rollout.temperature}, rollout.temperature),
    }
    answers = ask_server(setting, checkpoint, prompts, {name: params for name, (params, _) in asked.items()})
    spec = build_small_spec(setting, Role.reference, checkpoint, dtype, optimizer=None)
    with open_worker(spec, setting.scratch, "logprobs") as worker:
        for name, (_, temperature) in asked.items():
            sequences = join(prompts, [answer["output_ids"] for answer in answers[name]])
            own = worker.logprobs(sequences, temperature).values
            found = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers[name]]
            yield from compare(name, torch.tensor(found), own, dtype)


def compare(name: str, found: torch.Tensor, own: torch.Tensor, dtype: Dtype) -> Iterator[Line]:
    """found, own: float32 [B, T], of the server and of the trainer."""
    largest, mean = BOUNDS[dtype]
    gaps = (found - own).abs()
    note = f"{gaps.numel()} tokens in {dtype.value}"
    yield judge("logprobs", f"{name}: largest", float(gaps.max()), most=largest, unit="|difference|", reason=note)
    yield judge("logprobs", f"{name}: mean", float(gaps.mean()), most=mean, unit="|difference|", reason=note)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    # Not the last id, whose log-prob SGLang reports under another one.
    return torch.randint(3, SMALL_VOCAB - 1, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator).tolist()


def ask_server(
    setting: Setting, checkpoint: Path, prompts: list[list[int]], asked: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """SGLang's answers to all prompts, by the name of the sampling."""
    from megarl.rollout.client import SGLangClient
    from megarl.rollout.server import SGLangServer

    config = setting.config.rollout
    options = {"mem_fraction_static": 0.5, **config.sglang} if torch.cuda.is_available() else config.sglang
    config = build_server_config(config, options)
    server = SGLangServer(config, checkpoint, log_file=setting.scratch / "server.log", seed=1, shares_gpus=True)
    server.start()
    try:
        server.wait_healthy(config.startup_deadline_s)
        client = SGLangClient(
            server.url, vocab_size=SMALL_VOCAB, deadline_s=config.request_deadline_s, api_key=server.api_key
        )
        length = {"max_new_tokens": RESPONSE_LENGTH, "ignore_eos": True}
        return {
            name: client.generate(prompts, {**params, **length}, return_logprob=True) for name, params in asked.items()
        }
    finally:
        server.stop()


def build_server_config(config: RolloutConfig, options: dict[str, Any]) -> RolloutConfig:
    """One small server, which keeps its memory."""
    tokens = max(4 * NUM_PROMPTS * SMALL.max_length, 4096)
    return replace(config, tp=1, max_running_requests=NUM_PROMPTS, kv_cache_tokens=tokens, offload=None, sglang=options)


def join(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Sequences:
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    return Sequences(
        torch.tensor([token for row in rows for token in row]),
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(prompt) for prompt in prompts]),
    )
