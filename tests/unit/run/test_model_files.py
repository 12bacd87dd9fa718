"""model.path, critic.init, algo.value_pretrain.rollouts, rollout.file: what does not fit is named before any process is
started.
"""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.mcore.checkpoints import write_hf_checkpoint
from megarl.mcore.spec import Role
from megarl.models.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.models.families import FAMILIES
from megarl.rollout.rollout_file import RolloutWriter, read_group
from megarl.run.inputs import (
    build_critic_prompt,
    describe_start,
    load_inputs,
    load_models,
    load_saved_rollouts,
    load_specs,
)
from megarl.run.job import describe_saved
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

KEY, FIRST, HEAD = "model.layers.0.mlp.down_proj.weight", "lm_head.weight", "score.weight"
SINGLE, ONE, TWO, INDEX = "model.safetensors", "one.safetensors", "two.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def policy() -> Path:
    """The checkpoint of model=tiny."""
    return load_models(load_config(["model=tiny"])).checkpoint


@pytest.fixture
def model(policy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy, tmp_path / "model"))


def load_model(model: Path) -> None:
    load_models(load_config(["model=checkpoint", f"model.path={model}"]))


def edit_tensors(edit) -> Edit:
    """Edits the tensors of the one file."""

    def change(model: Path) -> None:
        found = load_file(model / SINGLE)
        edit(found)
        save_file(found, model / SINGLE, metadata={"format": "pt"})

    return change


def split(edit) -> Edit:
    """Writes the tensors into two files; `edit` changes their index or the files."""

    def change(model: Path) -> None:
        found = load_file(model / SINGLE)
        (model / SINGLE).unlink()
        assert sorted(found)[0] == FIRST
        index = {name: ONE if place % 2 else TWO for place, name in enumerate(sorted(found))}
        for file in (ONE, TWO):
            save_file({name: each for name, each in found.items() if index[name] == file}, model / file)
        edit(index, model)
        (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))

    return change


def edit_config(edit) -> Edit:
    def change(model: Path) -> None:
        content = json.loads((model / "config.json").read_text())
        edit(content)
        (model / "config.json").write_text(json.dumps(content))

    return change


def write(name: str, text: str) -> Edit:
    return lambda model: (model / name).write_text(text)


def join_into_one(_index: dict[str, str], model: Path) -> None:
    save_file(load_file(model / ONE) | load_file(model / TWO), model / ONE)


FURTHER = edit_tensors(lambda found: found.update({"visual.weight": found[KEY].clone()}))
OLDER = split(lambda _index, model: shutil.copy(model / ONE, model / "older.safetensors"))
CUT = edit_tensors(lambda found: found.update({KEY: found[KEY][:3].clone()}))
INTEGERS = edit_tensors(lambda found: found.update({KEY: found[KEY].int()}))
MOVED = split(lambda index, _model: index.update({FIRST: ONE}))
TWO_WAYS = split(lambda _index, model: shutil.copy(model / ONE, model / SINGLE))


@pytest.mark.parametrize("edit", [FURTHER, OLDER])
def test_further_tensors_and_a_file_that_the_index_does_not_name_are_left_alone(model: Path, edit: Edit):
    edit(model)
    load_model(model)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_tensors(lambda found: found.pop(KEY)), f"missing: {KEY}"),
        (CUT, f"misshaped: {KEY} is [3, 192], config"),
        (INTEGERS, "has tensors of I32; float weights are"),
        (lambda model: (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:-100]), f"{SINGLE}: "),
        (MOVED, f"{INDEX} differs from the files: {FIRST} is in {TWO}, by the index in {ONE}"),
        (split(lambda index, _model: index.pop(FIRST)), f"{FIRST} is in {TWO}, by the index in none"),
        (split(lambda _index, model: (model / ONE).unlink()), f"lacks {ONE}, of 2 files that {INDEX} names"),
        (split(join_into_one), f"{FIRST} is in {ONE} and {TWO}, by the index in {TWO}"),
        (TWO_WAYS, f"has {SINGLE} and {INDEX}, which names other files"),
        (lambda model: shutil.copy(model / SINGLE, model / "model-1.safetensors"), f"beside {SINGLE} and no"),
        (write(SINGLE, POINTER), f"{SINGLE} is a Git LFS pointer"),
    ],
)
def test_files_that_do_not_hold_the_model_are_named_with_what_differs(model: Path, edit: Edit, message: str):
    edit(model)
    with pytest.raises(ConfigError) as caught:
        load_model(model)
    assert f"model.path: {model}" in str(caught.value)
    assert message in str(caught.value)


