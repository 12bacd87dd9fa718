"""The root of the configuration and what surrounds the loop: rollout.*, train.*, evaluate.*, cluster.*, checkpoint.*,
logger.*; the registration with Hydra, and the resolvers of conf/.

`${megarl_run_name:...}`, `algo.clip_high=0.24,seed=2_1f9c0b`, is the folder of one run of a sweep: its swept values, to
be read, and a digest of what it computes, which follows from the configuration alone: a sweep that is started again,
with more values or in another order, finds the folders of the runs that it already has.

`${cpu_dtype:${cluster.gpus_per_node}}` is the faster dtype of this machine, for presets of small models.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from megarl.config.schema.algo import AlgoConfig, compares_pairs, needs_reference
from megarl.config.schema.key import (
    DEADLINE,
    EVALUATED,
    GENERATED,
    NOT_ALONE,
    SAMPLED,
    START,
    TRAINED,
    WITH_CRITIC,
    Effect,
    key,
    needs,
)
from megarl.config.schema.roles import CriticConfig, Dtype, ModelConfig, PolicyConfig, ReferenceConfig
from megarl.config.schema.task import SCHEMAS, DataConfig, EnvironmentConfig, RewardConfig

MAX_SAMPLES = 2**20
"""Responses that are held at a time, a hundred times those of the largest published runs (8192 an iteration)"""
THREADS: dict[str, Any] = {"low": 1, "high": 1024, "why": "more than any node has cores"}
KNOWN: dict[str, Any] = {"above": 0, "when": needs("gpu")}
SAVES = needs("save_every")
NOT_OF_EVALUATION = Effect(lambda it: it.command != "evaluate", "in an evaluation, which has evaluate.temperature")
OF_HELDOUT = Effect(
    lambda it: it.command != "evaluate" or it.config.evaluate.heldout,
    "in an evaluation of whole sets; it counts with evaluate.heldout=true (evaluate.num_problems=N takes a part)",
)
SHARES_GPUS = Effect(
    lambda it: it.offloads_servers,
    "where servers share no GPU with a role; it counts with cluster.placement=colocated",
)
WITHOUT_PASS = Effect(
    lambda it: it.objective.reads_old_logprobs(it.config.algo) and not it.objective.needs_pass(it.config),
    "where the policy scores the responses before its update in any case, or nothing reads old_logprobs; it counts"
    " with one optimizer step in an iteration, and without a KL in rewards or advantages, topr, rollout.router_replay"
    " and FP8",
)
IS_MEASURED = Effect(
    lambda it: GENERATED.counts(it) or not it.node.best_metric.startswith(("reward/", "heldout/")),
    "with rollout.file and checkpoint.best_metric={node.best_metric}, of generated responses; it counts with another",
)

LEAST_OF_KIND = 0.95
"""Least share of memory_gib that a GPU of the kind has: it differs a little, by driver and ECC."""


@dataclass
class HardwareConfig:
    """What the planner computes memory and time from: one kind of GPU, the same on every node. Peaks are the data
    sheet's, without sparsity, in 1e12 operations a second; bandwidths are in one direction, in 1e9 bytes a second."""

    gpu: str | None = None
    """Name of the GPU; null: unknown, nothing is planned."""
    memory_gib: float = key(0.0, **KNOWN)
    """Memory of a GPU in GiB, as torch.cuda.get_device_properties tells it."""
    bf16_tflops: float = key(0.0, **KNOWN)
    """Peak of bfloat16 matrix products."""
    fp8_tflops: float = key(0.0, **KNOWN)
    """The same in FP8."""
    hbm_gb_s: float = key(0.0, **KNOWN)
    """Bandwidth between a GPU and its memory."""
    nvlink_gb_s: float = key(0.0, **KNOWN)
    """Bandwidth from a GPU to others of its node."""
    network_gb_s: float = key(0.0, **KNOWN)
    """Bandwidth from a GPU to other nodes."""
    pcie_gb_s: float = key(64.0, **KNOWN)
    """Bandwidth between a GPU and its host (PCIe 5.0 x16)."""
    disk_gb_s: float = key(5.0, **KNOWN)
    """Measured speed of a node on the shared file system."""
    host_memory_gib: float = key(0.0, **KNOWN)
    """Memory of a node in GiB."""


