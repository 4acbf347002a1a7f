"""The demo's own data set, tokenizer, model and checks."""
