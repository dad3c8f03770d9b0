"""Which drafter the environment names, and what is said when it names none."""

import pytest

from specdec.config import Choice
from specdec.errors import ConfigError
from specdec.hosting import chosen_drafter


@pytest.mark.parametrize(
    ("named", "choice"),
    [("suffix", Choice("suffix")), ('{ name = "suffix", min_match = 2 }', Choice("suffix", {"min_match": 2}))],
)
def test_a_name_or_a_table(named, choice):
    assert chosen_drafter(environment={"SPECDEC_DRAFTER": named}) == choice


@pytest.mark.parametrize("named", ["{", " ", '{"name": "ngram"}', "[1", '"suffix'])
def test_another_text_is_refused_with_the_variable(named):
    with pytest.raises(ConfigError, match="SPECDEC_DRAFTER is a name or a TOML table") as refused:
        chosen_drafter(environment={"SPECDEC_DRAFTER": named})
    assert "-s" not in str(refused.value).split()


@pytest.mark.parametrize("environment", [{}, {"SPECDEC_DRAFTER": "auto"}])
def test_no_drafter_is_named(environment):
    with pytest.raises(ConfigError, match="no drafter is named for this host"):
        chosen_drafter(environment=environment)
