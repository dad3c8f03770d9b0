"""Wrong observers."""

from __future__ import annotations

import random
import threading


class Divides:
    def specdec_cycle(self, record):
        return record.accepted / record.offered


class Samples:
    def specdec_cycle(self, record):
        random.random()


class OwnThread:
    def __init__(self):
        self.thread = None

    def specdec_cycle(self, record):
        self.thread = self.thread or threading.get_ident()
        assert threading.get_ident() == self.thread


BROKEN = {Divides: "S1", Samples: "S2", OwnThread: "S6"}
