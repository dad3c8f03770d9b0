"""Trained draft heads: small networks that read a target's hidden states, in the layouts that are on the hub.

``layout.py`` finds out what a checkpoint is, ``eagle.py`` and ``dflash.py`` compute it, ``drafter.py`` drafts with it.
"""
