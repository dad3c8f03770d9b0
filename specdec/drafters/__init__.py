"""Built-in drafters, one per file; they register through the same hooks as a third party's."""
