"""docs/tutorial.md: one prompt of the default run, followed through one iteration with its real numbers.

    python tools/docs/tutorial.py record    run that iteration, write docs/tutorial.json and docs/tutorial.md
    python tools/docs/tutorial.py write     docs/tutorial.md from docs/tutorial.json and tools/docs/tutorial_template.md
    python tools/docs/tutorial.py check     run it again; exit code 1 where it differs from docs/tutorial.json

`record` and `check` start Ray, one SGLang server, the policy and the critic, and take about a minute on two cores.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutorial_text import NUMBERS, TUTORIAL, find_differences, render

from megarl.algo.advantages.gae import compute_adaptive_lambda
from megarl.config.load import load_config
from megarl.minibatches import split_minibatches
from megarl.report.report import build_report
from megarl.run.inputs import load_inputs
from megarl.run.job import open_components, open_resources
from megarl.trainer import Trainer
from megarl.value_pretraining.loop import pretrain_critic

KEPT_METRICS = (
    "reward/mean",
    "length/mean",
    "advantage/lambda_mean",
    "advantage/lambda_at_min_frac",
    "critic/explained_variance",
    "mismatch/kl",
    "mismatch/logprob_gap_max",
)


def record() -> dict[str, Any]:
    """The numbers of the first iteration of `python -m megarl.train`, by the real loop over the real parts."""
    config = load_config(["logger.terminal=false", "logger.tensorboard=false"])
    inputs = load_inputs(config)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run_dir = Path(folder)
        report = build_report(config.logger, run_dir, config.train.num_iterations)
        stack.enter_context(contextlib.closing(report))
        resources = stack.enter_context(open_resources(config, inputs, run_dir / "logs"))
        components = stack.enter_context(open_components(config, inputs, resources, run_dir, report))
        recorder = Recorder(config, components, inputs.tokenizer)
        pretrain_critic(recorder)
        recorder.publish_and_evaluate()
        recorder.train(1)
        recorder.publish_and_evaluate()
        numbers = recorder.describe()
        report.close()
        numbers["pretraining"] = _read_lines(run_dir / "value_pretrain.jsonl", "pretrain/")
        first, second = _read_lines(run_dir / "metrics.jsonl", "")
        numbers["before"] = {"heldout": first["reward/heldout"]}
        numbers["metrics"] = {name: second[name] for name in KEPT_METRICS}
    rounded: dict[str, Any] = _round(numbers)
    return rounded


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
    """A Trainer that keeps what passes between the stages of its loop."""

    def __init__(self, config: Any, components: Any, tokenizer: Any) -> None:
        policy, critic = RecordedRole(components.policy), RecordedRole(components.critic)
        super().__init__(config, replace(components, policy=policy, critic=critic))
        self.tokenizer = tokenizer
        # The only place where both sides' checksums are at hand is the call that compares them.
        self.ranks = components.sync._ranks
        call = self.ranks.call_both_sides

        def record_checksums(sending: str, *arguments: Any, **options: Any) -> Any:
            found = call(sending, *arguments, **options)
            if sending == "checksum":
                self.checksums = found
            return found

        self.ranks.call_both_sides = record_checksums

    def collect(self, iteration: int) -> Any:
        self.rollout, metrics = super().collect(iteration)
        return self.rollout, metrics

    def build_experience(self, rollout: Any) -> Any:
        self.experience, metrics = super().build_experience(rollout)
        self.values: Any = self.experience.values
        return self.experience, metrics

    def build_targets(self, experience: Any, algo: Any) -> Any:
        self.samples, metrics = super().build_targets(experience, algo)
        self.returns: Any = self.samples.returns
        return self.samples, metrics

    def publish(self, version: int) -> Any:
        self.synced = super().publish(version)
        return self.synced

    def describe(self) -> dict[str, Any]:
        groups = _list_groups(self.rollout.samples)
        rows = max(groups, key=lambda rows: statistics.pstdev(self.rollout.samples[i].score.reward for i in rows))
        followed = max(rows, key=lambda row: self.rollout.samples[row].score.reward)
        minibatches = split_minibatches(self.config, len(self.rollout.samples), 1)
        asked = [self.rollout.samples[followed].prompt]
        assert self.components.collector is not None
        again = [sample.response for sample in self.components.collector.sample(asked, 8, key="tutorial")]
        after = self.components.policy.logprobs(self.experience.sequences, self.config.rollout.temperature).result()
        return {
            "num_samples": len(self.rollout.samples),
            "num_prompts": len(groups),
            "lengths": sorted({int(length) for length in self.samples.mask.sum(1)}),
            "prompt": self._describe_prompt(self.rollout.samples[followed].prompt),
            "responses": [self._describe_response(row) for row in rows],
            "followed": rows.index(followed),
            "tokens": self._describe_tokens(followed, after),
            "largest_gap": float(
                (self.experience.rollout_logprobs[followed] - self.experience.old_logprobs[followed]).abs().max()
            ),
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
                    "versions": sorted(set(response.weight_versions.versions)),
                }
                for response in again
            ],
        }

    def _describe_prompt(self, prompt: Any) -> dict[str, Any]:
        return {"id": prompt.id, "text": prompt.text, "token_ids": list(prompt.token_ids), "answer": prompt.answer}

    def _describe_response(self, row: int) -> dict[str, Any]:
        sample, mask = self.rollout.samples[row], self.samples.mask[row]
        algo = self.config.algo
        lambda_ = compute_adaptive_lambda(mask.sum()[None], algo.length_alpha, algo.lambda_min)
        return {
            "text": sample.response.text,
            "token_ids": sample.response.token_ids.tolist(),
            "num_tokens": int(mask.sum()),
            "finish_reason": sample.response.finish_reason.value,
            "reward": sample.score.reward,
            "details": dict(sample.score.details),
            "lambda": float(lambda_),
            "first_value": float(self.values[row][0]),
            "advantage_mean": float(self.samples.advantages[row][mask].mean()),
        }

    def _describe_tokens(self, row: int, after: Any) -> list[dict[str, Any]]:
        response = self.rollout.samples[row].response
        pieces = self.tokenizer.convert_ids_to_tokens(response.token_ids.tolist())
        versions = response.weight_versions.expand()
        return [
            {
                "id": token,
                "token": pieces[t],
                "version": int(versions[t]),
                "rollout_logprob": float(self.experience.rollout_logprobs[row, t]),
                "old_logprob": float(self.experience.old_logprobs[row, t]),
                "value": float(self.values[row, t]),
                "advantage": float(self.samples.advantages[row, t]),
                "return": float(self.returns[row, t]),
                "logprob_after": float(after[row, t]),
            }
            for t, token in enumerate(response.token_ids.tolist())
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
        session = self.ranks.session
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "write", "check"))
    action = parser.parse_args().action
    if action == "record":
        NUMBERS.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n")
    if action == "check":
        differences = find_differences(record(), json.loads(NUMBERS.read_text()))
        print("\n".join(differences) or f"{NUMBERS.name} is what the default configuration gives")
        return 1 if differences else 0
    TUTORIAL.write_text(render(json.loads(NUMBERS.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
