"""What Metal leaves open, as settings of a run: the order of threads, and contraction."""

from __future__ import annotations

from typing import Literal

import attrs

Order = Literal["ascending", "descending", "random"]
ORDERS: tuple[Order, ...] = ("ascending", "descending", "random")


@attrs.frozen(kw_only=True)
class Knobs:
    """One way to run a kernel.

    Attributes:
        order: in which order threads, and threadgroups, get their turns. A thread runs until it waits for others.
        contract: whether the compiler may fuse ``a * b + c`` across statements.
        guard: on which side of a buffer an access outside it faults at once. On the other side up to a page holds NaN,
            and writes there are found after the run.
        seed: of the random order.
        seconds: of processor time after which a run counts as endless.
    """

    order: Order = attrs.field(default="ascending", validator=attrs.validators.in_(ORDERS))
    contract: bool = False
    guard: Literal["front", "back"] = attrs.field(default="back", validator=attrs.validators.in_(("front", "back")))
    seed: int = 0
    seconds: int = 60
