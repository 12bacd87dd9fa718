"""The text of docs/tutorial.md from its template and the recorded numbers, and the comparison of two recordings."""

import math
import re
import string
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.load import load_config
from megarl.config.schema.root import Config

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "tools" / "docs" / "tutorial_template.md"
NUMBERS = ROOT / "docs" / "tutorial.json"
TUTORIAL = ROOT / "docs" / "tutorial.md"

RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-5
WIDTH = 120
NUM_SHOWN_TOKENS = 16
"""Of a longer response the table shows the first and the last half of so many"""


def find_differences(found: Any, expected: Any, name: str = "tutorial") -> list[str]:
    """Each place where two recordings differ; numbers that are equal up to rounding count as equal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [f"{name}.{key}: only in one of them" for key in sorted(found.keys() ^ expected.keys())]
        both = sorted(found.keys() & expected.keys())
        return missing + [line for key in both for line in find_differences(found[key], expected[key], f"{name}.{key}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return [f"{name}: {len(found)} entries found, {len(expected)} recorded"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (a, b) in pairs for line in find_differences(a, b, f"{name}[{i}]")]
    if isinstance(expected, float) and isinstance(found, int | float):
        close = math.isclose(found, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
        return [] if close else [f"{name}: {found} found, {expected} recorded"]
    # Checksums are of the exact bits, which rounding on another machine changes.
    return (
        [] if found == expected or name.endswith("_checksum") else [f"{name}: {found!r} found, {expected!r} recorded"]
    )


def render(numbers: dict[str, Any]) -> str:
    """docs/tutorial.md. Raises KeyError for a name in the template that has no value."""
    filled = string.Template(TEMPLATE.read_text()).substitute(build_values(numbers))
    parts = re.split(r"(```.*?```|^[|#<][^\n]*$)", filled, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if number % 2 else _wrap(part) for number, part in enumerate(parts))


def _wrap(text: str) -> str:
    """Break the lines of paragraphs and list items: a number may be longer than its name in the template."""
    paragraphs = re.split(r"(\n(?=- )|\n{2,})", text)
    return "".join(
        textwrap.fill(
            re.sub(r"\n +", "\n", part),
            WIDTH,
            subsequent_indent="  " * part.startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if part.strip()
        else part
        for part in paragraphs
    )


def build_values(numbers: dict[str, Any]) -> dict[str, str]:
    """What the template's names stand for."""
    config = load_config([])
    return {
        **_describe_rollout(numbers, config),
        **_describe_followed(numbers, config),
        **_describe_update(numbers, config),
        **_describe_sync(numbers["sync"], config),
    }


def _describe_rollout(numbers: dict[str, Any], config: Config) -> dict[str, str]:
    prompt, metrics, responses = numbers["prompt"], numbers["metrics"], numbers["responses"]
    names = ["", "response", "tokens", "reward", "letters", "length", "lambda", "V of first token", "mean A", "step"]
    rows = [
        [
            "**followed**" if n == numbers["followed"] else n + 1,
            _quote(r["text"]),
            r["num_tokens"],
            r["reward"],
            r["details"]["letters"],
            r["details"]["length"],
            r["lambda"],
            r["first_value"],
            r["advantage_mean"],
            numbers["minibatch_of_each"][n],
        ]
        for n, r in enumerate(responses)
    ]
    pretraining = [[n, s["explained_variance"], s["loss"]] for n, s in enumerate(numbers["pretraining"], start=1)]
    return {
        "prompt_text": prompt["text"],
        "prompt_ids": ", ".join(map(str, prompt["token_ids"])),
        "prompt_answer": prompt["answer"],
        "num_prompts": str(numbers["num_prompts"]),
        "num_responses": str(len(responses)),
        "num_samples": str(numbers["num_samples"]),
        "response_length": str(config.rollout.response_length),
        "pretraining": _table(["step", "explained variance", "critic loss"], pretraining),
        "num_pretraining": str(len(pretraining)),
        "heldout_before": _format(numbers["before"]["heldout"]),
        "responses": _table(names, rows),
        "shortest": str(numbers["lengths"][0]),
        "longest": str(numbers["lengths"][-1]),
        "reward_mean": _format(metrics["reward/mean"]),
        "length_mean": _format(metrics["length/mean"]),
        "again": _table(
            ["response", "tokens", "weight version"],
            [[_quote(r["text"]), r["num_tokens"], ", ".join(map(str, r["versions"]))] for r in numbers["again"]],
        ),
    }


