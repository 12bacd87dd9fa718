"""Conversion there and back: exact, and refusals that name what is wrong and leave nothing behind, also by the command;
what roles export: a policy as its checkpoint was, a critic as transformers' sequence classifier with one label.
"""

import contextlib
import json
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import build_samples, build_spec, find_constants, write_checkpoint
from tool_loading import TOOLS, load_tool

from megarl.config.load import MODEL_FILE
from megarl.config.schema.roles import Dtype, OptimizerConfig, RandomModelConfig
from megarl.files import RUN_FILE, CheckpointError, load_manifest
from megarl.mcore import checkpoints
from megarl.mcore import convert as conversion
from megarl.mcore.checkpoints import CheckpointReader, write_hf_checkpoint, write_safetensors
from megarl.mcore.convert import compare_tensors, open_source
from megarl.mcore.spec import Role
from megarl.mcore.worker import MegatronWorker
from megarl.models.checkpoint import build_random_checkpoint
from megarl.models.families import FAMILIES
from megarl.types import Sequences

QUERY = "model.layers.1.self_attn.q_proj.weight"


def convert(source: Path, target: Path, role: Role | None = None, verify: bool = True, **options: Any) -> None:
    conversion.convert(open_source(source, role=role, verify=verify), target, **options)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", "llama")
    return tmp_path / "hf"


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    convert(hf, tmp_path / "megatron")
    return tmp_path / "megatron"


def test_a_converted_model_keeps_the_settings_of_its_run(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "iteration-1").mkdir()
    convert(hf, tmp_path / "iteration-1" / "policy")
    (tmp_path / "iteration-1" / RUN_FILE).write_text("of a run")
    convert(tmp_path / "iteration-1" / "policy", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "last")
    assert [(tmp_path / name / MODEL_FILE).read_text() for name in ("back", "again", "last")] == ["of a run"] * 3


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, False) for family in FAMILIES), ("llama", True), ("qwen3", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_equal(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", family, tied=tied)
    constants = [buffer.clone() for buffer in find_constants(model)]
    model.to(dtype)
    # As in published checkpoints the correction bias of a router stays in float32.
    for buffer, constant in zip(find_constants(model), constants, strict=True):
        buffer.data = constant
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"a": 1}\n')
    convert(tmp_path / "hf", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}\n'
    found, expected = (load_file(tmp_path / x / "model.safetensors") for x in ("back", "hf"))
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in expected.items())
    assert {x.dtype for name, x in found.items() if not name.endswith("e_score_correction_bias")} == {dtype}
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )


def test_a_policy_becomes_a_critic_with_a_head_of_zeros_and_that_a_classifier(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "critic", Role.critic)
    convert(tmp_path / "critic", tmp_path / "back")
    layout = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1}
    about = {"kind": "megatron", "role": "critic", "dtype": "float32", "parallel": layout, "iteration": None}
    assert load_manifest(tmp_path / "critic").about == about
    expected = load_file(hf / "model.safetensors")
    expected["score.weight"] = torch.zeros(1, 64)
    del expected["lm_head.weight"]
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["LlamaForSequenceClassification"], 1)


