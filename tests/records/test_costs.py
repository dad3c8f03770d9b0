"""Cost tables: lines between what was measured, what measuring leaves alone, and files that belong to one machine."""

import pwd
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec.decoding.cycle_timing import cost_identity, costs_of, measure_costs, sequences_that_pay, warm_up
from specdec.errors import UnsupportedError
from specdec.records import machine
from specdec.records.cost_table import CostTable, costs_folder, costs_path, read_costs, write_costs
from specdec.records.store import cache_folder

seconds = st.floats(1e-9, 1e3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_COSTS", str(tmp_path / "costs"))
    return tmp_path / "costs"


@pytest.fixture(scope="module")
def demo():
    return specdec.load(drafter="mtp", depth=2)


@pytest.fixture(autouse=True)
def always_steady(monkeypatch):
    """This machine may be busy with other tests."""
    monkeypatch.setattr("specdec.decoding.cycle_timing.STEADY", float("inf"))
    monkeypatch.setattr("specdec.decoding.cycle_timing.DOUBTED", float("inf"))


@pytest.mark.parametrize(("row", "sequences"), [(0.0, 16), (0.1, 10), (0.3, 6), (1.0, 4)])
def test_as_many_sequences_as_pay(folder, demo, row, sequences):
    """One more sequence than n pays while 1 / n of a pass without rows is 5 % of a pass of n + 1 rows."""
    table = CostTable(verify={1: 1.0, 8: 1.0 + 7 * row}, draft={0: 0.0}, commit=0.0)
    write_costs(costs_path(cost_identity(demo)), table, cost_identity(demo))
    assert sequences_that_pay(demo) == sequences


@pytest.mark.parametrize("by_rows", [False, True])
def test_every_number_of_rows_is_warmed_up_where_it_matters(demo, monkeypatch, by_rows):
    target, rows = demo.target, []
    decode = target.decode
    monkeypatch.setattr(target, "info", attrs.evolve(target.info, warms_by_rows=by_rows))
    monkeypatch.setattr(target, "decode", lambda state, tokens: rows.append(len(tokens)) or decode(state, tokens))
    warm_up(demo, range(4))
    assert set(rows) == ({1, 2, 3, 4} if by_rows else {2})


# --- the table --------------------------------------------------------------------------------------------------------


@given(
    first=seconds,
    slope=st.floats(0.0, 1.0),
    depths=st.sets(st.integers(1, 12), min_size=2),
    draft=seconds,
    at=st.integers(0, 15),
)
def test_a_line_is_read_off_exactly(first, slope, depths, draft, at):
    """Measured at any depths, costs that lie on a line are given back everywhere, beyond the last depth too."""
    step = slope * first  # a further row costs no more than a pass of its own
    table = CostTable(
        verify={1: first, **{depth + 1: first + step * depth for depth in depths}},
        draft={0: 0.0, **{depth: draft * depth for depth in depths}},
        commit=step,
    )
    assert table.cycle(at) == pytest.approx(first + step * at + draft * at + step, rel=1e-6)


@given(
    verify=st.dictionaries(st.integers(1, 16), seconds, min_size=1).map(lambda d: {1: 1.0, **d}),
    draft=st.dictionaries(st.integers(1, 16), seconds),
    commit=seconds,
    at=st.integers(0, 20),
)
def test_a_cycle_never_costs_less_than_nothing(verify, draft, commit, at):
    assert CostTable(verify=verify, draft={0: 0.0, **draft}, commit=commit).cycle(at) > 0.0


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 25, model 17)"),
        ("model name\t: Some ARM\n", "Some ARM"),
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch, cpuinfo, name):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cpuinfo)
    assert machine.processor.__wrapped__() == name


# --- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_prices_every_depth_and_changes_nothing(demo):
    before = demo.generate("def add", max_new_tokens=24, ignore_eos=True)
    table = measure_costs(demo, (0, 1, 2, 4), budget_s=float("inf"))
    assert sorted(table.verify) == [1, 2, 3, 5]
    assert sorted(table.draft) == [0, 1, 2, 4]
    assert 0.0 < table.verify[1] < 1.0
    assert table.draft[0] == 0.0
    assert table.draft[4] > table.draft[1] > 0.0
    assert demo.generate("def add", max_new_tokens=24, ignore_eos=True).tokens == before.tokens


