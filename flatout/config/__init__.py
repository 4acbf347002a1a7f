"""The settings of a run: schema, reading, the commented template."""
