"""The check at the start of every job: whether its plan fits the cluster."""

from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.mcore.model.architecture import read_architecture
from megarl.mcore.worker_spec import Role
from megarl.plan.jobs import PlannedModels, build_jobs, check_batches
from megarl.run.inputs import Inputs


def check_plan(config: Config, inputs: Inputs) -> list[str]:
    """Why the job does not fit, as messages of a ConfigError, the last with a change that would make it fit; else [].

    Memory is planned on clusters whose hardware is known (cluster.hardware); elsewhere only batches are checked. There
    Megatron is imported and its parameters are counted, which takes seconds, in a process that is in no process group.
    """
    critic = inputs.specs.get(Role.critic)
    own = read_architecture(Path(critic.checkpoint)) if critic else inputs.architecture
    models = PlannedModels(inputs.architecture, own)
    if config.cluster.hardware.gpu is None or config.cluster.gpus_per_node == 0:
        return check_batches(config, build_jobs(config, models, on_gpu=False))
    try:
        return _describe_problems(config, models)
    except ConfigError as error:
        return list(error.problems)


def _describe_problems(config: Config, models: PlannedModels) -> list[str]:
    from megarl.plan.changes import find_change
    from megarl.plan.estimate import build_plan

    plan = build_plan(config, models)
    if not plan.problems:
        return []
    change = find_change(config, models, plan)
    advice = "none of the changes that were tried makes it fit"
    if change is not None:
        advice = f"it fits with {' '.join(change.overrides)}"
    messages = [problem.message for problem in plan.problems]
    return [
        *messages,
        f"cluster.hardware: the job does not fit {config.cluster.hardware.gpu}; {advice};"
        " cluster.hardware.gpu=null starts it without a plan",
    ]