def test_a_look_up_drafts_nothing_where_costs_are_measured():
    """The measured text never repeats."""
    lm = specdec.load("demo", drafter={"name": "ngram", "min_order": 4}, depth=1)
    assert measure_costs(lm, budget_s=float("inf")).draft == {0: 0.0}
    assert measure_costs(specdec.load("demo", depth=1)).drafter == "mtp"  # of the default chain


def test_a_budget_of_nothing_still_prices_plain_decoding_and_the_deepest_draft(demo):
    table = measure_costs(demo, budget_s=0.0)
    assert sorted(table.verify) == [1, 9]
    assert sorted(table.draft) == [0, 8]


@pytest.mark.parametrize("capacity", [1, 3, 4, 9])
def test_a_short_session_is_measured_or_refused_never_overrun(capacity):
    config = specdec.load_config(overrides=[f"target.capacity={capacity}"])
    lm = specdec.load(config=config, depth=2)
    if capacity < 4:
        with pytest.raises(UnsupportedError, match="costs cannot be measured"):
            measure_costs(lm)
        loaded = specdec.load(config=config)
        assert loaded.depth.spec.name == "fixed"
        assert any("costs cannot be measured" in notice for notice in loaded.notices)
    else:
        assert 1 in measure_costs(lm, repeats=1).verify


# --- files ------------------------------------------------------------------------------------------------------------

TABLE = CostTable(verify={1: 0.5, 4: 0.75}, draft={0: 0.0, 3: 0.125}, commit=0.03125)


@given(
    verify=st.dictionaries(st.integers(1, 64), seconds).map(lambda d: {1: 1.0, **d}),
    draft=st.dictionaries(st.integers(1, 64), seconds),
    drafter=st.sampled_from(["", "mtp", "ngram#2"]),
    commit=st.floats(0.0, 10.0),
)
def test_what_is_written_is_read_back_to_the_bit(tmp_path_factory, demo, verify, draft, drafter, commit):
    path = tmp_path_factory.mktemp("costs") / "new" / "table.json"
    table = CostTable(verify=verify, draft={0: 0.0, **draft}, drafter=drafter, commit=commit)
    identity = cost_identity(demo)
    write_costs(path, table, identity)
    assert read_costs(path) == table
    assert [entry.name for entry in path.parent.iterdir()] == ["table.json"]  # nothing half written stays


def test_everything_that_costs_depend_on_has_a_file_of_its_own(folder, demo):
    """A table of another installation is neither used nor replaced, and nothing is said about it."""
    ours = cost_identity(demo)
    others = [{**ours, name: "other"} for name in ours]
    assert len({costs_path(ours), *map(costs_path, others)}) == 1 + len(others)
    for other in others:
        write_costs(costs_path(other), TABLE, other)
    notices = []
    first = costs_of(demo, notices)
    assert first != TABLE
    assert costs_of(demo, notices) == first
    assert notices == []
    assert len(list(folder.iterdir())) == 1 + len(others)


def test_a_kept_table_that_is_much_too_slow_is_replaced_silently(folder, demo, monkeypatch):
    """Another process measured it while the machine was busy all the time, so that its repeats agreed."""
    monkeypatch.setattr("specdec.decoding.cycle_timing.DOUBTED", 2.0)
    monkeypatch.setattr("specdec.decoding.cycle_timing.plain_pass", lambda lm: 1.7e-3)
    identity = cost_identity(demo)
    for seconds, believed in ((3.3e-3, True), (63e-3, False)):
        kept = CostTable(verify={1: seconds, 2: seconds}, draft={0: 0.0}, commit=0.0)
        write_costs(costs_path(identity), kept, identity)
        notices = []
        assert (costs_of(demo, notices) == kept) == believed
        assert notices == []  # the machine's doing, not the user's: it would come again and again


