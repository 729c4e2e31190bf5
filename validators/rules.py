"""All rules of the capture validator, and the judgement of a record by them."""

from __future__ import annotations

from collections.abc import Sequence

from cuverify.validators import (
    cv1_work,
    cv2_calls,
    cv3_frozen,
    cv4_lifetime,
    cv5_padding,
    cv6_replay,
    cv9_harness,
)
from cuverify.validators.observations import CaptureSeen
from cuverify.validators.rule import Rule

from cuverify.report import Finding

RULES: tuple[Rule, ...] = (
    *cv1_work.RULES,
    *cv2_calls.RULES,
    *cv3_frozen.RULES,
    *cv4_lifetime.RULES,
    *cv5_padding.RULES,
    *cv6_replay.RULES,
    *cv9_harness.RULES,
)


def judge(seen: CaptureSeen, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return every violation in a record, in the order of the rules.

    Parameters
    ----------
    seen : CaptureSeen
        What one run of the protocol observed. It is not changed.
    rules : sequence of Rule
        All of them by default. They are independent: each judges the whole record.

    Returns
    -------
    list of Finding
        Empty when nothing is wrong in what was observed; what was not observed is coverage.
    """
    return [finding for rule in rules for finding in rule.findings(seen)]
