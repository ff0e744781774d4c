"""Breaks of what users look with, and of what is looked at around a model."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OF_TOOLS = (
    # -- debugging, and what it is shown
    Mutation(
        "lines of a graph may end the script that they stand in",
        "graphshard/debugging/difference.py",
        'text.replace("<", ',
        'text.replace("never", ',
        ("tests/graph/test_debug_difference.py", "-k", "ends_the_script"),
    ),
    Mutation(
        "an error that keeps a page from being written hides that of the steps",
        "graphshard/debugging/session.py",
        "            if not said:\n",
        "            if True:\n",
        ("tests/graph/test_debug_page.py", "-k", "does_not_hide"),
    ),
    Mutation(
        "who looks at Dynamo's code has other code run",
        "graphshard/compat/dynamo_frames.py",
        "return None  # what was made is run",
        "return code",
        ("tests/graph/test_compat.py", "-k", "frames_are_seen"),
    ),
    Mutation(
        "a program that is lowered late is in no compilation of a trace",
        "graphshard/runtime/region_lowering.py",
        "with compiling(context.name, what), self._traced.resumed(), guarded:",
        "with compiling(context.name, what), guarded:",
        ("tests/graph/test_artifacts.py", "-k", "artifacts_of_their_compilation"),
    ),
    Mutation(
        "a page in a notebook may read the notebook",
        "graphshard/explain/markup.py",
        'sandbox="allow-scripts"',
        'sandbox="allow-scripts allow-same-origin"',
        ("tests/graph/test_explain_page.py", "-k", "notebook"),
    ),
    # -- surroundings
    Mutation(
        "a misspelt variable is ignored without a word",
        "graphshard/env.py",
        "for name in names if name not in _NAMES}",
        "for name in names if False}",
        ("tests/graph/test_env.py", "-k", "misspelt"),
    ),
    Mutation(
        "an optimizer may hold what sharding replaces",
        "graphshard/surroundings.py",
        "    if not _holders(names):",
        "    if True:",
        ("tests/dist/test_surroundings.py", "-k", "sharding_replaces"),
    ),
    Mutation(
        "an optimizer that is held by nothing but itself counts",
        "graphshard/surroundings.py",
        "    gc.collect()",
        "    ()",
        ("tests/dist/test_surroundings.py", "-k", "sharding_replaces"),
    ),
)