SERVERS = "servers"
"""The name of the servers beside those of the roles"""
AUTO = "auto"
"""Value of listen_host: the address by which a process's node is known to the others; of ray_address: RAY_ADDRESS."""


Placement = Enum("Placement", {"colocated": "colocated", "split": "split", "apart": "apart"})


@dataclass
class ClusterConfig:
    cpu_threads_per_worker: int | None = key(None, when=TRAINED, **THREADS)
    """CPU threads of each training process; null: the cores, shared by those at work."""
    object_store_mb: int = key(256, low=75, high=2**24, why="MiB; Ray takes no less, and no node has as much memory")
    """Shared memory of Ray's object store on each node, in MiB; an iteration's samples pass through it."""
    worker_start_deadline_s: float = key(300.0, when=TRAINED, **START)
    """Deadline for Ray or its nodes to start, and then for the training processes."""
    call_deadline_s: float = key(1800.0, when=TRAINED, **DEADLINE)
    """Deadline of one call to a training process (log-probs, values, an update, an export)."""
    collective_deadline_s: float | None = key(None, when=TRAINED, **DEADLINE)
    """Longest wait of a training process for others of its role within a call; null: as long as the call may take."""
    shutdown_deadline_s: float = key(15.0, **DEADLINE)
    """Deadline for all processes to end; then they are killed."""
    ray_deadline_s: float = key(120.0, **START)
    """Deadline for an answer of Ray itself; then the run ends."""
    listen_host: str = "127.0.0.1"
    """Address on which servers and process groups listen; auto: each node's own, needed for several nodes."""
    num_nodes: int = key(1, low=1, high=100_000)
    """Number of nodes."""
    gpus_per_node: int = key(0, low=0, high=1024)
    """GPUs of each node; 0: GPUs are not counted, and every process sees all of them."""
    placement: Placement = key(Placement.apart, when=needs("gpus_per_node"))
    """With gpus_per_node above 0: which of policy, critic, reference and servers share GPUs. colocated: all; split: the
    servers use the GPUs after those of the roles; apart: none."""
    ray_address: str | None = None
    """HOST:PORT of a running Ray cluster of num_nodes nodes; auto: from RAY_ADDRESS; null: the run starts Ray."""
    hardware: HardwareConfig = key(factory=HardwareConfig, when=TRAINED)
    """The hardware that a job is planned for before its processes start."""


NO_QUANTIZED_WEIGHTS = (
    "servers hold the policy's weights in rollout.dtype=float32 or bfloat16: SGLang replaces weights by quantized ones"
    " of another shape as it loads them, which a weight sync cannot write and its checksums cannot verify"
    " (docs/architecture.md, Weight sync)"
)


Transport = Enum("Transport", {"colocated": "colocated", "split": "split", "disk": "disk"})
TooStale = Enum("TooStale", {"mask": "mask", "correct": "correct", "wait": "wait"})
ServerOffload = Enum("ServerOffload", {"kv_cache": "kv_cache", "all": "all"})