def test_a_key_of_no_known_effect_is_said(model: Path, capsys: pytest.CaptureFixture[str]):
    edit_config(lambda content: content.update({"author": "me"}))(model)
    load_model(model)
    assert "author is not known here and taken to have no effect" in capsys.readouterr().out


@pytest.fixture
def critic(policy: Path, tmp_path: Path) -> Path:
    """A critic of the policy's sizes, as a run leaves it."""
    tensors = load_file(policy / SINGLE)
    del tensors[FIRST]
    tensors[HEAD] = torch.ones(1, 64)
    write_hf_checkpoint(tmp_path / "critic", policy, tensors.items())
    return tmp_path / "critic"


def load(*overrides: str):
    config = load_config(["model=tiny", *overrides])
    return load_specs(config, load_models(config))


def test_the_critic_starts_from_critic_init_and_the_others_from_the_model(policy, critic):
    specs = load(f"critic.init={critic}", "algo.kl.in_loss=true")
    assert specs[Role.critic].checkpoint == str(critic)
    assert specs[Role.policy].checkpoint == specs[Role.reference].checkpoint == str(policy)
    assert load()[Role.critic].checkpoint == str(policy)


def test_critic_init_takes_a_model_of_another_size_and_family(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    vocab_size = load_models(load_config(["model=tiny"])).architecture.vocab_size
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=vocab_size, num_labels=1, max_position_embeddings=512, **sizes)
    )
    model.save_pretrained(tmp_path / "rm")
    (tmp_path / "rm" / "tokenizer.json").write_text("{}")
    models = load_models(load_config(["model=tiny", f"critic.init={tmp_path}/rm"]))
    assert (models.critic_architecture.family, models.critic_architecture.hidden_size) == ("llama", 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 1, "hidden_size": 32}, None),
        ({"alphabet": "abcdef=."}, r"token 9 is '=', and '\.' of the policy; .* both need one tokenizer"),
        ({"alphabet": "abcdef.=+"}, r"token 11 is '\+', and None of the policy; .* both need one tokenizer"),
        ({"alphabet": "abcdef."}, "vocab_size is 10 and the policy's 11; it must have a row for each token"),
        ({"max_length": 103}, "has 103 positions; .* are 104 tokens together"),
    ],
)
def test_a_teacher_may_be_of_another_size_and_needs_the_policys_tokens(changed, message):
    keys = [f"model.random.{name}={value!r}" for name, value in changed.items()]
    teacher = resolve_checkpoint(load_config(["model=tiny", *keys]).model, default_cache_dir())
    with pytest.raises(ConfigError, match=f"reference.init: .*{message}") if message else contextlib.nullcontext():
        specs = load("algo=distill", f"reference.init={teacher}")
        assert specs[Role.reference].checkpoint == str(teacher) != specs[Role.policy].checkpoint


def test_a_teacher_is_refused_where_none_is_asked_and_asked_for_where_nothing_else_is_learned_from():
    with pytest.raises(ConfigError, match=r"reference\.init: found null with algo\.advantage=none"):
        load("algo=distill")
    with pytest.raises(ConfigError, match=r"reference\.init: x found; it has no effect without a reference model"):
        load_config(["algo=dapo", "reference.init=x"])
    with pytest.raises(ConfigError, match=r"reference\.init: 'x' found, but there is no directory"):
        load("algo=grpo", "reference.init=x")