BROKEN = [
    "",
    '{"format": 2}',
    '{"format": 1, "identity": {}, "verify": {"1": 1}, "draft": {"0": 0}, "drafter": "", "commit": 0}',
    *(
        f'{{"format": 2, "identity": {{}}, "verify": {verify}, "draft": {draft}, "drafter": "", "commit": 0}}'
        for verify, draft in (
            ('{"1": -1}', '{"0": 0}'),
            ('{"2": 1}', '{"0": 0}'),
            ('{"1": 1}', "{}"),
            ('{"1": 90000}', '{"0": 0}'),
            ('{"1": 1%s}' % ("0" * 5_000), '{"0": 0}'),
            ("[" * 50_000, '{"0": 0}'),
            ("{}" + " " * 2**20, '{"0": 0}'),
        )
    ),
    "\udcff",
]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_measured_again_and_said_so(folder, demo, content, monkeypatch):
    monkeypatch.setattr("specdec.decoding.cycle_timing.measure_costs", lambda lm: TABLE)
    path = costs_path(cost_identity(demo))
    folder.mkdir()
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    notices = []
    assert costs_of(demo, notices) == costs_of(demo, notices) == TABLE
    assert len(notices) == 1
    assert "is broken (" in notices[0] or "cannot be read: it has" in notices[0]
    assert len(notices[0]) < 500
    assert notices[0].endswith("measured again")


def test_a_folder_that_cannot_be_written_is_a_notice(tmp_path, demo, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("SPECDEC_COSTS", str(file / "costs"))  # root may write anywhere, but not below a file
    notices = []
    assert costs_of(demo, notices).verify[1] > 0.0
    assert [notice.partition(":")[0] for notice in notices][-1] == "the cost table cannot be kept"


# --- depth.name = "auto" ----------------------------------------------------------------------------------------------


def test_the_default_adapts_where_the_depth_cannot_change_the_output(folder):
    lm = specdec.load()
    assert lm.depth.spec.name == "adaptive"
    assert lm.notices == ()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"verifier": "typical"}, "with the verifier 'typical' the output depends on the depth"),
        ({}, "with numeric parity the output may depend on the depth"),
    ],
)
def test_the_default_is_fixed_where_the_output_depends_on_the_depth(folder, parts, said, monkeypatch):
    if not parts:
        monkeypatch.setattr("specdec.models.loading.probe_rows", lambda target: "made up")
    lm = specdec.load(**parts)
    assert (lm.depth.spec.name, lm.depth.config.depth) == ("fixed", 2)
    assert any("is a fixed depth of 2" in notice and said in notice for notice in lm.notices)
    assert set(lm.notices) <= set(lm.generate("def add", max_new_tokens=4).notices)
    assert not folder.exists()
    assert specdec.load(**parts, depth="adaptive").depth.spec.name == "adaptive"


def test_without_a_drafter_nothing_is_measured_and_the_result_says_why(folder):
    lm = specdec.load(drafter="none")
    assert lm.depth.spec.name == "fixed"
    assert lm.generate("x", max_new_tokens=3).stats.speculation()["reason"] == "drafter 'none' was chosen"
    assert not folder.exists()


def test_off_keeps_nothing(demo, monkeypatch):
    monkeypatch.setenv("SPECDEC_COSTS", "off")
    assert costs_folder() is None
    assert costs_of(demo, []).verify[1] > 0.0


# --- where they are kept ----------------------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("SPECDEC_CACHE_DIR", raising=False)
    monkeypatch.delenv("SPECDEC_COSTS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/specdec")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/specdec")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    assert costs_folder() == Path("/elsewhere/costs")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("SPECDEC_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UnsupportedError, match="HOME is not set") as caught:
        cache_folder()
    assert caught.value.facts["try"] == "SPECDEC_CACHE_DIR=FOLDER"
    monkeypatch.delenv("SPECDEC_COSTS", raising=False)
    assert costs_folder() is None
