"""The table of what the conformance kit took for each built-in plugin."""

from specdec.testing.checks import EFFORTS


def pytest_terminal_summary(terminalreporter):
    """Print the seconds that tests have noted as ``kit``, beside the budget."""
    reports = [one for status in ("passed", "failed") for one in terminalreporter.stats.get(status, ())]
    noted = [value for one in reports for key, value in one.user_properties if key == "kit"]
    if noted:
        terminalreporter.section("seconds of one core that the kit took")
    for name, effort, seconds in sorted(noted):
        terminalreporter.write_line(f"{seconds:6.1f} of {EFFORTS[effort].seconds:.0f} s  {effort:6}  {name}")
