"""Plugins that are wrong on purpose: one small class per clause. ``BROKEN`` tables say which clauses find each."""
