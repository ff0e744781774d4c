from graphshard.planner.problem import Problem


def kept_problems(forward: Problem, backward: Problem, units: frozenset[str]) -> tuple[Problem, Problem]:
    return forward, backward


def choose_kept(forward: Problem, backward: Problem, budget_bytes: int) -> frozenset[str]:
    return frozenset()
