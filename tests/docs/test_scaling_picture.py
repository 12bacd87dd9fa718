"""docs/planning.md: the picture and the tables of scaling are what the planner says of the recorded layouts."""

from types import ModuleType

import pytest
from tool_loading import load_tool


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return load_tool("docs/scaling.py")


def test_the_picture_and_the_tables_are_current(scaling):
    assert scaling.PICTURE.read_text() == scaling.draw(scaling.plan_panels()), "python tools/docs/scaling.py"
    assert scaling.PAGE.read_text() == scaling.render_page(), "python tools/docs/scaling.py"


def test_the_parts_of_every_point_are_its_planned_iteration(scaling):
    case = ("qwen32b", False, 8)
    layout = scaling.load_layouts()[scaling.name_case(*case)]
    config = scaling.load_config([*scaling.list_arguments(*case), *layout])
    plan = scaling.build_plan(config, scaling.find_models(config), count=scaling.count_quickly)
    point = scaling.plan_point(*case, layout)
    assert point.total == pytest.approx(plan.seconds.iteration)
    assert min(point.seconds.values()) >= 0


def test_efficiency_is_that_of_samples_and_gpus(scaling):
    points = [scaling.Point(8, None), scaling.Point(16, {"computing": 100.0}), scaling.Point(32, {"computing": 80.0})]
    strong, weak = (scaling.Panel("qwen32b", is_weak, points) for is_weak in (False, True))
    assert strong.find_efficiency(points[2]) == pytest.approx(100 / 160)
    assert weak.find_efficiency(points[2]) == pytest.approx(100 / 80)
