"""The `train` group: sizes of an iteration, how long to train, evaluation."""

from dataclasses import dataclass, field

from omegaconf import MISSING

DEFAULT_PROMPTS = 512
"""Prompts of an iteration where neither prompts_per_iteration nor samples_per_iteration is given."""


@dataclass
class EvalSetConfig:
    """A further set of problems that is evaluated during training, with the reward and the prompts of the run."""

    path: str = MISSING
    """File (.jsonl, .parquet) or directory of a dataset with the same fields as data.path."""
    num_prompts: int | None = None
    """Prompts, drawn at random under `seed`; null: all."""
    num_samples: int = 1
    """Responses to each."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling, as evaluate.top_p; only with a temperature above 0."""
    top_k: int = -1
    """As evaluate.top_k; only with a temperature above 0."""


@dataclass
class TrainConfig:
    num_iterations: int = 100
    """Iterations of the whole training; each is a rollout and the update on its responses. 0: value pretraining alone,
    whose iterations come before them (algo.value_pretrain)."""
    samples_per_iteration: int | None = None
    """Responses of one iteration; the number of prompts follows: samples_per_iteration / responses_per_prompt. Only
    where prompts_per_iteration is null; null in both is 512 prompts."""
    prompts_per_iteration: int | None = None
    """Prompts of one iteration; overrides samples_per_iteration. null: samples_per_iteration decides."""
    responses_per_prompt: int = 1
    """K, the responses sampled for each prompt: the group size."""
    samples_per_minibatch: int = 512
    """Samples of one optimizer step, over all data-parallel ranks. Only where num_minibatches is null."""
    num_minibatches: int | None = None
    """Minibatches that the samples of an iteration are split into; overrides samples_per_minibatch. null:
    samples_per_minibatch decides."""
    tokens_per_microbatch: int = 16384
    """Maximum number of tokens of one forward pass, prompts included; a longer sequence is a micro-batch alone."""
    epochs_per_iteration: int = 1
    """Passes of the update over the samples of an iteration."""
    reuse_logprobs: bool = True
    """Take the update's own log-probs, detached, as old_logprobs, where each iteration is one optimizer step and
    nothing reads them before it: the gradient is the same, and a forward pass over all responses is saved. false: the
    policy always scores the responses first."""
    eval_every: int = 10
    """Iterations between evaluations on held-out prompts; they also run before the first and after the last."""
    num_eval_prompts: int = 256
    """Maximum number of held-out prompts of an evaluation."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Further sets to evaluate on, by name, each with `path`, `num_prompts` (null: all), `num_samples` (1),
    `temperature` (0), `top_p` (1) and `top_k` (-1), as in train.eval_sets='{gsm8k: {path: test.jsonl}}'; logged as
    eval/NAME/*."""
    stop_at_heldout_reward: float | None = None
    """End early once the held-out reward reaches this; null: never."""
    max_samples: int | None = None
    """End after the iteration in which this many responses have been generated in all, those of value pretraining and
    of groups that dynamic sampling dropped included; null: no limit."""
    max_minutes: float | None = None
    """End cleanly after the iteration in which this many minutes have passed since the run started, the start of its
    processes included; what is left of that iteration, the last evaluation and the checkpoint come on top. A resumed
    run counts from 0 again. null: no limit."""

    profile: int | None = None
    """The iteration to profile, from 1: a timeline of all processes and torch's traces of the roles are written to
    RUN_DIR/profile (docs/profiling.md). null: none."""
    deterministic: bool = False
    """Training processes on GPUs use kernels that give the same weights from the same rollouts, and are slower for it
    (docs/reliability.md, On a GPU). On a CPU they always do."""

    @property
    def num_prompts(self) -> int:
        """Prompts of one iteration."""
        if self.prompts_per_iteration is not None:
            return self.prompts_per_iteration
        if self.samples_per_iteration is not None:
            return self.samples_per_iteration // self.responses_per_prompt
        return DEFAULT_PROMPTS

    @property
    def num_samples(self) -> int:
        """Responses of one iteration: prompts x responses."""
        return self.num_prompts * self.responses_per_prompt

    @property
    def minibatch_size(self) -> int:
        """Samples of one optimizer step."""
        if self.num_minibatches is not None:
            return self.num_samples // self.num_minibatches
        return self.samples_per_minibatch

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in one iteration."""
        return self.num_samples // max(1, self.minibatch_size) * self.epochs_per_iteration
