"""The doctor: report what is installed, compare a loaded checkpoint's bits, time its passes and give a verdict."""

from __future__ import annotations

from specdec.doctor.costs import RowCosts, measure_row_costs
from specdec.doctor.machine import MachineReport, examine_machine
from specdec.doctor.promise import Promise, probe_bits, promise

__all__ = ["MachineReport", "Promise", "RowCosts", "examine_machine", "measure_row_costs", "probe_bits", "promise"]
