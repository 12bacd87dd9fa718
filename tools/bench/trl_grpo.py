"""TRL's GRPOTrainer for tools/bench/beside_trl.py, which runs this with the Python of TRL's own environment.

Run: PYTHON tools/bench/trl_grpo.py SPEC.json, where SPEC has the keys that are read here. An iteration waits for the
line `go` on standard input and is then answered by one line of JSON on standard output; everything else that is printed
goes to standard error. Imports nothing of megarl.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHANNEL = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402


def answer(**fields: Any) -> None:
    CHANNEL.write(json.dumps(fields) + "\n")


def score(completions: Sequence[str], **unused: Any) -> list[float]:
    """The share of the letter e: any number that differs between responses would do."""
    return [text.count("e") / max(1, len(text)) for text in completions]


class Turns(TrainerCallback):
    """Each optimizer step, which is one iteration, waits until it is asked for."""

    def __init__(self) -> None:
        self.start, self.generation_s, self.lengths = 0.0, 0.0, [0]

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if sys.stdin.readline().strip() != "go":
            sys.exit(0)
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self.start
        lengths = [min(self.lengths), max(self.lengths)]
        answer(seconds=seconds, generation=self.generation_s, training=seconds - self.generation_s, lengths=lengths)


class TimedTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    turns: Turns

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.turns.generation_s = time.perf_counter() - start
        self.turns.lengths = found["completion_mask"].sum(1).tolist()
        return found


def build_config(spec: dict[str, Any], output_dir: str) -> Any:
    num_samples, dtype = len(spec["prompts"]) * spec["num_responses"], spec["dtype"]
    return trl.GRPOConfig(
        output_dir=output_dir,
        num_generations=spec["num_responses"],
        per_device_train_batch_size=spec["rows_per_microbatch"],
        gradient_accumulation_steps=num_samples // spec["rows_per_microbatch"],
        max_completion_length=spec["response_length"],
        generation_kwargs={"min_new_tokens": spec["response_length"]},
        max_steps=spec["num_iterations"],
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        # Every activation is kept, as by megarl: TRL's default computes the forward pass twice.
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": dtype},
        bf16=dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    if tokenizer(spec["prompts"])["input_ids"] != spec["prompt_ids"]:
        sys.exit("TRL's prompts have other tokens than megarl's")
    turns = Turns()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=spec["model"],
            reward_funcs=score,
            args=build_config(spec, scratch),
            train_dataset=datasets.Dataset.from_dict({"prompt": spec["prompts"]}),
            processing_class=tokenizer,
            callbacks=[turns],
        )
        trainer.turns = turns
        answer(versions={"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__})
        trainer.train()


if __name__ == "__main__":
    main()
