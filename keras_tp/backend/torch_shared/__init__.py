"""What the two backends on torch share."""