def test_another_dtype_rounds_as_torch_does_and_config_json_says_it(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "megatron", dtype=Dtype.bfloat16)
    convert(tmp_path / "megatron", tmp_path / "back", dtype=Dtype.float32)
    found, expected = (load_file(x / "model.safetensors") for x in (tmp_path / "back", hf))
    assert all(found[name].equal(expected[name].bfloat16().float()) for name in expected)
    assert json.loads((tmp_path / "megatron/hf/config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float32"


def break_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY][3, 5] = torch.nan


@pytest.mark.parametrize(
    ("edit", "tied", "message"),
    [
        (lambda x: x.pop(QUERY), False, f"missing: {QUERY}"),
        (lambda x: x.update({QUERY + ".lora": torch.zeros(3)}), False, f"of another model: {QUERY}.lora"),
        (lambda x: x.update({QUERY: x[QUERY][:-1].clone()}), False, rf"misshaped: {QUERY} is \[63, 64\], config.json"),
        (break_nan, False, f"{QUERY} has NaN or infinity"),
        (lambda x: x[QUERY].view(-1)[7:8].fill_(-torch.inf), False, f"{QUERY} has NaN or infinity"),
        (lambda x: x["lm_head.weight"].add_(1), True, r"lm_head\.weight is not model\.embed_tokens\.weight"),
        (None, False, r"hf/model\.safetensors"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_left(
    edit: Callable[[dict[str, torch.Tensor]], Any] | None, tied: bool, message: str, hf: Path, tmp_path: Path
) -> None:
    """Without an edit the file is cut off."""
    if tied:
        write_checkpoint(hf, "llama", tied=True)
    if edit is None:
        (hf / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-100])
    else:
        change(hf, lambda x: (x.setdefault("lm_head.weight", x["model.embed_tokens.weight"].clone()), edit(x)))
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(hf, tmp_path / "megatron")
    assert str(hf) in str(caught.value)
    assert list(tmp_path.iterdir()) == [hf]


def change_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def add_layers(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "num_hidden_layers": 4}).encode()


@pytest.mark.parametrize(
    ("file", "damage", "verify", "message"),
    [
        ("__0_0.distcp", change_middle, True, r"damaged: __0_0\.distcp"),
        ("__0_0.distcp", lambda content: content[:-100], False, "megatron"),
        ("__0_0.distcp", lambda content: b"x" * len(content), False, "megatron"),
        ("__0_0.distcp", None, False, "megatron"),
        ("hf/config.json", add_layers, False, r"linear_qkv\.weight is \[2, 128, 64\], config\.json asks for \[4, 128"),
    ],
)
def test_damaged_files_and_those_of_another_model_are_refused_with_checksums_and_without(
    file: str, damage: Callable[[bytes], bytes] | None, verify: bool, message: str, megatron: Path, tmp_path: Path
) -> None:
    if damage is None:
        (megatron / file).unlink()
    else:
        (megatron / file).write_bytes(damage((megatron / file).read_bytes()))
    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        convert(megatron, tmp_path / "back", verify=verify)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["hf", "megatron"]


def test_nan_in_megatrons_files_is_refused_by_name(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(hf, break_nan)
    with monkeypatch.context() as patch:
        patch.setattr(conversion.state, "is_finite", lambda tensor: True)
        convert(hf, tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=f"{QUERY} has NaN or infinity"):
        convert(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()


class Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("hidden_in_metadata", [False, True])
def test_a_foreign_pickle_is_named_and_not_run(hidden_in_metadata: bool, megatron: Path, tmp_path: Path) -> None:
    path, content = megatron / ".metadata", Malice(tmp_path / "touched")
    if hidden_in_metadata:
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = content
        content = metadata
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"\.metadata: refers to pathlib\.Path"):
        convert(megatron, tmp_path / "back", verify=False)
    assert not (tmp_path / "touched").exists()


def test_a_target_that_exists_is_kept_unless_it_is_to_be_overwritten(hf: Path, megatron: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    back.mkdir()
    (back / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert(megatron, back)
    assert (back / "mine").read_text() == "kept"
    convert(megatron, back, overwrite=True)
    assert not (back / "mine").exists()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_the_comparison_names_the_one_tensor_that_differs_and_refuses_other_shapes(hf: Path, megatron: Path) -> None:
    assert compare_tensors(open_source(hf), open_source(megatron)) == []
    change(hf, lambda tensors: tensors[QUERY][1, 1].add_(0.5))
    assert compare_tensors(open_source(hf), open_source(megatron)) == [f"{QUERY}: differs by up to 0.5"]
    write_checkpoint(hf, "llama", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is \[64, 128\], .* it is \[64, 96\]"):
        compare_tensors(open_source(hf), open_source(megatron))


@pytest.mark.parametrize("place", ["hf", "hf/megatron", "."])
def test_a_target_that_is_in_or_around_its_source_is_refused_and_the_source_stays(
    hf: Path, tmp_path: Path, place: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="the target must be apart from the source"):
        convert(hf, tmp_path / place, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", ["../hf/model.safetensors", "/etc/passwd", "..", 3])
def test_an_index_that_leads_out_of_its_directory_is_refused_by_tensor_and_file(hf: Path, file: str | int) -> None:
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: file}}))
    with pytest.raises(CheckpointError, match=f"{QUERY} is in {file!r}; a file of this directory was expected"):
        open_source(hf)


FAMILIES = pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False)])


@contextlib.contextmanager
def open_worker(checkpoint: Path, role: Role, scratch: Path) -> Iterator[MegatronWorker]:
    spec = build_spec(checkpoint, role, optimizer=OptimizerConfig(lr=1e-2))
    worker = MegatronWorker(spec, 0, 1, f"file://{scratch}/{checkpoint.name}.init")
    try:
        yield worker
    finally:
        worker.close()


