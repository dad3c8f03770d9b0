"""The team of threads: each block runs once, for several callers at a time and after a fork; and the team's size."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from specdec.backends.cpu.arrays import SERIAL
from specdec.backends.cpu.backend import CpuBackend
from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.threads import Threads, given_processors
from specdec.errors import ConfigError
from tests.instruction_sets import kernels_of
from tests.processes import run_python


def native_ops(threads):
    return NativeOps(torch.float32, kernels_of(), Threads(threads))


@given(callers=st.integers(1, 6), threads=st.integers(1, 9), features=st.integers(900, 1100), rounds=st.integers(1, 30))
@settings(max_examples=20, deadline=None)
def test_callers_share_the_team(callers, threads, features, rounds):
    """Catches: a block that is skipped or run for another caller's job, a member that works on a finished job."""
    ops = native_ops(threads)
    generator = torch.Generator().manual_seed(features)
    inputs = [torch.randn(1 + i, 64, generator=generator) for i in range(callers)]
    weight = torch.randn(features, 64, generator=generator)  # above the size that one thread computes alone
    ops.threads.chosen = 1
    expected = [ops.linear(x, weight) for x in inputs]
    ops.threads.chosen = threads

    def call(i):
        return all(torch.equal(ops.linear(inputs[i], weight), expected[i]) for _ in range(rounds))

    with ThreadPoolExecutor(callers) as pool:
        assert all(pool.map(call, range(callers)))


class LargeOps(TorchDispatchMode):
    """Names the operations that torch would share among threads of its own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= SERIAL and not (op.is_view or "empty" in op.name()):
            self.seen.append(op.name())
        return result


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_decoding_starts_no_threads_of_torchs_own(name):
    """They spin for some milliseconds after an operation, and take a core from the kernels."""
    lm = specdec.load("demo", drafter={"name": name, "model": "random"}, depth=2)
    lm.generate("Once", max_new_tokens=4)  # recordings
    with LargeOps() as large:
        lm.generate("Once upon a time. " * 20, max_new_tokens=8)
        torch.ones(SERIAL).add_(1)
    assert large.seen == ["aten::ones", "aten::add_.Tensor"]


def test_more_threads_than_processors_are_said():
    given = given_processors()
    for threads in (None, given):
        assert not any("target.threads" in notice for notice in CpuBackend(threads).notices)
    (said,) = (notice for notice in CpuBackend(given + 1).notices if "target.threads" in notice)
    assert f"is {given + 1}, and this process may use {given} processor" in said


BUSY = """
import os, threading, time
import specdec
lm = specdec.load(threads=2, depth=2)
prompt = "def f(a, b):\\n" * 60  # torch copies the head's keys of so many rows with a pool of its own
tokens = lm.generate(prompt, max_new_tokens=24).tokens
def generate():
    while True:
        lm.generate("def add(a, b):", max_new_tokens=32)
for _ in range(2):
    threading.Thread(target=generate, daemon=True).start()
for _ in range(4):
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        os._exit(0 if lm.generate(prompt, max_new_tokens=24).tokens == tokens else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
os._exit(0)
"""

ELSEWHERE = """
import torch, specdec
lm = specdec.load(drafter="mtp", depth=2)
tokens = lm.generate("def f(", max_new_tokens=24).tokens
torch.set_default_device("meta")
assert lm.generate("def f(", max_new_tokens=24).tokens == tokens
assert specdec.load(drafter="mtp", depth=2).generate("def f(", max_new_tokens=24).tokens == tokens
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere torch does not survive a fork")
@pytest.mark.slow
def test_a_process_may_fork_while_its_threads_generate():
    """Catches: a child that waits for a lock which a thread of its parent held."""
    run_python("-W", "ignore", "-c", BUSY)


@pytest.mark.slow
def test_the_default_device_of_the_program_does_not_matter():
    """Catches: memory for a kernel that was allocated on another device."""
    run_python("-c", ELSEWHERE)


def test_target_threads_reaches_the_kernels(tmp_path):
    lm = specdec.load(threads=3)
    assert "3 threads" in lm.info.device or "torch reference" in lm.info.kernels
    with pytest.raises(ConfigError, match="threads"):
        specdec.load(threads=0)
    with pytest.raises(ConfigError, match=r"unknown.*threads|threads"):
        specdec.load(backend="metal", threads=2)


def mounted(root, groups, files):
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),  # a container sees its own group as the root
        (
            "3:cpu,cpuacct:/x\n1:memory:/y\n",
            {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 64),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 64),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, 64),
        ("0::/a\n", {}, 64),
    ],
)
def test_a_quota_limits_the_threads(tmp_path, monkeypatch, groups, files, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert given_processors(mounted(tmp_path, groups, files)) == expected


def test_torchs_number_counts_unless_one_was_chosen(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert Threads(given=8).count() == 5
    assert Threads(given=2).count() == 2
    assert Threads(chosen=7, given=2).count() == 7
