"""Pictures of rows: their files, and what the image processor of a model makes of them."""
