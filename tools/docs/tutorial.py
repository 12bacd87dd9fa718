"""docs/tutorial.md: one prompt of the default run, followed through one iteration with its real numbers.

    python tools/docs/tutorial.py record    run the first iteration of the default configuration, write docs/tutorial.json
    python tools/docs/tutorial.py write     docs/tutorial.md from tools/docs/tutorial_template.md and docs/tutorial.json
    python tools/docs/tutorial.py check     run it again and compare with docs/tutorial.json; exit code 1 where they differ

`record` and `check` start Ray, one SGLang server, the policy and the critic, and take about a minute on two cores.
"""

import argparse
import contextlib
import json
import math
import statistics
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "tools" / "docs" / "tutorial_template.md"
NUMBERS = ROOT / "docs" / "tutorial.json"
TUTORIAL = ROOT / "docs" / "tutorial.md"

RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-5
NUM_SHOWN_TOKENS = 16
"""Of a longer response the table shows the first and the last half of so many"""


def record() -> dict[str, Any]:
    """The numbers of the first iteration of `python -m megarl.train`, by the real loop over the real parts."""
    from megarl.config.load import load_config
    from megarl.report.report import build_report
    from megarl.run.inputs import load_inputs
    from megarl.run.job import open_components, open_resources
    from megarl.value_pretraining.loop import pretrain_critic

    config = load_config(["logger.terminal=false", "logger.tensorboard=false"])
    inputs = load_inputs(config)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run_dir = Path(folder)
        report = stack.enter_context(
            contextlib.closing(build_report(config.logger, run_dir, config.train.num_iterations))
        )
        resources = stack.enter_context(open_resources(config, inputs, run_dir / "logs"))
        components = stack.enter_context(open_components(config, inputs, resources, run_dir, report))
        recorder = _build_recorder(config, components, inputs.tokenizer)
        pretrain_critic(recorder)
        recorder.publish_and_evaluate()
        recorder.train(1)
        recorder.publish_and_evaluate()
        numbers = recorder.describe()
        report.close()
        numbers["pretraining"] = _read_lines(run_dir / "value_pretrain.jsonl", "pretrain/")
        first, second = _read_lines(run_dir / "metrics.jsonl", "")
        numbers["before"] = {"heldout": first["reward/heldout"]}
        numbers["metrics"] = {
            name: second[name]
            for name in ("reward/mean", "length/mean", "advantage/lambda_mean", "advantage/lambda_at_min_frac",
                         "critic/explained_variance", "mismatch/kl", "mismatch/logprob_gap_max")
        }  # fmt: skip
    return _round(numbers)


