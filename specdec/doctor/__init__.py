"""The doctor: report what is installed, compare a loaded checkpoint's bits and give a verdict."""

from __future__ import annotations

from specdec.doctor.machine import examine_machine
from specdec.doctor.promise import probe_bits, promise

__all__ = ["examine_machine", "probe_bits", "promise"]
