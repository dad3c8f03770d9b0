"""Checks values against declared types: what a file or a caller gives, strictly, with errors that name the place."""

from specdec.checking.arguments import checked, checked_fields
from specdec.checking.conversion import Before, Mismatch, converter_for, items_of, known_fields
from specdec.checking.problems import CANNOT_CONVERT, Problem, dotted, problems_of
from specdec.checking.validators import FieldError, between, each, one_of

__all__ = [
    "Before",
    "CANNOT_CONVERT",
    "FieldError",
    "Mismatch",
    "Problem",
    "between",
    "checked",
    "checked_fields",
    "converter_for",
    "dotted",
    "each",
    "items_of",
    "known_fields",
    "one_of",
    "problems_of",
]
