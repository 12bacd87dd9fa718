"""By the command: a policy that imitates a file, what it says measured by transformers too, and what it teaches to a
student of another size, on-policy and by its saved responses.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from test_saved_rollouts import write
from whole_runs import train

from megarl.config.load import load_config
from megarl.models.checkpoint import default_cache_dir, resolve_checkpoint
from megarl.report.record import load_metrics
from megarl.rollout.rollout_file import read_rollouts
from megarl.types import FinishReason, Prompt, Response, Sample, Score

pytestmark = [pytest.mark.slow, pytest.mark.long]

VOCABULARY = ["<pad>", "<bos>", "<eos>", *"abcdef.="]
SIZES = (
    *("train.samples_per_iteration=64", "train.num_minibatches=2", "train.num_iterations=1", "train.eval_every=1"),
    *("train.num_eval_prompts=8", "logger.save_rollouts=true"),
)


def write_answers(path: Path, num: int) -> Path:
    """The answer is the prompt's first letter, four times."""
    chosen, lines = random.Random(path.name), []
    for _ in range(num):
        letters = "".join(chosen.choices("abcdef", k=5))
        lines.append(json.dumps({"prompt": f"{letters}=", "answer": letters[0] * 4}))
    path.write_text("\n".join(lines))
    return path


def score(directory: Path, rows: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """transformers' log-probs of each response to its prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for prompt, response in rows:
            logprobs = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found.append(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0])
    return found


def load_samples(run_dir: Path) -> list[Sample]:
    return [sample for rollout, _ in read_rollouts(run_dir / "rollouts.jsonl") for sample in rollout.samples]


def test_what_a_file_taught_is_transformers_loss_and_is_taught_to_a_student(short_path: Path) -> None:
    files = [write_answers(short_path / name, number) for name, number in (("train.jsonl", 512), ("heldout.jsonl", 48))]
    train(
        *("model=tiny", "experiment=sft", f"data.path={files[0]}", f"data.heldout_path={files[1]}"),
        *("train.samples_per_iteration=128", "train.num_minibatches=4", "train.num_iterations=8", "train.eval_every=4"),
        *("policy.optimizer.lr=2e-3", f"hydra.run.dir={short_path}/sft", "data.prompt_length=8"),
    )
    lines = load_metrics(short_path / "sft" / "metrics.jsonl")
    measured = [line["heldout/logprob"] for line in lines if "heldout/logprob" in line]
    assert measured[-1] > measured[0] + 0.5
    rows = []
    for record in map(json.loads, files[1].read_text().splitlines()):
        answer = [*map(VOCABULARY.index, record["answer"]), VOCABULARY.index("<eos>")]
        rows.append((list(map(VOCABULARY.index, record["prompt"])), answer))
    start = resolve_checkpoint(load_config(["model=tiny"]).model, default_cache_dir())
    for directory, expected in ((start, measured[0]), (short_path / "sft" / "policy", measured[-1])):
        assert float(torch.cat(score(directory, rows)).mean()) == pytest.approx(expected, rel=1e-4)

    # A student of three layers; each source of a mix has a teacher of its own.
    student = ("model=tiny", "model.random.num_layers=3")
    start = resolve_checkpoint(load_config(["model=tiny"]).model, default_cache_dir())
    source = "{kind: letter_count, num_heldout: 8, options: {letters: %s, max_dots: 4}, share: %g}"
    train(
        *(*student, "algo=distill", "data=mix", f"data.sources.one={source % ('abc', 0.9)}", *SIZES),
        *(f"data.sources.two={source % ('def', 0.1)}", "reward=letter_count", "data.prompt_length=32"),
        *(f"reference.init={short_path}/sft/policy", f"reference.by_source.two={start}", "reference.dtype=float32"),
        *("reference.parallel.num_processes=2", f"hydra.run.dir={short_path}/both"),
    )
    samples = load_samples(short_path / "both")
    gaps = []
    for name, directory in (("one", short_path / "sft" / "policy"), ("two", start)):
        asked = [sample for sample in samples if sample.prompt.source == name]
        given = [(list(sample.prompt.token_ids), sample.response.token_ids.tolist()) for sample in asked]
        own = torch.cat([torch.tensor(sample.response.rollout_logprobs) for sample in asked])
        gaps.append(own - torch.cat(score(directory, given)))
    line = load_metrics(short_path / "both" / "metrics.jsonl")[-1]
    assert line["kl/mean"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-3)
    assert line["advantage/mean"] == pytest.approx(-line["kl/mean"], rel=1e-5)
    assert line["advantage/max_abs"] == pytest.approx(float(torch.cat(gaps).abs().max()), rel=1e-3)
    assert abs(float(gaps[0].mean() - gaps[1].mean())) > 0.1

    # What the teacher says, with its log-probs; the student learns it.
    teacher, said = score(short_path / "sft" / "policy", rows[:16]), []
    for group, ((prompt, answer), logprobs) in enumerate(zip(rows, teacher, strict=False)):
        generated, versions = [True] * len(answer), [0] * len(answer)
        response = Response(answer, "", logprobs.tolist(), generated, versions, FinishReason.stop)
        asked = Prompt(str(group), "".join(VOCABULARY[token] for token in prompt), tuple(prompt), "")
        said += [Sample(asked, response, Score(1.0, True), group)] * 4
    file = write(short_path / "said.jsonl", [said])
    train(
        *(*student, "algo=distill", "algo.kl.in_advantage=false", "algo.rl_loss_coef=0", "algo.positive_lm_coef=1"),
        *("algo.positive_threshold=0", f"rollout.file={file}", "train.num_minibatches=1"),
        *("train.samples_per_iteration=64", "train.num_iterations=1", f"hydra.run.dir={short_path}/heard"),
    )
    line = load_metrics(short_path / "heard" / "metrics.jsonl")[-1]
    given = [(list(sample.prompt.token_ids), sample.response.token_ids.tolist()) for sample in said]
    start = resolve_checkpoint(load_config(list(student)).model, default_cache_dir())
    own = torch.cat(score(start, given))
    ratio = own - torch.cat([torch.tensor(sample.response.rollout_logprobs) for sample in said])
    assert line["policy/positive_lm"] == pytest.approx(-float(own.mean()), rel=1e-4)
    assert line["policy/approx_kl"] == pytest.approx(float((ratio.expm1() - ratio).mean()), rel=1e-3)
