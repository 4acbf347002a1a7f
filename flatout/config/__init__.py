"""The settings of a run: the schema, reading a configuration, and the commented template."""