def _build_recorder(config: Any, components: Any, tokenizer: Any) -> Any:
    """A Trainer that keeps what passes between the stages of its loop."""
    from dataclasses import replace

    from megarl.trainer import Trainer, split_minibatches

    class RecordedRole:
        """A role whose updates' metrics, one entry per optimizer step, are kept; everything else passes through."""

        def __init__(self, role: Any) -> None:
            self.role = role
            self.updates: list[Any] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.role, name)

        def update(self, samples: Any, minibatches: Any) -> Any:
            self.updates.append(self.role.update(samples, minibatches))
            return self.updates[-1]

    class Recorder(Trainer):
        def collect(self, iteration: int) -> Any:
            self.rollout, metrics = super().collect(iteration)
            return self.rollout, metrics

        def build_experience(self, rollout: Any) -> Any:
            self.experience, metrics = super().build_experience(rollout)
            return self.experience, metrics

        def build_targets(self, experience: Any, algo: Any) -> Any:
            self.samples, metrics = super().build_targets(experience, algo)
            return self.samples, metrics

        def publish(self, version: int) -> Any:
            self.synced = super().publish(version)
            return self.synced

        def describe(self) -> dict[str, Any]:
            groups = _list_groups(self.rollout.samples)
            rows = max(groups, key=lambda rows: statistics.pstdev(self.rollout.samples[i].score.reward for i in rows))
            followed = max(rows, key=lambda row: self.rollout.samples[row].score.reward)
            minibatches = split_minibatches(self.config, len(self.rollout.samples), 1)
            again = self.components.engine.generate(
                [self.rollout.samples[followed].prompt], num_responses=8, temperature=1.0, key="tutorial"
            )[0]
            after = self.components.policy.logprobs(self.experience.sequences, self.config.rollout.temperature).result()
            return {
                "num_samples": len(self.rollout.samples),
                "num_prompts": len(groups),
                "lengths": sorted({int(length) for length in self.samples.mask.sum(1)}),
                "prompt": self._describe_prompt(self.rollout.samples[followed].prompt),
                "responses": [self._describe_response(row) for row in rows],
                "followed": rows.index(followed),
                "tokens": self._describe_tokens(followed, after),
                "logprob_before": float(self.experience.old_logprobs[followed].sum()),
                "logprob_after": float(after[followed].sum()),
                "minibatch_of_each": [
                    next(n for n, part in enumerate(minibatches, start=1) if row in part.tolist()) for row in rows
                ],
                "steps": self._describe_steps(),
                "sync": self._describe_sync(),
                "again": [
                    {
                        "text": response.text,
                        "num_tokens": len(response.token_ids),
                        "versions": sorted(set(response.weight_versions)),
                    }
                    for response in again
                ],
            }

        def _describe_prompt(self, prompt: Any) -> dict[str, Any]:
            return {"id": prompt.id, "text": prompt.text, "token_ids": list(prompt.token_ids), "answer": prompt.answer}

        def _describe_response(self, row: int) -> dict[str, Any]:
            from megarl.algo.advantages import compute_adaptive_lambda

            sample, mask = self.rollout.samples[row], self.samples.mask[row]
            algo = self.config.algo
            lambda_ = compute_adaptive_lambda(mask.sum()[None], algo.length_alpha, algo.lambda_min)
            return {
                "text": sample.response.text,
                "num_tokens": int(mask.sum()),
                "finish_reason": sample.response.finish_reason.value,
                "reward": sample.score.reward,
                "details": dict(sample.score.details),
                "lambda": float(lambda_),
                "first_value": float(self.experience.values[row][0]),
                "advantage_mean": float(self.samples.advantages[row][mask].mean()),
            }

        def _describe_tokens(self, row: int, after: Any) -> list[dict[str, Any]]:
            response = self.rollout.samples[row].response
            pieces = tokenizer.convert_ids_to_tokens(list(response.token_ids))
            return [
                {
                    "id": token,
                    "token": pieces[t],
                    "version": response.weight_versions[t],
                    "rollout_logprob": float(self.experience.rollout_logprobs[row, t]),
                    "old_logprob": float(self.experience.old_logprobs[row, t]),
                    "value": float(self.experience.values[row, t]),
                    "advantage": float(self.samples.advantages[row, t]),
                    "return": float(self.samples.returns[row, t]),
                    "logprob_after": float(after[row, t]),
                }
                for t, token in enumerate(response.token_ids)
            ]

        def _describe_steps(self) -> dict[str, list[dict[str, float]]]:
            wanted = {
                "policy": ("loss", "clip_frac", "ratio_max", "approx_kl", "positive_lm", "grad_norm", "lr"),
                "critic": ("loss", "abs_error", "grad_norm", "lr"),
            }
            return {
                role: [
                    {name: float(step[f"{role}/{name}"]) for name in names}
                    for step in getattr(self.components, role).updates[-1].result()
                ]
                for role, names in wanted.items()
            }

        def _describe_sync(self) -> dict[str, Any]:
            session = self.components.sync._ranks.session
            sent, held = self.checksums
            name = sorted(held[0])[0]
            return {
                "version": self.version,
                "bytes": self.synced["sync/bytes"],
                "bytes_over_bound": self.synced["sync/bytes_over_bound"],
                "probe_logprob_gap": self.synced["sync/probe_logprob_gap"],
                "num_buckets": len(session.buckets),
                "num_training_ranks": session.num_ranks[0],
                "num_server_ranks": session.num_ranks[1],
                "num_tensors": len(held[0]),
                "tensor": name,
                "policy_checksum": f"{sum(part.get((0, name), 0) for part in sent) % 2**64:016x}",
                "server_checksum": f"{held[0][name]:016x}",
            }

    policy, critic = RecordedRole(components.policy), RecordedRole(components.critic)
    recorder = Recorder(config, replace(components, policy=policy, critic=critic))
    # The only place where both sides' checksums are at hand is the call that compares them.
    ranks = components.sync._ranks
    call = ranks.side_by_side

    def record_checksums(sending: str, *arguments: Any, **options: Any) -> Any:
        found = call(sending, *arguments, **options)
        if sending == "checksum":
            recorder.checksums = found
        return found

    ranks.side_by_side = record_checksums
    return recorder


def _list_groups(samples: Sequence[Any]) -> list[list[int]]:
    """Row numbers of each group."""
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(row)
    return list(groups.values())


def _read_lines(file: Path, prefix: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name.removeprefix(prefix): v for name, v in line.items() if name.startswith(prefix)} for line in lines]


