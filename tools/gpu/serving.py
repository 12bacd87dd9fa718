"""One server: log-probs of its responses beside the trainer's, for the same weights on the same device, and the memory
that it gives back and takes again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig, ServerOffload
from megarl.mcore.spec import Role
from megarl.tools.gpu.lines import Line, judge, skip
from megarl.tools.gpu.setting import SMALL, SMALL_VOCAB, Setting, build_small_spec
from megarl.tools.gpu.training import find_small_checkpoint, open_worker
from megarl.types import Sequences

BOUNDS = {Dtype.float32: (1e-3, 1e-4), Dtype.bfloat16: (0.3, 0.03)}
"""Largest and mean |difference| of a log-prob, by the servers' dtype"""
NUM_PROMPTS, PROMPT_LENGTH, RESPONSE_LENGTH, LONG_RESPONSE = 8, 12, 24, 480
LEAST_RELEASED = 0.3
"""Of the memory of a small server, of which its CUDA context and graphs stay"""


def check_servers(setting: Setting) -> Iterator[Line]:
    """Responses of one server, greedy, sampled and long, and its prefill beside the trainer's log-probs; memory that it
    gives back and takes again.
    """
    rollout, dtype = setting.config.rollout, setting.config.rollout.dtype
    checkpoint, prompts = find_small_checkpoint(setting), make_prompts()
    asked = {
        # SGLang gives log-probs of greedy tokens at temperature 1.
        "greedy": ({"temperature": 0.0}, 1.0),
        "sampled": ({"temperature": rollout.temperature}, rollout.temperature),
        "long": ({"temperature": rollout.temperature, "max_new_tokens": LONG_RESPONSE}, rollout.temperature),
        "greedy, memory taken again": ({"temperature": 0.0}, 1.0),
    }
    answers, free = ask_server(setting, checkpoint, prompts, {name: params for name, (params, _) in asked.items()})
    yield from judge_release(free)
    spec = build_small_spec(setting, Role.reference, checkpoint, dtype, optimizer=None)
    with open_worker(spec, setting.scratch, "servers") as worker:
        for name, (_, temperature) in asked.items():
            sequences = join(prompts, [answer["output_ids"] for answer in answers[name]])
            own = worker.logprobs(sequences, temperature).values
            found = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers[name]]
            yield from compare(name, torch.tensor(found), own, dtype)
        # The last prompt and its greedy answer once more, by prefill.
        whole = [*prompts[-1], *answers["greedy"][-1]["output_ids"]]
        own = worker.logprobs(join([whole[:1]], [whole[1:]]), 1.0).values
        yield from compare("prefill", torch.tensor([answers["prefill"]]), own, dtype)


def judge_release(free: Mapping[str, int]) -> Iterator[Line]:
    """free: bytes of the GPU before the server's start, with it, after its release, and after it took all again; empty:
    there is no GPU, and nothing is given back.
    """
    what = "memory given back"
    if not free:
        yield skip("servers", what, "needs a GPU")
        return
    taken = free["before"] - free["started"]
    note = ", ".join(f"{name} {number / 2**30:.2f} GiB free" for name, number in free.items())
    share = (free["released"] - free["started"]) / taken if taken > 0 else 0.0
    yield judge("servers", what, share, least=LEAST_RELEASED, unit="of the server's", reason=note)
    again = (free["released"] - free["taken again"]) / max(1, free["released"] - free["started"])
    yield judge("servers", "memory taken again", again, least=0.9, most=1.1, unit="of what was given", reason=note)


def compare(name: str, found: torch.Tensor, own: torch.Tensor, dtype: Dtype) -> Iterator[Line]:
    """found, own: float32 [B, T], of the server and of the trainer."""
    largest, mean = BOUNDS[dtype]
    gaps = (found - own).abs()
    note = f"{gaps.numel()} tokens in {dtype.value}"
    yield judge("servers", f"{name}: largest", float(gaps.max()), most=largest, unit="|difference|", reason=note)
    yield judge("servers", f"{name}: mean", float(gaps.mean()), most=mean, unit="|difference|", reason=note)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    # Not the last id, whose log-prob SGLang reports under another one.
    return torch.randint(3, SMALL_VOCAB - 1, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator).tolist()


def ask_server(
    setting: Setting, checkpoint: Path, prompts: list[list[int]], asked: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """SGLang's answers to all prompts by the name of the sampling, the last after the server has given its memory back
    and loaded its weights again, and log-probs under "prefill"; `judge_release`'s bytes.
    """
    from megarl.rollout.client import CACHE, WEIGHTS, ServerOffloader, SGLangClient
    from megarl.rollout.server import SGLangServer

    config = setting.config.rollout
    options = {"mem_fraction_static": 0.5, **config.sglang} if torch.cuda.is_available() else config.sglang
    config = build_server_config(config, options)
    server = SGLangServer(config, checkpoint, log_file=setting.scratch / "server.log", seed=1, shares_gpus=True)
    free = {}

    def note_free(when: str) -> None:
        if torch.cuda.is_available():
            free[when] = int(torch.cuda.mem_get_info()[0])

    note_free("before")
    server.start()
    try:
        server.wait_healthy(config.startup_deadline_s)
        note_free("started")
        client = SGLangClient(
            server.url, vocab_size=SMALL_VOCAB, deadline_s=config.request_deadline_s, api_key=server.api_key
        )
        offloader, answers = ServerOffloader([client], ServerOffload.all), dict[str, Any]()
        for number, (name, params) in enumerate(asked.items()):
            if number == len(asked) - 1:
                answers["prefill"] = client.score([*prompts[-1], *answers["greedy"][-1]["output_ids"]])
                offloader.release()
                note_free("released")
                offloader.resume(WEIGHTS)
                client.update_weights_from_disk(checkpoint)
                offloader.resume(CACHE)
                note_free("taken again")
            own = {"max_new_tokens": RESPONSE_LENGTH, "ignore_eos": True, **params}
            answers[name] = client.generate(prompts, own, return_logprob=True)
        return answers, free
    finally:
        server.stop()


def build_server_config(config: RolloutConfig, options: dict[str, Any]) -> RolloutConfig:
    """One small server."""
    tokens = max(4 * NUM_PROMPTS * SMALL.max_length, 4096)
    return replace(
        config,
        tp=1,
        max_running_requests=NUM_PROMPTS,
        kv_cache_tokens=tokens,
        offload=ServerOffload.all,
        sglang=options,
    )


def join(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Sequences:
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    return Sequences(
        torch.tensor([token for row in rows for token in row]),
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(prompt) for prompt in prompts]),
    )
