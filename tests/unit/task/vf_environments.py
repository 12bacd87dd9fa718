"""Small environments of the package `verifiers`, as a user installs them."""

import verifiers as vf
from datasets import Dataset


class Countdown(vf.MultiTurnEnv):
    """Says a number and wants the one below it, down to 0."""

    async def setup_state(self, state):
        state["at"] = int(state["answer"])
        return state

    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == "rewrite":
            messages[0]["content"] = "another question"
        if messages[-1]["content"] == "crash":
            raise vf.InfraError("the sandbox is gone")
        state["at"] -= 1
        answer = [{"role": "user", "content": f"now {state['at']}"}]
        if state["at"] == 0:
            state["final_env_response"] = answer
        return answer


def share_right(completion, answer, **kwargs):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    if "raise" in said:
        raise KeyError("no such word")
    expected = [str(number) for number in range(int(answer) - 1, -1, -1)]
    return sum(a == b for a, b in zip(said, expected, strict=False)) / len(expected)


def load_environment(max_turns: int = -1, starts: int = 3):
    rows = Dataset.from_list([{"question": f"count down from {n}", "answer": str(n)} for n in range(1, 1 + starts)])
    return Countdown(
        dataset=rows,
        eval_dataset=Dataset.from_list([{"question": "count down from 9", "answer": "9"}]),
        system_prompt="one number at a time",
        rubric=vf.Rubric(funcs=[share_right], weights=[2.0]),
        max_turns=max_turns,
    )


def of_groups():
    def best(completions, **kwargs):
        return [0.0 for _ in completions]

    rows = Dataset.from_list([{"question": "q", "answer": "a"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best]))


def add_one(x: int) -> int:
    """Add one.

    Args:
        x: The number.
    """
    return x + 1


def with_tools():
    rows = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}])

    def right(completion, answer, **kwargs):
        return float(completion[-1]["content"] == answer)

    return vf.ToolEnv(dataset=rows, tools=[add_one], rubric=vf.Rubric(funcs=[right]))


def mixed():
    """An environment that the package brings, of one turn, and the countdown, in a group."""
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    sums = ReasoningGymEnv("chain_sum", num_train_examples=16, num_eval_examples=4, system_prompt="answer in tags")
    return vf.EnvGroup([sums, load_environment(starts=16)], env_names=["sums", "countdown"])


def group_with_tools():
    return vf.EnvGroup([with_tools(), load_environment()])