def test_the_teachers_of_a_mix_are_of_one_architecture_and_of_its_sources():
    mix = ["algo=distill", "data=mix", "reward=letter_count", "data.prompt_length=32"]
    mix += [f"data.sources.{name}.kind=letter_count" for name in ("one", "two")]
    wide, other, narrow = (
        resolve_checkpoint(load_config(["model=tiny", f"model.random.{key}"]).model, default_cache_dir())
        for key in ("num_layers=1", "seed=2", "hidden_size=32")
    )
    reference = load(*mix, f"reference.init={wide}", f"reference.by_source.two={wide}")[Role.reference]
    assert (reference.checkpoint, reference.teachers) == (str(wide), (str(wide),))
    # Of one architecture with the policy, whose start no source then learns from.
    reference = load(*mix, f"reference.by_source={{one: {other}, two: {other}}}")[Role.reference]
    assert reference.teachers == (str(other),) * 2
    for keys, message in (
        ([f"reference.by_source.two={other}"], r"reference\.init: found null .* nothing to teach one: it must be"),
        ([f"reference.by_source.three={other}"], r"reference\.by_source\.three: found no such source; .* has one, two"),
        (
            [f"reference.init={wide}", f"reference.by_source.two={narrow}"],
            r"reference\.by_source\.two: .* has another architecture; it must be that of reference\.init",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load(*mix, *keys)
    with pytest.raises(ConfigError, match=r"reference\.by_source: found .*; it needs data=mix: leave it out"):
        load("algo=distill", f"reference.init={wide}", f"reference.by_source.two={wide}")


def rename(old: str, new: str) -> Edit:
    return edit_tensors(lambda found: found.update({new: found.pop(old)}))


def resize_head(*shape: int) -> Edit:
    return edit_tensors(lambda found: found.update({HEAD: torch.ones(*shape)}))


def test_a_smaller_language_model_becomes_a_critic_with_a_new_value_head() -> None:
    small = load_models(load_config(["model=tiny", "model.random.num_layers=1"])).checkpoint
    config = load_config(["model=tiny", "algo=vapo", f"critic.init={small}"])
    models, inputs = load_models(config), load_inputs(config)
    assert (models.architecture.num_layers, models.critic_architecture.num_layers) == (2, 1)
    start = describe_start(config, inputs.specs[Role.critic], None)
    assert start.startswith(f"critic: starts from {small}, with a new value head; ")


def test_a_tied_language_model_becomes_a_critic_whether_its_output_layer_is_stored_or_not(model: Path) -> None:
    edit_config(lambda content: content.update(tie_word_embeddings=True))(model)
    config = load_config(["model=tiny", "algo=vapo", f"critic.init={model}"])
    for stored in (True, False):
        edit_tensors(lambda found: found.update({FIRST: found["model.embed_tokens.weight"].clone()}))(model)
        if not stored:
            edit_tensors(lambda found: found.pop(FIRST))(model)
        assert load_models(config).critic_architecture.tied


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (resize_head(3, 64), ["score.weight is [3, 64], config.json asks for [1, 64]"]),
        (rename(HEAD, "v_head.summary.weight"), ["has no value head score.weight", "v_head.summary.weight"]),
        (edit_tensors(lambda found: found.update({"score.bias": torch.ones(1)})), ["has a score.bias"]),
        (rename("model.embed_tokens.weight", "transformer.embed"), ["missing: model.embed_tokens.weight"]),
        (edit_config(lambda c: c.update(vocab_size=30)), ["vocab_size is 30 and the policy's 11"]),
        (edit_config(lambda c: c.update(max_position_embeddings=80)), ["has 80 positions", "are 104 tokens together"]),
        (edit_config(lambda c: c.update(model_type="bert")), ["model_type is 'bert'", ", ".join(FAMILIES)]),
        (lambda critic: (critic / "config.json").unlink(), ["lacks config.json"]),
        (write(INDEX, json.dumps({"weight_map": {HEAD: "gone.safetensors"}})), ["lacks gone.safetensors, of 1 files"]),
        (write(INDEX, json.dumps({"weight_map": {HEAD: "../x.safetensors"}})), ["score.weight is in '../x.saf"]),
        (shutil.rmtree, ["there is no directory"]),
    ],
)
def test_a_checkpoint_that_cannot_be_a_critic_is_refused_saying_what_was_found(critic, spoil, messages):
    spoil(critic)
    with pytest.raises(ConfigError) as caught:
        load(f"critic.init={critic}")
    text = "\n".join(caught.value.problems)
    assert all(problem.startswith("critic.init: ") for problem in caught.value.problems)
    assert all(message in text for message in messages), text


