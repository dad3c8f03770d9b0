import pathlib

from specdec.testing import Subject, as_subject, parametrize_checks

from specdec_suffix import SuffixConfig, SuffixDrafter, specdec_drafters

CORPUS = pathlib.Path(__file__).with_name("corpus.json")  # ids that every model of the kit has
WITH_CORPUS = SuffixConfig(corpus=str(CORPUS), min_match=1, max_match=4, factor=2.5, min_share=0.4)


@parametrize_checks(drafter=lambda env: SuffixDrafter(SuffixConfig(), env))
def test_contract(check):
    check()


@parametrize_checks(drafter=as_subject(Subject.DRAFTER, specdec_drafters()[0], WITH_CORPUS))
def test_contract_with_a_corpus(check):
    check()
