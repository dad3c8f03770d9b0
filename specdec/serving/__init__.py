"""An OpenAI-compatible server for one machine and few users."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
