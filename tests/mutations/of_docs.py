"""Breaks of what ties the docs to the sources."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TESTS = ("tests/graph/test_docs.py",)

OF_DOCS = (
    Mutation(
        "an error says something that troubleshooting does not have",
        "graphshard/env.py",
        'f"GRAPHSHARD_TWINS: got {raw!r}, want 0 or 1"',
        'f"GRAPHSHARD_TWINS: got {raw!r}, want a flag"',
        _TESTS,
    ),
    Mutation(
        "words that are not where they are raised go unnoticed",
        "docs/tools/messages.py",
        "yield Unread(source.file, scope.name, ast.unparse(expression))",
        "pass",
        _TESTS,
    ),
    Mutation(
        "a link to a heading that is not there goes unnoticed",
        "docs/tools/links.py",
        'if anchor and (path.suffix != ".md" or anchor not in anchors(path)):',
        'if anchor and path.suffix != ".md":',
        _TESTS,
    ),
    Mutation(
        "an option of compile is in no table",
        "docs/options.md",
        "| `compare_every` |",
        "| `compared` |",
        _TESTS,
    ),
)
