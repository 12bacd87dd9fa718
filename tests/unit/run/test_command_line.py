"""The commands, `megarl new`, megarl.train as a function, and what a command refuses before anything starts."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import megarl
from megarl import cli, train
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.command import LEAST_OPEN_FILES, check_machine, evaluate, split_arguments

WRONG = [
    ("algo=null", "algo: found null; the choices are bpco, cispo,"),
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
