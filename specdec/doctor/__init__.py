"""The doctor: report what is installed, compare a loaded checkpoint's bits and give a verdict."""

from __future__ import annotations

from specdec.doctor.machine import MachineReport, examine_machine
from specdec.doctor.promise import Promise, probe_bits, promise

__all__ = ["MachineReport", "Promise", "examine_machine", "probe_bits", "promise"]
