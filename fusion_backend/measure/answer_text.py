"""Measured answers as the sentences of a report."""

from __future__ import annotations

from fusion_backend.measure.store import Answer


def reason(answer: Answer, take: str, together: bool) -> str:
    """The reason from an answer with a verdict, for one site that `take` computes: the times, or
    the ratio. together: the site was measured with other sites.
    """
    if not take and answer.why:
        return f"left to Inductor: {answer.why}, {answer.when}"
    if not take and answer.verdict == "faster":
        return f"left to Inductor: its region is faster with its other sites alone, {answer.when}"
    others = " with its neighbours" if together else ""
    if not take:
        speed = f"{answer.ratio:.2f} times as fast in its region"
        return f"left to Inductor: {speed}{others}, {answer.when}"
    kept = round(answer.more_bytes / 1e6)
    more = f", {kept} MB more kept for backward" if kept > 0 else ""
    times = f"{answer.ours_ms:.3f} ms, Inductor {answer.plain_ms:.3f} ms here{others}"
    return f"{times}{more}, {answer.when}"


def unmeasured(why: str, taken: bool) -> str:
    """The reason from an answer without a verdict: what was decided from bytes and launches alone,
    and why nothing was measured.
    """
    how = "fused on an estimate from bytes and launches; " if taken else "left to Inductor: "
    return how + why


def like_another(answer: Answer, take: str) -> str:
    """The reason for a site that was not measured itself: the times of a region with a site that
    differs only in its neighbours, or that this region is faster without it.
    """
    if not take:
        without = "whose region is faster with its other sites alone"
        return f"left to Inductor: like another site of this graph, {without}, {answer.when}"
    times = f"{answer.ours_ms:.3f} ms, Inductor {answer.plain_ms:.3f} ms there"
    others = " with its neighbours" if len(answer.sites) > 1 else ""
    return f"like another site of this graph: {times}{others}, {answer.when}"
