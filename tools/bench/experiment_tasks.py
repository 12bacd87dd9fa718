"""The tasks of tools/bench/experiments.py: what is right, what is paid, and how the untrained policy writes.

Every token is a letter a to h. Rewards are functions of prompt and response alone, so that they can run in processes of
their own (reward=function): where a task pays with chance, the chance is drawn from a hash of prompt and response.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.algo.declarations import PolicyLoss
from megarl.config.schema.algo import AlgoConfig, RatioLevel
from megarl.environment import Action, Environment, EpisodeSetting, Step
from megarl.types import FinishReason, Prompt, Response, RewardFunction, Score

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.losses import PolicyTokens

LETTERS = "abcdefgh"
RIGHT_HALF = "abcd"
"""The letters that are right in `score_bits_16` and its like, and in `Dice`"""
KEY = "c"
"""The right first letter of `score_key` and `score_groups`"""
RIGHT_PAYS, WRONG_PAYS = 0.9, 0.1
"""Chance of a reward of 1 in `score_key`"""
SLIP = 1 / 16
"""Chance that an easy prompt of `score_groups` pays nothing"""
EASY = "abcdef"
"""First letters of the prompts that `score_groups` pays whatever is answered; the others are hard"""
LUCK = 4.0
"""What a throw of the die counts in `score_dice`; a right choice counts 1"""
MANY = 128
"""Right letters of which `score_whole` pays 1"""
ABOVE = 2.5
"""What `score_above` pays for any response"""
NEVER = -12.0
"""Added to the logit of what the policy is not to sample; 256 tokens have one in one of a hundred responses"""
BIAS_CHANNEL, BIAS_VALUE = 0, 0.5
"""Of the residual stream: constant in a checkpoint of `write_biased_checkpoint`"""


def draw_uniform(prompt: Prompt, response: Response) -> float:
    """A number in [0, 1) from a hash of prompt and response: the same for the same two, else independent."""
    text = f"{prompt.text}|{response.token_ids.tolist()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def score_key(prompt: Prompt, response: Response) -> Score:
    """1 with chance 0.9 where the first letter is the key and with chance 0.1 elsewhere, whatever follows."""
    right = response.text.startswith(KEY)
    paid = draw_uniform(prompt, response) < (RIGHT_PAYS if right else WRONG_PAYS)
    return Score(float(paid), paid, {"right": float(right), "counted": 1.0})


def score_first(prompt: Prompt, response: Response) -> Score:
    """1 where the first letter is the key, else 0."""
    right = response.text.startswith(KEY)
    return Score(float(right), right, {"right": float(right), "counted": 1.0})


def score_cut(prompt: Prompt, response: Response) -> Score:
    """As `score_first`, and 0 for a response that has not ended by itself."""
    found = score_first(prompt, response)
    return found if response.finish_reason is FinishReason.stop else replace(found, reward=0.0)


def list_bits(prompt: Prompt, response: Response) -> list[bool]:
    """Of each letter whether it is right: one of a to d."""
    return [letter in RIGHT_HALF for letter in response.text]


def score_bits_16(prompt: Prompt, response: Response) -> Score:
    """The number of right letters, of 16, paid at the end: independent bits, each a token's own."""
    return _score_bits(prompt, response, 16)


def score_bits_32(prompt: Prompt, response: Response) -> Score:
    return _score_bits(prompt, response, 32)


def score_bits_128(prompt: Prompt, response: Response) -> Score:
    return _score_bits(prompt, response, 128)


def _score_bits(prompt: Prompt, response: Response, num_bits: int) -> Score:
    reward = sum(list_bits(prompt, response)) / num_bits
    return Score(reward, reward > 0.9, {"right": reward, "counted": 1.0})


def score_whole(prompt: Prompt, response: Response) -> Score:
    """The number of right letters, of 128, paid at the end of a response of any length: a short one is worth little."""
    bits = list_bits(prompt, response)
    reward = sum(bits) / MANY
    return Score(reward, reward > 0.9, {"right": sum(bits) / max(1, len(bits)), "counted": 1.0})


def score_above(prompt: Prompt, response: Response) -> Score:
    """As `score_whole`, and `ABOVE` for any response: above the values that its reward model starts a critic with."""
    found = score_whole(prompt, response)
    return replace(found, reward=found.reward + ABOVE)


