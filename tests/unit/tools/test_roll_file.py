"""What is no file of ROLL's RLVR pipeline is refused before anything is converted, whatever its aliases expand to."""

import pytest
from roll_cases import run_import, write
from yaml import YAMLError

from megarl.config.roll_import import read_roll_file

BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "a mapping"),
        ("a: [1\n", "expected"),
        ("!!python/object/apply:os.system ['touch pwned']\n", "a mapping"),
        ("", "empty"),
        ("# a comment\n", "empty"),
        ("hello world\n", "a mapping"),
        ("learning_rate: 1e-6\nmodel_name: x\nseed: 1\nmax_steps: 5\n", "no configuration of ROLL's RLVR pipeline"),
        ("sft_train: {a: 1}\npretrain: x\n", "SFT"),
        ("actor_train: {a: 1}\nactor_infer: {a: 1}\ncustom_envs: {Sokoban: {}, x: 1}\n", "agentic"),
        (BOMB, "values found"),
        ("a: &a [*a]\n", "contains it"),
        ("a: &a {b: *a}\n", "contains it"),
        ("[" * 50_000, "nested"),
        ("x" * 1_000_001, "bytes"),
        ("\x00\x01", "special characters"),
    ],
)
def test_a_file_that_is_none_of_rolls_rlvr_pipeline_is_refused_with_the_reason(tmp_path, text, said):
    with pytest.raises((ValueError, YAMLError)) as refused:
        read_roll_file(write(tmp_path / "roll.yaml", text))
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "a: [1\n", BOMB, None])
def test_what_cannot_be_imported_ends_with_code_2_and_one_line_that_names_the_file(tmp_path, text):
    file = tmp_path / "roll.yaml"
    code, overrides, report = run_import(file if text is None else write(file, text))
    assert (code, overrides) == (2, [])
    assert report.startswith(f"error: {file}: ")
    assert "Traceback" not in report


def test_interpolations_that_multiply_are_refused_and_circles_end(tmp_path):
    many = "actor_train: {a: x}\nactor_infer: {a: x}\nb: {" + ", ".join(f"c{n}: '${{b}}'" for n in range(9)) + "}\n"
    with pytest.raises(ValueError, match="interpolations written out"):
        read_roll_file(write(tmp_path / "roll.yaml", many))
    circle = "actor_train: {a: x}\nactor_infer: {a: x}\nb: ${c}\nc: ${b}\n"
    assert set(read_roll_file(write(tmp_path / "roll.yaml", circle)).unresolved) == {"b", "c"}