DIGITS, TEXT, RANGE = "model.random.alphabet='abcdef.=0123456789'", "data.critic_prompt='{answer}='", [-1, 1.5]
OWN_TEXT, OWN_RANGE = "critic.init: .*data.critic_prompt", r"critic\.value_range: found"


@pytest.mark.parametrize(
    ("recorded", "given", "message"),
    [
        ({}, [TEXT], None),  # it does not say what it was trained with
        ({"megarl_critic_prompt": "{answer}="}, [TEXT], None),
        ({"megarl_critic_prompt": "{answer}="}, [], rf"{OWN_TEXT} '\{{answer\}}=', now None"),
        ({"megarl_critic_prompt": None}, [TEXT], rf"{OWN_TEXT} None, now '\{{answer\}}='"),
        ({"megarl_value_range": RANGE}, ["critic.value_range=[-1,1.5]"], None),
        ({"megarl_value_range": RANGE}, [], rf"{OWN_RANGE} null; .* must be \[-1, 1\.5\]"),
        ({"megarl_value_range": RANGE}, ["critic.value_range=[-1,1]"], rf"{OWN_RANGE} \[-1\.0, 1\.0\]; .* must be \["),
        ({}, ["critic.value_range=[0,1]"], rf"{OWN_RANGE} \[0\.0, 1\.0\]; .* must be null"),
    ],
)
def test_a_critic_starts_under_the_text_and_range_that_it_records_and_no_other(critic, recorded, given, message):
    edit_config(lambda content: content.update(recorded))(critic)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        load(f"critic.init={critic}", *given)


def test_a_critic_records_range_and_text(policy, critic, tmp_path):
    given = [DIGITS, TEXT, "critic.value_range=[-1,1.5]"]
    critic_fields = load(*given)[Role.critic].critic_fields
    assert critic_fields == {"megarl_critic_prompt": "{answer}=", "megarl_value_range": [-1.0, 1.5]}
    assert load()[Role.critic].critic_fields == {"megarl_critic_prompt": None}
    both, again = tmp_path / "both", tmp_path / "again"
    write_hf_checkpoint(both, policy, load_file(critic / SINGLE).items(), critic_fields)
    write_hf_checkpoint(again, both, load_file(both / SINGLE).items(), critic_fields)
    for directory in (both, again):
        recorded = json.loads((directory / "config.json").read_text())
        assert {name: recorded[name] for name in critic_fields} == critic_fields
        load(f"critic.init={directory}", TEXT, "critic.value_range=[-1,1.5]")


def test_the_critics_longer_input_must_fit_its_positions():
    load(TEXT, "data.critic_prompt_length=152")  # with 32 of the prompt and 72 of the response all 256
    with pytest.raises(ConfigError, match=r"data\.critic_prompt_length: found 153; .* up to 257 tokens; it has 256"):
        load(TEXT, "data.critic_prompt_length=153")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([TEXT], r"data\.critic_prompt: the model's tokenizer cannot read .* which is '\w\d+='"),
        ([DIGITS, "data.critic_prompt='{rubric}'"], r"data\.critic_prompt: found \{rubric\}; .* are answer$"),
        ([DIGITS, TEXT, "data.critic_prompt_length=3"], r"data\.critic_prompt_length: found 3; .* has 4 tokens"),
    ],
)
def test_a_text_that_no_critic_can_read_is_refused_before_anything_starts(given, message):
    with pytest.raises(ConfigError, match=message):
        load_inputs(load_config(["model=tiny", *given]))


