"""Checks values against declared types: what a file or a caller gives, strictly, with errors that name the place."""

from specdec.checking.conversion import (
    Before,
    FieldError,
    Mismatch,
    Problem,
    between,
    checked,
    checked_fields,
    convert,
    dotted,
    each,
    error_of,
    fields_of,
    items_of,
    known_fields,
    one_of,
)

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
    "fields_of",
    "items_of",
    "known_fields",
    "one_of",
]
