"""The doctor's verdict: exact or numeric parity with the reason, and a suggested draft depth."""

from __future__ import annotations

import datetime

import attrs

from specdec.backends.ops import Capabilities
from specdec.contract import ForwardPass, ModelInfo, Parity
from specdec.doctor.costs import ACCEPTANCES, RowCosts
from specdec.models.causal_lm import CausalLM
from specdec.records.probes import Finding, ProbeIdentity, ProbeRecord

SUGGESTED_AT = 0.7  # conditional acceptance for which a depth is suggested


@attrs.frozen(kw_only=True)
class Promise:
    """The guarantee that this machine can give for one checkpoint."""

    exact: bool
    reason: str
    claimed: bool  # whether the backend declares bitwise parity
    needs_probe: bool  # whether the declaration counts only with a stored record
    depth: int | None  # with the largest expected speed-up at SUGGESTED_AT; 0: none pays; None: not timed
    depth_reason: str

    @property
    def broken(self) -> bool:
        """Whether a backend that declares parity without needing a record gave different bits."""
        return self.claimed and not self.needs_probe and not self.exact


def promise(target: ForwardPass, record: ProbeRecord, costs: RowCosts | None) -> Promise:
    """Give the verdict on a loaded target from its findings. ``record`` need not be stored."""
    claimed, needs_probe, why_not = _claim(target)
    if record.differing:
        others = len(record.differing) - 1
        more = f" (and {others} more comparison{'s' if others > 1 else ''})" if others else ""
        exact, reason = False, f"{record.differing[0]}{more}"
    elif not claimed:
        exact = False
        reason = f"all compared bits are equal, but the backend does not promise them: {why_not}"
    elif isinstance(target, CausalLM) and not record.passed:
        exact, reason = False, "; ".join(record.notes) or "not all was compared"
    else:
        exact = True
        reason = (
            f"all {len(record.findings)} comparisons gave equal bits in blocks of up to {target.info.max_rows} rows"
        )
    depth, depth_reason = _depth(target.info, costs)
    return Promise(
        exact=exact, reason=reason, claimed=claimed, needs_probe=needs_probe, depth=depth, depth_reason=depth_reason
    )


def _claim(target: ForwardPass) -> tuple[bool, bool, str]:
    """Return whether bitwise parity is declared, whether it needs a record, and the declared reason."""
    declared = target.ops.capabilities if isinstance(target, CausalLM) else target.info
    needs_probe = isinstance(declared, Capabilities) and declared.parity_needs_probe
    return declared.parity is Parity.BITWISE, needs_probe, declared.parity_reason or "it gives no reason"


def _depth(info: ModelInfo, costs: RowCosts | None) -> tuple[int | None, str]:
    if costs is None:
        return None, "not timed"
    drafts = "with the MTP head" if costs.draft_step is not None else "with drafts that cost nothing"
    if not costs.depths():
        return 0, f"passes of {info.max_rows} rows leave no room for drafts"
    depth, speedup = costs.best_depth(SUGGESTED_AT)
    others = {acceptance: costs.best_depth(acceptance)[0] for acceptance in ACCEPTANCES if acceptance != SUGGESTED_AT}
    elsewhere = ", ".join(f"{one} at {acceptance:.0%}" for acceptance, one in others.items())
    if not depth:
        return 0, f"{drafts}, none pays if {SUGGESTED_AT:.0%} of the drafts reached are accepted; {elsewhere}"
    return depth, f"{drafts}, if {SUGGESTED_AT:.0%} of the drafts reached are accepted ({speedup:.2f}x); {elsewhere}"


def make_record(
    target: ForwardPass, findings: tuple[Finding, ...], notes: tuple[str, ...], costs: RowCosts | None
) -> ProbeRecord:
    """Make a record of the findings with the current time."""
    return ProbeRecord(
        identity=ProbeIdentity.of(target.info),
        probed=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        findings=findings,
        notes=notes,
        costs=() if costs is None else costs.rows,
        draft_step=None if costs is None else costs.draft_step,
    )