def test_every_training_prompt_is_checked_and_no_heldout_one(tmp_path):
    rows = [{"question": f"{letter}=", "answer": "a", "rubric": "b"} for letter in "abcd"]
    (tmp_path / "heldout.jsonl").write_text('{"question": "e=", "answer": "a"}\n')

    def load_rows():
        (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        files = [f"data.path={tmp_path}/train.jsonl", f"data.heldout_path={tmp_path}/heldout.jsonl"]
        given = ["model=tiny", "data=jsonl", "reward=exact", *files, "data.prompt_length=32"]
        return load_inputs(load_config([*given, "data.critic_prompt='{rubric}='"]))

    inputs = load_rows()
    assert [inputs.critic_prompt.fill(prompt) for prompt in inputs.data.train] == ["b="] * 4
    del rows[2]["rubric"]
    with pytest.raises(ConfigError, match=r"found \{rubric\}; the fields of \S+train\.jsonl:3 are answer, location$"):
        load_rows()


def save_rollouts(path: Path, token: int = 3) -> Path:
    response = Response((token, 2), "a", (-0.5, -0.5), (True, True), (0, 0), FinishReason.stop)
    writer = RolloutWriter(path)
    writer.write(Rollout((Sample(Prompt("p", "a=", (3, 4), "a"), response, Score(1.0, True), 0),), 0), 0)
    writer.close()
    return path


def load_saved(path: Path, *overrides: str):
    config = load_config(["model=tiny", f"algo.value_pretrain.rollouts={path}", *overrides])
    models = load_models(config)
    critic_prompt = build_critic_prompt(config, models, load_tokenizer(models.checkpoint))
    return config, load_specs(config, models)[Role.critic], load_saved_rollouts(config, models, critic_prompt)


@pytest.mark.parametrize(
    ("token", "given", "message"),
    [
        (11, [], r"algo\.value_pretrain\.rollouts: {path}:1: found token id 11.* 11 tokens"),
        (3, ["data.critic_prompt='{rubric}'"], r":1: data\.critic_prompt: found \{{rubric\}}; the fields of prompt p"),
        (3, [TEXT, "data.critic_prompt_length=1"], r":1: data\.critic_prompt_length: found 1; .* has 2 tokens"),
    ],
)
def test_saved_rollouts_that_the_critic_cannot_read_are_named_with_their_line(tmp_path, token, given, message):
    path = save_rollouts(tmp_path / "r.jsonl", token)
    with pytest.raises(ConfigError, match=message.format(path=path)):
        load_saved(path, *given)
    with pytest.raises(ConfigError, match=r"algo\.value_pretrain\.rollouts: .*nowhere\.jsonl"):
        load_saved(tmp_path / "nowhere.jsonl")


def test_saved_rollouts_with_a_kl_in_the_reward_are_refused():
    with pytest.raises(ConfigError, match=r"algo\.value_pretrain\.rollouts: .*algo\.kl\.in_reward=true"):
        load_config(["algo.value_pretrain.rollouts=r.jsonl", "algo.kl.in_reward=true"])


PROMPT = Prompt("p", "a.=", (3, 9, 10), "a")
GIVEN = (
    *("model=tiny", "algo=topr", "train.responses_per_prompt=2", "train.prompts_per_iteration=1"),
    *("train.num_minibatches=1", "reward.wrong=-1"),
)


def build_group(group: int, prompt: Prompt = PROMPT, size: int = 2, **score: object) -> list[Sample]:
    scores = [replace(Score(k / max(1, size - 1), k == size - 1), **score) for k in range(size)]
    response = Response((3, 4, 2), "ab", (-0.5, -1.5, -1.0), (True, True, True), (7, 7, 7), FinishReason.stop)
    return [Sample(prompt, response, score, group) for score in scores]


def save(path: Path, *rollouts: list[Sample]) -> Path:
    writer = RolloutWriter(path)
    for number, samples in enumerate(rollouts, start=1):
        writer.write(Rollout(tuple(samples), 7), number)
    writer.close()
    return path


def load_both(path: Path, *overrides: str):
    config = load_config([*GIVEN, f"rollout.file={path}", *overrides])
    return config, load_inputs(config)


def find_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_both(path, *overrides)
    return "\n".join(caught.value.problems)


def test_groups_are_found_and_read_back_one_by_one(tmp_path):
    first, second = [*build_group(0), *build_group(1, replace(PROMPT, id="q"))], build_group(0, replace(PROMPT, id="r"))
    path = save(tmp_path / "r.jsonl", first, second)
    config, inputs = load_both(path)
    saved = inputs.saved_groups
    assert saved is not None
    assert (saved.num_rollouts, saved.num_samples, saved.num_failed, saved.has_turns) == (2, 6, 0, False)
    assert [group.where for group in saved.groups] == [f"{path}:{line}" for line in (1, 3, 5)]
    assert [read_group(path, group) for group in saved.groups] == [tuple(first[:2]), tuple(first[2:]), tuple(second)]
    assert inputs.data.train == ()
    assert list(describe_saved(config, saved)) == [
        f"rollout.file: 6 responses in 3 groups, of 2 rollouts in {path}; a pass over them takes 3 iterations",
        "the responses' temperature is not recorded (run.json beside the file); 1 is assumed",
    ]
    (tmp_path / "run.json").write_text(json.dumps({"overrides": [], "config": {"rollout.temperature": 0.7}}))
    (_, line) = describe_saved(config, saved)
    assert line.startswith("warning: the responses were sampled at temperature 0.7")
    config, inputs = load_both(path, "rollout.temperature=0.7")
    assert len(list(describe_saved(config, inputs.saved_groups))) == 1


def test_responses_without_a_reward_are_counted_and_a_file_of_nothing_else_refused(tmp_path):
    failed = build_group(0, failure="the verifier hung")
    path = save(tmp_path / "r.jsonl", [*failed, *build_group(1)])
    config, inputs = load_both(path)
    assert next(iter(describe_saved(config, inputs.saved_groups))).endswith(
        "; 2 have no reward and are not learned from"
    )
    assert "none of its 2 responses has a reward" in find_problem(save(tmp_path / "none.jsonl", failed))
    missing = tmp_path / "nowhere.jsonl"
    assert f"rollout.file: [Errno 2] No such file or directory: '{missing}'" in find_problem(missing)


def test_what_a_killed_run_left_unfinished_is_said_and_left_out(tmp_path):
    path = save(tmp_path / "r.jsonl", build_group(0), [*build_group(0), *build_group(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    config, inputs = load_both(path)
    assert len(inputs.saved_groups.groups) == 1
    warnings = [line for line in describe_saved(config, inputs.saved_groups) if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert f"{path}:6: a half-written last line" in warnings[0]


HINTED = build_group(0, replace(PROMPT, metadata={"hint": "a"}))
WITHOUT = build_group(1, replace(PROMPT, id="q", metadata={}))
CRITIC = ["algo=ppo", "algo.mismatch.correction=tis", "data.critic_prompt='{hint}{answer}.'"]
UNKNOWN, OTHERWISE = (build_group(0, replace(PROMPT, token_ids=tokens)) for tokens in ((3, 9, 11), (3, 10, 9)))


@pytest.mark.parametrize(
    ("samples", "overrides", "message"),
    [
        (build_group(0), ["train.responses_per_prompt=4"], "train.responses_per_prompt: found 4; {path}:1 begins a gr"),
        (build_group(0), ["train.prompts_per_iteration=2"], "train.prompts_per_iteration: found 2, which is 2 groups"),
        (build_group(0), ["data.prompt_length=2"], "{path}:1: found a prompt of 3 tokens; data.prompt_length is 2"),
        (build_group(0), ["rollout.response_length=2"], "{path}:1: found a response of 3 tokens"),
        (UNKNOWN, [], "{path}:1: found token id 11; the model's vocabulary has 11 tokens"),
        (OTHERWISE, [], "reads its text as [3, 9, 10]: the responses must be"),
        (build_group(0, replace(PROMPT, text="Z")), [], "prompt 'p'"),
        (build_group(0, reward=2.0), [], "{path}:1: reward.wrong: found -1 with a score of 2"),
        (
            [*HINTED, *WITHOUT],
            CRITIC,
            "{path}:3: data.critic_prompt: found {{hint}}; the fields of prompt q are answer",
        ),
    ],
)
def test_what_does_not_fit_the_configuration_is_named(tmp_path, samples, overrides, message):
    path = save(tmp_path / "r.jsonl", samples)
    assert message.format(path=path) in find_problem(path, *overrides)
