"""Operations with a plain reference and a fast implementation; independent of the rest of flatout."""