class Dice(Environment):
    """A game of skill and chance. Each turn the policy chooses by the first letter of its action, of which half are
    right, and a die answers: a letter that no choice can change, lucky (a to d) or unlucky.
    """

    def __init__(self, num_turns: int):
        self._num_turns = num_turns
        self._die = random.Random()

    def reset(self, setting: EpisodeSetting) -> None:
        self._die = random.Random(setting.seed)

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        thrown = self._die.choice(LETTERS)
        details = {"right": float(action.text[:1] in tuple(RIGHT_HALF)), "lucky": float(thrown in RIGHT_HALF)}
        return Step(thrown, done=action.turn + 1 >= self._num_turns, details=details)


def score_dice(prompt: Prompt, response: Response) -> Score:
    """Paid at the end: the number of right choices, and LUCK for each lucky throw and against each unlucky one; over
    what an even chance leaves of the luck in the mean (its standard deviation).
    """
    # A response without an environment, as the check before a run scores one, has a turn without details.
    turns = [turn.details for turn in response.turns if turn.details]
    if not turns:
        return Score(0.0, False, {"right": 0.0, "counted": 1.0})
    right = sum(details["right"] for details in turns)
    lucky = sum(2 * details["lucky"] - 1 for details in turns)
    reward = (right + LUCK * lucky) / (LUCK * math.sqrt(len(turns)))
    share = right / len(turns)
    return Score(reward, share > 0.9, {"right": share, "counted": 1.0})


def score_rare(prompt: Prompt, response: Response) -> Score:
    """1 for the letter a, which is rare at first, else 0."""
    right = response.text.startswith("a")
    return Score(float(right), right, {"right": float(right), "counted": 1.0})


def score_groups(prompt: Prompt, response: Response) -> Score:
    """Easy prompts pay 1 in 15 of 16 cases by chance; hard prompts pay 1 where the first letter is the key."""
    if prompt.text[0] in EASY:
        paid = draw_uniform(prompt, response) >= SLIP
        return Score(float(paid), paid, {"right": 0.0, "counted": 0.0})
    right = response.text.startswith(KEY)
    return Score(float(right), right, {"right": float(right), "counted": 1.0})


@dataclass(frozen=True)
class Task:
    score: RewardFunction
    response_length: int
    """Maximum tokens of a response"""
    biases: Mapping[str, float] = field(default_factory=dict)
    """Added to the logits of the untrained policy, by letter; "<eos>" too"""
    bits: Callable[[Prompt, Response], Sequence[bool]] | None = None
    """Of each token whether it is right; None: the task does not say it of each"""


TASKS: dict[str, Task] = {
    "key_128": Task(score_key, 128),
    "key_256": Task(score_key, 256),
    "key_to_256": Task(score_key, 256, {"<eos>": -2.08}),
    "key_64": Task(score_key, 64),
    "key_to_64": Task(score_key, 64, {"<eos>": -0.86}),
    "bits_16": Task(score_bits_16, 16, bits=list_bits),
    "bits_32": Task(score_bits_32, 32, bits=list_bits),
    "bits_128": Task(score_bits_128, 128, bits=list_bits),
    "dice": Task(score_dice, 128, {"<eos>": 2.0}),
    "rare": Task(score_rare, 1, {"a": -3.0}),
    "groups": Task(score_groups, 256, {"<eos>": -2.3}),
    "cut": Task(score_cut, 40, {"<eos>": -1.35}),
    "whole": Task(score_whole, 256, {"<eos>": -2.3}),
    "above": Task(score_above, 256, {"<eos>": -2.3}),
    **{
        f"frozen_{percent}": Task(score_first, 4, {KEY: math.log(7 * percent / (100 - percent))})
        for percent in (10, 50, 90)
    },
}


def write_prompts(directory: Path) -> tuple[Path, Path]:
    """jsonl files of the prompts to train on and to hold out: all pairs of letters, 8 of them held out."""
    pairs = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
    parts = {"train": [p for i, p in enumerate(pairs) if i % 8 != 7], "heldout": pairs[7::8]}
    directory.mkdir(parents=True, exist_ok=True)
    for name, questions in parts.items():
        lines = [json.dumps({"prompt": question, "answer": KEY}) for question in questions]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "train.jsonl", directory / "heldout.jsonl"


