"""Drafters of trained heads conform to the contract, as strangers' plugins do: untrained heads over ``TableModel``."""

import pytest

from examples.first_refiner import specdec_drafters as example_drafters
from specdec.drafters.heads import drafter
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.testing import check_plugin

SPECS = {spec.name: spec for spec in (*specdec_drafters(), *example_drafters()) if spec.name != "head"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_heads_conform(name, monkeypatch):
    limits = {"IDLE_ROWS": 10, "WAITING_ROWS": 4, "FEED_ROWS": 3, "UNREAD": 2}  # reached by short texts too
    for limit, rows in limits.items():
        monkeypatch.setattr(drafter, limit, rows)
    check_plugin(SPECS[name], options={"model": "random"}, effort="sample").raise_for_failures()