@dataclass
class RolloutConfig:
    response_length: int = key(1024, low=1, despite=(GENERATED, SAMPLED))
    """Maximum tokens of a response."""
    temperature: float = key(1.0, low=0.01, high=100, despite=GENERATED, when=NOT_OF_EVALUATION)
    """Divides the logits in sampling and in every log-prob of training; evaluations in training are greedy."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response in addition to the end-of-sequence token, each one token of the model."""
    stop_token_ids: list[int] = field(default_factory=list)
    """The same as token ids."""
    dtype: Dtype = Dtype.bfloat16
    """Type of the servers' weights, activations and KV cache. Weights are not quantized (docs/architecture.md)."""
    num_servers: int = key(1, low=1, high=100_000, why="each is a process")
    """SGLang servers, among which requests are distributed."""
    tp: int = key(1, low=1, high=1024, why="a server is on one node")
    """Tensor parallelism of SGLang: GPUs of one server."""
    max_running_requests: int = key(128, low=1, high=65536, why="SGLang reserves a row of positions for each")
    """Maximum requests that a server processes at the same time."""
    kv_cache_tokens: int | None = key(None, low=1, high=2**31 - 1, why="SGLang counts them in 32 bits")
    """Tokens of KV cache per server; null: SGLang decides (a CPU needs a number)."""
    offload: ServerOffload | None = key(None, when=(TRAINED, SHARES_GPUS))
    """GPU memory that servers release while roles on the same GPUs compute: the KV cache, or all; needs
    max_staleness=0."""
    num_threads: int | None = key(None, **THREADS)
    """CPU threads of a server's forward pass; null: as cluster.cpu_threads_per_worker."""
    startup_deadline_s: float = key(300.0, **START)
    """Deadline for a server's first answer after its start."""
    request_deadline_s: float = key(600.0, **DEADLINE)
    """Deadline of one request; with max_staleness, waits for weight syncs and evaluations included."""
    sync_deadline_s: float = key(300.0, when=TRAINED, **DEADLINE)
    """Deadline of one weight sync, verification included."""
    transport: Transport = key(Transport.colocated, when=TRAINED)
    """How weights reach the servers. colocated: shared memory within a node, between nodes as split; split: point to
    point over NCCL (gloo on a CPU); disk: a shared directory."""
    sync_bucket_mb: int = key(64, low=1, high=16384, when=(TRAINED, needs("transport", "colocated", "split")))
    """Maximum MiB of one message of weights; a rank holds two."""
    max_server_restarts: int = key(3, low=0)
    """Restarts of lost servers in one rollout or sync before the run ends."""
    max_staleness: int = key(0, low=0, high=100, despite=GENERATED, when=TRAINED)
    """Maximum age of a token in training, in iterations (weight versions). 0: on-policy; n: groups of up to n further
    iterations are generated while the trainer works; which losses allow it: algo.mismatch.correction."""
    too_stale: TooStale = key(TooStale.mask, despite=GENERATED, when=(TRAINED, needs("max_staleness")))
    """Of slow episodes, the tokens older than that. mask: have no loss; correct: theirs, by algo.mismatch.correction or
    the surrogate's own ratio; wait: there are none, iterations wait for the groups begun first (docs/off-policy.md)."""
    router_replay: bool = key(False, despite=GENERATED)
    """A mixture of experts trains with the experts that the servers chose (R3 2510.11370; docs/algorithms.md)."""
    file: str | None = key(None, despite=GENERATED, when=(TRAINED, NOT_ALONE))
    """A rollouts.jsonl of an earlier run (logger.save_rollouts) from which policy and critic learn without a server;
    the loss as with max_staleness."""
    from_data: bool = key(False, despite=SAMPLED, when=(TRAINED, NOT_ALONE))
    """The policy learns the data's answers, of chats each turn of the assistant, without a server (experiment=sft)."""
    max_probe_logprob_gap: float | None = key(None, above=0, when=TRAINED)
    """A larger median |log-prob difference| of servers and policy after the first weight sync, in nats per token, ends
    the run. null: what rounding explains (docs/architecture.md)."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """SGLang server arguments (underscored names), checked against the real ones; those that would change the policy's
    distribution are refused."""

    @property
    def oldest_learned(self) -> float:
        """The most that a token may be behind, in iterations, to be learned from."""
        return math.inf if self.too_stale is TooStale.correct else self.max_staleness


DEFAULT_PROMPTS = 512
"""Prompts of an iteration where neither prompts_per_iteration nor samples_per_iteration is given."""


@dataclass
class EvalSetConfig:
    """A further set of problems that is evaluated during training, with the reward and the prompts of the run."""

    path: str = MISSING
    """File (.jsonl, .parquet) or directory of a dataset with the same fields as data.path."""
    source: str | None = None
    """With data=mix: the source whose keys, environment and reward it has."""
    num_prompts: int | None = key(None, low=1)
    """Prompts, drawn at random under `seed`; null: all."""
    num_samples: int = key(1, low=1)
    """Responses to each."""
    temperature: float = key(0.0, low=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = key(1.0, above=0, high=1)
    """Nucleus sampling, as evaluate.top_p; only with a temperature above 0."""
    top_k: int = -1
    """As evaluate.top_k; only with a temperature above 0."""


@dataclass
class TrainConfig:
    num_iterations: int = key(100, low=0)
    """Training iterations, each a rollout and its update; 0: value pretraining alone (algo.value_pretrain)."""
    samples_per_iteration: int | None = key(None, low=1, when=needs("prompts_per_iteration", "null"))
    """Responses of one iteration; null for both this and prompts_per_iteration: 512 prompts."""
    prompts_per_iteration: int | None = key(None, low=1)
    """Prompts of one iteration; overrides samples_per_iteration."""
    responses_per_prompt: int = key(1, low=1, high=MAX_SAMPLES)
    """K, the group size: responses sampled for each prompt."""
    samples_per_minibatch: int = key(512, low=1, when=needs("num_minibatches", "null"))
    """Samples of one optimizer step, over all data-parallel ranks."""
    num_minibatches: int | None = key(None, low=1)
    """Minibatches of an iteration; overrides samples_per_minibatch."""
    tokens_per_microbatch: int = key(16384, low=1)
    """Maximum tokens of one forward pass, prompts included; a longer sequence is a micro-batch alone."""
    epochs_per_iteration: int = key(1, low=1, high=1000, why="an iteration ends after them only")
    """Passes of the update over the samples of an iteration."""
    reuse_logprobs: bool = key(True, off=False, when=WITHOUT_PASS)
    """Take old_logprobs from the update itself if nothing reads them before: the same gradient, one forward pass
    less."""
    eval_every: int = key(10, low=1, when=GENERATED)
    """Iterations between evaluations on held-out prompts; also before the first and after the last."""
    num_eval_prompts: int = key(256, low=1, despite=TRAINED, when=(GENERATED, OF_HELDOUT))
    """Maximum held-out prompts of an evaluation, with data=mix of each source."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Further sets by name, as in train.eval_sets='{gsm8k: {path: test.jsonl}}', each with `path`, `num_prompts` (null:
    all), `num_samples` (1), `temperature` (0), `top_p` (1) and `top_k` (-1); logged as eval/NAME/*."""
    stop_at_heldout_reward: float | None = key(None, when=GENERATED)
    """End early once the held-out reward reaches this; of a reward model, its accuracy on held-out pairs; with
    rollout.from_data, the held-out log-prob."""
    max_samples: int | None = key(None, low=1, when=(GENERATED, NOT_ALONE, SAMPLED))
    """End after the iteration in which this many responses have been generated in all."""
    max_minutes: float | None = key(None, above=0)
    """End after the iteration in which this many minutes have passed since this start."""

    profile: int | None = key(None, low=1)
    """The iteration to profile, from 1, into RUN_DIR/profile (docs/reading-a-run.md). null: none."""
    deterministic: bool = False
    """Training on GPUs gives the same weights from the same rollouts, and is slower (docs/checkpoints.md)."""

    @property
    def num_prompts(self) -> int:
        """Prompts of one iteration."""
        if self.prompts_per_iteration is not None:
            return self.prompts_per_iteration
        if self.samples_per_iteration is not None:
            return self.samples_per_iteration // max(1, self.responses_per_prompt)
        return DEFAULT_PROMPTS

    @property
    def num_samples(self) -> int:
        """Responses of one iteration: prompts x responses."""
        return self.num_prompts * self.responses_per_prompt

    @property
    def minibatch_size(self) -> int:
        """Samples of one optimizer step."""
        if self.num_minibatches is not None:
            return self.num_samples // max(1, self.num_minibatches)
        return self.samples_per_minibatch

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in one iteration."""
        return self.num_samples // max(1, self.minibatch_size) * self.epochs_per_iteration


@dataclass
class EvaluateConfig:
    num_samples: int = key(1, low=1, high=65536, why="responses per problem")
    """Responses per problem."""
    temperature: float | None = key(None, low=0)
    """Divides the logits; 0: greedy; null: greedy for one sample, 1 for more."""
    top_p: float = key(1.0, above=0, high=1)
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: from all."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: from all."""
    num_problems: int | None = key(None, low=1)
    """Problems of each set, drawn at random under `seed`; null: all."""
    heldout: bool = False
    """Ask the held-out prompts of data=, at most train.num_eval_prompts; false: all. model=checkpoint with a model
    trained by megarl sets it to true."""
    paths: dict[str, str] = field(default_factory=dict)
    """Files (.jsonl, .parquet) or directories instead of sets of the hub, by name: evaluate.paths.gsm8k=test.jsonl."""


def get_temperature(config: EvaluateConfig) -> float:
    if config.temperature is not None:
        return config.temperature
    return 0.0 if config.num_samples == 1 else 1.0


def list_ks(config: EvaluateConfig) -> tuple[int, ...]:
    """The k of pass@k: 2, 4, 8, ... up to num_samples; for k = 1 it is avg."""
    return tuple(2**i for i in range(1, max(1, config.num_samples).bit_length()))


def check_truncation(node: str, config: EvaluateConfig | EvalSetConfig, temperature: float) -> Iterator[str]:
    """One message per problem of what is sampled under the key `node`, of values that are in their ranges."""
    if config.top_k != -1 and config.top_k < 1:
        yield f"{node}.top_k: found {config.top_k}; it must be 1 or more, or -1 for all tokens"
    if temperature > 0:
        return
    if config.num_samples > 1:
        yield (
            f"{node}.num_samples: found {config.num_samples}; at {node}.temperature=0 all samples of a problem are the"
            " same response; set 1, or a temperature above 0"
        )
    for name, is_set in (("top_p", config.top_p != 1.0), ("top_k", config.top_k != -1)):
        if is_set:
            yield f"{node}.{name}: has no effect on greedy responses; leave it out, or set {node}.temperature"


@dataclass
class CheckpointConfig:
    save_every: int | None = key(20, low=1)
    """Iterations between checkpoints; also saved at the end, after value pretraining, a signal and a failure. null:
    never."""
    keep_last: int = key(2, low=1, when=SAVES)
    """Newest checkpoints to keep; older ones are removed once a newer one is complete."""
    keep_best: int = key(0, low=0, when=(SAVES, IS_MEASURED))
    """Further checkpoints to keep: the evaluated ones with the highest `best_metric`."""
    best_metric: str = key("reward/heldout", when=(SAVES, needs("keep_best")))
    """The metric of metrics.jsonl that keep_best ranks by; higher is better."""
    stop_deadline_s: float = key(120.0, when=SAVES, **DEADLINE)
    """Deadline of the checkpoint after an error or a signal, from the end of the update on."""
    max_restarts: int = key(3, low=0, when=SAVES)
    """Restarts in a row, without a new checkpoint, after a training process was lost."""


WandbMode = Enum("WandbMode", {"offline": "offline", "online": "online"})


@dataclass
class LoggerConfig:
    """[Reading a run](reading-a-run.md) says how to look at each, and [metrics](metrics.md) what the numbers mean."""

    tensorboard: bool | None = None
    """Also write the metrics to RUN_DIR/tensorboard; null: if the extra `tensorboard` is installed."""
    wandb: WandbMode | None = None
    """Also write the metrics to Weights & Biases (extra `wandb`): offline, into RUN_DIR/wandb for `wandb sync`, or
    online, to wandb.ai or WANDB_BASE_URL. WANDB_PROJECT (else megarl) and WANDB_ENTITY name project and team."""
    mlflow: str | None = None
    """Also write the metrics to MLflow (extra `mlflow`): the tracking URI, `http://HOST:5000` of a server or
    `sqlite:///mlflow.db`. MLFLOW_EXPERIMENT_NAME (else megarl) is the experiment."""
    terminal: bool = True
    """Show the run on the terminal, as lines in a file or pipe; RUN_DIR/train.log has the same in any case."""
    capture_output: bool = key(True, despite=TRAINED)
    """Write what libraries and your functions print in the trainer's process to RUN_DIR/logs/driver.log; false: to the
    terminal, for breakpoint()."""
    num_logged_samples: int = key(2, low=0, when=GENERATED)
    """Responses printed with their rewards after every evaluation."""
    save_rollouts: bool = key(False, when=(GENERATED, NOT_ALONE, SAMPLED))
    """Write every training response, with reward and log-probs, to RUN_DIR/rollouts.jsonl."""
    num_token_records: int = key(8, low=0)
    """Responses of each iteration and evaluation that RUN_DIR/tokens.jsonl has token by token, with log-probs, values
    and advantages, for the run report; above 100 kB, tokens of their middle are left out."""


WITH_REFERENCE = Effect(
    lambda it: needs_reference(it.config.algo),
    "without a reference model; it counts with algo.kl.in_advantage, or with algo.kl.in_reward or algo.kl.in_loss and"
    " an estimator other than full",
)


@dataclass
class Config:
    """Everything one run is made from; `conf/*.yaml` hold only what differs from these defaults."""

    seed: int = key(1, low=0, high=2**32 - 1, why="SGLang gives it to numpy, which takes 32 bits")
    """Seed of everything random: order and split of the prompts, sampling, minibatches, new value heads."""
    algo: AlgoConfig = key(factory=AlgoConfig, when=TRAINED)
    """The algorithm: advantages, rewards, losses."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The checkpoint that the run starts from."""
    policy: PolicyConfig = key(factory=PolicyConfig, when=(TRAINED, NOT_ALONE))
    """The model that is trained to answer."""
    critic: CriticConfig = key(factory=CriticConfig, when=(TRAINED, WITH_CRITIC))
    """The model that estimates values; only with algo.advantage=gae."""
    reference: ReferenceConfig = key(factory=ReferenceConfig, when=(TRAINED, NOT_ALONE, WITH_REFERENCE))
    """The frozen model that KL terms compare with; only where there is one."""
    data: DataConfig = key(MISSING, when=GENERATED)
    """Where the prompts come from; its keys are those of the chosen source."""
    environment: EnvironmentConfig = key(MISSING, when=(GENERATED, SAMPLED))
    """What answers the policy within an episode; its keys are those of the chosen kind."""
    reward: RewardConfig = key(MISSING, when=(GENERATED, NOT_ALONE, SAMPLED))
    """How a response is scored; its keys are those of the chosen kind."""
    rollout: RolloutConfig = key(factory=RolloutConfig, when=(GENERATED, SAMPLED))
    """Generation of responses, and the weight sync to the servers."""
    train: TrainConfig = key(factory=TrainConfig, when=TRAINED)
    """Sizes of an iteration, how long to train, evaluation in training."""
    evaluate: EvaluateConfig = key(factory=EvaluateConfig, when=EVALUATED)
    """How megarl evaluate asks and counts; training does not read it."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where the processes run."""
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig, when=TRAINED)
    """What of a run survives its processes."""
    logger: LoggerConfig = key(factory=LoggerConfig, when=TRAINED)
    """Where metrics go besides metrics.jsonl."""

    @property
    def has_critic_alone(self) -> bool:
        """Whether the critic learns from saved rollouts or pairs and nothing else runs: no policy, reward, server."""
        pretraining = self.algo.value_pretrain
        is_saved = self.train.num_iterations == 0 and pretraining.num_steps > 0 and pretraining.rollouts is not None
        return is_saved or compares_pairs(self.algo)

    @property
    def has_servers(self) -> bool:
        """Whether training generates responses."""
        return self.rollout.file is None and not self.rollout.from_data and not self.has_critic_alone


@functools.cache
def register() -> None:
    """Put the schema, and each kind of data, environment and reward, into Hydra's ConfigStore, once in a process."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, schemas in SCHEMAS.items():
        for kind, schema in schemas.items():
            store.store(group=group, name=f"{kind}_schema", node=schema)


NOT_COMPUTED = ("hydra", "cluster", "checkpoint", "evaluate", "logger")
"""Nodes that do not decide what a run learns"""
LONGEST_READABLE = 100
DIGITS = 6


def name_run(readable: Any, *, _root_: DictConfig) -> str:
    """readable: Hydra's `key=value,key=value`; _root_: the whole configuration of the run, resolved here. What
    computes the same under the same names has the same name."""
    nodes = {str(key): _root_[key] for key in _root_ if key not in NOT_COMPUTED}
    plain = {
        key: OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else node
        for key, node in nodes.items()
    }
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:DIGITS]
    text = re.sub(r"[^A-Za-z0-9_.=,+-]", "-", str(readable))[:LONGEST_READABLE].lstrip(".-")
    return f"{text}_{digest}" if text else digest


CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16 = re.compile(r"^(?:flags|Features)\s*:.*\b(?:avx512_bf16|amx_bf16|bf16)\b", re.MULTILINE)


def choose_dtype(gpus_per_node: int) -> str:
    """`bfloat16` on GPUs and on CPUs with instructions for it, without which a product of matrices takes several times
    as long; else `float32`."""
    try:
        cpu = CPU_INFO.read_text()
    except OSError:  # not Linux
        cpu = ""
    return "bfloat16" if gpus_per_node > 0 or BFLOAT16.search(cpu) else "float32"


# With the import: a launcher may have sent a run to another process, in which nobody calls anything before.
OmegaConf.register_new_resolver("megarl_run_name", name_run, replace=True)
OmegaConf.register_new_resolver("cpu_dtype", choose_dtype, replace=True)
