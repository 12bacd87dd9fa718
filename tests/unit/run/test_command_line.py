"""The commands, `megarl new`, megarl.train as a function, and what a command refuses before anything starts; megarl
evaluate: which sets, with which reward, and what is refused.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import megarl
from megarl import cli, train
from megarl.config.errors import ConfigError
from megarl.config.load import expand_sets, load_config, load_configs
from megarl.config.schema.root import EvaluateConfig, check_truncation, get_temperature, list_ks
from megarl.run.command import LEAST_OPEN_FILES, check_machine, choose_run_dir, evaluate, save_run, split_arguments
from megarl.run.inputs import load_evaluation_inputs, load_inputs
from megarl.types import Prompt

WRONG = [
    ("algo=null", "algo: found null; the choices are bpco, cispo, cv_ppo,"),
    ("algo=", "algo: found nothing; the choices are"),
    ("algo=null,grpo", "algo: found null; the choices are"),
    ("=3", "=3: found without a key"),
    ("seed", "seed: found without a value; each argument must be key=value, or group=option"),
    ("grpo", "grpo: found without a value; each argument must be key=value, or group=option; did you mean algo=grpo?"),
    ("", "an empty word: found without a value"),
    ("a=b=c", "a=b=c: mismatched input"),
    ("seed=4294967296", "seed: found 4294967296; it must be 0 or more and at most 4294967295 (SGLang"),
    ("rollout.max_staleness=1000000", "rollout.max_staleness: found 1000000; it must be 0 or more and at most 100"),
    ("model.name=a/b", "model.name: found 'a/b'; it is a part of the run's folder"),
    ("seed=1,4294967296", "seed: found 4294967296"),
    ("cluster.num_nodes=2", "cluster."),
]


def run_main(monkeypatch, capsys, arguments, main=train.main) -> str:
    """What a command with these arguments writes to stderr; it must end with code 2 before Hydra starts the run."""
    monkeypatch.setattr(sys, "argv", ["megarl", *arguments])
    monkeypatch.setattr(train, "_run_composed", lambda: pytest.fail(f"{arguments} has been started"))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("word", "expected"), WRONG)
def test_a_wrong_argument_is_one_line_and_code_2(monkeypatch, capsys, word, expected):
    line, *others = run_main(monkeypatch, capsys, [word, *(["-m"] if "," in word else [])]).splitlines()
    assert line.startswith(f"error: {expected}")
    # Each problem has one line; a cluster of two nodes has several, and so have samples of older weights.
    assert all(each.startswith("error: ") for each in others)
    assert not others or word.startswith(("cluster.num_nodes=", "rollout.max_staleness="))


@pytest.mark.parametrize("word", ["reward=null", "seed", "seed=4294967296"])
def test_an_evaluation_refuses_the_same(monkeypatch, capsys, word):
    (line,) = run_main(monkeypatch, capsys, ["data=gsm8k", "reward=math", word], evaluate).splitlines()
    assert line.startswith(f"error: {word.partition('=')[0]}")


def test_what_the_memory_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr("megarl.run.command.find_memory", lambda: 8 * 2**30)
    assert list(check_machine(load_config([]))) == []
    large = ["train.prompts_per_iteration=65536", "rollout.response_length=200", "data.prompt_length=8"]
    (problem,) = check_machine(load_config(large))
    assert problem.startswith("train.prompts_per_iteration: found 65536; 1048576 responses of up to")
    assert "take 17 GiB in the trainer, and this machine has 8 GiB" in problem


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (64, 64, (64, [f"ulimit -n: found 64 open files; Ray and the servers need {LEAST_OPEN_FILES}"])),
        (256, LEAST_OPEN_FILES, (LEAST_OPEN_FILES, [])),
    ],
)
def test_the_limit_of_open_files_is_raised_or_named(soft, hard, expected):
    code = (
        "import resource\nfrom megarl.config.load import load_config\nfrom megarl.run.command import check_machine\n"
        f"config = load_config([])\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "problems = list(check_machine(config))\nprint((resource.getrlimit(resource.RLIMIT_NOFILE)[0], problems))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(expected)


@pytest.mark.parametrize(
    ("words", "options", "others"),
    [
        (["seed=1,2", "-m", "algo=vapo"], ["-m"], ["seed=1,2", "algo=vapo"]),
        (["seed=1", "--info", "searchpath", "grpo"], ["--info", "searchpath"], ["seed=1", "grpo"]),
        (["-p", "_global_", "", "~algo"], ["-p", "_global_"], ["", "~algo"]),
    ],
)
def test_hydras_options_keep_their_values(words, options, others):
    assert split_arguments(words) == (options, others)


def test_help_into_a_pipe_that_is_closed_leaves_no_traceback():
    pipe = f"{sys.executable} -m megarl.train --help | python3 -c 'import os; os.close(0)'"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""


def test_a_refused_command_leaves_no_folder_and_one_that_holds_more_stays(tmp_path: Path):
    (tmp_path / "bad.py").write_text("def score(prompt, response):\n    return prompt.columns['gold']\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for words in ((), ("hydra.run.dir=mine",)):
        command = [sys.executable, "-m", "megarl.train", "reward=function", "reward.path=bad.py:score", *words]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert (ended.returncode, "KeyError: 'gold'" in ended.stderr) == (2, True), ended.stderr
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"bad.py", "mine"}
    assert (tmp_path / "mine" / "notes.txt").is_file()


ROOT = Path(__file__).resolve().parents[3]


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["megarl", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    return code, output.out + output.err


def test_each_command_is_a_module_that_runs_and_is_listed(monkeypatch, capsys):
    text = call(monkeypatch, capsys)[1]
    assert text.startswith("usage: megarl COMMAND")
    for name, (module, _) in cli.COMMANDS.items():
        assert not module or find_spec(module) is not None
        assert f"\n  {name} " in text


def test_a_new_task_has_all_files_of_the_example_and_takes_nothings_place(monkeypatch, capsys, tmp_path):
    mine = tmp_path / "a" / "mine"
    code, text = call(monkeypatch, capsys, "new", str(mine))
    assert (code, "README.md says" in text) == (0, True)
    assert text.endswith(f"next: cd {mine} && megarl train --config-dir . experiment=own_task\n")
    for name in ("README.md", "my_reward.py", "prompts.jsonl", "experiment/own_task.yaml"):
        assert (mine / name).read_bytes() == (ROOT / "examples" / "own_task" / name).read_bytes()
    (tmp_path / "file").write_text("")
    for taken, message in ((tmp_path / "a", "File exists"), (tmp_path / "file", "File exists")):
        code, text = call(monkeypatch, capsys, "new", str(taken))
        assert (code, message in text) == (2, True)
    assert call(monkeypatch, capsys, "new")[0] == 2


def test_the_help_lists_the_options_that_are_files_those_of_a_directory_of_ones_own_included():
    command = [sys.executable, "-m", "megarl.train", "--config-dir", str(ROOT / "examples" / "own_task"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"^experiment: .*guess, .*own_task", text, re.MULTILINE)
    assert re.search(r"^data: addition, aime24, ", text, re.MULTILINE)
    assert "_schema" not in text
    assert re.search(r"^seed: 1$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("word", "told"), [("trian", "commands are train, evaluate"), ("algo=grpo", "megarl train algo=")]
)
def test_words_that_are_no_command_are_explained(monkeypatch, capsys, word, told):
    code, text = call(monkeypatch, capsys, word)
    assert (code, told in text) == (2, True)


@pytest.mark.parametrize("first", ["import megarl", "from megarl.train import main"])
def test_megarl_train_is_a_function_whatever_was_imported_before(first):
    train = "try:\n    megarl.train(['algo.clip_hihg=1'])\nexcept Exception as error: print(error)"
    code = f"{first}\nimport megarl\n{train}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "algo.clip_hihg: no such key; did you mean algo.clip_high?" in done.stdout


def test_a_text_in_place_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"a list of overrides is needed: \['algo=grpo'\]"):
        megarl.train("algo=grpo")
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        megarl.tarin  # noqa: B018


def test_each_set_gets_a_configuration_of_its_own_and_the_reward_of_its_name_or_math():
    configs = load_configs(expand_sets(["model=smollm2_135m", "data=gsm8k,addition,amc23", "seed=3"]))
    assert list(configs) == ["gsm8k", "addition", "amc23"]
    rewards = {name: type(config.reward).__name__ for name, config in configs.items()}
    assert rewards == {"gsm8k": "MathRewardConfig", "addition": "AdditionRewardConfig", "amc23": "MathRewardConfig"}
    assert [config.data.prompt_length for config in configs.values()] == [512, 64, 1024]
    assert {config.seed for config in configs.values()} == {3}
    assert {config.model.name for config in configs.values()} == {"smollm2_135m"}
    configs = load_configs(expand_sets(["data=gsm8k,addition", "reward=exact"]))
    assert {type(config.reward).__name__ for config in configs.values()} == {"ExactRewardConfig"}


def test_an_experiment_is_evaluated_on_its_own_data_with_its_own_reward(monkeypatch):
    monkeypatch.chdir(ROOT / "examples" / "own_task")
    overrides = [f"hydra.searchpath=[file://{ROOT}/examples/own_task]", "experiment=own_task"]
    (own,) = load_configs(expand_sets([*overrides, "evaluate.num_samples=8"])).items()
    assert (own[0], own[1].data.path, own[1].reward.path) == ("jsonl", "prompts.jsonl", "my_reward.py:score")
    other = load_configs(expand_sets(["experiment=guess", "data=guess", "reward=exact"]))["guess"]
    assert type(other.reward).__name__ == "ExactRewardConfig"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "data: found nothing; name each set once, as in data=gsm8k,aime24"),
        (["data=gsm8k,amc"], "data: found gsm8k,amc; name each set once, as in data=gsm8k,aime24; the choices are add"),
        (["data=gsm8k,amc23,gsm8k"], "data: found gsm8k,amc23,gsm8k; name each set once"),
        (["data=gsm8k,amc23", "data.path=x"], "data.path: can be right for one set only"),
        (["data=gsm8k", "evaluate.paths.amc23=x"], "evaluate.paths.amc23: no such set; data= names gsm8k"),
        (["data=gsm8k", "evaluate.num_sample=2"], "did you mean evaluate.num_samples"),
        (["data=gsm8k", "evaluate.num_samples=0"], "evaluate.num_samples: found 0"),
        (
            ["data=gsm8k", "evaluate.num_samples=4", "evaluate.temperature=0"],
            "evaluate.num_samples: found 4; at evaluate",
        ),
        (["data=gsm8k", "evaluate.top_p=0.9"], "evaluate.top_p: has no effect on greedy responses"),
        (["data=gsm8k", "evaluate.num_samples=2", "evaluate.top_k=0"], "evaluate.top_k: found 0"),
        (["data=gsm8k", "train.num_iterations=2"], "train.num_iterations: has no effect in an evaluation"),
        (["data=gsm8k", "algo.gamma=0.9"], "algo.gamma: has no effect in an evaluation"),
        (["data=gsm8k", "rollout.temperature=0.9"], "in an evaluation, which has evaluate.temperature"),
        (["data=gsm8k", "logger.terminal=false"], "logger.terminal: has no effect in an evaluation"),
        (["data=gsm8k", "data.num_heldout=5"], "evaluate.num_problems=N takes a part"),
    ],
)
def test_a_bad_command_line_names_the_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_configs(expand_sets(overrides))
    assert message in str(error.value)


def test_one_response_is_greedy_and_several_are_sampled_and_k_are_powers_of_two():
    for num_samples, temperature, ks in ((1, 0.0, ()), (2, 1.0, (2,)), (8, 1.0, (2, 4, 8)), (12, 1.0, (2, 4, 8))):
        config = EvaluateConfig(num_samples=num_samples)
        assert list(check_truncation("evaluate", config, get_temperature(config))) == []
        assert (get_temperature(config), list_ks(config)) == (temperature, ks)


def test_the_run_folder_is_named_after_the_model_or_the_checkpoint():
    tiny = load_configs(expand_sets(["data=letter_count"]))
    assert choose_run_dir([], tiny) == ["hydra.run.dir=runs/${now:%Y-%m-%d_%H-%M-%S}_evaluate_tiny"]
    trained = load_configs(expand_sets(["data=letter_count", "model=checkpoint", "model.path=/models/my model/"]))
    assert choose_run_dir([], trained)[0].endswith("_evaluate_my_model")
    assert choose_run_dir(["hydra.run.dir=here"], tiny) == []


RUN = (
    *("algo=grpo", "data=jsonl", "data.path=mine.jsonl", "data.num_heldout=6", "reward=exact", "seed=3"),
    *("data.prompt_length=4", "train.num_eval_prompts=4"),
)


@pytest.fixture
def heldout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Prompt, ...]:
    """Those of a run of 30 questions, of which 10 are too long; its model is in run/policy."""
    monkeypatch.chdir(tmp_path)
    questions = [
        first + second + end for first in "abcde" for second in "abcdef" for end in ["." * (second in "ef") * 4]
    ]
    write_questions(tmp_path / "mine.jsonl", questions)
    config = load_config(RUN)
    inputs = load_inputs(config)
    save_run(tmp_path / "run", config, RUN)
    shutil.copytree(inputs.checkpoint, tmp_path / "run" / "policy")
    return inputs.data.heldout[: config.train.num_eval_prompts]


def write_questions(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"question": question, "answer": "a"}) + "\n" for question in questions))


def load(*overrides: str) -> list[Prompt]:
    configs = load_configs(expand_sets(["model=checkpoint", "model.path=run/policy", *overrides]))
    return list(load_evaluation_inputs(configs).sets[0].prompts)


def test_the_runs_own_data_are_asked_as_training_asks_its_heldout_prompts(heldout: tuple[Prompt, ...]) -> None:
    assert load() == list(heldout)
    assert len(heldout) == 4
    part = load("evaluate.num_problems=2")
    assert len(part) == 2
    assert all(prompt in heldout for prompt in part)
    assert len(load("train.num_eval_prompts=6")) == 6
    assert len(load("evaluate.heldout=false", "data.prompt_length=8")) == 30