def write_pairs(checkpoint: Path, prompts: Path, path: Path, task: Task) -> None:
    """A jsonl file of pairs of whole responses of the untrained policy, the better one by the task's score first: of 20
    responses to each prompt, without those that are cut, each with the next four."""
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.models.checkpoint import load_tokenizer

    torch.manual_seed(1)
    tokenizer, model = load_tokenizer(checkpoint), cast(Any, AutoModelForCausalLM.from_pretrained(checkpoint))
    end, records = tokenizer.eos_token_id, list[dict[str, str]]()
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    tokens = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"]).repeat_interleave(20, 0)
    keys = {"max_new_tokens": task.response_length, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    out = model.generate(tokens, do_sample=True, top_k=0, **keys)[:, tokens.shape[1] :].view(len(texts), 20, -1)
    for text, responses in zip(texts, out.tolist(), strict=True):
        scored = []
        for ids in (own[: own.index(end)] for own in responses if end in own):
            known = [0.0] * len(ids), [True] * len(ids), [0] * len(ids)
            response = Response(ids, tokenizer.decode(ids), *known, FinishReason.stop)
            scored.append((task.score(Prompt("", text, (), ""), response).reward, response.text))
        for first, second in (two for i in range(4) for two in zip(scored, scored[i + 1 :], strict=False)):
            (worse, rejected), (better, chosen) = sorted((first, second))
            if better > worse:
                records.append({"prompt": text, "chosen": chosen, "rejected": rejected})
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def centre_scores(checkpoint: Path, pairs: Path) -> None:
    """Shift the scores of a reward model so that their mean over 512 responses of these pairs is 0 (InstructGPT
    2203.02155, section 3.5), by a weight for channel 0, which is nearly constant."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    from megarl.models.checkpoint import load_tokenizer

    tokenizer, model = load_tokenizer(checkpoint), AutoModelForSequenceClassification.from_pretrained(checkpoint)
    records = random.Random(1).sample([json.loads(line) for line in pairs.read_text().splitlines()], 256)
    texts = [record["prompt"] + record[name] for record in records for name in ("chosen", "rejected")]
    with torch.no_grad():
        rows = [torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]]) for text in texts]
        states = torch.cat([model.model(row).last_hidden_state[:, -1] for row in rows])
        score = float((states @ model.score.weight[0]).mean())
    weights = load_file(checkpoint / "model.safetensors")
    weights["score.weight"][0, BIAS_CHANNEL] -= score / float(states[:, BIAS_CHANNEL].mean())
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def write_biased_checkpoint(source: Path, target: Path, biases: Mapping[str, float]) -> None:
    """The checkpoint with these numbers added to the logits, by token, and nothing else to tell tokens apart.

    Channel 0 of the residual stream is the same for every token and no layer writes to it, so that a row of the output
    matrix can hold a bias there. The other entries of the rows are scaled down: the untrained policy is near uniform.
    Special tokens that `biases` does not name get `NEVER`.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from megarl.models.checkpoint import load_tokenizer

    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][:, BIAS_CHANNEL] = BIAS_VALUE
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[BIAS_CHANNEL] = 0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(target)
    specials = dict.fromkeys(tokenizer.all_special_tokens, NEVER)
    letters = torch.tensor([i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids])
    drawn = letters[torch.randint(len(letters), (64, 64), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(target)
        level = model.model(drawn).last_hidden_state[..., BIAS_CHANNEL].mean()
    head = weights["lm_head.weight"]
    head *= 0.1
    head[:, BIAS_CHANNEL] = 0
    for name, bias in (specials | dict(biases)).items():
        head[tokenizer.convert_tokens_to_ids(name), BIAS_CHANNEL] = bias / level
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _compute_sequence_is(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    from megarl.algo.losses import compute_log_ratio

    targets = tokens.targets
    log_ratio = compute_log_ratio(tokens.log_ratio, targets.rows, targets.row_lengths, RatioLevel.sequence)
    return -log_ratio.exp() * tokens.advantages / targets.row_lengths[targets.rows], {}


SEQUENCE_IS = PolicyLoss(lambda algo: "-A prod_t w / l", _compute_sequence_is)
"""algo.surrogate=experiment_tasks:SEQUENCE_IS: -A prod_t w / l of each token. Their sum over a response is -A prod_t w,
importance sampling without a bound, a loss that the product does not have."""
