"""Checks values against declared types: what a file or a caller gives, strictly, with errors that name the place."""

from specdec.checking.arguments import checked, checked_fields
from specdec.checking.conversion import Before, Mismatch, Problem, convert, dotted, error_of, items_of, known_fields
from specdec.checking.validators import FieldError, between, each, one_of

__all__ = [
    "Before",
    "FieldError",
    "Mismatch",
    "Problem",
    "between",
    "checked",
    "checked_fields",
    "convert",
    "dotted",
    "each",
    "error_of",
    "items_of",
    "known_fields",
    "one_of",
]
