"""tools/bench/guess.py: its files and tables, of a run that is made up."""

import pytest
from tool_loading import load_tool

from megarl.hf.random_model import build_character_tokenizer
from megarl.types import FinishReason, Prompt, Response, Sample, Score, Turn

TOOL = load_tool("bench/guess.py")
TOKENIZER = build_character_tokenizer("1234567-<>", 64)
RUN = TOOL.Run(
    preset="vapo",
    seed=1,
    seconds=2.0,
    sampled=(0.1, 0.5),
    greedy=((0, 0.0), (2, 0.5)),
    final=(1.0, 0.0, 1.0, 1.0),
    num_ruled_out=1,
    num_later=6,
    before=("(nothing)", "7"),
    after=("4 < 1", "4 < 2"),
)


def test_a_saved_run_is_loaded_as_it_was(tmp_path):
    TOOL.save_run(tmp_path / "runs" / "vapo_1.json", RUN)
    assert TOOL.load_run(tmp_path / "runs" / "vapo_1.json") == RUN


def test_the_tables_show_each_run_with_its_interval_and_each_number_before_and_after():
    assert TOOL.format_table({"vapo": [RUN]}).splitlines()[2] == (
        "| vapo | 1 | 0.00 | 0.50 | 0.750 | 0.301 to 0.954 | 1 of 6 |"
    )
    assert TOOL.format_episodes({"vapo": [RUN]}).splitlines()[2:] == [
        "| 1 | `(nothing)` | `4 < 1` |",
        "| 2 | `7` | `4 < 2` |",
    ]


def test_the_page_has_the_tables_between_its_marks():
    page = f"# Title\n\n{TOOL.BEGIN}old\n{TOOL.END}\n\nText\n"
    filled = TOOL.fill_page(page, {"vapo": [RUN]})
    assert "old" not in filled
    assert TOOL.format_table({"vapo": [RUN]}) in filled
    assert TOOL.fill_page(filled, {"vapo": [RUN]}) == filled
    with pytest.raises(ValueError, match=r"environments\.md: the lines .* must both be there"):
        TOOL.fill_page("# Title", {"vapo": [RUN]})
    assert TOOL.fill_page(TOOL.PAGE.read_text(), {"vapo": [RUN]}).startswith("# Environments")


def test_an_episode_is_its_guesses_and_answers():
    ids = [*TOKENIZER.encode("4"), 2, *TOKENIZER.encode(">6"), 2]
    turns = [Turn(0, 2, "4"), Turn(3, 5, "6", 1.0)]
    generated = [True, True, False, True, True]
    response = Response(ids, "6", [0.0] * 5, generated, [0] * 5, FinishReason.stop, turns=turns)
    sample = Sample(Prompt("p", "1-7", (1,), "6"), response, Score(1.0, True), 0)
    assert TOOL.format_episode(sample, TOKENIZER) == "4 > 6"


def test_the_bounds_are_those_of_the_experiment():
    assert TOOL.load_bounds() == (pytest.approx(3 / 7), 1.0)
