"""May these runs be compared at all? Undertrained models say nothing about attention.

The checks, named before any comparison: every arm beats the corpus' bigram table, or guessing where the task asks
questions; the proxies' block recall beats chance with its whole interval; at least 10 records; at least half of the
query rows have a real choice.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from msa_analysis.choices import counting_rows
from msa_analysis.evidence import Evidence, Selected

MIN_RECORDS = 10
MIN_ROW_SHARE = 0.5


class Check(NamedTuple):
    """One rule applied to one run."""

    run: str
    rule: str
    found: str
    passed: bool


class Verdict(NamedTuple):
    """All checks; `reasons` says in words what failed."""

    checks: list[Check]

    @property
    def undertrained(self) -> bool:
        """True where a check failed or none applies: the report then does not compare."""
        return bool(self.reasons)

    @property
    def reasons(self) -> list[str]:
        """Each failed check, as `run: rule; found`."""
        if not self.checks:
            return ["no check applies: there is neither a bigram table nor a question nor a proxy to judge by"]
        return [f"{check.run}: {check.rule}; {check.found}" for check in self.checks if not check.passed]


def judge(evidence: Evidence) -> Verdict:
    """Apply the checks to every run that is no stem; what does not apply (dense, no bytes) is not checked."""
    checks = []
    for row in evidence.table.itertuples():
        if row.role == "stem":  # pyright: ignore[reportAttributeAccessIssue]
            continue
        label = evidence.labels[row.run]  # pyright: ignore[reportAttributeAccessIssue]
        bigram, ours = row.bigram_bits_per_byte, row.bits_per_byte  # pyright: ignore[reportAttributeAccessIssue]
        if bigram is not None and ours is not None and np.isfinite(bigram) and np.isfinite(ours):
            found = f"{ours:.3f} against the bigram table's {bigram:.3f}"
            checks.append(Check(label, "bits per byte must be below the bigram table's", found, ours < bigram))
        checks += _check_answers(label, evidence, row.run)  # pyright: ignore[reportAttributeAccessIssue]
        if row.proxies:  # pyright: ignore[reportAttributeAccessIssue]
            checks += _check_proxies(label, evidence.selected.get(row.run))  # pyright: ignore[reportAttributeAccessIssue]
    return Verdict(checks)


def _check_answers(label: str, evidence: Evidence, path: str) -> list[Check]:
    """Recall tasks: right answers against guessing one of the values, with a Wilson interval over questions."""
    run = next(run for run in evidence.runs if str(run.path) == path)
    answers = (run.result.get("accuracy_by_distance") or {}).values()
    asked = sum(answer["questions"] for answer in answers)
    if not asked:
        return []
    right = round(sum(answer["accuracy"] * answer["questions"] for answer in answers))
    low = binomtest(right, asked).proportion_ci(method="wilson").low
    chance = 1 / run.config.data.recall.num_keys
    found = f"{right / asked:.3f} of {asked} questions (from {low:.3f} at 95 %), chance {chance:.3f}"
    return [Check(label, "accuracy must beat guessing with its whole interval", found, bool(low > chance))]


def _check_proxies(label: str, selected: Selected | None) -> list[Check]:
    recall = "the proxies' block recall must beat chance with its whole interval"
    if selected is None:
        return [Check(label, recall, "not defined: no selections were recorded", False)]
    records = selected.data.sizes["step"]
    share = counting_rows(selected.data).share
    least = 4 * int(selected.data.attrs["top_k_blocks"])
    many = f"at least {MIN_RECORDS} records of the selections"
    half = f"at least half of the query rows must see {least} blocks or more (4 x top_k_blocks)"
    return [
        _check_recall(label, recall, selected),
        Check(label, many, f"{records} recorded", records >= MIN_RECORDS),
        Check(label, half, f"{share:.0%} do", share >= MIN_ROW_SHARE),
    ]


def _check_recall(label: str, rule: str, selected: Selected) -> Check:
    frame = selected.summary[selected.summary["layer"].isna()].set_index("metric")
    recall, excess = frame.loc["block_recall"], frame.loc["recall_excess"]
    if not np.isfinite(excess["low"]):
        return Check(label, rule, f"not defined: {excess['reason']}", False)
    low, high = recall["low"], recall["high"]
    found = f"{recall['value']:.3f} (95 % {low:.3f} to {high:.3f}), chance {recall['null']:.3f}"
    return Check(label, rule, found, bool(excess["low"] > 0))
