"""Guarded calls: whose error it is, what the watchdog reports, and what the listing shows."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from specdec.cli import main
from specdec.contract import CycleRecord
from specdec.errors import ConfigError, ContractError, PluginError, StateError
from specdec.hookspecs import hookimpl
from specdec.registry import Guard, Registry, Switch, answers, use_registry, watchdog

LIMIT = 10.0


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


# --- the watchdog -----------------------------------------------------------------------------------------------------


@given(gaps=st.lists(st.floats(0.1, 30), min_size=1, max_size=12), ends=st.integers(0, 12))
def test_a_call_is_reported_once_and_only_after_the_limit(gaps: list[float], ends: int) -> None:
    """It runs from the first look on, and returns before the look number ``ends``."""
    guard, looks, now, reports = Guard("drafter", "slow"), watchdog.Looks(LIMIT), 0.0, []

    def hangs() -> None:
        nonlocal now
        for number, gap in enumerate(gaps):
            if number == ends:
                return
            reports.extend(call for call in looks.look(now) if call.guard is guard)
            now += gap

    guard.bind("propose", hangs)()
    seen = sum(gaps[: max(min(ends, len(gaps)) - 1, 0)])
    assert [call.method for call in reports] == ["propose"] * (seen > LIMIT)
    assert all(call.seconds > LIMIT for call in reports)
    assert not any(call.guard is guard for call in looks.look(now + 10 * LIMIT))  # it has returned


@given(calls=st.integers(2, 20))
def test_many_short_calls_are_not_one_long_one(calls: int) -> None:
    guard, looks = Guard("target", "busy"), watchdog.Looks(LIMIT)
    found = []
    run = guard.bind("decode", lambda now: found.extend(call for call in looks.look(now) if call.guard is guard))
    for number in range(calls):
        run(number * LIMIT)
    assert found == []


def test_a_call_that_raised_is_over() -> None:
    guard, looks = Guard("drafter", "broken"), watchdog.Looks(LIMIT)
    for error in (ValueError(), KeyboardInterrupt()):
        with pytest.raises((PluginError, KeyboardInterrupt)):
            guard.bind("propose", raising(error))()
        assert [call for now in (0, 100, 200) for call in looks.look(now) if call.guard is guard] == []


def test_the_watchdog_keeps_no_guard_alive() -> None:
    before = len(watchdog.guards)
    guard = Guard("drafter", "gone")
    assert len(watchdog.guards) == before + 1
    del guard
    assert len(watchdog.guards) == before


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon", "", "1e300"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for text, seconds in (("5", 5.0), ("0", float("inf"))):
        monkeypatch.setenv(watchdog.SECONDS, text)
        assert watchdog.limit_s() == seconds
    monkeypatch.setenv(watchdog.SECONDS, value)
    with pytest.raises(ConfigError, match=watchdog.SECONDS):
        watchdog.limit_s()


# --- whose error ------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by the program's own handler."""


@pytest.fixture
def handler() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise Stop

    former = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, former)


def test_what_a_signal_handler_of_the_program_raises_is_not_the_plugins(handler: None) -> None:
    guard = Guard("drafter", "innocent")
    with pytest.raises(Stop):
        guard.bind("propose", lambda: signal.raise_signal(signal.SIGUSR1))()
    with pytest.raises(PluginError, match=r"the drafter 'innocent' failed in propose: Stop"):
        guard.bind("propose", raising(Stop()))()  # the same class from the plugin itself


def test_a_switch_lets_ctrl_c_and_the_programs_handlers_pass(handler: None) -> None:
    switch = Switch(Guard("drafter", "innocent"))
    with pytest.raises(KeyboardInterrupt):
        switch.bind("propose", raising(KeyboardInterrupt()))()
    with pytest.raises(Stop):
        switch.bind("propose", lambda: signal.raise_signal(signal.SIGUSR1))()
    assert switch.failure == ""


def test_a_switch_is_off_after_the_first_failure() -> None:
    switch, calls = Switch(Guard("drafter", "weak")), []

    def fails() -> None:
        calls.append(1)
        raise ValueError("boom")

    ask = switch.bind("propose", fails, "nothing")
    assert [ask(), ask()] == ["nothing", "nothing"]
    assert len(calls) == 1
    assert switch.failure == "the drafter 'weak' failed in propose: ValueError: boom"
    other = Switch(Guard("drafter", "weak"))
    processor = StateError("forbidden")
    processor.plugin = "logits processor", "t"
    with pytest.raises(StateError):
        other.bind("propose", raising(processor))()
    assert other.failure == ""


def test_a_refused_answer_says_what_came_and_what_is_taken() -> None:
    guard = Guard("depth policy", "odd", "specdec-odd 1.0")
    with pytest.raises(ContractError, match=r"(?s)'odd' returned 1.5 \(float\) from next_depth.*0 or more") as raised:
        guard.bind("next_depth", lambda: answers.depth(1.5))()
    assert raised.value.plugin == ("depth policy", "odd")
    assert raised.value.facts["plugin"] == "odd (specdec-odd 1.0)"


# --- the listing ------------------------------------------------------------------------------------------------------


class Watcher:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    @hookimpl
    def specdec_cycle(self, record: CycleRecord) -> None:
        if self.fails:
            raise ValueError("lost its file")


class Unregistrable:
    @hookimpl
    def specdec_drafters(self) -> Any:
        raise OSError("no licence")


@pytest.mark.parametrize("fails", [False, True])
def test_observers_and_failed_hooks_are_listed_with_their_origin(fails: bool) -> None:
    registry = Registry([Watcher(fails), Unregistrable()], entry_points=(), strict=False)
    former = use_registry(registry)
    try:
        registry.load()
        record = CycleRecord(
            position=0,
            depth=0,
            offered=0,
            accepted=0,
            emitted=(1,),
            draft_seconds=0,
            verify_seconds=0,
            commit_seconds=0,
        )
        reasons = registry.notify_cycle(record)
        assert registry.notify_cycle(record) == ()
        listed = " ".join(CliRunner().invoke(main, ["plugins"], env={"COLUMNS": "300"}).output.split())
    finally:
        use_registry(former)
    assert "observer" in listed
    assert "registered by Watcher" in listed
    assert "failed (registration): Unregistrable (registered by Unregistrable): OSError: no licence" in listed
    failed = "failed (specdec_cycle): Watcher (registered by Watcher): ValueError: lost its file"
    assert (failed in listed) == fails
    assert bool(reasons) == fails
