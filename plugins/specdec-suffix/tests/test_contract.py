from specdec.testing import parametrize_checks

from specdec_suffix import SuffixConfig, SuffixDrafter


@parametrize_checks(drafter=lambda env: SuffixDrafter(SuffixConfig(), env))
def test_contract(check):
    check()