def _describe_followed(numbers: dict[str, Any], config: Config) -> dict[str, str]:
    followed, metrics, tokens = numbers["responses"][numbers["followed"]], numbers["metrics"], numbers["tokens"]
    first, last, algo = tokens[0], tokens[-1], config.algo
    return {
        "text": followed["text"],
        "length": str(followed["num_tokens"]),
        "finish_reason": followed["finish_reason"],
        "reward": _format(followed["reward"]),
        "letters": _format(followed["details"]["letters"]),
        "length_score": _format(followed["details"]["length"]),
        "lambda": _format(followed["lambda"]),
        "length_alpha": _format(algo.length_alpha),
        "lambda_min": _format(algo.lambda_min),
        "shortest_at_min": str(round(1 / (algo.length_alpha * (1 - algo.lambda_min)))),
        "lambda_at_min": _format(metrics["advantage/lambda_at_min_frac"]),
        "tokens": _tokens_table(tokens),
        "largest_gap": f"{numbers['largest_gap']:.1e}",
        "largest_gap_of_all": f"{metrics['mismatch/logprob_gap_max']:.1e}",
        "last_value": _format(last["value"]),
        "last_advantage": _format(last["advantage"]),
        "first_return": _format(first["return"]),
        "first_advantage": _format(first["advantage"]),
        "explained": _format(metrics["critic/explained_variance"]),
    }


def _describe_update(numbers: dict[str, Any], config: Config) -> dict[str, str]:
    steps, critic_steps = numbers["steps"]["policy"], numbers["steps"]["critic"]
    return {
        "samples_per_minibatch": str(config.train.samples_per_minibatch),
        "num_steps": str(len(steps)),
        "minibatch": str(numbers["minibatch_of_each"][numbers["followed"]]),
        "clip_low": _format(1 - config.algo.clip_low),
        "clip_high": _format(1 + config.algo.clip_high),
        "positive_threshold": _format(config.algo.positive_threshold),
        "policy_steps": _table(
            ["step", "loss", "clip fraction", "largest ratio", "approx. KL", "gradient norm", "learning rate"],
            [
                [n, s["loss"], s["clip_frac"], s["ratio_max"], s["approx_kl"], s["grad_norm"], s["lr"]]
                for n, s in enumerate(steps, start=1)
            ],
        ),
        "critic_steps": _table(
            ["step", "loss", "mean abs(V - G)", "gradient norm", "learning rate"],
            [[n, s["loss"], s["abs_error"], s["grad_norm"], s["lr"]] for n, s in enumerate(critic_steps, start=1)],
        ),
        "clip_grad": _format(config.policy.optimizer.clip_grad),
        "logprob_before": _format(numbers["logprob_before"]),
        "logprob_after": _format(numbers["logprob_after"]),
    }


def _describe_sync(sync: dict[str, Any], config: Config) -> dict[str, str]:
    return {
        "bytes": f"{int(sync['bytes']):,}",
        "bytes_over_bound": _format(sync["bytes_over_bound"]),
        "num_buckets": str(sync["num_buckets"]),
        "bucket_mb": str(config.rollout.sync_bucket_mb),
        "num_tensors": str(sync["num_tensors"]),
        "tensor": sync["tensor"],
        "policy_checksum": sync["policy_checksum"],
        "server_checksum": sync["server_checksum"],
        "probe_gap": f"{sync['probe_logprob_gap']:.1e}",
        "version": str(sync["version"]),
    }


def _quote(text: str) -> str:
    return f"`{text}`" if text else "(empty)"


def _tokens_table(tokens: Sequence[dict[str, Any]]) -> str:
    names = ("rollout_logprob", "old_logprob", "value", "advantage", "return", "logprob_after")
    rows = [[t, token["id"], f"`{token['token']}`", *(token[name] for name in names)] for t, token in enumerate(tokens)]
    half = NUM_SHOWN_TOKENS // 2
    if len(rows) > NUM_SHOWN_TOKENS:
        rows = [*rows[:half], ["..."] * len(rows[0]), *rows[-half:]]
    heads = ["t", "id", "token", "rollout_logprob", "old_logprob", "V", "A", "G", "logprob after the update"]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_format, line)) + " |" for line in lines)


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
