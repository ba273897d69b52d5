"""What ranks print and display, as a real kernel shows it."""

from __future__ import annotations

import html
import time

import pytest
from fold_text import fold, numbered
from kernel_session import KernelSession
from server_limits import ServerLimits

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def kernel():
    with KernelSession() as session:
        session.ok("%load_ext jupyter_accel")
        yield session
        session.shutdown()
        session.assert_nothing_left()


MANY_WAYS = """%%accel_launch -n 2
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
for i in range(1000):
    print("py", i)
    if i % 3 == 0:
        os.write(1, f"os {i}\\n".encode())
    if i % 5 == 0:
        libc.puts(f"c {i}".encode())
    if i % 7 == 0:
        print("warn", i, file=sys.stderr)
    if i % 11 == 0:
        os.write(2, f"raw {i}\\n".encode())
subprocess.run([sys.executable, "-c", "for i in range(50): print('sub', i)"], check=True)
print("child's error", file=sys.stderr, flush=True)
subprocess.run(["sh", "-c", "echo sherr >&2"], check=True)
print("no end", end="")
"""


def test_everything_that_two_ranks_write_is_there_in_order(kernel):
    cell = kernel.ok(MANY_WAYS)
    for out, err in ((cell.stdout, cell.stderr), (fold(cell, 1), fold(cell, 1))):
        assert numbered(out, "py") == list(range(1000))
        assert numbered(out, "os") == list(range(0, 1000, 3))
        assert numbered(out, "c") == list(range(0, 1000, 5))
        assert numbered(out, "sub") == list(range(50))
        assert numbered(err, "warn") == list(range(0, 1000, 7))
        assert numbered(err, "raw") == list(range(0, 1000, 11))
        assert "sherr" in err
        assert "no end" in out


def test_python_and_c_and_raw_writes_to_standard_output_keep_their_order(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
import ctypes, os
libc = ctypes.CDLL(None)
for i in range(100):
    print("a", i)
    libc.puts(f"b {i}".encode())
    os.write(1, f"c {i}\\n".encode())
""")
    expected = "".join(f"a {i}\nb {i}\nc {i}\n" for i in range(100))
    assert cell.stdout == expected
    assert fold(cell, 1) == expected


def test_long_lines_and_split_characters_arrive_whole(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
import os, time
text = "größe 🙂 日本\\n".encode()
for byte in text:
    os.write(1, bytes([byte]))
    time.sleep(0.002)
print("x" * 1_000_000)
print("<b>&amp;</b>", "\\x1b[31mred\\x1b[0m")
""")
    expected = "größe 🙂 日本\n" + "x" * 1_000_000 + "\n<b>&amp;</b> \x1b[31mred\x1b[0m\n"
    assert cell.stdout == expected
    assert fold(cell, 1) == expected
    (folded,) = [d for d in cell.displays if d.text.startswith("rank 1")]
    assert html.escape("<b>&amp;</b>") in folded.html
    assert "<b>" not in folded.html
    assert "\x1b" not in folded.html