def _round(value: Any) -> Any:
    """Floats with six significant digits: more would differ between machines."""
    if isinstance(value, dict):
        return {key: _round(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_round(child) for child in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


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
    return [] if found == expected or name.endswith("_checksum") else [f"{name}: {found!r} found, {expected!r} recorded"]


def render(numbers: dict[str, Any]) -> str:
    """docs/tutorial.md. Raises KeyError for a name in the template that has no value."""
    return string.Template(TEMPLATE.read_text()).substitute(build_values(numbers))


def build_values(numbers: dict[str, Any]) -> dict[str, str]:
    """What the template's names stand for."""
    from megarl.config.load import load_config

    config = load_config([])
    algo, prompt, sync = config.algo, numbers["prompt"], numbers["sync"]
    best = numbers["responses"][numbers["followed"]]
    tokens, steps = numbers["tokens"], numbers["steps"]["policy"]
    first, last, size = tokens[0], tokens[-1], config.train.samples_per_minibatch
    return {
        "prompt_text": prompt["text"],
        "prompt_ids": ", ".join(map(str, prompt["token_ids"])),
        "prompt_answer": prompt["answer"],
        "num_prompts": str(numbers["num_prompts"]),
        "num_responses": str(len(numbers["responses"])),
        "num_samples": str(numbers["num_samples"]),
        "samples_per_minibatch": str(size),
        "num_steps": str(len(steps)),
        "response_length": str(config.rollout.response_length),
        "pretraining": _table(
            ["step", "explained variance", "critic loss"],
            [[n, s["explained_variance"], s["loss"]] for n, s in enumerate(numbers["pretraining"], start=1)],
        ),
        "num_pretraining": str(len(numbers["pretraining"])),
        "heldout_before": _format(numbers["before"]["heldout"]),
        "responses": _table(
            ["", "response", "tokens", "reward", "letters", "length", "lambda", "V of first token", "mean A", "step"],
            [
                [
                    "**followed**" if n == numbers["followed"] else n + 1,
                    f"`{r['text']}`" if r["text"] else "(empty)",
                    r["num_tokens"],
                    r["reward"],
                    r["details"].get("letters", ""),
                    r["details"].get("length", ""),
                    r["lambda"],
                    r["first_value"],
                    r["advantage_mean"],
                    numbers["minibatch_of_each"][n],
                ]
                for n, r in enumerate(numbers["responses"])
            ],
        ),
        "text": best["text"],
        "length": str(best["num_tokens"]),
        "finish_reason": best["finish_reason"],
        "reward": _format(best["reward"]),
        "letters": _format(best["details"].get("letters", 0.0)),
        "length_score": _format(best["details"].get("length", 0.0)),
        "lambda": _format(best["lambda"]),
        "length_alpha": _format(algo.length_alpha),
        "lambda_min": _format(algo.lambda_min),
        "shortest_at_min": str(math.floor(1 / (algo.length_alpha * (1 - algo.lambda_min)))),
        "clip_low": _format(1 - algo.clip_low),
        "clip_high": _format(1 + algo.clip_high),
        "shortest": str(numbers["lengths"][0]),
        "longest": str(numbers["lengths"][-1]),
        "tokens": _tokens_table(tokens),
        "largest_gap": f"{max(abs(t['rollout_logprob'] - t['old_logprob']) for t in tokens):.1e}",
        "largest_gap_of_all": f"{numbers['metrics']['mismatch/logprob_gap_max']:.1e}",
        "last_value": _format(last["value"]),
        "last_advantage": _format(last["advantage"]),
        "first_value": _format(first["value"]),
        "first_return": _format(first["return"]),
        "first_advantage": _format(first["advantage"]),
        "explained": _format(numbers["metrics"]["critic/explained_variance"]),
        "reward_mean": _format(numbers["metrics"]["reward/mean"]),
        "length_mean": _format(numbers["metrics"]["length/mean"]),
        "lambda_at_min": _format(numbers["metrics"]["advantage/lambda_at_min_frac"]),
        "minibatch": str(numbers["minibatch_of_each"][numbers["followed"]]),
        "policy_steps": _table(
            ["step", "loss", "clip fraction", "largest ratio", "approx. KL", "gradient norm", "learning rate"],
            [
                [n, s["loss"], s["clip_frac"], s["ratio_max"], s["approx_kl"], s["grad_norm"], s["lr"]]
                for n, s in enumerate(steps, start=1)
            ],
        ),
        "critic_steps": _table(
            ["step", "loss", "mean abs(V - G)", "gradient norm", "learning rate"],
            [
                [n, s["loss"], s["abs_error"], s["grad_norm"], s["lr"]]
                for n, s in enumerate(numbers["steps"]["critic"], start=1)
            ],
        ),
        "first_grad_norm": _format(steps[0]["grad_norm"]),
        "clip_grad": _format(config.policy.optimizer.clip_grad),
        "logprob_before": _format(numbers["logprob_before"]),
        "logprob_after": _format(numbers["logprob_after"]),
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
        "again": _table(
            ["response", "tokens", "weight version"],
            [
                [f"`{r['text']}`" if r["text"] else "(empty)", r["num_tokens"], ", ".join(map(str, r["versions"]))]
                for r in numbers["again"]
            ],
        ),
    }


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "write", "check"))
    action = parser.parse_args().action
    if action == "record":
        NUMBERS.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n")
    if action == "check":
        differences = find_differences(record(), json.loads(NUMBERS.read_text()))
        print("\n".join(differences) or f"{NUMBERS.relative_to(ROOT)} is what the default configuration gives")
        return 1 if differences else 0
    TUTORIAL.write_text(render(json.loads(NUMBERS.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