@FAMILIES
def test_a_trained_policys_export_in_many_files_says_in_transformers_what_the_policy_says(
    tmp_path: Path, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = RandomModelConfig(
        family=family, alphabet="abcdef", hidden_size=64, ffn_size=96, num_layers=2, tie_embeddings=tied
    )
    source = build_random_checkpoint(config, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    GenerationConfig(temperature=0.6, top_k=7, do_sample=True, eos_token_id=[1, 2]).save_pretrained(source)
    monkeypatch.setattr(checkpoints, "MAX_FILE_BYTES", 40_000)
    with open_worker(source, Role.policy, tmp_path) as worker:
        samples = build_samples()
        samples.sequences.tokens.remainder_(worker.arch.vocab_size)
        worker.update(samples, [torch.arange(12)] * 3)
        worker.export_weights(tmp_path / "export")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
        prompt = torch.tensor([[4, 5, 3]])
        greedy = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None)[0]
        tokens = greedy.tolist()
        # Of each token of the greedy text, and of each other one in the place of the last.
        rows = [[*tokens[:-1], last] for last in range(worker.arch.vocab_size)]
        sequences = Sequences(
            torch.tensor(rows).flatten(), torch.tensor([len(tokens)] * len(rows)), torch.tensor([3] * len(rows))
        )
        logprobs = worker.logprobs(sequences, 1.0).values
    with torch.no_grad():
        expected = torch.log_softmax(model(greedy[None]).logits[0], -1)
    torch.testing.assert_close(logprobs[tokens[-1]], expected[2:-1].max(-1).values, rtol=0, atol=1e-4)
    assert int(logprobs[:, -1].argmax()) == tokens[-1]
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    stored = {name: (file.name, tensor.nbytes) for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert stored.keys() == load_file(source / "model.safetensors").keys()
    assert index["metadata"]["total_size"] == sum(size for _, size in stored.values())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@FAMILIES
def test_a_critic_begun_without_a_head_is_the_same_critic_where_its_export_is_loaded(
    tmp_path: Path, family: str, tied: bool
) -> None:
    from transformers import AutoModelForSequenceClassification

    write_checkpoint(tmp_path / "policy", family, tied=tied)
    samples = build_samples()
    with open_worker(tmp_path / "policy", Role.critic, tmp_path) as worker:
        assert not worker.values(samples.sequences).values.any()
        worker.update(samples, [torch.arange(12)] * 3)
        expected = worker.values(samples.sequences).values
        worker.export_weights(tmp_path / "critic")
    with open_worker(tmp_path / "critic", Role.critic, tmp_path) as worker:
        assert torch.equal(worker.values(samples.sequences).values, expected)
    assert expected.std() > 0.01
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    tensors, found = load_file(tmp_path / "critic" / "model.safetensors"), model.state_dict()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert (config["num_labels"], config["architectures"]) == (1, [type(model).__name__])


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    target = tmp_path / "run" / "weights"

    def failing() -> Any:
        yield "a", torch.zeros(2)
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        write_hf_checkpoint(target, source, failing())
    assert list(target.parent.iterdir()) == []
    for value in (1.0, 2.0):
        write_hf_checkpoint(target, source, [("a", torch.full((2,), value))])
    assert {file.name for file in target.iterdir()} == {"config.json", "model.safetensors"}
    with CheckpointReader(target) as reader:
        assert reader.read("a").tolist() == [2.0, 2.0]
        with pytest.raises(KeyError, match="has no tensor b"):
            reader.read("b")
    assert [path.name for path in target.parent.iterdir()] == ["weights"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_names_the_dtype_of_the_weights_by_which_transformers_loads_them(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: "float16", "model_type": "llama"}))
    tensors = [("model.norm.weight", torch.ones(2, dtype=torch.bfloat16))]
    write_hf_checkpoint(tmp_path / "written", tmp_path, tensors)
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert written == {key: "bfloat16", "model_type": "llama"}


def test_tensors_of_a_file_that_is_written_are_not_held_while_the_next_are_made(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            alive.append(sum(each() is not None for each in made))
            tensor = torch.full((20,), float(number))
            made.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    write_safetensors(tmp_path, make(), max_file_bytes=160)
    assert max(alive) == 2
    # Who may read the folder may read the model: a server of another user, too.
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.safetensors")} == {0o644}
    with CheckpointReader(tmp_path) as reader:
        assert [reader.read(f"t{number}")[0].item() for number in range(5)] == [0, 1, 2, 3, 4]


FILE = "convert_checkpoint.py"
COMMAND = [sys.executable, str(TOOLS / FILE)]
Run = Callable[..., tuple[int, str, str]]
"""Arguments -> exit code, stdout, stderr"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        code = load_tool(FILE).run([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_checkpoint(RandomModelConfig(), tmp_path_factory.mktemp("cache"))


def test_there_and_back_in_the_shell_with_logits_by_megatron_and_transformers(checkpoint: Path, tmp_path: Path) -> None:
    def call(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=180)

    done = call("hf-to-megatron", checkpoint, tmp_path / "megatron")
    assert done.returncode == 0, done.stderr
    done = call("verify", checkpoint, tmp_path / "megatron", "--text", "12+34=46")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "equal"), done.stderr
    assert "equal bit by bit" in done.stdout
    assert "logits of 8 tokens" in done.stdout


def test_the_tokenizer_comes_along_and_info_says_what_is_there(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert run("hf-to-megatron", checkpoint, megatron)[0] == 0
    assert run("megatron-to-hf", megatron, back)[0] == 0
    assert (back / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    code, out, _ = run("info", megatron)
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (code, found["layout"], found["role"], found["optimizer"]) == (
        *(0, "tp1 pp1 dp1 cp1 ep1", "policy", "none, weights alone"),
    )
    num_bytes = (back / "model.safetensors").stat().st_size
    assert int(found["parameters"].replace(",", "")) * 4 == pytest.approx(num_bytes, rel=0.01)


def test_what_is_no_checkpoint_is_refused_with_its_path(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    code, _, error = run("info", tmp_path / "absent")
    assert (code, error.startswith(f"error: {tmp_path / 'absent'}: ")) == (2, True)
    code, _, error = run("hf-to-megatron", checkpoint, tmp_path)
    assert (code, "--overwrite" in error) == (2, True)