def test_text_and_displays_and_warnings_of_rank_0_keep_their_order(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
import sys, warnings
from IPython.display import HTML
print("one", end="")
display(HTML("<i>first</i>"))
print("two")
print("three", file=sys.stderr)
print("four")
display(HTML("<i>second</i>"))
warnings.warn("five")
HTML("<i>last</i>")
""")
    seen = [
        getattr(output, "text", "") and (output.html if hasattr(output, "html") else output.text)
        for output in cell.outputs
    ]
    text = "\n".join(seen)
    places = [
        text.index(word)
        for word in ("one", "first", "two", "three", "four", "second", "five", "last")
    ]
    assert places == sorted(places)


def test_unfinished_lines_of_rank_0_are_seen_while_it_works(kernel):
    cell = kernel.start("""%%accel_launch -n 2
import time
for _ in range(3):
    print(".", end="", flush=True)
print("", end="", flush=True)
time.sleep(1.5)
print("done")
""")
    cell.wait_for_output("...", timeout=20)
    assert cell.so_far.status == "running"
    assert "done" not in cell.so_far.stdout
    assert cell.wait().stdout == "...done\n"


def test_figures_and_tables_of_rank_0_are_shown_as_in_any_cell(kernel):
    cell = kernel.ok(
        """%%accel_launch -n 2
%matplotlib inline
import matplotlib.pyplot as plt
class Table:
    def _repr_html_(self):
        return "<table><tr><td>loss</td></tr></table>"
plt.plot([1, 2])
plt.show()
print("between")
plt.plot([3, 4])
Table()
""",
        timeout=100,
    )
    kinds = []
    for output in cell.outputs:
        if hasattr(output, "name"):
            kinds.append(output.text.strip())
        elif not output.text.startswith("rank 1"):  # a glimpse of it comes when a run is slow
            kinds += [kind for kind in ("image/png", "text/html") if kind in output.data][:1]
    # the state line, the shown figure, text, the table, the figure of the cell's end
    at = kinds.index("between")
    assert kinds[at - 1] == "image/png"
    assert sorted(kinds[at + 1 : at + 3]) == ["image/png", "text/html"]
    assert "loss" in cell.all_text
    assert "Figure" in fold(cell, 1)


def test_a_figure_is_shown_at_the_end_of_its_cell_without_any_magic(kernel):
    cell = kernel.ok(
        "%%accel_launch -n 2\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])", timeout=100
    )
    assert [d for d in cell.displays if "image/png" in d.data]


def test_a_display_can_be_updated_and_the_output_cleared(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
from IPython.display import clear_output
handle = display("start", display_id=True)
for i in range(2000):
    handle.update(f"step {i}")
print("kept for a moment")
clear_output(wait=True)
print("after")
""")
    assert cell.stdout == "after\n"
    assert any("2 of 2 ranks done" in d.text for d in cell.displays), "the state line is gone"
    assert fold(cell, 1) == "after\n"


def test_the_last_state_of_a_display_that_changes_fast_is_shown(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
handle = display("start", display_id=True)
for i in range(3000):
    handle.update(i)
print("end")
""")
    assert any(d.text == "2999" for d in cell.displays)
    assert "2999" in fold(cell, 1)
    assert ServerLimits().dropped(cell.messages) == 0


def test_clearing_in_a_folded_rank_clears_nothing_else(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
import time
from IPython.display import clear_output
if rank == 0:
    print("stays")
else:
    print("goes")
    clear_output()
    print("comes")
""")
    assert cell.stdout == "stays\n"
    assert fold(cell, 1) == "comes\n"


def test_bars_of_both_ranks_end_full_and_send_few_messages(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
from tqdm import tqdm
for _ in tqdm(range(300), desc="epoch", mininterval=0, miniters=1):
    pass
""")
    bar = cell.stderr.replace("\n", "").rpartition("\r")[2]
    assert bar.startswith("epoch: 100%")
    assert "300/300" in bar
    folded = fold(cell, 1)
    assert folded.count("epoch") == 1, "a fold shows the last state of a bar only"
    assert "100%" in folded
    assert len(cell.messages) < 60


def test_widgets_of_rank_0_are_live_in_the_front_end(kernel):
    cell = kernel.ok(
        """%%accel_launch -n 2
import ipywidgets
bar = ipywidgets.IntProgress(max=10, description="work")
display(bar)
for i in range(11):
    bar.value = i
""",
        timeout=90,
    )
    opened = {
        m.content["comm_id"]: m.content["data"]["state"]
        for m in cell.messages
        if m.kind == "comm_open"
    }
    (bar,) = [
        key for key, state in opened.items() if state.get("_model_name") == "IntProgressModel"
    ]
    views = [d.data[WIDGET_VIEW]["model_id"] for d in cell.displays if WIDGET_VIEW in d.data]
    assert views == [bar]
    values = [
        m.content["data"]["state"]["value"]
        for m in cell.messages
        if m.kind == "comm_msg"
        and m.content["comm_id"] == bar
        and "value" in m.content["data"].get("state", {})
    ]
    assert values == list(range(1, 11))
    assert not any(m.kind == "comm_close" and m.content["comm_id"] == bar for m in cell.messages)


def test_a_notebook_bar_of_rank_0_reaches_the_front_end_full(kernel):
    cell = kernel.ok(
        """%%accel_launch -n 2
from tqdm.notebook import tqdm
for _ in tqdm(range(50)):
    pass
""",
        timeout=90,
    )
    states = [m.content["data"].get("state", {}) for m in cell.messages if m.kind == "comm_msg"]
    assert 50 in [state.get("value") for state in states]
    assert any("50/50" in str(state.get("value")) for state in states)


def test_a_printing_thread_ends_with_its_cell(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
import threading, time
def chat():
    while True:
        print("tick", flush=True)
        time.sleep(0.005)
threading.Thread(target=chat, daemon=True).start()
time.sleep(0.1)
""")
    after = kernel.ok("print('clean')")
    time.sleep(0.3)
    assert "tick" in cell.stdout
    assert after.stdout == "clean\n"
    assert not after.displays
    assert not cell.late
    latest = kernel.messages[-20:]
    assert not any(
        m.kind == "stream" and "tick" in m.content["text"] and m.parent != cell.msg_id
        for m in latest
    )


