"""A planned program as text: what a reader sees, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest
from expecttest import assert_expected_inline

from graphshard.explain import Explanation, print_explanation
from graphshard.explain.plain_text import summary_text
from tests.graph.planned_programs import MIB, deep_program, explanation, small_program

BASELINES = (("fsdp2", 1500.0, 20 * MIB), ("other", 3000.0, 90 * MIB))
MEASURED = {"gather:0": (3.0, 260.0, 251.5), "reduce:2": (700.0, 1100.0, 90.0)}


def full_program() -> Explanation:
    program = small_program(plan="auto", baselines=BASELINES, budget_bytes=24 * MIB, measured=MEASURED)
    return explanation(program, notes=("region 1 is not planned: it has one unit.",))


def test_text_of_a_program_is_complete() -> None:
    assert_expected_inline(
        full_program().to_text(top=3),
        """\
graphshard plan for 2 x test
Times are predicted by simulation. A bucket is one collective for several parameters; a coalesced one takes their
tensors one by one, without copies into and out of a buffer. Exposed: time that the computation stands still, waiting
for a collective. Lower bound: what no schedule can beat.
note: region 1 is not planned: it has one unit.

region 0 backward (plan: auto)
==============================
Its computation takes 610.0 us, its collectives 1.240 ms on group shard, the busiest. Communication limits it: the
computation is too short to hide it all.
predicted step    1.573 ms  1.19x the lower bound
lower bound       1.320 ms  no schedule of this program is faster
exposed           875.2 us  55.6 % of the step: the computation stands still for 5 of 7 waits
group shard busy  1.240 ms  78.8 % of the step is a collective under way
peak memory       23.0 MiB  before the end; within the budget of 24.0 MiB
measured waits    341.5 us  predicted 210.0 us for the same 2 buckets

Where the time goes
  part                                        time   share
  computation                             610.0 us  38.8 %
  computation, slower beside collectives   41.1 us   2.6 %
  copies into buckets, and launches        29.6 us   1.9 %
  copies out of buckets                    16.8 us   1.1 %
  waiting for collectives (exposed)       875.2 us  55.6 %

What the computation waits for
   exposed  collective             cause              why it is not hidden
  410.0 us  reduce:3               nothing behind it  Its last gradient is only computed at the very end: nothing is
                                                      left to hide it; its 4.0 MiB take 410.0 us.
  210.0 us  gather:0               nothing before it  The program begins with `op0`, which needs it: nothing is computed
                                                      yet that could hide it; its 2.0 MiB take 210.0 us, of which 10.0
                                                      us are latency.
  105.0 us  reduce:3 (all-reduce)  nothing behind it  It follows a reduce-scatter that is awaited behind the last
                                                      computation: nothing is left to hide it; its 2.0 MiB take 105.0
                                                      us.
  2 more, 150.2 us together

Memory at its peak
  held by                         size   share
  computation                 11.0 MiB  47.8 %
  collective buffers           6.0 MiB  26.1 %
  reduced gradients (shards)   4.0 MiB  17.4 %
  unreduced gradients          2.0 MiB   8.7 %

Other schedules
  schedule   predicted  vs this plan      peak  what it is
  fsdp2       1.500 ms        0.954x  20.0 MiB  FSDP2's own: one bucket per unit, gathered one unit ahead
  this plan   1.573 ms        1.000x  23.0 MiB
  other       3.000 ms         1.91x  90.0 MiB  over the budget

Predicted beside measured
  bucket       start       end   exposed  measured launch  measured done  measured wait
  gather:0    4.0 us  214.0 us  210.0 us           3.0 us       260.0 us       251.5 us
  reduce:2  436.0 us  1.152 ms    0.0 us         700.0 us       1.100 ms        90.0 us
  A predicted end is that of the collective; a measured one is done, at the latest, when its wait is over.

Buckets, in order of launch
  bucket    kind                    params  first and last        size  launched before  awaited before     start       end   exposed
  gather:0  all-gather                   2  layers.1.{wq, wo}  2.0 MiB  op0              op0               4.0 us  214.0 us  210.0 us
  gather:1  all-gather                   2  layers.0.{wq, wo}  2.0 MiB  op0              op2             226.0 us  436.0 us   80.2 us
  reduce:2  reduction + all-reduce       2  layers.1.{wq, wo}  4.0 MiB  op2              the end         436.0 us  1.152 ms         -
  reduce:3  reduction + all-reduce       2  layers.0.{wq, wo}  4.0 MiB  the end          the end         1.056 ms  1.573 ms  515.0 us
""",  # noqa: E501
    )


def test_text_of_several_programs_begins_with_all_of_them() -> None:
    text = explanation(small_program(), small_program(title="region 1 backward")).to_text()
    rows = text.partition("Programs\n")[2].splitlines()[1:3]
    assert [row.split("  ")[0] for row in rows] == ["region 0 backward", "region 1 backward"]
    assert text.count("\n====") == 2


def test_text_is_what_print_shows() -> None:
    assert str(full_program()) + "\n" == full_program().to_text()


def test_text_cuts_waits_and_long_tables_and_says_so() -> None:
    program = deep_program(30)
    text = explanation(program).to_text(top=2)
    assert re.search(r"^  \d+ more, .* together$", text, re.MULTILINE)
    assert "... 20 more; save('plan.html') shows all ..." in text
    table = text.partition("Buckets, in order of launch\n")[2].splitlines()
    assert len(table) == 1 + 40 + 1
    assert (table[1].split()[0], table[-1].split()[0]) == (program.bucket_names[0], program.bucket_names[-1])


def test_text_aligns_numbers_to_the_right() -> None:
    table = full_program().to_text().partition("Memory at its peak\n")[2].partition("\n\n")[0].splitlines()
    assert {len(line) for line in table} == {len(table[0])}


def test_text_says_when_a_budget_is_not_kept() -> None:
    assert "OVER the budget of 9.0 MiB" in explanation(small_program(budget_bytes=9 * MIB)).to_text()
    assert "no budget given" in explanation().to_text()


def test_print_on_no_terminal_writes_plain_text() -> None:
    out = io.StringIO()
    print_explanation(full_program(), 2, out)
    assert out.getvalue() == full_program().to_text(2)


def test_print_without_rich_writes_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = Terminal()
    print_explanation(full_program(), file=out)
    assert out.getvalue() == full_program().to_text()


def test_print_on_a_terminal_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="rich draws tables on terminals, and is optional")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "400")
    out = Terminal()
    print_explanation(full_program(), 3, out)
    drawn = out.getvalue()
    assert "\x1b[" in drawn
    assert words(drawn) == words(full_program().to_text(3))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def words(text: str) -> list[str]:
    """Without colours and lines; the order of words is that of the text, where nothing is wrapped."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return sorted(re.sub("[─=]{2,}", " ", plain).split())


def test_summary_of_no_programs_is_a_heading() -> None:
    assert len(summary_text([]).splitlines()) == 2
