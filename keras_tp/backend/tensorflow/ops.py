"""Operations that DTensor cannot run as Keras writes them."""

TABLE = []