def test_what_kept_workers_write_between_cells_stays_out_of_plain_cells(kernel):
    """It comes with the next cell that runs on them: they have no other place to write to."""
    first = kernel.ok("""%%accel_launch -n 2 --keep talker
import threading, time
def chat():
    for i in range(30):
        print("tick", i, flush=True)
        time.sleep(0.01)
threading.Thread(target=chat, daemon=True).start()
""")
    time.sleep(0.5)
    plain = kernel.ok("print('clean')")
    later = kernel.ok("%%accel_launch --keep talker\nprint('second')")
    kernel.ok("%accel_close talker")
    assert plain.stdout == "clean\n"
    assert not first.late
    assert numbered(first.stdout + later.stdout, "tick") == list(range(30))
    assert "second" in later.stdout


def test_code_that_moves_the_standard_streams_does_not_disturb_the_launcher(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
import os, sys, tempfile
saved = os.dup(1)
with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 1)
    print("into the file")
    print("on the side", file=sys.stderr)
    sys.stdout.flush()
    os.dup2(saved, 1)
    file.seek(0)
    content = file.read()
print(content)
os.close(1)
os.close(2)
""")
    assert cell.stdout == "b'into the file\\n'\n"
    assert cell.stderr == "on the side\n"


def test_eight_ranks_have_seven_folds_and_one_state_line(kernel):
    cell = kernel.ok("%%accel_launch -n 8\nprint('rank', rank)", timeout=100)
    assert cell.stdout == "rank 0\n"
    assert [fold(cell, rank) for rank in range(1, 8)] == [f"rank {r}\n" for r in range(1, 8)]
    (state,) = [d for d in cell.displays if d.text.startswith("8 ranks on")]
    assert "8 of 8 ranks done" in state.text
    assert html.escape(state.text) in state.html
    assert WIDGET_VIEW not in state.data


def test_ranks_without_output_show_the_state_line_alone(kernel):
    cell = kernel.ok("%%accel_launch -n 2\npass")
    assert len(cell.outputs) == 1
    assert cell.displays[0].updates >= 1


def test_a_plain_cell_magic_shows_the_same(kernel):
    body = """%%accel_launch -n 2
import sys
print("out")
print("err", file=sys.stderr)
display("shown")
"""
    cell = kernel.ok("%%time\n" + body)
    assert cell.stdout.startswith("out\n")
    assert "Wall time" in cell.stdout
    assert cell.stderr == "err\n"
    assert fold(cell, 1) == "out\nerr\n'shown'\n"
    assert any("2 of 2 ranks done" in d.text for d in cell.displays)


def test_a_plain_cell_magic_shows_errors_alike(kernel):
    body = "%%accel_launch -n 2\nx = 1\nif rank == 1:\n    raise ValueError('no luck')\n"
    awaited, plain = kernel.run(body), kernel.run("%%time\n" + body)
    assert awaited.ename == plain.ename
    assert awaited.evalue == plain.evalue
    assert "rank 1" in plain.evalue
    assert "raise ValueError('no luck')" in plain.plain_traceback
