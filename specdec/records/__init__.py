"""Records kept on this machine between processes: cost tables and probe records."""
