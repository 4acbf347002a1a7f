"""Operations with a plain truth and a fast form; they know nothing of the rest."""
