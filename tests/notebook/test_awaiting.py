"""Which cells become awaited calls, and which stay as they are."""

from __future__ import annotations

import ast

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from jupyter_accel.notebook.awaiting import CELL_CALL, LINE_CALL, Transformer


def transformer(*, active=True):
    return Transformer(lambda: active, ast.parse)


def changed(cell, **options):
    return "".join(transformer(**options)(cell.splitlines(keepends=True)))


def arguments(call):
    """The arguments of an awaited call."""
    tree = ast.parse(call, mode="exec").body[-1]
    value = tree.value
    assert isinstance(value, ast.Await)
    return [ast.literal_eval(argument) for argument in value.value.args]


def test_a_launching_cell_becomes_one_awaited_call():
    result = changed("%%accel_launch -n 2\nx = 1\nprint('ü', \"q\\n\")\n")
    assert result.startswith(CELL_CALL)
    assert result.count("\n") == 1
    assert arguments(result) == ["-n 2", "x = 1\nprint('ü', \"q\\n\")\n", 1]


def test_empty_rows_above_the_magic_are_counted():
    assert arguments(changed("\n\n%%accel_launch\nx\n")) == ["", "x\n", 3]


@pytest.mark.parametrize(
    "cell",
    [
        "print('%%accel_launch')\n",
        "%%accel_launcher -n 2\nx\n",
        "%%accel_launch.more\nx\n",
        "%%time\n%accel_launch f()\n",
        "x = 1\n",
        "if True:\n    %accel_launch f()\n",
        "text = '''\n%accel_launch f()\n'''\n",
        "# %accel_launch f()\n",
    ],
)
def test_other_cells_stay_as_they_are(cell):
    assert changed(cell) == cell


def test_nothing_is_awaited_where_autoawait_is_off():
    cell = "%%accel_launch\nx\n"
    assert changed(cell, active=False) == cell


def test_line_magics_are_awaited_wherever_they_stand_at_the_margin():
    result = changed("a = 1\nvalue = %accel_launch -n 2 f(a)\n%accel_launch g()\nvalue\n")
    lines = result.splitlines()
    assert lines[1] == f"value = {LINE_CALL}('-n 2 f(a)')"
    assert lines[2] == f"{LINE_CALL}('g()')"
    assert (lines[0], lines[3]) == ("a = 1", "value")


def test_a_mistake_in_the_body_stays_at_its_line():
    result = changed("%%accel_launch\nx = 1\ny = = 2\n")
    with pytest.raises(SyntaxError) as caught:
        ast.parse(result)
    assert caught.value.lineno == 3


@pytest.mark.parametrize("cell", ["%%accel_launch -n 2", "%%accel_launch -n 2\nprint(1)"])
def test_a_cell_that_is_being_typed_is_not_complete(cell):
    manager = TransformerManager()
    manager.cleanup_transforms.append(transformer())
    assert manager.check_complete(cell)[0] == "incomplete"
    assert manager.check_complete(cell + "\n\n")[0] == "complete"
